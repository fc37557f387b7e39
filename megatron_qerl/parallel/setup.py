"""Process groups: torch.distributed and Megatron's parallel state, from the config's layout."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_qerl.config.schema import ParallelSection
from megatron_qerl.errors import ConfigError
from megatron_qerl.parallel import cpu


@dataclass(frozen=True)
class ParallelContext:
    """Where this process stands."""

    rank: int
    world_size: int
    device: torch.device
    tensor_rank: int
    tensor_size: int


def resolve_device(setting: str) -> torch.device:
    """``model.device`` -> a device. ``auto`` takes the GPU if there is one.

    Raises:
        ConfigError: ``cuda`` was asked for and is not there, or ``cpu`` although a GPU is visible.
    """
    has_cuda = torch.cuda.is_available()
    if setting == "cuda" and not has_cuda:
        raise ConfigError("model.device", "cuda", "no CUDA device is visible", "set model.device: cpu or auto")
    if setting == "cpu" and has_cuda:
        raise ConfigError(
            "model.device",
            "cpu",
            "Megatron-core places tensors on a visible GPU",
            "hide it with CUDA_VISIBLE_DEVICES='' or set model.device: auto",
        )
    if has_cuda:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def _check_world(layout: ParallelSection, world_size: int) -> None:
    product = layout.tensor_model_parallel_size * layout.pipeline_model_parallel_size * layout.context_parallel_size
    if world_size % product:
        raise ConfigError(
            "parallel",
            f"tensor {layout.tensor_model_parallel_size} x pipeline {layout.pipeline_model_parallel_size} x context "
            f"{layout.context_parallel_size} = {product}",
            f"must divide the number of processes, {world_size}",
            f"start a multiple of {product} processes or shrink the layout",
        )


def initialize(layout: ParallelSection, device_setting: str, seed: int) -> ParallelContext:
    """Start torch.distributed (from torchrun's variables, or alone) and Megatron's groups.

    Args:
        layout: parallel sizes.
        device_setting: ``model.device``.
        seed: for Megatron's RNG tracker; dropout is off, so no result depends on it.

    Raises:
        ConfigError: the layout does not fit the number of processes, or the device is not there.
    """
    device = resolve_device(device_setting)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    _check_world(layout, world_size)
    cpu.enable()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        if world_size == 1:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        else:
            dist.init_process_group(backend)
    if parallel_state.is_initialized():
        standing = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
        )
        assert standing == (layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size), (
            "an earlier use left groups of another layout; call shutdown first"
        )
    else:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor_model_parallel_size,
            pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
            context_parallel_size=layout.context_parallel_size,
            expert_model_parallel_size=layout.expert_model_parallel_size,
            expert_tensor_parallel_size=layout.expert_tensor_parallel_size,
        )
    model_parallel_cuda_manual_seed(seed)
    return ParallelContext(
        rank=dist.get_rank(),
        world_size=world_size,
        device=device,
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
    )


def shutdown() -> None:
    """Destroy the groups, so that the process exits without a warning."""
    from megatron.core import parallel_state

    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
