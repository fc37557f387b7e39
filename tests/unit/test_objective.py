"""The clipped objective: values, gradients, masking, and independence of how a batch is cut."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_qerl.algorithms.objective import (
    RatioStatistics,
    aggregate,
    clipped_policy_loss,
    ratio_statistics,
)
from megatron_qerl.metrics.names import METRICS

LOW, HIGH = 0.2, 0.28


def loss_of(ratios, advantages, mask=None, weights=None):
    """Token losses for given ratios, with the log-probabilities as a leaf."""
    old = torch.full((len(ratios),), -1.5)
    logprobs = (old + torch.tensor(ratios).log()).requires_grad_()
    mask_T = torch.ones(len(ratios), dtype=torch.bool) if mask is None else torch.tensor(mask)
    weights_T = None if weights is None else torch.tensor(weights)
    loss = clipped_policy_loss(logprobs, old, torch.tensor(advantages), mask_T, LOW, HIGH, weights_T)
    return logprobs, loss


def random_batch(tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(tokens, generator=generator) * 3
    logprobs = old + torch.randn(tokens, generator=generator) * 0.4
    advantages = torch.randn(tokens, generator=generator)
    mask = torch.rand(tokens, generator=generator) < 0.8
    weights = torch.rand(tokens, generator=generator) * 2
    return logprobs, old, advantages, mask, weights


# (ratio, advantage) -> (loss, derivative of the loss by logprob); the derivative of r by logprob is r.
CASES = {
    "inside, good": (1.1, 2.0, -2.2, -2.2),
    "inside, bad": (0.9, -2.0, 1.8, 1.8),
    "good token above the upper bound: clipped": (1.5, 2.0, -2.56, 0.0),
    "good token below the lower bound: pulled back": (0.5, 2.0, -1.0, -1.0),
    "bad token below the lower bound: clipped": (0.5, -2.0, 1.6, 0.0),
    "bad token above the upper bound: pushed back": (1.5, -2.0, 3.0, 3.0),
    "no advantage": (1.5, 0.0, 0.0, 0.0),
}


@pytest.mark.parametrize("case", CASES)
def test_value_and_gradient_in_every_region(case):
    ratio, advantage, expected_loss, expected_gradient = CASES[case]
    logprobs, loss = loss_of([ratio], [advantage])
    loss.loss.sum().backward()
    assert loss.loss.item() == pytest.approx(expected_loss, rel=1e-5)
    assert logprobs.grad.item() == pytest.approx(expected_gradient, rel=1e-5)


def test_flags_are_set_exactly_where_the_gradient_is_cut():
    _, loss = loss_of([1.5, 0.5, 1.5, 0.5, 1.0], [1.0, 1.0, -1.0, -1.0, 1.0])
    assert loss.clipped_high.tolist() == [True, False, False, False, False]
    assert loss.clipped_low.tolist() == [False, False, False, True, False]


def test_gradient_is_zero_where_clipped_and_nowhere_else():
    logprobs, old, advantages, mask, _ = random_batch(400, seed=3)
    logprobs.requires_grad_()
    loss = clipped_policy_loss(logprobs, old, advantages, mask, LOW, HIGH)
    loss.loss.sum().backward()
    clipped = loss.clipped_low | loss.clipped_high
    assert clipped.sum() > 20
    assert torch.equal(logprobs.grad != 0, mask & ~clipped)


def test_gradient_agrees_with_finite_differences():
    # Central differences in double precision, step 1e-6: error about (step^2 |f'''| + 1e-16 / step) < 1e-8.
    logprobs, old, advantages, mask, weights = random_batch(60, seed=7)
    leaf = logprobs.clone().requires_grad_()
    clipped_policy_loss(leaf, old, advantages, mask, LOW, HIGH, weights).loss.sum().backward()

    def reference(index, shift):
        ratio = math.exp(float(logprobs[index].double() + shift - old[index].double()))
        bounded = min(max(ratio, 1 - LOW), 1 + HIGH)
        advantage = float(advantages[index])
        return -float(weights[index]) * min(ratio * advantage, bounded * advantage) if mask[index] else 0.0

    step = 1e-6
    numeric = [(reference(i, step) - reference(i, -step)) / (2 * step) for i in range(60)]
    # The autograd side is float32: relative error of a few 6e-8.
    assert leaf.grad.tolist() == pytest.approx(numeric, rel=1e-5, abs=1e-6)


def test_on_policy_gradient_is_the_policy_gradient():
    """With r = 1 the gradient is -A for each token: REINFORCE with a baseline."""
    logprobs, loss = loss_of([1.0, 1.0, 1.0], [0.5, -2.0, 3.0])
    loss.loss.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-0.5, 2.0, -3.0])


def test_masked_tokens_have_no_loss_no_gradient_and_may_be_garbage():
    logprobs = torch.tensor([-1.0, float("-inf"), float("nan"), -1.0]).requires_grad_()
    old = torch.tensor([-1.0, float("-inf"), 0.0, -1.0])
    advantages = torch.tensor([1.0, float("nan"), 1.0, -1.0])
    mask = torch.tensor([True, False, False, True])
    weights = torch.tensor([1.0, float("inf"), 1.0, 2.0])
    loss = clipped_policy_loss(logprobs, old, advantages, mask, LOW, HIGH, weights)
    loss.loss.sum().backward()
    assert loss.loss.tolist() == [-1.0, 0.0, 0.0, 2.0]
    assert logprobs.grad.tolist() == [-1.0, 0.0, 0.0, 2.0]


def test_weights_scale_loss_and_gradient():
    plain_leaf, plain = loss_of([1.1, 0.9], [1.0, -1.0])
    leaf, weighted = loss_of([1.1, 0.9], [1.0, -1.0], weights=[2.0, 0.5])
    plain.loss.sum().backward()
    weighted.loss.sum().backward()
    scale = torch.tensor([2.0, 0.5])
    assert torch.equal(weighted.loss, plain.loss * scale)
    assert torch.equal(leaf.grad, plain_leaf.grad * scale)


def test_overflowing_ratio_is_not_hidden():
    _, loss = loss_of([1.0], [-1.0])
    huge = clipped_policy_loss(torch.tensor([200.0]), torch.tensor([0.0]), torch.tensor([-1.0]), loss.mask, LOW, HIGH)
    assert not torch.isfinite(huge.loss).any()


@pytest.mark.parametrize("bad", ["dtype", "shape", "grad"])
def test_wrong_inputs_are_refused(bad):
    logprobs, old, advantages, mask, _ = random_batch(4, seed=1)
    if bad == "dtype":
        old = old.bfloat16()
    elif bad == "shape":
        advantages = advantages[:3]
    else:
        old = old.requires_grad_()
    with pytest.raises(AssertionError):
        clipped_policy_loss(logprobs, old, advantages, mask, LOW, HIGH)


# Aggregation ---------------------------------------------------------------------------------------------------------

LENGTHS = [5, 1, 9, 3, 7, 2]


def batch_with_sequences(seed):
    logprobs, old, advantages, mask, _ = random_batch(sum(LENGTHS), seed)
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    first_of_each = torch.cat([torch.tensor([True]), sequence[1:] != sequence[:-1]])
    return logprobs, old, advantages, mask | first_of_each, sequence


def gradient_and_loss(cuts, mode, seed=11):
    """Loss and gradient of the whole batch, accumulated over micro-batches of whole responses."""
    logprobs, old, advantages, mask, sequence = batch_with_sequences(seed)
    leaf = logprobs.clone().requires_grad_()
    tokens, total = int(mask.sum()), 0.0
    for responses in cuts:
        here = torch.isin(sequence, torch.tensor(responses))
        loss = clipped_policy_loss(leaf[here], old[here], advantages[here], mask[here], LOW, HIGH)
        renumbered = torch.unique(sequence[here], return_inverse=True)[1]
        part = aggregate(loss.loss, mask[here], renumbered, mode, tokens, len(LENGTHS))
        part.backward()
        total += float(part.detach())
    return total, leaf.grad


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("cuts", [[[0], [1], [2], [3], [4], [5]], [[5, 0, 2], [1], [3, 4]], [[0, 1, 2, 3, 4], [5]]])
def test_loss_and_gradient_do_not_depend_on_the_micro_batches(mode, cuts):
    whole_loss, whole_gradient = gradient_and_loss([[0, 1, 2, 3, 4, 5]], mode)
    loss, gradient = gradient_and_loss(cuts, mode)
    # Float32 sums of 27 terms in another order: relative error below 27 * 6e-8.
    assert loss == pytest.approx(whole_loss, rel=2e-6, abs=1e-7)
    assert torch.allclose(gradient, whole_gradient, rtol=2e-6, atol=1e-8)


def test_token_mean_weighs_tokens_and_sequence_mean_weighs_responses():
    loss_T = torch.tensor([1.0, 1.0, 1.0, 5.0])
    mask_T = torch.ones(4, dtype=torch.bool)
    sequence_T = torch.tensor([0, 0, 0, 1])
    assert aggregate(loss_T, mask_T, sequence_T, "token_mean", 4, 2).item() == 2.0
    assert aggregate(loss_T, mask_T, sequence_T, "sequence_mean", 4, 2).item() == 3.0


def test_masked_tokens_count_neither_in_sums_nor_in_lengths():
    loss_T = torch.tensor([1.0, 100.0, 3.0, float("nan")])
    mask_T = torch.tensor([True, False, True, False])
    sequence_T = torch.tensor([0, 0, 0, 1])
    assert aggregate(loss_T, mask_T, sequence_T, "token_mean", 2, 2).item() == 2.0
    assert aggregate(loss_T, mask_T, sequence_T, "sequence_mean", 2, 2).item() == 1.0


def test_an_empty_micro_batch_adds_nothing():
    empty = torch.zeros(0)
    for mode in ("token_mean", "sequence_mean"):
        assert aggregate(empty, empty.bool(), empty.long(), mode, 4, 2).item() == 0.0


# Statistics ----------------------------------------------------------------------------------------------------------


def test_statistics_of_parts_add_up_to_those_of_the_whole():
    logprobs, old, advantages, mask, _ = random_batch(200, seed=5)

    def statistics(part):
        return ratio_statistics(clipped_policy_loss(logprobs[part], old[part], advantages[part], mask[part], LOW, HIGH))

    whole = statistics(slice(None)).as_metrics()
    parts = RatioStatistics() + statistics(slice(0, 13)) + statistics(slice(13, 150)) + statistics(slice(150, None))
    assert parts.tokens == int(mask.sum())
    assert parts.as_metrics() == pytest.approx(whole, rel=1e-12)

    log_ratio = (logprobs - old)[mask].double()
    assert whole["ratio/mean"] == pytest.approx(float(log_ratio.exp().mean()))
    assert whole["ratio/min"] == pytest.approx(float(log_ratio.exp().min()))
    assert whole["ratio/std"] == pytest.approx(float(log_ratio.exp().std(correction=0)))
    assert whole["ratio/max"] == pytest.approx(float(log_ratio.exp().max()))
    assert whole["kl/k1_nats"] == pytest.approx(float(-log_ratio.mean()))
    assert whole["kl/k3_nats"] == pytest.approx(float((log_ratio.exp() - 1 - log_ratio).mean()))
    assert 0 < whole["ratio/clip_low_fraction"] < 0.5
    assert 0 < whole["ratio/clip_high_fraction"] < 0.5


def test_both_kl_estimates_converge_to_the_divergence():
    """Tokens drawn from the old policy: the mean of k1 and of k3 is KL(old || new)."""
    old_V = torch.log_softmax(torch.tensor([2.0, 0.0, -1.0, 0.5]), 0)
    new_V = torch.log_softmax(torch.tensor([1.6, 0.4, -1.0, 0.3]), 0)
    exact = float((old_V.exp() * (old_V - new_V)).sum())
    tokens = torch.multinomial(old_V.exp(), 200_000, True, generator=torch.Generator().manual_seed(0))
    zeros, mask = torch.zeros(len(tokens)), torch.ones(len(tokens), dtype=torch.bool)
    metrics = ratio_statistics(clipped_policy_loss(new_V[tokens], old_V[tokens], zeros, mask, LOW, HIGH)).as_metrics()
    # Standard errors: sqrt(var(log r) / n) = 8e-4 for k1, less for k3; three of them.
    assert metrics["kl/k1_nats"] == pytest.approx(exact, abs=2.5e-3)
    assert metrics["kl/k3_nats"] == pytest.approx(exact, abs=1e-3)
    assert metrics["ratio/mean"] == pytest.approx(1.0, abs=3e-3)


def test_statistics_of_nothing_are_empty():
    nothing = torch.zeros(3)
    loss = clipped_policy_loss(nothing, nothing, nothing, torch.zeros(3, dtype=torch.bool), LOW, HIGH)
    assert ratio_statistics(loss) == RatioStatistics()
    assert RatioStatistics().as_metrics() == {}


def test_metric_names_are_registered():
    _, loss = loss_of([1.0, 1.5], [1.0, 1.0])
    assert set(ratio_statistics(loss).as_metrics()) <= set(METRICS)
