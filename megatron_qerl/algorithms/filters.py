"""Dynamic sampling (DAPO section 3.2): groups without a learning signal are dropped and, up to a bound, replaced.

A group is judged on the raw task score. Judged on the shaped reward, a group that is wrong throughout would be kept
because its responses differ in length, and the update would then learn length alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_qerl.types import Group, Outcome


@dataclass(frozen=True)
class FilterResult:
    """Groups of one round of generation, by verdict; each keeps its order.

    Attributes:
        kept: the raw scores differ.
        dropped_all_correct: equal scores, every response correct.
        dropped_all_wrong: equal scores, none correct, and at least one response got a verdict.
        dropped_other: equal scores for another reason: the verifier timed out on every response, or the configured
            scores of a right and a wrong answer are the same. More than a few of these point to a broken setup.
    """

    kept: tuple[Group, ...]
    dropped_all_correct: tuple[Group, ...]
    dropped_all_wrong: tuple[Group, ...]
    dropped_other: tuple[Group, ...]

    @property
    def generated(self) -> int:
        """Groups that went in."""
        return sum(map(len, (self.kept, self.dropped_all_correct, self.dropped_all_wrong, self.dropped_other)))


def split_by_signal(groups: Sequence[Group]) -> FilterResult:
    """Sort groups by whether their raw scores differ, and by why not."""
    kept, correct, wrong, other = [], [], [], []
    for group in groups:
        outcomes = {response.judgement.outcome for response in group.responses}
        if group.mixed:
            kept.append(group)
        elif outcomes == {Outcome.CORRECT}:
            correct.append(group)
        elif Outcome.CORRECT not in outcomes and outcomes != {Outcome.TIMEOUT}:
            wrong.append(group)
        else:
            other.append(group)
    return FilterResult(tuple(kept), tuple(correct), tuple(wrong), tuple(other))


def refill_plan(kept: int, wanted: int, rounds_done: int, max_refills: int) -> int:
    """How many groups to generate next; 0 means that the step goes on with what it has.

    Exactly the missing number is asked for, so no group with a signal is generated and then thrown away.

    Args:
        kept: groups with a signal so far.
        wanted: groups that a step should train on.
        rounds_done: refill rounds already made; the first generation is not one.
        max_refills: bound on refill rounds.
    """
    return max(0, wanted - kept) if rounds_done < max_refills else 0


@dataclass(frozen=True)
class SamplingReport:
    """What one step's dynamic sampling did, counted in groups."""

    generated: int
    kept: int
    dropped_all_correct: int
    dropped_all_wrong: int
    dropped_other: int
    refill_rounds: int
    shortfall: int

    def as_metrics(self) -> dict[str, float]:
        """Registered metric name -> value. The mixed fraction is of all generated groups; absent if there are none."""
        metrics = {
            "groups/generated": float(self.generated),
            "groups/kept": float(self.kept),
            "groups/dropped_all_correct": float(self.dropped_all_correct),
            "groups/dropped_all_wrong": float(self.dropped_all_wrong),
            "groups/dropped_other": float(self.dropped_other),
            "groups/refill_rounds": float(self.refill_rounds),
            "groups/shortfall": float(self.shortfall),
        }
        if self.generated:
            metrics["groups/mixed_fraction"] = self.kept / self.generated
        return metrics


def sampling_report(rounds: Sequence[FilterResult], wanted: int) -> SamplingReport:
    """Sum up a step's rounds of generation: the first and its refills."""
    kept = sum(len(r.kept) for r in rounds)
    return SamplingReport(
        generated=sum(r.generated for r in rounds),
        kept=kept,
        dropped_all_correct=sum(len(r.dropped_all_correct) for r in rounds),
        dropped_all_wrong=sum(len(r.dropped_all_wrong) for r in rounds),
        dropped_other=sum(len(r.dropped_other) for r in rounds),
        refill_rounds=max(0, len(rounds) - 1),
        shortfall=max(0, wanted - kept),
    )
