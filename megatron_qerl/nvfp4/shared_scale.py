"""One tensor scale for the parts of a fused matrix (q, k, v, or gate and up), with every weight left as it is."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_qerl.errors import CheckpointError
from megatron_qerl.nvfp4.format import E4M3_MAX, MIN_BLOCK_SCALE, PackedWeight

_NEAREST_FIRST = sorted(range(-16, 17), key=abs)  # E4M3 spans 2^-6..2^8, so a longer step cannot help


def share_tensor_scale(parts: dict[str, PackedWeight]) -> dict[str, PackedWeight]:
    """Give the parts of a fused matrix one tensor scale without changing any weight.

    A fused GEMM has one scale, and engines take the largest and leave the blocks alone, which changes the other
    parts. Here the block scales take up the difference, and only where each product ``block_scale * tensor_scale``
    stays exactly what it was, with no block scale pushed out of [2^-6, 448].

    Args:
        parts: tensor name -> packed weight; the parts of one fused group.
    Returns:
        The same names; the same objects where the scales agreed already.
    Raises:
        CheckpointError: no common scale keeps all parts exact; names a part that cannot follow.
    """
    scales = sorted({float(part.tensor_scale) for part in parts.values()}, reverse=True)
    if len(scales) == 1:
        return parts
    blocks = {name: torch.unique(part.block_scale.float()).double() for name, part in parts.items()}
    stuck = ""
    for target in (math.ldexp(scale, step) for step in _NEAREST_FIRST for scale in scales):
        misfits = [n for n, part in parts.items() if not _reexpressible(blocks[n], float(part.tensor_scale), target)]
        if not misfits:
            return {name: _reexpress(part, target) for name, part in parts.items()}
        stuck = stuck or misfits[0]
    rule = f"cannot share one tensor scale with {', '.join(sorted(parts.keys() - {stuck}))} exactly"
    value = f"tensor scale {float(parts[stuck].tensor_scale):.9g}"
    raise CheckpointError(stuck, value, rule, "Quantise the model with scales shared in fused groups")


def _reexpressible(block_scale: Tensor, tensor_scale: float, target: float) -> bool:
    """Whether the block scales (float64) can be written exactly at another tensor scale."""
    product = block_scale * tensor_scale  # 4 + 24 significant bits: exact in float64
    moved = (product / target).float()
    inside = (moved == 0) | ((moved >= MIN_BLOCK_SCALE) & (moved <= E4M3_MAX))
    return bool(inside.all()) and torch.equal(moved.to(torch.float8_e4m3fn).double() * target, product)


def _reexpress(part: PackedWeight, target: float) -> PackedWeight:
    if float(part.tensor_scale) == target:
        return part
    moved = part.block_scale.double() * float(part.tensor_scale) / target
    return PackedWeight(part.packed, moved.float().to(torch.float8_e4m3fn), torch.full_like(part.tensor_scale, target))
