"""The trainer's update: what it minimises, and that it does not depend on how the batch was cut."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_qerl.config.schema import NoiseSection
from megatron_qerl.errors import ConfigError, NoiseProofError, NonFiniteError
from megatron_qerl.models.adapter_state import collect
from megatron_qerl.noise.proof import check_engine
from megatron_qerl.trainer import checkpoint
from megatron_qerl.trainer.batch import TrainingGroup, TrainingResponse, plan_microbatches, share_out
from megatron_qerl.trainer.step import BeforeUpdate, StepStatistics
from tests.support.tiny_model import write_model
from tests.support.tiny_trainer import batch, gradient, make_trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), "qwen2", scale=0.1)


def accumulated(folder: Path, **changes: Any) -> torch.Tensor:
    """Gradient of one batch before the update."""
    loaded, trainer = make_trainer(folder, **changes)
    noise = loaded.registry.state(5, 10)
    groups = batch(loaded, trainer, noise, drift=0.3)
    batches = trainer._microbatches(groups)
    with loaded.registry.applied(noise if trainer.plan.replay_noise else None):
        trainer._accumulate(batches, [BeforeUpdate()] * len(batches), StepStatistics(), compare=False)
    return gradient(loaded)


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("changes", [{"train__microbatch_tokens": 24}, {"train__share_prompt_prefix": False}])
def test_the_gradient_does_not_depend_on_how_the_batch_is_cut(folder: Path, mode: str, changes: dict[str, Any]) -> None:
    whole = accumulated(folder, algorithm__loss_aggregation=mode)
    cut = accumulated(folder, algorithm__loss_aggregation=mode, **changes)
    assert whole.abs().max() > 0
    assert (whole - cut).abs().max() <= 1e-5 * whole.abs().max()


@pytest.mark.parametrize("likelihood", ["replay", "clean", "uncorrected"])
@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean"])
def test_the_gradient_is_that_of_the_written_objective(folder: Path, likelihood: str, mode: str) -> None:
    """Against the objective spelled out sequence by sequence, with plain autograd."""
    ours = accumulated(folder, algorithm__likelihood=likelihood, algorithm__loss_aggregation=mode)
    loaded, trainer = make_trainer(folder, algorithm__likelihood=likelihood, algorithm__loss_aggregation=mode)
    noise = loaded.registry.state(5, 10)
    groups = batch(loaded, trainer, noise, drift=0.3)
    loaded.model.zero_grad()
    total = torch.zeros(())
    tokens = sum(len(r.token_ids) for g in groups for r in g.responses)
    with loaded.registry.applied(noise if likelihood == "replay" else None):
        for group in groups:
            for response in group.responses:
                single = trainer._microbatches([TrainingGroup(group.prompt_ids, (response,))])[0]
                logprobs, _ = trainer._forward(loaded.model, single)
                rollout = torch.tensor(response.rollout_logprobs)
                old = rollout if likelihood == "replay" else logprobs.detach()
                ratio = torch.exp(logprobs - old)
                weight = torch.exp(logprobs.detach() - rollout).clamp(max=2.0) if likelihood == "clean" else 1.0
                a = response.advantage
                loss = -(weight * torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a)).sum()
                total = total + (loss / tokens if mode == "token_mean" else loss / len(logprobs) / 24)
    total.backward()
    reference = torch.cat(
        [(p.main_grad if p.grad is None else p.grad).flatten() for p in loaded.model.parameters() if p.requires_grad]
    )
    assert reference.abs().max() > 0
    assert (ours - reference).abs().max() <= 1e-4 * reference.abs().max()


def test_the_three_likelihoods_give_different_gradients_under_noise(folder: Path) -> None:
    gradients = [accumulated(folder, algorithm__likelihood=m) for m in ("replay", "clean", "uncorrected")]
    for i in range(3):
        for j in range(i):
            assert (gradients[i] - gradients[j]).norm() > 0.01 * gradients[i].norm()


def test_replay_is_on_policy_and_compares_with_the_engine(folder: Path) -> None:
    loaded, trainer = make_trainer(folder)
    noise = loaded.registry.state(5, 10)
    stats = trainer.train_step(batch(loaded, trainer, noise), noise)
    assert stats.parity_tokens == stats.tokens > 100
    assert stats.parity_max <= 1e-5
    assert stats.ratio.as_metrics()["ratio/mean"] == pytest.approx(1.0, abs=1e-5)
    assert len(stats.updates) == 1
    assert stats.updates[0].update_norm > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sigma", [0.05, 5e-4])
def test_the_engine_proof_tells_recorded_noise_from_none(folder: Path, dtype: str, sigma: float) -> None:
    """At every sigma in float32; in bfloat16 where the effect is well above rounding."""
    loaded, trainer = make_trainer(
        folder, model__dtype=dtype, noise__sigma_start=sigma, noise__sigma_end=sigma, lora__rank=4
    )
    noise = loaded.registry.state(5, 10)
    rounding = 0.01 if dtype == "bfloat16" else 0.0
    generator = torch.Generator().manual_seed(1)

    def as_engine(scored: list[TrainingGroup]) -> list[TrainingGroup]:
        def jittered(r: TrainingResponse) -> TrainingResponse:
            noise_T = rounding * torch.randn(len(r.token_ids), generator=generator)
            return replace(r, rollout_logprobs=tuple((torch.tensor(r.rollout_logprobs) + noise_T).tolist()))

        return [TrainingGroup(g.prompt_ids, tuple(map(jittered, g.responses))) for g in scored]

    right = trainer.measure_engine(as_engine(batch(loaded, trainer, noise)), noise)
    wrong = trainer.measure_engine(as_engine(batch(loaded, trainer, loaded.registry.state(0, 10))), noise)
    typical = {"float32": 3e-6, "bfloat16": 0.01}[dtype]
    check_engine(right, noise, typical)
    if wrong.effect_mean_abs >= 10 * typical:
        with pytest.raises(NoiseProofError, match="of its effect"):
            check_engine(wrong, noise, typical)
    else:
        # Within rounding nothing can be told, and nothing is claimed.
        assert dtype == "bfloat16"
        check_engine(wrong, noise, typical)
    assert dtype == "bfloat16" or right.slope == pytest.approx(1.0, abs=1e-3)


def test_clean_mode_reports_weights_and_effective_sample_size(folder: Path) -> None:
    loaded, trainer = make_trainer(folder, algorithm__likelihood="clean")
    noise = loaded.registry.state(5, 10)
    stats = trainer.train_step(batch(loaded, trainer, noise), noise)
    values = stats.weights.as_metrics()
    assert 0.0 < values["correction/effective_sample_fraction"] < 1.0
    assert values["correction/weight_max"] > 1.0
    assert stats.parity_tokens == 0


@pytest.mark.parametrize("likelihood", ["replay", "clean"])
def test_minibatches_make_one_update_each_and_later_ones_are_off_policy(folder: Path, likelihood: str) -> None:
    loaded, trainer = make_trainer(
        folder, train__minibatches_per_step=3, algorithm__likelihood=likelihood, optimizer__learning_rate=0.05
    )
    noise = loaded.registry.state(5, 10)
    stats = trainer.train_step(batch(loaded, trainer, noise), noise)
    assert len(stats.updates) == 3
    assert trainer.optimizer.updates == 3
    assert stats.ratio.as_metrics()["ratio/std"] > 1e-3


def test_a_non_finite_loss_stops_before_the_update(folder: Path) -> None:
    loaded, trainer = make_trainer(folder)
    noise = loaded.registry.state(0, 10)
    groups = batch(loaded, trainer, noise)
    first = groups[0].responses[0]
    poisoned = TrainingResponse(first.token_ids, (-1e30,) * len(first.token_ids), -1.0, first.sequence)
    groups[0] = TrainingGroup(groups[0].prompt_ids, (poisoned, *groups[0].responses[1:]))
    before = collect(loaded.model, loaded.shape)
    with pytest.raises(NonFiniteError, match=r"responses \[0\]"):
        trainer.train_step(groups, noise)
    after = collect(loaded.model, loaded.shape)
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert trainer.optimizer.updates == 0


def test_a_non_finite_gradient_stops_before_the_update(folder: Path) -> None:
    loaded, trainer = make_trainer(folder)
    noise = loaded.registry.state(0, 10)
    groups = batch(loaded, trainer, noise)
    name, parameter = trainer.optimizer.parameters()[3]
    hook = parameter.register_hook(lambda g: g * float("nan"))
    before = collect(loaded.model, loaded.shape)
    with pytest.raises(NonFiniteError, match=name.replace(".", r"\.")):
        trainer.train_step(groups, noise)
    hook.remove()
    assert all(torch.equal(before[n], t) for n, t in collect(loaded.model, loaded.shape).items())


def test_saving_before_the_first_update_does_not_break_it(folder: Path, tmp_path: Path) -> None:
    loaded, trainer = make_trainer(folder)
    position = checkpoint.RunPosition(0, 0, 0, 0, 0, {}, {}, "", "", "", "", {})
    noise = loaded.registry.state(0, 10)
    groups = batch(loaded, trainer, noise)
    checkpoint.save(tmp_path, position, loaded.model, loaded.shape, trainer.optimizer, 1)
    assert len(trainer.train_step(groups, noise).updates) == 1
    saved = load_file(tmp_path / "checkpoints/step_000000/exp_avg.safetensors")
    assert all(not t.any() for t in saved.values())


def test_bfloat16_updates_fp32_masters(folder: Path) -> None:
    loaded, trainer = make_trainer(folder, model__dtype="bfloat16", optimizer__learning_rate=1e-5)
    noise = loaded.registry.state(0, 10)
    groups = batch(loaded, trainer, noise)
    masters = [trainer.optimizer.master(p).clone() for _, p in trainer.optimizer.parameters()]
    for _ in range(3):
        trainer.train_step(groups, noise)
    moved = [
        bool((trainer.optimizer.master(p) != m).any())
        for (_, p), m in zip(trainer.optimizer.parameters(), masters, strict=True)
    ]
    assert all(m.dtype == torch.float32 for m in masters)
    assert all(moved)


def test_warmup_and_cosine_follow_their_formulas(folder: Path) -> None:
    loaded, trainer = make_trainer(
        folder,
        optimizer__schedule="cosine",
        optimizer__warmup_steps=4,
        optimizer__learning_rate=1e-3,
        optimizer__min_learning_rate=1e-4,
    )
    noise = loaded.registry.state(0, 10)
    groups = batch(loaded, trainer, noise)
    rates = [trainer.train_step(groups, noise).updates[0].learning_rate for _ in range(10)]
    assert rates[:4] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3])
    for update in range(5, 11):
        expected = 1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi * (update - 4) / 6))
        assert rates[update - 1] == pytest.approx(expected)


def test_microbatch_plan_keeps_every_response_once_within_the_budget() -> None:
    groups = [
        TrainingGroup((1,) * (5 + g), tuple(TrainingResponse((2,) * 9, (0.0,) * 9, 1.0, 8 * g + r) for r in range(8)))
        for g in range(5)
    ]
    bins = plan_microbatches(groups, 60, share_prefix=True)
    assert all(sum(p.packed_tokens(True) for p in b) <= 60 for b in bins)
    assert sorted(r.sequence for b in bins for p in b for r in p.responses) == list(range(40))
    with pytest.raises(ConfigError, match=r"train.microbatch_tokens"):
        plan_microbatches(groups, 12, share_prefix=True)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 50])
@pytest.mark.parametrize("budget", [20, 60, 1000])
def test_shares_hold_every_response_once_and_as_many_microbatches_each(ranks: int, budget: int) -> None:
    groups = [
        TrainingGroup(
            (1,) * (5 + g), tuple(TrainingResponse((2,) * (1 + (3 * g + r) % 9), (), 1.0, 8 * g + r) for r in range(8))
        )
        for g in range(5)
    ]
    shares = share_out(groups, budget, ranks, share_prefix=True)
    assert len(shares) == ranks
    assert len({len(share) for share in shares}) == 1
    microbatches = [m for share in shares for m in share]
    assert all(sum(p.packed_tokens(True) for p in m) <= budget for m in microbatches)
    assert sorted(r.sequence for m in microbatches for p in m for r in p.responses) == list(range(40))
    loads = [sum(p.packed_tokens(True) for m in share for p in m) for share in shares]
    single = max(TrainingGroup(g.prompt_ids, (r,)).packed_tokens(True) for g in groups for r in g.responses)
    assert max(loads) <= max(1.2 * sum(loads) / ranks, single)


def test_a_microbatch_without_responses_changes_nothing(folder: Path) -> None:
    gradients, losses = [], []
    for extra in (0, 2):
        loaded, trainer = make_trainer(folder, algorithm__likelihood="clean")
        noise = loaded.registry.state(5, 10)
        batches = trainer._microbatches(batch(loaded, trainer, noise, drift=0.3))
        batches = [*trainer._build([()] * extra), *batches]
        stats = StepStatistics()
        trainer._accumulate(batches, [BeforeUpdate()] * len(batches), stats, compare=True)
        gradients.append(gradient(loaded))
        losses.append(stats)
    assert torch.equal(*gradients)
    assert losses[0] == losses[1]


def test_noise_section_default_is_paper_table_4() -> None:
    section = NoiseSection()
    assert (section.sigma_start, section.sigma_end, section.stages) == (1e-2, 5e-4, 10)
