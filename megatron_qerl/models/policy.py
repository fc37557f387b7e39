"""The policy: Megatron's HybridModel with its own forward.

HybridModel builds and shards the parts; the forward here differs in three ways. Rotary angles follow explicit position
ids (packed groups restart them), the head returns log-probabilities and entropies of chosen tokens instead of all
logits, and generation gets the logits of the last position only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, gather_from_tensor_model_parallel_region
from torch import Tensor

from megatron_qerl.layers.kernels import HeadShard, head_logits, linear_logprob


@dataclass(frozen=True)
class LogprobQuery:
    """Which log-probabilities a forward should return.

    Attributes:
        rows: int64 [n], rows of the pack whose hidden states predict the targets.
        targets: int64 [n], tokens to score.
        temperature: of the sampling distribution.
        chunk_rows: rows of logits alive at a time, or None to let the memory decide.
    """

    rows: Tensor
    targets: Tensor
    temperature: float
    chunk_rows: int | None


class PolicyModel(HybridModel):  # type: ignore[misc]
    """A decoder with a frozen base, adapters and noise norms.

    Args:
        inv_freq: FP32 [D/2], rotary inverse frequencies from the Hugging Face config.
        real_vocab_size: vocabulary without the padding that tensor parallelism may add.
        Others as in Megatron's HybridModel.
    """

    def __init__(self, *args: Any, inv_freq: Tensor, real_vocab_size: int, **kwargs: Any) -> None:
        super().__init__(*args, position_embedding_type="none", **kwargs)
        self.register_buffer("inv_freq", inv_freq.float(), persistent=False)
        self.real_vocab_size = real_vocab_size
        self._wide_head: Tensor | None = None

    def widen_head(self) -> None:
        """Keep an FP32 copy of the frozen head beside a BF16 one, for CPUs; counted as cache."""
        weight = self.head().weight
        if weight.dtype != torch.float32 and not weight.is_cuda:
            self._wide_head = weight.detach().float()

    @property
    def wide_head_bytes(self) -> int:
        """Bytes of the copy that ``widen_head`` made."""
        return 0 if self._wide_head is None else self._wide_head.numel() * 4

    def head(self) -> HeadShard:
        """This rank's slice of the output head."""
        weight = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )
        group = self.pg_collection.tp
        return HeadShard(weight, group.rank() * weight.shape[0], self.real_vocab_size, group, self._wide_head)

    def _rotary(self, position_ids: Tensor) -> Tensor:
        """Angles [S, B, 1, D] of position ids [B, S]."""
        angles = position_ids.t().float().unsqueeze(-1) * self.inv_freq
        return torch.cat((angles, angles), dim=-1).unsqueeze(2)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        inference_context: StaticInferenceContext | None = None,
        query: LogprobQuery | None = None,
    ) -> Any:
        """One pass.

        Args:
            input_ids: int64 [B, S]; [1, T] when packed.
            position_ids: int64 [B, S], each token's position in its own sequence.
            attention_mask: bool [B, 1, S, S_k], True where a query must not look; None is causal.
            packed_seq_params: structure of a packed batch.
            inference_context: key-value cache; its offset is advanced by S.
            query: what to score; without one the logits of the last position are returned.

        Returns:
            With a query: FP32 ([n] log-probabilities, [n] entropies). Without: FP32 logits [B, V] of the last position.
            On a pipeline stage that is not the last: hidden states [S, B, H].
        """
        hidden = self.embedding(input_ids=input_ids, position_ids=position_ids) if self.pre_process else None
        if hidden is not None and self.config.recompute_granularity is not None and torch.is_grad_enabled():
            # Megatron's checkpoint follows gradients through its inputs only. The embedding is frozen, so without this
            # the first layers' adapters, or all of them, would get no gradient and no error.
            hidden = hidden.detach().requires_grad_(True)
        hidden = self.decoder(
            hidden_states=hidden,
            attention_mask=attention_mask,
            inference_context=inference_context,
            rotary_pos_emb=self._rotary(position_ids),
            packed_seq_params=packed_seq_params,
        )
        if inference_context is not None:
            inference_context.sequence_len_offset += input_ids.shape[1]
        if not self.post_process:
            return hidden
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        head = self.head()
        if query is None:
            logits = head_logits(hidden[-1], head)
            return gather_from_tensor_model_parallel_region(logits, group=self.pg_collection.tp)[
                :, : self.real_vocab_size
            ]
        rows = hidden[:, 0].index_select(0, query.rows)
        return linear_logprob(rows, query.targets, head, temperature=query.temperature, chunk_rows=query.chunk_rows)
