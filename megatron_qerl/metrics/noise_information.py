"""How diverse are the responses, and how much of that is the noise's doing?

    H(O | q) = E_Z[H(O | Z, q)] + I(O; Z | q)

The left side is the entropy of responses with the noise states mixed; the first term is the entropy within one state;
the second says how much a response tells about the state that drew it. They are three measurements (reading, section
4.3): noise that makes every state confident of another solution leaves the first term low and the total high.

All of it follows from one matrix, log p(o_n | z_m): N recorded responses to one prompt, each replayed under M noise
states, among them the one that drew it.

If the M states are all that there are (an enumerated toy), the mixture over them is p(o) and the estimates are
unbiased. If they are a sample of a continuum, the mixture is itself an estimate, and the nested average is biased in a
known direction: with the response's own state in the mixture the information comes out too low (and never above log M),
without it too high (Foster et al., arXiv 1911.00294, section 3). Both are reported; the truth lies between their means.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megatron_qerl.metrics.intervals import CONFIDENCE

Array = NDArray[np.float64]
States = Literal["sampled", "exhaustive"]


@dataclass(frozen=True)
class Estimate:
    """A mean in nats with its standard error and two-sided interval at ``CONFIDENCE``."""

    value: float
    standard_error: float
    low: float
    high: float


@dataclass(frozen=True)
class EntropyTerms:
    """The three terms for one prompt, in nats a response.

    Attributes:
        total: H(O | q). For sampled states from below: its expectation is at most the truth.
        conditional: E_Z[H(O | Z, q)], unbiased.
        information: I(O; Z | q), own state in the mixture; ``total - conditional``. For sampled states from below.
        information_upper: own state left out, from above; equal to ``information`` for exhaustive states.
        states, responses: M and N.
    """

    total: Estimate
    conditional: Estimate
    information: Estimate
    information_upper: Estimate
    states: int
    responses: int

    @property
    def saturated(self) -> bool:
        """Whether the information is so close to log M that more states are needed to see how large it is."""
        return self.information.value > 0.8 * math.log(self.states)


def entropy_terms(
    logprobs_MN: Array, source_N: NDArray[np.int64], states: States, probability_M: Array | None = None
) -> EntropyTerms:
    """The decomposition from replayed responses.

    Args:
        logprobs_MN: log p(o_n | q, z_m), the sum over the response's tokens, under the sampling distribution.
        source_N: the state that drew each response; every state has drawn one or more (exhaustive: two or more).
        states: ``sampled``: independent draws of Z, weighing the same; the standard error is a jackknife over states,
            since responses of one state rise and fall together. ``exhaustive``: all values of Z.
        probability_M: exhaustive: P(Z = z_m); None: all the same.

    Returns:
        The terms. Sampled states need M >= 3.
    """
    count_M = np.bincount(source_N, minlength=logprobs_MN.shape[0])
    total_states, responses = logprobs_MN.shape
    assert source_N.shape == (responses,), "one source a response"
    assert len(count_M) == total_states, "a source is the number of a row"
    assert count_M.min() >= (2 if states == "exhaustive" else 1), "every state has drawn responses"
    if states == "exhaustive":
        weights_M = np.full(total_states, 1.0 / total_states) if probability_M is None else np.asarray(probability_M)
        assert math.isclose(float(weights_M.sum()), 1.0, abs_tol=1e-9), "probabilities of all states sum to one"
        return _exhaustive(logprobs_MN, source_N, weights_M)
    assert probability_M is None, "sampled states weigh the same"
    assert total_states >= 3, "an interval over states needs three"
    total, conditional, information, upper = _jackknife(logprobs_MN, source_N)
    return EntropyTerms(total, conditional, information, upper, total_states, responses)


def over_prompts(estimates: Sequence[Estimate]) -> Estimate:
    """Mean over prompts with an interval from their spread, prompts being the independent units; needs two or more.

    Noise states that were shared between prompts make prompts alike, which this interval does not see.
    """
    values = np.array([e.value for e in estimates])
    assert len(values) >= 2, "a spread needs two prompts"
    return _interval(float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values))), len(values) - 1)


@cache
def student_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """t with P(|T| < t) = ``confidence`` for Student's distribution with integer ``degrees`` of freedom."""
    assert degrees >= 1, "an interval needs a degree of freedom"
    low, high = 0.0, 1.0
    while _student_within(high, degrees) < confidence:
        high *= 2.0
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if _student_within(middle, degrees) < confidence else (low, middle)
    return high


