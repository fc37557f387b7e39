"""Every objective that a config can name: the trainer's gradient against a loop over tokens, written from formulas."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_qerl.config.schema import AlgorithmSection
from megatron_qerl.models.adapter_state import adapters_off, collect
from megatron_qerl.trainer.batch import TrainingGroup
from megatron_qerl.trainer.step import StepStatistics
from tests.support.loaded import load
from tests.support.tiny_model import write_model
from tests.support.tiny_trainer import batch, gradient, make_trainer, run_config

GSPO = {"ratio_level": "sequence", "ratio_clip_low": 0.1, "ratio_clip_high": 0.15, "loss_aggregation": "sequence_mean"}
CISPO = {"surrogate": "clipped_weight", "ratio_clip_low": 0.1, "ratio_clip_high": 0.15}
DR = {"advantage": "mean", "loss_aggregation": "constant"}
BOUNDS = {"importance_weight_floor": 0.8, "importance_weight_cap": 1.25}
CASES: dict[str, dict[str, Any]] = {
    "dapo": {"name": "dapo"},
    "dapo clean, tokens masked": {
        "name": "dapo", "likelihood": "clean", "importance_correction": "token_mask", **BOUNDS
    },
    "dapo clean, responses truncated": {
        "name": "dapo", "likelihood": "clean", "importance_correction": "sequence_truncate", **BOUNDS
    },
    "grpo": {"name": "grpo", "loss_aggregation": "sequence_mean"},
    "grpo, forward divergence": {
        "name": "grpo", "loss_aggregation": "sequence_mean", "kl_coefficient": 0.7, "kl_estimator": "k3"
    },
    "grpo clean, reverse divergence": {"name": "grpo", "likelihood": "clean", "kl_coefficient": 0.7},
    "dr_grpo": {"name": "dr_grpo", **DR},
    "dr_grpo uncorrected, own constant": {
        "name": "dr_grpo", "likelihood": "uncorrected", **DR, "loss_constant_tokens": 7
    },
    "gspo": {"name": "gspo", **GSPO},
    "gspo clean, responses masked": {
        "name": "gspo", "likelihood": "clean", **GSPO, "importance_correction": "sequence_mask", **BOUNDS
    },
    "cispo": {"name": "cispo", **CISPO},
    "cispo clean": {"name": "cispo", "likelihood": "clean", **CISPO},
    "custom, entropy": {"name": "custom", "entropy_coefficient": 0.05},
    "custom clean, all at once": {
        "name": "custom", "likelihood": "clean", **CISPO, **DR, "kl_coefficient": 0.2, "entropy_coefficient": 0.05,
        "importance_correction": "sequence_mask", **BOUNDS,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), "qwen2", scale=0.1)


def settings(case: str) -> dict[str, Any]:
    return {f"algorithm__{key}": value for key, value in CASES[case].items()}


def ours(folder: Path, case: str, **changes: Any) -> tuple[Tensor, StepStatistics]:
    loaded, trainer = make_trainer(folder, **settings(case), **changes)
    noise = loaded.registry.state(5, 10)
    batches = trainer._microbatches(batch(loaded, trainer, noise, drift=0.3))
    forward_noise = noise if trainer.plan.replay_noise else None
    before = trainer._before_update(batches, forward_noise, several=False)
    stats = StepStatistics()
    with loaded.registry.applied(forward_noise):
        trainer._accumulate(batches, before, stats, compare=False)
    return gradient(loaded), stats


def clipped(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def response_loss(
    a: AlgorithmSection, new: Tensor, rollout: list[float], base: list[float], advantage: float
) -> Tensor:
    """Sum over one response's tokens of weight * (surrogate + regularizers)."""
    length = len(rollout)
    own = new.detach().tolist()
    old = rollout if a.likelihood == "replay" else own
    low, high = 1.0 - a.ratio_clip_low, 1.0 + a.ratio_clip_high
    mean_log_ratio = sum((new[t] - old[t] for t in range(length)), torch.zeros(())) / length
    total = torch.zeros(())
    for t in range(length):
        weight = 1.0
        if a.likelihood == "clean":
            by_response = a.importance_correction.startswith("sequence")
            weight = math.exp(sum(own) - sum(rollout) if by_response else own[t] - rollout[t])
            if a.importance_correction.endswith("truncate"):
                weight = min(weight, a.importance_weight_cap)
            elif not a.importance_weight_floor <= weight <= a.importance_weight_cap:
                weight = 0.0
        log_ratio = mean_log_ratio if a.ratio_level == "sequence" else new[t] - old[t]
        ratio = torch.exp(log_ratio)
        if a.surrogate == "clipped_weight":
            loss = -clipped(float(ratio.detach()), low, high) * advantage * new[t]
        else:
            loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        if a.kl_coefficient:
            up = new[t] - base[t]
            loss = loss + a.kl_coefficient * (up**2 / 2 if a.kl_estimator == "k2" else torch.exp(-up) - 1 + up)
        loss = loss + a.entropy_coefficient * new[t] ** 2 / 2
        total = total + weight * loss
    return total


