"""Terms that can be added to the policy loss: a divergence from a reference policy, and entropy. Both default to off.

A divergence estimate has two uses, and one formula rarely serves both. With r = reference / policy and tokens drawn
from the policy:

====  ==================  =========================  ==================================================================
name  value               its mean                   mean of its gradient
====  ==================  =========================  ==================================================================
k1    -log r              KL(policy || reference)    zero: E[d log policy] = 0. Useless as a loss, and refused there
k2    (log r)^2 / 2       biased                     exactly that of KL(policy || reference)
k3    r - 1 - log r       KL(policy || reference)    that of KL(reference || policy), the other direction
====  ==================  =========================  ==================================================================

(Schulman, "Approximating KL divergence", for the values; tests/unit/test_regularize.py enumerates the gradients.)

The entropy bonus has the same trap. The head's entropies carry no gradient, so the term uses the sampled tokens:
(log policy)^2 / 2 has the mean gradient -dH, and adding it to the loss raises the entropy.

Both are means over tokens that the trained policy drew. After several updates from one rollout they drift with the
ratio, as the clipped loss does.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from megatron_qerl.algorithms.sequences import masked

KlEstimator = Literal["k1", "k2", "k3"]


def divergence(logprobs_T: Tensor, reference_logprobs_T: Tensor, mask_T: Tensor, estimator: KlEstimator) -> Tensor:
    """[T]: the estimate of KL(policy || reference) for each token in nats; 0 where masked.

    Args:
        logprobs_T: of the policy being trained, carrying the gradient.
        reference_logprobs_T: of the reference (the base without adapter and noise), detached.
        mask_T: bool; values under a false mask are ignored, even if not finite.
        estimator: see the module's table.
    """
    assert not reference_logprobs_T.requires_grad, "the reference does not learn"
    log_ratio_T = masked(reference_logprobs_T - logprobs_T, mask_T)
    if estimator == "k1":
        return -log_ratio_T
    if estimator == "k2":
        return 0.5 * log_ratio_T.square()
    return log_ratio_T.expm1() - log_ratio_T


def entropy_loss(logprobs_T: Tensor, mask_T: Tensor) -> Tensor:
    """[T]: a loss whose expected gradient is minus the entropy's, for tokens drawn from the policy; 0 where masked.

    Its value is not the entropy; that is measured by the head (``entropy/sampling_mean_nats``).
    """
    return 0.5 * masked(logprobs_T, mask_T).square()