def _student_within(t: float, degrees: int) -> float:
    """P(|T| < t), the finite series for integer degrees (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    theta = math.atan(t / math.sqrt(degrees))
    cosine, sine = math.cos(theta), math.sin(theta)
    odd = degrees % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(1 + odd, degrees, 2):
        total += term
        term *= cosine * cosine * k / (k + 1)
    return 2.0 / math.pi * (theta + sine * total) if odd else sine * total


def _interval(value: float, standard_error: float, degrees: int) -> Estimate:
    half = student_quantile(degrees) * standard_error
    return Estimate(value, standard_error, value - half, value + half)


def _plain_terms(logprobs_MN: Array, source_N: NDArray[np.int64]) -> Array:
    """[4]: total, conditional, information and its upper estimate; each the mean over states of the state's mean.

    A state with more responses weighs no more than another.
    """
    total_states, responses = logprobs_MN.shape
    at_N = np.arange(responses)
    own_N = logprobs_MN[source_N, at_N]
    others_MN = logprobs_MN.copy()
    others_MN[source_N, at_N] = -np.inf
    others_N = np.logaddexp.reduce(others_MN, axis=0)
    mixed_N = np.logaddexp(others_N, own_N) - math.log(total_states)
    without_N = others_N - math.log(total_states - 1)
    count_M = np.bincount(source_N)
    terms = (-mixed_N, -own_N, own_N - mixed_N, own_N - without_N)
    return np.array([(np.bincount(source_N, weights=term_N) / count_M).mean() for term_N in terms])


def _jackknife(logprobs_MN: Array, source_N: NDArray[np.int64]) -> list[Estimate]:
    """The plain terms, with standard errors from leaving out one state at a time, its row and its responses."""
    total_states = logprobs_MN.shape[0]
    value_4 = _plain_terms(logprobs_MN, source_N)
    left_out_M4 = np.empty((total_states, len(value_4)))
    for m in range(total_states):
        kept_N = source_N != m
        renumbered = source_N[kept_N] - (source_N[kept_N] > m)
        left_out_M4[m] = _plain_terms(np.delete(logprobs_MN, m, axis=0)[:, kept_N], renumbered)
    square_4 = ((left_out_M4 - left_out_M4.mean(axis=0)) ** 2).sum(axis=0)
    error_4 = np.sqrt((total_states - 1) / total_states * square_4)
    return [_interval(float(v), float(e), total_states - 1) for v, e in zip(value_4, error_4, strict=True)]


def _exhaustive(logprobs_MN: Array, source_N: NDArray[np.int64], weights_M: Array) -> EntropyTerms:
    """The terms when the states are all there are: a stratified mean, exact mixture."""
    total_states, responses = logprobs_MN.shape
    own_N = logprobs_MN[source_N, np.arange(responses)]
    with np.errstate(divide="ignore"):  # a state of probability zero contributes nothing
        mixed_N = np.logaddexp.reduce(logprobs_MN + np.log(weights_M)[:, None], axis=0)
    estimates = []
    for values_N in (-mixed_N, -own_N, own_N - mixed_N):
        strata = [values_N[source_N == m] for m in range(total_states)]
        value = math.fsum(w * float(s.mean()) for w, s in zip(weights_M, strata, strict=True))
        variance = math.fsum(w**2 * float(s.var(ddof=1)) / len(s) for w, s in zip(weights_M, strata, strict=True))
        estimates.append(_interval(value, math.sqrt(variance), responses - total_states))
    total, conditional, information = estimates
    return EntropyTerms(total, conditional, information, information, total_states, responses)
