"""One training step: log-probabilities, clipped loss, gradients, update.

Micro-batches go through Megatron's own forward-backward schedule, so pipeline parallelism needs no second code path.
Losses are sums; Megatron divides the gradients once by the global count (tokens or sequences), so the update does not
depend on how the batch was cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_qerl.algorithms.correction import WeightStatistics, importance_statistics, importance_weights
from megatron_qerl.algorithms.likelihood import LikelihoodPlan, plan
from megatron_qerl.algorithms.objective import RatioStatistics, aggregate, ratio_statistics
from megatron_qerl.algorithms.policy_loss import LossInputs, policy_loss
from megatron_qerl.algorithms.regularize import divergence
from megatron_qerl.config.schema import AlgorithmSection, RunConfig
from megatron_qerl.errors import NonFiniteError
from megatron_qerl.layers.routing import RoutingRecord
from megatron_qerl.models.adapter_state import adapters_off
from megatron_qerl.models.policy import LogprobQuery, PolicyChunks
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
    the step's first update, under the same noise. ``base_*`` estimate KL(policy || base) where the loss has that term.
    ``non_finite`` numbers responses whose loss was not finite.
    """

    loss_sum: float = 0.0
    normaliser: int = 0
    entropy_sum: float = 0.0
    tokens: int = 0
    base_k1_sum: float = 0.0
    base_k3_sum: float = 0.0
    base_tokens: int = 0
    ratio: RatioStatistics = field(default_factory=RatioStatistics)
    weights: WeightStatistics = field(default_factory=WeightStatistics)
    parity_max: float = 0.0
    parity_sum: float = 0.0
    parity_tokens: int = 0
    updates: list[UpdateReport] = field(default_factory=list)
    non_finite: list[int] = field(default_factory=list)

    def add_parity(self, trainer_T: Tensor, rollout_T: Tensor) -> None:
        """Fold in |trainer - rollout| over the tokens of one micro-batch."""
        if not trainer_T.numel():
            return
        difference = (trainer_T - rollout_T).abs()
        self.parity_max = max(self.parity_max, float(difference.max()))
        self.parity_sum += float(difference.sum())
        self.parity_tokens += difference.numel()

    def add_divergence(self, logprobs_T: Tensor, base_T: Tensor, mask_T: Tensor) -> None:
        """Fold in the divergence from the base over the tokens of one micro-batch."""
        self.base_k1_sum += float(divergence(logprobs_T, base_T, mask_T, "k1").sum())
        self.base_k3_sum += float(divergence(logprobs_T, base_T, mask_T, "k3").sum())
        self.base_tokens += int(mask_T.sum())

    def add(self, other: StepStatistics) -> None:
        """Fold in the sums of another mini-batch or of other ranks; updates are not touched."""
        self.loss_sum += other.loss_sum
        self.normaliser += other.normaliser
        self.entropy_sum += other.entropy_sum
        self.tokens += other.tokens
        self.base_k1_sum += other.base_k1_sum
        self.base_k3_sum += other.base_k3_sum
        self.base_tokens += other.base_tokens
        self.ratio += other.ratio
        self.weights += other.weights
        self.parity_max = max(self.parity_max, other.parity_max)
        self.parity_sum += other.parity_sum
        self.parity_tokens += other.parity_tokens
        self.non_finite = sorted({*self.non_finite, *other.non_finite})


def _held(routes: RoutingRecord, batch: MicroBatch) -> RoutingRecord:
    """Of a pack's routes those of the rows that this rank computes, once the pack was forwarded."""
    shard = batch.tokens.params.shard
    return routes if shard is None else routes.rows((shard.local >= 0).nonzero().squeeze(1).cpu())


def _free(groups: Sequence[TrainingGroup]) -> list[TrainingGroup]:
    """The groups without routes to replay."""
    return [replace(g, responses=tuple(replace(r, routes=None) for r in g.responses)) for g in groups]


