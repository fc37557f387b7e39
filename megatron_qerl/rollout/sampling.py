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


BLOCK = 256


def _inverse_distribution(probabilities_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Index of the first token whose cumulated probability exceeds the uniform, in two levels.

    Cumulating 10^5 numbers a row in FP64 costs more than the model's last layer. So whole blocks are summed first,
    the block is found in FP64 among their sums, and only that block is cumulated. ``right=True`` steps over
    probability zero.
    """
    rows, vocab = probabilities_BV.shape
    blocks = torch.nn.functional.pad(probabilities_BV, (0, -vocab % BLOCK)).view(rows, -1, BLOCK)
    cumulative = torch.cumsum(blocks.sum(dim=-1).double(), dim=-1)
    total = cumulative[:, -1]
    # Strictly below the total, or rounding could step past every token that has probability.
    target = torch.minimum(uniform_B * total, torch.nextafter(total, torch.zeros_like(total)))
    block = torch.searchsorted(cumulative, target.unsqueeze(1), right=True).clamp_(max=blocks.shape[1] - 1)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)), 0.0)
    chosen = blocks[torch.arange(rows, device=blocks.device), block.squeeze(1)].double()
    inner = torch.searchsorted(torch.cumsum(chosen, dim=-1), target.unsqueeze(1) - before, right=True)
    # The FP32 block sum may exceed the FP64 one by a rounding; the last token that has any probability takes the rest.
    last = (chosen > 0).long().mul(torch.arange(1, BLOCK + 1, device=blocks.device)).amax(dim=-1, keepdim=True) - 1
    return (block * BLOCK + torch.minimum(inner, last)).squeeze(1)


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
    greedy = temperature == 0.0
    tokens = logits_BV.argmax(dim=-1) if greedy else _inverse_distribution(logprobs_BV.exp(), uniform_B)
    return tokens, logprobs_BV.gather(1, tokens.unsqueeze(1)).squeeze(1)
