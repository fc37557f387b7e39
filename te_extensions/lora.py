"""y = W x + s B (A x): a frozen NVFP4 base and low-rank adapters in one product.

A fused linear (q, k and v; gate and up) has an adapter for each of its P parts. Their A's are stacked, so that x is
read once: u = s x A^T is [M, P r]. Their B's become one *wide* matrix [N, P r] that holds, in the fused row order, each
part's B in that part's r columns and zero elsewhere. Then y = x W^T + u B_wide^T is one product of rank P r, which the
fused kernel adds in its own launch and which the decoded path accumulates the base onto. Several adapters at once, one
a row, are the same product with u masked: ``nvfp4_multi_lora_linear``.

Cost beside the base as estimated from bytes, forward, M = 8192, a 32B gate_up of rank 32: one write of y (3 %), one
read of x (0.5 %).

The wide B of a linear with one part is B itself. For the others it is built in each call, a zero fill and P copies.
It is *not* cached behind the caller's back: an optimizer that writes through ``parameter.data`` (Megatron's does) moves
no version counter, and a captured graph would keep reading a dead copy. An engine that decodes with fixed adapters
calls ``LoraWeights.prepared`` when it receives them; then a call builds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from te_extensions.dispatch import resolve_path
from te_extensions.fused import MOST_PROJECTED_TOKENS
from te_extensions.linear import check_features, nvfp4_linear_update
from te_extensions.ops import (
    LINEAR_DGRAD_UPDATE,
    LINEAR_UPDATE,
    FrozenContext,
    below_autograd,
    define_op,
    first_order_only,
    packed_weight,
    scaled_mm,
    shaped,
)
from te_extensions.weight import NVFP4Weight

#: The fused kernel reads this many columns of the wide B at a time.
PREPARED_RANK_MULTIPLE = 32


@dataclass(frozen=True)
class LoraPart:
    """One projection of a fused linear.

    Attributes:
        rows: its output rows on this rank.
        adapted: whether it has an adapter; its columns of u and rows of b exist only then.
    """

    rows: int
    adapted: bool = True


@dataclass(frozen=True)
class LoraWeights:
    """The adapters of one linear.

    Attributes:
        a: [P r, K], the A of each adapted part, in order.
        b: [adapted rows, r], the B of each adapted part, in order, as PEFT stores them.
        parts: the parts of the linear, in the order of a group.
        scale: s = alpha / r.
        groups: how many times the order of the parts repeats over the N rows: 1 for gate_up, the number of KV groups
            for Megatron's qkv, where the rows lie as ``[q q k v | q q k v | ...]``.
        wide: [N, R] made by ``prepared``, or None.
    """

    a: Tensor
    b: Tensor
    parts: tuple[LoraPart, ...]
    scale: float
    groups: int = 1
    wide: Tensor | None = None

    def __post_init__(self) -> None:
        if self.wide is not None:
            return
        adapted = sum(part.adapted for part in self.parts)
        rows = sum(part.rows for part in self.parts if part.adapted)
        if adapted == 0:
            raise ValueError("parts: none is adapted; use nvfp4_linear")
        if self.b.dim() != 2 or self.b.shape[0] != rows:
            raise ValueError(f"b is {tuple(self.b.shape)}, needed [{rows}, r]: the rows of the adapted parts")
        if self.a.dim() != 2 or self.a.shape[0] != adapted * self.rank:
            raise ValueError(
                f"a is {tuple(self.a.shape)}, needed [{adapted * self.rank}, K]: {adapted} adapted parts of rank "
                f"{self.rank}"
            )
        for part in self.parts:
            if part.rows % self.groups:
                raise ValueError(f"parts: {part.rows} rows do not split into groups = {self.groups}")

    @property
    def rank(self) -> int:
        """r, of each part."""
        return self.b.shape[1]

    @property
    def rows(self) -> int:
        """N."""
        return sum(part.rows for part in self.parts)

    def wide_b(self) -> Tensor:
        """[N, P r] in the fused row order, differentiable in b; b itself for a single part."""
        if self.wide is not None:
            return self.wide
        if len(self.parts) == 1:
            return self.b
        rank = self.rank
        wide = self.b.new_zeros(self.rows, self.a.shape[0])
        grouped = wide.view(self.groups, -1, wide.shape[1])
        blocks = iter(self.b.split([part.rows for part in self.parts if part.adapted]))
        begin = column = 0
        for part in self.parts:
            end = begin + part.rows // self.groups
            if part.adapted:
                grouped[:, begin:end, column : column + rank] = next(blocks).view(self.groups, end - begin, rank)
                column += rank
            begin = end
        return wide

    def prepared(self) -> LoraWeights:
        """A frozen copy whose wide B is already built, its rank padded as the fused kernel likes it.

        It does not follow later writes to a or b: make another when the adapters change.
        """
        with torch.no_grad():
            missing = -self.a.shape[0] % PREPARED_RANK_MULTIPLE
            # Padding copies, also by nothing.
            pad = torch.nn.functional.pad
            wide = pad(self.wide_b(), (0, missing))
            return replace(self, a=pad(self.a, (0, 0, 0, missing)), b=wide, wide=wide)


class _LoraLinear(torch.autograd.Function):
    """The composition, with one GEMM's epilogue in place of the sum that autograd would make of two input gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        a: Tensor,
        b: Tensor,
        packed: Tensor,
        block_scale: Tensor,
        tensor_scale: float,
        scale: float,
        path: str,
    ) -> Tensor:
        ctx.frozen, ctx.scale = FrozenContext(packed, block_scale, tensor_scale, path), scale
        need_x, need_a, need_b, *_ = ctx.needs_input_grad
        base = (packed, block_scale, tensor_scale)
        if _rows(x) <= MOST_PROJECTED_TOKENS:
            # The operator may make u inside its launch; a gradient of B makes it again.
            ctx.save_for_backward(x if need_a or need_b else None, a if need_x or need_b else None, b, None)
            return below_autograd(LORA_LINEAR, x, a, b, *base, scale, path)
        u = _down(x, a, scale)
        ctx.save_for_backward(x if need_a else None, a if need_x else None, b, u if need_b else None)
        return below_autograd(LINEAR_UPDATE, x, u, b, *base, path)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        first_order_only("nvfp4_lora_linear")
        x, a, b, u = ctx.saved_tensors
        need_x, need_a, need_b, *_ = ctx.needs_input_grad
        rows = grad_y.reshape(-1, grad_y.shape[-1])
        grad_x = grad_a = grad_b = None
        # v = s dy B: the gradient of A x.
        v = scaled_mm(rows, b, ctx.scale) if need_x or need_a else None
        if v is not None and need_x:
            lead = v.view(*grad_y.shape[:-1], v.shape[1])
            grad_x = LINEAR_DGRAD_UPDATE(grad_y, lead, a, *ctx.frozen.unchanged())
        if v is not None and need_a:
            grad_a = torch.mm(v.t(), x.reshape(-1, x.shape[-1]))
        if need_b:
            u = _down(x, a, ctx.scale) if u is None else u
            grad_b = torch.mm(rows.t(), u.reshape(-1, u.shape[-1]))
        return grad_x, grad_a, grad_b, None, None, None, None, None


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1]


