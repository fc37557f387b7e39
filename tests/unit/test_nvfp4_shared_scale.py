"""One tensor scale for a fused group: exact or refused, never nearly right."""

from __future__ import annotations

import pytest
import torch

from megatron_qerl.errors import CheckpointError
from megatron_qerl.nvfp4.checkpoint import PackedWeight, share_tensor_scale
from megatron_qerl.nvfp4.format import pack


def part(block_scale: float, tensor_scale: float, other_block: float = 1.0) -> PackedWeight:
    codes = torch.arange(32, dtype=torch.uint8).remainder(16).view(1, 32)
    scales = torch.tensor([[block_scale, other_block]]).to(torch.float8_e4m3fn)
    return PackedWeight(pack(codes), scales, torch.tensor(tensor_scale, dtype=torch.float32))


def shared(parts: dict[str, PackedWeight]) -> float:
    """Share, check that no weight changed, and return the common scale."""
    moved = share_tensor_scale(parts)
    assert moved.keys() == parts.keys()
    for name, weight in moved.items():
        assert torch.equal(weight.decode(torch.float64), parts[name].decode(torch.float64)), name
        assert weight.block_scale.float().min() >= 2.0**-6
    scales = {float(weight.tensor_scale) for weight in moved.values()}
    assert len(scales) == 1
    return scales.pop()


def test_equal_scales_are_left_alone() -> None:
    parts = {"q": part(3.0, 0.25), "k": part(5.0, 0.25)}
    assert share_tensor_scale(parts) is parts


def test_powers_of_two_move_to_the_largest() -> None:
    assert shared({"q": part(3.0, 2.0**-8), "k": part(5.0, 2.0**-10), "v": part(448.0, 2.0**-9)}) == 2.0**-8


def test_a_foreign_scale_may_differ_by_any_ratio_that_e4m3_holds() -> None:
    assert shared({"gate": part(2.0, 0.003), "up": part(3.0, 0.003 / 4)}) == pytest.approx(0.003)


def test_a_smaller_common_scale_is_found_when_the_largest_would_lose_small_blocks() -> None:
    # At the larger scale k's smallest block scale would fall to 2^-8; at the smaller one q's grows to 12.
    assert shared({"q": part(3.0, 2.0**-8), "k": part(2.0**-6, 2.0**-10)}) == 2.0**-10


def test_parts_that_cannot_meet_are_refused_by_name() -> None:
    # q spans nearly all of E4M3, so k would have to come to q's scale, and 2^-6 cannot go lower.
    parts = {"layer.q_proj": part(448.0, 2.0**-8, 2.0**-6), "layer.k_proj": part(2.0**-6, 2.0**-10, 448.0)}
    with pytest.raises(CheckpointError, match=r"layer\.k_proj = tensor scale 0\.0009765625.*layer\.q_proj"):
        share_tensor_scale(parts)


def test_scales_without_a_common_grid_are_refused() -> None:
    with pytest.raises(CheckpointError, match="cannot share"):
        share_tensor_scale({"q": part(3.0, 0.001), "k": part(3.0, 0.00107)})
