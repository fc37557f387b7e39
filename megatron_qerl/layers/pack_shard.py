"""Which rows of a pack one rank computes, under sequence and context parallelism.

Every rank is given the whole pack. Here it is padded so that it can be cut, and this rank's rows are chosen; everything
outside the model speaks of the rows of the pack as it was.

Context parallelism of size C cuts every sequence (a prompt, or a response behind its prompt) into 2 C chunks of equal
length, and rank r takes chunks r and 2 C - 1 - r: a late token looks at more keys than an early one, and this pairing
gives each rank the same work. It is the layout that Megatron and Transformer Engine use for packed sequences. Padding
stands behind a sequence's real tokens, where causality hides it, and never between a prompt and its responses.

Sequence parallelism of size P needs a number of rows that P divides. A sequence of padding at the pack's end fills it
up; nothing looks at it and nothing scores it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_qerl.layers.packing import PackedGroups, Segment


@dataclass(frozen=True)
class Cut:
    """How a pack is cut: this rank's place among ``context_size``, and what the number of its rows must divide by."""

    context_rank: int
    context_size: int
    multiple: int


@dataclass(frozen=True)
class Queries:
    """A run of this rank's rows that are neighbours in their sequence, and what they may look at.

    Attributes:
        rows: the run, in this rank's rows.
        keys: ranges of rows of the padded pack, a shared prompt first, the sequence up to the run's last row after it.
            Query i of n sees all but the last n - 1 - i of those keys.
    """

    rows: slice
    keys: tuple[slice, ...]


@dataclass(frozen=True)
class ContextView:
    """What attention needs to see the other ranks' rows.

    Attributes:
        order: int64 [T'], row of the rank-by-rank gathered pack that each row of the padded pack is.
        queries: all rows of this rank, run after run.
        shares_prompts: whether a response's keys begin with a prompt that others share.
    """

    order: Tensor
    queries: tuple[Queries, ...]
    shares_prompts: bool


@dataclass(frozen=True)
class PackShard:
    """This rank's part of a pack of T rows.

    Attributes:
        cut: what it was made for.
        source: int64 [T_local], row of the pack whose token and position each local row has; padding repeats row 0.
        local: int64 [T], local row of each row of the pack, or -1 where another rank holds it.
        params: the structure of the padded pack, for the layers.
    """

    cut: Cut
    source: Tensor
    local: Tensor
    params: PackedGroups


@dataclass(frozen=True)
class _Sequence:
    """Rows of the pack that are causal among themselves, and which earlier sequence they also see."""

    begin: int
    end: int
    prompt: int | None


def _sequences(params: PackedGroups, filler: int, total: int) -> list[_Sequence]:
    result: list[_Sequence] = []
    for segment in params.segments:
        prompt = len(result)
        result.append(_Sequence(segment.begin, segment.end, None))
        result += [_Sequence(begin, end, prompt) for begin, end in segment.responses]
    if filler:
        result.append(_Sequence(total, total + filler, None))
    return result


def shard_pack(params: PackedGroups, total: int, cut: Cut) -> PackShard | None:
    """This rank's part of a pack of ``total`` rows, or None if that is all of it as it stands. Kept on ``params``."""
    if params.shard is None:
        if cut.context_size > 1:
            params.shard = _split(params, total, cut)
        elif total % cut.multiple:
            params.shard = _fill(params, total, cut)
    shard: PackShard | None = params.shard
    assert shard is None or shard.cut == cut, "a pack goes through models of one layout"
    return shard


def _fill(params: PackedGroups, total: int, cut: Cut) -> PackShard:
    """The whole pack and a sequence of padding."""
    filler = -total % cut.multiple
    device = params.cu_seqlens_q.device
    rows = torch.arange(total, device=device)
    bounds = torch.cat((params.cu_seqlens_q, params.cu_seqlens_q.new_tensor([total + filler])))
    longest = max(params.max_seqlen_q, filler)
    filled = PackedGroups(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        segments=(*params.segments, Segment(total, total + filler)),
    )
    return PackShard(cut, torch.cat((rows, rows.new_zeros(filler))), rows, filled)


def _split(params: PackedGroups, total: int, cut: Cut) -> PackShard:
    """Every sequence padded to a multiple of 2 C and this rank's two chunks of each."""
    rank, size = cut.context_rank, cut.context_size
    pieces = 2 * size
    device = params.cu_seqlens_q.device
    padded_total = sum(pieces * math.ceil((s.end - s.begin) / pieces) for s in _sequences(params, 0, total))
    filler = 0
    while (padded_total + filler) // size % cut.multiple:
        filler += pieces
    held: list[list[int]] = [[] for _ in range(size)]
    source: list[int] = []
    starts: list[tuple[int, int]] = []  # each sequence's rows in the padded pack
    bounds, queries = [0], []
    for sequence in _sequences(params, filler, total):
        begin, length = len(source), sequence.end - sequence.begin
        chunk = math.ceil(length / pieces)
        real = range(sequence.begin, min(sequence.end, total))
        source += [*real, *[-1] * (chunk * pieces - len(real))]
        starts.append((begin, begin + length))
        for owner in range(size):
            for piece in (owner, pieces - 1 - owner):
                first = begin + piece * chunk
                if owner == rank and chunk:
                    seen = () if sequence.prompt is None else (slice(*starts[sequence.prompt]),)
                    rows = slice(len(held[owner]), len(held[owner]) + chunk)
                    queries.append(Queries(rows, (*seen, slice(begin, first + chunk))))
                held[owner] += range(first, first + chunk)
        if sequence.prompt is None and begin:
            bounds.append(begin)
    bounds.append(len(source))
    padded_source = torch.tensor(source)
    order = torch.empty(len(source), dtype=torch.int64)
    order[torch.tensor([row for rows in held for row in rows], dtype=torch.int64)] = torch.arange(len(source))
    mine = padded_source[torch.tensor(held[rank], dtype=torch.int64)]
    local = torch.full((total,), -1)
    real_rows = (mine >= 0).nonzero().squeeze(1)
    local[mine[real_rows]] = real_rows
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
    longest = int((cu_seqlens[1:] - cu_seqlens[:-1]).max())
    view = ContextView(order.to(device), tuple(queries), any(s.responses for s in params.segments))
    whole = PackedGroups(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        # Padding counts as part of its sequence, which Transformer Engine is told, or it would ask the device.
        cu_seqlens_q_padded=cu_seqlens,
        cu_seqlens_kv_padded=cu_seqlens,
        pad_between_seqs=False,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        context=view,
    )
    return PackShard(cut, mine.clamp(min=0).to(device), local.to(device), whole)
