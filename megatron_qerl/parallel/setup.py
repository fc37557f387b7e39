"""Process groups: torch.distributed and Megatron's parallel state, from the config's layout."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_qerl.config.schema import ParallelSection
from megatron_qerl.errors import ConfigError
from megatron_qerl.parallel import cpu
from megatron_qerl.parallel.layout import check_world
from megatron_qerl.parallel.ranks import Ranks, host_name


@dataclass(frozen=True)
class ParallelContext:
    """Where this process stands.

    Attributes:
        device: where this process computes.
        data_size: data-parallel ranks, between which a batch is shared out.
        ranks: all processes.
    """

    device: torch.device
    data_size: int
    ranks: Ranks


_standing: ParallelContext | None = None
_store: dist.Store | None = None
_starts = 0


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
    check_world(layout, world_size)
    cpu.enable()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(minutes=layout.timeout_minutes)
    if not dist.is_initialized():
        _start(device, world_size, timeout)
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
            distributed_timeout_minutes=layout.timeout_minutes,
        )
    model_parallel_cuda_manual_seed(seed)
    data_size = parallel_state.get_data_parallel_world_size()
    global _standing  # noqa: PLW0603
    _standing = ParallelContext(device=device, data_size=data_size, ranks=_ranks(layout, world_size, timeout))
    return _standing


def _start(device: torch.device, world_size: int, timeout: timedelta) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    if world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    global _store, _starts  # noqa: PLW0603
    if _store is None:
        # Kept for the life of the process: where all ranks meet can be opened once.
        _store, _, _ = next(iter(dist.rendezvous("env://", timeout=timeout)))
    _starts += 1
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"start {_starts}", _store),
        rank=int(os.environ["RANK"]),
        world_size=world_size,
        timeout=timeout,
    )


def _ranks(layout: ParallelSection, world_size: int, timeout: timedelta) -> Ranks:
    """Replicas as Megatron's groups make them."""
    from megatron.core import parallel_state

    if world_size == 1:
        return Ranks(host=host_name())
    per_copy = layout.tensor_model_parallel_size * layout.context_parallel_size
    expert_tensor = layout.expert_tensor_parallel_size or layout.tensor_model_parallel_size
    copies = max(1, layout.expert_model_parallel_size * expert_tensor // per_copy)
    data_rank = parallel_state.get_data_parallel_rank()
    leads_stage = (
        data_rank % copies == 0
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
    )
    return Ranks(
        rank=dist.get_rank(),
        size=world_size,
        replica=data_rank // copies,
        replicas=parallel_state.get_data_parallel_world_size() // copies,
        leads=leads_stage and parallel_state.get_pipeline_model_parallel_rank() == 0,
        leads_stage=leads_stage,
        host=host_name(),
        group=dist.new_group(backend="gloo", timeout=timeout),
        store=None if _store is None else dist.PrefixStore(f"notes {_starts}", _store),
    )


@contextmanager
def reported() -> Iterator[None]:
    """``Ranks.reported`` of the processes that ``initialize`` starts within the block."""
    try:
        yield
    except BaseException as error:
        if _standing is None:
            raise
        with _standing.ranks.reported():
            raise error


def pipeline_group() -> dist.ProcessGroup:
    """Ranks that hold the stages of one copy."""
    from megatron.core import parallel_state

    group: dist.ProcessGroup = parallel_state.get_pipeline_model_parallel_group()
    return group


def shutdown() -> None:
    """Destroy the groups, so that the process exits without a warning."""
    from megatron.core import parallel_state

    global _standing  # noqa: PLW0603
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    _standing = None
