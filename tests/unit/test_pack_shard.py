"""Cutting a pack for context and sequence parallelism, and attention over the pieces, all ranks in one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_qerl.layers import attention
from megatron_qerl.layers.attention import SdpaCoreAttention
from megatron_qerl.layers.pack_shard import Cut, shard_pack
from megatron_qerl.layers.packing import PackedTokens, pack

CPU = torch.device("cpu")


def tokens_of(share: bool) -> PackedTokens:
    """Prompts and responses of awkward lengths, one response of a single token among them."""
    groups = [([5] * 7, [[1] * 4, [2], [3] * 9]), ([6], [[4] * 3]), ([7] * 3, [[8] * 2, [9] * 6])]
    return pack(groups, CPU, share_prefix=share)


def core(pg: Any = None) -> SdpaCoreAttention:
    pg = pg or SimpleNamespace(cp=None)
    return SdpaCoreAttention(
        SimpleNamespace(kv_channels=8),  # type: ignore[arg-type]
        1,
        None,  # type: ignore[arg-type]
        "self",
        pg_collection=pg,
    )


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(("size", "multiple"), [(2, 1), (3, 1), (4, 1), (2, 4), (4, 3)])
def test_pieces_of_all_ranks_attend_as_the_whole_pack(
    share: bool, size: int, multiple: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tokens_of(share)
    total = tokens.total_tokens
    shards = []
    for rank in range(size):
        tokens.params.shard = None
        shards.append(shard_pack(tokens.params, total, Cut(rank, size, multiple)))
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(total, heads, 8, generator=generator) for heads in (4, 2, 2))
    whole = core()(query, key, value, None, packed_seq_params=tokens.params)
    locals_ = [s.source for s in shards if s is not None]
    assert len(locals_) == size
    assert len({len(rows) for rows in locals_}) == 1, "every rank has as many rows"
    assert len(locals_[0]) % multiple == 0
    gathered = torch.cat([torch.cat((key[rows], value[rows]), dim=-1) for rows in locals_])
    monkeypatch.setattr(attention, "gather_from_sequence_parallel_region", lambda *_, **__: gathered)
    covered = torch.zeros(total, dtype=torch.int64)
    for shard in shards:
        assert shard is not None
        rows = shard.source
        out = core()(query[rows], key[rows], value[rows], None, packed_seq_params=shard.params)
        held = (shard.local >= 0).nonzero().squeeze(1)
        covered[held] += 1
        assert torch.equal(rows[shard.local[held]], held)
        # The same products summed in another order: a few units in the last place of numbers of size one.
        assert torch.allclose(out[shard.local[held]], whole[held], atol=2e-6)
    assert bool((covered == 1).all()), "every row is some rank's, and one rank's alone"


def test_ranks_look_at_as_many_keys() -> None:
    tokens = pack([([5] * 64, [[1] * 17])], CPU, share_prefix=False)
    work = []
    for rank in range(4):
        tokens.params.shard = None
        shard = shard_pack(tokens.params, tokens.total_tokens, Cut(rank, 4, 1))
        assert shard is not None
        pairs = 0
        for run in shard.params.context.queries:
            n, keys = run.rows.stop - run.rows.start, sum(k.stop - k.start for k in run.keys)
            pairs += n * keys - n * (n - 1) // 2
        work.append(pairs)
    assert len(set(work)) == 1


def test_boundaries_are_those_of_the_padded_whole() -> None:
    """What Transformer Engine is given: sequences of multiples of 2 C rows, whole on every rank."""
    tokens = tokens_of(share=False)
    shard = shard_pack(tokens.params, tokens.total_tokens, Cut(1, 2, 1))
    assert shard is not None
    lengths = shard.params.cu_seqlens_q.diff().tolist()
    original: Tensor = tokens.params.cu_seqlens_q.diff()
    assert lengths == [-(-n // 4) * 4 for n in original.tolist()]
    assert shard.params.max_seqlen_q == max(lengths)
    assert 2 * len(shard.source) == sum(lengths)
    assert not shard.params.context.shares_prompts


def test_sequence_parallelism_fills_a_pack_up_at_its_end() -> None:
    tokens = tokens_of(share=True)
    total = tokens.total_tokens
    assert shard_pack(tokens.params, total, Cut(0, 1, 1)) is None
    filler = -total % 4
    assert filler
    shard = shard_pack(tokens.params, total, Cut(0, 1, 4))
    assert shard is not None
    assert len(shard.source) == total + filler
    assert torch.equal(shard.local, torch.arange(total))
    assert shard.params.cu_seqlens_q.tolist() == [*tokens.params.cu_seqlens_q.tolist(), total + filler]
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(total, heads, 8, generator=generator) for heads in (4, 2, 2))
    whole = core()(query, key, value, None, packed_seq_params=tokens.params)
    rows = shard.source
    filled = core()(query[rows], key[rows], value[rows], None, packed_seq_params=shard.params)
    assert torch.equal(filled[:total], whole)


def test_a_pack_is_cut_once_for_one_layout() -> None:
    tokens = tokens_of(share=True)
    first = shard_pack(tokens.params, tokens.total_tokens, Cut(0, 2, 1))
    assert shard_pack(tokens.params, tokens.total_tokens, Cut(0, 2, 1)) is first
    with pytest.raises(AssertionError, match="one layout"):
        shard_pack(tokens.params, tokens.total_tokens, Cut(1, 2, 1))
