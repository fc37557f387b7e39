"""What a model takes up and what a faster rollout is worth: two sums that are easily done wrong in the head."""

from __future__ import annotations

NVFP4_BYTES_A_WEIGHT = 0.5625
"""Half a byte of code and a sixteenth of an FP8 block scale."""
BF16_BYTES_A_WEIGHT = 2.0


def nvfp4_model_bytes(linear_weights: int, embedding_weights: int, head_weights: int) -> float:
    """Size of a model whose linear layers are NVFP4 and whose embedding and head are BF16 (both stored, if tied too).

    Norm scales, biases and tensor scales are left out: together less than a thousandth.
    """
    return linear_weights * NVFP4_BYTES_A_WEIGHT + (embedding_weights + head_weights) * BF16_BYTES_A_WEIGHT


def step_speedup(rollout_share: float, rollout_speedup: float, added_share: float = 0.0) -> float:
    """1 / ((1 - f) + f / s + eta): how much faster a whole step gets (reading, section 8.2).

    Args:
        rollout_share: f, the rollout's share of the step before, 0 to 1.
        rollout_speedup: s, positive.
        added_share: eta, new work as a share of the step before.
    """
    assert 0.0 <= rollout_share <= 1.0, "a share lies between 0 and 1"
    assert rollout_speedup > 0.0, "a speed-up is positive"
    return 1.0 / ((1.0 - rollout_share) + rollout_share / rollout_speedup + added_share)


def break_even_added_share(rollout_share: float, rollout_speedup: float) -> float:
    """f (1 - 1/s): new work above this share of the step before makes the step slower."""
    return rollout_share * (1.0 - 1.0 / rollout_speedup)
