"""Sizes of a model, read once from its Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_qerl.config.schema import NoiseSection, ParallelSection
from megatron_qerl.errors import CheckpointError, ConfigError
from megatron_qerl.models.families import Family, family_of


@dataclass(frozen=True)
class ExpertShape:
    """Sizes of a mixture of experts.

    Attributes:
        count: experts of a block.
        per_token: experts that a token goes to.
        ffn_hidden_size: width of one expert.
        renormalise: whether a token's weights are divided by their sum.
    """

    count: int
    per_token: int
    ffn_hidden_size: int
    renormalise: bool


@dataclass(frozen=True)
class ModelShape:
    """Sizes and switches; names follow Megatron's."""

    family: Family
    num_blocks: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    layernorm_epsilon: float
    tied: bool
    qkv_bias: bool
    experts: ExpertShape | None = None


def _required(config: Mapping[str, Any], key: str, path: Path) -> Any:
    if config.get(key) is None:
        raise CheckpointError(f"{key} in {path}/config.json", None, "is missing", "use a complete model folder")
    return config[key]


def read_shape(config: Mapping[str, Any], path: Path) -> ModelShape:
    """Sizes from ``config.json`` of the folder ``path``.

    Raises:
        CheckpointError: unknown family, missing key, or sizes that contradict each other.
    """
    family = family_of(config, path)
    heads = int(_required(config, "num_attention_heads", path))
    groups = int(config.get("num_key_value_heads") or heads)
    hidden = int(_required(config, "hidden_size", path))
    if heads % groups:
        raise CheckpointError(
            f"num_key_value_heads in {path}/config.json",
            groups,
            f"must divide num_attention_heads = {heads}",
            "use a consistent config.json",
        )
    return ModelShape(
        family=family,
        num_blocks=int(_required(config, "num_hidden_layers", path)),
        hidden_size=hidden,
        ffn_hidden_size=int(_required(config, "intermediate_size", path)),
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=int(config.get("head_dim") or hidden // heads),
        vocab_size=int(_required(config, "vocab_size", path)),
        layernorm_epsilon=float(_required(config, "rms_norm_eps", path)),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias(config),
        experts=_experts(config, path) if family.mixture_of_experts else None,
    )


def _experts(config: Mapping[str, Any], path: Path) -> ExpertShape:
    # transformers 5 writes num_local_experts where the published checkpoints have num_experts.
    count = "num_local_experts" if config.get("num_experts") is None else "num_experts"
    experts = ExpertShape(
        count=int(_required(config, count, path)),
        per_token=int(_required(config, "num_experts_per_tok", path)),
        ffn_hidden_size=int(_required(config, "moe_intermediate_size", path)),
        renormalise=bool(config.get("norm_topk_prob", False)),
    )
    if not 1 <= experts.per_token <= experts.count:
        raise CheckpointError(
            f"num_experts_per_tok in {path}/config.json",
            experts.per_token,
            f"must lie between 1 and {count} = {experts.count}",
            "use a consistent config.json",
        )
    return experts


def check_layout(shape: ModelShape, tensor_size: int) -> None:
    """Refuse a tensor-parallel size that the model cannot be cut into.

    Raises:
        ConfigError: names the number that does not divide and the sizes that would work.
    """
    numbers = {
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_query_groups,
        **({"intermediate_size / 16": shape.ffn_hidden_size // 16} if shape.experts is None else {}),
        "num_attention_heads * head_dim / 16": shape.num_attention_heads * shape.kv_channels // 16,
    }
    fitting = [t for t in (1, 2, 4, 8, 16) if all(n % t == 0 for n in numbers.values())]
    for name, number in numbers.items():
        if number % tensor_size:
            raise ConfigError(
                "parallel.tensor_model_parallel_size",
                tensor_size,
                f"must divide the model's {name} = {number}",
                f"use one of {fitting}",
            )


def router_input(shape: ModelShape, noise: NoiseSection) -> Literal["clean", "noisy"]:
    """What the routers see while noise is in force.

    Raises:
        ConfigError: the config does not say, although it decides where tokens go; or it says so of a dense model.
    """
    if shape.experts is None:
        if noise.router is not None:
            rule = f"a {shape.family.model_type} model has no router"
            raise ConfigError("noise.router", noise.router, rule, "remove it")
        return "noisy"
    if noise.router is None and noise.enabled and "post_attention" in noise.roles:
        raise ConfigError(
            "noise.router",
            None,
            "the post-attention norm feeds the router too, and its noise would send tokens to other experts",
            "set noise.router: clean (routes as without noise on that norm) or noisy (as an engine with noisy norms)",
        )
    return noise.router or "noisy"


def check_experts(shape: ModelShape, layout: ParallelSection) -> None:
    """Refuse an expert-parallel layout that the model cannot be cut into, or that Megatron cannot train.

    Raises:
        ConfigError: names the model's number, the layout's number and what would work.
    """
    ep, etp = layout.expert_model_parallel_size, layout.expert_tensor_parallel_size
    experts = shape.experts
    if experts is None:
        for key, size in (("expert_model_parallel_size", ep), ("expert_tensor_parallel_size", etp or 1)):
            if size > 1:
                rule = f"a {shape.family.model_type} model has no experts"
                raise ConfigError(f"parallel.{key}", size, rule, "remove it, or use a mixture of experts")
        return
    etp = etp or layout.tensor_model_parallel_size
    blocks = experts.ffn_hidden_size // 16
    checks = (
        ("expert_model_parallel_size", ep, "num_experts", experts.count),
        ("expert_tensor_parallel_size", etp, "moe_intermediate_size / 16", blocks),
    )
    for key, size, name, number in checks:
        if number % size:
            fitting = [n for n in range(1, number + 1) if number % n == 0]
            raise ConfigError(
                f"parallel.{key}", size, f"must divide the model's {name} = {number}", f"use one of {fitting}"
            )
    if layout.tensor_model_parallel_size > 1 and not layout.sequence_parallel:
        raise ConfigError(
            "parallel.sequence_parallel",
            False,
            f"tensor_model_parallel_size = {layout.tensor_model_parallel_size} would send every token to its experts "
            "once a tensor-parallel rank",
            "set sequence_parallel: true",
        )
    if layout.token_dispatcher == "allgather" and layout.pipeline_model_parallel_size > 1:
        raise ConfigError(
            "parallel.token_dispatcher",
            "allgather",
            "Megatron does not send micro-batches of several lengths between pipeline stages with it",
            "use alltoall",
        )


def rotary_inverse_frequencies(config: Mapping[str, Any], path: Path) -> Tensor:
    """FP32 [D/2], computed by transformers itself so that every scaling rule it knows is the same here.

    Raises:
        CheckpointError: a scaling rule that also rescales attention, or whose frequencies depend on the input length.
    """
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    values = {k: v for k, v in config.items() if k not in ("model_type", "quantization_config")}
    hf = AutoConfig.for_model(config["model_type"], **values)
    parameters = getattr(hf, "rope_parameters", None) or {}
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        dim = int(getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)
        theta = float(parameters.get("rope_theta", getattr(hf, "default_theta", 10000.0)))
        return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    if kind in ("dynamic", "longrope"):
        raise CheckpointError(
            f"rope_type in {path}/config.json",
            kind,
            "depends on the input length and is not mapped",
            "use another model",
        )
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"))
    if attention_factor != 1.0:
        raise CheckpointError(
            f"rope_type in {path}/config.json", kind, "rescales attention, which is not mapped", "use another model"
        )
    return inv_freq.float()
