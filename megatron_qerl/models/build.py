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
from megatron_qerl.layers.lora import LoraSpec
from megatron_qerl.layers.provider import FrozenNVFP4SpecProvider, choose_attention
from megatron_qerl.layers.spec import frozen_stack_spec
from megatron_qerl.models.policy import PolicyModel
from megatron_qerl.models.shape import ModelShape, check_layout, read_shape, rotary_inverse_frequencies

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_config(
    shape: ModelShape, layout: ParallelSection, dtype: torch.dtype, recompute: str
) -> TransformerConfig:
    """Megatron's config of a dense decoder. One block is two hybrid layers, so ``num_layers`` is twice the blocks."""
    on_cpu = not torch.cuda.is_available()
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
        # Lengths differ between micro-batches; this is Megatron's switch for that, for dense models too.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # Over gloo the batched form gives silently wrong losses with interleaved stages.
        batch_p2p_comm=not on_cpu,
        batch_p2p_sync=not on_cpu,
        **recomputation,
    )


def layer_pattern(num_blocks: int, pipeline_size: int, virtual_size: int) -> str:
    """Hybrid pattern of a dense decoder, ``*-`` a block, ``|`` between pipeline segments; remainders go first."""
    segments = pipeline_size * virtual_size
    base, extra = divmod(num_blocks, segments)
    return "|".join("*-" * (base + (1 if s < extra else 0)) for s in range(segments))


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
) -> PolicyModel:
    """An unloaded model: adapters initialised, base absent, everything but the adapters frozen.

    Args:
        hf_config: contents of config.json.
        lora: adapter settings; None builds the bare base.
        seed: seeds the adapters.
        recompute: "none", "full", or "full_offload", which keeps the checkpoints in host memory.
        shares_prompts: whether training packs share a group's prompt; decides ``model.attention: auto``.

    Raises:
        CheckpointError: unknown family or feature.
        ConfigError: the layout does not fit the model, or the attention does not fit the packs.
        BackendUnavailableError: the attention asked for cannot run on this machine.
    """
    path = Path(model.path)
    shape = read_shape(hf_config, path)
    check_layout(shape, layout.tensor_model_parallel_size)
    config = transformer_config(shape, layout, DTYPES[model.dtype], recompute)
    spec = None
    if lora is not None:
        spec = LoraSpec(rank=lora.rank, alpha=lora.alpha, targets=lora.targets, seed=seed)
    attention = choose_attention(model.attention, shares_prompts=shares_prompts, dtype=DTYPES[model.dtype])
    provider = FrozenNVFP4SpecProvider(spec, attention=attention.name)
    virtual = layout.virtual_pipeline_model_parallel_size or 1
    policy = PolicyModel(
        config,
        frozen_stack_spec(provider, qk_norm=shape.family.qk_norm, offload_checkpoints=recompute == "full_offload"),
        vocab_size=padded_vocab(shape.vocab_size, layout.tensor_model_parallel_size),
        max_sequence_length=model.max_sequence_length,
        hybrid_layer_pattern=layer_pattern(shape.num_blocks, layout.pipeline_model_parallel_size, virtual),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=shape.tied,
        inv_freq=rotary_inverse_frequencies(hf_config, path),
        real_vocab_size=shape.vocab_size,
    )
    policy.attention = attention
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(".adapter." in name)
    return policy.to(torch.device(torch.cuda.current_device()))
