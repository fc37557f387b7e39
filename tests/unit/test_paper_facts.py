"""The paper's tables recomputed: sizes of models, speed-up of a step, ratios and means of the tables."""

from __future__ import annotations

import pytest

from megatron_qerl.algorithms.advantage import group_advantages
from megatron_qerl.metrics.accounting import break_even_added_share, nvfp4_model_bytes, step_speedup

# Qwen2.5: hidden, layers, intermediate, query heads * 128 = hidden (all), key/value width, vocabulary.
QWEN = {
    "3B": (2048, 36, 11008, 256, 151936),
    "7B": (3584, 28, 18944, 512, 152064),
    "14B": (5120, 48, 13824, 1024, 152064),
    "32B": (5120, 64, 27648, 1024, 152064),
}


def weights(name: str) -> tuple[int, int]:
    """(weights of linear layers, weights of the embedding)."""
    hidden, layers, intermediate, kv_width, vocabulary = QWEN[name]
    attention = 2 * hidden * hidden + 2 * hidden * kv_width
    return layers * (attention + 3 * hidden * intermediate), vocabulary * hidden


@pytest.mark.parametrize(("name", "gigabytes"), [("3B", 2.8), ("7B", 5.9), ("14B", 10.6), ("32B", 20.7)])
def test_the_four_nvfp4_sizes_follow_from_the_shapes(name: str, gigabytes: float) -> None:
    # To one per cent: the paper rounds to a tenth of a gigabyte, and norm scales and biases are left out.
    linear, embedding = weights(name)
    assert nvfp4_model_bytes(linear, embedding, embedding) / 1e9 == pytest.approx(gigabytes, rel=0.01)


@pytest.mark.parametrize(("name", "gigabytes"), [("7B", 15.2), ("14B", 29.6), ("32B", 65.5)])
def test_the_bf16_sizes_follow_too_and_the_papers_32b_does_not(name: str, gigabytes: float) -> None:
    linear, embedding = weights(name)
    size = 2 * (linear + 2 * embedding) / 1e9
    assert size == pytest.approx(gigabytes, abs=0.1)
    if name == "32B":
        assert abs(size - 62.3) > 3.0


def test_a_whole_model_is_compressed_less_than_a_weight() -> None:
    linear, embedding = weights("7B")
    whole = 2 * (linear + 2 * embedding) / nvfp4_model_bytes(linear, embedding, embedding)
    assert nvfp4_model_bytes(linear, 0, 0) * 32 / 9 == 2 * linear
    assert whole == pytest.approx(2.6, abs=0.05)


@pytest.mark.parametrize(
    ("share", "speedup", "added", "expected"), [(0.7, 1.5, 0.0, 1.30), (0.7, 1.5, 0.2, 1.03), (0.4, 1.5, 0.2, 0.94)]
)
def test_step_speedups(share: float, speedup: float, added: float, expected: float) -> None:
    assert step_speedup(share, speedup, added) == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize(("share", "speedup"), [(0.7, 1.5), (0.4, 2.0), (1.0, 1.2), (0.0, 9.0)])
def test_at_break_even_the_step_is_as_fast_as_before(share: float, speedup: float) -> None:
    limit = break_even_added_share(share, speedup)
    assert step_speedup(share, speedup, limit) == pytest.approx(1.0, rel=1e-14)
    assert step_speedup(share, speedup, limit + 0.01) < 1.0


def test_an_infinitely_fast_rollout_leaves_the_rest_of_the_step() -> None:
    assert step_speedup(0.75, 1e12) == pytest.approx(4.0)


def test_the_advantage_of_one_right_answer_in_four() -> None:
    root = 3**0.5
    assert group_advantages([1, 0, 0, 0], 0.0) == pytest.approx((root, -1 / root, -1 / root, -1 / root), rel=1e-15)
