"""Token entropy, its derivative by the logits, and the three terms of the response entropy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megatron_qerl.metrics.entropy import entropy_change, entropy_gradient, log_softmax, token_entropy
from megatron_qerl.metrics.noise_information import (
    Estimate,
    entropy_terms,
    over_prompts,
    student_quantile,
)
from tests.unit.toy_policy import PROBABILITY_Z, Toy, make_toy, start_theta

EXAMPLE = np.array([2.0, 0.0, -1.0])
TOP = np.array([1.0, 0.0, 0.0])


def test_moving_the_leading_logit_up_sharpens_and_down_flattens() -> None:
    entropies = [float(token_entropy(EXAMPLE + shift * TOP)) for shift in (0.0, 0.5, -0.5)]
    assert entropies == pytest.approx([0.524, 0.386, 0.680], abs=5e-4)
    assert entropy_change(EXAMPLE, 0.5 * TOP) < 0 < entropy_change(EXAMPLE, -0.5 * TOP)


def test_the_derivative_agrees_with_central_differences() -> None:
    """Fourth order, step 1e-3 in float64: rounding 1e-15 / 1e-3 = 1e-12, truncation 4 (1e-3)^4 |fifth derivative|."""
    rng, worst, step = np.random.default_rng(4), 0.0, 1e-3
    for logits in [EXAMPLE, *(2.0 * rng.standard_normal(int(n)) for n in rng.integers(2, 30, 40))]:
        at = {k: token_entropy(logits + k * step * np.eye(len(logits))) for k in (-2, -1, 1, 2)}
        numeric = (8.0 * (at[1] - at[-1]) - (at[2] - at[-2])) / (12.0 * step)
        worst = max(worst, float(np.abs(entropy_gradient(logits) - numeric).max()))
    assert worst <= 1e-10


def test_the_first_order_change_is_first_order() -> None:
    rng = np.random.default_rng(5)
    logits, direction = rng.standard_normal((6, 9)), rng.standard_normal((6, 9))
    errors = []
    for size in (1e-2, 1e-3):
        actual = token_entropy(logits + size * direction) - token_entropy(logits)
        errors.append(np.abs(actual - entropy_change(logits, size * direction)).max())
    assert 50 < errors[0] / errors[1] < 200, "what is left out is quadratic"


def test_noise_around_the_uniform_distribution_can_only_lower_the_mean_entropy() -> None:
    noise = np.random.default_rng(6).standard_normal((500, 8))
    assert token_entropy(0.3 * noise).mean() < math.log(8) - 1e-3
    assert np.abs(entropy_gradient(np.zeros(8))).max() < 1e-15, "to first order nothing happens"


def test_temperature_belongs_to_the_distribution() -> None:
    assert token_entropy(EXAMPLE, 2.0) == pytest.approx(float(token_entropy(EXAMPLE / 2.0)), rel=1e-15)
    assert token_entropy(EXAMPLE, 2.0) > token_entropy(EXAMPLE)
    with pytest.raises(AssertionError, match="greedy"):
        token_entropy(EXAMPLE, 0.0)


def test_tokens_that_cannot_be_drawn_contribute_nothing() -> None:
    assert token_entropy(np.array([0.0, 0.0, -np.inf])) == pytest.approx(math.log(2))
    assert log_softmax(np.array([[1e4, 0.0]]))[0] == pytest.approx([0.0, -1e4])


# Response entropy ----------------------------------------------------------------------------------------------------


def exact_terms(logp_ZR: np.ndarray, probability_Z: np.ndarray) -> tuple[float, float, float]:
    """(H(O), E_Z H(O|Z), I(O;Z)) by enumeration, the information from its own definition, not by subtraction."""
    joint_ZR = probability_Z[:, None] * np.exp(logp_ZR)
    marginal_R = joint_ZR.sum(axis=0)
    total = -(marginal_R * np.log(marginal_R)).sum()
    conditional = -(joint_ZR * logp_ZR).sum()
    information = (joint_ZR * np.log(joint_ZR / (probability_Z[:, None] * marginal_R))).sum()
    return float(total), float(conditional), float(information)


def toy_logprobs(toy: Toy) -> np.ndarray:
    return torch.stack([toy.response_logprobs(start_theta(), z) for z in toy.noise]).numpy()


def test_the_identity_holds_on_the_toy_and_no_term_is_trivial() -> None:
    total, conditional, information = exact_terms(toy_logprobs(make_toy()), PROBABILITY_Z.numpy())
    assert total == pytest.approx(conditional + information, abs=1e-14)
    assert information > 0.05
    assert conditional > 0.5


def test_the_conditional_term_is_the_sum_of_token_entropies_along_responses() -> None:
    """Chain rule: H(O | z) = E sum_t H(o_t | o_<t, z), what the head measures token by token."""
    toy = make_toy()
    for z in toy.noise:
        entropy_P = token_entropy(toy.next_token_logprobs(start_theta(), z).numpy())
        logp_R = toy.response_logprobs(start_theta(), z).numpy()
        along_T = entropy_P[toy.contexts.numpy()]
        along_R = np.bincount(toy.sequence.numpy(), weights=along_T)
        assert float(np.exp(logp_R) @ along_R) == pytest.approx(-float(np.exp(logp_R) @ logp_R), abs=1e-13)


def test_the_product_of_averaged_tokens_has_another_entropy() -> None:
    """Averaging the noise out of every token, as if drawn anew for each, is not the policy that was sampled."""
    toy = make_toy()
    probability = PROBABILITY_Z.numpy()
    token_ZT = np.exp(torch.stack([toy.token_logprobs(start_theta(), z) for z in toy.noise]).numpy())
    averaged_R = np.exp(np.bincount(toy.sequence.numpy(), weights=np.log(probability @ token_ZT)))
    assert averaged_R.sum() == pytest.approx(1.0, abs=1e-14)
    total, _, _ = exact_terms(toy_logprobs(toy), probability)
    assert abs(-(averaged_R * np.log(averaged_R)).sum() - total) > 1e-3


def test_with_all_states_and_every_response_as_often_as_it_occurs_the_estimate_is_exact() -> None:
    """Responses repeated in proportion to dyadic probabilities: the stratified mean is the expectation itself."""
    p_ZR = np.array([[8, 4, 2, 1, 1], [1, 1, 2, 4, 8], [4, 4, 4, 2, 2]]) / 16
    source = np.repeat(np.arange(3), 16)
    drawn = np.concatenate([np.repeat(np.arange(5), (row * 16).astype(int)) for row in p_ZR])
    probability = np.array([0.5, 0.3, 0.2])
    found = entropy_terms(np.log(p_ZR)[:, drawn], source, "exhaustive", probability)
    values = (found.total.value, found.conditional.value, found.information.value)
    assert values == pytest.approx(exact_terms(np.log(p_ZR), probability), abs=1e-14)
    assert found.information_upper == found.information
    assert (found.states, found.responses) == (3, 48)


def draw_responses(logp_MR: np.ndarray, each: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(log p(o_n | z_m) [M, N], source [N]) with ``each`` responses a state."""
    drawn = [rng.choice(logp_MR.shape[1], each, p=np.exp(row) / np.exp(row).sum()) for row in logp_MR]
    return logp_MR[:, np.concatenate(drawn)], np.repeat(np.arange(len(logp_MR)), each)


