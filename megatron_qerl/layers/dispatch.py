"""Megatron's two token dispatchers, made to work with any number of tokens on any rank and backend, and repeatable.

All-to-all serves any layout, but on a CPU it lacks two things: split sizes as plain integers, which Megatron makes only
while copying from a device, and gathers of different sizes, which NCCL has and gloo has not. All-gather gathers equally
many tokens from every rank, which data-parallel ranks do not have; here it fills up with rows that no expert gets.

A token's rows from its experts are added in the order of the experts, in FP32, and so are their gradients. On a GPU
Megatron adds them with atomics, in the model's dtype and in whatever order they arrive: two forwards of one batch then
differ in their last bits, which in BF16 can send tokens to other experts in the next block.

Megatron's dispatchers keep the tensors of their last forward, and with them its graph. Where layers are recomputed that
pins every layer's input and its gradient; here they are let go.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher
from torch import Tensor


def _padded(rows: Tensor, count: int) -> Tensor:
    """Rows of zeros added up to ``count``."""
    return torch.cat((rows, rows.new_zeros(count - rows.shape[0], *rows.shape[1:])))


def _gather(rows: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    """All ranks' rows, rank after rank."""
    most = max(sizes)
    parts = [rows.new_empty(most, *rows.shape[1:]) for _ in sizes]
    dist.all_gather(parts, _padded(rows, most), group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _sum_own(rows: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    """This rank's rows of the sum over all ranks."""
    most, rank = max(sizes), group.rank()
    own = rows.new_empty(most, *rows.shape[1:])
    dist.reduce_scatter_tensor(own, torch.cat([_padded(part, most) for part in rows.split(sizes)]), group=group)
    return own[: sizes[rank]]


class _Gather(torch.autograd.Function):
    """``_gather``; backward sums what each rank did with the rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return _gather(rows, sizes, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _sum_own(grad, ctx.sizes, ctx.group), None, None


class _SumOwn(torch.autograd.Function):
    """``_sum_own``; backward gathers."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return _sum_own(rows, sizes, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gather(grad, ctx.sizes, ctx.group), None, None


def sum_by_token(rows: Tensor, tokens: Tensor, count: int, most: int) -> Tensor:
    """Row t of the result is the sum of the rows i with tokens[i] = t, in order of i, in FP32 at least.

    Args:
        rows: [N, H].
        tokens: int64 [N], in 0 .. count - 1.
        count: T.
        most: rows that a token has at most.

    Returns:
        [T, H] in rows' dtype.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = torch.zeros(count, rows.shape[1], dtype=wide, device=rows.device)
    if not rows.shape[0]:
        return total.to(rows.dtype)
    order = torch.argsort(tokens, stable=True)
    bounds = torch.searchsorted(tokens[order], torch.arange(count + 1, device=tokens.device))
    begin, end = bounds[:-1], bounds[1:]
    for place in range(most):
        at = begin + place
        found = rows[order[at.clamp(max=rows.shape[0] - 1)]]
        total += torch.where((at < end).unsqueeze(1), found, 0)
    return total.to(rows.dtype)


class _Spread(torch.autograd.Function):
    """Rows that were copied from tokens, ``rows[i] = hidden[tokens[i]]``, with their gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, rows: Tensor, tokens: Tensor, most: int) -> Tensor:
        ctx.tokens, ctx.count, ctx.most = tokens, hidden.shape[0], most
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return sum_by_token(grad, ctx.tokens, ctx.count, ctx.most), None, None, None


class _Collect(torch.autograd.Function):
    """``sum_by_token``, differentiable in rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, tokens: Tensor, count: int, most: int) -> Tensor:
        ctx.tokens = tokens
        return sum_by_token(rows, tokens, count, most)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad[ctx.tokens], None, None, None


def _let_go(dispatcher: object) -> None:
    """Drop what hangs on the last forward's graph; backward has its own references."""
    for name, value in list(vars(dispatcher).items()):
        if isinstance(value, Tensor) and value.requires_grad:
            setattr(dispatcher, name, None)


class AnyBackendAlltoAll(MoEAlltoAllTokenDispatcher):  # type: ignore[misc]
    """Megatron's all-to-all on a GPU; on a CPU its collectives over expert tensor parallelism are replaced."""

    tp_size: int

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """As Megatron's."""
        counts: Tensor = super().preprocess(routing_map)
        for name in ("input_splits", "output_splits"):
            splits = getattr(self, name)
            if isinstance(splits, Tensor) and not splits.is_cuda:
                setattr(self, name, splits.tolist())
        return counts

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """As Megatron's."""
        rows, sent_probs = super().dispatch_preprocess(hidden_states.detach(), routing_map, probs)
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        tokens = self.reversed_local_input_permutation_mapping
        return _Spread.apply(flat, rows, tokens, self.config.moe_router_topk), sent_probs

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """As Megatron's."""
        count, most = self.hidden_shape_before_permute[0], self.config.moe_router_topk
        tokens = self.reversed_local_input_permutation_mapping
        output: Tensor = _Collect.apply(permutated_local_input_tokens, tokens, count, most)
        _let_go(self)
        return output.view(self.hidden_shape)

    def _sizes(self, tokens: Tensor) -> list[int] | None:
        """Rows of each expert-tensor-parallel rank, or None where Megatron's collectives serve."""
        return None if self.tp_size == 1 or tokens.is_cuda else self.output_splits_tp.tolist()

    def dispatch_postprocess(self, global_input_tokens: Tensor, global_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As Megatron's."""
        sizes, tp_size = self._sizes(global_input_tokens), self.tp_size
        if sizes is not None:
            global_input_tokens = _Gather.apply(global_input_tokens, sizes, self.tp_group)
            global_probs = _Gather.apply(global_probs, sizes, self.tp_group)
            self.tp_size = 1  # Megatron's gather is done; what is left there is sorting
        try:
            result: tuple[Tensor, Tensor, Tensor] = super().dispatch_postprocess(global_input_tokens, global_probs)
        finally:
            self.tp_size = tp_size
        return result

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """As Megatron's."""
        sizes, tp_size = self._sizes(hidden_states), self.tp_size
        if sizes is not None:
            self.tp_size = 1
        try:
            rows: Tensor = super().combine_preprocess(hidden_states)
        finally:
            self.tp_size = tp_size
        return rows if sizes is None else _SumOwn.apply(rows, sizes, self.tp_group)


class PaddedAllGather(MoEAllGatherTokenDispatcher):  # type: ignore[misc]
    """All-gather over ranks that have different numbers of tokens."""

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """As Megatron's, with rows added up to the largest number in the group."""
        self._shape = hidden_states.shape
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        most = self._most(rows)
        if most > rows.shape[0]:
            rows, routing_map, probs = (_padded(t, most) for t in (rows, routing_map, probs))
        result: tuple[Tensor, Tensor] = super().dispatch_preprocess(rows, routing_map, probs)
        return result

    def _most(self, rows: Tensor) -> int:
        most = torch.tensor(rows.shape[0], device=rows.device)
        if self.tp_size * self.ep_size > 1:
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.tp_ep_group)
        return int(most)

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As Megatron's."""
        rows, counts, local_probs = super().dispatch_postprocess(hidden_states.detach(), probs)
        tokens = self.reversed_local_input_permutation_mapping
        return _Spread.apply(hidden_states, rows, tokens, self._most_rows), counts, local_probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """As Megatron's."""
        tokens, count = self.reversed_local_input_permutation_mapping, self.hidden_shape_before_permute[0]
        rows: Tensor = _Collect.apply(hidden_states, tokens, count, self._most_rows)
        return rows

    @property
    def _most_rows(self) -> int:
        """Experts of a token on this rank, at most."""
        return min(int(self.router_topk), int(self.num_local_experts))

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """As Megatron's, without the added rows."""
        rows: Tensor = super().combine_postprocess(hidden_states)
        _let_go(self)
        return rows[: self._shape[:-1].numel()].view(self._shape)
