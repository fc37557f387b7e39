"""Small groups of scored completions for tests."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_qerl.types import (
    Completion,
    Group,
    Judgement,
    Outcome,
    PolicyVersion,
    Problem,
    Prompt,
    ScoredCompletion,
)

POLICY = PolicyVersion("base", 0, "adapter", None, 1.0, 1.0, 0)
PROBLEM = Problem(uid="add:3,4:0", question="What is 3 + 4?", answer="7", cluster="add:3,4", source="arithmetic")


def make_scored(
    score: float, outcome: Outcome | None = None, length_tokens: int = 3, reward: float | None = None, index: int = 0
) -> ScoredCompletion:
    """A completion of ``length_tokens`` tokens; the outcome follows from the score unless given."""
    if outcome is None:
        outcome = Outcome.CORRECT if score > 0 else Outcome.WRONG
    return ScoredCompletion(
        completion=Completion((5,) * length_tokens, (-0.5,) * length_tokens, "stop", POLICY, index),
        judgement=Judgement(outcome, score, "7"),
        reward=score if reward is None else reward,
        text="7",
    )


def make_group(
    scores: Sequence[float],
    rewards: Sequence[float] | None = None,
    outcomes: Sequence[Outcome] | None = None,
) -> Group:
    """A group with these raw scores and, if given, shaped rewards and outcomes."""
    responses = tuple(
        make_scored(
            score,
            outcome=None if outcomes is None else outcomes[index],
            reward=None if rewards is None else rewards[index],
            index=index,
        )
        for index, score in enumerate(scores)
    )
    return Group(prompt=Prompt(PROBLEM, (1, 2, 3)), responses=responses)
