"""Which policy's gradient each likelihood mode estimates, with every expectation enumerated.

Two sides are compared. The exact gradient is autograd through the enumerated expected reward. The estimator's
expectation is the sum over noise and responses of probability times what the trainer would compute for that response.
Both are sums of at most 45 products of float64 numbers of size one: they agree to 45 * 2^-52 = 1e-14, and 1e-12 is
asked for. No sampling is involved.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_qerl.algorithms.advantage import group_advantages
from megatron_qerl.algorithms.correction import importance_weights
from megatron_qerl.algorithms.likelihood import plan
from megatron_qerl.algorithms.policy_loss import LossInputs, policy_loss
from megatron_qerl.config.schema import AlgorithmSection
from tests.unit.toy_policy import CLEAN, PROBABILITY_Z, Toy, make_toy, start_theta

TOLERANCE = 1e-12
ALGORITHM = AlgorithmSection(name="custom", likelihood="clean", loss_aggregation="constant")


def exact_gradient(toy: Toy, mode: str) -> Tensor:
    """The gradient of minus the objective that the mode states."""
    theta = start_theta().requires_grad_()
    if mode == "replay":
        objective = sum(p * toy.expected_reward(theta, z) for p, z in zip(PROBABILITY_Z, toy.noise, strict=True))
    else:
        objective = toy.expected_reward(theta, CLEAN)
    (gradient,) = torch.autograd.grad(-objective, theta)
    return gradient


def expected_gradient(toy: Toy, mode: str, rule: str, advantage_R: Tensor, cap: float = math.inf) -> Tensor:
    """E over noise and behaviour of the trainer's gradient at a rollout's first update, one response at a time."""
    chosen, theta = plan(mode), start_theta().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for probability, z in zip(PROBABILITY_Z, toy.noise, strict=True):
        behaviour_T = toy.token_logprobs(theta, z).detach()
        logprobs_T = toy.token_logprobs(theta, z if chosen.replay_noise else CLEAN)
        old_T = behaviour_T if chosen.denominator == "rollout" else logprobs_T.detach()
        weights_T = None
        if chosen.importance_weights:
            weights_T = importance_weights(rule, old_T, behaviour_T, toy.mask, toy.sequence, floor=0.0, cap=cap).weights
        inputs = LossInputs(logprobs_T, old_T, advantage_R[toy.sequence], toy.mask, toy.sequence, weights_T)
        occurrence_R = toy.response_logprobs(theta, z).exp().detach()
        total = total + probability * (occurrence_R[toy.sequence] * policy_loss(inputs, ALGORITHM).loss).sum()
    (gradient,) = torch.autograd.grad(total, theta)
    return gradient


def test_the_responses_are_all_there_are() -> None:
    toy = make_toy()
    assert len(toy.responses) == 15
    for z in (*toy.noise, CLEAN):
        assert float(toy.response_logprobs(start_theta(), z).exp().sum()) == pytest.approx(1.0, abs=1e-14)


@pytest.mark.parametrize("baseline", [0.0, 0.4])
@pytest.mark.parametrize("mode", ["replay", "clean"])
def test_replay_and_untruncated_clean_estimate_the_gradient_of_the_policy_they_name(mode: str, baseline: float) -> None:
    toy = make_toy()
    estimated = expected_gradient(toy, mode, "sequence_truncate", toy.reward - baseline)
    assert (estimated - exact_gradient(toy, mode)).abs().max() < TOLERANCE


def test_the_two_named_policies_have_different_gradients() -> None:
    toy = make_toy()
    assert (exact_gradient(toy, "replay") - exact_gradient(toy, "clean")).abs().max() > 1e-2


@pytest.mark.parametrize("named", ["replay", "clean"])
def test_uncorrected_estimates_neither(named: str) -> None:
    toy = make_toy()
    estimated = expected_gradient(toy, "uncorrected", "token_truncate", toy.reward)
    assert (estimated - exact_gradient(toy, named)).abs().max() > 1e-2


def test_without_any_signal_uncorrected_still_pulls_the_clean_policy_towards_the_noisy_one() -> None:
    """All advantages 1: nothing to learn. Its gradient is that of KL(behaviour || clean), the others' is zero."""
    toy = make_toy()
    ones_R = torch.ones(len(toy.responses), dtype=torch.float64)
    theta = start_theta().requires_grad_()
    divergence = torch.zeros((), dtype=torch.float64)
    for probability, z in zip(PROBABILITY_Z, toy.noise, strict=True):
        behaviour_R = toy.response_logprobs(theta, z).detach()
        divergence = (
            divergence + probability * (behaviour_R.exp() * (behaviour_R - toy.response_logprobs(theta, CLEAN))).sum()
        )
    (pull,) = torch.autograd.grad(divergence, theta)
    assert pull.abs().max() > 1e-2
    estimated = expected_gradient(toy, "uncorrected", "token_truncate", ones_R)
    assert (estimated - pull).abs().max() < TOLERANCE
    for mode in ("replay", "clean"):
        assert expected_gradient(toy, mode, "sequence_truncate", ones_R).abs().max() < TOLERANCE


