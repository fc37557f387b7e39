"""Group-relative advantages: a response is worth how much better it did than its siblings.

The baseline is the mean reward of the G responses to one prompt, so no critic is learnt. Dividing by the group's
standard deviation also sets how much each prompt weighs in an update. A group whose rewards are all equal has nothing
to say: its advantages are exactly zero, not a rounding error blown up by a small denominator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from megatron_qerl.types import Group


def group_advantages(rewards: Sequence[float], epsilon: float) -> tuple[float, ...]:
    """A_i = (R_i - mean R) / (std R + epsilon) with the population standard deviation (GRPO, arXiv 2402.03300).

    Args:
        rewards: the G rewards of one group, finite.
        epsilon: keeps the quotient finite; it adds no information.

    Returns:
        G advantages. They sum to zero up to rounding; all are exactly 0.0 when the rewards are equal.
    """
    assert rewards, "a group has at least one response"
    assert all(math.isfinite(reward) for reward in rewards), "rewards are finite"
    # Equal rewards are tested for, because the mean of e.g. three times 0.1 need not be 0.1 in binary.
    if all(reward == rewards[0] for reward in rewards):
        return (0.0,) * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    deviations = [reward - mean for reward in rewards]
    std = math.sqrt(math.fsum(d * d for d in deviations) / len(rewards))
    return tuple(d / (std + epsilon) for d in deviations)


def with_advantages(group: Group, epsilon: float) -> Group:
    """The same group with one advantage a response, computed from the shaped rewards."""
    return replace(group, advantages=group_advantages(group.rewards, epsilon))


def with_zero_advantages(group: Group) -> Group:
    """The same group for what must not learn from it: scoring alone, or rewards without a signal."""
    return replace(group, advantages=(0.0,) * len(group.responses))
