"""Which tensors of a decoder layer are quantised, and which belong together.

Llama, Qwen2 and Qwen3 (dense) name their layers alike: four matrices read the hidden state through two norms, and
q/k/v and gate/up each become one matrix in the trainer and in every engine. A fused matrix has one tensor scale and
one input, so its members share the tensor scale and, under AWQ, the input scaling. In a mixture of experts each expert
has a gate/up and a down of its own, with scales of their own. Embedding, head, norms, biases and routers are never
quantised.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from megatron_qerl.errors import UserError

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
NOT_QUANTIZED = ("lm_head", "model.embed_tokens")  # as ModelOpt's export lists them
ATTENTION_NORM = "input_layernorm"
MLP_NORM = "post_attention_layernorm"


@dataclass(frozen=True)
class LinearGroup:
    """Linears that are one matrix at run time.

    Attributes:
        name: short name.
        members: paths inside a layer, in fused order.
        norm: the norm whose output the group reads; None where another linear comes before.
    """

    name: str
    members: tuple[str, ...]
    norm: str | None


GROUPS = (
    LinearGroup("qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ATTENTION_NORM),
    LinearGroup("o", ("self_attn.o_proj",), None),
    LinearGroup("gate_up", ("mlp.gate_proj", "mlp.up_proj"), MLP_NORM),
    LinearGroup("down", ("mlp.down_proj",), None),
)
LINEARS = tuple(member for group in GROUPS for member in group.members)
_EXPERT_LINEAR = re.compile(r"mlp\.experts\.\d+\.(gate|up|down)_proj")


@dataclass(frozen=True)
class DecoderShape:
    """What the quantiser needs to know of a model's config.json; ``experts`` is 0 for a dense model."""

    family: str
    layers: int
    heads: int
    kv_heads: int
    experts: int = 0

    @classmethod
    def of(cls, config: dict[str, Any], source: object) -> DecoderShape:
        """Read it from a config.

        Raises:
            UserError: the family is not one that this project quantises.
        """
        family = config.get("model_type")
        if family not in FAMILIES:
            rule = f"only the families {', '.join(FAMILIES)} are quantised"
            raise UserError(f"{source}: model_type", family, rule, "Choose a model of one of them")
        heads = int(config["num_attention_heads"])
        experts = int(config.get("num_experts") or config["num_local_experts"]) if family == "qwen3_moe" else 0
        kv_heads = int(config.get("num_key_value_heads") or heads)
        return cls(family, int(config["num_hidden_layers"]), heads, kv_heads, experts)

    @property
    def groups(self) -> tuple[LinearGroup, ...]:
        """The fused groups of one layer."""
        if not self.experts:
            return GROUPS
        attention, mlp = GROUPS[:2], GROUPS[2:]
        return (*attention, *(_of_expert(group, e) for e in range(self.experts) for group in mlp))

    @property
    def linears(self) -> tuple[str, ...]:
        """Paths of the quantised linears inside a layer."""
        return tuple(member for group in self.groups for member in group.members)

    @property
    def not_quantized(self) -> tuple[str, ...]:
        """Modules with a weight matrix that stays as it is; engines read this list."""
        routers = [f"{layer_prefix(i)}mlp.gate" for i in range(self.layers)] if self.experts else []
        return (*NOT_QUANTIZED, *routers)


def _of_expert(group: LinearGroup, expert: int) -> LinearGroup:
    inside = tuple(member.replace("mlp.", f"mlp.experts.{expert}.") for member in group.members)
    return LinearGroup(f"experts.{expert}.{group.name}", inside, group.norm)


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def layer_of(name: str) -> int | None:
    """The layer that a tensor or module belongs to; None outside the layers."""
    parts = name.split(".")
    return int(parts[2]) if name.startswith("model.layers.") and len(parts) > 3 else None


def is_quantized_linear(module_name: str) -> bool:
    """Whether a module, such as ``model.layers.0.mlp.up_proj``, gets packed."""
    layer = layer_of(module_name)
    if layer is None:
        return False
    inside = module_name.removeprefix(layer_prefix(layer))
    return inside in LINEARS or _EXPERT_LINEAR.fullmatch(inside) is not None


def fused_groups(layers: int, groups: tuple[LinearGroup, ...] = GROUPS) -> list[tuple[str, ...]]:
    """Full module names of every fused group, layer by layer."""
    return [tuple(layer_prefix(i) + member for member in group.members) for i in range(layers) for group in groups]
