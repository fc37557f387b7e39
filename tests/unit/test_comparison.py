"""The three likelihood modes side by side on one recorded batch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megatron_qerl.algorithms.comparison import RecordedBatch, compare_modes, gradient_coefficients
from megatron_qerl.config.schema import AlgorithmSection

ALGORITHM = AlgorithmSection(name="custom", likelihood="clean", importance_weight_cap=1.5)


def recorded(change: float = 0.3) -> RecordedBatch:
    """Four responses of three tokens. The engine and the noisy trainer agree; the clean policy is ``change`` away."""
    generator = torch.Generator().manual_seed(2)
    noisy = -torch.rand(12, generator=generator, dtype=torch.float64) * 2 - 0.1
    return RecordedBatch(
        rollout_logprobs=noisy.clone(),
        noisy_logprobs=noisy,
        clean_logprobs=noisy + change * torch.randn(12, generator=generator, dtype=torch.float64),
        advantages=torch.tensor([math.sqrt(3), *[-1 / math.sqrt(3)] * 3], dtype=torch.float64).repeat_interleave(3),
        mask=torch.tensor([True] * 11 + [False]),
        sequence=torch.arange(4).repeat_interleave(3),
    )


def test_the_coefficients_are_those_of_the_table() -> None:
    batch = recorded()
    masked_advantage = torch.where(batch.mask, batch.advantages, 0.0)
    weights = (batch.clean_logprobs - batch.rollout_logprobs).exp().clamp(max=1.5)
    found = compare_modes(batch, ALGORITHM).coefficients
    assert torch.allclose(found["replay"], -masked_advantage, rtol=1e-14)
    assert torch.allclose(found["uncorrected"], -masked_advantage, rtol=1e-14)
    assert torch.allclose(found["clean"], -masked_advantage * weights, rtol=1e-12)


def test_norms_cosines_and_effective_samples() -> None:
    batch = recorded()
    result = compare_modes(batch, ALGORITHM)
    clean, plain = result.coefficients["clean"], result.coefficients["uncorrected"]
    assert result.norms["clean"] == pytest.approx(math.sqrt(float((clean**2).sum())))
    cosine = float(clean @ plain) / result.norms["clean"] / result.norms["uncorrected"]
    assert result.cosines["clean", "uncorrected"] == pytest.approx(cosine)
    assert 0.8 < cosine < 0.9999
    assert set(result.cosines) == {("replay", "clean"), ("replay", "uncorrected"), ("clean", "uncorrected")}
    weights = (batch.clean_logprobs - batch.rollout_logprobs).exp().clamp(max=1.5)[:11]
    assert result.effective_tokens["clean"] == pytest.approx(float(weights.sum() ** 2 / (weights**2).sum()))
    assert result.effective_tokens["uncorrected"] == result.tokens == 11


def test_without_noise_the_three_are_one() -> None:
    result = compare_modes(recorded(change=0.0), ALGORITHM)
    assert list(result.cosines.values()) == pytest.approx([1.0] * 3, abs=1e-12)
    assert len({round(n, 12) for n in result.norms.values()}) == 1


def test_more_noise_turns_the_clean_update_further_away() -> None:
    cosines = [
        compare_modes(recorded(change), ALGORITHM).cosines["clean", "uncorrected"] for change in (0.05, 0.2, 0.8)
    ]
    assert cosines == sorted(cosines, reverse=True)
    assert cosines[0] > cosines[2] + 0.01


def test_an_engine_that_is_off_shows_in_replay_alone() -> None:
    batch = recorded()
    off = replace(batch, rollout_logprobs=batch.noisy_logprobs - 0.1)
    replayed = gradient_coefficients(off, ALGORITHM, "replay")
    plain = gradient_coefficients(off, ALGORITHM, "uncorrected")
    assert torch.allclose(replayed, plain * math.exp(0.1))


def test_a_batch_without_signal_has_no_direction() -> None:
    batch = replace(recorded(), advantages=torch.zeros(12, dtype=torch.float64))
    result = compare_modes(batch, ALGORITHM)
    assert set(result.norms.values()) == {0.0}
    assert set(result.cosines.values()) == {0.0}
