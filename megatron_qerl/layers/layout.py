"""How Megatron lays several Hugging Face projections into one fused linear.

Megatron multiplies q, k and v (and gate and up) in one GEMM. Its rows are interleaved by attention group,
``[q q k v | q q k v | ...]``, while Hugging Face keeps one matrix a projection. ``FusedLayout`` is that permutation,
stated once: the loader uses it on packed bytes and scales, LoRA uses it on activations, the exporter undoes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class FusedLayout:
    """Interleaving of the parts of a fused linear.

    Attributes:
        parts: (projection name, rows on this rank), in Megatron's order within a group.
        groups: how many times the order repeats; each part's rows divide evenly among the groups.
    """

    parts: tuple[tuple[str, int], ...]
    groups: int

    def __post_init__(self) -> None:
        for name, rows in self.parts:
            assert rows % self.groups == 0, f"{name}: {rows} rows do not split into {self.groups} groups"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.parts)

    @property
    def rows(self) -> int:
        """Rows of the fused linear on this rank."""
        return sum(rows for _, rows in self.parts)

    def fuse_rows(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Parts [rows_p, ...] -> fused [rows, ...]; any dtype, bytes move and never change."""
        if self.groups == 1 and len(self.parts) == 1:
            return parts[self.names[0]]
        pieces = [
            parts[name].view(self.groups, rows // self.groups, *parts[name].shape[1:]) for name, rows in self.parts
        ]
        return torch.cat(pieces, dim=1).reshape(self.rows, *pieces[0].shape[2:])

    def split_rows(self, fused: Tensor) -> dict[str, Tensor]:
        """Inverse of ``fuse_rows``."""
        grouped = fused.view(self.groups, self.rows // self.groups, *fused.shape[1:])
        pieces = torch.split(grouped, [rows // self.groups for _, rows in self.parts], dim=1)
        return {
            name: piece.reshape(rows, *fused.shape[1:]) for (name, rows), piece in zip(self.parts, pieces, strict=True)
        }

    def fuse_features(self, parts: list[Tensor]) -> Tensor:
        """Activations [..., rows_p], one a part and in order -> [..., rows]."""
        if self.groups == 1:
            return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        lead = parts[0].shape[:-1]
        grouped = [y.view(*lead, self.groups, -1) for y in parts]
        return torch.cat(grouped, dim=-1).view(*lead, self.rows)
