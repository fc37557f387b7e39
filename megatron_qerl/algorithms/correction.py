"""Importance weights: samples of one policy, used to train another.

What was drawn from the behaviour policy b counts pi/b times when the target is pi. Two choices define a rule.

The unit. The exact weight of a response is the product of its tokens' ratios; with it the estimate has no bias, and
its variance grows with the length. A weight a token corrects each token given its prefix, and leaves the prefixes as
the behaviour drew them: a bias, for a variance that does not depend on the length.

What happens outside the bounds. Truncation cuts a weight to the cap and keeps the sample. Masking drops it, above the
cap and below the floor: a sample that the target would hardly have drawn then teaches nothing. Either gives up the
exactness that was left, and keeps the variance finite.

How much was given up must be visible, so the effective sample size and the shares of truncated and dropped tokens are
computed beside the weights. No rule repairs a support that was cut: what the behaviour cannot draw has no ratio.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_qerl.algorithms.sequences import masked, sum_by_sequence

CorrectionRule = Literal["token_truncate", "sequence_truncate", "token_mask", "sequence_mask"]


@dataclass(frozen=True)
class ImportanceWeights:
    """The weights of one micro-batch, detached.

    Attributes:
        weights: [T], in the dtype of the target's log-probabilities: that of the token, or of its response; 0 where
            masked or dropped.
        raw: float64 [T], before truncation or dropping; finite where float32 would overflow. 0 where masked.
        truncated: bool [T], cut to the cap.
        dropped: bool [T], set to 0 because the raw weight was out of bounds.
        mask: bool [T], tokens that count.
        sequence: int64 [T].
        by_sequence: whether all tokens of a response share one weight.
    """

    weights: Tensor
    raw: Tensor
    truncated: Tensor
    dropped: Tensor
    mask: Tensor
    sequence: Tensor
    by_sequence: bool


def importance_weights(
    rule: CorrectionRule,
    target_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    mask: Tensor,
    sequence: Tensor,
    *,
    floor: float,
    cap: float,
) -> ImportanceWeights:
    """The weight of each token under a rule.

    Args:
        rule: unit and treatment, see the module.
        target_logprobs: float [T], of the policy being trained, before the update.
        behaviour_logprobs: float [T], recorded when the tokens were drawn, under the same temperature.
        mask: bool [T], true on response tokens; values elsewhere are ignored, even if not finite.
        sequence: int64 [T], the response of each token, numbered from 0; a response has all its tokens here.
        floor: smallest weight that the ``*_mask`` rules keep.
        cap: largest weight, positive; infinity leaves all weights exact.
    """
    assert target_logprobs.shape == behaviour_logprobs.shape == mask.shape == sequence.shape, "one value a token each"
    assert cap > 0.0, "a cap of zero would silence every token"
    by_sequence = rule.startswith("sequence")
    log_ratio_T = masked(target_logprobs.detach().double() - behaviour_logprobs.detach().double(), mask)
    if by_sequence:
        log_ratio_T = sum_by_sequence(log_ratio_T, sequence)[sequence]
    raw_T = masked(log_ratio_T.exp(), mask)
    above_T, nothing_T = mask & (raw_T > cap), torch.zeros_like(mask)
    if rule.endswith("mask"):
        dropped_T = above_T | (mask & (raw_T < floor))
        weights_T, truncated_T = masked(raw_T, ~dropped_T), nothing_T
    else:
        weights_T, truncated_T, dropped_T = raw_T.clamp(max=cap), above_T, nothing_T
    return ImportanceWeights(
        weights_T.to(target_logprobs.dtype), raw_T, truncated_T, dropped_T, mask, sequence, by_sequence
    )


def effective_sample_size(weights: Tensor) -> float:
    """(sum w)^2 / sum w^2 (Kish): how many equally weighted samples carry as much. 0.0 if there are none."""
    wide = weights.detach().double()
    return _effective(float(wide.sum()), float(wide.square().sum()))


def _effective(total: float, square_total: float) -> float:
    return total**2 / square_total if square_total > 0.0 else 0.0


@dataclass(frozen=True)
class WeightStatistics:
    """Sums over tokens that add up over micro-batches with ``+``. ``raw_max`` is from before truncation.

    ``responses`` and its sums count responses, each with its one weight; they stay 0 under the rules by token.
    """

    tokens: int = 0
    weight_sum: float = 0.0
    weight_square_sum: float = 0.0
    raw_max: float = float("-inf")
    truncated_tokens: int = 0
    dropped_tokens: int = 0
    responses: int = 0
    response_weight_sum: float = 0.0
    response_weight_square_sum: float = 0.0

    def __add__(self, other: WeightStatistics) -> WeightStatistics:
        return WeightStatistics(
            tokens=self.tokens + other.tokens,
            weight_sum=self.weight_sum + other.weight_sum,
            weight_square_sum=self.weight_square_sum + other.weight_square_sum,
            raw_max=max(self.raw_max, other.raw_max),
            truncated_tokens=self.truncated_tokens + other.truncated_tokens,
            dropped_tokens=self.dropped_tokens + other.dropped_tokens,
            responses=self.responses + other.responses,
            response_weight_sum=self.response_weight_sum + other.response_weight_sum,
            response_weight_square_sum=self.response_weight_square_sum + other.response_weight_square_sum,
        )

    @property
    def effective_tokens(self) -> float:
        """Effective sample size of the used weights, in tokens."""
        return _effective(self.weight_sum, self.weight_square_sum)

    @property
    def effective_responses(self) -> float:
        """Effective sample size in responses, under the rules by sequence."""
        return _effective(self.response_weight_sum, self.response_weight_square_sum)

    def as_metrics(self) -> dict[str, float]:
        """Registered metric name -> value; empty when no token was seen."""
        if self.tokens == 0:
            return {}
        metrics = {
            "correction/weight_mean": self.weight_sum / self.tokens,
            "correction/weight_max": self.raw_max,
            "correction/effective_sample_fraction": self.effective_tokens / self.tokens,
            "correction/truncated_fraction": self.truncated_tokens / self.tokens,
            "correction/dropped_fraction": self.dropped_tokens / self.tokens,
        }
        if self.responses:
            metrics["correction/effective_response_fraction"] = self.effective_responses / self.responses
        return metrics


def importance_statistics(importance: ImportanceWeights) -> WeightStatistics:
    """Statistics of one micro-batch's weights, read from the device in a single transfer."""
    i = importance
    if not bool(i.mask.any()):
        return WeightStatistics()
    used_T = i.weights[i.mask].double()
    parts = [used_T.sum(), used_T.square().sum(), i.raw[i.mask].max(), i.truncated.sum(), i.dropped.sum()]
    responses = 0
    if i.by_sequence:
        numbers_T = i.sequence[i.mask]
        seen_R, place_T = torch.unique(numbers_T, return_inverse=True)
        responses = seen_R.numel()
        once_R = used_T.new_zeros(responses).index_copy(0, place_T, used_T)  # all tokens of a response agree
        parts += [once_R.sum(), once_R.square().sum()]
    total, square, largest, truncated, dropped, *by_response = torch.stack([p.double() for p in parts]).tolist()
    response_sum, response_square = by_response or (0.0, 0.0)
    return WeightStatistics(
        tokens=used_T.numel(),
        weight_sum=total,
        weight_square_sum=square,
        raw_max=largest,
        truncated_tokens=int(truncated),
        dropped_tokens=int(dropped),
        responses=responses,
        response_weight_sum=response_sum,
        response_weight_square_sum=response_square,
    )
