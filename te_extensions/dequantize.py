"""NVFP4 -> floating point, exactly.

Every product of an E2M1 magnitude and an E4M3 scale has at most six significant bits, so it is exact in FP32 and in
BF16, and a power-of-two tensor scale only moves the exponent. Two paths give the same bits: on a CPU a 256 x 2 table
decodes both codes of a byte at once; on a GPU ``dequantize_triton`` shifts the codes' bits into place.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from te_extensions.weight import BLOCK_SIZE, NVFP4Weight

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
DTYPES = (torch.bfloat16, torch.float32, torch.float64)
# A BF16 holds every product exactly while its last bit, 2^-10 * tensor_scale, is at least the smallest BF16 (2^-133)
# and its largest value, 6 * 448 * tensor_scale, stays below 2^128.
BF16_EXPONENTS = (-123, 116)


@cache
def _byte_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[256, 2]: the values of the low and the high nibble of each byte."""
    values = torch.tensor(_E2M1, dtype=dtype)
    byte = torch.arange(256)
    return torch.stack((values[byte & 0xF], values[byte >> 4]), dim=1).to(device)


def foldable(tensor_scale: float) -> bool:
    """Whether multiplying ``tensor_scale`` into a BF16 matrix rounds nothing: a power of two of a sane size."""
    mantissa, exponent = math.frexp(tensor_scale)
    return mantissa == 0.5 and BF16_EXPONENTS[0] <= exponent - 1 <= BF16_EXPONENTS[1]


def _check_fold(tensor_scale: float, dtype: torch.dtype, name: str) -> None:
    if dtype == torch.bfloat16 and not foldable(tensor_scale):
        low, high = BF16_EXPONENTS
        raise ValueError(
            f"{name} = {tensor_scale} is not a power of two between 2^{low} and 2^{high}: folding it into a BF16 "
            "matrix rounds the weights; leave it out and scale the product"
        )


def _check_out(out: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if tuple(out.shape) != shape or out.dtype != dtype or out.device != device or not out.is_contiguous():
        raise ValueError(
            f"out is {tuple(out.shape)} {out.dtype} on {out.device}, strides {out.stride()}; "
            f"needed a contiguous {shape} {dtype} on {device}"
        )


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"dtype = {dtype} is not one of {', '.join(map(str, DTYPES))}")


