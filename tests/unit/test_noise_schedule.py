"""Schedules by name, their endpoints, and what replacing or accumulating noise does to the displacement."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from megatron_qerl.config.noise import PUBLISHED_SIGMAS, NoiseSection
from megatron_qerl.noise.schedule import displacement_variances, sigma_of_stage

SCHEDULES = ("exponential", "linear", "cosine", "constant")


def sigmas(**settings: object) -> list[float]:
    section = NoiseSection(**settings)  # type: ignore[arg-type]
    return [sigma_of_stage(section, k) for k in range(section.stages)]


@pytest.mark.parametrize("source", PUBLISHED_SIGMAS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [3, 4, 10, 37])
def test_endpoints_are_exact(schedule: str, source: str, stages: int) -> None:
    start, end = PUBLISHED_SIGMAS[source]
    found = sigmas(schedule=schedule, stages=stages, source=source, sigma_start=start, sigma_end=end)
    assert found[0] == 0.0
    assert found[1] == start
    assert found[-1] == (start if schedule == "constant" else end)


@pytest.mark.parametrize("schedule", ["exponential", "linear", "cosine"])
def test_sigma_falls_at_every_stage_and_may_rise_if_asked_to(schedule: str) -> None:
    falling = sigmas(schedule=schedule, sigma_start=1e-2, sigma_end=5e-4)[1:]
    assert all(b < a for a, b in itertools.pairwise(falling))
    rising = sigmas(schedule=schedule, sigma_start=5e-4, sigma_end=1e-2)[1:]
    assert rising == pytest.approx(falling[::-1], rel=1e-12)


def test_the_papers_stages_in_between() -> None:
    """Nine noisy stages, exponent (k - 1) / 8; the middle one is the geometric mean."""
    found = sigmas(sigma_start=1e-2, sigma_end=5e-4, stages=10)
    assert found[5] == pytest.approx(math.sqrt(1e-2 * 5e-4), rel=1e-14)
    assert found[2] == pytest.approx(1e-2 * 0.05 ** (1 / 8), rel=1e-14)


def test_linear_and_cosine_meet_in_the_middle_and_differ_elsewhere() -> None:
    linear, cosine = (sigmas(schedule=s, sigma_start=1e-2, sigma_end=0.0, stages=6) for s in ("linear", "cosine"))
    assert linear[1:] == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3, 0.0], abs=1e-18)
    assert cosine[3] == pytest.approx(linear[3], rel=1e-14)
    assert cosine[2] == pytest.approx(1e-2 * (1 + math.cos(math.pi / 4)) / 2, rel=1e-14)
    assert cosine[2] > linear[2]


def test_two_stages_have_one_sigma() -> None:
    assert sigmas(stages=2, sigma_start=0.01, sigma_end=0.01) == [0.0, 0.01]


def test_replaced_noise_has_the_variance_of_its_draw_and_accumulated_noise_of_all() -> None:
    draws = [0.0, 1e-2, 5e-3, 5e-4]
    assert displacement_variances(draws, "replace") == (0.0, 1e-4, 2.5e-5, 2.5e-7)
    accumulated = displacement_variances(draws, "accumulate")
    assert accumulated == pytest.approx((0.0, 1e-4, 1.25e-4, 1.2525e-4), rel=1e-15)
    assert list(accumulated) == sorted(accumulated), "it does not anneal, whatever sigma does"


def test_the_bookkeeping_agrees_with_draws() -> None:
    draws = [3e-2, 2e-2, 1e-2]
    z_DN = np.random.default_rng(0).standard_normal((3, 200_000)) * np.array(draws)[:, None]
    for application, displacement_DN in (("replace", z_DN), ("accumulate", z_DN.cumsum(axis=0))):
        # Relative standard error of a variance over n draws: sqrt(2 / n) = 0.3 %; four of them.
        assert displacement_DN.var(axis=1) == pytest.approx(displacement_variances(draws, application), rel=0.013)


def test_another_application_is_refused() -> None:
    with pytest.raises(AssertionError, match="blend"):
        displacement_variances([0.1], "blend")
