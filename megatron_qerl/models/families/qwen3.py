"""Qwen3 dense: no bias, but an RMSNorm on each query and key head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_qerl.models.families.base import DENSE_BLOCK, QK_NORMS, Family, refuse_common


def _refuse(config: Mapping[str, Any]) -> tuple[str, object, str] | None:
    if config.get("attention_bias"):
        return "attention_bias", True, "Qwen3 with attention biases is not mapped"
    return refuse_common(config)


QWEN3 = Family("qwen3", DENSE_BLOCK + QK_NORMS, qkv_bias=lambda _: False, qk_norm=True, refuse=_refuse)