@dataclass(frozen=True)
class BeforeUpdate:
    """Log-probabilities of one micro-batch's tokens from before a rollout's first update, FP32 [n] and detached.

    Attributes:
        old: of the policy; None where this update is the first, whose own forward gives them.
        base: of the model without its adapter; None unless the loss has a divergence from it.
    """

    old: Tensor | None = None
    base: Tensor | None = None


class Trainer:
    """Owns the model's training side: micro-batching, the objective and the optimizer.

    Args:
        model: the policy.
        registry: its noise.
        optimizer: over its adapters.
        config: the run's.
    """

    def __init__(
        self, model: PolicyChunks, registry: NoiseRegistry, optimizer: AdapterOptimizer, config: RunConfig
    ) -> None:
        self.model, self.registry, self.optimizer = model, registry, optimizer
        self.algorithm: AlgorithmSection = config.algorithm
        self.settings = config.train
        self.temperature = config.rollout.temperature
        self.constant_tokens = config.algorithm.loss_constant_tokens or config.rollout.max_new_tokens
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
        share = self.settings.share_prompt_prefix
        return [build_microbatch(b, self.device, share_prefix=share) for b in bins]

    def _microbatches(self, groups: Sequence[TrainingGroup]) -> list[MicroBatch]:
        """All of ``groups``, whatever the data-parallel size."""
        share = self.settings.share_prompt_prefix
        return self._build(plan_microbatches(groups, self.settings.microbatch_tokens, share_prefix=share))

    def _own_microbatches(self, groups: Sequence[TrainingGroup]) -> list[MicroBatch]:
        """This data-parallel rank's share of ``groups``, which are the same on every rank."""
        ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        share = self.settings.share_prompt_prefix
        return self._build(share_out(groups, self.settings.microbatch_tokens, ranks, share_prefix=share)[rank])

    def _run(self, chunks: list[Any], batches: list[MicroBatch], forward_step: Any, *, forward_only: bool) -> None:
        """Megatron's schedule over ``batches``; ``forward_step`` gets an iterator of (number, micro-batch)."""
        rounds = list(enumerate(batches))
        if len(chunks) > 1:  # interleaved stages take turns in rounds of as many micro-batches as there are ranks
            missing = -len(batches) % parallel_state.get_pipeline_model_parallel_world_size()
            rounds += [(len(batches) + i, filler) for i, filler in enumerate(self._build([()] * missing))]
        with megatron_calls():
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[iter(rounds) for _ in chunks],
                model=chunks,
                num_microbatches=len(rounds),
                seq_length=max(b.tokens.total_tokens for b in batches),
                micro_batch_size=1,
                forward_only=forward_only,
            )

    def logprobs(self, batches: list[MicroBatch], noise: NoiseState | None) -> list[tuple[Tensor, Tensor]]:
        """FP32 (log-probabilities, entropies) of each micro-batch's response tokens, no gradient, under ``noise``.

        Pipeline ranks call it together, and each of them gets the result.
        """
        results: dict[int, Tensor] = {}

        def forward_step(iterator: Iterator[tuple[int, MicroBatch]], model: Any) -> Any:
            number, batch = next(iterator)
            output = self._forward(model, batch)

            def loss(value: Any) -> Any:
                results[number] = torch.stack(value)
                return value[0].sum(), torch.tensor(1, dtype=torch.int), {}

            return output, loss

        with torch.no_grad(), self.registry.applied(noise):
            self._run(self.model.models, batches, forward_step, forward_only=True)
        sizes = [len(b.rollout_logprobs) for b in batches]
        if self.model.post_process:
            values = torch.cat([results[i] for i in range(len(batches))], dim=1)
        else:
            values = torch.empty(2, sum(sizes), device=self.device)
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast(values, src=last, group=parallel_state.get_pipeline_model_parallel_group())
        return [(lp, entropy) for lp, entropy in values.split(sizes, dim=1)]

    def probe(self, groups: Sequence[TrainingGroup], noise: NoiseState | None) -> Tensor:
        """Log-probabilities of a few responses as one vector, for proofs; order is that of packing."""
        return torch.cat([lp for lp, _ in self.logprobs(self._microbatches(groups), noise)])

    def measure_engine(self, groups: Sequence[TrainingGroup], noise: NoiseState) -> EngineComparison:
        """Score ``groups`` under the behaviour noise and without it, and compare with what the engine reported."""
        batches = self._microbatches(groups)
        noisy, noisy_entropy = map(torch.cat, zip(*self.logprobs(batches, noise), strict=True))
        clean, clean_entropy = map(torch.cat, zip(*self.logprobs(batches, None), strict=True))
        rollout = torch.cat([b.rollout_logprobs for b in batches])
        comparison = compare_engine(rollout, noisy, clean)
        entropies = {"entropy_noisy": float(noisy_entropy.mean()), "entropy_clean": float(clean_entropy.mean())}
        return replace(comparison, **entropies)

    def routing_flips(self, groups: Sequence[TrainingGroup], noise: NoiseState) -> dict[str, float]:
        """Shares of the routing choices for ``groups``, on the layers and tokens of this rank, nothing replayed.

        ``flipped_by_noise``: those that the noise changes. ``flipped_by_engine``, if the groups carry the engine's
        routes: those of the engine that the trainer would not make under the same noise.
        """
        batches = self._microbatches(_free(groups))
        noisy = self._routes(batches, noise)
        shares = {"flipped_by_noise": self._routes(batches, None).flipped_share(noisy)}
        if all(r.routes is not None for g in groups for r in g.responses):
            recorded = [
                _held(b.tokens.params.routing, own) for b, own in zip(self._microbatches(groups), batches, strict=True)
            ]
            engine = RoutingRecord.concatenate(recorded)
            engine = RoutingRecord({block: engine.experts[block] for block in noisy.experts})
            shares["flipped_by_engine"] = engine.flipped_share(noisy)
        return shares

    def _routes(self, batches: list[MicroBatch], noise: NoiseState | None) -> RoutingRecord:
        """Where this rank's layers send the tokens that it holds, padding left out."""
        records = []
        for batch in batches:
            with self.model.routing.recording() as kept:
                self.logprobs([batch], noise)
            shard, record = batch.tokens.params.shard, kept.record()
            records.append(record if shard is None else record.rows(shard.local[shard.local >= 0].cpu()))
        return RoutingRecord.concatenate(records)

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
        several = len(minibatches) > 1
        before = [self._before_update(b, forward_noise, several=several) for b in minibatches]
        with self.registry.applied(forward_noise):
            for index, batches in enumerate(minibatches):
                same_policy = index == 0 and (self.plan.replay_noise or not noise.active)
                part = StepStatistics()
                self._accumulate(batches, before[index], part, compare=same_policy)
                stats.add(self._finite_everywhere(part))
                stats.updates.append(self.optimizer.step())
        return stats

    def _before_update(
        self, batches: list[MicroBatch], noise: NoiseState | None, *, several: bool
    ) -> list[BeforeUpdate]:
        """What the loss of these micro-batches needs from before the first update, under the noise of the forward."""
        old: list[Tensor | None] = [None] * len(batches)
        base: list[Tensor | None] = [None] * len(batches)
        if self.plan.denominator == "trainer_old" and several:
            old = [lp for lp, _ in self.logprobs(batches, noise)]
        if self.algorithm.kl_coefficient > 0.0:
            with adapters_off(self.model):
                base = [lp for lp, _ in self.logprobs(batches, noise)]
        return [BeforeUpdate(o, b) for o, b in zip(old, base, strict=True)]

    def _accumulate(
        self, batches: list[MicroBatch], before: Sequence[BeforeUpdate], stats: StepStatistics, *, compare: bool
    ) -> None:
        """Gradients of one mini-batch."""
        self.optimizer.zero_grad()

        def forward_step(iterator: Iterator[tuple[int, MicroBatch]], model: Any) -> Any:
            number, batch = next(iterator)
            filler = BeforeUpdate(batch.rollout_logprobs, batch.rollout_logprobs)  # its tokens count nowhere
            known = before[number] if number < len(before) else filler
            output = self._forward(model, batch)

            def loss(value: Any) -> Any:
                total, count = self._loss(batch, value[0], value[1], known, stats, compare=compare)
                # Context-parallel ranks compute the same loss, and Megatron adds their counts.
                counted = count if parallel_state.get_context_parallel_rank() == 0 else 0
                return total, torch.tensor(counted, dtype=torch.int, device=self.device), {}

            return output, loss

        self._run(self.optimizer.ddp, batches, forward_step, forward_only=False)

    def _loss(
        self,
        batch: MicroBatch,
        logprobs: Tensor,
        entropy: Tensor,
        before: BeforeUpdate,
        stats: StepStatistics,
        *,
        compare: bool,
    ) -> tuple[Tensor, int]:
        """Summed loss of one micro-batch and what it is to be divided by, globally."""
        detached, mask = logprobs.detach(), batch.mask
        if compare:
            stats.add_parity(detached[mask], batch.rollout_logprobs[mask])
        old = detached if before.old is None else before.old
        unique, sequence = torch.unique(batch.sequence, return_inverse=True)
        inputs = LossInputs(
            logprobs=logprobs,
            old_logprobs=batch.rollout_logprobs if self.plan.denominator == "rollout" else old,
            advantages=batch.advantages,
            mask=mask,
            sequence=sequence,
            weights=self._weights(old, batch, sequence, stats) if self.plan.importance_weights else None,
            reference_logprobs=before.base,
        )
        token_loss = policy_loss(inputs, self.algorithm)
        mode = self.algorithm.loss_aggregation
        total = aggregate(token_loss.loss, mask, sequence, mode, 1, 1, self.constant_tokens)
        tokens = int(mask.sum())
        count = tokens if mode == "token_mean" else unique.numel() if tokens else 0
        if not bool(torch.isfinite(total)):
            # Raised in ``_finite_everywhere``: other ranks are in the middle of this mini-batch's collectives.
            stats.non_finite += batch.sequence[~torch.isfinite(token_loss.loss)].unique().tolist()
        stats.loss_sum += float(total.detach())
        stats.normaliser += count
        stats.tokens += tokens
        stats.entropy_sum += float(entropy[mask].sum())
        stats.ratio += ratio_statistics(token_loss)
        if before.base is not None:
            stats.add_divergence(detached, before.base, mask)
        return total, count

    def _weights(self, old: Tensor, batch: MicroBatch, sequence: Tensor, stats: StepStatistics) -> Tensor:
        """Importance weights from the behaviour policy to the trained one as it was before the rollout's updates."""
        importance = importance_weights(
            self.algorithm.importance_correction,
            old,
            batch.rollout_logprobs,
            batch.mask,
            sequence,
            floor=self.algorithm.importance_weight_floor,
            cap=self.algorithm.importance_weight_cap,
        )
        stats.weights += importance_statistics(importance)
        return importance.weights

    def _finite_everywhere(self, part: StepStatistics) -> StepStatistics:
        """The sums of a mini-batch over all ranks, the same on each of them.

        Only a pipeline's last stage knows its losses; tensor- and context-parallel ranks have them in common.

        Raises:
            NonFiniteError: on every rank, if a loss or a gradient is not finite on any; nothing was updated yet.
        """
        counts = (
            self.model.post_process
            and parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.get_context_parallel_rank() == 0
        )
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, (part if counts else None, self.optimizer.non_finite_gradients()))
        whole = StepStatistics()
        for found, _ in everywhere:
            if found is not None:
                whole.add(found)
        remedy = "this mini-batch was not applied; non_finite.json in the run folder holds the responses"
        if whole.non_finite:
            what = f"loss of update {self.optimizer.updates}"
            raise NonFiniteError(what, f"is not finite in responses {whole.non_finite[:8]} of the batch", remedy)
        gradients = [f"{name} on rank {rank}" for rank, (_, bad) in enumerate(everywhere) for name in bad]
        if gradients:
            raise NonFiniteError(
                f"gradient of update {self.optimizer.updates}",
                f"is not finite in {len(gradients)} parameters, first {gradients[0]} (loss {whole.loss_sum:g})",
                remedy,
            )
        return whole
