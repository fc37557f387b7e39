"""Llama (and models that use its architecture, such as SmolLM2): no bias anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_qerl.models.families.base import DENSE_BLOCK, Family, refuse_common


def _refuse(config: Mapping[str, Any]) -> tuple[str, object, str] | None:
    if config.get("attention_bias"):
        return "attention_bias", True, "Llama with attention biases (o_proj has one too) is not mapped"
    return refuse_common(config)


LLAMA = Family("llama", DENSE_BLOCK, qkv_bias=lambda _: False, qk_norm=False, refuse=_refuse)