def _in_one_launch(x: Tensor, a: Tensor, weight: NVFP4Weight, path: str) -> bool:
    """Whether the fused kernel's first launch makes u as well: for short batches, where a launch of its own would cost.

    Its FP32 sums have another order than a GEMM's, the same for every batch.
    """
    rows = _rows(x)
    if rows == 0 or resolve_path(path, rows, weight, x.dtype, x.device) != "fused":
        return False
    from te_extensions.fused import adapter_refusal

    return adapter_refusal(rows, a.shape[0]) is None


def _down(x: Tensor, a: Tensor, scale: float) -> Tensor:
    """u = scale x a^T, [..., R]."""
    return scaled_mm(x.reshape(-1, x.shape[-1]), a.t(), scale).view(*x.shape[:-1], a.shape[0])


def _lora_linear(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    packed: Tensor,
    block_scale: Tensor,
    tensor_scale: float,
    scale: float,
    path: str,
) -> Tensor:
    weight = packed_weight(packed, block_scale, tensor_scale)
    if not _in_one_launch(x, a, weight, path):
        return below_autograd(LINEAR_UPDATE, x, _down(x, a, scale), b, packed, block_scale, tensor_scale, path)
    from te_extensions.fused import FusedAdapter, fused_linear

    y = fused_linear(
        x.reshape(-1, x.shape[-1]).contiguous(), weight, FusedAdapter(a.contiguous(), b.contiguous(), scale)
    )
    return shaped(y, (*x.shape[:-1], weight.shape[0]))


