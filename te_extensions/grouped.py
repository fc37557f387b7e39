"""Linear layers of a mixture of experts: rows sorted by expert, one frozen NVFP4 matrix an expert.

With many tokens all local experts are decoded once, in one launch, into the workspace, and one grouped BF16 GEMM
(``torch.nn.functional.grouped_mm``) serves them all, forward and input gradient alike. The counts stay on the GPU.

With few tokens that would decode every expert to use a few of them. If the counts are on the host, the fused kernel is
called for each expert that has rows. Which is cheaper is estimated, not yet measured: see ``_few_enough``.

A stack cannot be used where a tensor scale cannot be folded into BF16 (a grouped GEMM has no alpha an expert), where
the dtype is not BF16, or where N is not a multiple of 8 (its rows must start on 16 bytes). Then each expert with rows
is decoded and multiplied by itself, which needs the counts on the host and is logged with its reason.

Router probabilities are applied by the caller.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from te_extensions.dequantize import foldable, nvfp4_dequantize_stack
from te_extensions.dispatch import ENVIRONMENT_VARIABLE, LinearPath, checked_path, choose_path, log_once, refusal
from te_extensions.ops import FrozenContext, below_autograd, define_op, first_order_only, packed_weight, times_matrix
from te_extensions.weight import NVFP4Weight
from te_extensions.workspace import workspace_for

#: Estimates behind ``_few_enough``: one launch of the fused kernel, and bytes moved a microsecond.
FUSED_CALL_US = 10.0
BYTES_PER_US = 4.0e6
#: Bytes moved for each weight of a stack: read packed, write BF16, read BF16.
STACK_BYTES_PER_WEIGHT = 0.5625 + 2.0 + 2.0

_scales_on_device: dict[tuple[tuple[float, ...], torch.device], Tensor] = {}


def _device_scales(scales: tuple[float, ...], device: torch.device) -> Tensor:
    """FP32 [E] on ``device``, uploaded once."""
    found = _scales_on_device.get((scales, device))
    if found is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("nvfp4_grouped_linear must run once before it is captured: it uploads the tensor scales")
        found = torch.tensor(scales, dtype=torch.float32, device=device)
        _scales_on_device[scales, device] = found
    return found


def _host_counts(tokens_per_expert: Tensor, total: int) -> list[int]:
    if tokens_per_expert.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "nvfp4_grouped_linear: this path needs the counts on the host, which a graph capture forbids; use BF16, "
            "power-of-two tensor scales, N a multiple of 8 and path='dequantize'"
        )
    counts: list[int] = tokens_per_expert.tolist()
    if sum(counts) != total or min(counts) < 0:
        raise ValueError(f"tokens_per_expert sums to {sum(counts)} (least {min(counts)}), x has {total} rows")
    return counts


def _no_stack_reason(rows: int, scales: Sequence[float], dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the experts cannot be decoded together and multiplied by one grouped GEMM, or None."""
    if device.type == "cuda" and dtype != torch.bfloat16:
        return f"x is {dtype}, a grouped GEMM takes bfloat16"
    if rows % 8:
        return f"N = {rows} is not a multiple of 8"
    unfoldable = next((s for s in scales if not foldable(s)), None)
    return None if unfoldable is None else f"tensor_scale = {unfoldable} cannot be folded into BF16"


def _few_enough(active: int, shape: tuple[int, int, int]) -> bool:
    """Whether a fused launch for each active expert is estimated to beat decoding and multiplying all of them."""
    experts, rows, cols = shape
    return active * FUSED_CALL_US < experts * rows * cols * STACK_BYTES_PER_WEIGHT / BYTES_PER_US


def _expert(packed: Tensor, block_scale: Tensor, scales: Sequence[float], index: int) -> NVFP4Weight:
    return packed_weight(packed[index], block_scale[index], scales[index])


