"""NVFP4 -> BF16 or FP32 at the speed of memory, one pass, bit-exact.

A code is s|ee|m. Put its low three bits over the border between a BF16's exponent and mantissa (bits 6 to 8) and its
sign at bit 15, and the BF16 reads value * 2^-126, subnormal code included, because both formats keep a subnormal where
the exponent is zero. One multiplication by 2^126 is exact, one by the block scale is exact; 2^126 * scale would
overflow, so they stay two. An E4M3 byte becomes an FP32 the same way, off by 2^-120.

Memory decides the layout. A thread reads four bytes and writes the eight BF16 they hold as 16 contiguous bytes, so
loads and stores coalesce and no weight crosses threads. The hint on the load's pointers is what makes Triton choose
that: without it a thread would read 16 bytes, and the results would go through shared memory before the store.
"""

# Kernels are Triton's language in Python's clothes: their arguments have no Python types.
# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_extensions.weight import BLOCK_SIZE

# Blocks of 16 weights a program decodes, and its warps: 64 weights a thread. ``python -m benchmarks.kernels_memory
# --tiles`` measures the alternatives.
BLOCKS_PER_PROGRAM = 512
NUM_WARPS = 4


@triton.jit
def _e4m3_to_fp32(byte):
    """The exact value of E4M3 bytes given as int32; NaN stays NaN."""
    bits = ((byte & 0x7F) << 20) | ((byte & 0x80) << 24)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return tl.where((byte & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def _refuse_rounding(scale):
    """``scale``, or NaN where folding it into BF16 would round: see dequantize.BF16_EXPONENTS."""
    bits = scale.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 127
    exact = ((bits & 0x7FFFFF) == 0) & (exponent >= -123) & (exponent <= 116)
    return tl.where(exact, scale, float("nan"))


@triton.jit
def _times(a, b):
    """An exact product in a's dtype. LLVM narrows it to one BF16 multiplication, two at a time, on sm_90."""
    return (a.to(tl.float32) * b.to(tl.float32)).to(a.dtype)


@triton.jit(do_not_specialize=["matrix_blocks", "row_blocks"])
def _dequantize_kernel(
    packed,
    block_scale,
    out,
    tensor_scale,
    matrix_blocks,
    row_blocks,
    packed_stride,
    scale_stride,
    BLOCKS: tl.constexpr,
    STRIDED: tl.constexpr,
    SCALE_IN_MEMORY: tl.constexpr,
    FP32: tl.constexpr,
):
    """Program (i, e) decodes blocks i * BLOCKS .. of matrix e.

    Strides are in bytes and used only when STRIDED. ``tensor_scale`` is a number, or a pointer to one a matrix.
    """
    begin = tl.program_id(0) * BLOCKS
    block = tl.arange(0, BLOCKS)
    live = block < matrix_blocks - begin
    origin = tl.program_id(1).to(tl.int64) * matrix_blocks + begin
    if STRIDED:
        row = (begin + block) // row_blocks
        column = begin + block - row * row_blocks
        code_offset = row.to(tl.int64) * packed_stride + column * 8
        scale_offset = row.to(tl.int64) * scale_stride + column
    else:
        packed += origin * 8
        block_scale += origin
        code_offset = block * 8
        scale_offset = block
    # Four bytes a thread hold 8 weights, 16 bytes of BF16; two hold 4, 16 bytes of FP32.
    pointers = tl.multiple_of(packed + (code_offset[:, None] + tl.arange(0, 8)[None, :]), [1, 2 if FP32 else 4])
    byte = tl.load(pointers, mask=live[:, None], other=0, eviction_policy="evict_first").to(tl.int32)
    scale_byte = tl.load(block_scale + scale_offset, mask=live, other=0).to(tl.int32)
    factor = tensor_scale
    if SCALE_IN_MEMORY:
        factor = tl.load(tensor_scale + tl.program_id(1))
        if not FP32:
            factor = _refuse_rounding(factor)
    scale = (_e4m3_to_fp32(scale_byte) * factor)[:, None]
    if FP32:
        low = (((byte & 0x07) << 22) | ((byte & 0x08) << 28)).to(tl.float32, bitcast=True)
        high = (((byte & 0x70) << 18) | ((byte & 0x80) << 24)).to(tl.float32, bitcast=True)
        power = tl.full([], 8.507059173023462e37, tl.float32)
    else:
        # Both codes of a byte in one word, each in its half, so that the shifts serve both.
        spread = byte | (byte << 12)
        pair = ((spread & 0x00070007) << 6) | ((spread & 0x00080008) << 12)
        low = pair.to(tl.int16).to(tl.bfloat16, bitcast=True)
        high = (pair >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        power = tl.full([], 8.507059173023462e37, tl.float32).to(tl.bfloat16)
        scale = scale.to(tl.bfloat16)
    values = tl.interleave(_times(_times(low, power), scale), _times(_times(high, power), scale))
    target = out + origin * 16 + (block[:, None] * 16 + tl.arange(0, 16)[None, :])
    tl.store(target, values, mask=live[:, None])


def _check_pointers(packed: Tensor, block_scale: Tensor) -> None:
    """Refuse what the kernel would read wrongly: codes not contiguous along K, or not aligned to a word."""
    if packed.stride(-1) != 1 or block_scale.stride(-1) != 1:
        raise ValueError(
            f"packed has strides {packed.stride()}, block_scale {block_scale.stride()}: both must be contiguous along K"
        )
    if packed.data_ptr() % 4 or packed.stride(-2) % 4:
        raise ValueError(
            f"packed starts at byte {packed.data_ptr() % 4} of a 4-byte word with a row stride of {packed.stride(-2)} "
            f"bytes; both must be multiples of 4: cut K at multiples of {BLOCK_SIZE}, or make the slice contiguous"
        )


def _launch(
    matrices: int, packed: Tensor, block_scale: Tensor, tensor_scale: Any, out: Tensor, tile: int, warps: int
) -> None:
    rows, half = packed.shape[-2:]
    row_blocks = 2 * half // BLOCK_SIZE
    matrix_blocks = rows * row_blocks
    if out.numel() == 0:
        return
    if matrix_blocks + tile > 2**31:
        raise ValueError(
            f"a matrix of {rows} x {2 * half} has {matrix_blocks} blocks; the kernel counts them in 32 bits"
        )
    strided = not (packed.is_contiguous() and block_scale.is_contiguous())
    _dequantize_kernel[(triton.cdiv(matrix_blocks, tile), matrices)](
        packed,
        block_scale.view(torch.uint8),
        out,
        tensor_scale,
        matrix_blocks,
        row_blocks,
        packed.stride(-2),
        block_scale.stride(-2),
        BLOCKS=tile,
        STRIDED=strided,
        SCALE_IN_MEMORY=isinstance(tensor_scale, Tensor),
        FP32=out.dtype == torch.float32,
        num_warps=warps,
    )


def launch_matrix(
    packed: Tensor,
    block_scale: Tensor,
    tensor_scale: float,
    out: Tensor,
    *,
    tile: int = BLOCKS_PER_PROGRAM,
    warps: int = NUM_WARPS,
) -> None:
    """Decode one matrix into ``out``; arguments as checked by ``nvfp4_dequantize``.

    Args:
        packed: uint8 [N, K/2] and block_scale: float8_e4m3fn [N, K/16], rows any distance apart.
        out: contiguous BF16 or FP32 [N, K].
        tile: blocks of 16 weights a program, a power of two; warps: of a program.
    """
    _check_pointers(packed, block_scale)
    _launch(1, packed, block_scale, float(tensor_scale), out, tile, warps)


def launch_stack(packed: Tensor, block_scale: Tensor, tensor_scales: Tensor | None, out: Tensor) -> None:
    """Decode E matrices into ``out``; arguments as checked by ``nvfp4_dequantize_stack``."""
    _check_pointers(packed, block_scale)
    scale = 1.0 if tensor_scales is None else tensor_scales
    _launch(packed.shape[0], packed, block_scale, scale, out, BLOCKS_PER_PROGRAM, NUM_WARPS)
