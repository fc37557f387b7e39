"""Parallel layouts in tests and benchmarks: their config changes, cases that share one, and how far two results are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

_NAMES = {
    "tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "cp": "context_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size", "sp": "sequence_parallel", "do": "use_distributed_optimizer",
    "ep": "expert_model_parallel_size", "etp": "expert_tensor_parallel_size", "via": "token_dispatcher",
}  # fmt: skip


def layout(**sizes: Any) -> dict[str, Any]:
    """Config changes of a layout, ``tp=2`` for ``parallel.tensor_model_parallel_size: 2``."""
    return {f"parallel__{_NAMES[name]}": value for name, value in sizes.items()}


def sizes_of(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The layout in a case's config changes."""
    return {k.removeprefix("parallel__"): v for k, v in changes.items() if k.startswith("parallel__")}


def run_each[Case](
    cases: Mapping[str, Case], layout_of: Callable[[Case], Any], run: Callable[[Case], Any]
) -> dict[str, Any]:
    """Name -> what ``run`` returns. Cases of one layout that follow each other share its process groups."""
    from megatron_qerl.parallel import setup

    results: dict[str, Any] = {}
    standing = None
    for name, case in cases.items():
        if standing not in (None, layout_of(case)):
            setup.shutdown()
        standing = layout_of(case)
        results[name] = run(case)
    setup.shutdown()
    return results


def difference(found: Any, wanted: Any) -> float:
    """Largest difference relative to the largest element; the worst of several tensors, each by its own scale."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), f"{sorted(found.keys() ^ wanted.keys())[:4]} are on one side alone"
        return max(difference(found[n], wanted[n]) for n in wanted)
    found, wanted = torch.as_tensor(found), torch.as_tensor(wanted)
    scale = float(wanted.abs().max())
    gap = float((found.double() - wanted.double()).abs().max())
    return 0.0 if gap == 0.0 else gap / scale if scale else float("inf")
