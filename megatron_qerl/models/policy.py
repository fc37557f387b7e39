"""The policy: Megatron's HybridModel with its own forward, and the pieces of it that one rank holds.

HybridModel builds and shards the parts; the forward here differs in four ways. Rotary angles follow explicit position
ids (packed groups restart them), the head returns log-probabilities and entropies of chosen tokens instead of all
logits, generation gets the logits of the last position only, and a pack is cut for context parallelism inside, so that
callers pass whole packs and get whole results on every layout.

A pipeline rank holds one chunk of layers, or several when stages are interleaved; ``PolicyChunks`` is all of them.
Training hands the chunks to Megatron's schedules. Everything else calls ``PolicyChunks`` like a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, gather_from_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_qerl.errors import FaultError
from megatron_qerl.layers.kernels import HeadShard, head_logits, linear_logprob
from megatron_qerl.layers.pack_shard import Cut, PackShard, shard_pack
from megatron_qerl.layers.routing import RoutingContext


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


class _Assembled(torch.autograd.Function):
    """FP32 [n] on every context-parallel rank from each rank's own [m].

    Each rank computes the same loss from all n, so its own gradient is already there: backward takes it out, and sums
    nothing. What each rank's tokens owe to another's keys is summed where keys are gathered.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, places: Tensor, total: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(places)
        whole = own.new_zeros(total)
        whole[places] = own
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return grad[places], None, None, None


class PolicyModel(HybridModel):  # type: ignore[misc]
    """One chunk of a decoder with a frozen base, adapters and noise norms; all of it without pipeline parallelism.

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

    def shard(self, params: PackedSeqParams | None, total: int) -> PackShard | None:
        """This rank's part of a pack of ``total`` rows; None if that is all of it, or no pack."""
        if params is None:
            return None
        context = self.pg_collection.cp
        split = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        return shard_pack(params, total, Cut(context.rank(), context.size(), split))

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
            inference_context: key-value cache, not advanced.
            query: what to score; without one the logits of the last position are returned.

        Returns:
            With a query: FP32 ([n] log-probabilities, [n] entropies). Without: FP32 logits [B, V] of the last position.
            On a pipeline stage that is not the last: hidden states [S, B, H].
        """
        shard = self.shard(packed_seq_params, input_ids.shape[1])
        if shard is not None:
            input_ids, position_ids = input_ids[:, shard.source], position_ids[:, shard.source]
            routing = getattr(packed_seq_params, "routing", None)
            packed_seq_params = shard.params
            shard.params.routing = None if routing is None else routing.rows(shard.source.cpu())
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
        return self._score(hidden[:, 0], query, shard)

    def _score(self, hidden: Tensor, query: LogprobQuery, shard: PackShard | None) -> tuple[Tensor, Tensor]:
        """FP32 ([n] log-probabilities, [n] entropies) from hidden states [T, H] of this rank's rows."""
        places = None
        rows, targets = query.rows, query.targets
        if shard is not None and shard.cut.context_size > 1:
            rows = shard.local[rows]
            places = (rows >= 0).nonzero().squeeze(1)
            rows, targets = rows[places], targets[places]
        logprobs, entropies = linear_logprob(
            hidden.index_select(0, rows),
            targets,
            self.head(),
            temperature=query.temperature,
            chunk_rows=query.chunk_rows,
        )
        if places is None:
            return logprobs, entropies
        total, group = query.rows.numel(), self.pg_collection.cp
        return _Assembled.apply(logprobs, places, total, group), _Assembled.apply(entropies, places, total, group)


