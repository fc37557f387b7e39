"""RMSNorm whose scale carries noise: y = x / rms(x) * (gamma + z), all in FP32, rounded once at the end.

Adding z in FP32 is the point. Near gamma = 1 a BF16 step is 2^-7, so a sigma of 5e-4 added in BF16 changes almost no
channel. The source of the rule y = u * (w + z) is QeRL section 3.3 (noise merging).

Requests that are decoded together may each have a noise of their own: then ``noise`` holds one z a slot and ``slot``
names the z of every row. On a CPU torch does the work; on a GPU ``norm_triton`` does it in one launch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_GPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _check_noise(x: Tensor, gamma: Tensor, noise: Tensor | None, slot: Tensor | None) -> None:
    hidden = x.shape[-1]
    if noise is None and slot is not None:
        raise ValueError("slot is given without noise: it chooses rows of a [S, H] noise")
    if noise is not None and tuple(noise.shape) != ((hidden,) if slot is None else (noise.shape[0], hidden)):
        raise ValueError(
            f"noise is {tuple(noise.shape)}, needed ({hidden},) without slot and (S, {hidden}) with it (H = {hidden})"
        )
    if slot is not None:
        rows = x.numel() // max(hidden, 1)
        if slot.dtype != torch.int32 or tuple(slot.shape) != (rows,):
            raise ValueError(f"slot is {tuple(slot.shape)} {slot.dtype}, needed ({rows},) int32: one for each row of x")


def _rows_reference(x: Tensor, gamma: Tensor, noise: Tensor, slot: Tensor, eps: float) -> Tensor:
    """Every row with the noise it names; torch operations, any device, differentiable in x."""
    if bool(((slot < -1) | (slot >= noise.shape[0])).any()):
        raise IndexError(
            f"slot must be -1 (clean) to {noise.shape[0] - 1}, found {int(slot.min())} to {int(slot.max())}"
        )
    flat = x.reshape(-1, x.shape[-1])
    z = noise.index_select(0, slot.clamp(min=0).long())
    scale = torch.where((slot >= 0).unsqueeze(1), gamma + z, gamma)
    unit = torch.nn.functional.rms_norm(flat.float(), (x.shape[-1],), None, eps)
    return (unit * scale).to(x.dtype).view(x.shape)


class _TritonNorm(torch.autograd.Function):
    """x [rows, H] -> [rows, H]; only x gets a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, noise: Tensor | None, slot: Tensor | None, eps: float) -> Tensor:
        from te_extensions.norm_triton import launch_forward

        y, rstd = launch_forward(x, gamma, noise, slot, eps, keep_rstd=True)
        ctx.save_for_backward(x, rstd, gamma, noise, slot)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, None, None, None, None]:
        from te_extensions.norm_triton import launch_backward

        x, rstd, gamma, noise, slot = ctx.saved_tensors
        return launch_backward(grad_y.contiguous(), x, rstd, gamma, noise, slot), None, None, None, None


def _check_gpu(x: Tensor, gamma: Tensor, noise: Tensor | None, slot: Tensor | None) -> None:
    """What the kernel assumes and torch's own norm does not."""
    from te_extensions.norm_triton import MAX_HIDDEN

    if x.dtype not in _GPU_DTYPES or not 0 < x.shape[-1] <= MAX_HIDDEN:
        raise ValueError(
            f"x is {x.dtype} with H = {x.shape[-1]}; the kernel takes bf16, fp16 or fp32, H to {MAX_HIDDEN}"
        )
    for name, tensor in (("gamma", gamma), ("noise", noise), ("slot", slot)):
        if tensor is None:
            continue
        if tensor.requires_grad:
            raise ValueError(
                f"{name} asks for a gradient, which rms_norm_noise does not compute on a GPU: it is frozen"
            )
        if tensor.device != x.device or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is on {tensor.device} with strides {tensor.stride()}; needed contiguous on {x.device}"
            )
        if name != "slot" and tensor.dtype != torch.float32:
            raise ValueError(f"{name} is {tensor.dtype}, needed float32: the noise does not survive in BF16")
    if tuple(gamma.shape) != (x.shape[-1],):
        raise ValueError(f"gamma is {tuple(gamma.shape)}, needed ({x.shape[-1]},)")


def _triton_norm(x: Tensor, gamma: Tensor, noise: Tensor | None, slot: Tensor | None, eps: float) -> Tensor:
    from te_extensions.norm_triton import launch_forward

    flat = x.reshape(-1, x.shape[-1])
    if flat.stride(-1) != 1:
        flat = flat.contiguous()
    if flat.requires_grad and torch.is_grad_enabled():
        y: Tensor = _TritonNorm.apply(flat, gamma, noise, slot, eps)
    else:
        y, _ = launch_forward(flat, gamma, noise, slot, eps, keep_rstd=False)
    return y.view(x.shape)


def rms_norm_noise(x: Tensor, gamma: Tensor, noise: Tensor | None, eps: float, *, slot: Tensor | None = None) -> Tensor:
    """Normalise the last dimension.

    Args:
        x: [..., H]; on a GPU bfloat16, float16 or float32.
        gamma: FP32 [H], the clean scale.
        noise: FP32 [H] added to gamma, or None for the clean norm (bit-equal to a zero vector). With ``slot``: FP32
            [S, H], one noise a slot.
        eps: added to the mean square.
        slot: int32 [rows], the noise of each row of x with its leading dimensions flattened; -1 is clean.

    Returns:
        [..., H] in x's dtype; on a GPU differentiable in x alone.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or (on a GPU) gamma or noise asks for a gradient.
        IndexError: a slot that does not exist, on a CPU. On a GPU nobody waits to look: such a row is NaN.
    """
    _check_noise(x, gamma, noise, slot)
    if x.is_cuda:
        _check_gpu(x, gamma, noise, slot)
        with torch.cuda.device(x.device):
            return _triton_norm(x, gamma, noise, slot, float(eps))
    if noise is not None and slot is not None:
        return _rows_reference(x, gamma, noise, slot, eps)
    scale = gamma if noise is None else gamma + noise
    return torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), scale, eps).to(x.dtype)
