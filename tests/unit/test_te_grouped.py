"""Experts' frozen linears against float64, with empty experts and no tokens."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from te_extensions import NVFP4Weight, dispatch, grouped, nvfp4_grouped_linear
from te_extensions import workspace as workspace_module
from te_extensions.dispatch import ENVIRONMENT_VARIABLE
from te_extensions.workspace import workspace_for
from tests.unit.test_kernels_reference import make_weight, reference

N, K, E = 48, 96, 4
COUNTS = [[3, 0, 5, 2], [0, 0, 10, 0], [0, 0, 0, 0], [1, 1, 1, 1]]
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}
Stack = tuple[Tensor, Tensor, list[float], Tensor]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(workspace_module, "_workspaces", {})
    monkeypatch.setattr(dispatch, "_logged", set())


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stack(n: int = N, scale: float | None = None) -> Stack:
    """Packed [E, N, K/2], scales [E, N, K/16], E tensor scales that differ, and the float64 matrices."""
    experts = [make_weight(n, K, seed=e, scale=scale) for e in range(E)]
    scales = [w.tensor_scale * 2**e for e, w in enumerate(experts)]
    experts = [NVFP4Weight(w.packed, w.block_scale, s) for w, s in zip(experts, scales, strict=True)]
    exact = torch.stack([reference(w) for w in experts])
    return torch.stack([w.packed for w in experts]), torch.stack([w.block_scale for w in experts]), scales, exact


def expected(rows: Tensor, counts: list[int], matrices: Tensor) -> Tensor:
    """[T, K] times each expert's [N, K]."""
    pieces = [r @ m.t() for r, m in zip(rows.double().split(counts), matrices, strict=True)]
    return torch.cat(pieces)


@pytest.mark.parametrize("path", ["auto", "reference", "dequantize"])
@pytest.mark.parametrize("scale", [None, 0.0123])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("as_list", [True, False])
def test_value_and_gradient_match_float64(path: str, scale: float | None, counts: list[int], as_list: bool) -> None:
    packed, block_scale, scales, exact = stack(scale=scale)
    x = draw(sum(counts), K, seed=1).requires_grad_()
    given = counts if as_list else torch.tensor(counts)
    y = nvfp4_grouped_linear(x, given, packed, block_scale, scales, path=path)
    grad = draw(sum(counts), N, seed=2)
    y.backward(grad)
    torch.testing.assert_close(y.double(), expected(x.detach(), counts, exact), **TOLERANCE)
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double(), expected(grad, counts, exact.transpose(1, 2)), **TOLERANCE)


def test_neighbouring_experts_are_told_apart() -> None:
    """Control: the tolerance above notices one row given to the expert beside it."""
    packed, block_scale, scales, exact = stack()
    x = draw(10, K, seed=1)
    y = nvfp4_grouped_linear(x, [3, 0, 5, 2], packed, block_scale, scales, path="dequantize")
    assert (y.double() - expected(x, [2, 1, 5, 2], exact))[2].norm() > 0.1 * y[2].norm()


def test_the_stack_is_decoded_once_and_serves_the_gradient() -> None:
    packed, block_scale, scales, _ = stack()
    x = draw(10, K, seed=1).requires_grad_()
    y = nvfp4_grouped_linear(x, COUNTS[0], packed, block_scale, scales, path="dequantize")
    y.sum().backward()
    space = workspace_for(x.device)
    assert (space.decodes, space.hits) == (1, 1)
    assert space.nbytes == E * N * K * 4


