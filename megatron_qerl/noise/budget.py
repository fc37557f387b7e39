"""How much noise each norm gets, so that arms of an experiment can be compared at an equal amount of it.

Additive noise z on a norm scale w multiplies row j of the next weight by 1 + z_j / w_j, so one sigma for all norms
shakes a layer with small scales more than one with large scales. Three budgets answer "how much":

* absolute: one sigma for every norm, as published.
* relative: each norm gets the sigma at which the root mean square of z / w is the same. A channel whose scale is close
  to zero would still be multiplied out of proportion: it is reported, and its noise is shrunk so that no channel has a
  relative deviation above the floor's.
* equal output: each arm gets the sigma at which a probe's divergence from the clean policy is the same, found by
  ``calibrate_sigma``. This is the fair comparison between kinds of noise, whatever their structure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_qerl.errors import FaultError

NEAR_ZERO_SHARE = 0.1
"""A scale below this share of its norm's median magnitude counts as near zero."""


def row_scaling(z: NDArray[np.float64], scale: NDArray[np.float64]) -> NDArray[np.float64]:
    """d = 1 + z / w: what multiplies row j of the next weight when z is added to the norm scale w (reading, 5.1).

    Raises:
        FaultError: a scale is zero, where the additive form is defined and the multiplicative one is not.
    """
    zeros = np.flatnonzero(scale == 0.0)
    if zeros.size:
        raise FaultError(
            f"row scaling of a norm with {scale.size} channels",
            f"scale {zeros[0]} is zero, and 1 + z / w has no value there",
            "use the additive form u * (w + z)",
        )
    return 1.0 + z / scale


@dataclass(frozen=True)
class NormBudget:
    """Noise of one norm under a relative budget.

    Attributes:
        sigma: deviation of z on the channels that are not near zero.
        shrink: float64 [channels], at most 1: the factor on z, below 1 on near-zero channels alone.
        near_zero: channels whose scale is below the floor.
        relative_rms: root mean square over the other channels of the deviation of z / w: the budget, met exactly.
        relative_max: the largest deviation of z / w over all channels with a scale, after shrinking.
    """

    sigma: float
    shrink: NDArray[np.float64]
    near_zero: tuple[int, ...]
    relative_rms: float
    relative_max: float


def relative_budget(
    scale: NDArray[np.float64], relative: float, near_zero_share: float = NEAR_ZERO_SHARE
) -> NormBudget:
    """The noise of one norm whose z / w has the root mean square ``relative``.

    Args:
        scale: float [channels], the clean norm scale as the model was trained (AWQ's division undone), not all zero.
        relative: wanted root mean square of z / w over the channels that are not near zero; 0 gives no noise.
        near_zero_share: the floor, as a share of the median magnitude.

    Raises:
        FaultError: half of the scales or more are zero, so that there is no size to be relative to.
    """
    size = np.abs(np.asarray(scale, dtype=np.float64))
    floor = near_zero_share * float(np.median(size))
    if floor == 0.0:
        raise FaultError(
            f"relative noise on a norm with {size.size} channels",
            "at least half of its scales are zero",
            "use noise.budget: absolute, or leave this role out of noise.roles",
        )
    counted = size >= floor
    sigma = relative / math.sqrt(float(np.mean(1.0 / size[counted] ** 2)))
    shrink = np.where(counted, 1.0, size / floor)
    deviation = sigma * shrink[size > 0.0] / size[size > 0.0]
    rms = sigma * math.sqrt(float(np.mean(1.0 / size[counted] ** 2)))
    near_zero = tuple(int(channel) for channel in np.flatnonzero(~counted))
    return NormBudget(sigma, shrink, near_zero, rms, float(deviation.max()))


def equal_variance_factor[Key](sigmas: Mapping[Key, float], channels: Mapping[Key, int], sigma: float) -> float:
    """The factor on ``sigmas`` at which they spend the variance of one ``sigma`` on every norm.

    A layer-wise budget has to be compared with the uniform one at the same total, sum over norms of channels times
    sigma^2 (reading, section 5.2).

    Args:
        sigmas: deviation of each norm, not all zero.
        channels: channels of the same norms.
        sigma: of the uniform budget.
    """
    assert set(sigmas) == set(channels), "one sigma and one size a norm"
    spent = math.fsum(channels[key] * sigmas[key] ** 2 for key in sigmas)
    assert spent > 0.0, "a budget of nothing cannot be scaled"
    return math.sqrt(sum(channels.values()) * sigma**2 / spent)


