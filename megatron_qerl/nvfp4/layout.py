"""Which tensors of a decoder layer are quantised, and which belong together.

Llama, Qwen2 and Qwen3 (dense) name their layers alike: four matrices read the hidden state through two norms, and
q/k/v and gate/up each become one matrix in the trainer and in every engine. A fused matrix has one tensor scale and
one input, so its members share the tensor scale and, under AWQ, the input scaling. Embedding, head, norms, biases and
routers are never quantised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_qerl.errors import UserError

FAMILIES = ("llama", "qwen2", "qwen3")
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


@dataclass(frozen=True)
class DecoderShape:
    """What the quantiser needs to know of a model's config.json."""

    family: str
    layers: int
    heads: int
    kv_heads: int

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
        return cls(family, int(config["num_hidden_layers"]), heads, int(config.get("num_key_value_heads") or heads))


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def layer_of(name: str) -> int | None:
    """The layer that a tensor or module belongs to; None outside the layers."""
    parts = name.split(".")
    return int(parts[2]) if name.startswith("model.layers.") and len(parts) > 3 else None


def is_quantized_linear(module_name: str) -> bool:
    """Whether a module, such as ``model.layers.0.mlp.up_proj``, gets packed."""
    layer = layer_of(module_name)
    return layer is not None and module_name.removeprefix(layer_prefix(layer)) in LINEARS


def fused_groups(layers: int) -> list[tuple[str, ...]]:
    """Full module names of every fused group, layer by layer."""
    return [tuple(layer_prefix(i) + member for member in group.members) for i in range(layers) for group in GROUPS]