class PolicyChunks(nn.Module):
    """What this rank holds of the policy.

    Attributes:
        chunks: this rank's chunks, first layers first. With P pipeline ranks chunk i of rank r is stage i P + r.
        attention: which attention the layers use, and why.
        routing: what the routers of a mixture of experts look at; records and replays their choices.
    """

    def __init__(self, chunks: Sequence[PolicyModel], attention: Any = None) -> None:
        super().__init__()
        self.chunks = nn.ModuleList(chunks)
        self.attention = attention
        self.routing = RoutingContext()

    @property
    def models(self) -> list[PolicyModel]:
        """``chunks``, typed."""
        return list(self.chunks)  # type: ignore[arg-type]

    @property
    def config(self) -> TransformerConfig:
        """Megatron's config, one for all chunks."""
        return self.models[0].config

    @property
    def real_vocab_size(self) -> int:
        """Vocabulary without padding."""
        return self.models[0].real_vocab_size

    @property
    def inv_freq(self) -> Tensor:
        """FP32 [D/2], rotary inverse frequencies; also tells the device."""
        return self.models[0].inv_freq

    @property
    def post_process(self) -> bool:
        """Whether this rank holds the head."""
        return bool(self.models[-1].post_process)

    def widen_head(self) -> None:
        """As ``PolicyModel.widen_head``; only where the head is."""
        if self.post_process:
            self.models[-1].widen_head()

    @property
    def wide_head_bytes(self) -> int:
        """Bytes of the copy that ``widen_head`` made."""
        return self.models[-1].wide_head_bytes

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
        """One pass through all stages; all ranks of a pipeline call it together, with the same arguments.

        Args:
            inference_context: key-value cache; its offset is advanced by S.
            Others as in ``PolicyModel.forward``.

        Returns:
            What the last stage of ``PolicyModel.forward`` returns, on every rank.

        Raises:
            FaultError: a gradient was asked for across stages, which only Megatron's schedules can give.
        """
        arguments = {"packed_seq_params": packed_seq_params, "inference_context": inference_context, "query": query}
        if self.models[0].pg_collection.pp.size() == 1:
            result = self.models[0](input_ids, position_ids, attention_mask, **arguments)
        else:
            if torch.is_grad_enabled():
                raise FaultError(
                    "a forward through pipeline stages",
                    "was called with gradients enabled, and no gradient crosses stages here",
                    "call it under torch.no_grad(), or train through trainer.step",
                )
            result = self._through_stages(input_ids, position_ids, attention_mask, arguments)
        if inference_context is not None:
            inference_context.sequence_len_offset += input_ids.shape[1]
        return result

    def _through_stages(
        self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor | None, arguments: dict[str, Any]
    ) -> Any:
        """Hand the hidden states from stage to stage, then the result from the last stage to all."""
        group = self.models[0].pg_collection.pp
        rank, size = group.rank(), group.size()
        stages = size * len(self.chunks)
        hidden: Tensor | None = None
        output: Any = None
        for stage in range(stages):
            if stage % size == rank:
                chunk = self.models[stage // size]
                chunk.set_input_tensor(hidden)
                output = chunk(input_ids, position_ids, attention_mask, **arguments)
                chunk.set_input_tensor(None)
                if stage + 1 < stages:
                    dist.send(output.contiguous(), group=group, group_dst=(rank + 1) % size)
            elif (stage + 1) % size == rank and stage + 1 < stages:
                hidden = self._empty_hidden(input_ids, arguments["packed_seq_params"])
                dist.recv(hidden, group=group, group_src=stage % size)
        query: LogprobQuery | None = arguments["query"]
        if query is not None:
            both = torch.stack(output) if rank == size - 1 else self.inv_freq.new_empty(2, query.rows.numel())
            dist.broadcast(both, group=group, group_src=size - 1)
            return both[0], both[1]
        if rank != size - 1:
            output = self.inv_freq.new_empty(input_ids.shape[0], self.real_vocab_size)
        output = output.contiguous()
        dist.broadcast(output, group=group, group_src=size - 1)
        return output

    def _empty_hidden(self, input_ids: Tensor, params: PackedSeqParams | None) -> Tensor:
        """Room for the hidden states that the stage before sends."""
        config = self.config
        rows = input_ids.shape[1]
        shard = self.models[0].shard(params, rows)
        if shard is not None:
            rows = shard.source.numel()
        if config.sequence_parallel:
            rows //= config.tensor_model_parallel_size
        return torch.empty(
            rows, input_ids.shape[0], config.hidden_size, dtype=config.params_dtype, device=input_ids.device
        )
