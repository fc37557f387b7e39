"""Our layers as one of Megatron's backends.

Megatron's spec functions ask a ``BackendSpecProvider`` which class sits where. This one answers with frozen linears,
noise norms and the chosen attention, so ``spec.frozen_stack_spec`` and any spec function that takes a provider, such as
``get_mlp_module_spec_for_backend``, build layers of ours.

Names of modules are Megatron's and Transformer Engine's: linear_qkv, linear_proj, linear_fc1, linear_fc2. One name of
theirs does not exist here: ``linear_qkv.layer_norm_weight`` and ``linear_fc1.layer_norm_weight`` of the fused layers.
The noise norm is a module of its own (``input_layernorm``, ``pre_mlp_layernorm``), since noise is set on it. The base
is no parameter and not part of a state dict: the loader installs it, from a ModelOpt checkpoint's own bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from megatron.core.models.backends import BackendSpecProvider

from megatron_qerl.errors import BackendUnavailableError, ConfigError, UserError
from megatron_qerl.layers.attention import SdpaCoreAttention
from megatron_qerl.layers.attention_te import TEPackedAttention
from megatron_qerl.layers.experts import FrozenExperts
from megatron_qerl.layers.linear import FrozenColumnParallelLinear, FrozenRowParallelLinear
from megatron_qerl.layers.lora import LoraSpec
from megatron_qerl.layers.norm import NoiseRMSNorm
from megatron_qerl.layers.router import FrozenRouter
from megatron_qerl.layers.routing import RoutingContext

logger = logging.getLogger(__name__)

AttentionName = Literal["sdpa", "transformer_engine"]


@dataclass(frozen=True)
class AttentionChoice:
    """Which attention a model uses, and why."""

    name: AttentionName
    reason: str


def _obstacle(*, shares_prompts: bool, dtype: torch.dtype) -> tuple[type[UserError], str, str] | None:
    """(error, reason, remedy) if Transformer Engine's attention cannot be used here, or None."""
    from megatron.core.extensions.transformer_engine import HAVE_TE

    sdpa = "set model.attention: sdpa"
    if dtype != torch.bfloat16:
        return (
            ConfigError,
            f"its fused kernels take BF16, the model is {dtype}",
            f"set model.dtype: bfloat16, or {sdpa}",
        )
    if shares_prompts:
        reason = "it knows whole sequences, and prompts are shared between responses"
        return ConfigError, reason, f"set train.share_prompt_prefix: false, or {sdpa}"
    if not torch.cuda.is_available():
        return BackendUnavailableError, "it computes on NVIDIA devices alone, and torch sees none", sdpa
    if not HAVE_TE:
        remedy = f"install it with `pip install 'megatron-qerl[gpu]'`, or {sdpa}"
        return BackendUnavailableError, "it is not installed", remedy
    return None


def choose_attention(setting: str, *, shares_prompts: bool, dtype: torch.dtype) -> AttentionChoice:
    """``model.attention`` -> what is used, logged with the reason.

    Args:
        setting: "auto", "sdpa" or "transformer_engine".
        shares_prompts: whether training packs share a group's prompt (``train.share_prompt_prefix``).
        dtype: of activations.

    Raises:
        ConfigError: ``transformer_engine`` contradicts another setting.
        BackendUnavailableError: ``transformer_engine`` cannot run on this machine.
    """
    obstacle = _obstacle(shares_prompts=shares_prompts, dtype=dtype)
    if setting == "sdpa":
        choice = AttentionChoice("sdpa", "model.attention names it")
    elif setting == "transformer_engine":
        if obstacle is not None:
            error, reason, remedy = obstacle
            raise error("model.attention", setting, reason, remedy)
        choice = AttentionChoice("transformer_engine", "model.attention names it")
    elif obstacle is not None:
        choice = AttentionChoice("sdpa", f"not transformer_engine: {obstacle[1]}")
    else:
        choice = AttentionChoice("transformer_engine", "packs are plain sequences in BF16 on a GPU")
    logger.info("model.attention: %s (%s)", choice.name, choice.reason)
    return choice


class FrozenNVFP4SpecProvider(BackendSpecProvider):  # type: ignore[misc]
    """Frozen linears with LoRA, noise norms, and SDPA or Transformer Engine's attention.

    Args:
        lora: adapter settings; None builds bare frozen linears.
        attention: what ``core_attention`` returns.
    """

    def __init__(self, lora: LoraSpec | None = None, *, attention: AttentionName = "sdpa") -> None:
        self.lora, self.attention = lora, attention

    def column_parallel_linear(self) -> Callable[..., FrozenColumnParallelLinear]:
        """linear_qkv and linear_fc1. The backward has no weight gradient and keeps no activation for the base."""
        return partial(FrozenColumnParallelLinear, lora=self.lora)

    def row_parallel_linear(self) -> Callable[..., FrozenRowParallelLinear]:
        """linear_proj and linear_fc2; told apart by the buffer name that Megatron passes."""
        return partial(FrozenRowParallelLinear, lora=self.lora)

    def fuse_layernorm_and_linear(self) -> bool:
        """Never: noise is set on the norm, which must be reachable as a module."""
        return False

    def column_parallel_layer_norm_linear(self) -> None:
        """There is none."""

    def layer_norm(
        self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False
    ) -> type[NoiseRMSNorm]:
        """NoiseRMSNorm, for hidden states and for heads alike.

        Args:
            rms_norm: must be true.
            for_qk, has_residual: make no difference; the residual is added by Megatron's bias-dropout-add.

        Raises:
            ConfigError: LayerNorm was asked for.
        """
        if not rms_norm:
            raise ConfigError(
                "normalization",
                "LayerNorm",
                "the frozen layers normalise by RMSNorm, whose scale carries the noise",
                "set normalization: RMSNorm in Megatron's config",
            )
        return NoiseRMSNorm

    def core_attention(self) -> type[Any]:
        """Core attention of packed and of cached sequences."""
        return TEPackedAttention if self.attention == "transformer_engine" else SdpaCoreAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Callable[..., FrozenExperts]:
        """Experts, called as Megatron's ``ExpertsBuilder``: (local experts, config, pg_collection=..., name=...).

        Args:
            moe_use_grouped_gemm: makes no difference; whether products are grouped is decided a product at a time.
        """
        return partial(FrozenExperts, lora=self.lora)

    def router(self, context: RoutingContext) -> Callable[..., FrozenRouter]:
        """The router of a mixture of experts."""
        return partial(FrozenRouter, context=context)

    def activation_func(self) -> None:
        """Megatron's own."""
