"""y = x W^T with W frozen in NVFP4.

The base never learns, so its backward is one more product, dx = dy W, and needs neither the input nor a weight
gradient. What is kept for it is a reference to the packed bytes: W is decoded again when it is needed. ``dispatch``
says how the product is computed, ``ops`` computes it.

A caller that can afford the memory (a small model on a CPU, where decoding every token's weights would dominate) passes
the decoded matrix as ``dequantized``, and nothing else changes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from te_extensions.dequantize import nvfp4_dequantize
from te_extensions.ops import LINEAR, LINEAR_UPDATE, scaled_mm, shaped
from te_extensions.weight import NVFP4Weight


def rows_linear(x: Tensor, matrix: Tensor) -> Tensor:
    """x W^T with the leading dimensions of ``x`` flattened to rows: [..., K] -> [..., N].

    torch sends a [1, B, K] BF16 product to a batched kernel that is four times slower on a CPU than the plain one.
    """
    return torch.mm(x.reshape(-1, x.shape[-1]), matrix.t()).view(*x.shape[:-1], matrix.shape[0])


def nvfp4_materialize(weight: NVFP4Weight, dtype: torch.dtype) -> Tensor:
    """The [N, K] matrix to pass as ``dequantized``: with the tensor scale only where folding it is exact."""
    return nvfp4_dequantize(weight, dtype, apply_tensor_scale=weight.power_of_two)


def _resident_rows(x: Tensor, matrix: Tensor, alpha: float) -> Tensor:
    y = scaled_mm(x.reshape(-1, x.shape[-1]), matrix.t(), alpha)
    return shaped(y, (*x.shape[:-1], matrix.shape[0]))


class _ResidentLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor, alpha: float) -> Tensor:
        ctx.matrix, ctx.alpha = matrix, alpha
        return _resident_rows(x, matrix, alpha)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, None, None]:
        grad_x = scaled_mm(grad_y.reshape(-1, grad_y.shape[-1]), ctx.matrix, ctx.alpha)
        return shaped(grad_x, (*grad_y.shape[:-1], ctx.matrix.shape[1])), None, None


def check_features(x: Tensor, weight: NVFP4Weight) -> None:
    """Refuse an x that does not fit.

    Raises:
        ValueError: x's last dimension is not K.
    """
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x has {x.shape[-1]} features, the weight has K = {weight.shape[1]}")


def nvfp4_linear(x: Tensor, weight: NVFP4Weight, *, dequantized: Tensor | None = None, path: str = "auto") -> Tensor:
    """Frozen NVFP4 linear, differentiable once and in ``x`` only.

    Args:
        x: [..., K], float32 or bfloat16.
        weight: the packed matrix, N x K.
        dequantized: result of ``nvfp4_materialize`` in x's dtype, or None to decode as ``path`` says.
        path: "auto", or a name of ``dispatch.PATHS``.

    Returns:
        [..., N] in x's dtype.

    Raises:
        ValueError: K differs, ``dequantized`` has another shape or dtype, or ``path`` is unknown or cannot compute it.
        RuntimeError: backward: the packed tensors were written to meanwhile, or a second derivative is asked for.
    """
    check_features(x, weight)
    if dequantized is None:
        return LINEAR(x, weight.packed, weight.block_scale, weight.tensor_scale, path)
    if tuple(dequantized.shape) != weight.shape or dequantized.dtype != x.dtype:
        raise ValueError(
            f"dequantized is {tuple(dequantized.shape)} {dequantized.dtype}, needed {weight.shape} {x.dtype}"
        )
    alpha = 1.0 if weight.power_of_two else weight.tensor_scale
    if x.requires_grad and torch.is_grad_enabled():
        result: Tensor = _ResidentLinear.apply(x, dequantized, alpha)
        return result
    return _resident_rows(x, dequantized, alpha)


def nvfp4_linear_update(x: Tensor, weight: NVFP4Weight, u: Tensor, b: Tensor, *, path: str = "auto") -> Tensor:
    """x W^T + u b^T, rounded together, differentiable in x, u and b.

    For callers that make u themselves: under tensor parallelism u = s A x is gathered or reduced between A and B.

    Args:
        x: [..., K], float32 or bfloat16.
        u: [..., R], leading dimensions as x, scale included.
        b: [N, R].
        path: as in ``nvfp4_linear``.

    Returns:
        [..., N].

    Raises:
        ValueError: shapes or dtypes do not fit, or as ``nvfp4_linear``.
    """
    check_features(x, weight)
    rank = u.shape[-1]
    if u.shape[:-1] != x.shape[:-1] or tuple(b.shape) != (weight.shape[0], rank):
        raise ValueError(
            f"u {tuple(u.shape)} and b {tuple(b.shape)} do not fit x {tuple(x.shape)} and N = {weight.shape[0]}: "
            "needed u [..., R] with x's leading dimensions and b [N, R]"
        )
    if not x.dtype == u.dtype == b.dtype:
        raise ValueError(f"x is {x.dtype}, u is {u.dtype}, b is {b.dtype}: one dtype is needed")
    return LINEAR_UPDATE(x, u, b, weight.packed, weight.block_scale, weight.tensor_scale, path)