def _fake_lora_linear(x: Tensor, a: Tensor, b: Tensor, packed: Tensor, *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[0])


LORA_LINEAR = define_op(
    "nvfp4_lora_linear",
    "(Tensor x, Tensor a, Tensor b, Tensor packed, Tensor block_scale, float tensor_scale, float scale, str path)"
    " -> Tensor",
    _lora_linear,
    _fake_lora_linear,
    _LoraLinear,
    3,
)


def nvfp4_lora_linear(x: Tensor, weight: NVFP4Weight, adapters: LoraWeights, *, path: str = "auto") -> Tensor:
    """W x + s B (A x), differentiable once in x, A and B.

    Args:
        x: [..., K], float32 or bfloat16.
        weight: the frozen base, N x K.
        adapters: in x's dtype.
        path: as in ``nvfp4_linear``.

    Returns:
        [..., N].

    Raises:
        ValueError, RuntimeError: shapes or dtypes do not fit, or as ``nvfp4_linear``.
    """
    check_features(x, weight)
    a, b = adapters.a, adapters.wide_b()
    if a.shape[1] != weight.shape[1] or b.shape[0] != weight.shape[0]:
        raise ValueError(
            f"adapters are {b.shape[0]} x {a.shape[1]} (N x K), the weight is {weight.shape[0]} x {weight.shape[1]}"
        )
    if not x.dtype == a.dtype == b.dtype:
        raise ValueError(f"x is {x.dtype}, A is {a.dtype}, B is {b.dtype}: one dtype is needed")
    return LORA_LINEAR(x, a, b, weight.packed, weight.block_scale, weight.tensor_scale, adapters.scale, path)


def adapter_bank(slots: int, rows: int, rank: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeroed B's [S, N, r] that lie in memory as [N, S r], so that ``nvfp4_multi_lora_linear`` copies nothing."""
    return torch.zeros(rows, slots, rank, dtype=dtype, device=device).permute(1, 0, 2)


def nvfp4_multi_lora_linear(
    x: Tensor, weight: NVFP4Weight, a: Tensor, b: Tensor, scale: Tensor, index: Tensor, *, path: str = "auto"
) -> Tensor:
    """Row m of y is W x_m + scale[i] B[i] (A[i] x_m) with i = index[m], or W x_m where i is -1.

    All adapters' A x are computed for all rows, which at S r of a few hundred costs less than sorting rows would, and
    set to zero where they do not belong.

    Args:
        x: [M, K].
        a: [S, r, K].
        b: [S, N, r]; memory from ``adapter_bank`` is used as it lies, other memory is copied in each call.
        scale: FP32 [S], on x's device.
        index: int32 or int64 [M], each in -1 .. S - 1, on x's device. Checked on a CPU; on a GPU that would wait for
            it, and an index outside the range selects no adapter.

    Returns:
        [M, N].

    Raises:
        ValueError: shapes do not fit, or on a CPU an index is out of range.
    """
    slots, rank, cols = a.shape
    m, n = x.shape[0], weight.shape[0]
    if (
        x.dim() != 2
        or cols != weight.shape[1]
        or tuple(b.shape) != (slots, n, rank)
        or tuple(scale.shape) != (slots,)
        or tuple(index.shape) != (m,)
    ):
        raise ValueError(
            f"x {tuple(x.shape)}, a {tuple(a.shape)}, b {tuple(b.shape)}, scale {tuple(scale.shape)}, index "
            f"{tuple(index.shape)}: needed [M, K], [S, r, K], [S, N, r], [S], [M] with (N, K) = {weight.shape}"
        )
    if index.device.type == "cpu" and m and (int(index.min()) < -1 or int(index.max()) >= slots):
        raise ValueError(f"index is in {int(index.min())} .. {int(index.max())}, allowed are -1 .. {slots - 1}")
    stacked = a.reshape(slots * rank, cols)
    raw = torch.mm(x, stacked.t()).view(m, slots, rank)
    mine = index.unsqueeze(1) == torch.arange(slots, device=x.device)
    # Selected, not multiplied by a mask: another adapter's overflow must not become 0 * inf.
    u = torch.where(mine.unsqueeze(2), raw * scale.view(1, slots, 1), 0.0).to(x.dtype)
    wide = b.permute(1, 0, 2).reshape(n, slots * rank)
    return nvfp4_linear_update(x, weight, u.view(m, slots * rank), wide, path=path)
