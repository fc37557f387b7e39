"""Config -> an empty Megatron policy model on this rank."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig

from megatron_qerl.config.schema import LoraSection, ModelSection, ParallelSection
from megatron_qerl.errors import ConfigError
from megatron_qerl.layers.lora import LoraSpec
from megatron_qerl.layers.moe import RouterInput
from megatron_qerl.layers.provider import FrozenNVFP4SpecProvider, choose_attention
from megatron_qerl.layers.routing import RoutingContext
from megatron_qerl.layers.spec import frozen_stack_spec
from megatron_qerl.models.policy import PolicyChunks, PolicyModel
from megatron_qerl.models.shape import ModelShape, check_experts, check_layout, read_shape, rotary_inverse_frequencies
from megatron_qerl.parallel.cpu import megatron_calls

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_config(
    shape: ModelShape, layout: ParallelSection, dtype: torch.dtype, recompute: str
) -> TransformerConfig:
    """Megatron's config of a decoder. One block is two hybrid layers, so ``num_layers`` is twice the blocks."""
    on_cpu = not torch.cuda.is_available()
    interleaved = layout.virtual_pipeline_model_parallel_size is not None
    recomputation: dict[str, Any] = {}
    if recompute != "none":
        # A checkpoint a block. Where checkpoints cost no device memory, one for attention and one for the MLP: then
        # backward holds the activations of one of them at a time.
        recomputation = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1 if recompute == "full_offload" else 2,
        }
    return TransformerConfig(
        num_layers=2 * shape.num_blocks,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.kv_channels,
        normalization="RMSNorm",
        layernorm_epsilon=shape.layernorm_epsilon,
        qk_layernorm=shape.family.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
        context_parallel_size=layout.context_parallel_size,
        sequence_parallel=layout.sequence_parallel,
        use_cpu_initialization=on_cpu,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        # Lengths differ between micro-batches; this is Megatron's switch for that between pipeline stages, which it
        # grants with the all-to-all dispatcher alone, for dense models too.
        variable_seq_lengths=layout.token_dispatcher == "alltoall",
        moe_token_dispatcher_type=layout.token_dispatcher,
        # With two interleaved ranks the rank before is also the rank after, and batched sends to it would be taken for
        # one another: silently wrong losses. Megatron's other form sends one direction at a time.
        batch_p2p_comm=not on_cpu and not interleaved,
        batch_p2p_sync=not on_cpu and not interleaved,
        overlap_p2p_comm=interleaved,
        **recomputation,
        **_expert_settings(shape, layout),
    )


def _expert_settings(shape: ModelShape, layout: ParallelSection) -> dict[str, Any]:
    """Megatron's settings of a mixture of experts; none for a dense model."""
    experts = shape.experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.count,
        "moe_router_topk": experts.per_token,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        # Softmax over the chosen alone is the softmax over all, divided by the sum of the chosen.
        "moe_router_pre_softmax": not experts.renormalise,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_score_function": "softmax",
        "expert_model_parallel_size": layout.expert_model_parallel_size,
        "expert_tensor_parallel_size": layout.expert_tensor_parallel_size or layout.tensor_model_parallel_size,
    }


def layer_pattern(num_blocks: int, pipeline_size: int, virtual_size: int, *, experts: bool = False) -> str:
    """Hybrid pattern, ``*-`` a dense block, ``*E`` one of experts, ``|`` between pipeline segments; extras go first."""
    block = "*E" if experts else "*-"
    segments = pipeline_size * virtual_size
    base, extra = divmod(num_blocks, segments)
    return "|".join(block * (base + (1 if s < extra else 0)) for s in range(segments))