def test_intervals_over_all_states_cover_the_exact_terms() -> None:
    rng, logp = np.random.default_rng(1), toy_logprobs(make_toy())
    exact = exact_terms(logp, PROBABILITY_Z.numpy())
    hits = np.zeros(3)
    for _ in range(400):
        found = entropy_terms(*draw_responses(logp, 40, rng), "exhaustive", PROBABILITY_Z.numpy())
        terms = (found.total, found.conditional, found.information)
        hits += [e.low <= x <= e.high for e, x in zip(terms, exact, strict=True)]
    # 95 % +- 4 standard errors of a share over 400 runs, sqrt(.05 * .95 / 400) = 1.1 %; a little off for 120 draws.
    assert (hits / 400 > 0.90).all(), hits / 400
    assert (hits / 400 < 0.995).all(), hits / 400


def gaussian_toy(states: int, rng: np.random.Generator) -> np.ndarray:
    """log p(o | z_m) [M, 12] for z from a continuum: a softmax whose logits are moved along two directions."""
    fixed = np.random.default_rng(8)
    base, directions = fixed.standard_normal(12), fixed.standard_normal((2, 12))
    return log_softmax(base + rng.standard_normal((states, 2)) @ directions)


def test_for_a_continuum_of_states_the_truth_lies_between_the_two_information_estimates() -> None:
    rng = np.random.default_rng(2)
    many = gaussian_toy(200_000, np.random.default_rng(3))
    marginal = np.exp(many).mean(axis=0)
    truth_total = -float((marginal * np.log(marginal)).sum())
    truth_conditional = float(-(np.exp(many) * many).sum(axis=1).mean())
    truth = truth_total - truth_conditional
    runs = [entropy_terms(*draw_responses(gaussian_toy(8, rng), 12, rng), "sampled") for _ in range(150)]
    lower, upper = (np.array([getattr(r, n).value for r in runs]) for n in ("information", "information_upper"))
    for values, sign in ((lower, 1.0), (upper, -1.0)):
        assert sign * (truth - values.mean()) > 3 * values.std() / math.sqrt(150), "the bias has the stated sign"
    assert all(r.information.value <= math.log(8) + 1e-12 for r in runs)
    hits = np.mean([r.conditional.low <= truth_conditional <= r.conditional.high for r in runs])
    assert 0.90 < hits < 0.99, "96 responses of 8 states are not 96 independent ones"
    spread, claimed = lower.std(), np.mean([r.information.standard_error for r in runs])
    assert 0.75 < claimed / spread < 1.5


