"""Dynamic sampling: which groups go, why, and how many are asked for again."""

from __future__ import annotations

import pytest

from megatron_qerl.algorithms.filters import refill_plan, sampling_report, split_by_signal
from megatron_qerl.metrics.names import METRICS
from megatron_qerl.types import Outcome
from tests.support.groups import make_group

MIXED = make_group([1.0, 0.0, 0.0])
ALL_RIGHT = make_group([1.0, 1.0])
ALL_WRONG = make_group([0.0, 0.0], outcomes=[Outcome.UNPARSABLE, Outcome.TIMEOUT])
NO_VERDICT = make_group([0.0, 0.0], outcomes=[Outcome.TIMEOUT, Outcome.TIMEOUT])


def test_groups_are_sorted_by_reason_and_keep_their_order():
    second_mixed = make_group([0.0, 1.0])
    result = split_by_signal([ALL_WRONG, MIXED, ALL_RIGHT, second_mixed, NO_VERDICT])
    assert result.kept == (MIXED, second_mixed)
    assert result.dropped_all_correct == (ALL_RIGHT,)
    assert result.dropped_all_wrong == (ALL_WRONG,)
    assert result.dropped_other == (NO_VERDICT,)
    assert result.generated == 5


def test_a_spread_that_only_shaping_made_is_no_signal():
    wrong_but_of_different_lengths = make_group([0.0, 0.0], rewards=[-0.5, 0.0])
    assert split_by_signal([wrong_but_of_different_lengths]).dropped_all_wrong


def test_a_spread_that_shaping_hid_is_a_signal():
    assert split_by_signal([make_group([1.0, 0.0], rewards=[0.0, 0.0])]).kept


def test_equal_scores_for_right_and_wrong_are_named_apart():
    group = make_group([0.0, 0.0], outcomes=[Outcome.CORRECT, Outcome.WRONG])
    assert split_by_signal([group]).dropped_other == (group,)


@pytest.mark.parametrize(
    ("kept", "wanted", "rounds_done", "expected"),
    [(5, 8, 0, 3), (5, 8, 2, 3), (5, 8, 3, 0), (8, 8, 0, 0), (9, 8, 0, 0), (0, 8, 0, 8)],
)
def test_refills_ask_for_what_is_missing_until_the_bound(kept, wanted, rounds_done, expected):
    assert refill_plan(kept, wanted, rounds_done, max_refills=3) == expected


def test_no_refills_means_none():
    assert refill_plan(kept=0, wanted=8, rounds_done=0, max_refills=0) == 0


def test_the_report_sums_the_rounds_and_names_the_shortfall():
    rounds = [split_by_signal([MIXED, ALL_RIGHT, ALL_WRONG]), split_by_signal([MIXED, NO_VERDICT])]
    report = sampling_report(rounds, wanted=3)
    assert report.as_metrics() == {
        "groups/generated": 5.0,
        "groups/kept": 2.0,
        "groups/dropped_all_correct": 1.0,
        "groups/dropped_all_wrong": 1.0,
        "groups/dropped_other": 1.0,
        "groups/refill_rounds": 1.0,
        "groups/shortfall": 1.0,
        "groups/mixed_fraction": 0.4,
    }


def test_metric_names_are_registered():
    assert set(sampling_report([split_by_signal([MIXED])], wanted=1).as_metrics()) <= set(METRICS)


def test_a_step_that_generated_nothing_has_no_mixed_fraction():
    assert "groups/mixed_fraction" not in sampling_report([], wanted=0).as_metrics()
