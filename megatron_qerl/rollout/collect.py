"""Collecting one step's groups: draw prompts, generate, judge, shape, filter, refill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_qerl.algorithms.filters import FilterResult, SamplingReport, refill_plan, sampling_report, split_by_signal
from megatron_qerl.algorithms.shaping import shape
from megatron_qerl.config.schema import RunConfig
from megatron_qerl.data.order import DataOrder
from megatron_qerl.metrics.phases import PhaseClock
from megatron_qerl.rollout.engine import GenerationRequest
from megatron_qerl.rollout.replicas import Replicas
from megatron_qerl.types import Group, Prompt, SamplingParams


@dataclass(frozen=True)
class CollectedStep:
    """What one step generated.

    Attributes:
        trainable: groups to train on: those with a signal under dynamic sampling, else all.
        generated: every group of every round.
        report: what dynamic sampling did.
        data_position: position in the data order after this step.
        stream: number of the next draw.
    """

    trainable: tuple[Group, ...]
    generated: tuple[Group, ...]
    report: SamplingReport
    data_position: int
    stream: int


class Collector:
    """Collects steps. Every rank collects the same step: what to generate is decided from what all have seen.

    Args:
        replicas: generate and judge.
        prompts: rendered training prompts, by problem index.
        config: the run's.
        routes: whether responses shall carry the experts that their tokens went to.
    """

    def __init__(
        self, replicas: Replicas, prompts: Sequence[Prompt], config: RunConfig, *, routes: bool = False
    ) -> None:
        self.replicas, self.prompts, self.config, self.routes = replicas, prompts, config, routes
        self.order = DataOrder(len(prompts), config.run.seed)

    def collect(self, sampling: SamplingParams, data_position: int, stream: int, clock: PhaseClock) -> CollectedStep:
        """One step's groups under the engine's published policy."""
        dynamic = self.config.algorithm.dynamic_sampling
        wanted = self.config.rollout.prompts_per_step
        rounds: list[FilterResult] = []
        generated: list[Group] = []
        kept: list[Group] = []
        missing = wanted
        while missing:
            indices, data_position = self.order.take(data_position, missing)
            chosen = [self.prompts[i] for i in indices]
            groups = self._round(chosen, sampling, stream, clock)
            stream += len(chosen)
            result = split_by_signal(groups)
            rounds.append(result)
            generated.extend(groups)
            kept.extend(result.kept)
            if not dynamic.enabled:
                break
            missing = refill_plan(len(kept), wanted, len(rounds) - 1, dynamic.max_refills)
        trainable = tuple(kept if dynamic.enabled else generated)
        report = sampling_report(rounds, wanted)
        return CollectedStep(trainable, tuple(generated), report, data_position, stream)

    def _round(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, stream: int, clock: PhaseClock
    ) -> list[Group]:
        size = self.config.rollout.group_size
        requests = [GenerationRequest(p, size, stream + i, self.routes) for i, p in enumerate(prompts)]
        return [self._shaped(group) for group in self.replicas.answer(requests, sampling, clock)]

    def _shaped(self, group: Group) -> Group:
        section = self.config.algorithm.overlong
        if not section.enabled:
            return group
        limit = self.config.rollout.max_new_tokens
        return Group(group.prompt, tuple(shape(r, section, limit) for r in group.responses))
