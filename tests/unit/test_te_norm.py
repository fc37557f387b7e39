"""The noise norm on a CPU, its refusals, and the Triton kernels under the interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_extensions.norm import _check_gpu, rms_norm_noise
from tests.unit.te_interpreter import run_cases

EPS = 1e-6


def test_triton_kernels_under_the_interpreter() -> None:
    run_cases("te_norm_cases.py")


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 48, generator=generator).to(dtype)
    return x, torch.rand(48, generator=generator) + 0.5, 0.1 * torch.randn(4, 48, generator=generator)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_slots_choose_the_noise_of_each_row(dtype: torch.dtype) -> None:
    x, gamma, noise = inputs(dtype)
    slot = torch.tensor([-1, 0, 3, 3, 1, -1], dtype=torch.int32)
    y = rms_norm_noise(x, gamma, noise, EPS, slot=slot)
    assert y.shape == x.shape
    for found, row, which in zip(y.view(6, 48), x.view(6, 48), slot.tolist(), strict=True):
        assert torch.equal(found, rms_norm_noise(row, gamma, None if which < 0 else noise[which], EPS))


def test_gradient_through_slots() -> None:
    x, gamma, noise = inputs(torch.float32)
    slot = torch.tensor([2, 0, -1, 3, 1, 1], dtype=torch.int32)
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    leaf = x.clone().requires_grad_(True)
    rms_norm_noise(leaf, gamma, noise, EPS, slot=slot).backward(grad)
    exact = x.double().requires_grad_(True)
    scale = torch.where((slot >= 0)[:, None], gamma + noise[slot.clamp(min=0).long()], gamma).view(2, 3, 48).double()
    (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + EPS) * scale).backward(grad.double())
    assert leaf.grad is not None
    assert exact.grad is not None
    assert torch.allclose(leaf.grad.double(), exact.grad, atol=1e-5)


def test_slots_and_noise_that_do_not_fit_are_refused() -> None:
    x, gamma, noise = inputs()
    good = torch.zeros(6, dtype=torch.int32)
    with pytest.raises(ValueError, match="without noise"):
        rms_norm_noise(x, gamma, None, EPS, slot=good)
    with pytest.raises(ValueError, match="needed \\(48,\\) without slot"):
        rms_norm_noise(x, gamma, noise, EPS)
    with pytest.raises(ValueError, match="one for each row"):
        rms_norm_noise(x, gamma, noise, EPS, slot=good[:5])
    with pytest.raises(ValueError, match="int32"):
        rms_norm_noise(x, gamma, noise, EPS, slot=good.long())
    for bad in (4, -2):
        with pytest.raises(IndexError, match="-1 \\(clean\\) to 3"):
            rms_norm_noise(x, gamma, noise, EPS, slot=good + bad)


def test_what_the_gpu_kernel_would_get_wrong_is_refused() -> None:
    x, gamma, noise = inputs(torch.bfloat16)
    _check_gpu(x, gamma, noise, torch.zeros(6, dtype=torch.int32))
    with pytest.raises(ValueError, match="gamma asks for a gradient"):
        _check_gpu(x, gamma.clone().requires_grad_(True), None, None)
    with pytest.raises(ValueError, match=r"noise is torch\.bfloat16"):
        _check_gpu(x, gamma, noise[0].bfloat16(), None)
    with pytest.raises(ValueError, match="noise is on meta"):
        _check_gpu(x, gamma, noise[0].to("meta"), None)
    with pytest.raises(ValueError, match="gamma is \\(47,\\)"):
        _check_gpu(x, gamma[:47], None, None)
    with pytest.raises(ValueError, match=r"torch\.float64"):
        _check_gpu(x.double(), gamma, None, None)