def test_an_interval_that_took_responses_for_independent_would_be_too_narrow() -> None:
    rng = np.random.default_rng(9)
    runs = [draw_responses(gaussian_toy(8, rng), 40, rng) for _ in range(50)]
    naive = [np.std(-lp[src, np.arange(len(src))]) / math.sqrt(len(src)) for lp, src in runs]
    honest = [entropy_terms(lp, src, "sampled").conditional.standard_error for lp, src in runs]
    assert np.mean(honest) > 1.5 * np.mean(naive)


def test_identical_states_carry_no_information_and_disjoint_ones_log_m() -> None:
    same = np.tile(np.log([0.5, 0.25, 0.25]), (4, 1))
    logp, source = draw_responses(same, 10, np.random.default_rng(0))
    assert entropy_terms(logp, source, "sampled").information.value == pytest.approx(0.0, abs=1e-15)
    apart = np.full((4, 4), -800.0)
    np.fill_diagonal(apart, 0.0)
    found = entropy_terms(apart[:, np.repeat(np.arange(4), 3)], np.repeat(np.arange(4), 3), "sampled")
    assert found.information.value == pytest.approx(math.log(4))
    assert found.saturated


def test_states_weigh_the_same_whatever_they_drew() -> None:
    logp = np.log(np.array([[0.5, 0.5], [0.9, 0.1], [0.2, 0.8]]))
    drawn, source = np.array([0, 1, 0, 0, 0, 0, 1]), np.array([0, 0, 1, 1, 1, 1, 2])
    found = entropy_terms(logp[:, drawn], source, "sampled").conditional.value
    assert found == pytest.approx(-(math.log(0.5) + math.log(0.9) + math.log(0.8)) / 3)


@pytest.mark.parametrize(
    ("states", "source", "message"),
    [("sampled", [0, 0, 1, 1], "every state"), ("exhaustive", [0, 1, 2, 2], "every state")],
)
def test_a_state_without_responses_is_refused(states, source, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        entropy_terms(np.zeros((3, 4)), np.array(source), states)


@pytest.mark.parametrize(
    ("degrees", "expected"), [(1, 12.7062), (2, 4.30265), (5, 2.57058), (10, 2.22814), (99, 1.98422)]
)
def test_students_quantile_agrees_with_the_tables(degrees: int, expected: float) -> None:
    assert student_quantile(degrees) == pytest.approx(expected, rel=1e-5)


def test_over_prompts_the_interval_comes_from_their_spread() -> None:
    found = over_prompts([Estimate(v, 9.0, 0.0, 0.0) for v in (1.0, 2.0, 4.5)])
    assert found.value == 2.5
    assert found.standard_error == pytest.approx(np.std([1.0, 2.0, 4.5], ddof=1) / math.sqrt(3))
    assert found.high - found.value == pytest.approx(4.30265 * found.standard_error, rel=1e-5)
