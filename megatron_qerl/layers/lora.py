"""Low-rank adapters beside a frozen linear: y += (alpha / r) B (A x).

One adapter serves one fused linear. Each Hugging Face projection in it keeps its own A and B, as PEFT stores them: the
A's are stacked into one [P r, K] matrix (one product reads the activations once), the B's into one [rows, r] matrix.
The adapter does not add to y itself: it gives u = s A x and a B over all of the linear's rows, and the frozen product
takes both in, so that y, which may be the largest tensor of a layer, is not written again.

Tensor parallelism. In a column-parallel linear A is replicated and B holds this rank's rows, so the gradient of
u = A x arrives in parts and ``copy_to``'s backward sums it. In a row-parallel linear A holds this rank's columns and B
is replicated, so u itself arrives in parts and ``reduce_from`` sums it. Under sequence parallelism the small u is
gathered (or scattered) instead of the wide activations, and the replicated factor sees only this rank's tokens: it is
marked ``sequence_parallel``, which makes Megatron sum its gradient over the tensor-parallel ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_qerl.layers.kernels import rows_linear
from megatron_qerl.layers.layout import FusedLayout
from megatron_qerl.rng import Domain, name_word, stream, stream_key, uniform


@dataclass(frozen=True)
class LoraSpec:
    """What every adapter of a model shares.

    Attributes:
        rank, alpha: r and alpha.
        targets: Hugging Face projections that get an adapter.
        seed: of the initial A.
        expert_mode: how the adapters of experts are formed (``layers/expert_lora.py``).
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    seed: int
    expert_mode: Literal["per_expert", "shared_outer", "none"] = "per_expert"

    @property
    def shared_outer(self) -> bool:
        """Whether experts share the factor on the side of the hidden state."""
        return self.expert_mode == "shared_outer"

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


Kind = Literal["lora_A", "lora_B"]


@dataclass(frozen=True)
class Factor:
    """One projection's A [r, K] or B [N, r], as PEFT holds it, inside a parameter of this rank.

    Attributes:
        path: the projection's Hugging Face module path, the same on every layout.
        kind: which of the two.
        parameter: where this rank keeps it, and maybe others beside it.
        index: its place there; ``parameter[index]`` is a [r, K'] or [N', r] view.
        sharded_dim: dimension that ``group`` splits, or None if every rank of it holds the whole factor.
    """

    path: str
    kind: Kind
    parameter: nn.Parameter
    index: tuple[int | slice, ...]
    sharded_dim: int | None
    group: torch.distributed.ProcessGroup
    spec: LoraSpec

    @property
    def name(self) -> str:
        """Canonical name of the whole factor."""
        return f"{self.path}.{self.kind}"


def initial_a(spec: LoraSpec, name: str, in_features: int) -> Tensor:
    """FP32 [r, K] of one projection: uniform on +-1/sqrt(K), PEFT's default (Kaiming with a = sqrt 5).

    Keyed by the projection's Hugging Face name, so every parallel layout starts from the same adapter.
    """
    words = (name_word(name), 0, 0)
    bits = stream(stream_key(spec.seed, Domain.ADAPTER_INIT), words, spec.rank * in_features)
    values = (2.0 * uniform(bits) - 1.0) / math.sqrt(in_features)
    return torch.from_numpy(values.astype(np.float32)).view(spec.rank, in_features)


