"""The adapter as canonical tensors: full, in Hugging Face names, whatever the parallel layout.

Checkpoints, PEFT export, hashes and engine sync all speak this form: ``{module path}.lora_A`` [r, K] and
``{module path}.lora_B`` [N, r].
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_qerl.errors import CheckpointError
from megatron_qerl.layers.lora import LoraAdapter
from megatron_qerl.models.policy import PolicyModel
from megatron_qerl.models.shape import ModelShape
from megatron_qerl.models.walk import adapters

ParameterView = Callable[[torch.nn.Parameter], Tensor]


def _sharded_dim(adapter: LoraAdapter, factor: str) -> int | None:
    """Dimension along which tensor parallelism splits a factor, or None if every rank holds all of it."""
    if adapter.mode == "column":
        return 0 if factor == "lora_B" else None
    return 1 if factor == "lora_A" else None


def _views(adapter: LoraAdapter, projection: str, view: ParameterView) -> dict[str, Tensor]:
    index = adapter.names.index(projection)
    rank = adapter.spec.rank
    a = view(adapter.lora_A)[index * rank : (index + 1) * rank]
    b = view(adapter.lora_B).split(list(adapter.rows.values()))[index]
    return {"lora_A": a, "lora_B": b}


def _gather(local: Tensor, dim: int | None) -> Tensor:
    world = parallel_state.get_tensor_model_parallel_world_size()
    if dim is None or world == 1:
        return local
    parts = [torch.empty_like(local.contiguous()) for _ in range(world)]
    dist.all_gather(parts, local.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return torch.cat(parts, dim=dim)


def collect(model: PolicyModel, shape: ModelShape, view: ParameterView = lambda p: p.data) -> dict[str, Tensor]:
    """Canonical CPU tensors of the adapter.

    Args:
        view: what to collect of each parameter; the default is its value, an optimizer passes its moments.
    """
    tensors: dict[str, Tensor] = {}
    for path, projection, adapter in adapters(model, shape):
        for factor, local in _views(adapter, projection, view).items():
            full = _gather(local.detach(), _sharded_dim(adapter, factor))
            tensors[f"{path}.{factor}"] = full.cpu().clone().contiguous()
    return tensors


def restore(
    model: PolicyModel,
    shape: ModelShape,
    tensors: Mapping[str, Tensor],
    source: object,
    view: ParameterView = lambda p: p.data,
) -> None:
    """Write canonical tensors back, each rank its own slice. Inverse of ``collect``.

    Raises:
        CheckpointError: a tensor is missing, superfluous, or has another shape; ``source`` names where they come from.
    """
    rank, world = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    remaining = set(tensors)
    for path, projection, adapter in adapters(model, shape):
        for factor, local in _views(adapter, projection, view).items():
            name = f"{path}.{factor}"
            if name not in tensors:
                raise CheckpointError(
                    str(source), name, "the adapter tensor is missing", "use the run's own checkpoint"
                )
            remaining.discard(name)
            dim, value = _sharded_dim(adapter, factor), tensors[name]
            if dim is not None and world > 1:
                value = value.chunk(world, dim=dim)[rank]
            if value.shape != local.shape:
                raise CheckpointError(
                    f"{name} in {source}",
                    tuple(value.shape),
                    f"this run's adapter has shape {tuple(local.shape)}",
                    "resume with the lora section the checkpoint was made with",
                )
            local.copy_(value)
    if remaining:
        raise CheckpointError(
            str(source),
            sorted(remaining)[0],
            "the checkpoint holds an adapter tensor that this run has no place for",
            "resume with the lora section the checkpoint was made with",
        )


def adapter_hash(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over name, dtype, shape and bytes of the tensors in name order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