def _forward_path(
    requested: str, x: Tensor, tokens_per_expert: Tensor, packed: Tensor, block_scale: Tensor, scales: Sequence[float]
) -> str:
    """ "reference", "dequantize" or "fused".

    Raises:
        ValueError: a named path is unknown or cannot compute it.
    """
    experts, n, half = packed.shape
    shape = (experts, n, 2 * half)
    forced = os.environ.get(ENVIRONMENT_VARIABLE, "auto")
    origin = "path" if requested != "auto" else ENVIRONMENT_VARIABLE
    named = requested if requested != "auto" else forced
    if named != "auto":
        path = checked_path(named, origin)
        reason = None
        if path == "fused":
            reason = refusal("fused", 1, _expert(packed, block_scale, scales, 0), x.dtype, x.device)
        elif path == "humming":
            reason = "it has no grouped form here"
        if reason is not None:
            raise ValueError(f"{origin} = {path!r} cannot compute {experts} experts of {shape[1:]}: {reason}")
        return path
    if not x.is_cuda:
        return "reference"
    path, why = "dequantize", "many tokens, or counts that are not on the host"
    if not tokens_per_expert.is_cuda and x.dtype == torch.bfloat16:
        counts = tokens_per_expert.tolist()
        if (
            _few_enough(sum(c > 0 for c in counts), shape)
            and choose_path(x.device, max(counts), n, shape[2]) == "fused"
            and refusal("fused", 1, _expert(packed, block_scale, scales, 0), x.dtype, x.device) is None
        ):
            path, why = "fused", "few experts have rows (estimate)"
    log_once(("grouped", shape, path), "dispatch: E=%d N=%d K=%d -> grouped %s: %s", *shape, path, why)
    return path


def _each(
    rows: Tensor,
    tokens_per_expert: Tensor,
    packed: Tensor,
    block_scale: Tensor,
    scales: Sequence[float],
    path: str,
    *,
    transposed: bool,
) -> Tensor:
    """One product for each expert that has rows."""
    pieces, begin = [], 0
    for index, count in enumerate(_host_counts(tokens_per_expert, rows.shape[0])):
        if not count:
            continue
        piece, begin = rows[begin : begin + count], begin + count
        weight = _expert(packed, block_scale, scales, index)
        if path == "fused":
            from te_extensions.fused import fused_linear

            pieces.append(fused_linear(piece.contiguous(), weight))
        else:
            way: LinearPath = "reference" if path == "reference" else "dequantize"
            pieces.append(times_matrix(piece, weight, way, None, transposed=transposed, reuse=False))
    return torch.cat(pieces)


def _stacked(
    rows: Tensor,
    tokens_per_expert: Tensor,
    packed: Tensor,
    block_scale: Tensor,
    scales: tuple[float, ...],
    *,
    transposed: bool,
) -> Tensor:
    """All experts decoded into the workspace, one grouped GEMM."""
    experts, n, half = packed.shape
    ends = torch.cumsum(tokens_per_expert, 0, dtype=torch.int32)
    if ends.is_cuda:
        # Rows past the last end would be left as they were allocated. Checked on the GPU, without waiting for it.
        torch._assert_async(ends[-1] == rows.shape[0], "tokens_per_expert does not sum to the rows of x")
    else:
        _host_counts(tokens_per_expert, rows.shape[0])
        ends = ends.to(rows.device, non_blocking=True)
    on_device = _device_scales(scales, rows.device)

    def fill(out: Tensor) -> None:
        nvfp4_dequantize_stack(packed, block_scale.view(torch.float8_e4m3fn), on_device, out.dtype, out=out)

    with workspace_for(rows.device).decoded(
        (packed, block_scale), (experts, n, 2 * half), rows.dtype, scales, fill, reuse=not transposed
    ) as stack:
        return grouped_mm(rows.contiguous(), stack.transpose(1, 2) if transposed else stack, offs=ends)


def _dequantized(
    rows: Tensor,
    tokens_per_expert: Tensor,
    packed: Tensor,
    block_scale: Tensor,
    scales: Sequence[float],
    *,
    transposed: bool,
) -> Tensor:
    reason = _no_stack_reason(packed.shape[1], scales, rows.dtype, rows.device)
    if reason is None:
        return _stacked(rows, tokens_per_expert, packed, block_scale, tuple(scales), transposed=transposed)
    shape = tuple(packed.shape)
    log_once(("grouped each", shape, reason), "dispatch: experts %s are decoded one by one: %s", shape, reason)
    return _each(rows, tokens_per_expert, packed, block_scale, scales, "dequantize", transposed=transposed)


def _grouped_linear(
    x: Tensor, tokens_per_expert: Tensor, packed: Tensor, block_scale: Tensor, scales: Sequence[float], path: str
) -> Tensor:
    if x.shape[0] == 0:
        return x.new_empty(0, packed.shape[1])
    found = _forward_path(path, x, tokens_per_expert, packed, block_scale, scales)
    if found == "dequantize":
        return _dequantized(x, tokens_per_expert, packed, block_scale, scales, transposed=True)
    return _each(x, tokens_per_expert, packed, block_scale, scales, found, transposed=True)


