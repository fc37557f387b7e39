"""RMSNorm with noise in its scale, forward and input gradient, one launch each.

A program owns a tile of whole rows, so a row's sums never depend on the rows beside it. With one scale for all rows,
gamma + z stays in registers while the program walks over its tiles; with a noise row for each row it is read tile by
tile. What backward needs is x and 1 / rms of each row.

A kernel is compiled when H, the dtype or the kind of noise is new, never for another number of rows: one call of each
kind before a CUDA graph is captured is enough.
"""

# Kernels are Triton's language in Python's clothes: their arguments have no Python types.
# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_HIDDEN = 65536
# A tile has at least this many elements: rows of a head norm (H = 128) are too short for a program each.
_TILE_ELEMENTS = 1024

_NO_NOISE, _ONE_NOISE, _ROW_NOISE = 0, 1, 2


@triton.jit
def _scale_of(gamma, noise, slot, row, live, column, inside, hidden, slots, NOISE: tl.constexpr):
    """gamma + z: [1, BLOCK] for all rows, or [ROWS, BLOCK] when every row names its noise. A slot that does not exist
    gives NaN, which no caller can overlook."""
    scale = tl.load(gamma + column, mask=inside, other=0.0)[None, :]
    if NOISE == 1:
        scale += tl.load(noise + column, mask=inside, other=0.0)[None, :]
    if NOISE == 2:
        which = tl.load(slot + row, mask=live, other=-1)
        exists = (which >= 0) & (which < slots)
        z = tl.load(
            noise + which.to(tl.int64)[:, None] * hidden + column[None, :],
            mask=exists[:, None] & inside[None, :],
            other=0.0,
        )
        z = tl.where((exists | (which == -1))[:, None], z, float("nan"))
        scale = scale + z
    return scale


@triton.jit(do_not_specialize=["rows", "slots"])
def _forward_kernel(
    x,
    y,
    rstd,
    gamma,
    noise,
    slot,
    rows,
    hidden,
    slots,
    x_stride,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    NOISE: tl.constexpr,
    KEEP_RSTD: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    lane = tl.arange(0, ROWS)
    step = tl.num_programs(0) * ROWS
    row = tl.program_id(0) * ROWS + lane
    if NOISE != 2:
        scale = _scale_of(gamma, noise, slot, row, row < rows, column, inside, hidden, slots, NOISE)
    here = x + row.to(tl.int64)[:, None] * x_stride + column[None, :]
    coming = tl.load(here, mask=(row < rows)[:, None] & inside[None, :], other=0.0)
    for first in range(tl.program_id(0) * ROWS, rows, step):
        row = first + lane
        live = row < rows
        value = coming.to(tl.float32)
        # The next tile travels while this one is reduced.
        after = row + step
        here = x + after.to(tl.int64)[:, None] * x_stride + column[None, :]
        coming = tl.load(here, mask=(after < rows)[:, None] & inside[None, :], other=0.0)
        mean_square = tl.sum(value * value, axis=1) / hidden
        inverse = tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps))
        if NOISE == 2:
            scale = _scale_of(gamma, noise, slot, row, live, column, inside, hidden, slots, NOISE)
        result = value * inverse[:, None] * scale
        target = y + row.to(tl.int64)[:, None] * hidden + column[None, :]
        tl.store(target, result.to(y.dtype.element_ty), mask=live[:, None] & inside[None, :])
        if KEEP_RSTD:
            tl.store(rstd + row, inverse, mask=live)


