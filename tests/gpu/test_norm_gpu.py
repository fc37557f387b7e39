"""The Triton noise norm on a GPU, against float64 and against torch's operations on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_extensions.norm import rms_norm_noise

pytestmark = pytest.mark.gpu
EPS = 1e-6
ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-21}


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(sum(shape))

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device="cuda")

    return (3.0 * normal(*shape)).to(dtype), 1.0 + 0.3 * normal(shape[-1]), 1e-2 * normal(shape[-1])


def exact_norm(x: Tensor, scale: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * scale.double()


def assert_near(found: Tensor, exact: Tensor) -> None:
    """Half a unit of the result's dtype, doubled, and FP32 sums of up to 16384 terms before it."""
    bound = exact.abs() * (ULP[found.dtype] + 2.0**-19) + 2.0**-20 * exact.abs().max()
    worst = ((found.double() - exact).abs() - bound).max()
    assert worst <= 0, f"beyond the bound by {float(worst)}"


SHAPES = [(1, 3584), (7, 96), (33, 1537), (300, 5120), (64, 8192), (17, 16384), (4, 20000), (2, 9, 128), (5000, 128)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("noisy", [False, True])
def test_forward_and_gradient(shape: tuple[int, ...], dtype: torch.dtype, noisy: bool) -> None:
    x, gamma, z = inputs(shape, dtype)
    leaf, wide = x.clone().requires_grad_(True), x.double().requires_grad_(True)
    y = rms_norm_noise(leaf, gamma, z if noisy else None, EPS)
    exact = exact_norm(wide, gamma + z if noisy else gamma)
    assert y.shape == x.shape
    assert y.dtype == dtype
    assert_near(y.detach(), exact.detach())
    with torch.no_grad():
        assert torch.equal(rms_norm_noise(x, gamma, z if noisy else None, EPS), y)
    grad = torch.randn_like(x)
    y.backward(grad)
    exact.backward(grad.double())
    assert leaf.grad is not None
    assert wide.grad is not None
    assert_near(leaf.grad, wide.grad)


def test_the_noise_is_felt_and_zero_noise_is_not() -> None:
    x, gamma, z = inputs((50, 5120), torch.bfloat16)
    clean = rms_norm_noise(x, gamma, None, EPS)
    assert torch.equal(rms_norm_noise(x, gamma, torch.zeros_like(z), EPS).view(torch.int16), clean.view(torch.int16))
    noisy = exact_norm(x.double(), gamma + z)
    assert (clean.double() - noisy).norm() > 5e-3 * noisy.norm()
    assert (rms_norm_noise(x, gamma, z, EPS).double() - noisy).norm() < 2.5e-3 * noisy.norm()


@pytest.mark.parametrize("hidden", [128, 3584])
def test_every_row_gets_the_noise_it_names(hidden: int) -> None:
    x, gamma, _ = inputs((3, 20, hidden), torch.bfloat16)
    noise = 0.3 * torch.randn(5, hidden, device="cuda")
    slot = torch.arange(60, dtype=torch.int32, device="cuda") % 6 - 1
    leaf = x.clone().requires_grad_(True)
    y = rms_norm_noise(leaf, gamma, noise, EPS, slot=slot)
    grad = torch.randn_like(x)
    y.backward(grad)
    assert leaf.grad is not None
    rows = (x.view(60, hidden), y.detach().view(60, hidden), grad.view(60, hidden), leaf.grad.view(60, hidden))
    for row, found, above, below, which in zip(*rows, slot.tolist(), strict=True):
        single = row.clone().requires_grad_(True)
        expected = rms_norm_noise(single, gamma, None if which < 0 else noise[which], EPS)
        expected.backward(above)
        assert torch.equal(found, expected.detach())
        assert single.grad is not None
        assert torch.equal(below, single.grad)


@pytest.mark.parametrize("hidden", [128, 5120])
def test_a_rows_result_does_not_depend_on_its_batch(hidden: int) -> None:
    x, gamma, z = inputs((4096, hidden), torch.bfloat16)
    whole = rms_norm_noise(x, gamma, z, EPS)
    for begin, end in ((0, 1), (100, 163), (4095, 4096)):
        assert torch.equal(rms_norm_noise(x[begin:end], gamma, z, EPS), whole[begin:end])


def test_heads_cut_out_of_a_wider_projection() -> None:
    mixed, _, _ = inputs((37, 2, 1280), torch.bfloat16)
    gamma, z = torch.rand(128, device="cuda") + 0.5, 0.1 * torch.randn(128, device="cuda")
    query = mixed[..., :1024].unflatten(-1, (8, 128))
    assert not query.is_contiguous()
    assert torch.equal(rms_norm_noise(query, gamma, z, EPS), rms_norm_noise(query.contiguous(), gamma, z, EPS))


def test_a_slot_that_does_not_exist_gives_nan() -> None:
    x, gamma, _ = inputs((3, 96), torch.bfloat16)
    slot = torch.tensor([0, 4, -1], dtype=torch.int32, device="cuda")
    y = rms_norm_noise(x, gamma, torch.zeros(4, 96, device="cuda"), EPS, slot=slot)
    assert y.isnan().any(dim=1).tolist() == [False, True, False]


def test_noise_that_changes_before_backward_is_an_error() -> None:
    x, gamma, z = inputs((5, 96), torch.bfloat16)
    y = rms_norm_noise(x.requires_grad_(True), gamma, z, EPS)
    z.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_trainable_scale_is_refused() -> None:
    x, gamma, _ = inputs((5, 96), torch.bfloat16)
    with pytest.raises(ValueError, match="gamma asks for a gradient"):
        rms_norm_noise(x, gamma.requires_grad_(True), None, EPS)


def test_no_rows() -> None:
    x, gamma, z = inputs((0, 96), torch.bfloat16)
    y = rms_norm_noise(x.requires_grad_(True), gamma, z, EPS)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == y.shape == (0, 96)
