"""Low-rank adapters beside a frozen linear: y += (alpha / r) B (A x).

One adapter serves one fused linear. Each Hugging Face projection in it keeps its own A and B, as PEFT stores them: the
A's are stacked into one [P r, K] matrix (one product reads the activations once), the B's into one [rows, r] matrix.

Tensor parallelism. In a column-parallel linear A is replicated and B holds this rank's rows, so the gradient of
u = A x arrives in parts and ``copy_to``'s backward sums it. In a row-parallel linear A holds this rank's columns and B
is replicated, so u itself arrives in parts and ``reduce_from`` sums it. Under sequence parallelism the small u is
gathered (or scattered) instead of the wide activations, and the replicated factor sees only this rank's tokens: it is
marked ``sequence_parallel``, which makes Megatron sum its gradient over the tensor-parallel ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from megatron_qerl.layers.kernels import rows_linear
from megatron_qerl.layers.layout import FusedLayout
from megatron_qerl.rng import Domain, name_word, stream, stream_key, uniform


@dataclass(frozen=True)
class LoraSpec:
    """What every adapter of a model shares."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    seed: int

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


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

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, K] -> the adapter's contribution, in the fused linear's row order.

        Column mode takes x as it enters the linear (split along the sequence under sequence parallelism) and returns
        [s_full, b, rows]; row mode returns it already reduced, split along the sequence under sequence parallelism.
        """
        u = rows_linear(x, self.lora_A)
        if self.mode == "column":
            if self.sequence_parallel:
                u = gather_from_sequence_parallel_region(u, group=self.group)
            else:
                u = copy_to_tensor_model_parallel_region(u, group=self.group)
        elif self.sequence_parallel:
            u = reduce_scatter_to_sequence_parallel_region(u, group=self.group)
        else:
            u = reduce_from_tensor_model_parallel_region(u, group=self.group)
        return self._expand(u * self.spec.scale)

    def _expand(self, u: Tensor) -> Tensor:
        rank = self.spec.rank
        slices = {n: u[..., i * rank : (i + 1) * rank] for i, n in enumerate(self.names)}
        matrices = dict(zip(self.names, self.lora_B.split(list(self.rows.values())), strict=True))
        outputs = [
            rows_linear(slices[name], matrices[name]) if name in matrices else u.new_zeros(*u.shape[:-1], rows)
            for name, rows in self.layout.parts
        ]
        return self.layout.fuse_features(outputs)
