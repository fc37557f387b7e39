"""The module spec: which class sits where in Megatron's HybridModel.

A dense transformer block is two hybrid layers, attention (``*``) and MLP (``-``). Nothing is patched into a live
model; every class of ours arrives through this spec.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_qerl.layers.attention import CachedSelfAttention, SdpaCoreAttention
from megatron_qerl.layers.linear import FrozenColumnParallelLinear, FrozenRowParallelLinear
from megatron_qerl.layers.lora import LoraSpec
from megatron_qerl.layers.norm import NoiseRMSNorm


class NoiseNormStack(HybridStack):  # type: ignore[misc]
    """HybridStack with our final norm: Megatron builds Transformer Engine's there, whatever the spec says."""

    def __init__(self, config: TransformerConfig, *args: Any, post_layer_norm: bool = True, **kwargs: Any) -> None:
        super().__init__(config, *args, post_layer_norm=False, **kwargs)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            self.final_norm = NoiseRMSNorm(config, config.hidden_size, eps=config.layernorm_epsilon)


def frozen_stack_spec(lora: LoraSpec | None, *, qk_norm: bool) -> ModuleSpec:
    """Spec of a dense decoder with frozen linears, LoRA and noise norms.

    Args:
        lora: adapter settings; None builds a bare frozen model.
        qk_norm: whether queries and keys are normalised a head (Qwen3).
    """
    column = partial(FrozenColumnParallelLinear, lora=lora)
    row = partial(FrozenRowParallelLinear, lora=lora)
    head_norm = NoiseRMSNorm if qk_norm else None
    attention = ModuleSpec(
        module=CachedSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=column,
            core_attention=SdpaCoreAttention,
            linear_proj=partial(row, projection="o_proj"),
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    mlp = partial(
        MLP.as_mlp_submodule,
        submodules=MLPSubmodules(linear_fc1=column, linear_fc2=partial(row, projection="down_proj")),
    )
    return ModuleSpec(
        module=NoiseNormStack,
        submodules=HybridStackSubmodules(
            attention_layer=ModuleSpec(
                module=TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    input_layernorm=NoiseRMSNorm, self_attention=attention, self_attn_bda=get_bias_dropout_add
                ),
            ),
            mlp_layer=ModuleSpec(
                module=MLPLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=NoiseRMSNorm, mlp=mlp, mlp_bda=get_bias_dropout_add
                ),
            ),
        ),
    )
