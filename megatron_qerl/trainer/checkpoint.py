"""Training checkpoints: everything that the next step depends on, or nothing.

A checkpoint is a folder ``step_N`` with adapter, optimizer and the run's position. Tensors are stored canonically (full
matrices, Hugging Face names), so any parallel layout can resume them. The folder is written under a temporary name,
synced, and renamed; a crash or a full disk leaves the previous checkpoint untouched.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_qerl.errors import CheckpointError, FaultError
from megatron_qerl.models.adapter_state import adapter_hash, collect, restore
from megatron_qerl.models.policy import PolicyChunks
from megatron_qerl.models.shape import ModelShape
from megatron_qerl.trainer.optimizer import AdapterOptimizer
from megatron_qerl.trainer.optimizer_state import Kind

_TENSOR_FILES = ("adapter", "master", "exp_avg", "exp_avg_sq", "rng")


@dataclass(frozen=True)
class RunPosition:
    """Where a run stands between two steps.

    Attributes:
        step: steps finished.
        updates: optimizer updates made (adapter version).
        data_position: prompts drawn from the data order.
        stream: number of the next draw of a prompt; names its random stream.
        metrics_lines: lines of metrics.jsonl that belong to finished steps.
        wall_s: seconds by phase so far.
        tokens: counts so far.
        config_hash: of the settings that decide the numbers, so that a resume under other ones is refused.
        data_hash: of the rendered training and evaluation prompts, in order.
        base_hash: of the frozen base.
        adapter_hash: of the adapter tensors in this checkpoint.
        extra: results that the summary needs, such as the evaluation before training.
    """

    step: int
    updates: int
    data_position: int
    stream: int
    metrics_lines: int
    wall_s: dict[str, float]
    tokens: dict[str, int]
    config_hash: str
    data_hash: str
    base_hash: str
    adapter_hash: str
    extra: dict[str, Any]


_STATES: tuple[Kind, ...] = ("master", "exp_avg", "exp_avg_sq")


def _read(folder: Path, name: str) -> dict[str, Tensor]:
    """Tensors of one file of a checkpoint.

    Raises:
        CheckpointError: the file is missing or half there.
    """
    path = folder / f"{name}.safetensors"
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(str(path), type(error).__name__, "cannot be read", "use another checkpoint") from error


def _write(folder: Path, files: dict[str, dict[str, Tensor]], position: RunPosition) -> None:
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")
    save_file({"cpu": torch.get_rng_state()}, folder / "rng.safetensors")
    (folder / "position.json").write_text(json.dumps(asdict(position), indent=1, sort_keys=True))
    for file in folder.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())


def save(
    run_dir: Path,
    position: RunPosition,
    model: PolicyChunks,
    shape: ModelShape,
    optimizer: AdapterOptimizer,
    keep: int,
) -> Path:
    """Write ``run_dir/checkpoints/step_N`` and drop the oldest beyond ``keep``.

    Raises:
        FaultError: the disk is full or cannot be written; earlier checkpoints stay, nothing half-written remains.
    """
    root = run_dir / "checkpoints"
    final = root / f"step_{position.step:06d}"
    temporary = root / f".step_{position.step:06d}.tmp"
    # A collective: every rank takes part, rank 0 writes.
    files = {"adapter": collect(model, shape)}
    files |= {kind: collect(model, shape, partial(optimizer.state.whole, kind=kind)) for kind in _STATES}
    if dist.get_rank() == 0:
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            _write(temporary, files, position)
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
            raise FaultError(
                f"saving checkpoint {final}",
                "the disk is full" if full else f"could not be written ({error})",
                "free space and start again with --resume; the previous checkpoint is untouched",
            ) from error
        for old in list_checkpoints(run_dir)[:-keep]:
            shutil.rmtree(old)
    dist.barrier()
    return final


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    root = run_dir / "checkpoints"
    return sorted(p for p in root.glob("step_*") if (p / "position.json").is_file())


def find(run_dir: Path, name: str = "latest") -> Path:
    """The checkpoint called ``name`` ("latest", "step_000010" or "10").

    Raises:
        CheckpointError: there is none, or none of that name.
    """
    found = list_checkpoints(run_dir)
    if not found:
        raise CheckpointError("checkpoint", run_dir, "holds no finished checkpoint", "train the run first")
    if name == "latest":
        return found[-1]
    wanted = name if name.startswith("step_") else f"step_{int(name):06d}" if name.isdigit() else name
    for folder in found:
        if folder.name == wanted:
            return folder
    raise CheckpointError(
        "checkpoint", name, f"not found in {run_dir}", f"choose from {', '.join(f.name for f in found)}"
    )


def read_position(folder: Path) -> RunPosition:
    """The position stored in a checkpoint.

    Raises:
        CheckpointError: it cannot be read.
    """
    path = folder / "position.json"
    try:
        return RunPosition(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(str(path), type(error).__name__, "cannot be read", "use another checkpoint") from error


def adapter_tensors(folder: Path, position: RunPosition) -> dict[str, Tensor]:
    """The adapter of a checkpoint, canonical tensors, checked against the hash in its ``position``.

    Raises:
        CheckpointError: the tensors are not those that were saved.
    """
    tensors = _read(folder, "adapter")
    found = adapter_hash(tensors)
    if found != position.adapter_hash:
        raise CheckpointError(
            f"{folder}/adapter.safetensors",
            found[:12],
            f"its SHA-256 should be {position.adapter_hash[:12]}",
            "the file was changed after it was saved; use another checkpoint",
        )
    return tensors


def _put_state(optimizer: AdapterOptimizer, kind: Kind, parameter: torch.nn.Parameter, value: Tensor) -> None:
    optimizer.state.put(parameter, kind, value)


def load(
    folder: Path, position: RunPosition, model: PolicyChunks, shape: ModelShape, optimizer: AdapterOptimizer
) -> None:
    """Restore adapter, optimizer and RNG, bit for bit.

    Args:
        position: what :func:`read_position` found in ``folder``.

    Raises:
        CheckpointError: a file is missing or does not fit the run.
    """
    for name in _TENSOR_FILES:
        if not (folder / f"{name}.safetensors").is_file():
            raise CheckpointError(f"{folder}", f"{name}.safetensors", "is missing", "use a complete checkpoint")
    restore(model, shape, adapter_tensors(folder, position), folder)
    for kind in _STATES:
        restore(model, shape, _read(folder, kind), folder, partial(_put_state, optimizer, kind))
    optimizer.set_updates(position.updates)
    torch.set_rng_state(_read(folder, "rng")["cpu"])
