"""LoRA inside the frozen product, against float64 and against Megatron's row order."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from megatron_qerl.layers.layout import FusedLayout
from te_extensions import LoraPart, LoraWeights, adapter_bank, nvfp4_lora_linear, nvfp4_multi_lora_linear
from tests.unit.test_kernels_reference import make_weight, reference

K, R = 96, 8
TOLERANCE = {"rtol": 3e-5, "atol": 3e-5}
# Two KV groups of (two queries, a key, a value); k has no adapter.
QKV = FusedLayout((("q", 32), ("k", 16), ("v", 16)), groups=2)
GATE_UP = FusedLayout((("gate", 32), ("up", 32)), groups=1)
DOWN = FusedLayout((("down", 48),), groups=1)
CASES = [(QKV, ("q", "v")), (QKV, ("q", "k", "v")), (GATE_UP, ("gate", "up")), (GATE_UP, ("up",)), (DOWN, ("down",))]


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def adapters(layout: FusedLayout, adapted: tuple[str, ...], scale: float = 0.3) -> LoraWeights:
    rows = sum(n for name, n in layout.parts if name in adapted)
    return LoraWeights(
        draw(len(adapted) * R, K, seed=11).requires_grad_(),
        draw(rows, R, seed=12).requires_grad_(),
        tuple(LoraPart(n, name in adapted) for name, n in layout.parts),
        scale,
        layout.groups,
    )


def dense(lora: LoraWeights, layout: FusedLayout, adapted: tuple[str, ...], a: Tensor, b: Tensor) -> Tensor:
    """[N, K]: s B A of each part, in fused row order, by the layout's own code."""
    blocks_a = dict(zip(adapted, a.split(R), strict=True))
    blocks_b = dict(zip(adapted, b.split([n for name, n in layout.parts if name in adapted]), strict=True))
    parts = {
        name: lora.scale * blocks_b[name] @ blocks_a[name] if name in adapted else a.new_zeros(n, K)
        for name, n in layout.parts
    }
    return layout.fuse_rows(parts)


@pytest.mark.parametrize("path", ["auto", "dequantize"])
@pytest.mark.parametrize(("layout", "adapted"), CASES)
@pytest.mark.parametrize("tensor_scale", [None, 0.0123])
def test_value_and_all_gradients_match_float64(
    path: str, layout: FusedLayout, adapted: tuple[str, ...], tensor_scale: float | None
) -> None:
    weight = make_weight(layout.rows, K, scale=tensor_scale)
    lora = adapters(layout, adapted)
    x = draw(2, 5, K, seed=1).requires_grad_()
    grad = draw(2, 5, layout.rows, seed=2)
    y = nvfp4_lora_linear(x, weight, lora, path=path)
    y.backward(grad)
    exact = [t.detach().double().requires_grad_() for t in (x, lora.a, lora.b)]
    want = exact[0] @ (reference(weight) + dense(lora, layout, adapted, *exact[1:])).t()
    want.backward(grad.double())
    torch.testing.assert_close(y.double(), want, **TOLERANCE)
    for ours, theirs in zip((x, lora.a, lora.b), exact, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("trained", ["x", "a", "b"])
def test_each_gradient_alone(trained: str) -> None:
    weight, lora = make_weight(DOWN.rows, K), adapters(DOWN, ("down",))
    tensors = {"x": draw(5, K, seed=1), "a": lora.a.detach(), "b": lora.b.detach()}
    tensors[trained].requires_grad_()
    lora = dataclasses.replace(lora, a=tensors["a"], b=tensors["b"])
    nvfp4_lora_linear(tensors["x"], weight, lora).sum().backward()
    exact = {k: t.detach().double().requires_grad_(k == trained) for k, t in tensors.items()}
    full = reference(weight) + dense(lora, DOWN, ("down",), exact["a"], exact["b"])
    (exact["x"] @ full.t()).sum().backward()
    ours, theirs = tensors[trained].grad, exact[trained].grad
    assert ours is not None
    assert theirs is not None
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)


def test_frozen_adapters_keep_no_activation() -> None:
    saved: list[Tensor] = []
    lora = adapters(DOWN, ("down",))
    lora = dataclasses.replace(lora, a=lora.a.detach(), b=lora.b.detach())
    x = draw(5, K, seed=1).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        nvfp4_lora_linear(x, make_weight(DOWN.rows, K), lora)
    assert all(t.shape != x.shape for t in saved)


def test_the_second_derivative_is_refused() -> None:
    lora = adapters(DOWN, ("down",))
    y = nvfp4_lora_linear(draw(5, K, seed=1), make_weight(DOWN.rows, K), lora)
    with pytest.raises(RuntimeError, match="nvfp4_lora_linear has no second derivative"):
        torch.autograd.grad(y.square().sum(), lora.a, create_graph=True)


def test_prepared_adapters_give_the_same_and_do_not_follow_writes() -> None:
    weight, lora = make_weight(QKV.rows, K), adapters(QKV, ("q", "v"))
    x = draw(5, K, seed=1)
    ready = lora.prepared()
    assert ready.wide is not None
    assert ready.wide.shape == (QKV.rows, 32)
    assert not ready.a.requires_grad
    before = nvfp4_lora_linear(x, weight, ready)
    torch.testing.assert_close(before, nvfp4_lora_linear(x, weight, lora).detach(), **TOLERANCE)
    with torch.no_grad():
        # What Megatron's optimizer does: no version counter moves. The unprepared form must see it.
        lora.b.data.mul_(2.0)
        lora.a.data.mul_(3.0)
    assert torch.equal(nvfp4_lora_linear(x, weight, ready), before)
    base = x.double() @ reference(weight).t()
    update = (nvfp4_lora_linear(x, weight, lora).double() - base).detach()
    torch.testing.assert_close(update, 6.0 * (before.double() - base), rtol=1e-4, atol=1e-3)