def test_weights_by_token_are_exact_for_one_token_and_biased_by_the_prefix_beyond() -> None:
    single = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    one, three = replace(make_toy(max_tokens=1), reward=single), make_toy(max_tokens=3)
    error = expected_gradient(one, "clean", "token_truncate", single) - exact_gradient(one, "clean")
    assert error.abs().max() < TOLERANCE
    by_token = expected_gradient(three, "clean", "token_truncate", three.reward) - exact_gradient(three, "clean")
    nothing = expected_gradient(three, "uncorrected", "token_truncate", three.reward) - exact_gradient(three, "clean")
    assert by_token.norm() > 1e-3
    assert by_token.norm() < nothing.norm(), "correcting each token must at least help here"


@pytest.mark.parametrize("cap", [1.1, 2.0])
def test_truncation_and_masking_give_exactness_up(cap: float) -> None:
    toy = make_toy()
    exact = exact_gradient(toy, "clean")
    for rule in ("sequence_truncate", "sequence_mask"):
        assert (expected_gradient(toy, "clean", rule, toy.reward, cap) - exact).norm() > 1e-3


def test_no_weight_repairs_a_support_that_was_cut() -> None:
    """Top-k = 2 in the rollout: the responses left have exact weights, and the estimate is still wrong."""
    toy = make_toy()
    theta = start_theta().requires_grad_()
    logprobs_PV = toy.next_token_logprobs(theta, CLEAN)
    kept_PV = logprobs_PV >= logprobs_PV.topk(2, dim=1).values[:, -1:]
    drawn_T = kept_PV[toy.contexts, toy.tokens]
    reached_R = torch.tensor([float(drawn_T[toy.sequence == r].all()) for r in range(len(toy.responses))]).double()
    # Occurrence times weight is the clean probability wherever the response can occur, and nothing elsewhere.
    weighted_R = toy.response_logprobs(theta, CLEAN).exp().detach() * reached_R
    (estimated,) = torch.autograd.grad(-(weighted_R * toy.reward * toy.response_logprobs(theta, CLEAN)).sum(), theta)
    assert 0 < reached_R.sum() < len(toy.responses)
    assert (estimated - exact_gradient(toy, "clean")).abs().max() > 1e-3


def test_the_expectation_of_the_product_is_not_the_product_of_expectations() -> None:
    toy = make_toy()
    theta = start_theta()
    token_ZT = torch.stack([toy.token_logprobs(theta, z).exp() for z in toy.noise])
    marginal_R = PROBABILITY_Z @ torch.stack([toy.response_logprobs(theta, z).exp() for z in toy.noise])
    averaged_T = PROBABILITY_Z @ token_ZT
    product_R = torch.stack([averaged_T[toy.sequence == r].prod() for r in range(len(toy.responses))])
    assert float(marginal_R.sum()) == pytest.approx(1.0, abs=1e-14)
    assert float(product_R.sum()) == pytest.approx(1.0, abs=1e-14), "both are distributions"
    lengths_R = torch.bincount(toy.sequence)
    assert (marginal_R - product_R)[lengths_R == 1].abs().max() < 1e-15, "one token: the same thing"
    assert (marginal_R - product_R).abs().max() > 1e-3


# Advantages and aggregation: what a group of two estimates -----------------------------------------------------------


def group_gradient(toy: Toy, kind: str, aggregation: str) -> Tensor:
    """E over all pairs of responses from the clean policy of the pair's gradient, divided by 2 (the group's size)."""
    theta = start_theta().requires_grad_()
    logprobs_R = toy.response_logprobs(theta, CLEAN)
    probability_R = logprobs_R.exp().detach()
    lengths_R = torch.bincount(toy.sequence).double()
    score_R = logprobs_R / lengths_R if aggregation == "sequence_mean" else logprobs_R
    total = torch.zeros((), dtype=torch.float64)
    for i, j in itertools.product(range(len(toy.responses)), repeat=2):
        first, second = group_advantages([float(toy.reward[i]), float(toy.reward[j])], 0.0, kind)
        total = total - probability_R[i] * probability_R[j] * (first * score_R[i] + second * score_R[j]) / 2
    (gradient,) = torch.autograd.grad(total, theta)
    return gradient


def test_leave_one_out_is_unbiased_and_the_group_mean_shrinks_by_one_over_its_size() -> None:
    toy = make_toy()
    exact = exact_gradient(toy, "clean")
    assert (group_gradient(toy, "leave_one_out", "constant") - exact).abs().max() < TOLERANCE
    assert (group_gradient(toy, "mean", "constant") - exact / 2).abs().max() < TOLERANCE


def test_a_mean_over_each_response_points_elsewhere() -> None:
    toy = make_toy()
    exact, by_length = exact_gradient(toy, "clean"), group_gradient(toy, "leave_one_out", "sequence_mean")
    assert torch.cosine_similarity(exact.flatten(), by_length.flatten(), dim=0) < 0.999
