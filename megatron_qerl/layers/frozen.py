"""The frozen matrix inside a linear layer: NVFP4 bytes verbatim, or a plain dense one.

Neither is an ``nn.Parameter``: the base never learns, is never reduced across ranks, and is not part of a training
checkpoint (its hash is). Both keep for backward only a reference to themselves, never an activation, and both take the
adapter's low-rank term into the product, so that y is written once and rounded once.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_qerl.layers.kernels import (
    NVFP4Weight,
    nvfp4_input_gradient,
    nvfp4_linear,
    nvfp4_linear_update,
    nvfp4_materialize,
)

Update = tuple[Tensor, Tensor]
"""A low-rank term (u, b): u [..., R] beside the input, b [N, R]; the product gains u b^T."""


class FrozenWeight(Protocol):
    """What a linear layer needs of its base matrix."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) on this rank."""
        ...

    @property
    def packed_bytes(self) -> int:
        """Bytes of the stored form."""
        ...

    @property
    def cache_bytes(self) -> int:
        """Bytes of a resident dequantised copy, zero if there is none."""
        ...

    def multiply(self, x: Tensor, update: Update | None = None) -> Tensor:
        """x W^T (+ u b^T), [..., K] -> [..., N], differentiable in x, u and b."""
        ...

    def input_gradient(self, grad: Tensor, update: Update | None = None) -> Tensor:
        """grad W (+ v a), [..., N] -> [..., K], with v [..., R] and a [R, K]; for backward functions: not recorded."""
        ...

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """The [N, K] matrix the weight stands for, for export and for tests."""
        ...


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _scaled_product(left: Tensor, right: Tensor, alpha: float, onto: Tensor | None) -> Tensor:
    """alpha * (left right) (+ onto, which is overwritten)."""
    if onto is not None:
        return onto.addmm_(left, right, alpha=alpha)
    product = torch.mm(left, right)
    return product if alpha == 1.0 else product.mul_(alpha)


def _forward_rows(x: Tensor, matrix: Tensor, alpha: float, update: Update | None) -> Tensor:
    # The small product first: the large one then accumulates onto it and y is rounded once at full size.
    onto = None if update is None else torch.mm(_rows(update[0]), update[1].t())
    return _scaled_product(_rows(x), matrix.t(), alpha, onto).view(*x.shape[:-1], matrix.shape[0])


def _backward_rows(grad: Tensor, matrix: Tensor, alpha: float, update: Update | None) -> Tensor:
    onto = None if update is None else torch.mm(_rows(update[0]), update[1])
    return _scaled_product(_rows(grad), matrix, alpha, onto).view(*grad.shape[:-1], matrix.shape[1])


class _DenseProduct(torch.autograd.Function):
    """x W^T (+ u b^T) through a matrix that is there; saves u and b, never x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, u: Tensor | None, b: Tensor | None, matrix: Tensor, alpha: float) -> Tensor:
        ctx.matrix, ctx.alpha = matrix, alpha
        ctx.save_for_backward(u, b)
        return _forward_rows(x, matrix, alpha, None if u is None or b is None else (u, b))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        u, b = ctx.saved_tensors
        need_x, need_u, need_b, *_ = ctx.needs_input_grad
        grad_x = _backward_rows(grad, ctx.matrix, ctx.alpha, None) if need_x else None
        grad_u = torch.mm(_rows(grad), b).view(*grad.shape[:-1], b.shape[1]) if need_u else None
        grad_b = torch.mm(_rows(grad).t(), _rows(u)) if need_b else None
        return grad_x, grad_u, grad_b, None, None


def _dense_product(x: Tensor, matrix: Tensor, alpha: float, update: Update | None) -> Tensor:
    u, b = (None, None) if update is None else update
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, u, b)):
        result: Tensor = _DenseProduct.apply(x, u, b, matrix, alpha)
        return result
    return _forward_rows(x, matrix, alpha, update)


class NVFP4Frozen:
    """A packed matrix; ``resident`` keeps its dequantised copy for models small enough to afford it."""

    def __init__(self, weight: NVFP4Weight, dtype: torch.dtype, *, resident: bool) -> None:
        self.weight = weight
        self._resident = nvfp4_materialize(weight, dtype) if resident else None
        # What a decoded matrix still lacks: a tensor scale that is no power of two stays out of it.
        self._alpha = 1.0 if weight.power_of_two else weight.tensor_scale

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape

    @property
    def packed_bytes(self) -> int:
        return self.weight.nbytes

    @property
    def cache_bytes(self) -> int:
        return 0 if self._resident is None else self._resident.numel() * self._resident.element_size()

    def multiply(self, x: Tensor, update: Update | None = None) -> Tensor:
        if self._resident is not None:
            return _dense_product(x, self._resident, self._alpha, update)
        return nvfp4_linear(x, self.weight) if update is None else nvfp4_linear_update(x, self.weight, *update)

    def input_gradient(self, grad: Tensor, update: Update | None = None) -> Tensor:
        if self._resident is not None:
            return _backward_rows(grad, self._resident, self._alpha, update)
        return nvfp4_input_gradient(grad, self.weight, "auto", *(update or ()))

    def matrix(self, dtype: torch.dtype) -> Tensor:
        return nvfp4_materialize(self.weight, dtype) * self._alpha


class DenseFrozen:
    """A matrix stored in the model's dtype: the BF16 arms of an experiment, and tests."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def packed_bytes(self) -> int:
        return self.weight.numel() * self.weight.element_size()

    @property
    def cache_bytes(self) -> int:
        return 0

    def multiply(self, x: Tensor, update: Update | None = None) -> Tensor:
        return _dense_product(x, self.weight, 1.0, update)

    def input_gradient(self, grad: Tensor, update: Update | None = None) -> Tensor:
        return _backward_rows(grad, self.weight, 1.0, update)

    def matrix(self, dtype: torch.dtype) -> Tensor:
        return self.weight.to(dtype)
