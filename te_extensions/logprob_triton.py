"""One pass over a chunk of logits for the softmax's statistics, one for its gradient; no temporary the size of a chunk.

The forward pass is the online softmax of Milakov and Gimelshein (arXiv:1805.02867) with one more sum for the entropy.
Every lane of a program keeps a maximum m of its own with s = sum exp(x - m) and w = sum exp(x - m) (x - m). When m
grows to m', the sums move with it: s' = f s and w' = f (w + s (m - m')), f = exp(m - m'). Lanes are joined by the same
rule.
"""

# Kernels are Triton's language in Python's clothes: their arguments have no Python types.
# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_STATISTICS_BLOCK, _STATISTICS_WARPS = 4096, 8
_GRADIENT_BLOCK, _GRADIENT_WARPS = 2048, 4
# Where a lane's maximum starts. Finite, so that differences of maxima are numbers; no logit is as small.
_LOWEST = tl.constexpr(-1.0e30)


@triton.jit(do_not_specialize=["rows", "real"])
def _statistics_kernel(
    logits, column, statistics, row_stride, width, real, rows, temperature, SCALED: tl.constexpr, BLOCK: tl.constexpr
):
    """statistics [4, rows]: maximum, s, w, logit at ``column``; program r does row r."""
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * row_stride
    lane = tl.arange(0, BLOCK)
    m = tl.full([BLOCK], _LOWEST, tl.float32)
    s = tl.zeros([BLOCK], tl.float32)
    w = tl.zeros([BLOCK], tl.float32)
    for first in range(0, real, BLOCK):
        # Padding is read and dropped: only a mask at a multiple of 16, as the width is, leaves 16-byte loads whole.
        x = tl.load(base + first + lane, mask=first + lane < width, other=0.0, eviction_policy="evict_first")
        inside = first + lane < real
        if SCALED:
            x = tl.div_rn(x, temperature)
        x = tl.where(inside, x, m)
        grown = tl.maximum(m, x)
        fall = m - grown
        factor = tl.exp(fall)
        below = x - grown
        e = tl.where(inside, tl.exp(below), 0.0)
        w = factor * (w + s * fall) + e * below
        s = factor * s + e
        m = grown
    peak = tl.max(m, axis=0)
    fall = m - peak
    factor = tl.exp(fall)
    out = statistics + row
    tl.store(out, peak)
    tl.store(out + rows, tl.sum(factor * s, axis=0))
    tl.store(out + 2 * rows, tl.sum(factor * (w + s * fall), axis=0))
    where = tl.load(column + row)
    picked = tl.load(base + where, mask=(where >= 0) & (where < real), other=0.0)
    if SCALED:
        picked = tl.div_rn(picked, temperature)
    tl.store(out + 3 * rows, picked)


@triton.jit(do_not_specialize=["real"])
def _gradient_kernel(
    logits,
    column,
    lse,
    grad,
    out,
    row_stride,
    out_stride,
    real,
    width,
    temperature,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = (onehot(column) - softmax) * grad / temperature; zero in the padding columns. ``out`` may be ``logits``."""
    row = tl.program_id(0)
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < width
    x = tl.load(logits + row.to(tl.int64) * row_stride + offset, mask=inside, other=0.0, eviction_policy="evict_first")
    factor = tl.load(grad + row)
    if SCALED:
        x = tl.div_rn(x, temperature)
        factor = tl.div_rn(factor, temperature)
    slope = tl.where(offset == tl.load(column + row), 1.0, 0.0) - tl.exp(x - tl.load(lse + row))
    slope = tl.where(offset < real, slope * factor, 0.0)
    tl.store(out + row.to(tl.int64) * out_stride + offset, slope.to(out.dtype.element_ty), mask=inside)


def launch_statistics(logits: Tensor, column: Tensor, real: int, temperature: float) -> Tensor:
    """Softmax statistics of each row of logits / temperature, FP32 [4, n]: see ``logprob.row_statistics``.

    Args:
        logits: FP32 [n, V], contiguous along V; not changed.
        column: int64 [n], contiguous; -1 picks nothing.
        real: columns from here on are padding and count for nothing.
    """
    rows = logits.shape[0]
    statistics = torch.empty((4, rows), dtype=torch.float32, device=logits.device)
    if rows:
        _statistics_kernel[(rows,)](
            logits,
            column,
            statistics,
            logits.stride(0),
            logits.shape[1],
            real,
            rows,
            temperature,
            SCALED=temperature != 1.0,
            BLOCK=_STATISTICS_BLOCK,
            num_warps=_STATISTICS_WARPS,
        )
    return statistics


def launch_gradient(
    logits: Tensor, column: Tensor, lse: Tensor, grad: Tensor, real: int, temperature: float, dtype: torch.dtype
) -> Tensor:
    """Gradient of the picked log-probability with respect to the raw logits, [n, V] in ``dtype``.

    FP32 is written over ``logits``; another dtype gets a tensor of its own, and ``logits`` is not changed.

    Args:
        logits: FP32 [n, V], contiguous along V.
        column: int64 [n]; lse: FP32 [n] of logits / temperature; grad: FP32 [n]; all contiguous.
    """
    rows, width = logits.shape
    out = logits if dtype == torch.float32 else torch.empty((rows, width), dtype=dtype, device=logits.device)
    if rows:
        _gradient_kernel[(rows, triton.cdiv(width, _GRADIENT_BLOCK))](
            logits,
            column,
            lse,
            grad,
            out,
            logits.stride(0),
            out.stride(0),
            real,
            width,
            temperature,
            SCALED=temperature != 1.0,
            BLOCK=_GRADIENT_BLOCK,
            num_warps=_GRADIENT_WARPS,
        )
    return out
