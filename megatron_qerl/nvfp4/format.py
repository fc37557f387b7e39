"""NVFP4 as arithmetic: the slow, clear reference that every kernel is compared with.

A weight is ``e2m1 * block_scale * tensor_scale``. The four-bit E2M1 code is ``sign | exponent (2) | mantissa (1)`` and
codes 0..7 mean 0, 0.5, 1, 1.5, 2, 3, 4, 6. Sixteen neighbours along K share one FP8 E4M3 block scale, and a tensor
has one FP32 scale. Two codes fill a byte, the even k in the low nibble: 0.5625 byte a weight with the scales.

Two choices make the same bytes mean the same matrix in every engine. The tensor scale is a power of two, so that
``e2m1 * block_scale`` (6 significant bits at most) survives the multiplication in BF16 unrounded. And no block scale
is below 2^-6, the smallest normal E4M3 number, because some kernels read subnormal scales as zero.

Shapes: N output features, K input features, K a multiple of 16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

BLOCK = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
MIN_BLOCK_SCALE = 2.0**-6
TENSOR_SCALE_DIVISOR = E2M1_MAX * E4M3_MAX  # 2688: the largest magnitude at tensor scale 1
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SIGN = 8
_SMALLEST_FP32_EXPONENT = -126


@dataclass(frozen=True)
class PackedWeight:
    """One quantised matrix [N, K], or a slice of one.

    Attributes:
        packed: uint8 [N, K/2], low nibble = even k.
        block_scale: float8_e4m3fn [N, K/16], row-major, not swizzled.
        tensor_scale: float32, zero-dimensional.
    """

    packed: Tensor
    block_scale: Tensor
    tensor_scale: Tensor

    def __post_init__(self) -> None:
        assert self.packed.dtype == torch.uint8, self.packed.dtype
        assert self.block_scale.dtype == torch.float8_e4m3fn, self.block_scale.dtype
        assert self.tensor_scale.dtype == torch.float32, self.tensor_scale.dtype
        assert self.tensor_scale.dim() == 0, self.tensor_scale.shape
        n, k = self.shape
        assert self.block_scale.shape == (n, k // BLOCK), (self.packed.shape, self.block_scale.shape)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of the matrix that the codes stand for."""
        n, half_k = self.packed.shape
        return n, 2 * half_k

    @property
    def size_bytes(self) -> int:
        return self.packed.numel() + self.block_scale.numel() + self.tensor_scale.element_size()

    def decode(self, dtype: torch.dtype) -> Tensor:
        """The matrix [N, K], rounded once to ``dtype``."""
        return decode(self.packed, self.block_scale, self.tensor_scale, dtype)


def encode(values: Tensor) -> Tensor:
    """E2M1 codes of ``values``, rounded to nearest and on a tie to the even code.

    Magnitudes above 6 become 6. Zero and negative zero get code 0; a negative number that rounds to zero keeps its
    sign (code 8), as ModelOpt writes it.

    Args:
        values: real numbers already divided by their scales, any shape, finite.
    Returns:
        uint8 codes 0..15 of the same shape.
    """
    midpoints = torch.tensor([(a + b) / 2 for a, b in pairwise(MAGNITUDES)], dtype=values.dtype, device=values.device)
    magnitude = values.abs().contiguous()
    # On a tie the two searches disagree by one, and exactly one of the two codes is even.
    below = torch.bucketize(magnitude, midpoints, right=False)
    above = torch.bucketize(magnitude, midpoints, right=True)
    code = torch.where(below % 2 == 0, below, above).to(torch.uint8)
    return code + _SIGN * (values < 0).to(torch.uint8)


def code_values(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The number that each E2M1 code stands for; exact in every float dtype."""
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=dtype, device=codes.device)
    return table[codes.long()]


def pack(codes: Tensor) -> Tensor:
    """Codes [N, K] -> bytes [N, K/2]; the even k goes into the low nibble."""
    assert codes.dtype == torch.uint8, codes.dtype
    assert codes.shape[-1] % 2 == 0, codes.shape
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Bytes [N, K/2] -> codes [N, K]; the inverse of :func:`pack`."""
    assert packed.dtype == torch.uint8, packed.dtype
    return torch.stack((packed & 0x0F, packed >> 4), dim=-1).flatten(-2)


def decode(packed: Tensor, block_scale: Tensor, tensor_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix [N, K] that a quantised tensor stands for.

    The product of 2, 4 and 24 significant bits is exact in float64, so the only rounding is the last step to ``dtype``.

    Args:
        packed: uint8 [N, K/2].
        block_scale: float8_e4m3fn [N, K/16].
        tensor_scale: float32 scalar.
        dtype: dtype of the result.
    """
    elements = code_values(unpack(packed), torch.float64)
    n, k = elements.shape
    blocks = elements.view(n, k // BLOCK, BLOCK) * block_scale.to(torch.float64).unsqueeze(-1)
    return (blocks * tensor_scale.to(torch.float64)).view(n, k).to(dtype)


def power_of_two_tensor_scale(amax: float) -> float:
    """2^ceil(log2(amax / 2688)): the smallest power of two at which no block scale exceeds 448.

    An all-zero tensor gets 1. The exponent stops at -126, so that the scale is a normal FP32 number.

    Args:
        amax: largest magnitude of the tensor, or of all tensors of a fused group.
    """
    assert math.isfinite(amax), amax
    assert amax >= 0.0, amax
    if amax == 0.0:
        return 1.0
    fraction, exponent = math.frexp(amax / TENSOR_SCALE_DIVISOR)  # ratio = fraction * 2^exponent, fraction in [1/2, 1)
    if fraction == 0.5:
        exponent -= 1
    return math.ldexp(1.0, max(exponent, _SMALLEST_FP32_EXPONENT))


def is_power_of_two(scale: float) -> bool:
    return scale > 0.0 and math.frexp(scale)[0] == 0.5


def block_scales_of(block_amax: Tensor, tensor_scale: float) -> Tensor:
    """Block scales float8_e4m3fn: amax of the block over 6 * tensor_scale, kept within [2^-6, 448].

    A block of zeros gets 1, as ModelOpt writes it. A block whose own scale would be below 2^-6 gets 2^-6: its values
    then land on a coarser grid, at most half of 0.5 * 2^-6 * tensor_scale away.

    Args:
        block_amax: float32, largest magnitude of each block, any shape.
    """
    scale = (block_amax / (E2M1_MAX * tensor_scale)).clamp(MIN_BLOCK_SCALE, E4M3_MAX)
    return torch.where(block_amax == 0, torch.ones_like(scale), scale).to(torch.float8_e4m3fn)


def quantize_blocks(weight: Tensor, tensor_scale: float) -> PackedWeight:
    """Quantise a matrix [N, K] at a given tensor scale, in FP32 arithmetic.

    Args:
        weight: float tensor [N, K], finite, K a multiple of 16.
        tensor_scale: what :func:`power_of_two_tensor_scale` gives for the tensor or its fused group.
    """
    n, k = weight.shape
    assert k % BLOCK == 0, weight.shape
    blocks = weight.float().reshape(n, k // BLOCK, BLOCK)
    scale = block_scales_of(blocks.abs().amax(dim=-1), tensor_scale)
    steps = blocks / (scale.float() * tensor_scale).unsqueeze(-1)
    return PackedWeight(
        packed=pack(encode(steps.view(n, k))),
        block_scale=scale,
        tensor_scale=torch.tensor(tensor_scale, dtype=torch.float32, device=weight.device),
    )
