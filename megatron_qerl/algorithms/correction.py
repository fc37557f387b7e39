"""Truncated importance weights: samples of one policy, used to train another.

A token drawn from the behaviour policy b counts pi/b times when the target is pi. Ratios above a cap are cut to it:
that gives up unbiasedness and keeps the variance finite. How much was given up must be visible, so the effective sample
size and the truncated share are computed beside the weights. The correction is by token; the product over a response's
prefix, which an exact trajectory ratio would need, is left out because its variance grows with the length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def truncated_importance_weights(target_logprobs: Tensor, behaviour_logprobs: Tensor, cap: float) -> Tensor:
    """min(cap, exp(target - behaviour)) by token, detached.

    Args:
        target_logprobs: float32 [T], of the policy being trained, before the update.
        behaviour_logprobs: float32 [T], recorded when the tokens were drawn, under the same temperature.
        cap: largest weight, positive.
    """
    assert target_logprobs.shape == behaviour_logprobs.shape, "one pair of log-probabilities a token"
    assert cap > 0.0, "a cap of zero would silence every token"
    return torch.exp(target_logprobs.detach() - behaviour_logprobs.detach()).clamp(max=cap)


def effective_sample_size(weights: Tensor) -> float:
    """(sum w)^2 / sum w^2 (Kish): how many equally weighted tokens carry as much. 0.0 if there are none."""
    wide = weights.detach().double()
    return _effective(float(wide.sum()), float(wide.square().sum()))


def _effective(total: float, square_total: float) -> float:
    return total**2 / square_total if square_total > 0.0 else 0.0


@dataclass(frozen=True)
class WeightStatistics:
    """Sums over tokens that add up over micro-batches with ``+``. ``raw_max`` is from before truncation."""

    tokens: int = 0
    weight_sum: float = 0.0
    weight_square_sum: float = 0.0
    raw_max: float = float("-inf")
    truncated_tokens: int = 0

    def __add__(self, other: WeightStatistics) -> WeightStatistics:
        return WeightStatistics(
            tokens=self.tokens + other.tokens,
            weight_sum=self.weight_sum + other.weight_sum,
            weight_square_sum=self.weight_square_sum + other.weight_square_sum,
            raw_max=max(self.raw_max, other.raw_max),
            truncated_tokens=self.truncated_tokens + other.truncated_tokens,
        )

    @property
    def effective_tokens(self) -> float:
        """Effective sample size of the truncated weights, in tokens."""
        return _effective(self.weight_sum, self.weight_square_sum)

    def as_metrics(self) -> dict[str, float]:
        """Registered metric name -> value; empty when no token was seen."""
        if self.tokens == 0:
            return {}
        return {
            "correction/weight_mean": self.weight_sum / self.tokens,
            "correction/weight_max": self.raw_max,
            "correction/effective_sample_fraction": self.effective_tokens / self.tokens,
            "correction/truncated_fraction": self.truncated_tokens / self.tokens,
        }


def weight_statistics(
    target_logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor, cap: float
) -> WeightStatistics:
    """Statistics of one micro-batch's weights.

    Args:
        target_logprobs, behaviour_logprobs, cap: as for ``truncated_importance_weights``.
        mask: bool [T], true on response tokens.
    """
    # In double, so that the largest raw weight stays finite where float32 would overflow (a log-ratio above 88).
    raw = (target_logprobs.detach()[mask].double() - behaviour_logprobs.detach()[mask].double()).exp()
    if raw.numel() == 0:
        return WeightStatistics()
    weights = raw.clamp(max=cap)
    sums = [weights.sum(), weights.square().sum(), raw.max(), (raw > cap).sum().double()]
    total, square_total, raw_max, truncated = torch.stack(sums).tolist()
    return WeightStatistics(raw.numel(), total, square_total, raw_max, int(truncated))
