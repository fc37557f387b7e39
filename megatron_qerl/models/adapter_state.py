"""The adapter as canonical tensors: full, in Hugging Face names, whatever the parallel layout.

Checkpoints, PEFT export, hashes and engine sync all speak this form: ``{module path}.lora_A`` [r, K] and
``{module path}.lora_B`` [N, r].
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_qerl.errors import CheckpointError
from megatron_qerl.models.policy import PolicyChunks
from megatron_qerl.models.shape import ModelShape
from megatron_qerl.models.walk import factors

Reader = Callable[[torch.nn.Parameter], Tensor]
Writer = Callable[[torch.nn.Parameter, Tensor], None]


def _gather(local: Tensor, dim: int | None, group: dist.ProcessGroup) -> Tensor:
    if dim is None or group.size() == 1:
        return local
    local = local.contiguous()
    parts = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(parts, local, group=group)
    return torch.cat(parts, dim=dim)


def _read_value(parameter: torch.nn.Parameter) -> Tensor:
    return parameter.data


def _write_value(parameter: torch.nn.Parameter, value: Tensor) -> None:
    parameter.data.copy_(value)


def collect(model: PolicyChunks, shape: ModelShape, read: Reader = _read_value) -> dict[str, Tensor]:
    """Canonical CPU tensors of the adapter, on every rank alike. A collective of all ranks.

    Args:
        read: what to collect of each parameter, in its shape on this rank; the default is its value, an optimizer
            passes its moments. Called once a parameter, in the same order on all ranks that share it.
    """
    values: dict[int, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for factor in factors(model, shape):
        if id(factor.parameter) not in values:
            values[id(factor.parameter)] = read(factor.parameter).detach()
        full = _gather(values[id(factor.parameter)][factor.index], factor.sharded_dim, factor.group)
        tensors[factor.name] = full.cpu().clone().contiguous()
    for group in _other_holders():
        tensors = _union(tensors, group)
    return tensors


def _other_holders() -> list[dist.ProcessGroup]:
    """Groups whose ranks hold other layers or other experts."""
    groups = [
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_expert_model_parallel_group(check_initialized=False),
    ]
    return [g for g in groups if g is not None and g.size() > 1]


def _union(tensors: dict[str, Tensor], group: dist.ProcessGroup) -> dict[str, Tensor]:
    """What any rank of ``group`` holds, on all of them; where several hold a tensor, the first one's."""
    held: list[Any] = [None] * group.size()
    dist.all_gather_object(held, {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()}, group=group)
    if all(h.keys() == held[0].keys() for h in held):
        return tensors
    device = torch.device(torch.cuda.current_device())
    whole: dict[str, Tensor] = {}
    for name in sorted(set().union(*held)):
        owner = next(i for i, h in enumerate(held) if name in h)
        dtype, size = held[owner][name]
        value = tensors[name].to(device) if owner == group.rank() else torch.empty(size, dtype=dtype, device=device)
        dist.broadcast(value, src=dist.get_global_rank(group, owner), group=group)
        whole[name] = value.cpu()
    return whole


def restore(
    model: PolicyChunks,
    shape: ModelShape,
    tensors: Mapping[str, Tensor],
    source: object,
    write: Writer = _write_value,
) -> None:
    """Write canonical tensors back, each rank its own slice. Inverse of ``collect``.

    Args:
        write: takes each parameter with what belongs into it, in its shape on this rank.

    Raises:
        CheckpointError: a tensor is missing, superfluous, or has another shape; ``source`` names where they come from.
    """
    wanted = adapter_names(model, shape)
    if missing := sorted(wanted - tensors.keys()):
        raise CheckpointError(str(source), missing[0], "the adapter tensor is missing", "use the run's own checkpoint")
    if remaining := sorted(tensors.keys() - wanted):
        raise CheckpointError(
            str(source),
            remaining[0],
            "the checkpoint holds an adapter tensor that this run has no place for",
            "resume with the lora section the checkpoint was made with",
        )
    values: dict[int, tuple[torch.nn.Parameter, Tensor]] = {}
    for factor in factors(model, shape):
        parameter = factor.parameter
        if id(parameter) not in values:
            values[id(parameter)] = parameter, torch.empty(parameter.shape, dtype=torch.float32)
        local, value = values[id(parameter)][1][factor.index], tensors[factor.name]
        dim, world = factor.sharded_dim, factor.group.size()
        whole = list(local.shape)
        if dim is not None:
            whole[dim] *= world
        if list(value.shape) != whole:
            raise CheckpointError(
                f"{factor.name} in {source}",
                tuple(value.shape),
                f"this run's adapter has shape {tuple(whole)}",
                "resume with the lora section the checkpoint was made with",
            )
        local.copy_(value if dim is None else value.chunk(world, dim=dim)[factor.group.rank()])
    for parameter, value in values.values():
        write(parameter, value)


@contextmanager
def adapters_off(model: PolicyChunks) -> Iterator[None]:
    """The base model alone within the block: every B is zero. After it they are what they were, bit for bit."""
    factors_b = [p for name, p in model.named_parameters() if name.endswith("lora_B")]
    kept = [p.detach().clone() for p in factors_b]
    try:
        for parameter in factors_b:
            parameter.data.zero_()
        yield
    finally:
        for parameter, value in zip(factors_b, kept, strict=True):
            parameter.data.copy_(value)


def adapter_names(model: PolicyChunks, shape: ModelShape) -> set[str]:
    """Names of the whole adapter's tensors, whichever rank holds them. A collective of all ranks."""
    names = {factor.name for factor in factors(model, shape)}
    for group in _other_holders():
        held: list[Any] = [None] * group.size()
        dist.all_gather_object(held, names, group=group)
        names = set().union(*held)
    return names


def adapter_hash(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over name, dtype, shape and bytes of the tensors in name order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
