"""How a family of Hugging Face models maps onto Megatron, as one declarative table.

A rule names a Megatron module, the Hugging Face tensors that fill it, and (for norms) the logical role under which
noise finds it. Loading, exporting and the noise registry all read the same table, so they cannot disagree. Templates
use ``{i}`` for the block, ``{attn}`` and ``{mlp}`` for the two hybrid layers that a block becomes,
``{e}`` for an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class NormRule:
    """An RMSNorm: ``module`` gets its scale from tensor ``hf``."""

    module: str
    hf: str
    role: str


@dataclass(frozen=True)
class LinearRule:
    """A (fused) linear: ``module`` is filled from the Hugging Face modules in ``parts`` (projection -> module path)."""

    module: str
    parts: Mapping[str, str]


@dataclass(frozen=True)
class VocabRule:
    """An embedding or head, split along the vocabulary: ``module``.weight from tensor ``hf``."""

    module: str
    hf: str


@dataclass(frozen=True)
class RouterRule:
    """A router: ``module``.weight, one row an expert, from tensor ``hf``. Never packed, never trained."""

    module: str
    hf: str


@dataclass(frozen=True)
class ExpertRule:
    """The same fused linear of every expert: ``module`` holds a stack, expert ``{e}`` is filled from ``parts``."""

    module: str
    parts: Mapping[str, str]


Rule = NormRule | LinearRule | VocabRule | RouterRule | ExpertRule

_ATTN, _MLP = "decoder.layers.{attn}.", "decoder.layers.{mlp}."
_HF = "model.layers.{i}."

DENSE_BLOCK: tuple[Rule, ...] = (
    NormRule(_ATTN + "input_layernorm", _HF + "input_layernorm.weight", role="input"),
    LinearRule(
        _ATTN + "self_attention.linear_qkv",
        {p: f"{_HF}self_attn.{p}" for p in ("q_proj", "k_proj", "v_proj")},
    ),
    LinearRule(_ATTN + "self_attention.linear_proj", {"o_proj": _HF + "self_attn.o_proj"}),
    NormRule(_MLP + "pre_mlp_layernorm", _HF + "post_attention_layernorm.weight", role="post_attention"),
    LinearRule(_MLP + "mlp.linear_fc1", {p: f"{_HF}mlp.{p}" for p in ("gate_proj", "up_proj")}),
    LinearRule(_MLP + "mlp.linear_fc2", {"down_proj": _HF + "mlp.down_proj"}),
)

# A mixture-of-experts block differs from a dense one in what follows its second norm.
MOE_BLOCK: tuple[Rule, ...] = (
    *DENSE_BLOCK[:4],
    RouterRule(_MLP + "mlp.router", _HF + "mlp.gate.weight"),
    ExpertRule(_MLP + "mlp.experts.fc1", {p: f"{_HF}mlp.experts.{{e}}.{p}" for p in ("gate_proj", "up_proj")}),
    ExpertRule(_MLP + "mlp.experts.fc2", {"down_proj": _HF + "mlp.experts.{e}.down_proj"}),
)

QK_NORMS: tuple[Rule, ...] = (
    NormRule(_ATTN + "self_attention.q_layernorm", _HF + "self_attn.q_norm.weight", role="q_norm"),
    NormRule(_ATTN + "self_attention.k_layernorm", _HF + "self_attn.k_norm.weight", role="k_norm"),
)

OUTSIDE_BLOCKS: tuple[Rule, ...] = (
    VocabRule("embedding.word_embeddings", "model.embed_tokens.weight"),
    NormRule("decoder.final_norm", "model.norm.weight", role="final"),
    VocabRule("output_layer", "lm_head.weight"),
)


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        model_type: ``model_type`` in the Hugging Face config.
        block: rules of one decoder block.
        qkv_bias: whether q, k and v carry a bias, from the config.
        qk_norm: whether queries and keys are normalised.
        refuse: config -> (key, value, rule) of a feature that the mapping does not cover, or None.
    """

    model_type: str
    block: tuple[Rule, ...]
    qkv_bias: Callable[[Mapping[str, Any]], bool]
    qk_norm: bool
    refuse: Callable[[Mapping[str, Any]], tuple[str, object, str] | None]

    @property
    def mixture_of_experts(self) -> bool:
        """Whether every block routes its tokens to experts."""
        return any(isinstance(rule, ExpertRule) for rule in self.block)

    def rules(self, num_blocks: int, *, tied: bool) -> tuple[tuple[int | None, Rule], ...]:
        """All rules of a model as (block index or None, rule); a tied head has no tensor of its own."""
        outside = [(None, r) for r in OUTSIDE_BLOCKS if not (tied and r == OUTSIDE_BLOCKS[-1])]
        return (*outside, *((i, r) for i in range(num_blocks) for r in self.block))


def refuse_common(config: Mapping[str, Any]) -> tuple[str, object, str] | None:
    """Features that none of the dense families' tables cover."""
    if config.get("hidden_act", "silu") != "silu":
        return "hidden_act", config["hidden_act"], "only silu (SwiGLU) is mapped"
    if config.get("use_sliding_window"):
        return "use_sliding_window", True, "sliding-window attention is not mapped"
    if config.get("mlp_bias"):
        return "mlp_bias", True, "a bias in the MLP is not mapped"
    return None
