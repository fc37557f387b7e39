"""The NVFP4 linear as a torch operator: derivatives, compilation, what is kept for backward."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from te_extensions import (
    LoraPart,
    LoraWeights,
    NVFP4Weight,
    nvfp4_dequantize,
    nvfp4_linear,
    nvfp4_linear_update,
    nvfp4_lora_linear,
)
from te_extensions import dispatch as dispatch_module
from te_extensions import workspace as workspace_module
from tests.unit.test_kernels_reference import make_weight, reference

CPU = torch.device("cpu")
N, K, R = 48, 96, 16
# A float32 product of length K, and the low-rank one of length R, against float64.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


@pytest.fixture(autouse=True)
def clean_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace_module, "_workspaces", {})


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def arguments(weight: NVFP4Weight, path: str = "auto") -> tuple[Tensor, Tensor, float, str]:
    return weight.packed, weight.block_scale, weight.tensor_scale, path


@pytest.mark.parametrize("path", ["auto", "reference", "dequantize"])
@pytest.mark.parametrize("scale", [None, 0.0123])
@pytest.mark.parametrize("lead", [(5,), (2, 3), (0,), ()])
def test_every_cpu_path_matches_float64(path: str, scale: float | None, lead: tuple[int, ...]) -> None:
    weight = make_weight(scale=scale)
    x = draw(*lead, K, seed=1).requires_grad_()
    y = nvfp4_linear(x, weight, path=path)
    grad = draw(*lead, N, seed=2)
    y.backward(grad)
    exact = reference(weight)
    torch.testing.assert_close(y.double(), x.detach().double() @ exact.t(), **TOLERANCE)
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double(), grad.double() @ exact, **TOLERANCE)


@pytest.mark.parametrize("scale", [None, 0.0123])
def test_bfloat16_is_the_decoded_product_bit_for_bit(scale: float | None) -> None:
    weight = make_weight(scale=scale)
    x = draw(4, K, seed=1, dtype=torch.bfloat16)
    matrix = nvfp4_dequantize(weight, torch.bfloat16, apply_tensor_scale=scale is None)
    want = torch.mm(x, matrix.t()) * (1.0 if scale is None else weight.tensor_scale)
    for path in ("reference", "dequantize"):
        assert torch.equal(nvfp4_linear(x, weight, path=path), want)
    assert torch.equal(nvfp4_linear(x, weight, dequantized=matrix), want)


@pytest.mark.parametrize("path", ["reference", "dequantize"])
def test_the_update_matches_float64_in_value_and_all_gradients(path: str) -> None:
    weight = make_weight(scale=0.0123)
    x, u, b = (draw(*s, seed=i).requires_grad_() for i, s in enumerate([(2, 5, K), (2, 5, R), (N, R)]))
    grad = draw(2, 5, N, seed=9)
    y = nvfp4_linear_update(x, weight, u, b, path=path)
    y.backward(grad)
    wide = [t.detach().double().requires_grad_() for t in (x, u, b)]
    want = wide[0] @ reference(weight).t() + wide[1] @ wide[2].t()
    want.backward(grad.double())
    torch.testing.assert_close(y.double(), want, **TOLERANCE)
    for ours, exact in zip((x, u, b), wide, strict=True):
        assert ours.grad is not None
        assert exact.grad is not None
        torch.testing.assert_close(ours.grad.double(), exact.grad, **TOLERANCE)


def test_the_update_rounds_the_large_product_once() -> None:
    """y = fl(W x + fl(u b^T)): adding u b^T to a rounded W x would err by half a unit of y once more."""
    weight = make_weight(n=256, k=256)
    x, u, b = (draw(*s, seed=i, dtype=torch.bfloat16) for i, s in enumerate([(64, 256), (64, R), (256, R)]))
    b = b * 1e-3
    exact = x.double() @ reference(weight).t() + u.double() @ b.double().t()
    ours = (nvfp4_linear_update(x, weight, u, b, path="dequantize").double() - exact).square().mean()
    twice = ((nvfp4_linear(x, weight) + u @ b.t()).double() - exact).square().mean()
    assert ours < 0.75 * twice


def test_operators_pass_opcheck() -> None:
    weight = make_weight()
    bits = weight.block_scale.view(torch.uint8)

    def arguments(path: str = "auto") -> tuple[Tensor, Tensor, float, str]:
        return weight.packed, bits, weight.tensor_scale, path

    x, grad = draw(3, K, seed=1).requires_grad_(), draw(3, N, seed=2)
    u, b = draw(3, R, seed=3).requires_grad_(), draw(N, R, seed=4).requires_grad_()
    ops = torch.ops.te_extensions
    torch.library.opcheck(ops.nvfp4_linear.default, (x, *arguments()))
    torch.library.opcheck(ops.nvfp4_linear.default, (x.detach(), *arguments("dequantize")))
    torch.library.opcheck(ops.nvfp4_linear_dgrad.default, (grad, *arguments()))
    torch.library.opcheck(ops.nvfp4_linear_update.default, (x, u, b, *arguments()))
    torch.library.opcheck(
        ops.nvfp4_linear_dgrad_update.default,
        (grad, u.detach(), draw(R, K, seed=5), *arguments()),
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_without_a_graph_break(backend: str) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = make_weight(64, K), make_weight(32, 64, seed=3, scale=0.03)

        def forward(self, x: Tensor) -> Tensor:
            return nvfp4_linear(torch.nn.functional.silu(nvfp4_linear(x, self.first)), self.second).sin()

    torch._dynamo.reset()
    block = Block()
    compiled = torch.compile(block, backend=backend, fullgraph=True)
    for rows in (4, 7):
        eager, ours = (draw(rows, K, seed=rows).requires_grad_() for _ in range(2))
        want, got = block(eager), compiled(ours)
        want.sum().backward()
        got.sum().backward()
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(ours.grad, eager.grad)
    with torch.no_grad():
        torch.testing.assert_close(compiled(eager), want)


def test_backward_shows_nothing_to_saved_tensor_hooks() -> None:
    saved: list[Tensor] = []
    x, u, b = draw(4, K, seed=0).requires_grad_(), draw(4, R, seed=1), draw(N, R, seed=2)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        nvfp4_linear(x, make_weight())
        nvfp4_linear_update(x, make_weight(), u, b)
    assert saved == []


def test_the_input_dies_before_backward() -> None:
    """Recomputation and long sequences rely on it: x is not needed, so it must not be held."""
    import weakref

    leaf = draw(4, K, seed=0).requires_grad_()
    x = leaf * 2
    y = nvfp4_linear(x, make_weight())
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None
    y.sum().backward()


def test_the_second_derivative_is_refused() -> None:
    x = draw(3, K, seed=1).requires_grad_()
    y = nvfp4_linear(x, make_weight())
    with pytest.raises(RuntimeError, match="nvfp4_linear has no second derivative"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)
    grad = draw(3, N, seed=2).requires_grad_()
    with pytest.raises(RuntimeError, match="nvfp4_linear_dgrad has no second derivative"):
        torch.ops.te_extensions.nvfp4_linear_dgrad(grad, *arguments(make_weight()))


def test_a_weight_written_to_before_backward_is_noticed() -> None:
    weight = make_weight()
    x = draw(3, K, seed=1).requires_grad_()
    y = nvfp4_linear(x, weight)
    weight.packed.bitwise_xor_(1)
    with pytest.raises(RuntimeError, match="modified in place between forward and backward"):
        y.sum().backward()


def test_a_result_may_be_added_to_in_place() -> None:
    x, bias = draw(2, 3, K, seed=1).requires_grad_(), draw(N, seed=2).requires_grad_()
    y = nvfp4_linear(x, make_weight())
    y.add_(bias).sum().backward()
    assert bias.grad is not None
    assert torch.equal(bias.grad, torch.full((N,), 6.0))


def test_misfits_are_named() -> None:
    weight = make_weight()
    with pytest.raises(ValueError, match="x has 95 features"):
        nvfp4_linear(draw(2, 95, seed=0), weight)
    with pytest.raises(ValueError, match="dequantized is"):
        nvfp4_linear(draw(2, K, seed=0), weight, dequantized=torch.zeros(N, K, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="path = 'quick' is not a path"):
        nvfp4_linear(draw(2, K, seed=0), weight, path="quick")
    with pytest.raises(ValueError, match="do not fit"):
        nvfp4_linear_update(draw(2, K, seed=0), weight, draw(2, R, seed=0), draw(N, R + 1, seed=0))
    with pytest.raises(ValueError, match="one dtype"):
        nvfp4_linear_update(draw(2, K, seed=0), weight, draw(2, R, seed=0), draw(N, R, seed=0).bfloat16())


@dataclass(frozen=True)
class Columns:
    u: Tensor
    b: Tensor


@dataclass(frozen=True)
class Whole:
    a: Tensor
    b: Tensor
    scale: float


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], bool, type | None]]:
    """What the fused kernel is called with, a reference in its place: wiring only, tests/gpu runs the kernel."""
    calls: list[tuple[tuple[int, ...], bool, type | None]] = []

    def fused_linear(x: Tensor, weight: NVFP4Weight, lora: Columns | Whole | None = None) -> Tensor:
        calls.append((tuple(x.shape), x.is_contiguous(), None if lora is None else type(lora)))
        y = x.double() @ reference(weight).t()
        if isinstance(lora, Whole):
            lora = Columns(lora.scale * x.double() @ lora.a.double().t(), lora.b)
        return (y if lora is None else y + lora.u.double() @ lora.b.double().t()).to(x.dtype)

    fake = SimpleNamespace(
        fused_linear=fused_linear,
        FusedLora=Columns,
        FusedAdapter=Whole,
        adapter_refusal=lambda rows, rank: None if rows <= 4 else "too many rows",
    )
    monkeypatch.setitem(sys.modules, "te_extensions.fused", fake)
    monkeypatch.setattr(dispatch_module, "refusal", lambda *_: None)
    return calls


def test_the_fused_path_gets_rows_and_update(fused_calls: list[tuple[tuple[int, ...], bool, type | None]]) -> None:
    weight = make_weight()
    x = draw(2, 2 * K, 3, seed=1)[:, :K].transpose(1, 2).requires_grad_()
    y = nvfp4_linear(x, weight, path="fused")
    torch.testing.assert_close(y.double(), x.double() @ reference(weight).t(), **TOLERANCE)
    u, b = draw(2, 3, R, seed=2), draw(N, R, seed=3)
    want = x.double() @ reference(weight).t() + u.double() @ b.double().t()
    torch.testing.assert_close(nvfp4_linear_update(x, weight, u, b, path="fused").double(), want, **TOLERANCE)
    assert fused_calls == [((6, K), True, None), ((6, K), True, Columns)]
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad[0, 0].double(), reference(weight).sum(0), **TOLERANCE)


@pytest.mark.parametrize(("rows", "how"), [(3, Whole), (6, Columns)])
def test_a_short_batch_hands_the_whole_adapter_to_the_kernel(
    rows: int, how: type, fused_calls: list[tuple[tuple[int, ...], bool, type | None]]
) -> None:
    """And its gradients are those of the composition, with and without gradients of x and A."""
    weight, scale = make_weight(), 0.5
    a0, b0, x0 = draw(R, K, seed=2), draw(N, R, seed=3), draw(1, rows, K, seed=1)
    for needed in ((True, True, True), (False, False, True), (True, False, False), (False, True, True)):
        x, a, b = (t.clone().requires_grad_(n) for t, n in zip((x0, a0, b0), needed, strict=True))
        y = nvfp4_lora_linear(x, weight, LoraWeights(a, b, (LoraPart(N),), scale), path="fused")
        xs, az, bs = (t.detach().double().requires_grad_(n) for t, n in zip((x0, a0, b0), needed, strict=True))
        want = xs @ reference(weight).t() + scale * (xs @ az.t()) @ bs.t()
        torch.testing.assert_close(y.double(), want, **TOLERANCE)
        y.square().sum().backward()
        want.square().sum().backward()
        for mine, theirs in ((x, xs), (a, az), (b, bs)):
            assert (mine.grad is None) == (theirs.grad is None)
            if mine.grad is not None:
                torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-4, atol=1e-3)
    with torch.no_grad():
        nvfp4_lora_linear(x0, weight, LoraWeights(a0, b0, (LoraPart(N),), scale), path="fused")
    assert fused_calls == [((rows, K), True, how)] * 5
