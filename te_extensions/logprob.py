"""Log-probability and entropy of a frozen, vocabulary-parallel head, without materialising the logits.

Rows go through the head in chunks. Forward keeps one FP32 log-sum-exp a row; backward computes a chunk's logits again
and sends the gradient to the hidden states only, since the head does not learn. Memory is one chunk of logits however
many tokens there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


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


def head_logits(hidden: Tensor, head: HeadShard) -> Tensor:
    """FP32 logits [n, V_local] of ``hidden`` [n, H]; padding columns are -inf.

    The product accumulates and stays in FP32: a logit rounded to BF16 alone moves a log-probability by up to 0.06.
    """
    if hidden.dtype == torch.float32:
        logits = hidden @ head.weight.t()
    elif hidden.is_cuda:
        logits = torch.mm(hidden, head.weight.t(), out_dtype=torch.float32)
    else:
        logits = hidden.float() @ (head.weight.float() if head.wide is None else head.wide).t()
    real = head.vocab_size - head.vocab_start
    if real < logits.shape[1]:
        logits[:, max(real, 0) :] = float("-inf")
    return logits


def _all_reduce(value: Tensor, head: HeadShard, op: Any = dist.ReduceOp.SUM) -> Tensor:
    if head.group is not None and head.group.size() > 1:
        dist.all_reduce(value, op=op, group=head.group)
    return value


def _target_columns(targets: Tensor, head: HeadShard) -> tuple[Tensor, Tensor]:
    """Local column of each target, clamped, and whether this rank owns it."""
    local = targets - head.vocab_start
    owned = (local >= 0) & (local < head.weight.shape[0])
    return local.clamp(0, head.weight.shape[0] - 1), owned


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, targets: Tensor, head: HeadShard, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        rows = hidden.shape[0]
        logprobs = hidden.new_empty(rows, dtype=torch.float32)
        entropy, lse = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for begin in range(0, rows, chunk):
            part = slice(begin, min(begin + chunk, rows))
            logits = head_logits(hidden[part], head).div_(temperature)
            peak = _all_reduce(logits.amax(dim=1), head, dist.ReduceOp.MAX)
            # From here on logits are relative to the peak, in place: a chunk of them is the largest tensor there is.
            logits.sub_(peak.unsqueeze(1))
            column, owned = _target_columns(targets[part], head)
            picked = logits.gather(1, column.unsqueeze(1)).squeeze(1)
            picked = _all_reduce(torch.where(owned, picked, 0.0), head)
            exp = torch.exp(logits)
            if bool(torch.isneginf(logits[:, -1]).any()):
                # 0 * -inf is nan: the padding columns, which are last, must contribute zero.
                logits.masked_fill_(exp == 0.0, 0.0)
            weighted = torch.linalg.vecdot(exp, logits)
            sums = _all_reduce(torch.stack((exp.sum(dim=1), weighted)), head)
            log_sum = torch.log(sums[0])
            lse[part] = peak + log_sum
            logprobs[part] = picked - log_sum
            entropy[part] = log_sum - sums[1] / sums[0]
        ctx.save_for_backward(hidden, targets, lse)
        ctx.head, ctx.temperature, ctx.chunk = head, temperature, chunk
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _entropy: Tensor) -> tuple[Tensor, None, None, None, None]:
        hidden, targets, lse = ctx.saved_tensors
        head = ctx.head
        grad_hidden = torch.empty_like(hidden)
        for begin in range(0, hidden.shape[0], ctx.chunk):
            part = slice(begin, min(begin + ctx.chunk, hidden.shape[0]))
            logits = head_logits(hidden[part], head).div_(ctx.temperature)
            grad_logits = torch.exp(logits - lse[part].unsqueeze(1)).neg_()
            column, owned = _target_columns(targets[part], head)
            grad_logits.scatter_add_(1, column.unsqueeze(1), owned.to(grad_logits.dtype).unsqueeze(1))
            grad_logits.mul_((grad[part] / ctx.temperature).unsqueeze(1))
            partial = grad_logits.to(head.weight.dtype) @ head.weight
            grad_hidden[part] = _all_reduce(partial, head)
        return grad_hidden, None, None, None, None


def linear_logprob(
    hidden: Tensor, targets: Tensor, head: HeadShard, *, temperature: float = 1.0, chunk_rows: int = 1024
) -> tuple[Tensor, Tensor]:
    """Log-probability of ``targets`` and entropy of softmax(hidden W^T / temperature).

    Args:
        hidden: [n, H], the same on every rank of ``head.group``.
        targets: int64 [n], indices into the whole vocabulary.
        temperature: positive; the result belongs to the sampling distribution at that temperature.
        chunk_rows: rows of logits alive at a time.

    Returns:
        FP32 [n] log-probabilities (nats, differentiable in ``hidden``) and FP32 [n] entropies (nats, no gradient).

    Raises:
        ValueError: the head asks for a gradient, which this function would silently drop.
    """
    if head.weight.requires_grad:
        raise ValueError("the head must be frozen: linear_logprob gives it no gradient")
    if not temperature > 0.0:
        raise ValueError(f"temperature = {temperature} must be positive")
    return cast(tuple[Tensor, Tensor], _LinearLogprob.apply(hidden, targets, head, temperature, chunk_rows))
