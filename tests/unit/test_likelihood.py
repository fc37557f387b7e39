"""The three likelihood modes and the importance weights of ``clean``."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from megatron_qerl.algorithms.correction import (
    ImportanceWeights,
    WeightStatistics,
    effective_sample_size,
    importance_statistics,
    importance_weights,
)
from megatron_qerl.algorithms.likelihood import plan
from megatron_qerl.algorithms.objective import clipped_policy_loss
from megatron_qerl.metrics.names import METRICS
from megatron_qerl.types import LikelihoodMode


def by_token(
    target: torch.Tensor, behaviour: torch.Tensor, cap: float, mask: torch.Tensor | None = None
) -> ImportanceWeights:
    """``token_truncate`` over tokens of one response, all of which count unless masked."""
    mask = torch.ones_like(target, dtype=torch.bool) if mask is None else mask
    one = torch.zeros_like(mask, dtype=torch.int64)
    return importance_weights("token_truncate", target, behaviour, mask, one, floor=0.0, cap=cap)


def test_every_mode_has_a_plan_that_carries_its_name():
    plans = [plan(mode) for mode in get_args(LikelihoodMode)]
    assert [p.mode for p in plans] == list(get_args(LikelihoodMode))
    assert len({p.statement for p in plans}) == 3


@pytest.mark.parametrize(
    ("mode", "replay_noise", "denominator", "importance_weights", "bias"),
    [
        ("replay", True, "rollout", False, "none"),
        ("clean", False, "trainer_old", True, "reduced"),
        ("uncorrected", False, "trainer_old", False, "uncorrected"),
    ],
)
def test_what_a_mode_asks_of_the_trainer(mode, replay_noise, denominator, importance_weights, bias):
    chosen = plan(mode)
    assert chosen.replay_noise is replay_noise
    assert chosen.denominator == denominator
    assert chosen.importance_weights is importance_weights
    assert chosen.bias == bias


def test_the_published_ratio_is_called_biased():
    assert plan("uncorrected").biased
    assert "BIASED" in plan("uncorrected").statement
    assert not plan("replay").biased


def one_token_gradient(mode: LikelihoodMode) -> tuple[torch.Tensor, torch.Tensor]:
    """(estimated, exact) gradient by logits of the expected reward of one-token responses drawn under noise.

    The expectation over the behaviour is taken exactly, by weighing every token with its behaviour probability, so the
    only difference left between the two is the estimator's bias.
    """
    logits_V = torch.tensor([1.0, 0.2, -0.5, 0.0])
    noise_V = torch.tensor([-0.6, 0.5, 0.3, 0.0])
    reward_V = torch.tensor([1.0, 0.0, 0.0, -0.5])
    chosen = plan(mode)
    behaviour_V = torch.log_softmax(logits_V + noise_V, 0)

    leaf = logits_V.clone().requires_grad_()
    logprobs_V = torch.log_softmax(leaf + (noise_V if chosen.replay_noise else 0.0), 0)
    old_V = behaviour_V if chosen.denominator == "rollout" else logprobs_V.detach()
    weights_V = by_token(old_V, behaviour_V, 10.0).weights if chosen.importance_weights else None
    loss = clipped_policy_loss(logprobs_V, old_V, reward_V, torch.ones(4, dtype=torch.bool), 0.2, 0.28, weights_V)
    (behaviour_V.exp() * loss.loss).sum().backward()

    exact = logits_V.clone().requires_grad_()
    target_V = torch.softmax(exact + (noise_V if chosen.replay_noise else 0.0), 0)
    (-(target_V * reward_V).sum()).backward()
    return leaf.grad, exact.grad


@pytest.mark.parametrize("mode", ["replay", "clean"])
def test_replay_and_clean_estimate_the_gradient_of_the_policy_they_name(mode):
    estimated, exact = one_token_gradient(mode)
    assert torch.allclose(estimated, exact, atol=1e-6)


def test_uncorrected_estimates_another_gradient():
    estimated, exact = one_token_gradient("uncorrected")
    assert (estimated - exact).abs().max() > 0.05


# Importance weights --------------------------------------------------------------------------------------------------


def test_weights_are_the_ratio_cut_at_the_cap():
    target = torch.tensor([0.5, 0.2, 0.9]).log().requires_grad_()
    weights = by_token(target, torch.tensor([0.25, 0.4, 0.1]).log(), 3.0).weights
    assert weights.tolist() == pytest.approx([2.0, 0.5, 3.0])
    assert not weights.requires_grad


def test_a_weight_that_overflows_is_cut_too():
    weights = by_token(torch.tensor([0.0]), torch.tensor([-500.0]), 2.0).weights
    assert weights.tolist() == [2.0]


def test_effective_sample_size_counts_equal_weights_and_discounts_unequal_ones():
    assert effective_sample_size(torch.full((8,), 0.3)) == pytest.approx(8.0)
    assert effective_sample_size(torch.tensor([1.0, 0.0, 0.0, 0.0])) == 1.0
    assert effective_sample_size(torch.tensor([2.0, 1.0, 1.0])) == pytest.approx(16 / 6)
    assert effective_sample_size(torch.zeros(0)) == 0.0


def test_weight_statistics_of_parts_add_up_and_respect_the_mask():
    raw = torch.tensor([4.0, 1.0, 0.5, 99.0, 2.5, 0.25])
    target, behaviour = raw.log(), torch.zeros(6)
    mask = torch.tensor([True, True, True, False, True, True])
    whole = importance_statistics(by_token(target, behaviour, 2.0, mask))
    cuts = ((0, 1), (1, 4), (4, 6))
    parts = [importance_statistics(by_token(target[a:b], behaviour[a:b], 2.0, mask[a:b])) for a, b in cuts]
    metrics = sum(parts, WeightStatistics()).as_metrics()
    assert metrics == pytest.approx(whole.as_metrics(), rel=1e-12)
    # Truncated weights 2, 1, 0.5, 2, 0.25.
    assert metrics == pytest.approx(
        {
            "correction/weight_mean": 5.75 / 5,
            "correction/weight_max": 4.0,
            "correction/effective_sample_fraction": 5.75**2 / (4 + 1 + 0.25 + 4 + 0.0625) / 5,
            "correction/truncated_fraction": 2 / 5,
            "correction/dropped_fraction": 0.0,
        },
        rel=1e-6,
    )
    used = by_token(target, behaviour, 2.0).weights[mask]
    assert effective_sample_size(used) == pytest.approx(whole.effective_tokens)
    assert WeightStatistics().as_metrics() == {}


def test_the_largest_raw_weight_stays_finite_where_float32_overflows():
    statistics = importance_statistics(by_token(torch.tensor([0.0]), torch.tensor([-200.0]), 2.0))
    assert statistics.as_metrics()["correction/weight_max"] == pytest.approx(math.exp(200.0))


def test_metric_names_are_registered():
    target, one = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    weights = importance_weights("sequence_mask", target, target, one == 0, one, floor=0.5, cap=2.0)
    metrics = importance_statistics(weights).as_metrics()
    assert "correction/effective_response_fraction" in metrics
    assert set(metrics) <= set(METRICS)
