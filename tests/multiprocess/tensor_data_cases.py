"""What each rank computes in ``test_tensor_data``: one policy on one layout, from loading to two updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_qerl.config.schema import RunConfig
from megatron_qerl.models.adapter_state import adapter_hash, collect, restore
from megatron_qerl.trainer import checkpoint
from megatron_qerl.trainer.batch import TrainingGroup, TrainingResponse
from megatron_qerl.trainer.optimizer import AdapterOptimizer
from megatron_qerl.trainer.step import BeforeUpdate, StepStatistics, Trainer
from tests.support.layouts import run_each
from tests.support.loaded import Loaded, load

NOISE = {"sigma_start": 0.05, "sigma_end": 0.01, "stages": 3}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2_sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "tp4": {"tensor_model_parallel_size": 4},
    "tp4_sp": {"tensor_model_parallel_size": 4, "sequence_parallel": True},
    "dp": {"use_distributed_optimizer": False},
    "dp_distributed": {"use_distributed_optimizer": True},
    "tp2_dp": {"tensor_model_parallel_size": 2, "use_distributed_optimizer": False},
    "tp2_sp_dp_distributed": {
        "tensor_model_parallel_size": 2, "sequence_parallel": True, "use_distributed_optimizer": True,
    },
}  # fmt: skip


def run_config(path: Path, layout: str, changes: dict[str, Any]) -> RunConfig:
    """A config whose Adam is smooth: with epsilon near the gradients an update is a continuous function of them."""
    data: dict[str, Any] = {
        "run": {"name": "t"},
        "model": {"path": path, "dtype": "float32", "max_sequence_length": 128},
        "lora": {"rank": 4, "alpha": 8.0},
        "parallel": dict(LAYOUTS[layout]),
        "noise": dict(NOISE),
        "data": {"train": {"kind": "arithmetic"}, "eval": {"kind": "arithmetic", "split": "heldout"}},
        "rollout": {"max_prompt_tokens": 10, "max_new_tokens": 12},
        "algorithm": {"name": "grpo", "likelihood": "replay"},
        "optimizer": {"learning_rate": 1e-2, "adam_epsilon": 1e-3, "gradient_clip": 0.05},
        "train": {"steps": 10, "microbatch_tokens": 64},
    }
    for key, value in changes.items():
        section, name = key.split("__")
        data.setdefault(section, {})[name] = value
    return RunConfig.model_validate(data)


def adapter_of(loaded: Loaded, seed: int = 7) -> dict[str, Tensor]:
    """Random canonical factors, the same on every layout: B is not zero, or A would get no gradient."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: 0.05 * torch.randn(tensor.shape, generator=generator) if name.endswith("lora_B") else tensor
        for name, tensor in sorted(collect(loaded.model, loaded.shape).items())
    }


def groups_of(lengths: list[list[int]], logprobs: Tensor | None = None) -> list[TrainingGroup]:
    """Groups with responses of ``lengths`` tokens; rollout log-probabilities in packing order, or zero."""
    generator = torch.Generator().manual_seed(0)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 73, (n,), generator=generator).tolist())

    groups, number, position = [], 0, 0
    for g, group in enumerate(lengths):
        responses = []
        for r, length in enumerate(group):
            old = (0.0,) * length if logprobs is None else tuple(logprobs[position : position + length].tolist())
            responses.append(TrainingResponse(ids(length), old, (1.5, -0.5, -0.7, -0.3)[(g + r) % 4], number))
            number, position = number + 1, position + length
        groups.append(TrainingGroup(ids(3 + g), tuple(responses)))
    return groups


def prepare(path: Path, layout: str, changes: dict[str, Any]) -> tuple[Loaded, Trainer]:
    """The policy on a layout, with the adapter of ``adapter_of``."""
    config = run_config(path, layout, changes)
    loaded = load(
        path, lora=config.lora, noise=config.noise, layout=config.parallel, dtype=config.model.dtype,
        recompute=config.train.recompute, attention=config.model.attention,
        shares_prompts=config.train.share_prompt_prefix,
    )  # fmt: skip
    restore(loaded.model, loaded.shape, adapter_of(loaded), "test")
    distributed = bool(config.parallel.use_distributed_optimizer)
    optimizer = AdapterOptimizer(loaded.model, config.optimizer, 10, distributed=distributed)
    return loaded, Trainer(loaded.model, loaded.registry, optimizer, config)


def gradients(loaded: Loaded, trainer: Trainer) -> dict[str, Tensor]:
    """Accumulated gradient of every adapter tensor, canonical."""
    return collect(loaded.model, loaded.shape, lambda p: trainer.optimizer.state.whole(p, "gradient"))


