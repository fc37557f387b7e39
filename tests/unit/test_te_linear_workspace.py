"""The workspace of decoded weights: never a stale matrix, never two, one decode where two uses follow each other."""

from __future__ import annotations

import dataclasses
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from te_extensions import NVFP4Weight, nvfp4_linear
from te_extensions import workspace as workspace_module
from te_extensions.workspace import Workspace, forget_decoded, workspace_for
from tests.unit.test_kernels_reference import make_weight, reference
from tests.unit.test_te_linear import CPU, TOLERANCE, K, N, arguments, draw


@pytest.fixture(autouse=True)
def clean_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace_module, "_workspaces", {})


def recompute(x: Tensor, weight: NVFP4Weight) -> Tensor:
    return torch.utils.checkpoint.checkpoint(  # type: ignore[no-any-return]
        lambda x: nvfp4_linear(x, weight, path="dequantize").sin(), x, use_reentrant=False
    )


def test_a_recomputed_forward_serves_its_input_gradient() -> None:
    weights = [make_weight(K, K, seed=s) for s in range(3)]
    x = draw(4, K, seed=1).requires_grad_()
    y = x
    for weight in weights:
        y = recompute(y, weight)
    y.sum().backward()
    space = workspace_for(CPU)
    # Three forwards, three recomputed ones; each input gradient finds its W in place.
    assert (space.decodes, space.hits) == (6, 3)
    exact = x.detach().double().requires_grad_()
    y = exact
    for weight in weights:
        y = (y @ reference(weight).t()).sin()
    y.sum().backward()
    assert x.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-4, atol=1e-4)