def _table_dequantize(packed: Tensor, block_scale: Tensor, tensor_scale: float, out: Tensor) -> None:
    """Decode [N, K/2] codes and [N, K/16] scales into ``out`` [N, K] by table; any device."""
    rows, cols = out.shape
    table = _byte_table(out.dtype, packed.device)
    values = torch.index_select(table, 0, packed.reshape(-1).int()).view(rows, cols // BLOCK_SIZE, BLOCK_SIZE)
    scales = block_scale.to(out.dtype)
    if tensor_scale != 1.0:
        scales = scales * tensor_scale
    torch.mul(values, scales.unsqueeze(-1), out=out.view(values.shape))


def nvfp4_dequantize(
    weight: NVFP4Weight, dtype: torch.dtype, *, apply_tensor_scale: bool = True, out: Tensor | None = None
) -> Tensor:
    """The matrix that ``weight`` stands for, [N, K] in ``dtype`` (float32, bfloat16 or float64).

    Args:
        apply_tensor_scale: False leaves the tensor scale out, for callers that apply it as a GEMM alpha.
        out: contiguous [N, K] workspace of ``dtype`` to write into and return; every element is overwritten.

    On a GPU, bfloat16 and float32 run the Triton kernel; float64 is for references and takes the table there too.
    ``packed`` and ``block_scale`` may be slices of larger tensors along N or K, as tensor parallelism cuts them.

    Raises:
        ValueError: the tensor scale would be rounded into a BF16 matrix; ``dtype`` or ``out`` does not fit; a slice
            starts inside a 4-byte word or is not contiguous along K.
    """
    _check_dtype(dtype)
    tensor_scale = weight.tensor_scale if apply_tensor_scale else 1.0
    _check_fold(tensor_scale, dtype, "tensor_scale")
    if out is None:
        out = torch.empty(weight.shape, dtype=dtype, device=weight.packed.device)
    else:
        _check_out(out, weight.shape, dtype, weight.packed.device)
    if not weight.packed.is_cuda or dtype == torch.float64:
        _table_dequantize(weight.packed, weight.block_scale, tensor_scale, out)
        return out
    from te_extensions.dequantize_triton import launch_matrix

    with torch.cuda.device(weight.packed.device):
        launch_matrix(weight.packed, weight.block_scale, tensor_scale, out)
    return out


def _check_stack(packed: Tensor, block_scale: Tensor, tensor_scales: Tensor | None) -> tuple[int, int, int]:
    """(E, N, K) of a stack of packed matrices, or an error that says what does not fit."""
    if packed.ndim != 3 or packed.dtype != torch.uint8 or block_scale.dtype != torch.float8_e4m3fn:
        raise ValueError(
            f"packed must be uint8 [E, N, K/2] and block_scale float8_e4m3fn [E, N, K/16], got {packed.dtype} "
            f"{tuple(packed.shape)} and {block_scale.dtype} {tuple(block_scale.shape)}"
        )
    experts, rows, half = packed.shape
    if 2 * half % BLOCK_SIZE or tuple(block_scale.shape) != (experts, rows, 2 * half // BLOCK_SIZE):
        raise ValueError(
            f"block_scale {tuple(block_scale.shape)} does not fit packed {tuple(packed.shape)}: K = {2 * half} must be "
            f"a multiple of {BLOCK_SIZE} with one scale a block"
        )
    if tensor_scales is not None and (
        tuple(tensor_scales.shape) != (experts,)
        or tensor_scales.dtype != torch.float32
        or tensor_scales.device != packed.device
    ):
        raise ValueError(
            f"tensor_scales is {tuple(tensor_scales.shape)} {tensor_scales.dtype} on {tensor_scales.device}, "
            f"needed ({experts},) float32 on {packed.device}"
        )
    return experts, rows, 2 * half


def nvfp4_dequantize_stack(
    packed: Tensor,
    block_scale: Tensor,
    tensor_scales: Tensor | None,
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """Dequantise the matrices of E experts in one launch.

    Args:
        packed: uint8 [E, N, K/2], contiguous.
        block_scale: float8_e4m3fn [E, N, K/16], contiguous.
        tensor_scales: FP32 [E] on the same device, or None to leave them out (a grouped GEMM's alpha).
        dtype: bfloat16, float32 or float64.
        out: contiguous [E, N, K] workspace to write into and return.

    Returns:
        [E, N, K] in ``dtype``.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or (on a CPU) a scale cannot be folded into BF16 exactly. On a
            GPU the scales are not read back, which would stall it: the matrix of such an expert is all NaN instead.
    """
    _check_dtype(dtype)
    shape = _check_stack(packed, block_scale, tensor_scales)
    if not packed.is_contiguous() or not block_scale.is_contiguous():
        raise ValueError("packed and block_scale of a stack must be contiguous; slice experts, not rows or columns")
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=packed.device)
    else:
        _check_out(out, shape, dtype, packed.device)
    if not packed.is_cuda or dtype == torch.float64:
        scales = [1.0] * shape[0] if tensor_scales is None else tensor_scales.tolist()
        for expert, scale in enumerate(scales):
            _check_fold(scale, dtype, f"tensor_scales[{expert}]")
            _table_dequantize(packed[expert], block_scale[expert], scale, out[expert])
        return out
    from te_extensions.dequantize_triton import launch_stack

    with torch.cuda.device(packed.device):
        launch_stack(packed, block_scale, tensor_scales, out)
    return out
