"""Collecting one step's groups: draw prompts, generate, judge, shape, filter, refill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_qerl.algorithms.filters import FilterResult, SamplingReport, refill_plan, sampling_report, split_by_signal
from megatron_qerl.algorithms.shaping import shape
from megatron_qerl.config.schema import RunConfig
from megatron_qerl.data.order import DataOrder
from megatron_qerl.metrics.phases import PhaseClock
from megatron_qerl.rollout.engine import GenerationRequest, RolloutEngine
from megatron_qerl.types import Completion, Group, Judgement, Prompt, SamplingParams, ScoredCompletion


class Verifier(Protocol):
    """Judges answers; ``rewards.math.MathVerifier`` is one."""

    def judge_all(self, items: Sequence[tuple[str, str, str]]) -> list[Judgement]:
        """One judgement for each (completion text, reference answer, finish reason)."""
        ...


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


def score_groups(
    prompts: Sequence[Prompt],
    completions: Sequence[Sequence[Completion]],
    tokenizer: Any,
    verifier: Verifier,
) -> list[Group]:
    """Decode and judge completions; the reward is the raw score, not yet shaped."""
    texts = [[tokenizer.decode(list(c.token_ids), skip_special_tokens=True) for c in group] for group in completions]
    items = [
        (text, prompt.problem.answer, c.finish_reason)
        for prompt, group, group_texts in zip(prompts, completions, texts, strict=True)
        for c, text in zip(group, group_texts, strict=True)
    ]
    judgements = iter(verifier.judge_all(items))
    groups = []
    for prompt, group, group_texts in zip(prompts, completions, texts, strict=True):
        scored = []
        for c, text in zip(group, group_texts, strict=True):
            judgement = next(judgements)
            scored.append(ScoredCompletion(c, judgement, judgement.score, text))
        groups.append(Group(prompt, tuple(scored)))
    return groups


class Collector:
    """Collects steps.

    Args:
        engine: generates.
        verifier: judges.
        tokenizer: decodes.
        prompts: rendered training prompts, by problem index.
        config: the run's.
    """

    def __init__(
        self, engine: RolloutEngine, verifier: Verifier, tokenizer: Any, prompts: Sequence[Prompt], config: RunConfig
    ) -> None:
        self.engine, self.verifier, self.tokenizer = engine, verifier, tokenizer
        self.prompts, self.config = prompts, config
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
        requests = [GenerationRequest(p, size, stream + i) for i, p in enumerate(prompts)]
        with clock.phase("rollout"):
            completions = self.engine.generate(requests, sampling)
        with clock.phase("reward"):
            groups = score_groups(prompts, completions, self.tokenizer, self.verifier)
            return [self._shaped(group) for group in groups]

    def _shaped(self, group: Group) -> Group:
        section = self.config.algorithm.overlong
        if not section.enabled:
            return group
        limit = self.config.rollout.max_new_tokens
        return Group(group.prompt, tuple(shape(r, section, limit) for r in group.responses))