def test_prepared_adapters_own_their_memory_even_where_nothing_is_padded() -> None:
    lora = LoraWeights(draw(32, K, seed=1), draw(48, 32, seed=2), (LoraPart(48),), 0.5)
    ready = lora.prepared()
    assert lora.wide_b() is lora.b
    assert ready.wide is not None
    assert ready.a.data_ptr() != lora.a.data_ptr()
    assert ready.wide.data_ptr() != lora.b.data_ptr()


def test_operator_passes_opcheck() -> None:
    weight, lora = make_weight(QKV.rows, K), adapters(QKV, ("q", "v"))
    x = draw(3, K, seed=1).requires_grad_()
    wide = lora.wide_b().detach().requires_grad_()
    bits = weight.block_scale.view(torch.uint8)
    arguments = (x, lora.a, wide, weight.packed, bits, weight.tensor_scale, lora.scale, "auto")
    torch.library.opcheck(torch.ops.te_extensions.nvfp4_lora_linear.default, arguments)


def test_compiles_without_a_graph_break() -> None:
    torch._dynamo.reset()
    weight, lora = make_weight(QKV.rows, K), adapters(QKV, ("q", "v"))
    compiled = torch.compile(lambda x: nvfp4_lora_linear(x, weight, lora), backend="aot_eager", fullgraph=True)
    x = draw(3, K, seed=1)
    want, got = nvfp4_lora_linear(x, weight, lora), compiled(x)
    torch.testing.assert_close(got, want)
    ours = torch.autograd.grad(got.sum(), (lora.a, lora.b))
    for a, b in zip(ours, torch.autograd.grad(want.sum(), (lora.a, lora.b)), strict=True):
        torch.testing.assert_close(a, b)


def test_misfits_are_named() -> None:
    weight, lora = make_weight(DOWN.rows, K), adapters(DOWN, ("down",))
    with pytest.raises(ValueError, match=r"b is .* needed \[64, r\]"):
        dataclasses.replace(lora, parts=(LoraPart(64),))
    with pytest.raises(ValueError, match=r"a is .* needed \[16, K\]"):
        dataclasses.replace(lora, parts=(LoraPart(24), LoraPart(24)))
    with pytest.raises(ValueError, match="do not split into groups = 5"):
        dataclasses.replace(lora, groups=5)
    with pytest.raises(ValueError, match="none is adapted"):
        dataclasses.replace(lora, parts=(LoraPart(48, False),))
    with pytest.raises(ValueError, match="adapters are 48 x 96"):
        nvfp4_lora_linear(draw(2, 64, seed=0), make_weight(48, 64), lora)
    with pytest.raises(ValueError, match="one dtype"):
        nvfp4_lora_linear(draw(2, K, seed=0).bfloat16(), weight, lora)


@pytest.mark.parametrize("bank", [False, True])
@pytest.mark.parametrize("path", ["auto", "dequantize"])
def test_each_row_gets_its_own_adapter(bank: bool, path: str) -> None:
    slots, n, rows = 3, 48, 7
    weight = make_weight(n, K, scale=0.0123)
    x = draw(rows, K, seed=1).requires_grad_()
    a, b, scale = draw(slots, R, K, seed=2), draw(slots, n, R, seed=3), torch.tensor([0.3, 2.0, 0.7])
    if bank:
        b = adapter_bank(slots, n, R, dtype=b.dtype, device=b.device).copy_(b)
        assert b.permute(1, 0, 2).is_contiguous()
    index = torch.tensor([2, -1, 0, 1, 1, -1, 2], dtype=torch.int32)
    y = nvfp4_multi_lora_linear(x, weight, a, b, scale, index, path=path)
    grad = draw(rows, n, seed=4)
    y.backward(grad)
    assert x.grad is not None
    for row, adapter in enumerate(index.tolist()):
        matrix = reference(weight)
        if adapter >= 0:
            matrix = matrix + scale[adapter].double() * (b[adapter].double() @ a[adapter].double())
        torch.testing.assert_close(y[row].double(), matrix @ x[row].detach().double(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(x.grad[row].double(), grad[row].double() @ matrix, rtol=1e-4, atol=1e-4)


def test_an_overflowing_adapter_does_not_touch_other_rows() -> None:
    weight = make_weight(48, K)
    x, a, b = draw(2, K, seed=1), draw(2, R, K, seed=2), draw(2, 48, R, seed=3)
    a[1] = float("inf")
    y = nvfp4_multi_lora_linear(x, weight, a, b, torch.ones(2), torch.tensor([0, -1]))
    assert torch.isfinite(y).all()


def test_an_index_out_of_range_is_refused() -> None:
    weight = make_weight(48, K)
    x, a, b = draw(2, K, seed=1), draw(2, R, K, seed=2), draw(2, 48, R, seed=3)
    for bad in ([0, 2], [-2, 0]):
        with pytest.raises(ValueError, match=r"allowed are -1 \.\. 1"):
            nvfp4_multi_lora_linear(x, weight, a, b, torch.ones(2), torch.tensor(bad))
    with pytest.raises(ValueError, match="needed"):
        nvfp4_multi_lora_linear(x, weight, a, b[:, :40], torch.ones(2), torch.tensor([0, 1]))
