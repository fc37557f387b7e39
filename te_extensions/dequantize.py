"""NVFP4 -> floating point, exactly.

The CPU path looks up both codes of a byte at once in a 256 x 2 table and multiplies by the block scale. Every product
of an E2M1 magnitude and an E4M3 scale has at most six significant bits, so it is exact in FP32 and in BF16.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from te_extensions.weight import BLOCK_SIZE, NVFP4Weight

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@cache
def _byte_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[256, 2]: the values of the low and the high nibble of each byte."""
    values = torch.tensor(_E2M1, dtype=dtype)
    byte = torch.arange(256)
    return torch.stack((values[byte & 0xF], values[byte >> 4]), dim=1).to(device)


def nvfp4_dequantize(weight: NVFP4Weight, dtype: torch.dtype, *, apply_tensor_scale: bool = True) -> Tensor:
    """The matrix that ``weight`` stands for, [N, K] in ``dtype`` (float32, bfloat16 or float64).

    Args:
        apply_tensor_scale: False leaves the tensor scale out, for callers that apply it as a GEMM alpha.

    Raises:
        ValueError: the tensor scale is not a power of two and would be rounded into a BF16 matrix.
    """
    rows, cols = weight.shape
    scale_in = weight.tensor_scale if apply_tensor_scale else 1.0
    if apply_tensor_scale and dtype == torch.bfloat16 and not weight.power_of_two:
        raise ValueError(
            f"tensor_scale = {weight.tensor_scale} is not a power of two: folding it into a BF16 matrix "
            "rounds the weights; pass apply_tensor_scale=False and scale the product"
        )
    table = _byte_table(dtype, weight.packed.device)
    values = torch.index_select(table, 0, weight.packed.reshape(-1).int()).view(rows, cols // BLOCK_SIZE, BLOCK_SIZE)
    scales = weight.block_scale.to(dtype)
    if scale_in != 1.0:
        scales = scales * scale_in
    return (values * scales.unsqueeze(-1)).view(rows, cols)