@pytest.mark.parametrize(("n", "scale", "reason"), [(N, 0.0123, "tensor_scale"), (44, None, "N = 44")])
def test_what_has_no_stack_is_computed_one_by_one_and_logged(
    n: int, scale: float | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    packed, block_scale, scales, exact = stack(n, scale)
    x = draw(10, K, seed=1)
    with caplog.at_level(logging.INFO, logger="te_extensions.dispatch"):
        y = nvfp4_grouped_linear(x, COUNTS[0], packed, block_scale, scales, path="dequantize")
    assert reason in caplog.records[0].getMessage()
    torch.testing.assert_close(y.double(), expected(x, COUNTS[0], exact), **TOLERANCE)
    assert workspace_for(x.device).nbytes == n * K * 4


def test_nothing_but_the_counts_is_saved() -> None:
    packed, block_scale, scales, _ = stack()
    saved: list[Tensor] = []
    x = draw(10, K, seed=1).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        nvfp4_grouped_linear(x, COUNTS[0], packed, block_scale, scales)
    assert [t.tolist() for t in saved] == [COUNTS[0]]


def test_operators_pass_opcheck() -> None:
    packed, block_scale, scales, _ = stack()
    bits = block_scale.view(torch.uint8)
    counts = torch.tensor(COUNTS[0])
    ops = torch.ops.te_extensions
    x, grad = draw(10, K, seed=1).requires_grad_(), draw(10, N, seed=2)
    for path in ("auto", "dequantize"):
        torch.library.opcheck(ops.nvfp4_grouped_linear.default, (x, counts, packed, bits, scales, path))
        torch.library.opcheck(ops.nvfp4_grouped_linear_dgrad.default, (grad, counts, packed, bits, scales, path))


def test_the_second_derivative_is_refused() -> None:
    packed, block_scale, scales, _ = stack()
    x = draw(10, K, seed=1).requires_grad_()
    y = nvfp4_grouped_linear(x, COUNTS[0], packed, block_scale, scales)
    with pytest.raises(RuntimeError, match="nvfp4_grouped_linear has no second derivative"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


@pytest.mark.parametrize("path", ["auto", "dequantize"])
def test_misfits_are_named(path: str) -> None:
    packed, block_scale, scales, _ = stack()
    x = draw(10, K, seed=1)
    for bad in ([3, 0, 5, 1], [3, 0, 5, 3], [3, -1, 6, 2]):
        with pytest.raises(ValueError, match="tokens_per_expert sums to"):
            nvfp4_grouped_linear(x, bad, packed, block_scale, scales, path=path)
    with pytest.raises(ValueError, match="do not fit 4 experts"):
        nvfp4_grouped_linear(x, [3, 7], packed, block_scale, scales, path=path)
    with pytest.raises(ValueError, match=r"needed \[T, 96\]"):
        nvfp4_grouped_linear(x[:, :64], COUNTS[0], packed, block_scale, scales, path=path)
    with pytest.raises(ValueError, match="needed int64 or int32"):
        nvfp4_grouped_linear(x, torch.tensor([3.0, 0.0, 5.0, 2.0]), packed, block_scale, scales, path=path)
    with pytest.raises(ValueError, match="has no grouped form"):
        nvfp4_grouped_linear(x, COUNTS[0], packed, block_scale, scales, path="humming")
    with pytest.raises(ValueError, match="device cpu is not a CUDA device"):
        nvfp4_grouped_linear(x.bfloat16(), COUNTS[0], packed, block_scale, scales, path="fused")


def test_the_fused_path_visits_experts_with_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wiring only; tests/gpu runs the kernel."""
    seen: list[int] = []

    def fused_linear(x: Tensor, weight: NVFP4Weight) -> Tensor:
        seen.append(x.shape[0])
        return (x.double() @ reference(weight).t()).to(x.dtype)

    monkeypatch.setitem(__import__("sys").modules, "te_extensions.fused", SimpleNamespace(fused_linear=fused_linear))
    monkeypatch.setattr(grouped, "refusal", lambda *_: None)
    packed, block_scale, scales, exact = stack()
    x = draw(10, K, seed=1)
    y = nvfp4_grouped_linear(x, COUNTS[0], packed, block_scale, scales, path="fused")
    assert seen == [3, 5, 2]
    torch.testing.assert_close(y.double(), expected(x, COUNTS[0], exact), **TOLERANCE)


def test_few_experts_are_worth_a_launch_each() -> None:
    # Qwen3-30B-A3B, gate and up of 128 experts: 402 M weights, 1.84 GB moved by the stack, 459 us.
    shape = (128, 1536, 2048)
    assert grouped._few_enough(45, shape)
    assert not grouped._few_enough(46, shape)
