"""The linear layers that the kernels must serve: Qwen2.5 7B, 14B, 32B and Qwen3-30B-A3B, with their TP slices.

A layer is one GEMM of a decoder block as Megatron and the engines run it: q, k and v fused into ``qkv``, gate and up
fused into ``gate_up``. W is [N, K]. Column-parallel layers (qkv, gate_up) divide N by the tensor-parallel size,
row-parallel ones (o, down) divide K. A slice exists where the attention heads divide and where K stays a multiple of
the NVFP4 block of 16; ``slice_of`` says in words why another does not.

Sizes are from the models' ``config.json`` (hidden_size, intermediate_size, num_attention_heads, num_key_value_heads,
head_dim, num_experts, num_experts_per_tok, moe_intermediate_size).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BLOCK_SIZE = 16
TP_SIZES = (1, 2, 4, 8)
M_VALUES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class Layer:
    """One GEMM.

    Attributes:
        name: MODEL.KIND, such as ``32B.gate_up``.
        parts: output rows of the fused parts; N is their sum.
        k: input features.
        parallel: which dimension tensor parallelism divides.
        heads: units that must divide by the TP size (attention heads and KV groups); empty where only N or K does.
        experts: experts of the layer (0: dense); M is then the rows that one expert receives.
        top_k: experts a token visits, so that M tokens give M * top_k / experts rows an expert when balanced.
    """

    name: str
    parts: tuple[int, ...]
    k: int
    parallel: Literal["column", "row"]
    heads: tuple[int, ...] = ()
    experts: int = 0
    top_k: int = 0

    @property
    def n(self) -> int:
        return sum(self.parts)


@dataclass(frozen=True)
class Slice:
    """What one tensor-parallel rank holds of a layer."""

    layer: Layer
    tp: int
    parts: tuple[int, ...]
    k: int

    @property
    def n(self) -> int:
        return sum(self.parts)

    @property
    def key(self) -> str:
        return f"{self.layer.name}|tp{self.tp}"


def _attention(model: str, hidden: int, heads: int, groups: int, head_dim: int) -> tuple[Layer, Layer]:
    q, kv = heads * head_dim, groups * head_dim
    return (
        Layer(f"{model}.qkv", (q, kv, kv), hidden, "column", (heads, groups)),
        Layer(f"{model}.o", (hidden,), q, "row", (heads,)),
    )


def _dense(model: str, hidden: int, intermediate: int, heads: int, groups: int, head_dim: int) -> tuple[Layer, ...]:
    return (
        *_attention(model, hidden, heads, groups, head_dim),
        Layer(f"{model}.gate_up", (intermediate, intermediate), hidden, "column"),
        Layer(f"{model}.down", (hidden,), intermediate, "row"),
    )


def _mixture(model: str, hidden: int, intermediate: int, experts: int, top_k: int) -> tuple[Layer, ...]:
    return (
        Layer(f"{model}.expert_gate_up", (intermediate, intermediate), hidden, "column", (), experts, top_k),
        Layer(f"{model}.expert_down", (hidden,), intermediate, "row", (), experts, top_k),
    )


LAYERS: dict[str, Layer] = {
    layer.name: layer
    for layer in (
        *_dense("7B", 3584, 18944, 28, 4, 128),
        *_dense("14B", 5120, 13824, 40, 8, 128),
        *_dense("32B", 5120, 27648, 40, 8, 128),
        *_attention("30B-A3B", 2048, 32, 4, 128),
        *_mixture("30B-A3B", 2048, 768, 128, 8),
    )
}


def slice_of(layer: Layer, tp: int) -> Slice | str:
    """The slice of ``layer`` at a tensor-parallel size, or the reason why there is none."""
    for units in layer.heads:
        if units % tp:
            return f"{layer.name} at TP {tp}: {units} attention heads or KV groups do not divide by {tp}"
    if layer.parallel == "column":
        for part in layer.parts:
            if part % tp:
                return f"{layer.name} at TP {tp}: a part of {part} rows does not divide by {tp}"
        return Slice(layer, tp, tuple(part // tp for part in layer.parts), layer.k)
    if layer.k % tp or (layer.k // tp) % BLOCK_SIZE:
        return (
            f"{layer.name} at TP {tp}: K = {layer.k} / {tp} is not a multiple of {BLOCK_SIZE}, "
            "so a block scale would belong to two ranks"
        )
    return Slice(layer, tp, layer.parts, layer.k // tp)


def slices(names: tuple[str, ...], tp_sizes: tuple[int, ...]) -> tuple[list[Slice], list[str]]:
    """The slices of the named layers, and why the missing ones are missing.

    Args:
        names: layer names, or model names (``32B``) for all layers of one.

    Raises:
        ValueError: no layer has a name.
    """
    layers: list[Layer] = []
    for name in names:
        found = [layer for layer in LAYERS.values() if name in (layer.name, layer.name.split(".")[0])]
        if not found:
            raise ValueError(f"--layers {name}: no such layer or model; the layers are {', '.join(LAYERS)}")
        layers += [layer for layer in found if layer not in layers]
    have: list[Slice] = []
    missing: list[str] = []
    for layer in layers:
        for tp in tp_sizes:
            found_slice = slice_of(layer, tp)
            if isinstance(found_slice, str):
                missing.append(found_slice)
            else:
                have.append(found_slice)
    return have, missing
