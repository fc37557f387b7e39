"""One recorded batch under all three likelihood modes: how different are the updates that they would make?

At a rollout's first update every surrogate's derivative by a token's log-probability is a coefficient times the
derivative of that log-probability, so the coefficients can be compared without a backward pass:

    replay       -A r, r = noisy trainer / rollout  (by the noise-conditioned log-probability)
    clean        -A w, w the importance weight      (by the clean one)
    uncorrected  -A                                 (by the clean one)

``clean`` and ``uncorrected`` multiply the same vectors, so their cosine compares two updates token by token. ``replay``
multiplies other vectors, of a network with noise: its cosine says whether the tokens are weighed alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from megatron_qerl.algorithms.correction import effective_sample_size, importance_weights
from megatron_qerl.algorithms.likelihood import plan
from megatron_qerl.algorithms.policy_loss import LossInputs, policy_loss
from megatron_qerl.config.schema import AlgorithmSection
from megatron_qerl.types import LikelihoodMode


@dataclass(frozen=True)
class RecordedBatch:
    """Response tokens of a rollout with their log-probabilities under both policies, detached.

    Attributes:
        rollout_logprobs: float [T], recorded by the engine.
        noisy_logprobs: float [T], the trainer's under the recorded noise, before the update.
        clean_logprobs: float [T], the trainer's without noise, before the update.
        advantages: float [T].
        mask: bool [T].
        sequence: int64 [T], the response of each token, numbered from 0.
    """

    rollout_logprobs: Tensor
    noisy_logprobs: Tensor
    clean_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    sequence: Tensor


@dataclass(frozen=True)
class ModeComparison:
    """The modes side by side.

    Attributes:
        coefficients: mode -> float [T], derivative of the token's loss by its log-probability; 0 where masked.
        norms: mode -> L2 norm of the coefficients.
        cosines: (mode, mode) -> cosine, in the order of ``LikelihoodMode``; 0 if either is zero throughout.
        effective_tokens: mode -> effective sample size of the weights (r, w or 1) over the unmasked tokens.
        tokens: unmasked tokens.
    """

    coefficients: dict[LikelihoodMode, Tensor]
    norms: dict[LikelihoodMode, float]
    cosines: dict[tuple[LikelihoodMode, LikelihoodMode], float]
    effective_tokens: dict[LikelihoodMode, float]
    tokens: int


def gradient_coefficients(batch: RecordedBatch, algorithm: AlgorithmSection, mode: LikelihoodMode) -> Tensor:
    """float [T]: d(token loss) / d(its log-probability) at the first update under ``mode``; 0 where masked.

    ``algorithm`` gives the surrogate, its bounds and the correction rule; its own ``likelihood`` is not read.
    """
    chosen = plan(mode)
    current_T = batch.noisy_logprobs if chosen.replay_noise else batch.clean_logprobs
    leaf_T = current_T.detach().clone().requires_grad_()
    denominator_T = batch.rollout_logprobs if chosen.denominator == "rollout" else current_T
    weights_T = _clean_weights(batch, algorithm) if chosen.importance_weights else None
    inputs = LossInputs(leaf_T, denominator_T, batch.advantages, batch.mask, batch.sequence, weights_T)
    bare = algorithm.model_copy(update={"kl_coefficient": 0.0, "entropy_coefficient": 0.0})
    (gradient_T,) = torch.autograd.grad(policy_loss(inputs, bare).loss.sum(), leaf_T)
    return gradient_T


def compare_modes(batch: RecordedBatch, algorithm: AlgorithmSection) -> ModeComparison:
    """All three modes on one batch; see ``gradient_coefficients``."""
    modes: tuple[LikelihoodMode, ...] = get_args(LikelihoodMode)
    coefficients = {mode: gradient_coefficients(batch, algorithm, mode) for mode in modes}
    wide = {mode: c.double() for mode, c in coefficients.items()}
    norms = {mode: float(c.norm()) for mode, c in wide.items()}
    cosines = {}
    for index, first in enumerate(modes):
        for second in modes[index + 1 :]:
            scale = norms[first] * norms[second]
            cosines[first, second] = float(wide[first] @ wide[second]) / scale if scale > 0.0 else 0.0
    ratio_T = (batch.noisy_logprobs.double() - batch.rollout_logprobs.double()).exp()
    weights: dict[LikelihoodMode, Tensor] = {
        "replay": ratio_T,
        "clean": _clean_weights(batch, algorithm),
        "uncorrected": torch.ones_like(ratio_T),
    }
    effective = {mode: effective_sample_size(weights[mode][batch.mask]) for mode in modes}
    return ModeComparison(coefficients, norms, cosines, effective, int(batch.mask.sum()))


def _clean_weights(batch: RecordedBatch, algorithm: AlgorithmSection) -> Tensor:
    return importance_weights(
        algorithm.importance_correction,
        batch.clean_logprobs,
        batch.rollout_logprobs,
        batch.mask,
        batch.sequence,
        floor=algorithm.importance_weight_floor,
        cap=algorithm.importance_weight_cap,
    ).weights
