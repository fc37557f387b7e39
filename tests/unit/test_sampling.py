"""One uniform becomes one token, exactly as the cumulated distribution says."""

from __future__ import annotations

import pytest
import torch

from megatron_qerl.rollout.sampling import BLOCK, sample, uniforms


@pytest.mark.parametrize("vocab", [3, BLOCK, BLOCK + 1, 1000, 4096])
def test_the_token_is_the_inverse_of_the_cumulated_distribution(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = 3 * torch.randn(500, vocab, generator=generator)
    u = torch.rand(500, generator=generator, dtype=torch.float64)
    tokens, logprobs = sample(logits, 0.7, u)
    exact = torch.softmax(logits.double() / 0.7, -1).cumsum(-1)
    below = torch.where(tokens > 0, exact.gather(1, (tokens - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    above = exact.gather(1, tokens[:, None])[:, 0]
    assert (below - 1e-6 <= u).all()
    assert (u <= above + 1e-6).all()
    wanted = torch.log_softmax(logits.double() / 0.7, -1).gather(1, tokens[:, None])[:, 0]
    assert torch.allclose(logprobs.double(), wanted, atol=1e-5)


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.full((4, 3 * BLOCK), float("-inf"))
    logits[:, BLOCK + 7] = 0.0
    extremes = torch.tensor([1e-300, 0.5, 1 - 1e-16, 1.0], dtype=torch.float64)
    assert sample(logits, 1.0, extremes)[0].tolist() == [BLOCK + 7] * 4


def test_greedy_takes_the_largest_logit_and_reports_temperature_one() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    token, logprob = sample(logits, 0.0, torch.tensor([0.99], dtype=torch.float64))
    assert token.tolist() == [1]
    assert logprob.item() == pytest.approx(torch.log_softmax(logits, -1)[0, 1].item())


def test_uniforms_are_named_by_prompt_response_and_draw() -> None:
    base = uniforms(1, [("a", 0, 0)], 8)
    assert torch.equal(base, uniforms(1, [("b", 0, 0), ("a", 0, 0)], 8)[1:])
    assert torch.equal(base[:, :3], uniforms(1, [("a", 0, 0)], 3))
    for other in ([("b", 0, 0)], [("a", 1, 0)], [("a", 0, 1)]):
        assert not torch.equal(base, uniforms(1, other, 8))
    assert not torch.equal(base, uniforms(2, [("a", 0, 0)], 8))
