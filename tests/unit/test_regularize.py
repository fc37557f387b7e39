"""What the divergence and entropy terms average to, and what their gradients average to: enumerated, not sampled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_qerl.algorithms.regularize import divergence, entropy_loss

TOLERANCE = 1e-14  # sums of six float64 numbers below 5
LOGITS = torch.tensor([1.2, 0.1, -0.7, 0.4, 0.0, -1.5], dtype=torch.float64)
REFERENCE = torch.log_softmax(torch.tensor([0.2, 0.6, -0.3, 0.9, -0.8, 0.1], dtype=torch.float64), 0)
MASK = torch.ones(6, dtype=torch.bool)


def mean_and_gradient(estimator: Any) -> tuple[float, Tensor]:
    """The expectation, over tokens of the policy, of the term and of its gradient by the logits."""
    leaf = LOGITS.clone().requires_grad_()
    logprobs = torch.log_softmax(leaf, 0)
    entropy = estimator == "entropy"
    term = entropy_loss(logprobs, MASK) if entropy else divergence(logprobs, REFERENCE, MASK, estimator)
    mean = (logprobs.exp().detach() * term).sum()
    (gradient,) = torch.autograd.grad(mean, leaf)
    return float(mean.detach()), gradient


def exact(which: str) -> tuple[float, Tensor]:
    leaf = LOGITS.clone().requires_grad_()
    logprobs = torch.log_softmax(leaf, 0)
    value = {
        "reverse": (logprobs.exp() * (logprobs - REFERENCE)).sum(),
        "forward": (REFERENCE.exp() * (REFERENCE - logprobs)).sum(),
        "entropy": -(logprobs.exp() * logprobs).sum(),
    }[which]
    (gradient,) = torch.autograd.grad(value, leaf)
    return float(value.detach()), gradient


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_average_to_the_divergence(estimator: str) -> None:
    assert mean_and_gradient(estimator)[0] == pytest.approx(exact("reverse")[0], abs=TOLERANCE)


def test_k2_does_not() -> None:
    assert abs(mean_and_gradient("k2")[0] - exact("reverse")[0]) > 1e-2


def test_the_gradient_of_k1_averages_to_nothing() -> None:
    assert mean_and_gradient("k1")[1].abs().max() < TOLERANCE


def test_the_gradient_of_k2_is_that_of_the_divergence() -> None:
    assert (mean_and_gradient("k2")[1] - exact("reverse")[1]).abs().max() < TOLERANCE


def test_the_gradient_of_k3_is_that_of_the_other_direction() -> None:
    assert (mean_and_gradient("k3")[1] - exact("forward")[1]).abs().max() < TOLERANCE
    assert (exact("forward")[1] - exact("reverse")[1]).abs().max() > 1e-2


def test_lowering_the_entropy_term_raises_the_entropy() -> None:
    assert (mean_and_gradient("entropy")[1] + exact("entropy")[1]).abs().max() < TOLERANCE


def test_k3_is_never_negative_and_all_are_zero_where_the_policies_agree() -> None:
    logprobs = torch.log_softmax(LOGITS, 0)
    assert (divergence(logprobs, REFERENCE, MASK, "k3") > 0).all()
    assert (divergence(logprobs, REFERENCE, MASK, "k1") < 0).any()
    for estimator in ("k1", "k2", "k3"):
        assert not divergence(logprobs, logprobs.clone(), MASK, estimator).any()  # type: ignore[arg-type]


def test_masked_tokens_are_zero_whatever_they_hold() -> None:
    mask = torch.tensor([True] * 5 + [False])
    bad = torch.cat([torch.log_softmax(LOGITS, 0)[:5], torch.tensor([float("nan")], dtype=torch.float64)])
    leaf = bad.requires_grad_()
    (divergence(leaf, REFERENCE, mask, "k3") + entropy_loss(leaf, mask)).sum().backward()
    assert leaf.grad[5] == 0.0
    assert torch.isfinite(leaf.grad).all()
