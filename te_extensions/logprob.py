"""Log-probability and entropy of a frozen, vocabulary-parallel head, without materialising the logits.

Rows go through the head in chunks. Forward keeps one FP32 log-sum-exp a row; backward computes a chunk's logits again
and sends the gradient to the hidden states only, since the head does not learn. Memory is one chunk of logits however
many tokens there are, and nothing here waits for a device or branches on its values, so it can be captured in a graph.

Each rank of a tensor-parallel group reduces its own columns to four numbers a row; ranks are joined once, at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

_CHUNK_SHARE = 32
_SMALL_CHUNK_BYTES = 160 * 2**20  # 256 rows of a 152k vocabulary
_LARGEST_CHUNK_ROWS = 4096


@dataclass(frozen=True)
class HeadShard:
    """This rank's slice of the output head.

    Attributes:
        weight: [V_local, H], frozen.
        vocab_start: index of the slice's first row in the whole vocabulary.
        vocab_size: real vocabulary size; rows past it are padding and get probability zero.
        group: tensor-parallel process group, or None on one rank.
        wide: FP32 copy of ``weight`` for CPUs, where converting it at every decode step costs more than the product; or
            None to convert each time.
    """

    weight: Tensor
    vocab_start: int
    vocab_size: int
    group: dist.ProcessGroup | None
    wide: Tensor | None = None

    @property
    def real_columns(self) -> int:
        """How many of the slice's rows are vocabulary; the rest, which are last, are padding."""
        return min(max(self.vocab_size - self.vocab_start, 0), self.weight.shape[0])


def _product(hidden: Tensor, head: HeadShard) -> Tensor:
    """FP32 [n, V_local] of ``hidden`` [n, H], padding columns included.

    The product accumulates and stays in FP32: a logit rounded to BF16 alone moves a log-probability by up to 0.06.
    """
    if hidden.dtype == torch.float32:
        return hidden @ head.weight.t()
    if hidden.is_cuda:
        return torch.mm(hidden, head.weight.t(), out_dtype=torch.float32)
    return hidden.float() @ (head.weight.float() if head.wide is None else head.wide).t()


def head_logits(hidden: Tensor, head: HeadShard) -> Tensor:
    """FP32 logits [n, V_local] of ``hidden`` [n, H]; padding columns are -inf."""
    logits = _product(hidden, head)
    if head.real_columns < logits.shape[1]:
        logits[:, head.real_columns :] = float("-inf")
    return logits


def _all_reduce(value: Tensor, head: HeadShard, op: Any = dist.ReduceOp.SUM) -> Tensor:
    if head.group is not None and head.group.size() > 1:
        dist.all_reduce(value, op=op, group=head.group)
    return value


def _target_columns(targets: Tensor, head: HeadShard) -> Tensor:
    """Local column of each target, or -1 where another rank owns it."""
    local = targets - head.vocab_start
    return torch.where((local >= 0) & (local < head.weight.shape[0]), local, -1)


