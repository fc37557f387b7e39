"""Entropy of a token's sampling distribution, and how a small change of its logits moves it.

The distribution is the one that tokens are drawn from: softmax of the logits over the temperature, over the whole
vocabulary. To first order a change dz of its logits moves its entropy by ``-sum_j p_j (log p_j + H) dz_j``. Nothing in
that sum has a fixed sign: noise that lifts the leading token sharpens the distribution, noise that lowers it flattens
it (reading, section 4.1). Noise therefore has to be measured, not assumed, to raise entropy.

All in float64, natural logarithms.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def log_softmax(logits_BV: Array, temperature: float = 1.0) -> Array:
    """Log-probabilities [..., V] of the sampling distribution. ``temperature`` is positive."""
    assert temperature > 0.0, "greedy decoding has no sampling distribution"
    scaled = np.asarray(logits_BV, dtype=np.float64) / temperature
    return np.asarray(scaled - np.logaddexp.reduce(scaled, axis=-1, keepdims=True), dtype=np.float64)


def token_entropy(logits_BV: Array, temperature: float = 1.0) -> Array:
    """H = -sum p log p in nats, [...]. Logits of -inf (tokens that cannot be drawn) contribute nothing."""
    logp = log_softmax(logits_BV, temperature)
    p = np.exp(logp)
    return np.asarray(-np.where(p > 0.0, p * np.where(p > 0.0, logp, 0.0), 0.0).sum(axis=-1), dtype=np.float64)


def entropy_gradient(logits_BV: Array) -> Array:
    """dH / dz_j = -p_j (log p_j + H), [..., V], for finite logits at temperature 1."""
    logp = log_softmax(logits_BV)
    return np.asarray(-np.exp(logp) * (logp + token_entropy(logits_BV)[..., None]), dtype=np.float64)


def entropy_change(logits_BV: Array, change_BV: Array) -> Array:
    """First-order change of the entropy in nats, [...], when ``change_BV`` is added to the logits."""
    return np.asarray((entropy_gradient(logits_BV) * change_BV).sum(axis=-1), dtype=np.float64)
