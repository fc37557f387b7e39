"""A trainer of a tiny policy, and a batch for it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from megatron_qerl.config.schema import RunConfig
from megatron_qerl.trainer.batch import TrainingGroup, TrainingResponse
from megatron_qerl.trainer.optimizer import AdapterOptimizer
from megatron_qerl.trainer.step import Trainer
from megatron_qerl.types import NoiseState
from tests.support.loaded import Loaded, load, randomize_adapters


def run_config(folder: Path, **changes: Any) -> RunConfig:
    """A config for ``folder``; ``section__key`` sets a key."""
    data: dict[str, Any] = {
        "run": {"name": "t"},
        "model": {"path": folder, "dtype": "float32", "max_sequence_length": 128},
        "lora": {"rank": 4, "alpha": 8.0},
        "noise": {"sigma_start": 0.05, "sigma_end": 0.01, "stages": 3},
        "data": {"train": {"kind": "arithmetic"}, "eval": {"kind": "arithmetic", "split": "heldout"}},
        "rollout": {"max_prompt_tokens": 10, "max_new_tokens": 10},
        "algorithm": {"name": "grpo", "likelihood": "replay"},
        "optimizer": {"learning_rate": 1e-3},
        "train": {"steps": 10},
    }
    for key, value in changes.items():
        section, name = key.split("__")
        data.setdefault(section, {})[name] = value
    return RunConfig.model_validate(data)


def make_trainer(folder: Path, **changes: Any) -> tuple[Loaded, Trainer]:
    """The model with adapters that do something, and its trainer."""
    config = run_config(folder, **changes)
    loaded = load(folder, dtype=config.model.dtype, lora=config.lora, noise=config.noise)
    randomize_adapters(loaded.model)
    optimizer = AdapterOptimizer(loaded.model, config.optimizer, config.train.steps)
    return loaded, Trainer(loaded.model, loaded.registry, optimizer, config)


def batch(loaded: Loaded, trainer: Trainer, noise: NoiseState, drift: float = 0.0) -> list[TrainingGroup]:
    """Six groups of four responses whose rollout log-probabilities are those of the noisy policy plus ``drift``."""
    generator = torch.Generator().manual_seed(0)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 73, (n,), generator=generator).tolist())

    groups, number = [], 0
    for g in range(6):
        responses = []
        for r in range(4):
            length = 1 + (5 * g + 3 * r) % 9
            advantage = (1.5, -0.5, -0.7, -0.3)[(g + r) % 4]
            responses.append(TrainingResponse(ids(length), (0.0,) * length, advantage, number))
            number += 1
        groups.append(TrainingGroup(ids(3 + g), tuple(responses)))
    scored = []
    for group in groups:
        logprobs = trainer.probe([group], noise)
        pieces = logprobs.split([len(r.token_ids) for r in group.responses])
        jitter = [drift * math.sin(7 * i) for i in range(len(pieces))]
        scored.append(
            TrainingGroup(
                group.prompt_ids,
                tuple(
                    TrainingResponse(r.token_ids, tuple((p + j).tolist()), r.advantage, r.sequence)
                    for r, p, j in zip(group.responses, pieces, jitter, strict=True)
                ),
            )
        )
    return scored


def gradient(loaded: Loaded) -> torch.Tensor:
    """Accumulated gradient of all adapters."""
    return torch.cat([p.main_grad.flatten() for p in loaded.model.parameters() if p.requires_grad])
