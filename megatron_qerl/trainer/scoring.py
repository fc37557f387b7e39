"""What a trainer says about a recorded batch without learning from it: log-probabilities and gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_qerl.algorithms.comparison import RecordedBatch
from megatron_qerl.trainer.batch import TrainingGroup
from megatron_qerl.trainer.step import StepStatistics, Trainer
from megatron_qerl.types import NoiseState


def recorded_batch(trainer: Trainer, groups: Sequence[TrainingGroup], noise: NoiseState) -> RecordedBatch:
    """The response tokens of ``groups``, which were drawn under ``noise``, scored under it and without."""
    batches = trainer._microbatches(groups)
    return RecordedBatch(
        rollout_logprobs=torch.cat([b.rollout_logprobs for b in batches]),
        noisy_logprobs=torch.cat([lp for lp, _ in trainer.logprobs(batches, noise)]),
        clean_logprobs=torch.cat([lp for lp, _ in trainer.logprobs(batches, None)]),
        advantages=torch.cat([b.advantages for b in batches]),
        mask=torch.cat([b.mask for b in batches]),
        sequence=torch.cat([b.sequence for b in batches]),
    )


def response_logprobs(trainer: Trainer, groups: Sequence[TrainingGroup], noise: NoiseState) -> Tensor:
    """float64 [R]: log-probability of each response under ``noise``, in the order of their numbers from 0."""
    batches = trainer._microbatches(groups)
    sums_R = torch.zeros(sum(len(g.responses) for g in groups), dtype=torch.float64, device=trainer.device)
    for batch, (logprobs, _) in zip(batches, trainer.logprobs(batches, noise), strict=True):
        sums_R.index_add_(0, batch.sequence, logprobs.double())
    return sums_R.cpu()


def gradient(trainer: Trainer, groups: Sequence[TrainingGroup], noise: NoiseState) -> Tensor:
    """FP32 [n]: gradient of all adapters at the first update from ``groups``. Nothing is updated.

    Args:
        noise: that the groups were drawn under; the trainer's likelihood mode says whether it is replayed.
    """
    batches = trainer._own_microbatches(groups)
    forward_noise = noise if trainer.plan.replay_noise else None
    before = trainer._before_update(batches, forward_noise, several=False)
    with trainer.registry.applied(forward_noise):
        trainer._accumulate(batches, before, StepStatistics(), compare=False)
    parameters = [p for _, p in trainer.optimizer.parameters()]
    return torch.cat([p.main_grad.flatten().float() for p in parameters])  # type: ignore[attr-defined]
