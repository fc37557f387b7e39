"""The NVFP4 products as operators of torch's dispatcher: ``torch.ops.te_extensions.*``.

An operator is opaque to ``torch.compile`` (a fake kernel tells it the shape), visible to profilers, and carries its own
derivative. They are declared with ``torch.library.Library``: around an empty kernel on a CPU such a call costs 8 us,
and 16 us with a gradient, where ``torch.library.custom_op`` costs 13 and 32.

    nvfp4_linear               y  = x W^T
    nvfp4_linear_dgrad         dx = dy W
    nvfp4_linear_update        y  = x W^T + u B^T            one more low-rank product, rounded with the first
    nvfp4_linear_dgrad_update  dx = dy W + v A

``update`` is where LoRA enters, and whatever else has a low rank. Its order matters: the small product is written
first and the large one accumulates onto it in its epilogue, so that no pass over [M, N] is added, and y at full
magnitude is rounded once.

Nothing but references to the packed tensors is kept for backward, as plain attributes: ``save_for_backward`` would show
them to saved-tensor hooks, and activation offloading would carry the frozen base back and forth. The check that
autograd makes there, that nobody wrote to a saved tensor, is made here by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from te_extensions.dequantize import foldable, nvfp4_dequantize
from te_extensions.dispatch import LinearPath, resolve_path
from te_extensions.weight import NVFP4Weight
from te_extensions.workspace import version_of, workspace_for

LIBRARY = torch.library.Library("te_extensions", "DEF")
NAMESPACE = "te_extensions"


def define_op(
    name: str,
    signature: str,
    kernel: Callable[..., Tensor],
    fake: Callable[..., Tensor],
    differentiable: type[torch.autograd.Function] | None,
    inputs: int,
) -> Callable[..., Tensor]:
    """Declare an operator.

    Args:
        signature: arguments and result, such as ``(Tensor x) -> Tensor``.
        kernel: computes it on CPU and CUDA tensors.
        fake: an empty result of the right shape.
        differentiable: autograd function with the same arguments, or None for an operator that refuses to be
            differentiated.
        inputs: how many leading arguments may require a gradient.

    Returns:
        The operator's default overload.
    """
    LIBRARY.define(name + signature)
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, kernel, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    overload: Callable[..., Tensor] = getattr(getattr(torch.ops, NAMESPACE), name).default

    def autograd(*args: Any) -> Tensor:
        if torch.is_grad_enabled() and any(t.requires_grad for t in args[:inputs]):
            if differentiable is None:
                first_order_only(name)
                raise AssertionError("unreachable: gradients are recorded here")
            result: Tensor = differentiable.apply(*args)
            return result
        return below_autograd(overload, *args)

    LIBRARY.impl(name, autograd, "Autograd")
    return overload


def shaped(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """[M, N] as [..., N], and no view in autograd's eyes, so that a caller may add to the result in place."""
    return rows if rows.shape == shape else torch.ops.aten._unsafe_view.default(rows, shape)


def first_order_only(name: str) -> None:
    """Refuse to build a graph of a gradient.

    Raises:
        RuntimeError: gradients are being recorded, as in backward they are under create_graph=True.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} has no second derivative: its gradients are products with a frozen base that are not recorded; "
            "do not differentiate through it with create_graph=True"
        )


def below_autograd(overload: Callable[..., Tensor], *args: Any) -> Tensor:
    """Call an operator's kernel, past its autograd registration."""
    with torch._C._AutoDispatchBelowAutograd():
        return overload(*args)


def scaled_mm(a: Tensor, b: Tensor, alpha: float, onto: Tensor | None = None) -> Tensor:
    """alpha * (a b) (+ onto), with alpha in FP32 inside the GEMM on a GPU, so that the result is rounded once.

    Args:
        onto: [M, N], overwritten with the result.
    """
    if onto is not None:
        return onto.addmm_(a, b, alpha=alpha)
    if alpha == 1.0:
        return torch.mm(a, b)
    if not a.is_cuda:
        return torch.mm(a, b) * alpha
    # beta = 0: the uninitialised memory is not read.
    return a.new_empty(a.shape[0], b.shape[1]).addmm_(a, b, beta=0, alpha=alpha)