def test_interleaved_weights_never_see_each_other() -> None:
    weights = [make_weight(N, K, seed=0), make_weight(N, K, seed=1), make_weight(32, K, seed=2)]
    x = draw(4, K, seed=1).requires_grad_()
    outputs = [nvfp4_linear(x, w, path="dequantize") for w in weights]
    for y, weight in zip(outputs, weights, strict=True):
        (grad,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(grad[0].double(), reference(weight).sum(0), **TOLERANCE)
    assert workspace_for(CPU).hits == 0


def dgrad(grad: Tensor, weight: NVFP4Weight) -> Tensor:
    result: Tensor = torch.ops.te_extensions.nvfp4_linear_dgrad(grad, *arguments(weight, "dequantize"))
    return result


@pytest.mark.parametrize("what", ["packed", "block_scale", "tensor_scale", "dtype"])
def test_a_changed_weight_is_decoded_again(what: str) -> None:
    weight = make_weight()
    grad = draw(2, N, seed=1)
    dgrad(grad, weight)
    dgrad(grad, weight)
    assert workspace_for(CPU).hits == 1
    if what == "packed":
        weight.packed.bitwise_xor_(0x11)
    elif what == "block_scale":
        weight.block_scale.view(torch.uint8).bitwise_xor_(1)
    elif what == "tensor_scale":
        weight = dataclasses.replace(weight, tensor_scale=weight.tensor_scale * 4)
    else:
        grad = grad.double()
    got = dgrad(grad, weight)
    assert workspace_for(CPU).hits == 1
    torch.testing.assert_close(got.double(), grad.double() @ reference(weight), **TOLERANCE)


@pytest.mark.parametrize("alive", [False, True])
def test_a_new_weight_at_an_old_address_is_decoded(alive: bool) -> None:
    """Memory of a dead weight is handed to the next one: same address, same shape, same version."""
    memory = make_weight().packed.numpy()
    first = dataclasses.replace(make_weight(), packed=torch.from_numpy(memory))
    grad = draw(2, N, seed=1)
    dgrad(grad, first)
    scale = first.block_scale
    if not alive:
        del first
    memory ^= 0x11
    second = NVFP4Weight(torch.from_numpy(memory), scale, make_weight().tensor_scale)
    got = dgrad(grad, second)
    assert workspace_for(CPU).hits == 0
    torch.testing.assert_close(got.double(), grad.double() @ reference(second), **TOLERANCE)


def test_a_hidden_write_is_declared_with_forget_decoded() -> None:
    weight = make_weight()
    grad = draw(2, N, seed=1)
    dgrad(grad, weight)
    weight.packed.data.bitwise_xor_(0x11)
    forget_decoded()
    torch.testing.assert_close(dgrad(grad, weight).double(), grad.double() @ reference(weight), **TOLERANCE)


def test_a_weight_of_inference_mode_is_never_taken_for_unchanged() -> None:
    with torch.inference_mode():
        weight = make_weight()
    grad = draw(2, N, seed=1)
    dgrad(grad, weight)
    with torch.inference_mode():
        weight.packed.bitwise_xor_(0x11)
    torch.testing.assert_close(dgrad(grad, weight).double(), grad.double() @ reference(weight), **TOLERANCE)


def test_forward_always_decodes() -> None:
    """A benchmark that repeats a layer must not measure half of it."""
    weight = make_weight()
    for _ in range(3):
        nvfp4_linear(draw(2, K, seed=0), weight, path="dequantize")
    assert (workspace_for(CPU).decodes, workspace_for(CPU).hits) == (3, 0)


def test_the_workspace_is_as_large_as_the_largest_layer_and_can_be_given_back() -> None:
    for n in (32, 64, 48):
        nvfp4_linear(draw(2, K, seed=0, dtype=torch.bfloat16), make_weight(n), path="dequantize")
    space = workspace_for(CPU)
    assert space.nbytes == 64 * K * 2
    workspace_module.release_workspaces()
    assert space.nbytes == 0
    nvfp4_linear(draw(2, K, seed=0), make_weight(), path="dequantize")


def borrow(space: Workspace, value: float, *, reuse: bool = True) -> object:
    source = torch.zeros(1)
    return space.decoded((source,), (4,), torch.float32, (value,), lambda out: out.fill_(value), reuse=reuse)


def test_a_workspace_born_in_inference_mode_serves_training() -> None:
    space = Workspace(CPU)
    with torch.inference_mode(), borrow(space, 1.0):
        pass
    with borrow(space, 2.0) as matrix:
        assert float(matrix[0]) == 2.0


def test_a_second_matrix_at_the_same_time_is_refused_in_one_thread() -> None:
    space = Workspace(CPU)
    with borrow(space, 1.0), pytest.raises(RuntimeError, match="one matrix"), borrow(space, 2.0):
        pass
    with borrow(space, 2.0) as matrix:
        assert float(matrix[0]) == 2.0


def test_threads_take_turns() -> None:
    space = Workspace(CPU)
    seen: list[float] = []
    inside, go = threading.Event(), threading.Event()

    def other() -> None:
        inside.wait()
        go.set()
        with borrow(space, 2.0) as matrix:
            seen.append(float(matrix[0]))

    thread = threading.Thread(target=other)
    thread.start()
    with borrow(space, 1.0) as matrix:
        inside.set()
        go.wait()
        thread.join(timeout=0.1)
        seen.append(float(matrix[0]))
    thread.join()
    assert seen == [1.0, 2.0]


def test_a_fill_that_fails_leaves_nothing_to_reuse() -> None:
    space = Workspace(CPU)
    source = torch.zeros(1)

    def broken(out: Tensor) -> None:
        out.fill_(7.0)
        raise ValueError("broken")

    def first(value: float) -> float:
        with space.decoded((source,), (4,), torch.float32, (), lambda out: out.fill_(value), reuse=True) as matrix:
            return float(matrix[0])

    assert (first(1.0), first(2.0)) == (1.0, 1.0)
    with (
        pytest.raises(ValueError, match="broken"),
        space.decoded((source,), (4,), torch.float32, (3.0,), broken, reuse=True),
    ):
        pass
    assert first(2.0) == 2.0


def test_a_captured_decode_uses_fresh_memory_and_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    space = Workspace(CPU)
    source = torch.zeros(1)

    def value(fill_with: float, reuse: bool) -> tuple[float, int]:
        with space.decoded((source,), (4,), torch.float32, (), lambda out: out.fill_(fill_with), reuse=reuse) as matrix:
            return float(matrix[0]), matrix.data_ptr()

    _, own = value(1.0, False)
    monkeypatch.setattr(space, "device", SimpleNamespace(type="cuda"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, device: empty(shape, dtype=dtype))
    captured, address = value(2.0, True)
    assert captured == 2.0
    assert address != own
    monkeypatch.setattr(space, "device", CPU)
    assert value(3.0, True) == (1.0, own), "eager code must find what eager code wrote"
