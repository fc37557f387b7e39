"""Pairing a family's rules with the modules of a built model on this rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core import parallel_state

from megatron_qerl.errors import FaultError
from megatron_qerl.layers.lora import Factor
from megatron_qerl.models.families import ExpertRule, LinearRule, NormRule, Rule
from megatron_qerl.models.policy import PolicyChunks
from megatron_qerl.models.shape import ModelShape


def _resolve(model: PolicyChunks, path: str, block: int | None) -> Any | None:
    """The module at ``path`` or None if another pipeline stage holds it."""
    parts = path.split(".")
    nodes: list[Any] = model.models
    if block is not None:
        # Global hybrid layers 2i and 2i+1 live at local positions; layer_number counts from one, over all stages.
        index = int(parts[2].format(attn=2 * block, mlp=2 * block + 1))
        nodes = [layer for chunk in nodes for layer in chunk.decoder.layers if layer.layer_number - 1 == index]
        parts = parts[3:]
    return next((found for node in nodes if (found := _descend(node, parts)) is not None), None)


def _descend(node: Any, parts: list[str]) -> Any | None:
    for part in parts:
        node = getattr(node, part, None)
        if node is None:
            return None
    return node


def modules(model: PolicyChunks, shape: ModelShape) -> Iterator[tuple[int | None, Rule, Any]]:
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


def hf_name(template: str, block: int | None, expert: int | str = "{e}") -> str:
    """The Hugging Face name a template stands for in one block, and for one expert if it names experts."""
    return template.format(i=block, e=expert) if block is not None else template


def norms(model: PolicyChunks, shape: ModelShape) -> dict[tuple[int, str], Any]:
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


def factors(model: PolicyChunks, shape: ModelShape) -> Iterator[Factor]:
    """Every factor of every adapted projection on this rank, those of its experts too."""
    for block, rule, module in modules(model, shape):
        if not isinstance(rule, LinearRule | ExpertRule) or module.adapter is None:
            continue
        for projection in module.adapter.names:
            path = hf_name(rule.parts[projection], block)
            if isinstance(rule, ExpertRule):
                yield from module.adapter.factors(projection, path, module.first)
            else:
                yield from module.adapter.factors(projection, path)
