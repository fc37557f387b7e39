"""Packed matrices for tests of the kernels, and bitwise comparison."""

from __future__ import annotations

import torch
from torch import Tensor

from te_extensions.weight import NVFP4Weight

_BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    """Equal dtype, shape and bits: tells -0.0 from 0.0, which torch.equal does not."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    bits = _BITS[found.dtype]
    wrong = found.contiguous().view(bits) != expected.contiguous().view(bits)
    first = wrong.nonzero()[:4].tolist()
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} differ, first at {first}: "
        f"{found[wrong][:4].tolist()} instead of {expected[wrong][:4].tolist()}"
    )


def every_code_and_scale(tensor_scale: float = 1.0, device: str = "cpu") -> NVFP4Weight:
    """[254, 512]: every byte of codes under every E4M3 that is a number: zeros, subnormals, negative ones too."""
    byte = torch.arange(256, dtype=torch.uint8)
    scales = byte[(byte & 0x7F) != 0x7F]
    packed = byte.repeat(len(scales), 1)
    block_scale = scales[:, None].expand(-1, 32).contiguous().view(torch.float8_e4m3fn)
    return NVFP4Weight(packed.to(device), block_scale.to(device), tensor_scale)


def random_codes(rows: int, cols: int, seed: int, device: str = "cpu", tensor_scale: float = 0.125) -> NVFP4Weight:
    """Random codes, and random finite block scales of either sign."""
    generator = torch.Generator(device).manual_seed(seed)
    packed = torch.randint(0, 256, (rows, cols // 2), dtype=torch.uint8, device=device, generator=generator)
    magnitude = torch.randint(0, 0x7F, (rows, cols // 16), dtype=torch.uint8, device=device, generator=generator)
    sign = torch.randint(0, 2, (rows, cols // 16), dtype=torch.uint8, device=device, generator=generator)
    return NVFP4Weight(packed, (magnitude | (sign << 7)).view(torch.float8_e4m3fn), tensor_scale)