def times_matrix(
    left: Tensor, weight: NVFP4Weight, path: LinearPath, onto: Tensor | None, *, transposed: bool, reuse: bool
) -> Tensor:
    """left W^T (``transposed``) or left W through the decoded matrix."""
    fold = foldable(weight.tensor_scale)
    alpha = 1.0 if fold else weight.tensor_scale

    def product(matrix: Tensor) -> Tensor:
        return scaled_mm(left, matrix.t() if transposed else matrix, alpha, onto)

    if path == "reference":
        return product(nvfp4_dequantize(weight, left.dtype, apply_tensor_scale=fold))

    def fill(out: Tensor) -> None:
        nvfp4_dequantize(weight, left.dtype, apply_tensor_scale=fold, out=out)

    scales = (weight.tensor_scale,) if fold else ()
    with workspace_for(left.device).decoded(
        (weight.packed, weight.block_scale), weight.shape, left.dtype, scales, fill, reuse=reuse
    ) as matrix:
        return product(matrix)


def multiply(
    x: Tensor, weight: NVFP4Weight, requested: str, u: Tensor | None = None, b: Tensor | None = None
) -> Tensor:
    """x W^T (+ u b^T) for x [..., K], by the path that ``requested`` resolves to. No autograd.

    Args:
        u, b: [..., R] and [N, R] in x's dtype, or neither.
    """
    rows = x.reshape(-1, x.shape[-1])
    shape = (*x.shape[:-1], weight.shape[0])
    if rows.shape[0] == 0:
        return x.new_empty(shape)
    path = resolve_path(requested, rows.shape[0], weight, x.dtype, x.device)
    low = None if u is None else u.reshape(rows.shape[0], -1)
    if path == "fused":
        from te_extensions.fused import FusedLora, fused_linear

        lora = None if low is None or b is None else FusedLora(low.contiguous(), b.contiguous())
        return shaped(fused_linear(rows.contiguous(), weight, lora), shape)
    if path == "humming":
        from te_extensions.humming import humming_linear

        y = humming_linear(rows.contiguous(), weight)
        return shaped(y if low is None or b is None else y.addmm_(low, b.t()), shape)
    onto = None if low is None or b is None else torch.mm(low, b.t())
    return shaped(times_matrix(rows, weight, path, onto, transposed=True, reuse=False), shape)


def multiply_transposed(
    grad: Tensor, weight: NVFP4Weight, requested: str, v: Tensor | None = None, a: Tensor | None = None
) -> Tensor:
    """grad W (+ v a) for grad [..., N]. No autograd.

    W is decoded: block scales vary along the sum over N, so no fused kernel pays. The "reference" path decodes into
    fresh memory; every other path uses the workspace, and what a recomputed forward left in it. On a CPU "auto" is the
    reference.
    """
    rows = grad.reshape(-1, grad.shape[-1])
    shape = (*grad.shape[:-1], weight.shape[1])
    if rows.shape[0] == 0:
        return grad.new_empty(shape)
    path: LinearPath = "dequantize"
    if requested == "reference" or (requested == "auto" and not grad.is_cuda):
        path = "reference"
    onto = None if v is None or a is None else torch.mm(v.reshape(rows.shape[0], -1), a)
    return shaped(times_matrix(rows, weight, path, onto, transposed=False, reuse=True), shape)


class FrozenContext:
    """The packed tensors between forward and backward, and what the backward must find unchanged."""

    def __init__(self, packed: Tensor, block_scale: Tensor, scale: Any, path: str) -> None:
        self.arguments = (packed, block_scale, scale, path)
        self._versions = (version_of(packed), version_of(block_scale))

    def unchanged(self) -> tuple[Tensor, Tensor, Any, str]:
        """The arguments.

        Raises:
            RuntimeError: a packed tensor was written to since the forward.
        """
        packed, block_scale, *_ = self.arguments
        if (version_of(packed), version_of(block_scale)) != self._versions:
            raise RuntimeError(
                "the packed weight was modified in place between forward and backward: the gradient would belong to "
                "another matrix; load weights only outside of a step"
            )
        return self.arguments


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, block_scale: Tensor, scale: float, path: str) -> Tensor:
        ctx.frozen = FrozenContext(packed, block_scale, scale, path)
        return below_autograd(LINEAR, x, packed, block_scale, scale, path)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        first_order_only("nvfp4_linear")
        return LINEAR_DGRAD(grad_y, *ctx.frozen.unchanged()), None, None, None, None