def check_pipeline(shape: ModelShape, layout: ParallelSection) -> None:
    """Refuse pipeline stages that the model's blocks or Megatron's schedules cannot fill.

    Raises:
        ConfigError: names the size and the rule.
    """
    stages, virtual = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size
    if virtual is not None and (virtual == 1 or stages == 1):
        raise ConfigError(
            "parallel.virtual_pipeline_model_parallel_size",
            virtual,
            "interleaving means two chunks or more on each of two pipeline ranks or more",
            "leave it out, or raise both sizes",
        )
    if stages > 1 and layout.token_dispatcher != "alltoall":
        raise ConfigError(
            "parallel.token_dispatcher",
            layout.token_dispatcher,
            "Megatron passes micro-batches of different lengths between pipeline stages with alltoall alone",
            "use alltoall",
        )
    chunks = stages * (virtual or 1)
    if chunks > shape.num_blocks:
        raise ConfigError(
            "parallel.pipeline_model_parallel_size",
            stages if virtual is None else f"{stages} x {virtual} interleaved",
            f"each stage needs a block, and the model has {shape.num_blocks}",
            f"use at most {shape.num_blocks} stages in all",
        )


def padded_vocab(vocab_size: int, tensor_size: int) -> int:
    """Vocabulary rounded up so that it splits over the tensor-parallel ranks."""
    return -(-vocab_size // tensor_size) * tensor_size


def build_policy(
    hf_config: Mapping[str, Any],
    model: ModelSection,
    layout: ParallelSection,
    lora: LoraSection | None,
    *,
    seed: int,
    recompute: str = "none",
    shares_prompts: bool = True,
    router_input: RouterInput = "noisy",
) -> PolicyChunks:
    """An unloaded model: adapters initialised, base absent, everything but the adapters frozen.

    Args:
        hf_config: contents of config.json.
        lora: adapter settings; None builds the bare base.
        seed: seeds the adapters.
        recompute: "none", "full", or "full_offload", which keeps the checkpoints in host memory.
        shares_prompts: whether training packs share a group's prompt; decides ``model.attention: auto``, which is sdpa
            under context parallelism.
        router_input: whether a mixture of experts routes by the norm with its noise.

    Raises:
        CheckpointError: unknown family or feature.
        ConfigError: the layout does not fit the model, or the attention does not fit the packs.
        BackendUnavailableError: the attention asked for cannot run on this machine.
    """
    path = Path(model.path)
    shape = read_shape(hf_config, path)
    check_layout(shape, layout.tensor_model_parallel_size)
    check_pipeline(shape, layout)
    check_experts(shape, layout)
    config = transformer_config(shape, layout, DTYPES[model.dtype], recompute)
    spec = None
    if lora is not None:
        spec = LoraSpec(rank=lora.rank, alpha=lora.alpha, targets=lora.targets, seed=seed, expert_mode=lora.expert_mode)
    wanted = "sdpa" if model.attention == "auto" and layout.context_parallel_size > 1 else model.attention
    attention = choose_attention(wanted, shares_prompts=shares_prompts, dtype=DTYPES[model.dtype])
    provider = FrozenNVFP4SpecProvider(spec, attention=attention.name)
    virtual = layout.virtual_pipeline_model_parallel_size or 1
    pattern = layer_pattern(
        shape.num_blocks, layout.pipeline_model_parallel_size, virtual, experts=shape.experts is not None
    )
    routing = RoutingContext()
    inv_freq = rotary_inverse_frequencies(hf_config, path)

    def chunk(stage: int | None) -> PolicyModel:
        return PolicyModel(
            config,
            frozen_stack_spec(
                provider,
                qk_norm=shape.family.qk_norm,
                offload_checkpoints=recompute == "full_offload",
                routing=routing,
                router_input=router_input,
            ),
            vocab_size=padded_vocab(shape.vocab_size, layout.tensor_model_parallel_size),
            max_sequence_length=model.max_sequence_length,
            hybrid_layer_pattern=pattern,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=shape.tied,
            inv_freq=inv_freq,
            real_vocab_size=shape.vocab_size,
            vp_stage=stage,
        )

    # Tied weights on two stages are made equal while the chunks are built, by a copy that names the GPU.
    with megatron_calls():
        policy = PolicyChunks([chunk(i) for i in range(virtual)] if virtual > 1 else [chunk(None)], attention)
    policy.routing = routing
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(".adapter." in name)
    return policy.to(torch.device(torch.cuda.current_device()))
