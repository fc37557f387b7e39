"""A policy small enough that every expectation over noise and responses is a finite sum.

Three tokens, of which token 0 ends a response; at most three tokens a response: 15 responses, listed with their flat
tokens. The next token's logits are ``(u[previous] * (w + z)) (W + theta)``: features, a norm scale with additive noise
z, a frozen matrix and a learnt one. z takes three values with known probabilities. All in float64.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

VOCAB, MAX_TOKENS, CHANNELS = 3, 3, 4
START = VOCAB  # the context before the first token
PROBABILITY_Z = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
CLEAN = torch.zeros(CHANNELS, dtype=torch.float64)


def _responses(max_tokens: int) -> tuple[tuple[int, ...], ...]:
    found = []
    for length in range(1, max_tokens + 1):
        for tokens in itertools.product(range(VOCAB), repeat=length):
            ends_here = tokens[-1] == 0 or length == max_tokens
            if ends_here and 0 not in tokens[:-1]:
                found.append(tokens)
    return tuple(found)


@dataclass(frozen=True)
class Toy:
    """The fixed parts: features [context, channel], scale [channel], weight [channel, token], noise [state, channel],
    reward [response]. Flat over the tokens of all responses: tokens, contexts, sequence (the response of each), mask.
    """

    features: Tensor
    scale: Tensor
    weight: Tensor
    noise: Tensor
    reward: Tensor
    responses: tuple[tuple[int, ...], ...]

    @property
    def tokens(self) -> Tensor:
        return torch.tensor([t for r in self.responses for t in r])

    @property
    def contexts(self) -> Tensor:
        return torch.tensor([p for r in self.responses for p in (START, *r[:-1])])

    @property
    def sequence(self) -> Tensor:
        return torch.tensor([i for i, r in enumerate(self.responses) for _ in r])

    @property
    def mask(self) -> Tensor:
        return torch.ones(len(self.tokens), dtype=torch.bool)

    def next_token_logprobs(self, theta_CV: Tensor, z_C: Tensor) -> Tensor:
        """Log-probabilities of the next token after each context."""
        logits_PV = (self.features * (self.scale + z_C)) @ (self.weight + theta_CV)
        return torch.log_softmax(logits_PV, dim=1)

    def token_logprobs(self, theta_CV: Tensor, z_C: Tensor) -> Tensor:
        """Log-probability of every token of every response."""
        return self.next_token_logprobs(theta_CV, z_C)[self.contexts, self.tokens]

    def response_logprobs(self, theta_CV: Tensor, z_C: Tensor) -> Tensor:
        """Log-probability of every response."""
        return torch.zeros(len(self.responses), dtype=torch.float64).index_add(
            0, self.sequence, self.token_logprobs(theta_CV, z_C)
        )

    def expected_reward(self, theta_CV: Tensor, z_C: Tensor) -> Tensor:
        return self.response_logprobs(theta_CV, z_C).exp() @ self.reward


def make_toy(max_tokens: int = MAX_TOKENS, seed: int = 5) -> Toy:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    responses = _responses(max_tokens)
    return Toy(
        features=normal(VOCAB + 1, CHANNELS),
        scale=1.0 + 0.2 * normal(CHANNELS),
        weight=0.7 * normal(CHANNELS, VOCAB),
        noise=0.6 * normal(3, CHANNELS),
        # One right kind of answer: a response that says 2 somewhere and stops by itself.
        reward=torch.tensor([float(2 in r and r[-1] == 0) for r in responses], dtype=torch.float64),
        responses=responses,
    )


def start_theta(seed: int = 9) -> Tensor:
    """A learnt part that is not zero, so that nothing holds by symmetry."""
    generator = torch.Generator().manual_seed(seed)
    return 0.3 * torch.randn(CHANNELS, VOCAB, generator=generator, dtype=torch.float64)
