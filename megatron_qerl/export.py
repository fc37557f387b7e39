"""``megatron-qerl export``: a checkpoint's adapter as a PEFT folder."""

from __future__ import annotations

from pathlib import Path

from megatron_qerl.config.loader import load_resolved_config
from megatron_qerl.models.export import write_adapter
from megatron_qerl.trainer.checkpoint import adapter_tensors, find, read_position


def export_adapter(run_dir: Path, output: Path, checkpoint: str) -> Path:
    """``megatron-qerl export``: a checkpoint's adapter as a PEFT folder. Needs neither the base model nor a GPU.

    Raises:
        CheckpointError: no such checkpoint.
        UserError, FaultError: as ``write_adapter``.
    """
    config = load_resolved_config(run_dir)
    folder = find(run_dir, checkpoint)
    tensors = adapter_tensors(folder, read_position(folder))
    return write_adapter(tensors, config.lora, config.model.path, output)
