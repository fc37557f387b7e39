"""Attention on torch's scaled_dot_product_attention, for what Megatron's local attention asserts away.

It takes packed groups that share their prompt (``packing``), and a key-value cache that stores keys already rotated,
head-major, so that a decode step touches only the new token. Both plug in through Megatron's module specs.

On a GPU no mask of the whole pack is ever made. Each prompt, or each whole sequence where prompts are not shared, is
one causal call, which flash attention takes; the responses of a group are one call with a mask [L, P + L], which the
memory-efficient kernel takes. ``attention_te`` computes plain packs in one call for all sequences.

Under context parallelism a rank has its own queries and gathers everybody's keys and values, once a layer; the backward
of the gathering sums what the ranks found for each key. Each run of neighbouring queries is one call with a mask of its
own size. That serves CPUs and shared prompts; long plain packs on GPUs belong to ``attention_te``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from megatron_qerl.layers.pack_shard import ContextView
from megatron_qerl.layers.packing import PackedGroups, Segment


def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """scaled_dot_product_attention where its defaults are bad.

    On a CPU in FP32: its BF16 backward is four times slower there, and less exact. On a GPU the kernel that takes a
    mask or FP32 wants as many key heads as query heads; asked to share them, torch would write out all scores.
    """
    if query.device.type == "cpu" and query.dtype == torch.bfloat16:
        wide = scaled_dot_product_attention(query.float(), key.float(), value.float(), **options)
        return wide.to(query.dtype)
    shared = query.shape[1] // key.shape[1]
    if query.is_cuda and shared > 1 and (options.get("attn_mask") is not None or query.dtype == torch.float32):
        key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    return scaled_dot_product_attention(query, key, value, **options)


class KVCache(StaticInferenceContext):  # type: ignore[misc]
    """Keys and values of a batch of rows.

    ``key_value_memory_dict`` maps a layer number to (keys, values), each [B, n_kv, S, D], keys after RoPE.
    ``sequence_len_offset`` is the number of positions already written.
    """

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write key and value [s, B, n_kv, D] behind what is there; return all of both as [S', B, n_kv, D] views."""
        begin = self.sequence_len_offset
        end = begin + key.shape[0]
        if layer not in self.key_value_memory_dict:
            shape = (key.shape[1], key.shape[2], self.max_sequence_length, key.shape[3])
            self.key_value_memory_dict[layer] = (key.new_empty(shape), value.new_empty(shape))
        keys, values = self.key_value_memory_dict[layer]
        assert end <= keys.shape[2], f"the cache has {keys.shape[2]} positions, {end} are needed"
        keys[:, :, begin:end] = key.permute(1, 2, 0, 3)
        values[:, :, begin:end] = value.permute(1, 2, 0, 3)
        return keys[:, :, :end].permute(2, 0, 1, 3), values[:, :, :end].permute(2, 0, 1, 3)

    def select(self, rows: Tensor) -> None:
        """Keep (and repeat) ``rows`` int64 [B'] of the batch, in that order."""
        for layer, (keys, values) in self.key_value_memory_dict.items():
            self.key_value_memory_dict[layer] = (keys.index_select(0, rows), values.index_select(0, rows))
        self.max_batch_size = len(rows)

    @property
    def nbytes(self) -> int:
        return sum(k.numel() * k.element_size() * 2 for k, _ in self.key_value_memory_dict.values())


class CachedSelfAttention(SelfAttention):  # type: ignore[misc]
    """Megatron's self-attention with keys rotated before they are cached, by each row's own positions."""

    def _adjust_key_value_for_inference(
        self,
        inference_context: KVCache | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotary_pos_emb: tuple[Tensor, Tensor],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Any, AttnMaskType, None]:
        q_emb, k_emb = rotary_pos_emb
        if inference_context is None:
            # Angles come a token, packed or not, so rotating needs no sequence boundaries; Megatron's packed rotation
            # would read them back from the device, a dozen times a layer.
            query, key = (
                apply_rotary_pos_emb(t, emb, config=self.config, cp_group=self.pg_collection.cp)
                for t, emb in ((query, q_emb), (key, k_emb))
            )
            return query, key, value, (None, None), self.attn_mask_type, None
        key = apply_rotary_pos_emb(key, k_emb, config=self.config, cp_group=self.pg_collection.cp)
        key, value = inference_context.append(self.layer_number, key, value)
        return query, key, value, (q_emb, None), self.attn_mask_type, None