@triton.jit(do_not_specialize=["rows", "slots"])
def _backward_kernel(
    grad_y,
    x,
    grad_x,
    rstd,
    gamma,
    noise,
    slot,
    rows,
    hidden,
    slots,
    x_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    NOISE: tl.constexpr,
):
    """With u = x * rstd and g = grad_y * (gamma + z): grad_x = rstd * (g - u * mean(g * u))."""
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    lane = tl.arange(0, ROWS)
    row = tl.program_id(0) * ROWS + lane
    if NOISE != 2:
        scale = _scale_of(gamma, noise, slot, row, row < rows, column, inside, hidden, slots, NOISE)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + lane
        live = row < rows
        real = live[:, None] & inside[None, :]
        wide = row.to(tl.int64)[:, None]
        inverse = tl.load(rstd + row, mask=live, other=0.0)[:, None]
        unit = tl.load(x + wide * x_stride + column[None, :], mask=real, other=0.0).to(tl.float32) * inverse
        grad = tl.load(grad_y + wide * hidden + column[None, :], mask=real, other=0.0).to(tl.float32)
        if NOISE == 2:
            scale = _scale_of(gamma, noise, slot, row, live, column, inside, hidden, slots, NOISE)
        grad = grad * scale
        mean = tl.sum(grad * unit, axis=1) / hidden
        result = inverse * (grad - unit * mean[:, None])
        tl.store(grad_x + wide * hidden + column[None, :], result.to(grad_x.dtype.element_ty), mask=real)


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # Triton's interpreter: few programs, so that each walks over several tiles
    return torch.cuda.get_device_properties(device).multi_processor_count


def _tile(hidden: int) -> tuple[int, int, int]:
    """(rows, columns, warps) of a tile; they depend on H alone, so a row's result does not depend on its neighbours."""
    block = triton.next_power_of_2(hidden)
    rows = max(1, _TILE_ELEMENTS // block)
    return rows, block, min(16, max(1, rows * block // 512))


def _programs(device: torch.device, tiles: int, warps: int) -> int:
    """As many programs as fit on the device at 32 warps a multiprocessor, or one a tile if there are fewer tiles."""
    return min(tiles, _multiprocessors(device) * max(1, 32 // warps))


def _noise_arguments(noise: Tensor | None, slot: Tensor | None) -> tuple[Tensor | None, Tensor | None, int, int]:
    if noise is None:
        return None, None, 0, _NO_NOISE
    return noise, slot, noise.shape[0] if slot is not None else 0, _ONE_NOISE if slot is None else _ROW_NOISE


def launch_forward(
    x: Tensor, gamma: Tensor, noise: Tensor | None, slot: Tensor | None, eps: float, *, keep_rstd: bool
) -> tuple[Tensor, Tensor | None]:
    """(y, 1 / rms): y [rows, H] in x's dtype; FP32 [rows] when ``keep_rstd``, else None.

    Args:
        x: [rows, H], contiguous along H.
        gamma, noise, slot: as ``rms_norm_noise`` has checked them.
    """
    rows, hidden = x.shape
    y = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device) if keep_rstd else None
    if rows == 0:
        return y, rstd
    tile, block, warps = _tile(hidden)
    noise, slot, slots, mode = _noise_arguments(noise, slot)
    _forward_kernel[(_programs(x.device, triton.cdiv(rows, tile), warps),)](
        x,
        y,
        rstd,
        gamma,
        noise,
        slot,
        rows,
        hidden,
        slots,
        x.stride(0),
        eps,
        ROWS=tile,
        BLOCK=block,
        NOISE=mode,
        KEEP_RSTD=keep_rstd,
        num_warps=warps,
    )
    return y, rstd


def launch_backward(
    grad_y: Tensor, x: Tensor, rstd: Tensor, gamma: Tensor, noise: Tensor | None, slot: Tensor | None
) -> Tensor:
    """Gradient with respect to x, [rows, H] in x's dtype; ``grad_y`` is contiguous [rows, H]."""
    rows, hidden = x.shape
    grad_x = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    if rows == 0:
        return grad_x
    tile, block, warps = _tile(hidden)
    noise, slot, slots, mode = _noise_arguments(noise, slot)
    _backward_kernel[(_programs(x.device, triton.cdiv(rows, tile), warps),)](
        grad_y,
        x,
        grad_x,
        rstd,
        gamma,
        noise,
        slot,
        rows,
        hidden,
        slots,
        x.stride(0),
        ROWS=tile,
        BLOCK=block,
        NOISE=mode,
        num_warps=warps,
    )
    return grad_x