def written(folder: Path, case: str) -> tuple[Tensor, float]:
    """Gradient and value of the objective from single forwards and autograd; the base is a model without adapters."""
    loaded, trainer = make_trainer(folder, **settings(case))
    config = run_config(folder, **settings(case))
    bare = load(folder, lora=config.lora, noise=config.noise)  # its adapters are as they begin: B = 0
    a, noise = config.algorithm, loaded.registry.state(5, 10)
    groups = batch(loaded, trainer, noise, drift=0.3)
    forward_noise = noise if a.likelihood == "replay" else None
    loaded.model.zero_grad()
    total = torch.zeros(())
    responses, tokens = 24, sum(len(r.token_ids) for g in groups for r in g.responses)
    with loaded.registry.applied(forward_noise), bare.registry.applied(forward_noise):
        for group in groups:
            for response in group.responses:
                single = trainer._microbatches([TrainingGroup(group.prompt_ids, (response,))])[0]
                new, _ = trainer._forward(loaded.model, single)
                with torch.no_grad():
                    base, _ = trainer._forward(bare.model, single)
                loss = response_loss(a, new, list(response.rollout_logprobs), base.tolist(), response.advantage)
                length = len(response.token_ids)
                total = (
                    total
                    + {
                        "token_mean": loss / tokens,
                        "sequence_mean": loss / length / responses,
                        "constant": loss / responses / (a.loss_constant_tokens or 10),
                    }[a.loss_aggregation]
                )
    total.backward()
    parameters = [p for p in loaded.model.parameters() if p.requires_grad]
    return torch.cat([(p.main_grad if p.grad is None else p.grad).flatten() for p in parameters]), float(total.detach())


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_that_of_the_formula(folder: Path, case: str) -> None:
    found, stats = ours(folder, case)
    wanted, value = written(folder, case)
    assert wanted.abs().max() > 0
    assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()
    assert stats.loss_sum / stats.normaliser == pytest.approx(value, rel=1e-4, abs=1e-6)
    if CASES[case].get("importance_correction", "").endswith("mask"):
        assert 0 < stats.weights.dropped_tokens < stats.tokens


@pytest.mark.parametrize("case", ["dr_grpo", "gspo clean, responses masked", "custom clean, all at once"])
@pytest.mark.parametrize("changes", [{"train__microbatch_tokens": 24}, {"train__share_prompt_prefix": False}])
def test_no_objective_depends_on_how_the_batch_is_cut(folder: Path, case: str, changes: dict[str, Any]) -> None:
    (whole, one), (cut, other) = ours(folder, case), ours(folder, case, **changes)
    assert (whole - cut).abs().max() <= 1e-5 * whole.abs().max()
    assert (one.normaliser, one.tokens, one.weights.responses) == (
        other.normaliser,
        other.tokens,
        other.weights.responses,
    )
    assert one.loss_sum == pytest.approx(other.loss_sum, rel=1e-5)


def test_every_objective_differs_from_every_other(folder: Path) -> None:
    gradients = {case: ours(folder, case)[0] for case in CASES}
    names = list(gradients)
    for i, name in enumerate(names):
        for other in names[:i]:
            apart = (gradients[name] - gradients[other]).norm()
            assert apart > 1e-3 * gradients[name].norm(), (name, other)


def test_the_base_is_the_model_without_its_adapter_and_the_adapter_comes_back(folder: Path) -> None:
    loaded, trainer = make_trainer(folder)
    bare = load(folder, lora=run_config(folder).lora)
    before = collect(loaded.model, loaded.shape)
    batches = trainer._microbatches(batch(loaded, trainer, loaded.registry.state(0, 10)))
    with adapters_off(loaded.model):
        off = trainer.logprobs(batches, None)[0][0]
    on = trainer.logprobs(batches, None)[0][0]
    with torch.no_grad():
        base, _ = trainer._forward(bare.model, batches[0])
    assert torch.equal(off, base)
    assert not torch.equal(off, on)
    after = collect(loaded.model, loaded.shape)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_divergence_is_from_the_base_in_every_minibatch_and_is_reported(folder: Path) -> None:
    """With no other signal the divergence alone moves the policy, back towards its base."""
    loaded, trainer = make_trainer(
        folder, algorithm__kl_coefficient=1.0, train__minibatches_per_step=2, optimizer__learning_rate=1e-3
    )
    noise = loaded.registry.state(5, 10)
    groups = [
        TrainingGroup(g.prompt_ids, tuple(replace(r, advantage=0.0) for r in g.responses))
        for g in batch(loaded, trainer, noise)
    ]
    found = [trainer.train_step(groups, noise) for _ in range(5)]
    assert all(len(stats.updates) == 2 for stats in found)
    k3 = [stats.base_k3_sum / stats.base_tokens for stats in found]
    assert k3 == sorted(k3, reverse=True)
    assert k3[-1] < 0.9 * k3[0]