class SdpaCoreAttention(nn.Module):
    """Core attention for packed groups and for cached decoding. Constructor as Megatron's core-attention builder."""

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
        self.context_group = pg_collection.cp if pg_collection else parallel_state.get_context_parallel_group()
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedGroups | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: packed [T, n_q, D], otherwise [s, B, n_q, D]. A pack split over ranks comes as this rank's rows.
            key, value: packed [T, n_kv, D], otherwise [S, B, n_kv, D].
            attention_mask: bool [B, 1, s, S], True where a query must NOT look (Megatron's convention); None is causal.

        Returns:
            Packed [T, n_q * D], otherwise [s, B, n_q * D].
        """
        assert attention_bias is None, "attention bias is not supported"
        if packed_seq_params is not None and packed_seq_params.context is not None:
            return self._across_ranks(query, key, value, packed_seq_params.context)
        if packed_seq_params is not None:
            return self._packed(query, key, value, packed_seq_params)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        allowed = None if attention_mask is None else ~attention_mask
        if query.shape[0] == 1:
            # One query a row: its heads that share a key become the query length, so no key is copied or repeated.
            rows, heads, _, size = q.shape
            out = attend(
                q.reshape(rows, k.shape[1], heads // k.shape[1], size), k, v, attn_mask=allowed, scale=self.scale
            )
            return out.reshape(1, rows, heads * size)
        out = attend(q, k, v, attn_mask=allowed, is_causal=allowed is None, scale=self.scale, enable_gqa=True)
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, params: PackedGroups) -> Tensor:
        pieces = [self._segment(query, key, value, segment) for segment in params.segments]
        if all(segment.gather is None for segment in params.segments):
            return torch.cat([o for _, o in pieces]).reshape(query.shape[0], -1)  # whole sequences, already in order
        out = torch.empty_like(query)
        rows = torch.cat([r for r, _ in pieces])
        out = torch.index_copy(out, 0, rows, torch.cat([o for _, o in pieces]))
        return out.reshape(query.shape[0], -1)

    def _across_ranks(self, query: Tensor, key: Tensor, value: Tensor, view: ContextView) -> Tensor:
        """This rank's queries against the keys and values of the whole pack."""
        both = torch.cat((key, value), dim=-1)
        # Forward gathers, backward reduce-scatters: each rank's loss is of other tokens, so key gradients add up.
        both = gather_from_sequence_parallel_region(both, group=self.context_group).index_select(0, view.order)
        keys, values = both.split(key.shape[-1], dim=-1)
        outputs = []
        for run in view.queries:
            q = query[run.rows].transpose(0, 1)[None]
            k, v = (torch.cat([t[r] for r in run.keys]).transpose(0, 1)[None] for t in (keys, values))
            rows, columns = q.shape[2], k.shape[2]
            seen = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril(columns - rows)
            out = attend(q, k, v, attn_mask=seen, scale=self.scale, enable_gqa=True)
            outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs).reshape(query.shape[0], -1)

    def _segment(self, query: Tensor, key: Tensor, value: Tensor, segment: Segment) -> tuple[Tensor, Tensor]:
        """Rows of one segment and their attention output [rows, n_q, D]."""
        prompt = slice(segment.begin, segment.end)
        q, k, v = (t[prompt].transpose(0, 1)[None] for t in (query, key, value))
        out = attend(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
        rows = torch.arange(segment.begin, segment.end, device=query.device)
        outputs = out[0].transpose(0, 1)
        if segment.gather is None or segment.valid is None or segment.rows is None:
            return rows, outputs
        responses = segment.gather.shape[0]
        own = [t[segment.gather].transpose(1, 2) for t in (query, key, value)]
        k = torch.cat((k.expand(responses, -1, -1, -1), own[1]), dim=2)
        v = torch.cat((v.expand(responses, -1, -1, -1), own[2]), dim=2)
        out = attend(own[0], k, v, attn_mask=segment.mask, scale=self.scale, enable_gqa=True)
        flat = out.transpose(1, 2).reshape(-1, *query.shape[1:])
        return torch.cat((rows, segment.rows)), torch.cat((outputs, flat[segment.valid]))
