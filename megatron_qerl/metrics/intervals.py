"""Intervals for an accuracy, with problems that are not independent.

Answers to phrasings of one operand pair, or several samples for one question, rise and fall together. Treated as
independent they make an interval that is too narrow, so clusters are resampled, not answers. The bootstrap has nothing
to resample when all clusters have the same mean (all right, all wrong, one cluster): its interval would collapse to a
point and claim certainty. There the Wilson interval on the number of clusters is returned instead, as ``method`` says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

Method = Literal["cluster_bootstrap", "wilson_on_clusters"]
DifferenceMethod = Literal["cluster_bootstrap", "newcombe_on_clusters"]
CONFIDENCE = 0.95
_RESAMPLES_AT_ONCE = 256


@dataclass(frozen=True)
class Interval:
    """A mean with its two-sided interval at ``CONFIDENCE``.

    Attributes:
        mean: share of right answers, 0 to 1.
        low, high: bounds, 0 to 1.
        count: answers.
        clusters: independent units.
        method: how the bounds were found.
    """

    mean: float
    low: float
    high: float
    count: int
    clusters: int
    method: Method


@dataclass(frozen=True)
class Difference:
    """A difference of two shares, the first less the second, with its two-sided interval at ``CONFIDENCE``.

    Attributes:
        mean: -1 to 1.
        low, high: bounds.
        count: pairs of answers.
        clusters: independent units.
        method: how the bounds were found.
    """

    mean: float
    low: float
    high: float
    count: int
    clusters: int
    method: DifferenceMethod


def wilson_interval(successes: float, trials: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson's score interval for a binomial share (Wilson 1927). Never empty, never outside [0, 1].

    Args:
        successes: between 0 and ``trials``; fractional when it is a mean over clusters times their number.
        trials: independent trials, at least 1.
        confidence: two-sided coverage, between 0 and 1.
    """
    assert trials >= 1, "an interval needs a trial"
    assert -1e-9 <= successes <= trials + 1e-9, "successes cannot exceed trials"
    z = NormalDist().inv_cdf(0.5 + confidence / 2.0)
    share = min(1.0, max(0.0, successes / trials))
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    # The ends at 0 and 1 are exact in algebra; rounding must not leave 1 - 1e-17.
    low = 0.0 if share == 0.0 else max(0.0, centre - half)
    high = 1.0 if share == 1.0 else min(1.0, centre + half)
    return low, high


def accuracy_interval(outcomes: Sequence[bool], clusters: Sequence[str], resamples: int, seed: int) -> Interval:
    """Share of right answers with a percentile bootstrap interval over clusters.

    Each resample draws as many clusters as there are, with replacement, and takes the share of right answers among all
    answers in them, so a cluster weighs by its size. If all clusters have the same mean, the interval is Wilson's with
    one trial a cluster.

    Args:
        outcomes: one a graded answer, at least one.
        clusters: the cluster of each answer, same length.
        resamples: bootstrap draws.
        seed: of the draws; the same arguments give the same interval.
    """
    assert len(outcomes) == len(clusters), "one cluster an answer"
    assert outcomes, "an accuracy needs an answer"
    names, cluster_index = np.unique(np.asarray(clusters, dtype=object).astype(str), return_inverse=True)
    right_C = np.bincount(cluster_index, weights=np.asarray(outcomes, dtype=np.float64))
    size_C = np.bincount(cluster_index).astype(np.float64)
    count, total = len(outcomes), len(names)
    mean = float(right_C.sum() / count)

    shares_C = right_C / size_C
    if np.all(shares_C == shares_C[0]):
        low, high = wilson_interval(mean * total, total)
        return Interval(mean, low, high, count, total, "wilson_on_clusters")

    shares_R = _resampled_shares(right_C, size_C, resamples, seed)
    tail = (1.0 - CONFIDENCE) / 2.0
    low, high = (float(bound) for bound in np.quantile(shares_R, [tail, 1.0 - tail]))
    return Interval(mean, low, high, count, total, "cluster_bootstrap")


def difference_interval(
    first: Sequence[bool], second: Sequence[bool], clusters: Sequence[str], resamples: int, seed: int
) -> Difference:
    """Difference of two shares of right answers to the same problems, with a percentile bootstrap over clusters.

    Both arms' answers to a problem are drawn together, so that what makes a problem hard for both cancels. If the
    difference is the same in every cluster, the draws would all agree; then Wilson's intervals of the two shares, with
    one trial a cluster, are combined as Newcombe (1998, method 10) does for independent ones, which is wider.

    Args:
        first, second: one a graded answer, pair by pair, at least one.
        clusters: the cluster of each pair, same length.
        resamples: bootstrap draws.
        seed: of the draws.
    """
    assert len(first) == len(second) == len(clusters), "one answer of each arm and one cluster a pair"
    assert first, "a difference needs a pair"
    names, cluster_index = np.unique(np.asarray(clusters, dtype=object).astype(str), return_inverse=True)
    gap = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
    gap_C = np.bincount(cluster_index, weights=gap)
    size_C = np.bincount(cluster_index).astype(np.float64)
    count, total = len(first), len(names)
    mean = float(gap.mean())

    means_C = gap_C / size_C
    if np.all(means_C == means_C[0]):
        shares = [float(np.mean(np.asarray(arm, dtype=np.float64))) for arm in (first, second)]
        (low_1, high_1), (low_2, high_2) = (wilson_interval(share * total, total) for share in shares)
        low = mean - math.hypot(shares[0] - low_1, high_2 - shares[1])
        high = mean + math.hypot(high_1 - shares[0], shares[1] - low_2)
        return Difference(mean, max(-1.0, low), min(1.0, high), count, total, "newcombe_on_clusters")

    gaps_R = _resampled_shares(gap_C, size_C, resamples, seed)
    tail = (1.0 - CONFIDENCE) / 2.0
    low, high = (float(bound) for bound in np.quantile(gaps_R, [tail, 1.0 - tail]))
    return Difference(mean, low, high, count, total, "cluster_bootstrap")


def _resampled_shares(right_C: np.ndarray, size_C: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """The share of right answers in each of ``resamples`` draws of len(right_C) clusters with replacement."""
    generator = np.random.Generator(np.random.PCG64(seed))
    shares = []
    for start in range(0, resamples, _RESAMPLES_AT_ONCE):
        rows = min(_RESAMPLES_AT_ONCE, resamples - start)
        drawn_RC = generator.integers(len(right_C), size=(rows, len(right_C)))
        shares.append(right_C[drawn_RC].sum(axis=1) / size_C[drawn_RC].sum(axis=1))
    return np.concatenate(shares)


def intervals_apart(first: Interval, second: Interval) -> bool:
    """Whether the two intervals share no point: stricter than a test of the difference, so a cautious yes."""
    return first.high < second.low or second.high < first.low
