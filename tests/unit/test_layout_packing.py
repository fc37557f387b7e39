"""Fused row order and packed groups."""

from __future__ import annotations

import torch

from megatron_qerl.layers.layout import FusedLayout
from megatron_qerl.layers.packing import pack

LAYOUT = FusedLayout((("q_proj", 8), ("k_proj", 4), ("v_proj", 4)), groups=2)


def test_rows_interleave_by_group() -> None:
    parts = {"q_proj": torch.arange(8), "k_proj": torch.arange(100, 104), "v_proj": torch.arange(200, 204)}
    fused = LAYOUT.fuse_rows({k: v[:, None] for k, v in parts.items()})[:, 0].tolist()
    # Megatron's order for two groups: q q q q k k v v | q q q q k k v v.
    assert fused == [0, 1, 2, 3, 100, 101, 200, 201, 4, 5, 6, 7, 102, 103, 202, 203]


def test_split_undoes_fuse_and_activations_follow_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = {name: torch.randn(rows, 3, generator=generator) for name, rows in LAYOUT.parts}
    fused = LAYOUT.fuse_rows(parts)
    back = LAYOUT.split_rows(fused)
    assert all(torch.equal(back[name], parts[name]) for name in parts)
    x = torch.randn(2, 5, 3, generator=generator)
    by_parts = LAYOUT.fuse_features([x @ parts[name].t() for name in LAYOUT.names])
    assert torch.allclose(by_parts, x @ fused.t(), atol=1e-6)


def test_pack_places_tokens_positions_and_targets() -> None:
    packed = pack([((10, 11, 12), [(20, 21), (30,), (40, 41, 42)])], torch.device("cpu"), share_prefix=True)
    assert packed.token_ids.tolist() == [[10, 11, 12, 20, 40, 41]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 3, 4]]
    # The prompt's last token predicts every first token; a response's last token predicts nothing.
    assert packed.logit_rows.tolist() == [2, 3, 2, 2, 4, 5]
    assert packed.targets.tolist() == [20, 21, 30, 40, 41, 42]


def test_unshared_pack_repeats_the_prompt() -> None:
    packed = pack([((10, 11), [(20, 21), (30,)])], torch.device("cpu"), share_prefix=False)
    assert packed.token_ids.tolist() == [[10, 11, 20, 10, 11]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert packed.logit_rows.tolist() == [1, 2, 4]
    assert packed.params.cu_seqlens_q.tolist() == [0, 3, 5]
