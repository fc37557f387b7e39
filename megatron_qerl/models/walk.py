"""Pairing a family's rules with the modules of a built model on this rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core import parallel_state

from megatron_qerl.errors import FaultError
from megatron_qerl.layers.lora import LoraAdapter
from megatron_qerl.models.families import LinearRule, NormRule, Rule
from megatron_qerl.models.policy import PolicyModel
from megatron_qerl.models.shape import ModelShape


def _resolve(model: PolicyModel, path: str, block: int | None) -> Any | None:
    """The module at ``path`` or None if another pipeline stage holds it."""
    node: Any = model
    parts = path.split(".")
    if block is not None:
        # Global hybrid layers 2i and 2i+1 live at local positions; layer_number counts from one.
        layers = {layer.layer_number - 1: layer for layer in model.decoder.layers}
        index = int(parts[2].format(attn=2 * block, mlp=2 * block + 1))
        if index not in layers:
            return None
        node, parts = layers[index], parts[3:]
    for part in parts:
        node = getattr(node, part, None)
        if node is None:
            return None
    return node


def modules(model: PolicyModel, shape: ModelShape) -> Iterator[tuple[int | None, Rule, Any]]:
    """(block, rule, module) for every rule whose module lives on this rank, in a fixed order."""
    for block, rule in shape.family.rules(shape.num_blocks, tied=shape.tied):
        module = _resolve(model, rule.module, block)
        if module is not None:
            yield block, rule, module
        elif parallel_state.get_pipeline_model_parallel_world_size() == 1:
            raise FaultError(
                f"module {rule.module} of block {block}",
                "is in the family's table but not in the model",
                "the model was not built from this config.json, or the table has a wrong name",
            )


def hf_name(template: str, block: int | None) -> str:
    """The Hugging Face name a template stands for in one block."""
    return template.format(i=block) if block is not None else template


def norms(model: PolicyModel, shape: ModelShape) -> dict[tuple[int, str], Any]:
    """(block, role) -> norm module on this rank; the final norm has block ``num_blocks``."""
    return {
        (shape.num_blocks if block is None else block, rule.role): module
        for block, rule, module in modules(model, shape)
        if isinstance(rule, NormRule)
    }


def expected_norms(shape: ModelShape) -> dict[tuple[int, str], int]:
    """(block, role) -> channels of every norm of the whole model, from the table alone."""
    return {
        (shape.num_blocks if block is None else block, rule.role): (
            shape.kv_channels if rule.role in ("q_norm", "k_norm") else shape.hidden_size
        )
        for block, rule in shape.family.rules(shape.num_blocks, tied=shape.tied)
        if isinstance(rule, NormRule)
    }


def adapters(model: PolicyModel, shape: ModelShape) -> Iterator[tuple[str, str, LoraAdapter]]:
    """(Hugging Face module path, projection, adapter) for every adapted projection on this rank."""
    for block, rule, module in modules(model, shape):
        if isinstance(rule, LinearRule) and module.adapter is not None:
            for projection in module.adapter.names:
                yield hf_name(rule.parts[projection], block), projection, module.adapter
