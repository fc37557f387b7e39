from __future__ import annotations

import math

import pytest

from megatron_qerl.metrics.survival import (
    Observation,
    common_horizon,
    kaplan_meier,
    median_time,
    restricted_mean,
)

# 6-mercaptopurine arm of Freireich et al. (1963), the textbooks' example; minus marks censoring.
LEUKEMIA = (6, 6, 6, -6, 7, -9, 10, -10, -11, 13, 16, -17, -19, -20, 22, 23, -25, -32, -32, -34, -35)


def observe(*times: float) -> list[Observation]:
    return [Observation(abs(time), reached=time > 0) for time in times]


def test_the_textbook_curve() -> None:
    curve = kaplan_meier(observe(*LEUKEMIA))
    # (time, survival, at risk) as Kleinbaum and Klein tabulate them.
    expected = [(6, 0.857, 21), (7, 0.807, 17), (10, 0.753, 15), (13, 0.690, 12), (16, 0.627, 11), (22, 0.538, 7)]
    expected.append((23, 0.448, 6))
    assert [(p.time, p.at_risk) for p in curve] == [(t, n) for t, _, n in expected]
    assert [p.survival for p in curve] == pytest.approx([s for _, s, _ in expected], abs=6e-4)
    assert curve[0].reached == 3
    assert median_time(observe(*LEUKEMIA)) == 23


def test_without_censoring_the_restricted_mean_is_the_mean_of_the_capped_times() -> None:
    times = (1.0, 2.0, 4.0, 9.0)
    for horizon in (3.0, 9.0, 12.0):
        found = restricted_mean(observe(*times), horizon)
        assert found.mean == pytest.approx(sum(min(t, horizon) for t in times) / 4)


def test_a_hand_worked_restricted_mean_with_censoring() -> None:
    # At risk 4 at t=1: S = 3/4. Censored at 2. At risk 2 at t=3: S = 3/8. The last is censored at 5.
    found = restricted_mean(observe(1, -2, 3, -5), 5.0)
    assert found.mean == pytest.approx(1 * 1 + 2 * 0.75 + 2 * 0.375)
    # Greenwood: area after 1 is 1.5 + 0.75, after 3 is 0.75.
    variance = 2.25**2 * 1 / (4 * 3) + 0.75**2 * 1 / (2 * 1)
    assert found.low is not None
    assert found.mean - found.low == pytest.approx(1.959964 * math.sqrt(variance), abs=1e-5)
    assert (found.high, found.reached, found.censored) == (min(5.0, 2 * found.mean - found.low), 2, 2)


def test_without_censoring_greenwoods_variance_is_that_of_the_mean() -> None:
    # Then sum area^2 d / (n (n - d)) is the population variance of the times over their number.
    times = (1.0, 2.0, 4.0, 9.0)
    found = restricted_mean(observe(*times), 9.0)
    mean = sum(times) / 4
    error = math.sqrt(sum((t - mean) ** 2 for t in times) / 4 / 4)
    assert found.low is not None
    assert found.mean - found.low == pytest.approx(1.959964 * error, abs=1e-5)


def test_a_run_that_never_gets_there_counts_up_to_the_horizon_and_has_no_interval() -> None:
    found = restricted_mean(observe(-10, -10), 10.0)
    assert (found.mean, found.low, found.high, found.reached, found.censored) == (10.0, None, None, 0, 2)
    assert kaplan_meier(observe(-10, -10)) == ()
    assert median_time(observe(-10, -10)) is None


def test_events_after_the_horizon_are_censored_by_it() -> None:
    found = restricted_mean(observe(2, 8), 4.0)
    assert (found.mean, found.reached, found.censored) == (2 + 2 * 0.5, 1, 1)


def test_a_run_censored_at_the_time_of_a_success_was_at_risk_then() -> None:
    assert kaplan_meier(observe(3, -3))[0].at_risk == 2


def test_the_horizon_is_the_longest_time_that_all_arms_are_known_for() -> None:
    assert common_horizon([observe(3, -10), observe(-7, 2), observe(9)]) == 7
    # An arm whose runs have all succeeded has a curve of zero afterwards: it must not cut the others short.
    assert common_horizon([observe(2, 3), observe(-10, 4)]) == 10
    assert restricted_mean(observe(2, 3), 10.0).mean == pytest.approx(2.5)
    assert common_horizon([observe(3, -3), observe(-10)]) == 3
    assert common_horizon([observe(2, 3), observe(5)]) == 5


def test_misuse_is_an_error() -> None:
    with pytest.raises(AssertionError, match="needs a run"):
        kaplan_meier([])
    with pytest.raises(AssertionError, match="from the start"):
        Observation(-1.0, reached=True)
