"""The Triton norm against torch's, under Triton's interpreter; run by test_te_norm.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_extensions.norm import rms_norm_noise
from te_extensions.norm_triton import launch_backward, launch_forward
from tests.unit.te_interpreter import repair_interpreter

repair_interpreter()
EPS = 1e-6


def inputs(rows: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * hidden)
    x = (3.0 * torch.randn(rows, hidden, generator=generator)).to(dtype)
    gamma = torch.rand(hidden, generator=generator) + 0.5
    return x, gamma, 1e-2 * torch.randn(hidden, generator=generator)


def assert_near(found: Tensor, exact: Tensor) -> None:
    """One rounding to the result's dtype, and FP32 arithmetic before it: a few of its units in the last place."""
    half_ulp = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 2.0**-22}[found.dtype]
    # A relative error of the sums moves every element in proportion, 2^-20 is generous for H <= 16384.
    bound = exact.abs() * (2 * half_ulp + 2.0**-20) + 1e-6 * exact.abs().max()
    assert ((found.double() - exact).abs() <= bound).all()


def exact_norm(x: Tensor, scale: Tensor) -> Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * scale.double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "hidden"), [(1, 128), (19, 128), (37, 96), (5, 2048), (9, 1537), (3, 16384)])
def test_forward_and_backward(dtype: torch.dtype, rows: int, hidden: int) -> None:
    x, gamma, z = inputs(rows, hidden, dtype)
    y, rstd = launch_forward(x, gamma, z, None, EPS, keep_rstd=True)
    wide = x.double().requires_grad_(True)
    exact = exact_norm(wide, gamma + z)
    assert_near(y, exact.detach())
    assert rstd is not None
    assert torch.allclose(rstd.double(), torch.rsqrt(x.double().square().mean(-1) + EPS), rtol=2.0**-20)
    grad = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact.backward(grad.double())
    assert wide.grad is not None
    assert_near(launch_backward(grad, x, rstd, gamma, z, None), wide.grad)


def test_zero_noise_and_no_noise_have_the_same_bits() -> None:
    x, gamma, _ = inputs(7, 640, torch.bfloat16)
    clean, _ = launch_forward(x, gamma, None, None, EPS, keep_rstd=False)
    zero, _ = launch_forward(x, gamma, torch.zeros(640), None, EPS, keep_rstd=False)
    assert torch.equal(clean.view(torch.int16), zero.view(torch.int16))


@pytest.mark.parametrize("hidden", [96, 1100])
def test_every_row_gets_the_noise_it_names(hidden: int) -> None:
    x, gamma, _ = inputs(21, hidden, torch.bfloat16)
    noise = 0.3 * torch.randn(4, hidden, generator=torch.Generator().manual_seed(2))
    slot = torch.tensor([-1, 0, 1, 2, 3, 3, 0] * 3, dtype=torch.int32)
    y, rstd = launch_forward(x, gamma, noise, slot, EPS, keep_rstd=True)
    assert rstd is not None
    grad = torch.randn(21, hidden, generator=torch.Generator().manual_seed(3)).bfloat16()
    grad_x = launch_backward(grad, x, rstd, gamma, noise, slot)
    for row, which in enumerate(slot.tolist()):
        z = None if which < 0 else noise[which]
        one, one_rstd = launch_forward(x[row : row + 1], gamma, z, None, EPS, keep_rstd=True)
        assert torch.equal(y[row : row + 1], one)
        assert one_rstd is not None
        one_grad = launch_backward(grad[row : row + 1], x[row : row + 1], one_rstd, gamma, z, None)
        assert torch.equal(grad_x[row : row + 1], one_grad)
    assert torch.allclose(y.float(), rms_norm_noise(x, gamma, noise, EPS, slot=slot).float(), rtol=2.0**-7)


@pytest.mark.parametrize("slot", [4, -2])
def test_a_slot_that_does_not_exist_gives_nan(slot: int) -> None:
    x, gamma, _ = inputs(3, 96, torch.float32)
    slots = torch.tensor([0, slot, -1], dtype=torch.int32)
    y, _ = launch_forward(x, gamma, torch.zeros(4, 96), slots, EPS, keep_rstd=False)
    assert y.isnan().any(dim=1).tolist() == [False, True, False]


def test_rows_of_a_wider_tensor() -> None:
    wide, gamma, z = inputs(6, 256, torch.bfloat16)
    x = wide[:, 64:160]
    found, _ = launch_forward(x, gamma[:96], z[:96], None, EPS, keep_rstd=False)
    expected, _ = launch_forward(x.contiguous(), gamma[:96], z[:96], None, EPS, keep_rstd=False)
    assert torch.equal(found, expected)


def test_a_rows_result_does_not_depend_on_its_neighbours() -> None:
    x, gamma, z = inputs(40, 128, torch.bfloat16)
    whole, _ = launch_forward(x, gamma, z, None, EPS, keep_rstd=False)
    for begin, end in ((0, 1), (3, 20), (39, 40)):
        part, _ = launch_forward(x[begin:end], gamma, z, None, EPS, keep_rstd=False)
        assert torch.equal(part, whole[begin:end])
