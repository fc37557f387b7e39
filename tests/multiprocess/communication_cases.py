"""What each rank sends in ``test_communication``: collectives of a micro-batch and of an update, as torch sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_qerl.trainer.step import BeforeUpdate, StepStatistics
from tests.multiprocess.pipeline_context_cases import prepare
from tests.multiprocess.tensor_data_cases import groups_of
from tests.support.layouts import run_each, sizes_of

#: c10d operator -> (collective, whether its size is that of the result, which comes first).
OPERATORS = {
    "_allgather_base_": ("all-gather", True),
    "allgather_": ("all-gather", True),
    "_reduce_scatter_base_": ("reduce-scatter", False),
    "_reduce_scatter_base_coalesced_": ("reduce-scatter", False),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", False),
    "allgather_into_tensor_coalesced_": ("all-gather", True),
    "allreduce_": ("all-reduce", False),
    "allreduce_coalesced_": ("all-reduce", False),
    "alltoall_base_": ("all-to-all", False),
    "alltoall_": ("all-to-all", False),
    "broadcast_": ("broadcast", False),
    "send": ("send", False),
}


def _others(args: tuple[Any, ...]) -> bool:
    """Whether the collective's group has a second rank."""
    groups = (
        dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a)
    )
    return any(group.size() > 1 for group in groups)


class Counted(TorchDispatchMode):
    """Records (collective, bytes) of floating-point tensors; the size is that of the whole, before or after."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record and go on."""
        if func.namespace == "c10d" and (name := func._schema.name.partition("::")[2]) in OPERATORS:
            collective, result = OPERATORS[name]
            whole = args[0] if result or not name.startswith(("_reduce", "reduce", "alltoall")) else args[1]
            tensors = [t for t in tree_leaves(whole) if isinstance(t, Tensor) and t.is_floating_point()]
            if tensors and _others(args):
                self.found.append((collective, sum(t.numel() * t.element_size() for t in tensors)))
        return func(*args, **(kwargs or {}))


def sent(path: Path, changes: dict[str, Any], lengths: list[list[int]]) -> dict[str, Any]:
    """Bytes by collective in forward and backward and in the update, and what the formulas need to know."""
    loaded, trainer = prepare(path, changes)
    loaded.model.train()
    noise = loaded.registry.state(5, 10)
    batches = trainer._own_microbatches(groups_of(lengths))
    with loaded.registry.applied(noise):
        with Counted() as passes:
            trainer._accumulate(batches, [BeforeUpdate()] * len(batches), StepStatistics(), compare=False)
        with Counted() as update:
            trainer.optimizer.step()
    adapters = sum(p.numel() for _, p in trainer.optimizer.parameters())
    rows = [b.tokens.total_tokens for b in batches]
    scored = [len(b.rollout_logprobs) for b in batches]
    return {"passes": passes.found, "update": update.found, "rows": rows, "scored": scored, "adapters": adapters}


def run_cases(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Body of a rank: name -> ``sent``."""
    return run_each(arguments, lambda options: sizes_of(options["changes"]), lambda options: sent(**options))