def _grouped_dgrad(
    grad_y: Tensor, tokens_per_expert: Tensor, packed: Tensor, block_scale: Tensor, scales: Sequence[float], path: str
) -> Tensor:
    if grad_y.shape[0] == 0:
        return grad_y.new_empty(0, 2 * packed.shape[2])
    if path == "reference" or (path == "auto" and not grad_y.is_cuda):
        return _each(grad_y, tokens_per_expert, packed, block_scale, scales, "reference", transposed=False)
    return _dequantized(grad_y, tokens_per_expert, packed, block_scale, scales, transposed=False)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        tokens_per_expert: Tensor,
        packed: Tensor,
        block_scale: Tensor,
        scales: Sequence[float],
        path: str,
    ) -> Tensor:
        ctx.frozen = FrozenContext(packed, block_scale, scales, path)
        ctx.save_for_backward(tokens_per_expert)
        return below_autograd(GROUPED_LINEAR, x, tokens_per_expert, packed, block_scale, scales, path)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        first_order_only("nvfp4_grouped_linear")
        (tokens_per_expert,) = ctx.saved_tensors
        grad_x = GROUPED_LINEAR_DGRAD(grad_y, tokens_per_expert, *ctx.frozen.unchanged())
        return grad_x, None, None, None, None, None


_SIGNATURE = "Tensor tokens_per_expert, Tensor packed, Tensor block_scale, float[] tensor_scale, str path) -> Tensor"
GROUPED_LINEAR = define_op(
    "nvfp4_grouped_linear",
    f"(Tensor x, {_SIGNATURE}",
    _grouped_linear,
    lambda x, counts, packed, *_: x.new_empty(x.shape[0], packed.shape[1]),
    _GroupedLinear,
    1,
)
GROUPED_LINEAR_DGRAD = define_op(
    "nvfp4_grouped_linear_dgrad",
    f"(Tensor grad_y, {_SIGNATURE}",
    _grouped_dgrad,
    lambda grad_y, counts, packed, *_: grad_y.new_empty(grad_y.shape[0], 2 * packed.shape[2]),
    None,
    1,
)


def nvfp4_grouped_linear(
    x: Tensor,
    tokens_per_expert: Tensor | Sequence[int],
    packed: Tensor,
    block_scale: Tensor,
    tensor_scale: Sequence[float],
    *,
    path: str = "auto",
) -> Tensor:
    """Each expert's rows times its frozen matrix, differentiable once and in ``x`` only.

    Args:
        x: [T, K], the rows of expert 0 first, then those of expert 1, and so on.
        tokens_per_expert: E counts that sum to T; a list, or int64 or int32 [E] on the host or on x's device. Counts on
            the host let few rows take the fused kernel; counts on the GPU are never waited for on the stacked path.
        packed: uint8 [E, N, K/2], contiguous.
        block_scale: float8_e4m3fn [E, N, K/16], contiguous.
        tensor_scale: E values.
        path: "auto", "reference", "dequantize" or "fused".

    Returns:
        [T, N] in x's dtype.

    Raises:
        ValueError: shapes do not fit, counts on the host do not sum to T, or ``path`` is unknown or cannot compute it.
            Counts on the GPU that do not sum to T stop the process with a device assertion.
        RuntimeError: as ``nvfp4_linear``; or a graph is captured on a path that must know the counts.
    """
    if isinstance(tokens_per_expert, Tensor):
        counts = tokens_per_expert
    else:
        counts = torch.tensor(list(tokens_per_expert), dtype=torch.int64)
    experts, n, half = packed.shape
    if x.dim() != 2 or x.shape[1] != 2 * half:
        raise ValueError(f"x is {tuple(x.shape)}, needed [T, {2 * half}]")
    if tuple(counts.shape) != (experts,) or len(tensor_scale) != experts:
        raise ValueError(
            f"{tuple(counts.shape)} counts and {len(tensor_scale)} tensor scales do not fit {experts} experts"
        )
    if counts.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"tokens_per_expert is {counts.dtype}, needed int64 or int32")
    if tuple(block_scale.shape) != (experts, n, 2 * half // 16):
        raise ValueError(f"block_scale is {tuple(block_scale.shape)}, needed {(experts, n, 2 * half // 16)}")
    return GROUPED_LINEAR(x, counts, packed, block_scale, list(tensor_scale), path)
