"""A layer's activations in a few hundred rows.

AWQ compares output errors ``|X (W - W')^T|^2`` for many candidate weights, and the tokens X matter only through
``X^T X``. A count sketch S adds every token, with a random sign, into one of R rows; on average ``S^T S = X^T X``
exactly, because the cross terms of tokens in a row cancel. Searching on S instead of X makes the cost independent of
how many tokens were seen, and lets the search run after the activations are gone. With no more than R tokens the
sketch is the activations themselves and the search is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SKETCH_ROWS = 256


@dataclass(frozen=True)
class ActivationSketch:
    """What a search needs to know of the inputs of a linear.

    Attributes:
        rows: float32 [R, K], the sketch S.
        mean_magnitude: float32 [K], mean of |x| over all tokens.
    """

    rows: Tensor
    mean_magnitude: Tensor


class SketchBuilder:
    """Collects the inputs of one linear, batch after batch.

    Args:
        features: K.
        signs: +1 or -1 for every token of the calibration set, [tokens], float32, on the device of the activations.
        rows: R.
    """

    def __init__(self, features: int, signs: Tensor, rows: int = SKETCH_ROWS) -> None:
        self._signs = signs
        self._rows = torch.zeros(min(rows, len(signs)), features, device=signs.device)
        self._magnitude = torch.zeros(features, dtype=torch.float64, device=signs.device)
        self._seen_tokens = 0

    def add(self, x: Tensor) -> None:
        """Take in activations [..., K]."""
        x = x.reshape(-1, x.shape[-1]).float()
        at = slice(self._seen_tokens, self._seen_tokens + len(x))
        # Neighbouring tokens resemble each other, so they go to different rows.
        row = torch.arange(at.start, at.stop, device=x.device) % len(self._rows)
        self._magnitude += x.abs().sum(dim=0, dtype=torch.float64)
        self._rows.index_add_(0, row, x * self._signs[at].unsqueeze(1))
        self._seen_tokens = at.stop

    def finish(self) -> ActivationSketch:
        """The sketch of everything added. All tokens must have been seen."""
        assert self._seen_tokens == len(self._signs), (self._seen_tokens, len(self._signs))
        return ActivationSketch(self._rows, (self._magnitude / self._seen_tokens).float())


def token_signs(tokens: int, seed: int, device: torch.device) -> Tensor:
    """A random sign for each token, the same for a seed on every device."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(0, 2, (tokens,), generator=generator) * 2 - 1).float().to(device)
