"""Noise on a norm scale is a row scaling; budgets that make arms comparable."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_qerl.errors import FaultError
from megatron_qerl.noise.budget import (
    calibrate_arms,
    calibrate_sigma,
    equal_variance_factor,
    relative_budget,
    row_scaling,
)


def test_noise_on_a_norm_scale_is_a_row_scaling_of_the_next_weight() -> None:
    """50 random matrices in float64: u (w + z) W against (u w) (diag(1 + z / w) W), entries of size one."""
    rng, worst = np.random.default_rng(7), 0.0
    for _ in range(50):
        channels, outputs = int(rng.integers(8, 65)), int(rng.integers(4, 33))
        x = rng.standard_normal((3, channels))
        u = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-6)
        w, z = 1.0 + 0.2 * rng.standard_normal(channels), 0.05 * rng.standard_normal(channels)
        weight = rng.standard_normal((channels, outputs)) / math.sqrt(channels)
        additive = (u * (w + z)) @ weight
        multiplicative = (u * w) @ (row_scaling(z, w)[:, None] * weight)
        worst = max(worst, float(np.abs(additive - multiplicative).max()))
    # 64 products of size 1/8, each with two or three roundings of 2^-53: below 64 * 3 * 1.1e-16 / 8 = 2.7e-15.
    assert worst <= 1e-14
    assert worst > 0.0, "the two sides were computed differently"


def test_a_zero_scale_has_no_row_scaling() -> None:
    with pytest.raises(FaultError, match="scale 1 is zero"):
        row_scaling(np.array([0.1, 0.1]), np.array([1.0, 0.0]))


# Relative budget -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0.01, 1.0, 30.0])
def test_a_relative_budget_is_met_whatever_the_size_of_the_scales(size: float) -> None:
    scale = size * np.array([1.0, -2.0, 0.5, 1.5, 1.0])
    budget = relative_budget(scale, 0.02)
    assert budget.near_zero == ()
    assert math.sqrt(np.mean((budget.sigma / scale) ** 2)) == pytest.approx(0.02, rel=1e-14)
    assert budget.relative_rms == pytest.approx(0.02, rel=1e-14)
    assert budget.relative_max == pytest.approx(budget.sigma / (0.5 * size), rel=1e-14)


def test_near_zero_scales_are_reported_and_bounded() -> None:
    scale = np.array([1.0, 1.0, 1.0, 1e-4, 0.0, -1.0, -0.05])
    budget = relative_budget(scale, 0.02)
    assert budget.near_zero == (3, 4, 6)
    assert budget.sigma == pytest.approx(0.02)
    assert budget.shrink == pytest.approx([1, 1, 1, 1e-3, 0.0, 1, 0.5])
    # Without shrinking channel 3 would have a deviation of 200 times its scale; the bound is sigma / floor.
    assert budget.relative_max == pytest.approx(0.02 / 0.1)
    z = budget.sigma * budget.shrink * 3.0
    assert np.abs(z[scale != 0] / scale[scale != 0]).max() <= 3.0 * budget.relative_max * (1 + 1e-12)
    assert z[4] == 0.0


def test_half_dead_norms_have_no_relative_noise() -> None:
    with pytest.raises(FaultError, match="at least half of its scales are zero"):
        relative_budget(np.array([0.0, 0.0, 0.0, 1.0]), 0.01)


def test_a_layerwise_budget_is_scaled_to_the_uniform_ones_variance() -> None:
    sigmas, channels = {"a": 0.01, "b": 0.04}, {"a": 100, "b": 300}
    factor = equal_variance_factor(sigmas, channels, 0.02)
    assert sum(channels[k] * (factor * sigmas[k]) ** 2 for k in sigmas) == pytest.approx(400 * 0.02**2, rel=1e-14)


# Equal output perturbation -------------------------------------------------------------------------------------------

CURVES = {
    "small noise": lambda s: 3.0 * s**2,
    "saturating": lambda s: 2.0 * (1.0 - math.exp(-400.0 * s**2)),
    "steep": lambda s: math.expm1(60.0 * s**1.5),
    "nothing below rounding": lambda s: max(0.0, 5.0 * (s - 1e-3) ** 2) if s > 1e-3 else 0.0,
}


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("target", [1e-4, 1e-3])
def test_sigma_is_found_where_the_divergence_is_the_target(curve: str, target: float) -> None:
    found = calibrate_sigma(CURVES[curve], target, 1e-5, 0.5, relative_tolerance=1e-3)
    assert CURVES[curve](found.sigma) == pytest.approx(target, rel=1e-3)
    assert found.kl_nats == CURVES[curve](found.sigma)
    assert found.evaluations <= 30


def test_a_quadratic_needs_three_measurements() -> None:
    assert calibrate_sigma(lambda s: 3.0 * s**2, 1e-3, 1e-5, 0.5).evaluations == 3


def test_a_bound_that_is_the_answer_is_taken() -> None:
    assert calibrate_sigma(lambda s: s**2, 1e-4, 1e-2, 0.5).sigma == pytest.approx(1e-2)


def test_arms_of_different_structure_end_at_the_same_divergence() -> None:
    """Shared against independent noise in a linear softmax: the same sigma differs, the calibrated ones do not."""
    rng = np.random.default_rng(3)
    u, weight = rng.standard_normal((40, 16)), rng.standard_normal((16, 5))
    shared, independent = rng.standard_normal((200, 16, 1)), rng.standard_normal((200, 16, 5))

    def log_softmax(logits: np.ndarray) -> np.ndarray:
        return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)

    def divergence(noise: np.ndarray):
        clean = log_softmax(u @ weight)

        def kl(sigma: float) -> float:
            noisy = log_softmax(u @ (weight * (1.0 + sigma * noise)))
            return float((np.exp(clean) * (clean - noisy)).sum(axis=-1).mean())

        return kl

    arms = {"shared": divergence(shared), "independent": divergence(independent)}
    assert abs(arms["shared"](0.05) / arms["independent"](0.05) - 1.0) > 0.05
    found = calibrate_arms(arms, 1e-2, 1e-4, 1.0)
    for name, kl in arms.items():
        assert kl(found[name].sigma) == pytest.approx(1e-2, rel=0.01)


@pytest.mark.parametrize(
    ("curve", "message"),
    [
        (lambda s: s**2, "gives 1e-10 .. 0.25 nats"),
        (lambda s: float("nan"), "is nan"),
        (lambda s: 2.0 if s > 0.01 else 1e-9, "did not converge"),
    ],
)
def test_a_target_out_of_reach_is_an_error(curve, message: str) -> None:
    with pytest.raises(FaultError, match=message):
        calibrate_sigma(curve, 1.0, 1e-5, 0.5)
