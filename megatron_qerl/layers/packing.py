"""Packed batches whose responses share their prompt.

A group has G responses to one prompt. Packed the ordinary way the prompt is computed G times; here it appears once,
followed by the responses, and attention lets each response see the prompt and itself but not its siblings:

    | prompt | response 0 | response 1 | ... | next prompt | ...

Positions restart after the prompt for each response, so every token sees exactly what it would see in a sequence of
its own. A response's last token predicts nothing and is left out; its first token is predicted by the prompt's last.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass(frozen=True)
class Segment:
    """Where one prompt and its responses lie in the pack, as attention needs it.

    Attributes:
        begin, end: the prompt's rows.
        gather: int64 [G, L], rows of the responses padded to the longest (padding points at row ``begin``), or None.
        valid: int64 [n], positions in the flattened [G * L] that are real.
        rows: int64 [n], rows of those positions in the pack, in the same order.
        mask: bool [L, P + L], True where a response token may look: all of the prompt, itself and earlier.
        responses: (begin, end) rows of each response that shares the prompt and has any.
    """

    begin: int
    end: int
    gather: Tensor | None = None
    valid: Tensor | None = None
    rows: Tensor | None = None
    mask: Tensor | None = None
    responses: tuple[tuple[int, int], ...] = ()


@dataclass
class PackedGroups(PackedSeqParams):  # type: ignore[misc]
    """Megatron's packed-sequence parameters with the tree structure added.

    Attributes:
        segments: of the pack; none where ``context`` takes their place.
        context: the ``pack_shard.ContextView`` of a pack whose rows are spread over context-parallel ranks.
        routing: experts that each row must go to (``routing.RoutingRecord``); None leaves them to the routers.
        shard: what ``pack_shard.shard_pack`` found for this rank, kept for the next forward of the same pack.
    """

    segments: tuple[Segment, ...] = field(default=())
    context: Any = None
    routing: Any = None
    shard: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class PackedTokens:
    """A micro-batch ready for the model.

    Attributes:
        token_ids: int64 [1, T].
        position_ids: int64 [1, T].
        params: attention structure.
        logit_rows: int64 [n], row of T whose hidden state predicts each response token.
        targets: int64 [n], the response tokens, response after response.
    """

    token_ids: Tensor
    position_ids: Tensor
    params: PackedGroups
    logit_rows: Tensor
    targets: Tensor

    @property
    def total_tokens(self) -> int:
        return self.token_ids.shape[1]


def _segment(begin: int, prompt_tokens: int, lengths: Sequence[int], device: torch.device) -> tuple[Segment, int]:
    """Segment of one prompt with responses of ``lengths`` input tokens; returns it and the row after its end."""
    end = begin + prompt_tokens
    longest = max(lengths, default=0)
    if longest == 0:
        return Segment(begin, end), end
    starts = torch.tensor([end + sum(lengths[:i]) for i in range(len(lengths))])
    column = torch.arange(longest)
    real = column[None, :] < torch.tensor(lengths)[:, None]
    gather = torch.where(real, starts[:, None] + column[None, :], begin)
    valid = real.reshape(-1).nonzero().squeeze(1)
    mask = torch.ones(longest, prompt_tokens + longest, dtype=torch.bool).tril(prompt_tokens)
    segment = Segment(
        begin,
        end,
        gather.to(device),
        valid.to(device),
        gather.reshape(-1)[valid].to(device),
        mask.to(device),
        tuple((s, s + n) for s, n in zip(starts.tolist(), lengths, strict=True) if n),
    )
    return segment, end + sum(lengths)


def pack(
    groups: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]],
    device: torch.device,
    *,
    share_prefix: bool,
) -> PackedTokens:
    """Pack (prompt, responses) groups into one sequence.

    Args:
        groups: token ids of each prompt and of its responses; no response may be empty.
        share_prefix: False repeats the prompt before every response, for attention kernels that know only sequences.
    """
    if not share_prefix:
        groups = [(prompt, [response]) for prompt, responses in groups for response in responses]
    tokens: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []
    logit_rows: list[int] = []
    targets: list[int] = []
    boundaries = [0]
    for prompt, responses in groups:
        begin, size = len(tokens), len(prompt)
        tokens.extend(prompt)
        positions.extend(range(size))
        if share_prefix:
            segment, _ = _segment(begin, size, [len(r) - 1 for r in responses], device)
        else:
            segment, _ = _segment(begin, size + len(responses[0]) - 1, [], device)
        segments.append(segment)
        for response in responses:
            start = len(tokens)
            tokens.extend(response[:-1])
            positions.extend(range(size, size + len(response) - 1))
            logit_rows.extend([begin + size - 1, *range(start, start + len(response) - 1)])
            targets.extend(response)
        boundaries.append(len(tokens))
    cu_seqlens = torch.tensor(boundaries, dtype=torch.int32, device=device)
    longest = max(b - a for a, b in itertools.pairwise(boundaries))
    params = PackedGroups(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        segments=tuple(segments),
    )

    def to(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return PackedTokens(to(tokens)[None], to(positions)[None], params, to(logit_rows), to(targets))
