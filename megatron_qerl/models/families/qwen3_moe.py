"""Qwen3 mixture of experts: Qwen3's attention, and experts instead of an MLP in every block.

Each token goes to its ``num_experts_per_tok`` best experts of the softmax over all of them; with ``norm_topk_prob``
their weights are divided by their sum. There is no shared expert and no bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_qerl.models.families.base import MOE_BLOCK, QK_NORMS, Family, refuse_common

_MIXED = "a model with both dense and expert blocks is not mapped"


def _refuse(config: Mapping[str, Any]) -> tuple[str, object, str] | None:
    if config.get("attention_bias"):
        return "attention_bias", True, "Qwen3 with attention biases is not mapped"
    if config.get("mlp_only_layers"):
        return "mlp_only_layers", config["mlp_only_layers"], _MIXED
    if config.get("decoder_sparse_step", 1) != 1:
        return "decoder_sparse_step", config["decoder_sparse_step"], _MIXED
    return refuse_common(config)


QWEN3_MOE = Family("qwen3_moe", MOE_BLOCK + QK_NORMS, qkv_bias=lambda _: False, qk_norm=True, refuse=_refuse)
