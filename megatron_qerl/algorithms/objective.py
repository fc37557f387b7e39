"""The policy objectives, one number a token.

For a token with probability ratio r = exp(logprob - old_logprob) and advantage A, three surrogates share one set of
inputs:

* ``clipped_policy_loss``: ``-w min(r A, clip(r, 1 - low, 1 + high) A)`` (PPO; GRPO, DAPO). The minimum takes away the
  incentive to move further once a token has moved far enough in the direction its advantage asks for: a good token
  gains nothing above 1 + high, a bad one nothing below 1 - low. Movement the other way is never clipped, since it is a
  mistake to be undone. DAPO's ``high > low`` leaves rare good tokens more room to grow.
* ``sequence_policy_loss``: the same with one ratio a response, the geometric mean of its tokens' (GSPO). A response is
  clipped whole or not at all.
* ``clipped_weight_loss``: ``-w stop(clip(r, 1 - low, 1 + high)) A logprob`` (CISPO). Every token keeps a gradient; what
  is bounded is its size.

At r = 1 all three have the gradient -w A, that of REINFORCE with a baseline (``sequence_policy_loss`` divided by the
response's length). Clipping bounds an incentive; it does not repair a ratio with the wrong denominator.

Everything here is flat over the response tokens of one micro-batch: suffix ``_T``; ``_R`` is one number a response.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_qerl.algorithms.sequences import masked, mean_by_sequence

LossAggregation = Literal["token_mean", "sequence_mean", "constant"]


@dataclass(frozen=True)
class TokenLoss:
    """The loss of each token and what the ratio did. Only ``loss`` carries a gradient.

    Attributes:
        loss: float [T]; 0 where ``mask`` is false.
        log_ratio: float [T], the logarithm of the ratio that the surrogate used: of the token, or of its response;
            0 where masked.
        clipped_low: bool [T]; the lower bound took effect. With a clipped ratio that is A < 0 and r < 1 - low, and the
            token has no gradient; with a clipped weight it is r < 1 - low.
        clipped_high: bool [T]; the upper bound, likewise (A > 0 and r > 1 + high, or r > 1 + high).
        mask: bool [T]; the tokens that count.
    """

    loss: Tensor
    log_ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    mask: Tensor

    @property
    def ratio(self) -> Tensor:
        """float [T], the detached probability ratio; 1 where masked."""
        return self.log_ratio.exp()


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    weights: Tensor | None = None,
) -> TokenLoss:
    """-w * min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) for each token (DAPO section 3.1; PPO equation 7).

    Args:
        logprobs: float32 or float64 [T], of the policy being trained; the only input that gets a gradient.
        old_logprobs: float [T], the ratio's denominator (``likelihood.plan`` says whose).
        advantages: float [T], each response's advantage on all of its tokens.
        mask: bool [T], true on response tokens. Values under a false mask are ignored, even if not finite.
        clip_low: the ratio may fall to 1 - clip_low.
        clip_high: the ratio may rise to 1 + clip_high.
        weights: float [T], importance weights, or None for 1.

    Returns:
        The token losses. An overflowing ratio gives a non-finite loss on purpose: the trainer stops on it.
    """
    _check(logprobs, old_logprobs, advantages, mask, weights)
    # Masked before exp: a padded position may hold -inf - (-inf), and 0 * nan is nan in the backward pass too.
    log_ratio_T = masked(logprobs - old_logprobs, mask)
    return _clipped(log_ratio_T, advantages, mask, clip_low, clip_high, weights)


def sequence_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence: Tensor,
    clip_low: float,
    clip_high: float,
    weights: Tensor | None = None,
) -> TokenLoss:
    """-w * min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s = exp(mean log r) of the response (GSPO equation 5, 7).

    Each token carries the loss of its whole response, so only ``sequence_mean`` counts a response once.

    Args:
        sequence: int64 [T], the response of each token, numbered from 0; a response has all its tokens here.
        advantages, weights: one value a response, repeated on its tokens.
        logprobs, old_logprobs, mask, clip_low, clip_high: as for ``clipped_policy_loss``.
    """
    _check(logprobs, old_logprobs, advantages, mask, weights)
    log_ratio_R = mean_by_sequence(masked(logprobs - old_logprobs, mask), mask, sequence)
    log_ratio_T = masked(log_ratio_R[sequence], mask)
    return _clipped(log_ratio_T, advantages, mask, clip_low, clip_high, weights)


def clipped_weight_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    weights: Tensor | None = None,
) -> TokenLoss:
    """-w * stop(clip(r, 1 - clip_low, 1 + clip_high)) * A * logprob for each token (CISPO, arXiv 2506.13585 eq. 4, 5).

    Args:
        clip_low: 1 or more leaves the weight without a lower bound, as in the paper.
        logprobs, old_logprobs, advantages, mask, clip_high, weights: as for ``clipped_policy_loss``.
    """
    _check(logprobs, old_logprobs, advantages, mask, weights)
    log_ratio_T = masked(logprobs - old_logprobs, mask).detach()
    ratio_T = log_ratio_T.exp()
    coefficient_T = masked(advantages, mask) * ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    if weights is not None:
        coefficient_T = coefficient_T * masked(weights, mask)
    # An overflowing ratio is clipped like any other here; a log-probability that is not finite still shows.
    loss_T = -coefficient_T * masked(logprobs, mask)
    low_T, high_T = mask & (ratio_T < 1.0 - clip_low), mask & (ratio_T > 1.0 + clip_high)
    return TokenLoss(loss_T, log_ratio_T, clipped_low=low_T, clipped_high=high_T, mask=mask)


def _check(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor | None) -> None:
    inputs = [logprobs, old, advantages] + ([] if weights is None else [weights])
    assert logprobs.dtype in (torch.float32, torch.float64), "ratios of 16-bit log-probabilities are noise"
    assert all(t.shape == mask.shape and t.dtype == logprobs.dtype for t in inputs), "flat tensors of one length, dtype"
    assert mask.ndim == 1, "one number a token"
    assert mask.dtype == torch.bool, "mask is a bool tensor"
    assert not any(t.requires_grad for t in inputs[1:]), "only logprobs carry a gradient"


def _clipped(
    log_ratio_T: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float, weights: Tensor | None
) -> TokenLoss:
    """The clipped minimum for a ratio of either level."""
    advantages_T = masked(advantages, mask)
    ratio_T = torch.exp(log_ratio_T)
    bounded_T = torch.clamp(ratio_T, 1.0 - clip_low, 1.0 + clip_high)
    loss_T = -torch.minimum(ratio_T * advantages_T, bounded_T * advantages_T)
    if weights is not None:
        loss_T = loss_T * masked(weights, mask)
    seen_T = ratio_T.detach()
    return TokenLoss(
        loss=loss_T,
        log_ratio=log_ratio_T.detach(),
        clipped_low=(advantages_T < 0) & (seen_T < 1.0 - clip_low),
        clipped_high=(advantages_T > 0) & (seen_T > 1.0 + clip_high),
        mask=mask,
    )


def aggregate(
    loss_T: Tensor,
    mask_T: Tensor,
    sequence_index_T: Tensor,
    mode: LossAggregation,
    global_tokens: int,
    global_sequences: int,
    constant_tokens: int | None = None,
) -> Tensor:
    """One scalar whose sum over all micro-batches and ranks is the loss of the whole optimizer batch.

    The divisors are counts of the whole batch, so the sum does not depend on how the batch was cut. A mean taken in
    each micro-batch and then averaged would give the tokens of short micro-batches more weight.

    Args:
        loss: float [T].
        mask: bool [T].
        sequence_index_T: int64 [T], the response each token belongs to, numbered from 0 in this call. With
            ``sequence_mean`` all tokens of a response must be in one call.
        mode: ``token_mean`` sums the tokens and divides by ``global_tokens`` (DAPO: long responses weigh more);
            ``sequence_mean`` averages within each response and divides by ``global_sequences`` (GRPO: the tokens of a
            long response weigh less); ``constant`` divides the tokens' sum by ``global_sequences`` times
            ``constant_tokens`` (Dr. GRPO: all tokens weigh the same in every batch, so that the expectation is a
            multiple of the reward's gradient; with the other two the length of a response changes its weight).
        global_tokens: response tokens of the whole optimizer batch, over all micro-batches and data-parallel ranks.
        global_sequences: responses of the whole optimizer batch, likewise.
        constant_tokens: for ``constant``: the same for every response of a run, such as the token limit.
    """
    assert loss_T.shape == mask_T.shape == sequence_index_T.shape, "one index a token"
    masked_T = masked(loss_T, mask_T)
    if mode == "token_mean":
        assert global_tokens > 0, "an optimizer batch has tokens"
        return masked_T.sum() / global_tokens
    assert global_sequences > 0, "an optimizer batch has responses"
    if mode == "constant":
        assert constant_tokens is not None, "constant aggregation needs its constant"
        return masked_T.sum() / (global_sequences * constant_tokens)
    return mean_by_sequence(masked_T, mask_T, sequence_index_T).sum() / global_sequences


@dataclass(frozen=True)
class RatioStatistics:
    """Sums over tokens, so that the statistics of micro-batches and ranks add up with ``+`` to those of the batch.

    The two KL estimates are of KL(old || new) from tokens that the old policy drew: k1 = -log r has no bias and a high
    variance, k3 = r - 1 - log r has the same mean and is never negative.
    """

    tokens: int = 0
    ratio_sum: float = 0.0
    ratio_excess_square_sum: float = 0.0  # of (r - 1)^2, which keeps its digits where r^2 would cancel
    ratio_min: float = float("inf")
    ratio_max: float = float("-inf")
    clipped_low_tokens: int = 0
    clipped_high_tokens: int = 0
    kl_k1_sum: float = 0.0
    kl_k3_sum: float = 0.0

    def __add__(self, other: RatioStatistics) -> RatioStatistics:
        return RatioStatistics(
            tokens=self.tokens + other.tokens,
            ratio_sum=self.ratio_sum + other.ratio_sum,
            ratio_excess_square_sum=self.ratio_excess_square_sum + other.ratio_excess_square_sum,
            ratio_min=min(self.ratio_min, other.ratio_min),
            ratio_max=max(self.ratio_max, other.ratio_max),
            clipped_low_tokens=self.clipped_low_tokens + other.clipped_low_tokens,
            clipped_high_tokens=self.clipped_high_tokens + other.clipped_high_tokens,
            kl_k1_sum=self.kl_k1_sum + other.kl_k1_sum,
            kl_k3_sum=self.kl_k3_sum + other.kl_k3_sum,
        )

    def as_metrics(self) -> dict[str, float]:
        """Registered metric name -> value; empty when no token was seen."""
        if self.tokens == 0:
            return {}
        mean = self.ratio_sum / self.tokens
        variance = self.ratio_excess_square_sum / self.tokens - (mean - 1.0) ** 2
        return {
            "ratio/mean": mean,
            "ratio/min": self.ratio_min,
            "ratio/max": self.ratio_max,
            "ratio/std": math.sqrt(max(0.0, variance)),
            "ratio/clip_low_fraction": self.clipped_low_tokens / self.tokens,
            "ratio/clip_high_fraction": self.clipped_high_tokens / self.tokens,
            "kl/k1_nats": self.kl_k1_sum / self.tokens,
            "kl/k3_nats": self.kl_k3_sum / self.tokens,
        }


def ratio_statistics(loss: TokenLoss) -> RatioStatistics:
    """The statistics of one micro-batch, read from the device in a single transfer."""
    log_ratio = loss.log_ratio[loss.mask].double()
    if log_ratio.numel() == 0:
        return RatioStatistics()
    ratio, excess = log_ratio.exp(), torch.expm1(log_ratio)
    sums = [
        ratio.sum(),
        excess.square().sum(),
        ratio.min(),
        ratio.max(),
        loss.clipped_low[loss.mask].sum().double(),
        loss.clipped_high[loss.mask].sum().double(),
        -log_ratio.sum(),
        (excess - log_ratio).sum(),
    ]
    total, excess_square, low, high, clipped_low, clipped_high, k1, k3 = torch.stack(sums).tolist()
    return RatioStatistics(
        tokens=log_ratio.numel(),
        ratio_sum=total,
        ratio_excess_square_sum=excess_square,
        ratio_min=low,
        ratio_max=high,
        clipped_low_tokens=int(clipped_low),
        clipped_high_tokens=int(clipped_high),
        kl_k1_sum=k1,
        kl_k3_sum=k3,
    )
