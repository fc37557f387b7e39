"""Signals of exploration over a step's groups."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_qerl.metrics.exploration import exploration_signals, solution_path
from megatron_qerl.types import Group, Judgement, Outcome
from tests.support.groups import make_group

RIGHT, WRONG, NO_ANSWER, CUT, LATE = (
    Outcome.CORRECT,
    Outcome.WRONG,
    Outcome.UNPARSABLE,
    Outcome.TRUNCATED,
    Outcome.TIMEOUT,
)


def group(*responses: tuple[Outcome, str | None, str]) -> Group:
    made = make_group([float(outcome is RIGHT) for outcome, _, _ in responses])
    scored = tuple(
        replace(r, judgement=Judgement(outcome, float(outcome is RIGHT), answer), text=text)
        for r, (outcome, answer, text) in zip(made.responses, responses, strict=True)
    )
    return replace(made, responses=scored)


GROUPS = [
    group(
        (RIGHT, "7", "3 + 4 = 7"),
        (RIGHT, "7", "3 plus 4 makes 7"),
        (RIGHT, "7", "4 + 3 = 7"),
        (WRONG, "8", "3 + 4 = 8"),
    ),
    group((WRONG, "1", "1"), (WRONG, "2", "2"), (NO_ANSWER, None, "so"), (CUT, None, "1, 2, 3,")),
    group((LATE, None, "x"), (RIGHT, "5", "5"), (RIGHT, "5", "5"), (RIGHT, "5", "5")),
]


def test_every_signal_has_its_own_denominator() -> None:
    found = exploration_signals(GROUPS)
    assert (found.groups, found.responses) == (3, 12)
    assert found.mixed_fraction == 2 / 3
    assert found.valid_fraction == 9 / 12
    assert found.invalid_fraction == 2 / 12, "a timeout is neither valid nor the policy's fault"
    assert found.score_variance == pytest.approx((3 / 16 + 0 + 3 / 16) / 3)
    assert found.distinct_answers == pytest.approx((2 + 2 + 1) / 3)
    assert found.distinct_solutions == pytest.approx((2 + 0 + 1) / 3)


def test_more_different_strings_are_not_more_solutions() -> None:
    said_otherwise = group((RIGHT, "7", "3 + 4 = 7"), (RIGHT, "7", "Take 3, add 4: 7."), (WRONG, "9", "9"))
    babble = group((NO_ANSWER, None, "1"), (NO_ANSWER, None, "2"), (NO_ANSWER, None, "3"))
    assert exploration_signals([said_otherwise]).distinct_solutions == 1
    assert exploration_signals([babble]).distinct_solutions == exploration_signals([babble]).distinct_answers == 0


def test_a_solution_path_is_its_numbers_in_order() -> None:
    assert solution_path("First 12*3 = 36, then 36/4.5 = 8.") == ("12", "3", "36", "36", "4.5", "8")
    assert solution_path("none") == ()
    assert solution_path("3+4") != solution_path("4+3")


def test_no_group_is_refused() -> None:
    with pytest.raises(AssertionError, match="no group"):
        exploration_signals([])
