"""Intervals for accuracies: known values, coverage under clustering, and degenerate data."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_qerl.metrics.intervals import (
    accuracy_interval,
    difference_interval,
    intervals_apart,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    # Newcombe 1998, table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_interval_has_its_published_values(successes, trials, low, high):
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=5e-5)


def test_wilson_bounds_solve_the_score_equation():
    """Each bound p satisfies (share - p)^2 = z^2 p (1 - p) / n: the definition."""
    share, n, z = 0.37, 41, 1.959963984540054
    for bound in wilson_interval(share * n, n):
        assert (share - bound) ** 2 == pytest.approx(z * z * bound * (1 - bound) / n)


def clustered(generator, clusters, size, spread):
    """Answers whose chance of being right differs between clusters by ``spread`` around one half."""
    chances = 0.5 + spread * (generator.random(clusters) * 2 - 1)
    right = generator.random((clusters, size)) < chances[:, None]
    return right.ravel().tolist(), [f"c{index}" for index in range(clusters) for _ in range(size)]


def test_the_interval_holds_the_truth_as_often_as_it_claims():
    """95 % nominal; a percentile bootstrap of 40 clusters falls short by about two points, and the answers taken for
    independent would cover far less. Binomial standard error over 300 trials: 1.3 points."""
    generator = np.random.Generator(np.random.PCG64(0))
    covered = independent = 0
    for trial in range(300):
        outcomes, names = clustered(generator, clusters=40, size=12, spread=0.45)
        interval = accuracy_interval(outcomes, names, resamples=400, seed=trial)
        covered += interval.low <= 0.5 <= interval.high
        low, high = wilson_interval(sum(outcomes), len(outcomes))
        independent += low <= 0.5 <= high
    assert 0.90 <= covered / 300 <= 0.98
    assert independent / 300 < 0.85


def test_clusters_of_one_agree_with_wilson():
    outcomes = [True] * 120 + [False] * 80
    interval = accuracy_interval(outcomes, [str(n) for n in range(200)], resamples=4000, seed=1)
    assert interval.method == "cluster_bootstrap"
    assert (interval.low, interval.high) == pytest.approx(wilson_interval(120, 200), abs=0.01)


def test_a_cluster_weighs_by_its_answers():
    interval = accuracy_interval([True, True, True, False], ["a", "a", "a", "b"], resamples=2000, seed=1)
    assert interval.mean == 0.75
    # The draws are aa, ab, ba, bb: shares 1, 3/4, 3/4, 0.
    assert (interval.low, interval.high) == (0.0, 1.0)
    assert (interval.count, interval.clusters) == (4, 2)


@pytest.mark.parametrize("right", [True, False])
def test_all_right_or_all_wrong_is_no_certainty(right):
    names = [f"c{index}" for index in range(25) for _ in range(8)]
    interval = accuracy_interval([right] * 200, names, resamples=100, seed=1)
    assert interval.method == "wilson_on_clusters"
    assert (interval.low, interval.high) == wilson_interval(25 * right, 25)
    assert interval.high - interval.low > 0.1


def test_one_cluster_is_one_trial():
    interval = accuracy_interval([True, False, True, True], ["a"] * 4, resamples=100, seed=1)
    assert interval.method == "wilson_on_clusters"
    assert interval.mean == 0.75
    assert (interval.low, interval.high) == wilson_interval(0.75, 1)
    assert interval.high - interval.low > 0.75


def test_equal_shares_in_every_cluster_do_not_collapse_the_interval():
    interval = accuracy_interval([True, False] * 30, [f"c{n // 2}" for n in range(60)], resamples=100, seed=1)
    assert interval.method == "wilson_on_clusters"
    assert interval.low < 0.35
    assert interval.high > 0.65


def test_the_same_seed_gives_the_same_interval_and_the_order_of_answers_does_not_matter():
    generator = np.random.Generator(np.random.PCG64(3))
    outcomes, names = clustered(generator, clusters=20, size=5, spread=0.4)
    first = accuracy_interval(outcomes, names, resamples=500, seed=9)
    assert accuracy_interval(outcomes, names, resamples=500, seed=9) == first
    assert accuracy_interval(outcomes, names, resamples=500, seed=10) != first
    assert accuracy_interval(outcomes[::-1], names[::-1], resamples=500, seed=9) == first


def test_numbers_are_plain_floats():
    interval = accuracy_interval([True, False, False], ["a", "b", "c"], resamples=50, seed=1)
    assert {type(number) for number in (interval.mean, interval.low, interval.high)} == {float}
    assert {type(number) for number in (interval.count, interval.clusters)} == {int}


def test_intervals_are_apart_only_if_they_share_no_point():
    names = [str(n) for n in range(200)]

    def interval(right):
        return accuracy_interval([n < right for n in range(200)], names, resamples=500, seed=1)

    low, middle, high = interval(40), interval(48), interval(120)
    assert intervals_apart(low, high)
    assert intervals_apart(high, low)
    assert not intervals_apart(low, middle)
    assert not intervals_apart(low, low)


def test_no_answers_is_an_error():
    with pytest.raises(AssertionError, match="needs an answer"):
        accuracy_interval([], [], resamples=10, seed=1)


def test_a_difference_is_of_pairs_and_what_both_share_cancels():
    # Problems are easy or hard for both arms alike, and the first is better in one problem of ten.
    generator = np.random.Generator(np.random.PCG64(5))
    second = generator.random(400) < 0.5
    first = second.copy()
    first[::10] = True
    second[::10] = False
    names = [str(n) for n in range(400)]
    paired = difference_interval(first.tolist(), second.tolist(), names, resamples=2000, seed=1)
    assert paired.mean == pytest.approx(0.1)
    # Standard error of a paired difference with 10 % discordant pairs, all one way: sqrt(0.1 * 0.9 / 400) = 0.015.
    assert (paired.low, paired.high) == pytest.approx((0.1 - 1.96 * 0.015, 0.1 + 1.96 * 0.015), abs=0.004)
    shuffled = generator.permutation(400)
    apart = difference_interval(first.tolist(), second[shuffled].tolist(), names, resamples=2000, seed=1)
    assert apart.high - apart.low > 2 * (paired.high - paired.low)


def test_a_difference_turns_its_sign_with_its_arms_and_is_zero_with_itself():
    first, second, names = [True, True, False, True], [False, True, False, False], ["a", "a", "b", "c"]
    there = difference_interval(first, second, names, resamples=500, seed=3)
    back = difference_interval(second, first, names, resamples=500, seed=3)
    assert (there.mean, there.low, there.high) == (-back.mean, -back.high, -back.low)
    assert (there.count, there.clusters, there.method) == (4, 3, "cluster_bootstrap")
    assert difference_interval(first, first, names, resamples=50, seed=3).mean == 0.0


def test_the_same_answers_are_no_certainty_that_arms_are_equal():
    same = [True, False] * 20
    found = difference_interval(same, same, [str(n) for n in range(40)], resamples=100, seed=1)
    assert found.method == "newcombe_on_clusters"
    low, high = wilson_interval(20, 40)
    half = ((0.5 - low) ** 2 + (high - 0.5) ** 2) ** 0.5
    assert (found.low, found.high) == pytest.approx((-half, half))


def test_newcombes_published_example():
    # Newcombe (1998), Table II, (a): 56/70 against 48/80 is 0.2, 95 % interval 0.0524 to 0.3339 (method 10). Here both
    # arms have as many problems, so 0.8 and 0.6 of 75 clusters each, by the same formula.
    low_1, high_1 = wilson_interval(60, 75)
    low_2, high_2 = wilson_interval(45, 75)
    groups = [([True, True, True, True, False], [True, True, True, False, False]) for _ in range(75)]
    first = [answer for one, _ in groups for answer in one]
    second = [answer for _, two in groups for answer in two]
    names = [str(n // 5) for n in range(375)]
    found = difference_interval(first, second, names, resamples=100, seed=1)
    assert found.method == "newcombe_on_clusters"
    assert found.low == pytest.approx(0.2 - ((0.8 - low_1) ** 2 + (high_2 - 0.6) ** 2) ** 0.5)
    assert found.high == pytest.approx(0.2 + ((high_1 - 0.8) ** 2 + (0.6 - low_2) ** 2) ** 0.5)
    assert (found.low, found.high) == pytest.approx((0.0524, 0.3339), abs=0.01)


def test_the_interval_of_a_difference_holds_the_truth_as_often_as_it_claims():
    generator = np.random.Generator(np.random.PCG64(11))
    covered = 0
    for trial in range(200):
        hardness = np.repeat(generator.uniform(0.2, 0.8, 40), 5)
        first = generator.random(200) < np.clip(hardness + 0.1, 0, 1)
        second = generator.random(200) < hardness
        names = [str(n // 5) for n in range(200)]
        found = difference_interval(first.tolist(), second.tolist(), names, resamples=300, seed=trial)
        covered += found.low <= 0.1 <= found.high
    # 200 trials at 95 %: within 4.5 standard errors of 190, less what few clusters cost a percentile bootstrap.
    assert covered >= 174


def test_a_difference_needs_pairs():
    with pytest.raises(AssertionError, match="a pair"):
        difference_interval([True], [True, False], ["a"], resamples=10, seed=1)
    with pytest.raises(AssertionError, match="needs a pair"):
        difference_interval([], [], [], resamples=10, seed=1)
