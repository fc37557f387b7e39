"""Low-rank adapters of experts: y_e += (alpha / r) B_e (A_e x).

Two forms. ``per_expert`` gives every expert its own A and B. ``shared_outer`` shares the factor on the side of the
hidden state, which is the large one: gate's and up's A, and down's B. The factors on the inner side stay per expert. It
is the form that SGLang serves (``experts_shared_outer_loras``).

Whose gradient is whose. A per-expert factor exists once an expert-parallel rank: ``allreduce = False`` tells Megatron
to sum its gradient over the expert-data-parallel group, where its copies are, and not over the data-parallel group,
whose ranks hold other experts in its place. A shared factor has a copy on every rank and each rank sees some of the
(token, expert) pairs: its gradient is the sum over all of them, over the data-parallel group as any parameter's, and
over the tensor-parallel group because it is marked ``sequence_parallel``. Under expert tensor parallelism the factor on
the side that is not split is on every rank of that group with a part of its gradient; ``_SumGradient`` adds the parts
up in backward. No activation is reduced for it: what dispatches tokens sums their gradients already.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_qerl.layers.grouped import grouped_product
from megatron_qerl.layers.kernels import rows_linear
from megatron_qerl.layers.layout import FusedLayout
from megatron_qerl.layers.lora import Factor, Kind, LoraSpec


class _SumGradient(torch.autograd.Function):
    """The parameter itself; its gradient is summed over a group."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class ExpertAdapter(nn.Module):
    """The adapter of one (fused) linear of all local experts.

    Args:
        layout: rows of one expert's linear on this rank; only parts named in ``spec.targets`` get an adapter.
        in_features: K on this rank.
        num_local: experts on this rank.
        mode: how expert tensor parallelism splits the linear.
        group: expert-tensor-parallel group.
        sequence_parallel: Megatron's setting.
    """

    def __init__(
        self,
        spec: LoraSpec,
        layout: FusedLayout,
        in_features: int,
        num_local: int,
        mode: Literal["column", "row"],
        group: dist.ProcessGroup,
        sequence_parallel: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.spec, self.layout, self.mode, self.group = spec, layout, mode, group
        self.names = tuple(n for n in layout.names if n in spec.targets)
        self.rows = {n: r for n, r in layout.parts if n in spec.targets}
        outer: Kind = "lora_A" if mode == "column" else "lora_B"
        self.replicated = outer
        self.shared: dict[Kind, bool] = {
            "lora_A": spec.shared_outer and outer == "lora_A",
            "lora_B": spec.shared_outer and outer == "lora_B",
        }
        a_shape = (len(self.names) * spec.rank, in_features)
        b_shape = (sum(self.rows.values()), spec.rank)
        self.lora_A = self._parameter("lora_A", num_local, a_shape, sequence_parallel, dtype, device)
        self.lora_B = self._parameter("lora_B", num_local, b_shape, sequence_parallel, dtype, device)

    def _parameter(
        self,
        factor: Kind,
        num_local: int,
        shape: tuple[int, int],
        sequence_parallel: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> nn.Parameter:
        shared = self.shared[factor]
        full = shape if shared else (num_local, *shape)
        parameter = nn.Parameter(torch.zeros(full, dtype=dtype, device=device))
        parameter.allreduce = shared  # type: ignore[attr-defined]
        parameter.sequence_parallel = shared and sequence_parallel  # type: ignore[attr-defined]
        # Counted once in the gradient norm: a split factor on every rank, another on the first of its group.
        parameter.tensor_model_parallel = factor != self.replicated  # type: ignore[attr-defined]
        if factor != self.replicated:
            parameter.partition_dim = len(full) - (2 if factor == "lora_B" else 1)  # type: ignore[attr-defined]
            parameter.partition_stride = 1  # type: ignore[attr-defined]
        return parameter

    def factors(self, projection: str, template: str, first: int) -> Iterator[Factor]:
        """The factors of one projection of every local expert.

        Args:
            template: Hugging Face module path with ``{e}`` for the expert. A shared factor has the path without it:
                ``mlp.experts.gate_proj`` where an expert's own would be ``mlp.experts.7.gate_proj``.
            first: index of the first local expert among all.
        """
        index, rank = self.names.index(projection), self.spec.rank
        begin = sum(self.rows[name] for name in self.names[:index])
        places: dict[Kind, slice] = {
            "lora_A": slice(index * rank, (index + 1) * rank),
            "lora_B": slice(begin, begin + self.rows[projection]),
        }
        for kind, place in places.items():
            parameter: nn.Parameter = getattr(self, kind)
            dim = None if kind == self.replicated else 0 if kind == "lora_B" else 1
            if self.shared[kind]:
                yield Factor(template.replace("{e}.", ""), kind, parameter, (place,), dim, self.group, self.spec)
                continue
            for local in range(parameter.shape[0]):
                path = template.replace("{e}", str(first + local))
                yield Factor(path, kind, parameter, (local, place), dim, self.group, self.spec)

    def _whole(self, factor: Kind) -> Tensor:
        """The parameter as the products use it."""
        parameter: Tensor = getattr(self, factor)
        if factor != self.replicated or self.group.size() == 1 or self.shared[factor]:
            # A shared factor's parts are summed with everything else, over tensor and data parallel ranks.
            return parameter
        whole: Tensor = _SumGradient.apply(parameter, self.group)
        return whole

    def _times(self, x: Tensor, factor: Kind, matrix: Tensor, counts: Tensor) -> Tensor:
        return rows_linear(x, matrix) if self.shared[factor] else grouped_product(x, matrix, counts)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """What the adapter adds: [T, K] -> [T, N] on this rank, zero in rows without an adapter."""
        a, b, rank = self._whole("lora_A"), self._whole("lora_B"), self.spec.rank
        u = self._times(x, "lora_A", a, counts)
        if self.spec.scale != 1.0:
            u = u * self.spec.scale
        pieces, first = [], 0
        for name, rows in self.layout.parts:
            if name not in self.rows:
                pieces.append(u.new_zeros(u.shape[0], rows))
                continue
            index = self.names.index(name)
            part = b[..., first : first + rows, :]
            pieces.append(self._times(u[:, index * rank : (index + 1) * rank], "lora_B", part, counts))
            first += rows
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)
