"""Importance weights by token and by response, truncated and masked."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron_qerl.algorithms.correction import WeightStatistics, importance_statistics, importance_weights

# Three responses of 2, 1 and 3 tokens; the last token of the third is not trained.
RATIOS = [3.0, 0.5, 0.2, 1.0, 2.0, 50.0]
SEQUENCE = torch.tensor([0, 0, 1, 2, 2, 2])
MASK = torch.tensor([True, True, True, True, True, False])
FLOOR, CAP = 0.4, 1.8


def weigh(rule: Any, floor: float = FLOOR, cap: float = CAP) -> Any:
    behaviour = torch.full((6,), -1.0, dtype=torch.float64)
    target = behaviour + torch.tensor(RATIOS, dtype=torch.float64).log()
    return importance_weights(rule, target, behaviour, MASK, SEQUENCE, floor=floor, cap=cap)


EXPECTED = {
    "token_truncate": [1.8, 0.5, 0.2, 1.0, 1.8, 0.0],
    "token_mask": [0.0, 0.5, 0.0, 1.0, 0.0, 0.0],
    # Products 1.5, 0.2 and 2.0.
    "sequence_truncate": [1.5, 1.5, 0.2, 1.8, 1.8, 0.0],
    "sequence_mask": [1.5, 1.5, 0.0, 0.0, 0.0, 0.0],
}


@pytest.mark.parametrize("rule", EXPECTED)
def test_the_weights_of_each_rule(rule: str) -> None:
    assert weigh(rule).weights.tolist() == pytest.approx(EXPECTED[rule], rel=1e-12)


@pytest.mark.parametrize("rule", EXPECTED)
def test_with_infinite_bounds_every_rule_is_the_exact_ratio(rule: str) -> None:
    products = [1.5, 1.5, 0.2, 2.0, 2.0, 0.0]
    expected = products if rule.startswith("sequence") else [*RATIOS[:5], 0.0]
    assert weigh(rule, floor=0.0, cap=math.inf).weights.tolist() == pytest.approx(expected, rel=1e-12)


def test_statistics_by_token() -> None:
    metrics = importance_statistics(weigh("token_mask")).as_metrics()
    assert metrics == pytest.approx(
        {
            "correction/weight_mean": 1.5 / 5,
            "correction/weight_max": 3.0,
            "correction/effective_sample_fraction": 1.5**2 / 1.25 / 5,
            "correction/truncated_fraction": 0.0,
            "correction/dropped_fraction": 3 / 5,
        }
    )


def test_statistics_by_response_count_each_response_once() -> None:
    metrics = importance_statistics(weigh("sequence_truncate")).as_metrics()
    assert metrics["correction/weight_max"] == pytest.approx(2.0)
    assert metrics["correction/truncated_fraction"] == 2 / 5
    used = (1.5, 0.2, 1.8)
    expected = sum(used) ** 2 / sum(w * w for w in used) / 3
    assert metrics["correction/effective_response_fraction"] == pytest.approx(expected)
    assert importance_statistics(weigh("token_truncate")).responses == 0


def test_if_every_response_is_dropped_the_effective_sample_is_empty() -> None:
    metrics = importance_statistics(weigh("sequence_mask", floor=5.0, cap=6.0)).as_metrics()
    assert metrics["correction/dropped_fraction"] == 1.0
    assert metrics["correction/effective_response_fraction"] == metrics["correction/effective_sample_fraction"] == 0.0


@pytest.mark.parametrize("rule", EXPECTED)
def test_statistics_of_parts_add_up(rule: str) -> None:
    behaviour = torch.full((6,), -1.0, dtype=torch.float64)
    target = behaviour + torch.tensor(RATIOS, dtype=torch.float64).log()

    def part(cut: slice) -> WeightStatistics:
        numbers = torch.unique(SEQUENCE[cut], return_inverse=True)[1]
        return importance_statistics(
            importance_weights(rule, target[cut], behaviour[cut], MASK[cut], numbers, floor=FLOOR, cap=CAP)  # type: ignore[arg-type]
        )

    whole = part(slice(None)).as_metrics()
    assert (part(slice(0, 3)) + part(slice(3, 6)) + WeightStatistics()).as_metrics() == pytest.approx(whole, rel=1e-12)


def test_a_long_response_does_not_overflow() -> None:
    length = 400
    target, behaviour = torch.zeros(length), torch.full((length,), -2.0)
    one, mask = torch.zeros(length, dtype=torch.int64), torch.ones(length, dtype=torch.bool)
    weights = importance_weights("sequence_truncate", target, behaviour, mask, one, floor=0.0, cap=2.0)
    assert weights.weights.tolist() == [2.0] * length
    assert weights.weights.dtype == torch.float32


def test_garbage_under_a_false_mask_touches_no_response() -> None:
    behaviour = torch.full((6,), -1.0, dtype=torch.float64)
    target = behaviour + torch.tensor(RATIOS, dtype=torch.float64).log()
    target[5] = math.nan
    weights = importance_weights("sequence_truncate", target, behaviour, MASK, SEQUENCE, floor=0.0, cap=CAP)
    assert weights.weights.tolist() == pytest.approx(EXPECTED["sequence_truncate"])