class LoraAdapter(nn.Module):
    """The adapter of one (fused) linear.

    Args:
        layout: rows of the linear on this rank; only parts named in ``spec.targets`` get an adapter.
        in_features: K on this rank.
        mode: how the linear is parallel.
        group: tensor-parallel group.
        sequence_parallel: whether activations outside the linear are split along the sequence.
    """

    def __init__(
        self,
        spec: LoraSpec,
        layout: FusedLayout,
        in_features: int,
        mode: Literal["column", "row"],
        group: torch.distributed.ProcessGroup,
        sequence_parallel: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.spec, self.layout, self.mode = spec, layout, mode
        self.group, self.sequence_parallel = group, sequence_parallel
        self.names = tuple(n for n in layout.names if n in spec.targets)
        self.rows = {n: r for n, r in layout.parts if n in spec.targets}
        total = sum(self.rows.values())
        self.lora_A = nn.Parameter(torch.empty(len(self.names) * spec.rank, in_features, dtype=dtype, device=device))
        self.lora_B = nn.Parameter(torch.zeros(total, spec.rank, dtype=dtype, device=device))
        replicated = self.lora_A if mode == "column" else self.lora_B
        sharded = self.lora_B if mode == "column" else self.lora_A
        replicated.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
        sharded.tensor_model_parallel = True  # type: ignore[attr-defined]
        sharded.partition_dim = 0 if mode == "column" else 1  # type: ignore[attr-defined]
        sharded.partition_stride = 1  # type: ignore[attr-defined]

    def split(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Projection name -> (A [r, K], B [rows, r]) as views of the parameters on this rank."""
        a = dict(zip(self.names, self.lora_A.split(self.spec.rank), strict=True))
        b = dict(zip(self.names, self.lora_B.split(list(self.rows.values())), strict=True))
        return {name: (a[name], b[name]) for name in self.names}

    def factors(self, projection: str, path: str) -> Iterator[Factor]:
        """Both factors of one projection, whose Hugging Face module is ``path``."""
        index, rank = self.names.index(projection), self.spec.rank
        begin = sum(self.rows[name] for name in self.names[:index])
        a, b = slice(index * rank, (index + 1) * rank), slice(begin, begin + self.rows[projection])
        column = self.mode == "column"
        yield Factor(path, "lora_A", self.lora_A, (a,), None if column else 1, self.group, self.spec)
        yield Factor(path, "lora_B", self.lora_B, (b,), 0 if column else None, self.group, self.spec)

    def low_rank(self, x: Tensor) -> Tensor:
        """u = s A x, [s, b, K] -> [s_full or s, b, P r], summed or gathered over the tensor-parallel ranks.

        Column mode takes x as it enters the linear (split along the sequence under sequence parallelism) and returns
        all tokens; row mode takes all tokens and returns them split again under sequence parallelism.
        """
        u = rows_linear(x, self.lora_A)
        return self.reduced(u if self.spec.scale == 1.0 else u * self.spec.scale)

    def reduced(self, u: Tensor) -> Tensor:
        """The communication between A and B, of this rank's u."""
        if self.mode == "column":
            if self.sequence_parallel:
                return gather_from_sequence_parallel_region(u, group=self.group)
            return copy_to_tensor_model_parallel_region(u, group=self.group)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(u, group=self.group)
        return reduce_from_tensor_model_parallel_region(u, group=self.group)

    def expansion(self) -> Tensor:
        """The B's as one [N, P r] matrix over the fused linear's rows, so that u times it is the adapter's whole term.

        Each projection's rows are zero outside its own r columns, and rows without an adapter are zero.
        """
        if len(self.layout.parts) == 1:
            return self.lora_B
        result: Tensor = _Expansion.apply(self.lora_B, self)
        return result

    def blocks(self, wide: Tensor) -> list[tuple[slice, Tensor]]:
        """(rows of ``lora_B``, their place in the [N, P r] matrix as a [groups, rows / groups, r] view)."""
        grouped = wide.view(self.layout.groups, -1, wide.shape[1])
        rank, result = self.spec.rank, []
        place = first = 0
        for name, rows in self.layout.parts:
            per_group = rows // self.layout.groups
            if name in self.rows:
                column = self.names.index(name) * rank
                part = grouped[:, place : place + per_group, column : column + rank]
                result.append((slice(first, first + rows), part))
                first += rows
            place += per_group
        return result


class _Expansion(torch.autograd.Function):
    """``LoraAdapter.expansion`` by copies alone, which is less work than padding and concatenating."""

    @staticmethod
    def forward(ctx: Any, lora_b: Tensor, adapter: LoraAdapter) -> Tensor:
        ctx.adapter = adapter
        wide = lora_b.new_zeros(adapter.layout.rows, len(adapter.names) * adapter.spec.rank)
        for rows, place in adapter.blocks(wide):
            place.copy_(lora_b[rows].view(place.shape))
        return wide

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        adapter: LoraAdapter = ctx.adapter
        grad_b = grad.new_empty(sum(adapter.rows.values()), adapter.spec.rank)
        for rows, place in adapter.blocks(grad.contiguous()):
            grad_b[rows].view(place.shape).copy_(place)
        return grad_b, None
