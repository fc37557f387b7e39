"""The registry refuses what it does not know and defines what it knows."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_qerl.errors import FaultError, NonFiniteError
from megatron_qerl.metrics.names import GROUPS, METRICS, PHASES, check_names, metrics_of_group
from megatron_qerl.types import Outcome, StepMetrics


def test_a_misspelt_name_is_refused_with_the_closest_known_one() -> None:
    with pytest.raises(FaultError, match=r"step 3: reward/maen \(did you mean reward/mean\?\)"):
        check_names(StepMetrics(3, {"reward/maen": 0.5, "reward/std": 0.1}))


def test_every_unknown_name_of_a_line_is_listed() -> None:
    with pytest.raises(FaultError, match=r"zz/qq, lenght/mean_tokens"):
        check_names(StepMetrics(1, {"zz/qq": 1.0, "lenght/mean_tokens": 2.0}))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), np.float32("nan")])
def test_a_value_that_is_not_finite_is_refused_by_name(value: float) -> None:
    with pytest.raises(NonFiniteError, match="ratio/max"):
        check_names(StepMetrics(1, {"reward/mean": 0.0, "ratio/max": value}))


@pytest.mark.parametrize("value", [True, "0.5", None, [0.5]])
def test_a_value_that_is_no_number_is_refused_by_name(value: object) -> None:
    with pytest.raises(FaultError, match="optimizer/clipped"):
        check_names(StepMetrics(1, {"optimizer/clipped": value}))  # type: ignore[dict-item]


def test_all_registered_names_pass_together_with_numpy_and_int_values() -> None:
    check_names(StepMetrics(0, {name: np.float32(0.5) for name in METRICS}))
    check_names(StepMetrics(0, dict.fromkeys(METRICS, 7)))


def test_every_metric_has_a_sentence_a_unit_and_a_plot_and_every_plot_a_metric() -> None:
    for name, metric in METRICS.items():
        assert name == metric.name
        assert name.count("/") == 1
        assert metric.unit
        assert metric.definition.endswith(".")
        assert metric.definition[0].isupper() or metric.definition.startswith("(sum")
    for group in GROUPS:
        assert metrics_of_group(group.key), f"plot {group.key} is empty"
    assert len({group.key for group in GROUPS}) == len(GROUPS)


def test_names_that_end_in_a_unit_are_registered_with_that_unit() -> None:
    units = {"_s": "s", "_bytes": "bytes", "_tokens": "tokens", "_nats": "nats", "_fraction": "fraction"}
    for name, metric in METRICS.items():
        for suffix, unit in units.items():
            if name.endswith(suffix):
                assert metric.unit == unit, name


def test_every_outcome_and_every_phase_has_its_metric() -> None:
    assert {f"outcome/{outcome.value}_fraction" for outcome in Outcome} <= METRICS.keys()
    assert {f"time/{phase}_s" for phase in (*PHASES, "other", "step")} == {
        name for name in METRICS if name.startswith("time/")
    }
