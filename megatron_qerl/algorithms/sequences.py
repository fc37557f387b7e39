"""Sums over responses in flat token tensors, and back: what every sequence-level quantity is made of.

``sequence_T`` numbers the response of each token from 0 within one call; a response has all its tokens in one call.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sum_by_sequence(values_T: Tensor, sequence_T: Tensor) -> Tensor:
    """[R]: the sum of each response's values; R is the largest number plus one, 0 if there are no tokens."""
    assert values_T.shape == sequence_T.shape, "one response number a token"
    responses = int(sequence_T.max()) + 1 if sequence_T.numel() else 0
    return values_T.new_zeros(responses).index_add(0, sequence_T, values_T)


def masked(values_T: Tensor, mask_T: Tensor) -> Tensor:
    """[T]: ``values_T`` where the mask is true, exact zeros elsewhere whatever stood there, in the gradient too."""
    return torch.where(mask_T, values_T, torch.zeros_like(values_T))


def mean_by_sequence(values_T: Tensor, mask_T: Tensor, sequence_T: Tensor) -> Tensor:
    """[R]: the mean over each response's unmasked tokens; 0 for a response without any."""
    lengths_R = sum_by_sequence(mask_T.to(values_T.dtype), sequence_T)
    return sum_by_sequence(masked(values_T, mask_T), sequence_T) / lengths_R.clamp(min=1.0)
