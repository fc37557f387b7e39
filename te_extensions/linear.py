"""y = x W^T (+ b) with W frozen in NVFP4.

The base never learns, so its backward is one more product, dx = dy W, and needs neither the input nor a weight
gradient. What is kept for it is a reference to the packed bytes: W is decoded again when it is needed. A caller that
can afford the memory (a small model on a CPU, where decoding every token's weights would dominate) passes the decoded
matrix as ``dequantized``, and nothing else changes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from te_extensions.dequantize import nvfp4_dequantize
from te_extensions.weight import NVFP4Weight


def _matrix_and_alpha(weight: NVFP4Weight, dtype: torch.dtype, dequantized: Tensor | None) -> tuple[Tensor, float]:
    """The [N, K] matrix in ``dtype`` and the factor that its products still need."""
    fold = weight.power_of_two
    alpha = 1.0 if fold else weight.tensor_scale
    if dequantized is not None:
        return dequantized, alpha
    return nvfp4_dequantize(weight, dtype, apply_tensor_scale=fold), alpha


def rows_linear(x: Tensor, matrix: Tensor) -> Tensor:
    """x W^T with the leading dimensions of ``x`` flattened to rows: [..., K] -> [..., N].

    torch sends a [1, B, K] BF16 product to a batched kernel that is four times slower on a CPU than the plain one.
    """
    return torch.mm(x.reshape(-1, x.shape[-1]), matrix.t()).view(*x.shape[:-1], matrix.shape[0])


def nvfp4_materialize(weight: NVFP4Weight, dtype: torch.dtype) -> Tensor:
    """The [N, K] matrix to pass as ``dequantized``: with the tensor scale only where folding it is exact."""
    return nvfp4_dequantize(weight, dtype, apply_tensor_scale=weight.power_of_two)


class _NVFP4Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: NVFP4Weight, dequantized: Tensor | None) -> Tensor:
        ctx.weight, ctx.dequantized = weight, dequantized
        matrix, alpha = _matrix_and_alpha(weight, x.dtype, dequantized)
        y = rows_linear(x, matrix)
        return y if alpha == 1.0 else y * alpha

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, None, None]:
        matrix, alpha = _matrix_and_alpha(ctx.weight, grad_y.dtype, ctx.dequantized)
        grad_x = (grad_y.reshape(-1, grad_y.shape[-1]) @ matrix).view(*grad_y.shape[:-1], matrix.shape[1])
        return (grad_x if alpha == 1.0 else grad_x * alpha), None, None


def nvfp4_linear(x: Tensor, weight: NVFP4Weight, *, dequantized: Tensor | None = None) -> Tensor:
    """Frozen NVFP4 linear, differentiable in ``x`` only.

    Args:
        x: [..., K], float32 or bfloat16.
        weight: the packed matrix, N x K.
        dequantized: result of ``nvfp4_materialize`` in x's dtype, or None to decode on the fly.

    Returns:
        [..., N] in x's dtype.

    Raises:
        ValueError: K differs, or ``dequantized`` has another shape or dtype.
    """
    rows, cols = weight.shape
    if x.shape[-1] != cols:
        raise ValueError(f"x has {x.shape[-1]} features, the weight has K = {cols}")
    if dequantized is not None and (tuple(dequantized.shape) != (rows, cols) or dequantized.dtype != x.dtype):
        raise ValueError(
            f"dequantized is {tuple(dequantized.shape)} {dequantized.dtype}, needed {(rows, cols)} {x.dtype}"
        )
    if x.requires_grad and torch.is_grad_enabled():
        result: Tensor = _NVFP4Linear.apply(x, weight, dequantized)
        return result
    matrix, alpha = _matrix_and_alpha(weight, x.dtype, dequantized)
    y = rows_linear(x, matrix)
    return y if alpha == 1.0 else y * alpha
