"""Products of a mixture of experts: rows sorted by expert, one matrix an expert.

``counts`` says how many rows each local expert has; the rows of expert 0 come first. A frozen stack holds the base
matrices, NVFP4 bytes verbatim or dense, and keeps nothing for backward. ``grouped_product`` is the trainable form that
adapters use. Both stay part of the graph when no row arrived: the all-to-all before them is a collective, and its
backward must run on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_qerl.layers.frozen import DenseFrozen, FrozenWeight, NVFP4Frozen
from megatron_qerl.layers.kernels import NVFP4Weight, nvfp4_grouped_linear


class ExpertStack(Protocol):
    """The frozen matrices of the local experts, all of one shape."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(experts, N, K) on this rank."""
        ...

    @property
    def packed_bytes(self) -> int:
        """Bytes of the stored form."""
        ...

    @property
    def cache_bytes(self) -> int:
        """Bytes of a resident dequantised copy, zero if there is none."""
        ...

    def multiply(self, x: Tensor, counts: Tensor) -> Tensor:
        """[T, K] -> [T, N], each row by its expert's matrix; differentiable in x."""
        ...

    def expert(self, index: int) -> FrozenWeight:
        """One local expert's matrix, sharing memory with the stack."""
        ...


def _groups_on_device(x: Tensor, stack: Tensor) -> bool:
    """Whether ``torch.nn.functional.grouped_mm`` takes these: BF16 on a GPU, rows that start on 16 bytes."""
    return x.is_cuda and x.dtype == torch.bfloat16 and not any(size % 8 for size in stack.shape[1:])


def _each(x: Tensor, counts: Tensor, width: int, product: Callable[[Tensor, int], Tensor]) -> Tensor:
    """[T, width]: ``product(rows of expert e, e)`` for each expert that has rows."""
    out = x.new_empty(x.shape[0], width)
    begin = 0
    for index, count in enumerate(counts.tolist()):
        if count:
            out[begin : begin + count] = product(x[begin : begin + count], index)
        begin += count
    assert begin == x.shape[0], f"counts sum to {begin}, x has {x.shape[0]} rows"
    return out


def _ends(counts: Tensor, device: torch.device) -> Tensor:
    return torch.cumsum(counts, 0, dtype=torch.int32).to(device, non_blocking=True)


def _rows_times(x: Tensor, stack: Tensor, counts: Tensor) -> Tensor:
    """[T, K] and [E, K, N] -> [T, N]."""
    if x.shape[0] and _groups_on_device(x, stack):
        return torch.nn.functional.grouped_mm(x.contiguous(), stack, offs=_ends(counts, x.device))
    return _each(x, counts, stack.shape[2], lambda rows, index: torch.mm(rows, stack[index]))


def _outer_products(grad: Tensor, x: Tensor, counts: Tensor, like: Tensor) -> Tensor:
    """[E, N, K]: the sum of grad^T x over each expert's rows; zero for an expert without rows."""
    if x.shape[0] and _groups_on_device(x, like):
        ends = _ends(counts, x.device)
        return torch.nn.functional.grouped_mm(grad.contiguous().t(), x.contiguous(), offs=ends)
    out, begin = torch.zeros_like(like), 0
    for index, count in enumerate(counts.tolist()):
        if count:
            torch.mm(grad[begin : begin + count].t(), x[begin : begin + count], out=out[index])
        begin += count
    return out


class _GroupedProduct(torch.autograd.Function):
    """x W_e^T; keeps x only if the stack learns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stack: Tensor, counts: Tensor) -> Tensor:
        ctx.counts, ctx.stack = counts, None if stack.requires_grad else stack
        ctx.save_for_backward(*((x, stack) if stack.requires_grad else ()))
        return _rows_times(x, stack.transpose(1, 2), counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        need_x, need_stack, _ = ctx.needs_input_grad
        x, stack = ctx.saved_tensors if need_stack else (grad, ctx.stack)
        grad_x = _rows_times(grad, stack, ctx.counts) if need_x else None
        grad_stack = _outer_products(grad, x, ctx.counts, stack) if need_stack else None
        return grad_x, grad_stack, None


def grouped_product(x: Tensor, stack: Tensor, counts: Tensor) -> Tensor:
    """Each row times its expert's transposed matrix.

    Args:
        x: [T, K], sorted by expert.
        stack: [E, N, K].
        counts: int64 [E] on the host, summing to T.

    Returns:
        [T, N], differentiable once in x and stack.
    """
    result: Tensor = _GroupedProduct.apply(x, stack, counts)
    return result


class NVFP4Experts:
    """Packed stacks; ``resident`` keeps their dequantised copy for models small enough to afford it.

    Args:
        packed: uint8 [E, N, K/2].
        block_scale: float8_e4m3fn [E, N, K/16].
        tensor_scale: one value an expert.
        dtype: of the activations.
    """

    def __init__(
        self, packed: Tensor, block_scale: Tensor, tensor_scale: Sequence[float], dtype: torch.dtype, *, resident: bool
    ) -> None:
        self.packed, self.block_scale, self.tensor_scale = packed, block_scale, tuple(tensor_scale)
        self.dtype = dtype
        self._resident: Tensor | None = None
        if resident:
            self._resident = torch.stack([self.expert(e).matrix(dtype) for e in range(len(self.tensor_scale))])

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.packed.shape[0], self.packed.shape[1], 2 * self.packed.shape[2]

    @property
    def packed_bytes(self) -> int:
        return self.packed.numel() + self.block_scale.numel() + 4 * len(self.tensor_scale)

    @property
    def cache_bytes(self) -> int:
        return 0 if self._resident is None else self._resident.numel() * self._resident.element_size()

    def multiply(self, x: Tensor, counts: Tensor) -> Tensor:
        if self._resident is not None:
            return grouped_product(x, self._resident, counts)
        return nvfp4_grouped_linear(x, counts, self.packed, self.block_scale, self.tensor_scale)

    def expert(self, index: int) -> NVFP4Frozen:
        weight = NVFP4Weight(self.packed[index], self.block_scale[index], self.tensor_scale[index])
        return NVFP4Frozen(weight, self.dtype, resident=False)


class DenseExperts:
    """Matrices in the model's dtype, [E, N, K]: the BF16 arms of an experiment, and tests."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.weight.shape[0], self.weight.shape[1], self.weight.shape[2]

    @property
    def packed_bytes(self) -> int:
        return self.weight.numel() * self.weight.element_size()

    @property
    def cache_bytes(self) -> int:
        return 0

    def multiply(self, x: Tensor, counts: Tensor) -> Tensor:
        return grouped_product(x, self.weight, counts)

    def expert(self, index: int) -> DenseFrozen:
        return DenseFrozen(self.weight[index])
