"""The module spec: which class sits where in Megatron's HybridModel.

A transformer block is two hybrid layers, attention (``*``) and an MLP (``-``) or a mixture of experts (``E``). Nothing
is patched into a live model; every class of ours arrives through this spec, and this spec takes them from the
``provider``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from megatron_qerl.layers.attention import CachedSelfAttention
from megatron_qerl.layers.mlp import FrozenMLP
from megatron_qerl.layers.moe import FrozenMoELayer, RoutedLayer, RouterInput
from megatron_qerl.layers.norm import NoiseRMSNorm
from megatron_qerl.layers.offload import CheckpointOffload
from megatron_qerl.layers.provider import FrozenNVFP4SpecProvider
from megatron_qerl.layers.routing import RoutingContext


class NoiseNormStack(HybridStack):  # type: ignore[misc]
    """HybridStack with our final norm, where Megatron builds Transformer Engine's whatever the spec says.

    Args:
        offload_checkpoints: keep recomputation checkpoints in host memory (``offload``).
        Others as in Megatron's HybridStack.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        post_layer_norm: bool = True,
        offload_checkpoints: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, *args, post_layer_norm=False, **kwargs)
        if self.post_process and post_layer_norm:
            self.final_norm = NoiseRMSNorm(config, config.hidden_size, eps=config.layernorm_epsilon)
        self.offload = CheckpointOffload() if offload_checkpoints else None

    def forward(self, hidden_states: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        """As HybridStack's."""
        entering = hidden_states if self.pre_process else self.input_tensor
        if self.offload is None or entering is None or not (self.training and torch.is_grad_enabled()):
            hidden = super().forward(hidden_states, *args, **kwargs)
        else:
            with self.offload.active(entering):
                hidden = super().forward(hidden_states, *args, **kwargs)
        # Outside: what the last norm saves is wanted at once.
        return self.final_norm(hidden) if hasattr(self, "final_norm") else hidden


def frozen_stack_spec(
    provider: FrozenNVFP4SpecProvider,
    *,
    qk_norm: bool,
    offload_checkpoints: bool = False,
    routing: RoutingContext | None = None,
    router_input: RouterInput = "noisy",
) -> ModuleSpec:
    """Spec of a decoder of the provider's layers.

    Args:
        provider: which class sits where.
        qk_norm: whether queries and keys are normalised a head (Qwen3).
        offload_checkpoints: keep recomputation checkpoints in host memory.
        routing: what the routers of a mixture of experts share.
        router_input: whether they see the norm with its noise.
    """
    norm = provider.layer_norm(rms_norm=True)
    head_norm = provider.layer_norm(rms_norm=True, for_qk=True) if qk_norm else None
    attention = ModuleSpec(
        module=CachedSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=provider.column_parallel_linear(),
            core_attention=provider.core_attention(),
            linear_proj=provider.row_parallel_linear(),
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    mlp = partial(
        FrozenMLP.as_mlp_submodule,
        submodules=MLPSubmodules(
            linear_fc1=provider.column_parallel_linear(), linear_fc2=provider.row_parallel_linear()
        ),
    )
    experts = ModuleSpec(
        module=RoutedLayer,
        params={"router_input": router_input},
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=norm,
            mlp=partial(
                FrozenMoELayer,
                submodules=MoESubmodules(
                    experts=provider.grouped_mlp_modules(moe_use_grouped_gemm=True),
                    router=provider.router(routing or RoutingContext()),
                ),
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    return ModuleSpec(
        module=NoiseNormStack,
        params={"offload_checkpoints": offload_checkpoints},
        submodules=HybridStackSubmodules(
            attention_layer=ModuleSpec(
                module=TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    input_layernorm=norm, self_attention=attention, self_attn_bda=get_bias_dropout_add
                ),
            ),
            mlp_layer=ModuleSpec(
                module=MLPLayer,
                submodules=TransformerLayerSubmodules(pre_mlp_layernorm=norm, mlp=mlp, mlp_bda=get_bias_dropout_add),
            ),
            moe_layer=experts,
        ),
    )