def two_updates(
    path: Path, layout: str, lengths: list[list[int]], logprobs: Tensor | None, changes: dict[str, Any]
) -> dict[str, Any]:
    """Everything a layout must agree on: log-probabilities, gradient, statistics, and the adapter after two updates."""
    loaded, trainer = prepare(path, layout, changes)
    noise = loaded.registry.state(5, 10)
    groups = groups_of(lengths, logprobs)
    found: dict[str, Any] = {"start": adapter_hash(collect(loaded.model, loaded.shape))}
    found["logprobs"] = torch.cat([trainer.probe([g], noise) for g in groups])
    if logprobs is None:  # the reference: the batch is scored by the policy itself, and then a little off-policy
        jitter = 0.1 * torch.sin(torch.arange(found["logprobs"].numel()))
        groups = groups_of(lengths, found["logprobs"] + jitter)
        found["rollout"] = found["logprobs"] + jitter
    stats = StepStatistics()
    batches = trainer._own_microbatches(groups)
    found["microbatches"] = len(batches)
    found["tokens"] = sum(b.tokens.total_tokens for b in batches)
    with loaded.registry.applied(noise):
        trainer._accumulate(batches, [BeforeUpdate()] * len(batches), stats, compare=False)
    found["gradient"] = gradients(loaded, trainer)
    found["loss"], found["normaliser"] = stats.loss_sum, stats.normaliser
    updates = [u for _ in range(2) for u in trainer.train_step(groups, noise).updates]
    found["norms"] = [(u.gradient_norm, u.update_norm) for u in updates]
    found["adapter"] = collect(loaded.model, loaded.shape)
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        found[kind] = collect(loaded.model, loaded.shape, lambda p, k=kind: trainer.optimizer.state.whole(p, k))
    found["state_bytes"] = trainer.optimizer.state_bytes
    return found


def position(updates: int, adapter: str) -> checkpoint.RunPosition:
    """Where a run stands that saved after ``updates`` steps of one update."""
    return checkpoint.RunPosition(
        step=updates, updates=updates, data_position=0, stream=0, metrics_lines=0, wall_s={}, tokens={}, config_hash="",
        data_hash="", base_hash="", adapter_hash=adapter, extra={},
    )  # fmt: skip


def save(loaded: Loaded, trainer: Trainer, root: Path) -> Path:
    """Checkpoint after the updates made so far; all ranks take part."""
    at = position(trainer.optimizer.updates, adapter_hash(collect(loaded.model, loaded.shape)))
    return checkpoint.save(root, at, loaded.model, loaded.shape, trainer.optimizer, 3)


def resumed(
    path: Path,
    layout: str,
    lengths: list[list[int]],
    logprobs: Tensor,
    changes: dict[str, Any],
    saved: Path,
    root: Path,
) -> dict[str, Tensor]:
    """Load ``saved``, save it again under ``root``, and make one more update; returns the adapter."""
    loaded, trainer = prepare(path, layout, changes)
    checkpoint.load(saved, checkpoint.read_position(saved), loaded.model, loaded.shape, trainer.optimizer)
    save(loaded, trainer, root)
    trainer.train_step(groups_of(lengths, logprobs), loaded.registry.state(5, 10))
    return collect(loaded.model, loaded.shape)


def bytes_read(path: Path, layout: str, changes: dict[str, Any]) -> int:
    """Bytes of tensors that this rank reads to load the base."""
    return prepare(path, layout, changes)[0].folder.bytes_read


def run_cases(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Body of a rank: name -> what the case named ``function`` returns."""
    return run_each(arguments, lambda case: case[1]["layout"], lambda case: globals()[case[0]](**case[1]))


def difference_quotients(
    path: Path, layout: str, lengths: list[list[int]], entries: int, step: float
) -> list[tuple[str, float, float]]:
    """(entry, gradient, five-point difference quotient) of random entries of the adapter.

    The objective is the mean of -advantage * log-probability, whose gradient is the clipped objective's where the ratio
    is one.
    """
    loaded, trainer = prepare(path, layout, {"optimizer__gradient_clip": 1e9})
    noise = loaded.registry.state(5, 10)
    plain = groups_of(lengths)
    groups = groups_of(lengths, torch.cat([trainer.probe([g], noise) for g in plain]))
    batches = trainer._own_microbatches(groups)
    advantages = torch.cat([b.advantages for b in batches]).double()
    start = collect(loaded.model, loaded.shape)

    def loss(name: str, index: int, shift: float) -> float:
        moved = {n: t.clone() for n, t in start.items()}
        moved[name].view(-1)[index] += shift
        restore(loaded.model, loaded.shape, moved, "test")
        logprobs = torch.cat([lp for lp, _ in trainer.logprobs(batches, noise)]).double()
        return float(-(advantages * logprobs).sum() / advantages.numel())

    with loaded.registry.applied(noise):
        trainer._accumulate(batches, [BeforeUpdate()] * len(batches), StepStatistics(), compare=False)
    gradient = gradients(loaded, trainer)
    generator = torch.Generator().manual_seed(3)
    names, result = sorted(start), []
    for i in range(entries):
        name = names[int(torch.randint(len(names), (1,), generator=generator))] if i >= len(names) else names[i]
        index = int(torch.randint(start[name].numel(), (1,), generator=generator))
        near = loss(name, index, step) - loss(name, index, -step)
        far = loss(name, index, 2 * step) - loss(name, index, -2 * step)
        result.append((f"{name}[{index}]", float(gradient[name].view(-1)[index]), (8 * near - far) / (12 * step)))
    return result
