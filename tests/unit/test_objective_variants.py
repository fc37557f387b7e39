"""GSPO, CISPO, Dr. GRPO and the composition by config, against loops that share no code with them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_qerl.algorithms.advantage import group_advantages
from megatron_qerl.algorithms.objective import aggregate, clipped_weight_loss, sequence_policy_loss
from megatron_qerl.algorithms.policy_loss import LossInputs, policy_loss
from megatron_qerl.config.schema import AlgorithmSection

LOW, HIGH = 0.2, 0.28
LENGTHS = [5, 1, 9, 3, 7, 2]
GSPO = {"ratio_level": "sequence", "loss_aggregation": "sequence_mean", "ratio_clip_low": LOW, "ratio_clip_high": HIGH}
VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_aggregation": "sequence_mean"},
    "dapo": {"loss_aggregation": "token_mean"},
    "dr_grpo": {"loss_aggregation": "constant", "advantage": "mean"},
    "gspo": GSPO,
    "cispo": {"surrogate": "clipped_weight", "ratio_clip_low": 1.0},
}


def section(name: str, **changes: Any) -> AlgorithmSection:
    settings = {"ratio_clip_low": LOW, "ratio_clip_high": HIGH, "likelihood": "replay"} | VARIANTS.get(name, {})
    return AlgorithmSection(name=name, **(settings | changes))  # type: ignore[arg-type]


def batch(seed: int, spread: float = 0.4) -> LossInputs:
    """Six responses of different lengths in float64, with masked tokens, weights and a reference."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tokens = sum(LENGTHS)
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    first = torch.cat([torch.tensor([True]), sequence[1:] != sequence[:-1]])
    old = -normal(tokens).abs() - 0.1
    return LossInputs(
        logprobs=old + spread * normal(tokens),
        old_logprobs=old,
        advantages=normal(len(LENGTHS))[sequence],
        mask=(torch.rand(tokens, generator=generator) < 0.8) | first,
        sequence=sequence,
        weights=(2 * torch.rand(len(LENGTHS), generator=generator, dtype=torch.float64))[sequence],
        reference_logprobs=old + 0.3 * normal(tokens),
    )


def slow_loss(inputs: LossInputs, algorithm: AlgorithmSection, logprobs: list[float], constant: int) -> float:
    """The whole loss, written from the papers' formulas, response by response."""
    low, high = 1 - algorithm.ratio_clip_low, 1 + algorithm.ratio_clip_high
    frozen = [math.exp(float(a - b)) for a, b in zip(inputs.logprobs, inputs.old_logprobs, strict=True)]
    per_response, all_tokens = [], 0
    for response in range(len(LENGTHS)):
        places = [t for t in range(len(logprobs)) if inputs.sequence[t] == response and inputs.mask[t]]
        ratios = {t: math.exp(logprobs[t] - float(inputs.old_logprobs[t])) for t in places}
        terms = []
        for t in places:
            advantage, weight = float(inputs.advantages[t]), float(inputs.weights[t])
            ratio = ratios[t]
            if algorithm.ratio_level == "sequence":
                ratio = math.prod(ratios.values()) ** (1 / len(places))
            if algorithm.surrogate == "clipped_weight":
                term = -min(max(frozen[t], low), high) * advantage * logprobs[t]
            else:
                term = -min(ratio * advantage, min(max(ratio, low), high) * advantage)
            log_r = float(inputs.reference_logprobs[t]) - logprobs[t]
            kl = {"k2": log_r**2 / 2, "k3": math.exp(log_r) - 1 - log_r}.get(algorithm.kl_estimator, 0.0)
            term += algorithm.kl_coefficient * kl + algorithm.entropy_coefficient * logprobs[t] ** 2 / 2
            terms.append(weight * term)
        per_response.append(terms)
        all_tokens += len(terms)
    if algorithm.loss_aggregation == "token_mean":
        return sum(map(sum, per_response)) / all_tokens
    if algorithm.loss_aggregation == "constant":
        return sum(map(sum, per_response)) / (constant * len(LENGTHS))
    return sum(sum(terms) / len(terms) for terms in per_response) / len(LENGTHS)


def fast_loss(inputs: LossInputs, algorithm: AlgorithmSection, logprobs: Tensor, constant: int) -> Tensor:
    moved = LossInputs(**{**vars(inputs), "logprobs": logprobs})
    token_loss = policy_loss(moved, algorithm).loss
    tokens = int(inputs.mask.sum())
    mode = algorithm.loss_aggregation
    return aggregate(token_loss, inputs.mask, inputs.sequence, mode, tokens, len(LENGTHS), constant)


CASES = [
    *((name, {}) for name in VARIANTS),
    ("grpo", {"kl_coefficient": 0.3, "kl_estimator": "k2"}),
    ("grpo", {"kl_coefficient": 0.3, "kl_estimator": "k3", "entropy_coefficient": 0.1}),
    ("custom", {**GSPO, "kl_coefficient": 0.2}),
    ("custom", {"advantage": "leave_one_out", "loss_aggregation": "constant", "entropy_coefficient": 0.2}),
]


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(("name", "changes"), CASES, ids=lambda case: case if isinstance(case, str) else "")
def test_value_and_gradient_agree_with_a_slow_reference(name: str, changes: dict[str, Any], seed: int) -> None:
    inputs, algorithm = batch(seed), section(name, **changes)
    leaf = inputs.logprobs.clone().requires_grad_()
    loss = fast_loss(inputs, algorithm, leaf, constant=16)
    loss.backward()
    values = inputs.logprobs.tolist()
    assert float(loss.detach()) == pytest.approx(slow_loss(inputs, algorithm, values, 16), rel=1e-12)

    # Central differences: rounding 1e-16 / 1e-6, curvature (1e-6)^2; no ratio lies within 1e-6 of a bound.
    step, numeric = 1e-6, []
    for t in range(len(values)):
        ends = [slow_loss(inputs, algorithm, [*values[:t], values[t] + h, *values[t + 1 :]], 16) for h in (step, -step)]
        numeric.append((ends[0] - ends[1]) / (2 * step))
    assert leaf.grad.tolist() == pytest.approx(numeric, rel=1e-6, abs=1e-9)
    assert leaf.grad.abs().max() > 1e-3


