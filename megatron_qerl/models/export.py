"""The adapter in PEFT's format: a folder that ``peft.PeftModel.from_pretrained`` loads onto the base model."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megatron_qerl.config.schema import LoraSection
from megatron_qerl.errors import FaultError, UserError
from megatron_qerl.models.expert_names import repeat_shared


def peft_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Canonical adapter tensors under PEFT's names, each expert with factors of its own."""
    own = repeat_shared(tensors)
    return {f"base_model.model.{name}.weight": value.contiguous() for name, value in sorted(own.items())}


def peft_config(tensors: Mapping[str, Tensor], lora: LoraSection, base_model: Path) -> dict[str, object]:
    """``adapter_config.json`` of canonical ``tensors``; targets are the projections that have some."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base_model),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.split(".")[-2] for name in tensors}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "use_rslora": False,
        "use_dora": False,
    }


def write_adapter(tensors: Mapping[str, Tensor], lora: LoraSection, base_model: Path, output: Path) -> Path:
    """Write an adapter folder, whole or not at all.

    Raises:
        UserError: ``output`` exists and is not empty.
        FaultError: it cannot be written.
    """
    if output.exists() and any(output.iterdir()):
        raise UserError("--output", output, "exists and is not empty", "name a new folder")
    temporary = output.with_name(f".{output.name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_file(peft_tensors(tensors), temporary / "adapter_model.safetensors", metadata={"format": "pt"})
        (temporary / "adapter_config.json").write_text(
            json.dumps(peft_config(tensors, lora, base_model), indent=2) + "\n"
        )
        os.replace(temporary, output)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise FaultError(f"writing {output}", f"could not be written ({error})", "free space and try again") from error
    return output
