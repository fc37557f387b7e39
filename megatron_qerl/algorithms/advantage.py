"""Group-relative advantages: a response is worth how much better it did than its siblings.

The baseline is the mean reward of the responses to one prompt, so no critic is learnt. Three kinds are in use. With
E the policy gradient's expectation and G the size of a group:

=============  =======================  ===============================================================================
kind           advantage                what a group's summed gradient, divided by G, estimates
=============  =======================  ===============================================================================
mean_std       (R - mean) / (std + e)   a gradient in which each prompt weighs by one over its own, sampled deviation
mean           R - mean                 (1 - 1/G) E: the mean contains the response itself (Dr. GRPO)
leave_one_out  R - mean of the others   E exactly (RLOO, arXiv 2402.14740, equation 8); G/(G-1) times ``mean``
=============  =======================  ===============================================================================

A group whose rewards are all equal has nothing to say: its advantages are exactly zero, not a rounding error blown up
by a small denominator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from megatron_qerl.config.algorithm import AlgorithmSection
from megatron_qerl.types import Group

AdvantageKind = Literal["mean_std", "mean", "leave_one_out"]


def group_advantages(rewards: Sequence[float], epsilon: float, kind: AdvantageKind = "mean_std") -> tuple[float, ...]:
    """Advantages of one group; ``mean_std`` is GRPO's, with the population standard deviation (arXiv 2402.03300).

    Args:
        rewards: the G rewards of one group, finite; ``leave_one_out`` needs two or more.
        epsilon: keeps the quotient of ``mean_std`` finite; it adds no information.
        kind: baseline and scale.

    Returns:
        G advantages. They sum to zero up to rounding; all are exactly 0.0 when the rewards are equal.
    """
    assert rewards, "a group has at least one response"
    assert all(math.isfinite(reward) for reward in rewards), "rewards are finite"
    # Equal rewards are tested for, because the mean of e.g. three times 0.1 need not be 0.1 in binary.
    if all(reward == rewards[0] for reward in rewards):
        return (0.0,) * len(rewards)
    count = len(rewards)
    mean = math.fsum(rewards) / count
    deviations = [reward - mean for reward in rewards]
    if kind == "mean":
        return tuple(deviations)
    if kind == "leave_one_out":
        return tuple(d * count / (count - 1) for d in deviations)
    std = math.sqrt(math.fsum(d * d for d in deviations) / count)
    return tuple(d / (std + epsilon) for d in deviations)


def with_advantages(group: Group, epsilon: float, kind: AdvantageKind = "mean_std") -> Group:
    """The same group with one advantage a response, computed from the shaped rewards."""
    return replace(group, advantages=group_advantages(group.rewards, epsilon, kind))


def advantages_for_update(group: Group, algorithm: AlgorithmSection) -> Group:
    """The same group with the advantages that a run's objective asks for.

    Signal is judged on the raw score: where all are equally right or wrong, shaping alone would teach length.
    """
    if not group.mixed:
        return with_zero_advantages(group)
    return with_advantages(group, algorithm.advantage_epsilon, algorithm.advantage)


def with_zero_advantages(group: Group) -> Group:
    """The same group for what must not learn from it: scoring alone, or rewards without a signal."""
    return replace(group, advantages=(0.0,) * len(group.responses))