@pytest.mark.parametrize("name", VARIANTS)
def test_masked_tokens_may_be_garbage_and_change_nothing(name: str) -> None:
    inputs, algorithm = batch(4), section(name)
    spoilt = {
        key: torch.where(inputs.mask, value, torch.full_like(value, math.nan))
        for key, value in vars(inputs).items()
        if key not in ("mask", "sequence")
    }
    results = []
    for fields in (vars(inputs), {**vars(inputs), **spoilt}):
        leaf = fields["logprobs"].clone().requires_grad_()
        loss = fast_loss(LossInputs(**fields), algorithm, leaf, constant=16)
        loss.backward()
        results.append((float(loss.detach()), leaf.grad))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
    assert not results[1][1][~inputs.mask].any()


def test_on_policy_all_surrogates_are_the_policy_gradient() -> None:
    inputs = batch(5, spread=0.0)
    expected_T = torch.where(inputs.mask, -inputs.advantages * inputs.weights, 0.0)
    for name in ("dapo", "cispo", "gspo"):
        leaf = inputs.logprobs.clone().requires_grad_()
        policy_loss(LossInputs(**{**vars(inputs), "logprobs": leaf}), section(name)).loss.sum().backward()
        # With one ratio a response, each of its n tokens carries the response's loss, whose derivative is -A / n.
        assert torch.allclose(leaf.grad, expected_T, rtol=1e-12), name


def test_a_response_is_clipped_whole_by_its_mean_log_ratio() -> None:
    old = torch.zeros(4, dtype=torch.float64) - 2.0
    logprobs = (old + torch.tensor([0.9, -0.1, 0.1, 0.1], dtype=torch.float64)).requires_grad_()
    advantages, mask = torch.ones(4, dtype=torch.float64), torch.ones(4, dtype=torch.bool)
    result = sequence_policy_loss(logprobs, old, advantages, mask, torch.tensor([0, 0, 1, 1]), LOW, HIGH)
    result.loss.sum().backward()
    # Means 0.4 and 0.1: exp(0.4) = 1.49 > 1.28 is clipped, although its second token fell.
    assert result.clipped_high.tolist() == [True, True, False, False]
    assert logprobs.grad.tolist() == pytest.approx([0.0, 0.0, -math.exp(0.1), -math.exp(0.1)])


def test_a_clipped_weight_still_teaches() -> None:
    old = torch.tensor([-2.0, -2.0], dtype=torch.float64)
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    ones, mask = torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.bool)
    result = clipped_weight_loss(logprobs, old, ones, mask, 1.0, HIGH)
    result.loss.sum().backward()
    assert result.clipped_high.tolist() == [True, False]
    assert logprobs.grad.tolist() == pytest.approx([-1.28, -1.0])


@pytest.mark.parametrize("name", VARIANTS)
def test_the_loss_does_not_depend_on_the_micro_batches(name: str) -> None:
    inputs, algorithm, tokens = batch(6), section(name), int(batch(6).mask.sum())
    whole = float(fast_loss(inputs, algorithm, inputs.logprobs, constant=16))
    parts = 0.0
    for responses in ([3], [0, 5], [1, 2, 4]):
        here = torch.isin(inputs.sequence, torch.tensor(responses))
        cut = {key: value[here] for key, value in vars(inputs).items()}
        cut["sequence"] = torch.unique(cut["sequence"], return_inverse=True)[1]
        loss = policy_loss(LossInputs(**cut), algorithm).loss
        mode = algorithm.loss_aggregation
        parts += float(aggregate(loss, cut["mask"], cut["sequence"], mode, tokens, len(LENGTHS), 16))
    assert parts == pytest.approx(whole, rel=1e-13)


def test_a_divergence_without_a_reference_is_refused() -> None:
    inputs = LossInputs(**{**vars(batch(1)), "reference_logprobs": None})
    with pytest.raises(AssertionError, match="reference"):
        policy_loss(inputs, section("grpo", kl_coefficient=0.1))


def test_constant_aggregation_needs_its_constant() -> None:
    inputs = batch(1)
    with pytest.raises(AssertionError, match="constant"):
        aggregate(inputs.logprobs, inputs.mask, inputs.sequence, "constant", 1, 1)


# Advantages ----------------------------------------------------------------------------------------------------------


def test_mean_keeps_the_unit_of_reward() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 0.0], 1e-6, "mean") == (0.75, -0.25, -0.25, -0.25)


def test_leave_one_out_subtracts_the_mean_of_the_others() -> None:
    rewards = [0.3, 1.0, -0.5, 0.0, 0.9]
    expected = [r - sum(rewards[:i] + rewards[i + 1 :]) / 4 for i, r in enumerate(rewards)]
    assert group_advantages(rewards, 1e-6, "leave_one_out") == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("kind", ["mean", "leave_one_out"])
def test_equal_rewards_give_exact_zeros_for_every_kind(kind: Any) -> None:
    assert group_advantages([0.1] * 7, 1e-6, kind) == (0.0,) * 7
    assert group_advantages([0.1], 1e-6, kind) == (0.0,)
