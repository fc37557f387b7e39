"""Drawing tokens: one recorded uniform a token, turned into a token by the inverse of the distribution function."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_qerl.rng import Domain, name_word, stream, stream_key, uniform


def uniforms(seed: int, rows: Sequence[tuple[str, int, int]], count: int) -> Tensor:
    """float64 [B, count] on (0, 1): the stream of each row (prompt uid, response index, stream number)."""
    key = stream_key(seed, Domain.SAMPLING)
    drawn = [uniform(stream(key, (name_word(uid), index, number), count)) for uid, index, number in rows]
    return torch.from_numpy(np.stack(drawn))


def sample(logits_BV: Tensor, temperature: float, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """One token a row and its log-probability under the sampling distribution.

    Args:
        logits_BV: FP32 logits.
        temperature: 0 takes the largest logit; its log-probability is then reported at temperature 1.
        uniform_B: float64 in (0, 1).

    Returns:
        int64 [B] tokens, FP32 [B] log-probabilities in nats.
    """
    scaled = logits_BV / temperature if temperature > 0.0 else logits_BV
    logprobs_BV = torch.log_softmax(scaled, dim=-1)
    if temperature == 0.0:
        tokens = logits_BV.argmax(dim=-1)
    else:
        # FP64, because 10^5 FP32 additions would bias the tail.
        cumulative = torch.cumsum(logprobs_BV.double().exp_(), dim=-1)
        tokens = torch.searchsorted(cumulative, (uniform_B * cumulative[:, -1]).unsqueeze(1)).squeeze(1)
        tokens = tokens.clamp_(max=logits_BV.shape[1] - 1)
    return tokens, logprobs_BV.gather(1, tokens.unsqueeze(1)).squeeze(1)
