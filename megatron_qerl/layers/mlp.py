"""A gated MLP that keeps one wide activation for backward instead of three.

With y = [gate | up] = W1 x, act = silu(gate) * up and W2 act, automatic differentiation keeps y, silu(gate) and act:
1.2 GB for 8192 tokens of a 7B model, and its backward makes as much again. But act is a function of y, and the base
needs no weight gradient. So only y is kept; backward walks over the tokens a slice at a time, computes act again where
the adapter's gradient wants it, and writes the gradient of y over y itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_qerl.layers.frozen import FrozenWeight
from megatron_qerl.layers.kernels import rows_linear
from megatron_qerl.layers.linear import FrozenRowParallelLinear

# Large enough that a GEMM of so many rows is as fast a row as one of all of them (measured on Hopper), small enough
# that a slice of act is a quarter of it at the usual 8192 tokens.
BACKWARD_ROWS = 2048


def gated_activation(y: Tensor) -> Tensor:
    """silu(gate) * up, [..., 2 F] -> [..., F], in one new tensor. Not differentiable."""
    gate, up = y.chunk(2, dim=-1)
    out = y.new_empty(gate.shape)
    torch.ops.aten.silu.out(gate, out=out)
    return out.mul_(up)


def _slices(rows: int) -> list[slice]:
    """Near-equal slices of at most ``BACKWARD_ROWS`` rows."""
    count = -(-rows // BACKWARD_ROWS)
    return [slice(rows * i // count, rows * (i + 1) // count) for i in range(count)]


def _factor_gradient(grad_u: Tensor, act: Tensor) -> Tensor:
    """grad_u^T act of one slice, in FP32 where the device can: the slices are summed."""
    if act.is_cuda and act.dtype == torch.bfloat16:
        return torch.mm(grad_u.t(), act, out_dtype=torch.float32)
    return torch.mm(grad_u.t(), act)


class _GatedProducts(torch.autograd.Function):
    """(W act, A act) of act = silu(gate) * up; see the module's text for what is kept."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, a: Tensor | None, base: FrozenWeight) -> tuple[Tensor, Tensor | None]:
        ctx.base = base
        ctx.save_for_backward(y, a)
        act = gated_activation(y)
        return base.multiply(act), None if a is None else rows_linear(act, a)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_u: Tensor | None) -> tuple[Tensor, Tensor | None, None]:
        y, a = ctx.saved_tensors
        y_rows, grad_rows = y.reshape(-1, y.shape[-1]), grad.reshape(-1, grad.shape[-1])
        u_rows = None if a is None or grad_u is None else grad_u.reshape(-1, grad_u.shape[-1])
        parts = _slices(y_rows.shape[0])
        grad_a = None if u_rows is None else a.new_zeros(a.shape, dtype=torch.float32)
        for part in parts:
            gate, up = y_rows[part].chunk(2, dim=1)
            grad_act = ctx.base.input_gradient(grad_rows[part], None if u_rows is None else (u_rows[part], a))
            silu = F.silu(gate)
            scratch = silu * up
            if grad_a is not None and u_rows is not None:
                grad_a += _factor_gradient(u_rows[part], scratch)
            grad_silu = torch.mul(grad_act, up, out=scratch)
            torch.mul(grad_act, silu, out=up)
            torch.ops.aten.silu_backward.grad_input(grad_silu, gate, grad_input=gate)
        # y now holds its own gradient. A second backward finds its version changed, and autograd refuses.
        return y_rows.view(y.shape), None if grad_a is None else grad_a.to(a.dtype), None


class FrozenMLP(MLP):  # type: ignore[misc]
    """Megatron's gated MLP over our linears, with the backward described above.

    linear_fc1's output belongs to this module: its gradient is written over it, so nothing else may keep it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.config
        assert config.gated_linear_unit, "the MLP is silu(gate) * up"
        assert config.activation_func is F.silu, "the MLP is silu(gate) * up"
        assert (config.activation_func_clamp_value, config.glu_linear_offset) == (None, 0.0), "no clamp, no offset"
        assert isinstance(self.linear_fc2, FrozenRowParallelLinear), "linear_fc2 is frozen"

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[s, b, H] -> ([s, b, H], None)."""
        assert per_token_scale is None, "scales by token belong to experts"
        y, bias = self.linear_fc1(hidden_states)
        assert bias is None, "a gated MLP of the supported families has no bias"
        row = self.linear_fc2
        if not (torch.is_grad_enabled() and y.requires_grad):
            act = gated_activation(y)
            del y  # it is twice as wide as act, and done with
            result: tuple[Tensor, Tensor | None] = row(act)
            return result
        a = None if row.adapter is None else row.adapter.lora_A
        partial, u = _GatedProducts.apply(y, a, row.frozen)
        finished: tuple[Tensor, Tensor | None] = row.finish(partial, u)
        return finished
