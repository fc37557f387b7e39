"""The frozen matrix inside a linear layer: NVFP4 bytes verbatim, or a plain dense one.

Neither is an ``nn.Parameter``: the base never learns, is never reduced across ranks, and is not part of a training
checkpoint (its hash is).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from megatron_qerl.layers.kernels import NVFP4Weight, nvfp4_linear, nvfp4_materialize, rows_linear


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

    def multiply(self, x: Tensor) -> Tensor:
        """x W^T, [..., K] -> [..., N], differentiable in x."""
        ...

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """The [N, K] matrix the weight stands for, for export and for tests."""
        ...


class NVFP4Frozen:
    """A packed matrix; ``resident`` keeps its dequantised copy for models small enough to afford it."""

    def __init__(self, weight: NVFP4Weight, dtype: torch.dtype, *, resident: bool) -> None:
        self.weight = weight
        self._resident = nvfp4_materialize(weight, dtype) if resident else None

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape

    @property
    def packed_bytes(self) -> int:
        return self.weight.nbytes

    @property
    def cache_bytes(self) -> int:
        return 0 if self._resident is None else self._resident.numel() * self._resident.element_size()

    def multiply(self, x: Tensor) -> Tensor:
        return nvfp4_linear(x, self.weight, dequantized=self._resident)

    def matrix(self, dtype: torch.dtype) -> Tensor:
        alpha = 1.0 if self.weight.power_of_two else self.weight.tensor_scale
        return nvfp4_materialize(self.weight, dtype) * alpha


class _DenseFrozenLinear(torch.autograd.Function):
    """x W^T that saves no activation: the frozen W needs no gradient, so backward needs only W."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.frozen = weight  # type: ignore[attr-defined]
        return rows_linear(x, weight)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad_y: Tensor) -> tuple[Tensor, None]:
        weight: Tensor = ctx.frozen  # type: ignore[attr-defined]
        return (grad_y.reshape(-1, grad_y.shape[-1]) @ weight).view(*grad_y.shape[:-1], weight.shape[1]), None


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

    def multiply(self, x: Tensor) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            result: Tensor = _DenseFrozenLinear.apply(x, self.weight)
            return result
        return rows_linear(x, self.weight)

    def matrix(self, dtype: torch.dtype) -> Tensor:
        return self.weight.to(dtype)
