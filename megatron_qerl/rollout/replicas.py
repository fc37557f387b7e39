"""Answering prompts on all replicas: each generates its share, its leader judges, and every rank gets everything.

All later decisions (which groups carry a signal, how the batch is cut, what is recorded) are then the same computation
on the same values everywhere, and equal to one rank's.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from megatron_qerl.config.schema import RewardSection
from megatron_qerl.errors import FaultError
from megatron_qerl.layers.routing import RoutingRecord
from megatron_qerl.metrics.phases import PhaseClock
from megatron_qerl.parallel.ranks import Ranks
from megatron_qerl.rewards.math import MathVerifier
from megatron_qerl.rollout.engine import GenerationRequest, RolloutEngine
from megatron_qerl.types import Completion, Group, Judgement, Prompt, SamplingParams, ScoredCompletion


class Verifier(Protocol):
    """Judges answers; ``rewards.math.MathVerifier`` is one."""

    def judge_all(self, items: Sequence[tuple[str, str, str]]) -> list[Judgement]:
        """One judgement for each (completion text, reference answer, finish reason)."""
        ...


@contextmanager
def open_verifier(section: RewardSection, ranks: Ranks) -> Iterator[MathVerifier | None]:
    """The verifier on a replica's leader, None on its other ranks."""
    if not ranks.leads:
        yield None
        return
    with MathVerifier(section, section.workers) as verifier:
        yield verifier


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
            # Routes take their own way, together with those of other pipeline stages.
            scored.append(ScoredCompletion(replace(c, routes=None), judgement, judgement.score, text))
        groups.append(Group(prompt, tuple(scored)))
    return groups


class Replicas:
    """The engines of all replicas as one.

    Args:
        engine: this rank's.
        verifier: on a leader; None elsewhere.
        tokenizer: decodes.
        ranks: all processes.
    """

    def __init__(self, engine: RolloutEngine, verifier: Verifier | None, tokenizer: Any, ranks: Ranks) -> None:
        assert (verifier is not None) == ranks.leads, "leaders judge, and only they"
        self.engine, self.verifier, self.tokenizer, self.ranks = engine, verifier, tokenizer, ranks

    def answer(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParams, clock: PhaseClock | None = None
    ) -> list[Group]:
        """Judged groups of all requests, in order, on every rank; replica r generates every ``replicas``-th from r.

        Args:
            requests: the same on every rank.
            clock: charged with ``rollout`` and ``reward``; None charges nothing apart.

        Raises:
            FaultError: the ranks of a replica drew different tokens.
        """
        clock = clock or PhaseClock()
        own = requests[self.ranks.replica :: self.ranks.replicas]
        with clock.phase("rollout"):
            completions = self.engine.generate(own, sampling) if own else []
        with clock.phase("reward"):
            groups = None
            if self.verifier is not None:
                groups = score_groups([r.prompt for r in own], completions, self.tokenizer, self.verifier)
        routes = None
        if self.ranks.leads_stage and any(r.routes for r in own):
            routes = [[c.routes for c in group] for group in completions]
        with clock.phase("rollout"):  # mostly waiting for the slowest replica
            merged = self._merged(len(requests), _digest(completions), groups)
            return self._routed(merged, routes) if any(r.routes for r in requests) else merged

    def _routed(self, groups: list[Group], routes: list[list[RoutingRecord]] | None) -> list[Group]:
        """The groups with every stage's record of their tokens."""
        found: list[list[list[RoutingRecord]]] = [[[] for _ in group.responses] for group in groups]
        for replica, part in self.ranks.gather((self.ranks.replica, routes)):
            for group, records in zip(found[replica :: self.ranks.replicas], part or (), strict=False):
                for response, record in zip(group, records, strict=True):
                    response.append(record)
        return [
            replace(
                group,
                responses=tuple(
                    replace(r, completion=replace(r.completion, routes=RoutingRecord.union(parts)))
                    for r, parts in zip(group.responses, records, strict=True)
                ),
            )
            for group, records in zip(groups, found, strict=True)
        ]

    def _merged(self, count: int, digest: str, groups: list[Group] | None) -> list[Group]:
        everywhere = self.ranks.gather((self.ranks.replica, digest, groups))
        drawn: dict[int, str] = {}
        merged: list[Group | None] = [None] * count
        for rank, (replica, found, part) in enumerate(everywhere):
            if drawn.setdefault(replica, found) != found:
                raise FaultError(
                    f"generation on rank {rank}",
                    f"drew other tokens than the ranks of its replica {replica}",
                    "their logits differ, so a weight or a sum differs between them; report this as a bug",
                )
            if part is not None:
                merged[replica :: self.ranks.replicas] = part
        assert all(g is not None for g in merged), "every replica has a leader"
        return [g for g in merged if g is not None]


def _digest(completions: Sequence[Sequence[Completion]]) -> str:
    """SHA-256 over tokens and log-probabilities, bit for bit."""
    digest = hashlib.sha256()
    for group in completions:
        for c in group:
            digest.update(f"{c.response_index} {c.finish_reason} {len(c.token_ids)} ".encode())
            digest.update(array("q", c.token_ids).tobytes())
            digest.update(array("d", c.logprobs).tobytes())
    return digest.hexdigest()
