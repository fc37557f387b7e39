"""Time to quality when some runs never get there: Kaplan-Meier's curve and the mean restricted to a horizon.

A run that has not reached the quality when it ends is censored: the time it would have needed is longer, and how much
longer is unknown. Leaving such runs out, or taking their end for the time, makes slow arms look fast. Kaplan and Meier
(1958) use what is known of them. The area under the curve up to a horizon is the mean of min(time, horizon), which
exists although the mean of the time itself may not (Royston and Parmar 2013).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from megatron_qerl.metrics.intervals import CONFIDENCE


@dataclass(frozen=True)
class Observation:
    """One run: when it reached the quality, or, if ``reached`` is false, up to when it is known not to have."""

    time: float
    reached: bool

    def __post_init__(self) -> None:
        assert self.time >= 0.0, "times are counted from the start"


@dataclass(frozen=True)
class CurvePoint:
    """The curve from ``time`` on: share of runs that have not reached the quality yet.

    Attributes:
        at_risk: runs observed up to ``time`` without having reached it before.
        reached: runs that reach it at ``time``.
    """

    time: float
    survival: float
    at_risk: int
    reached: int


@dataclass(frozen=True)
class RestrictedMean:
    """Mean of min(time, horizon) with an interval from Greenwood's variance.

    Attributes:
        reached, censored: runs up to the horizon.
        low, high: None where the variance is zero or has no estimate: with few runs that is no certainty.
    """

    mean: float
    low: float | None
    high: float | None
    horizon: float
    reached: int
    censored: int


def kaplan_meier(observations: Sequence[Observation]) -> tuple[CurvePoint, ...]:
    """The curve's steps in order of time; before the first one it is 1.

    A run censored at the time of another's success counts as still at risk there, the usual convention.
    """
    assert observations, "a curve needs a run"
    survival, points = 1.0, []
    for time in sorted({o.time for o in observations if o.reached}):
        at_risk = sum(o.time >= time for o in observations)
        reached = sum(o.reached and o.time == time for o in observations)
        survival *= 1.0 - reached / at_risk
        points.append(CurvePoint(time, survival, at_risk, reached))
    return tuple(points)


def common_horizon(arms: Sequence[Sequence[Observation]]) -> float:
    """The longest time up to which every arm's curve is known.

    A curve ends with its arm's longest observation if that one is censored. If it is a success, no run is left and the
    curve is zero from there on. If that is so in all arms, the last success of all.
    """
    ends = []
    for arm in arms:
        longest = max(o.time for o in arm)
        if any(o.time == longest and not o.reached for o in arm):
            ends.append(longest)
    return min(ends) if ends else max(o.time for arm in arms for o in arm)


def restricted_mean(observations: Sequence[Observation], horizon: float) -> RestrictedMean:
    """Area under the curve up to ``horizon``, where the curve must still be known (see ``common_horizon``).

    The variance is sum over successes of area(t, horizon)^2 d / (n (n - d)), d of the n at risk.
    """
    points = [p for p in kaplan_meier(observations) if p.time <= horizon]
    times = [0.0, *(p.time for p in points), horizon]
    heights = [1.0, *(p.survival for p in points)]
    areas = [(end - begin) * height for begin, end, height in zip(times, times[1:], heights, strict=False)]
    variance = 0.0
    for index, point in enumerate(points, start=1):
        rest = math.fsum(areas[index:])
        if point.at_risk > point.reached:  # else the curve is zero from here on, and so is the rest
            variance += rest**2 * point.reached / (point.at_risk * (point.at_risk - point.reached))
    mean = math.fsum(areas)
    reached = sum(o.reached and o.time <= horizon for o in observations)
    low = high = None
    if variance > 0.0:
        half = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2.0) * math.sqrt(variance)
        low, high = max(0.0, mean - half), min(horizon, mean + half)
    return RestrictedMean(mean, low, high, horizon, reached, len(observations) - reached)


def median_time(observations: Sequence[Observation]) -> float | None:
    """The first time at which the curve is at most one half; None when it stays above."""
    return next((p.time for p in kaplan_meier(observations) if p.survival <= 0.5), None)
