"""Group-relative advantages."""

from __future__ import annotations

import math

import pytest

from megatron_qerl.algorithms.advantage import advantages_for_update, group_advantages, with_advantages
from megatron_qerl.config.schema import AlgorithmSection
from tests.support.groups import make_group


def test_one_right_of_four_gives_root_three():
    assert group_advantages([1.0, 0.0, 0.0, 0.0], epsilon=0.0) == pytest.approx(
        (math.sqrt(3), *[-1 / math.sqrt(3)] * 3), rel=1e-15
    )


def test_standard_deviation_is_the_populations():
    # The sample standard deviation of (0, 2) is sqrt(2), the population's 1.
    assert group_advantages([0.0, 2.0], epsilon=0.0) == (-1.0, 1.0)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -0.7, 1 / 3])
@pytest.mark.parametrize("size", [1, 3, 7, 8])
def test_equal_rewards_give_exact_zeros(reward, size):
    # 0.1 + 0.1 + 0.1 is not 0.3 in binary: without the test for equality these would be +-1 for epsilon = 0.
    assert group_advantages([reward] * size, epsilon=0.0) == (0.0,) * size
    assert all(math.copysign(1.0, a) == 1.0 for a in group_advantages([reward] * size, epsilon=1e-6))


def test_epsilon_is_added_to_the_deviation():
    assert group_advantages([1.0, -1.0], epsilon=0.25) == pytest.approx((0.8, -0.8))


def test_advantages_sum_to_zero_and_do_not_change_with_the_unit_of_reward():
    rewards = [0.2, 1.0, -0.4, 0.9, 0.2]
    advantages = group_advantages(rewards, epsilon=0.0)
    assert sum(advantages) == pytest.approx(0.0, abs=1e-12)
    assert group_advantages([10 * r + 3 for r in rewards], epsilon=0.0) == pytest.approx(advantages, rel=1e-9)


def test_a_group_gets_its_advantages_from_the_shaped_rewards():
    group = make_group(scores=[1.0, 1.0], rewards=[1.0, 0.5])
    assert group.advantages == ()
    done = with_advantages(group, epsilon=0.0)
    assert done.advantages == (1.0, -1.0)
    assert done.responses is group.responses


def test_a_reward_that_is_not_finite_is_an_error():
    with pytest.raises(AssertionError, match="finite"):
        group_advantages([1.0, math.nan], epsilon=1e-6)


@pytest.mark.parametrize("kind", ["mean_std", "mean", "leave_one_out"])
def test_an_update_gets_the_kind_that_the_config_names(kind: str) -> None:
    algorithm = AlgorithmSection(name="custom", likelihood="replay", advantage=kind, advantage_epsilon=0.25)
    group = make_group([1.0, 0.0, 0.0, 0.0])
    assert advantages_for_update(group, algorithm).advantages == group_advantages(group.rewards, 0.25, kind)
    alike = make_group([0.0, 0.0], rewards=[0.0, -0.5])  # they differ in length alone
    assert advantages_for_update(alike, algorithm).advantages == (0.0, 0.0)