def default_chunk_rows(rows: int, columns: int) -> int:
    """Rows of FP32 logits to hold at a time when the caller does not say.

    A chunk costs 4 bytes a logit, and 6 in backward, where its gradient stands beside it in BF16. 1/32 of all logits
    keeps the peak below 1/20 of materialising them; below ``_SMALL_CHUNK_BYTES`` there is nothing worth saving, and
    smaller products would only be slower.
    """
    row_bytes = 4 * max(columns, 1)
    wanted = max(rows * row_bytes // _CHUNK_SHARE, _SMALL_CHUNK_BYTES) // row_bytes
    return min(rows, max(64, wanted // 64 * 64), _LARGEST_CHUNK_ROWS) or 1


def row_statistics(logits: Tensor, column: Tensor, real: int, temperature: float) -> Tensor:
    """What a row contributes to its log-probability and entropy, FP32 [4, n].

    With x = logits / temperature over the first ``real`` columns: m = max x, sum exp(x - m), sum exp(x - m) (x - m),
    and x at ``column`` (0 where that is -1). A rank whose columns are all padding contributes m = -1e30 and zeros.

    Args:
        logits: FP32 [n, V]; used up.
        column: int64 [n], -1 or below ``real``.
    """
    if logits.is_cuda:
        from te_extensions.logprob_triton import launch_statistics

        with torch.cuda.device(logits.device):
            return launch_statistics(logits, column, real, temperature)
    if real <= 0:
        lowest = torch.tensor([-1e30, 0.0, 0.0, 0.0], dtype=logits.dtype)
        return lowest.unsqueeze(1).repeat(1, logits.shape[0])
    x = logits[:, :real].div_(temperature)
    picked = torch.where(column >= 0, x.gather(1, column.clamp(min=0).unsqueeze(1)).squeeze(1), 0.0)
    peak = x.amax(dim=1)
    exp = torch.exp(x.sub_(peak.unsqueeze(1)))
    exp_sum = exp.sum(dim=1)
    return torch.stack((peak, exp_sum, exp.mul_(x).sum(dim=1), picked))


def logit_gradient(
    logits: Tensor, column: Tensor, lse: Tensor, grad: Tensor, real: int, temperature: float, dtype: torch.dtype
) -> Tensor:
    """Gradient of the log-probability at ``column`` with respect to ``logits``, [n, V] in ``dtype``; zero in padding.

    Args:
        logits: FP32 [n, V]; used up.
        lse: FP32 [n], log-sum-exp of the whole row over all ranks, of logits / temperature.
        grad: FP32 [n], gradient of the log-probabilities.
        Others as in ``row_statistics``.
    """
    if logits.is_cuda:
        from te_extensions.logprob_triton import launch_gradient

        with torch.cuda.device(logits.device):
            return launch_gradient(logits, column, lse, grad.contiguous(), real, temperature, dtype)
    slope = logits.div_(temperature).sub_(lse.unsqueeze(1)).exp_().neg_()
    slope[:, max(real, 0) :] = 0.0
    slope.scatter_add_(1, column.clamp(min=0).unsqueeze(1), (column >= 0).to(slope.dtype).unsqueeze(1))
    return slope.mul_((grad / temperature).unsqueeze(1)).to(dtype)


def _widened(hidden: Tensor, head: HeadShard) -> HeadShard:
    """The head with its FP32 copy, where every chunk would otherwise make one (a CPU with BF16 states)."""
    if hidden.is_cuda or hidden.dtype == torch.float32 or head.wide is not None:
        return head
    return replace(head, wide=head.weight.float())


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, targets: Tensor, head: HeadShard, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        rows = hidden.shape[0]
        wide = _widened(hidden, head)
        column = _target_columns(targets, head)
        statistics = torch.empty((4, rows), dtype=torch.float32, device=hidden.device)
        for begin in range(0, rows, chunk):
            part = slice(begin, min(begin + chunk, rows))
            # No name keeps a chunk's logits alive: the next chunk's are made after they are gone.
            statistics[:, part] = row_statistics(
                _product(hidden[part], wide), column[part], wide.real_columns, temperature
            )
        local_peak, exp_sum, weighted, picked = statistics
        peak = _all_reduce(local_peak.clone(), head, dist.ReduceOp.MAX)
        fall = local_peak - peak
        factor = torch.exp(fall)
        sums = torch.stack((factor * exp_sum, factor * (weighted + exp_sum * fall), picked))
        exp_sum, weighted, picked = _all_reduce(sums, head)
        log_sum = torch.log(exp_sum)
        entropy = log_sum - weighted / exp_sum
        ctx.save_for_backward(hidden, targets, peak + log_sum)
        ctx.head, ctx.temperature, ctx.chunk = head, temperature, chunk
        ctx.mark_non_differentiable(entropy)
        return (picked - peak) - log_sum, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _entropy: Tensor) -> tuple[Tensor, None, None, None, None]:
        hidden, targets, lse = ctx.saved_tensors
        head, rows = ctx.head, hidden.shape[0]
        wide = _widened(hidden, head)
        column = _target_columns(targets, head)
        grad_hidden = torch.empty_like(hidden)
        for begin in range(0, rows, ctx.chunk):
            part = slice(begin, min(begin + ctx.chunk, rows))
            slope = logit_gradient(
                _product(hidden[part], wide),
                column[part],
                lse[part],
                grad[part],
                wide.real_columns,
                ctx.temperature,
                head.weight.dtype,
            )
            grad_hidden[part] = slope @ head.weight
            del slope
        return _all_reduce(grad_hidden, head), None, None, None, None


def linear_logprob(
    hidden: Tensor, targets: Tensor, head: HeadShard, *, temperature: float = 1.0, chunk_rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probability of ``targets`` and entropy of softmax(hidden W^T / temperature).

    Args:
        hidden: [n, H], the same on every rank of ``head.group``.
        targets: int64 [n], indices into the whole vocabulary.
        temperature: positive; the result belongs to the sampling distribution at that temperature.
        chunk_rows: rows of logits alive at a time, or None for ``default_chunk_rows``.

    Returns:
        FP32 [n] log-probabilities (nats, differentiable in ``hidden``) and FP32 [n] entropies (nats, no gradient).

    Raises:
        ValueError: the head asks for a gradient, which this function would silently drop; temperature or chunk_rows is
            not positive.
    """
    if head.weight.requires_grad:
        raise ValueError("the head must be frozen: linear_logprob gives it no gradient")
    if not temperature > 0.0:
        raise ValueError(f"temperature = {temperature} must be positive")
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows = {chunk_rows} must be positive, or None to let the memory decide")
    chunk = chunk_rows or default_chunk_rows(hidden.shape[0], head.weight.shape[0])
    return cast(tuple[Tensor, Tensor], _LinearLogprob.apply(hidden, targets, head, float(temperature), chunk))
