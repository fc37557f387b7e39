"""The clipped policy objective, one number a token.

For a token with probability ratio r = exp(logprob - old_logprob) and advantage A the loss is
``-w * min(r A, clip(r, 1 - low, 1 + high) A)``. The minimum takes away the incentive to move further once a token has
moved far enough in the direction its advantage asks for: a good token gains nothing above 1 + high, a bad one nothing
below 1 - low. Movement the other way is never clipped, since it is a mistake to be undone. DAPO's ``high > low`` leaves
rare good tokens more room to grow. Clipping bounds an incentive; it does not repair a ratio with the wrong denominator.

Everything here is flat over the response tokens of one micro-batch: suffix ``_T``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LossAggregation = Literal["token_mean", "sequence_mean"]


@dataclass(frozen=True)
class TokenLoss:
    """The loss of each token and what the ratio did. Only ``loss`` carries a gradient.

    Attributes:
        loss: float32 [T]; 0 where ``mask`` is false.
        log_ratio: float32 [T], logprob - old_logprob; 0 where masked.
        clipped_low: bool [T]; A < 0 and r < 1 - low, so that the token has no gradient.
        clipped_high: bool [T]; A > 0 and r > 1 + high, likewise.
        mask: bool [T]; the tokens that count.
    """

    loss: Tensor
    log_ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    mask: Tensor

    @property
    def ratio(self) -> Tensor:
        """float32 [T], the detached probability ratio; 1 where masked."""
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
        logprobs: float32 [T], of the policy being trained; the only input that gets a gradient.
        old_logprobs: float32 [T], the ratio's denominator (``likelihood.plan`` says whose).
        advantages: float32 [T], each response's advantage on all of its tokens.
        mask: bool [T], true on response tokens. Values under a false mask are ignored, even if not finite.
        clip_low: the ratio may fall to 1 - clip_low.
        clip_high: the ratio may rise to 1 + clip_high.
        weights: float32 [T], truncated importance weights, or None for 1.

    Returns:
        The token losses. An overflowing ratio gives a non-finite loss on purpose: the trainer stops on it.
    """
    inputs = [logprobs, old_logprobs, advantages] + ([] if weights is None else [weights])
    assert all(t.shape == mask.shape and t.dtype == torch.float32 for t in inputs), "flat float32 tensors of one length"
    assert mask.ndim == 1, "one number a token"
    assert mask.dtype == torch.bool, "mask is a bool tensor"
    assert not any(t.requires_grad for t in inputs[1:]), "only logprobs carry a gradient"

    zero = torch.zeros((), dtype=torch.float32, device=logprobs.device)
    # Masked before exp: a padded position may hold -inf - (-inf), and 0 * nan is nan in the backward pass too.
    log_ratio_T = torch.where(mask, logprobs - old_logprobs, zero)
    advantages_T = torch.where(mask, advantages, zero)
    ratio_T = torch.exp(log_ratio_T)
    bounded_T = torch.clamp(ratio_T, 1.0 - clip_low, 1.0 + clip_high)
    loss_T = -torch.minimum(ratio_T * advantages_T, bounded_T * advantages_T)
    if weights is not None:
        loss_T = loss_T * torch.where(mask, weights, zero)

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
) -> Tensor:
    """One scalar whose sum over all micro-batches and ranks is the loss of the whole optimizer batch.

    The divisors are counts of the whole batch, so the sum does not depend on how the batch was cut. A mean taken in
    each micro-batch and then averaged would give the tokens of short micro-batches more weight.

    Args:
        loss: float32 [T].
        mask: bool [T].
        sequence_index_T: int64 [T], the response each token belongs to, numbered from 0 in this call. With
            ``sequence_mean`` all tokens of a response must be in one call.
        mode: ``token_mean`` sums the tokens and divides by ``global_tokens`` (DAPO: long responses weigh more);
            ``sequence_mean`` averages within each response and divides by ``global_sequences`` (GRPO).
        global_tokens: response tokens of the whole optimizer batch, over all micro-batches and data-parallel ranks.
        global_sequences: responses of the whole optimizer batch, likewise.
    """
    assert loss_T.shape == mask_T.shape == sequence_index_T.shape, "one index a token"
    masked_T = torch.where(mask_T, loss_T, torch.zeros_like(loss_T))
    if mode == "token_mean":
        assert global_tokens > 0, "an optimizer batch has tokens"
        return masked_T.sum() / global_tokens
    assert global_sequences > 0, "an optimizer batch has responses"
    responses = int(sequence_index_T.max()) + 1 if sequence_index_T.numel() else 0
    sums_R = masked_T.new_zeros(responses).index_add(0, sequence_index_T, masked_T)
    lengths_R = masked_T.new_zeros(responses).index_add(0, sequence_index_T, mask_T.to(masked_T.dtype))
    return (sums_R / lengths_R.clamp(min=1.0)).sum() / global_sequences


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
