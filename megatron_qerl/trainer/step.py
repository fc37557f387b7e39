"""One training step: log-probabilities, clipped loss, gradients, update.

Micro-batches go through Megatron's own forward-backward schedule, so pipeline parallelism needs no second code path.
Losses are sums; Megatron divides the gradients once by the global count (tokens or sequences), so the update does not
depend on how the batch was cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_qerl.algorithms.correction import WeightStatistics, truncated_importance_weights, weight_statistics
from megatron_qerl.algorithms.likelihood import LikelihoodPlan, plan
from megatron_qerl.algorithms.objective import RatioStatistics, aggregate, clipped_policy_loss, ratio_statistics
from megatron_qerl.config.schema import AlgorithmSection, RunConfig
from megatron_qerl.errors import NonFiniteError
from megatron_qerl.models.policy import LogprobQuery, PolicyModel
from megatron_qerl.noise.proof import EngineComparison, compare_engine
from megatron_qerl.noise.registry import NoiseRegistry
from megatron_qerl.parallel.cpu import megatron_calls
from megatron_qerl.trainer.batch import (
    MicroBatch,
    TrainingGroup,
    build_microbatch,
    plan_microbatches,
    share_out,
    split_minibatches,
)
from megatron_qerl.trainer.optimizer import AdapterOptimizer, UpdateReport
from megatron_qerl.types import NoiseState


@dataclass
class StepStatistics:
    """Sums of one step over its micro-batches.

    ``parity_*`` compare the trainer's log-probabilities with the engine's wherever both were of the same policy: before
    the step's first update, under the same noise.
    """

    loss_sum: float = 0.0
    normaliser: int = 0
    entropy_sum: float = 0.0
    tokens: int = 0
    ratio: RatioStatistics = field(default_factory=RatioStatistics)
    weights: WeightStatistics = field(default_factory=WeightStatistics)
    parity_max: float = 0.0
    parity_sum: float = 0.0
    parity_tokens: int = 0
    updates: list[UpdateReport] = field(default_factory=list)

    def add_parity(self, trainer_T: Tensor, rollout_T: Tensor) -> None:
        """Fold in |trainer - rollout| over the tokens of one micro-batch."""
        if not trainer_T.numel():
            return
        difference = (trainer_T - rollout_T).abs()
        self.parity_max = max(self.parity_max, float(difference.max()))
        self.parity_sum += float(difference.sum())
        self.parity_tokens += difference.numel()


class Trainer:
    """Owns the model's training side: micro-batching, the objective and the optimizer.

    Args:
        model: the policy.
        registry: its noise.
        optimizer: over its adapters.
        config: the run's.
    """

    def __init__(
        self, model: PolicyModel, registry: NoiseRegistry, optimizer: AdapterOptimizer, config: RunConfig
    ) -> None:
        self.model, self.registry, self.optimizer = model, registry, optimizer
        self.algorithm: AlgorithmSection = config.algorithm
        self.settings = config.train
        self.temperature = config.rollout.temperature
        self.plan: LikelihoodPlan = plan(config.algorithm.likelihood)
        self.device = torch.device(torch.cuda.current_device())

    def _query(self, batch: MicroBatch) -> LogprobQuery:
        return LogprobQuery(
            batch.tokens.logit_rows, batch.tokens.targets, self.temperature, self.settings.logprob_chunk_tokens
        )

    def _forward(self, model: Any, batch: MicroBatch) -> Any:
        return model(
            batch.tokens.token_ids,
            batch.tokens.position_ids,
            packed_seq_params=batch.tokens.params,
            query=self._query(batch),
        )

    def _build(self, bins: Sequence[Sequence[TrainingGroup]]) -> list[MicroBatch]:
        multiple = self.model.config.tensor_model_parallel_size if self.model.config.sequence_parallel else 1
        share = self.settings.share_prompt_prefix
        return [build_microbatch(b, self.device, share_prefix=share, multiple=multiple) for b in bins]

    def _microbatches(self, groups: Sequence[TrainingGroup]) -> list[MicroBatch]:
        """All of ``groups``, whatever the data-parallel size."""
        share = self.settings.share_prompt_prefix
        return self._build(plan_microbatches(groups, self.settings.microbatch_tokens, share_prefix=share))

    def _own_microbatches(self, groups: Sequence[TrainingGroup]) -> list[MicroBatch]:
        """This data-parallel rank's share of ``groups``, which are the same on every rank."""
        ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        share = self.settings.share_prompt_prefix
        return self._build(share_out(groups, self.settings.microbatch_tokens, ranks, share_prefix=share)[rank])

    def _run(self, model: Any, batches: list[MicroBatch], forward_step: Any, *, forward_only: bool) -> None:
        with megatron_calls():
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(batches),
                model=[model],
                num_microbatches=len(batches),
                seq_length=max(b.tokens.total_tokens for b in batches),
                micro_batch_size=1,
                forward_only=forward_only,
            )

    def logprobs(self, batches: list[MicroBatch], noise: NoiseState | None) -> list[tuple[Tensor, Tensor]]:
        """FP32 (log-probabilities, entropies) of each micro-batch's response tokens, no gradient, under ``noise``."""
        results: list[tuple[Tensor, Tensor]] = []

        def forward_step(iterator: Iterator[MicroBatch], model: Any) -> Any:
            output = self._forward(model, next(iterator))

            def loss(value: Any) -> Any:
                results.append((value[0].detach(), value[1]))
                return value[0].sum(), torch.tensor(1, dtype=torch.int), {}

            return output, loss

        with torch.no_grad(), self.registry.applied(noise):
            self._run(self.model, batches, forward_step, forward_only=True)
        return results

    def probe(self, groups: Sequence[TrainingGroup], noise: NoiseState | None) -> Tensor:
        """Log-probabilities of a few responses as one vector, for proofs; order is that of packing."""
        return torch.cat([lp for lp, _ in self.logprobs(self._microbatches(groups), noise)])

    def measure_engine(self, groups: Sequence[TrainingGroup], noise: NoiseState) -> EngineComparison:
        """Score ``groups`` under the behaviour noise and without it, and compare with what the engine reported."""
        batches = self._microbatches(groups)
        noisy = torch.cat([lp for lp, _ in self.logprobs(batches, noise)])
        clean = torch.cat([lp for lp, _ in self.logprobs(batches, None)])
        rollout = torch.cat([b.rollout_logprobs for b in batches])
        return compare_engine(rollout, noisy, clean)

    def train_step(self, groups: Sequence[TrainingGroup], noise: NoiseState) -> StepStatistics:
        """All updates of one rollout.

        Args:
            groups: groups with a signal, not empty.
            noise: the noise that the rollout was drawn under.

        Raises:
            NonFiniteError: a loss or a gradient is not finite; nothing was updated from that mini-batch.
        """
        stats = StepStatistics()
        minibatches = [
            self._own_microbatches(part) for part in split_minibatches(groups, self.settings.minibatches_per_step)
        ]
        forward_noise = noise if self.plan.replay_noise else None
        old: list[list[Tensor | None]] = [[None] * len(b) for b in minibatches]
        if self.plan.denominator == "trainer_old" and len(minibatches) > 1:
            old = [[lp for lp, _ in self.logprobs(b, forward_noise)] for b in minibatches]
        with self.registry.applied(forward_noise):
            for index, batches in enumerate(minibatches):
                same_policy = index == 0 and (self.plan.replay_noise or not noise.active)
                self._accumulate(batches, old[index], stats, compare=same_policy)
                self._check_gradients(stats)
                stats.updates.append(self.optimizer.step())
        return stats

    def _accumulate(
        self, batches: list[MicroBatch], old: Sequence[Tensor | None], stats: StepStatistics, *, compare: bool
    ) -> None:
        """Gradients of one mini-batch."""
        self.optimizer.zero_grad()
        olds = iter(old)

        def forward_step(iterator: Iterator[MicroBatch], model: Any) -> Any:
            batch = next(iterator)
            old_logprobs = next(olds)
            output = self._forward(model, batch)

            def loss(value: Any) -> Any:
                total, count = self._loss(batch, value[0], value[1], old_logprobs, stats, compare=compare)
                return total, torch.tensor(count, dtype=torch.int, device=self.device), {}

            return output, loss

        self._run(self.optimizer.ddp, batches, forward_step, forward_only=False)

    def _loss(
        self,
        batch: MicroBatch,
        logprobs: Tensor,
        entropy: Tensor,
        old: Tensor | None,
        stats: StepStatistics,
        *,
        compare: bool,
    ) -> tuple[Tensor, int]:
        """Summed loss of one micro-batch and what it is to be divided by, globally."""
        detached, mask = logprobs.detach(), batch.mask
        if compare:
            stats.add_parity(detached[mask], batch.rollout_logprobs[mask])
        reference = detached if old is None else old
        denominator = batch.rollout_logprobs if self.plan.denominator == "rollout" else reference
        weights = None
        if self.plan.importance_weights:
            cap = self.algorithm.importance_weight_cap
            weights = truncated_importance_weights(reference, batch.rollout_logprobs, cap)
            stats.weights += weight_statistics(reference, batch.rollout_logprobs, mask, cap)
        token_loss = clipped_policy_loss(
            logprobs,
            denominator,
            batch.advantages,
            mask,
            self.algorithm.ratio_clip_low,
            self.algorithm.ratio_clip_high,
            weights,
        )
        unique, sequence = torch.unique(batch.sequence, return_inverse=True)
        mode = self.algorithm.loss_aggregation
        total = aggregate(token_loss.loss, mask, sequence, mode, 1, 1)
        tokens = int(mask.sum())
        count = tokens if mode == "token_mean" else unique.numel() if tokens else 0
        if not bool(torch.isfinite(total)):
            bad = batch.sequence[~torch.isfinite(token_loss.loss)].unique().tolist()
            raise NonFiniteError(
                f"loss of update {self.optimizer.updates}",
                f"is not finite in responses {bad[:8]} of the batch",
                "this mini-batch was not applied; non_finite.json in the run folder holds the responses",
            )
        stats.loss_sum += float(total.detach())
        stats.normaliser += count
        stats.tokens += tokens
        stats.entropy_sum += float(entropy[mask].sum())
        stats.ratio += ratio_statistics(token_loss)
        return total, count

    def _check_gradients(self, stats: StepStatistics) -> None:
        bad = self.optimizer.non_finite_gradients()
        if bad:
            raise NonFiniteError(
                f"gradient of update {self.optimizer.updates}",
                f"is not finite in {len(bad)} parameters, first {bad[0]} (loss {stats.loss_sum:g})",
                "this mini-batch was not applied; non_finite.json in the run folder holds the responses",
            )
