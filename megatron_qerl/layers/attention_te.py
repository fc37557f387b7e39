"""Attention of packed sequences by Transformer Engine, one fused kernel for the whole pack.

It knows sequences by their boundaries (``cu_seqlens``) and nothing else, so each response must carry its own prompt:
``train.share_prompt_prefix: false``. What has no boundaries, generation with a key-value cache and batches under a
mask, goes to SDPA, whose results differ in rounding only.

Under context parallelism it takes this rank's two chunks of each sequence, as ``pack_shard`` cuts them, and the
boundaries of the padded whole; ``cp_comm_type`` of Megatron's config says how keys and values travel (p2p by default).

Its backward sums the query's gradient in no fixed order unless NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 is set; a resumed run
is bit-equal only with that.

Transformer Engine itself is reached through Megatron's wrapper, which is imported when a layer is built.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn

from megatron_qerl.errors import FaultError
from megatron_qerl.layers.attention import SdpaCoreAttention
from megatron_qerl.layers.packing import PackedGroups


class TEPackedAttention(nn.Module):
    """Core attention: packs by ``TEDotProductAttention``, the rest by SDPA. Constructor as Megatron's builder."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        from megatron.core.extensions import transformer_engine as edge

        settings: dict[str, Any] = {
            "config": config,
            "layer_number": layer_number,
            "attn_mask_type": attn_mask_type,
            "attention_type": attention_type,
            "cp_comm_type": cp_comm_type,
            "softmax_scale": softmax_scale,
            "pg_collection": pg_collection,
        }
        self.packed = edge.TEDotProductAttention(**settings)
        self.unpacked = SdpaCoreAttention(**settings)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        attn_mask_type: AttnMaskType,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedGroups | None = None,
    ) -> Tensor:
        """Attend; shapes as in ``SdpaCoreAttention.forward``.

        Raises:
            FaultError: the pack shares prompts. Its boundaries are those of groups, and a response would see its
                siblings.
        """
        if packed_seq_params is None:
            result: Tensor = self.unpacked(query, key, value, attention_mask, attention_bias=attention_bias)
            return result
        context = packed_seq_params.context
        if any(s.gather is not None for s in packed_seq_params.segments) or (context and context.shares_prompts):
            raise FaultError(
                "attention by Transformer Engine",
                "was given a pack whose responses share a prompt, which it cannot express",
                "pack with train.share_prompt_prefix: false, or set model.attention: sdpa",
            )
        out: Tensor = self.packed(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            None,
            attn_mask_type=attn_mask_type,
            attention_bias=attention_bias,
            packed_seq_params=packed_seq_params,
        )
        return out.reshape(query.shape[0], -1)
