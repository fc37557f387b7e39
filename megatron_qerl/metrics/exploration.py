"""Did exploration produce something to learn from? Counts over a step's groups, each with its denominator.

More different strings are not more exploration: a response without a readable answer is different, too. What an update
can use are groups whose rewards differ, and what makes the next rollouts better are different ways to a right answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_qerl.types import Group, Outcome, ScoredCompletion

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


def solution_path(text: str) -> tuple[str, ...]:
    """The numbers of a response in order: two responses with the same ones did the same arithmetic in other words."""
    return tuple(_NUMBER.findall(text))


@dataclass(frozen=True)
class ExplorationSignals:
    """What the groups of one step show.

    Attributes:
        groups, responses: how many.
        mixed_fraction: groups whose raw scores differ over all groups.
        valid_fraction: responses with a readable answer that was judged (correct or wrong) over all responses.
        invalid_fraction: unparsable or truncated over all responses; the rest are verifier timeouts, which say
            nothing about the policy.
        score_variance: mean over groups of the population variance of the raw score within the group.
        distinct_answers: mean over groups of the number of different answers among valid responses.
        distinct_solutions: mean over groups of the number of different ``solution_path`` among correct responses.
    """

    groups: int
    responses: int
    mixed_fraction: float
    valid_fraction: float
    invalid_fraction: float
    score_variance: float
    distinct_answers: float
    distinct_solutions: float

    def as_metrics(self) -> dict[str, float]:
        """Metric name -> value, besides ``groups/mixed_fraction``, which the sampling report has."""
        return {
            "outcome/valid_fraction": self.valid_fraction,
            "groups/score_variance": self.score_variance,
            "groups/distinct_answers": self.distinct_answers,
            "groups/distinct_solutions": self.distinct_solutions,
        }


def exploration_signals(groups: Sequence[Group]) -> ExplorationSignals:
    """Signals over all groups generated in a step, the dropped ones included; at least one group."""
    assert groups, "no group, no signal"
    responses = [r for group in groups for r in group.responses]
    outcomes = [r.judgement.outcome for r in responses]
    invalid = sum(o in (Outcome.UNPARSABLE, Outcome.TRUNCATED) for o in outcomes)
    return ExplorationSignals(
        groups=len(groups),
        responses=len(responses),
        mixed_fraction=sum(group.mixed for group in groups) / len(groups),
        valid_fraction=sum(map(_valid, responses)) / len(responses),
        invalid_fraction=invalid / len(responses),
        score_variance=sum(_variance(group.raw_scores) for group in groups) / len(groups),
        distinct_answers=sum(len({r.judgement.extracted for r in group.responses if _valid(r)}) for group in groups)
        / len(groups),
        distinct_solutions=sum(
            len({solution_path(r.text) for r in group.responses if r.judgement.outcome is Outcome.CORRECT})
            for group in groups
        )
        / len(groups),
    )


def _valid(response: ScoredCompletion) -> bool:
    return response.judgement.outcome in (Outcome.CORRECT, Outcome.WRONG)


def _variance(scores: Sequence[float]) -> float:
    mean = sum(scores) / len(scores)
    return sum((s - mean) ** 2 for s in scores) / len(scores)
