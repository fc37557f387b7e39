"""What each rank computes in ``test_objectives``: gradient and sums of one batch under one objective on one layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_qerl.trainer.step import StepStatistics
from tests.multiprocess.pipeline_context_cases import prepare
from tests.multiprocess.tensor_data_cases import gradients, groups_of
from tests.support.layouts import run_each, sizes_of


def measured(path: Path, changes: dict[str, Any], lengths: list[list[int]], rollout: Tensor | None) -> dict[str, Any]:
    """Of the first update; without ``rollout`` the policy scores the batch itself, and then a little off-policy."""
    loaded, trainer = prepare(path, changes)
    noise = loaded.registry.state(5, 10)
    if rollout is None:
        own = torch.cat([trainer.probe([g], noise) for g in groups_of(lengths)])
        rollout = own + 0.3 * torch.sin(torch.arange(own.numel()))
    batches = trainer._own_microbatches(groups_of(lengths, rollout))
    forward_noise = noise if trainer.plan.replay_noise else None
    before, stats = trainer._before_update(batches, forward_noise, several=False), StepStatistics()
    with loaded.registry.applied(forward_noise):
        trainer._accumulate(batches, before, stats, compare=False)
    whole = trainer._finite_everywhere(stats)
    sums = [whole.loss_sum, whole.normaliser, whole.tokens, whole.base_k3_sum, whole.base_tokens]
    sums += [whole.weights.weight_sum, whole.weights.dropped_tokens, whole.weights.responses]
    return {"rollout": rollout, "gradient": gradients(loaded, trainer), "sums": sums}


def run_cases(rank: int, world_size: int, arguments: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Body of a rank: name -> what ``measured`` returns."""
    return run_each(arguments, lambda options: sizes_of(options["changes"]), lambda options: measured(**options))