class _LinearUpdate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, u: Tensor, b: Tensor, packed: Tensor, block_scale: Tensor, scale: float, path: str
    ) -> Tensor:
        ctx.frozen = FrozenContext(packed, block_scale, scale, path)
        _, need_u, need_b, *_ = ctx.needs_input_grad
        ctx.save_for_backward(b if need_u else None, u if need_b else None)
        return below_autograd(LINEAR_UPDATE, x, u, b, packed, block_scale, scale, path)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        first_order_only("nvfp4_linear_update")
        b, u = ctx.saved_tensors
        rows = grad_y.reshape(-1, grad_y.shape[-1])
        grad_x = LINEAR_DGRAD(grad_y, *ctx.frozen.unchanged()) if ctx.needs_input_grad[0] else None
        grad_u = None if b is None else torch.mm(rows, b).view(*grad_y.shape[:-1], b.shape[1])
        grad_b = None if u is None else torch.mm(rows.t(), u.reshape(rows.shape[0], -1))
        return grad_x, grad_u, grad_b, None, None, None, None


def packed_weight(packed: Tensor, block_scale: Tensor, tensor_scale: float) -> NVFP4Weight:
    """The weight from an operator's arguments. Block scales may come as their bytes (uint8): torch can compare those,
    which it needs to check an operator's schema, and cannot compare float8."""
    bits = block_scale if block_scale.dtype != torch.uint8 else block_scale.view(torch.float8_e4m3fn)
    return NVFP4Weight(packed, bits, tensor_scale)


def _linear(x: Tensor, packed: Tensor, block_scale: Tensor, tensor_scale: float, path: str) -> Tensor:
    return multiply(x, packed_weight(packed, block_scale, tensor_scale), path)


def _linear_dgrad(grad_y: Tensor, packed: Tensor, block_scale: Tensor, tensor_scale: float, path: str) -> Tensor:
    return multiply_transposed(grad_y, packed_weight(packed, block_scale, tensor_scale), path)


def _linear_update(
    x: Tensor, u: Tensor, b: Tensor, packed: Tensor, block_scale: Tensor, tensor_scale: float, path: str
) -> Tensor:
    return multiply(x, packed_weight(packed, block_scale, tensor_scale), path, u, b)


def _linear_dgrad_update(
    grad_y: Tensor, v: Tensor, a: Tensor, packed: Tensor, block_scale: Tensor, tensor_scale: float, path: str
) -> Tensor:
    return multiply_transposed(grad_y, packed_weight(packed, block_scale, tensor_scale), path, v, a)


def _fake_rows(x: Tensor, packed: Tensor, *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[0])


def _fake_columns(grad_y: Tensor, packed: Tensor, *_: Any) -> Tensor:
    return grad_y.new_empty(*grad_y.shape[:-1], 2 * packed.shape[1])


_WEIGHT = "Tensor packed, Tensor block_scale, float tensor_scale, str path"

LINEAR = define_op("nvfp4_linear", f"(Tensor x, {_WEIGHT}) -> Tensor", _linear, _fake_rows, _Linear, 1)
LINEAR_DGRAD = define_op(
    "nvfp4_linear_dgrad", f"(Tensor grad_y, {_WEIGHT}) -> Tensor", _linear_dgrad, _fake_columns, None, 1
)
LINEAR_UPDATE = define_op(
    "nvfp4_linear_update",
    f"(Tensor x, Tensor u, Tensor b, {_WEIGHT}) -> Tensor",
    _linear_update,
    lambda x, u, b, *weight: _fake_rows(x, *weight),
    _LinearUpdate,
    3,
)
LINEAR_DGRAD_UPDATE = define_op(
    "nvfp4_linear_dgrad_update",
    f"(Tensor grad_y, Tensor v, Tensor a, {_WEIGHT}) -> Tensor",
    _linear_dgrad_update,
    lambda grad_y, v, a, *weight: _fake_columns(grad_y, *weight),
    None,
    3,
)