@dataclass(frozen=True)
class Calibration:
    """A sigma and what it does: ``kl_nats`` measured there, and how many measurements were made."""

    sigma: float
    kl_nats: float
    evaluations: int


def calibrate_sigma(
    kl_of_sigma: Callable[[float], float],
    target_nats: float,
    low: float,
    high: float,
    *,
    relative_tolerance: float = 0.01,
    max_evaluations: int = 40,
) -> Calibration:
    """The sigma between ``low`` and ``high`` at which the measured divergence is ``target_nats``.

    False position on logarithms with the Illinois rule. A divergence grows with sigma^2 for small sigma, a straight
    line there, so a handful of measurements suffices; the bracket is kept, so a curve that only bends converges too.

    Args:
        kl_of_sigma: mean KL(clean || noisy) a token on a probe, with the *same* standard normal draws for every sigma,
            so that it is a smooth function and not a new sample each time.
        target_nats: wanted divergence, positive.
        low, high: 0 < low < high.
        relative_tolerance: of the divergence.
        max_evaluations: calls of ``kl_of_sigma`` at most.

    Raises:
        FaultError: the target is not reached within the bounds, a measurement is not a finite number of zero or more,
            or the search did not converge.
    """
    assert 0.0 < low < high, "bounds of sigma are positive and ordered"
    assert target_nats > 0.0, "a divergence of zero needs no search"

    def gap(log_sigma: float) -> tuple[float, float]:
        return _log_gap(kl_of_sigma, log_sigma, target_nats)

    left, right = math.log(low), math.log(high)
    (kl_left, gap_left), (kl_right, gap_right) = gap(left), gap(right)
    for log_sigma, value in ((left, kl_left), (right, kl_right)):
        if abs(value / target_nats - 1.0) <= relative_tolerance:
            return Calibration(math.exp(log_sigma), value, 2)
    if gap_left > 0.0 or gap_right < 0.0:
        raise _uncalibrated(target_nats, f"sigma {low:g} .. {high:g} gives {kl_left:.3g} .. {kl_right:.3g} nats")
    kept = 0
    for evaluations in range(3, max_evaluations + 1):
        middle = (left * gap_right - right * gap_left) / (gap_right - gap_left)
        if gap_left < -100.0 or not left < middle < right:  # no slope to read where noise drowns in rounding
            middle = (left + right) / 2.0
        value, here = gap(middle)
        if abs(value / target_nats - 1.0) <= relative_tolerance:
            return Calibration(math.exp(middle), value, evaluations)
        # An end that stays twice in a row would slow the search down; half its gap, as Illinois does.
        if here < 0.0:
            left, gap_left = middle, here
            gap_right, kept = (gap_right / 2.0 if kept == 1 else gap_right), 1
        else:
            right, gap_right = middle, here
            gap_left, kept = (gap_left / 2.0 if kept == -1 else gap_left), -1
    raise _uncalibrated(target_nats, f"{max_evaluations} measurements did not converge; the curve may jump")


def _log_gap(kl_of_sigma: Callable[[float], float], log_sigma: float, target_nats: float) -> tuple[float, float]:
    """(divergence, how far its logarithm is above the target's)."""
    sigma = math.exp(log_sigma)
    value = float(kl_of_sigma(sigma))
    if not (math.isfinite(value) and value >= 0.0):
        raise _uncalibrated(target_nats, f"the divergence at sigma {sigma:.3g} is {value}")
    # A divergence of exactly zero (noise below rounding) has no logarithm; it is as far below as floats go.
    return value, math.log(max(value, 1e-300)) - math.log(target_nats)


def calibrate_arms(
    arms: Mapping[str, Callable[[float], float]], target_nats: float, low: float, high: float
) -> dict[str, Calibration]:
    """``calibrate_sigma`` for each arm of an experiment: afterwards all have the same divergence, to its tolerance."""
    return {name: calibrate_sigma(kl, target_nats, low, high) for name, kl in arms.items()}


def _uncalibrated(target_nats: float, found: str) -> FaultError:
    return FaultError(
        f"sigma for a divergence of {target_nats:g} nats",
        found,
        "choose another target or wider bounds, or a probe with more tokens",
    )
