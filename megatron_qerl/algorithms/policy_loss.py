"""From a config to the loss of each token: the one place where the objective's parts are put together."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from megatron_qerl.algorithms.objective import (
    TokenLoss,
    clipped_policy_loss,
    clipped_weight_loss,
    sequence_policy_loss,
)
from megatron_qerl.algorithms.regularize import divergence, entropy_loss
from megatron_qerl.algorithms.sequences import masked
from megatron_qerl.config.schema import AlgorithmSection


@dataclass(frozen=True)
class LossInputs:
    """What the objective of one micro-batch is computed from, flat over its response tokens.

    Attributes:
        logprobs: float [T], of the policy being trained; carries the gradient.
        old_logprobs: float [T], the ratio's denominator, detached.
        advantages: float [T].
        mask: bool [T], true on tokens that count.
        sequence: int64 [T], the response of each token, numbered from 0.
        weights: float [T], importance weights (``correction.importance_weights``), or None for 1.
        reference_logprobs: float [T], of the base without adapter and under the noise of the forward, so that the
            divergence is what the adapter did; needed if ``kl_coefficient`` is not 0.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    sequence: Tensor
    weights: Tensor | None = None
    reference_logprobs: Tensor | None = None


def policy_loss(inputs: LossInputs, algorithm: AlgorithmSection) -> TokenLoss:
    """The loss of each token under ``algorithm``, regularizers included; ``objective.aggregate`` makes it one number.

    The importance weights multiply the regularizers too: those are means over the trained policy's tokens, and the
    weights are what turns the behaviour's tokens into these.
    """
    i, low, high = inputs, algorithm.ratio_clip_low, algorithm.ratio_clip_high
    common = (i.logprobs, i.old_logprobs, i.advantages, i.mask)
    if algorithm.surrogate == "clipped_weight":
        result = clipped_weight_loss(*common, low, high, i.weights)
    elif algorithm.ratio_level == "sequence":
        result = sequence_policy_loss(*common, i.sequence, low, high, i.weights)
    else:
        result = clipped_policy_loss(*common, low, high, i.weights)
    if algorithm.kl_coefficient == 0.0 and algorithm.entropy_coefficient == 0.0:
        return result
    return replace(result, loss=result.loss + _regularizer(inputs, algorithm))


def _regularizer(inputs: LossInputs, algorithm: AlgorithmSection) -> Tensor:
    total_T = inputs.logprobs.new_zeros(inputs.logprobs.shape)
    if algorithm.kl_coefficient > 0.0:
        reference_T = inputs.reference_logprobs
        assert reference_T is not None, "a divergence needs its reference's log-probabilities"
        kl_T = divergence(inputs.logprobs, reference_T, inputs.mask, algorithm.kl_estimator)
        total_T = total_T + algorithm.kl_coefficient * kl_T
    if algorithm.entropy_coefficient > 0.0:
        total_T = total_T + algorithm.entropy_coefficient * entropy_loss(inputs.logprobs, inputs.mask)
    return total_T if inputs.weights is None else total_T * masked(inputs.weights, inputs.mask)
