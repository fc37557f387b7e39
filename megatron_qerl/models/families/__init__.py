"""The families that this package maps, by Hugging Face ``model_type``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_qerl.errors import CheckpointError
from megatron_qerl.models.families.base import (
    ExpertRule,
    Family,
    LinearRule,
    NormRule,
    RouterRule,
    Rule,
    VocabRule,
)
from megatron_qerl.models.families.llama import LLAMA
from megatron_qerl.models.families.qwen2 import QWEN2
from megatron_qerl.models.families.qwen3 import QWEN3
from megatron_qerl.models.families.qwen3_moe import QWEN3_MOE

FAMILIES: dict[str, Family] = {f.model_type: f for f in (LLAMA, QWEN2, QWEN3, QWEN3_MOE)}

__all__ = [
    "FAMILIES",
    "ExpertRule",
    "Family",
    "LinearRule",
    "NormRule",
    "RouterRule",
    "Rule",
    "VocabRule",
    "family_of",
]


def family_of(config: Mapping[str, Any], path: object) -> Family:
    """The family of a Hugging Face config.

    Raises:
        CheckpointError: the family is unknown, or the model uses a feature its table does not cover.
    """
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise CheckpointError(
            f"model_type in {path}/config.json",
            model_type,
            f"the family is not supported (supported: {', '.join(sorted(FAMILIES))})",
            "use a model of a supported family or add a table under megatron_qerl/models/families",
        )
    family = FAMILIES[model_type]
    refused = family.refuse(config)
    if refused is not None:
        key, value, rule = refused
        raise CheckpointError(f"{key} in {path}/config.json", value, rule, "use a model without it")
    return family
