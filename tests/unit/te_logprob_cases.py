"""The Triton softmax kernels against torch's operations, under Triton's interpreter; run by test_te_logprob.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_extensions.logprob import logit_gradient, row_statistics
from te_extensions.logprob_triton import launch_gradient, launch_statistics
from tests.unit.te_interpreter import repair_interpreter

repair_interpreter()
# (columns, real columns): less than a tile, some tiles and a rest, padding that fills whole tiles, padding alone.
WIDTHS = [(50, 50), (9000, 9000), (8192, 8191), (13000, 4000), (64, 0)]


def case(width: int, real: int) -> tuple[Tensor, Tensor]:
    """Logits with garbage in the padding, and columns of which one is nobody's."""
    generator = torch.Generator().manual_seed(width + real)
    logits = 8.0 * torch.randn(5, width, generator=generator) - 20.0
    logits[:, real:] = torch.tensor(1e30)
    logits[3, real:] = float("nan")
    column = torch.randint(0, max(real, 1), (5,), generator=generator)
    column[2] = -1
    return logits, column if real else torch.full((5,), -1)


@pytest.mark.parametrize(("width", "real"), WIDTHS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_statistics(width: int, real: int, temperature: float) -> None:
    logits, column = case(width, real)
    found = launch_statistics(logits, column, real, temperature)
    expected = row_statistics(logits.clone(), column, real, temperature)
    # Maximum and picked logit are copies; the sums differ in their order and in how often they were rescaled.
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[3], expected[3])
    assert torch.allclose(found[1:3], expected[1:3], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(("width", "real"), WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradient(width: int, real: int, dtype: torch.dtype, temperature: float) -> None:
    logits, column = case(width, real)
    lse = torch.logsumexp(logits[:, :real] / temperature, 1) if real else torch.zeros(5)
    grad = torch.tensor([1.0, -2.0, 0.5, 3.0, 0.0])
    expected = logit_gradient(logits.clone(), column, lse, grad, real, temperature, dtype)
    before = logits.clone()
    found = launch_gradient(logits, column, lse, grad, real, temperature, dtype)
    assert found.dtype == dtype
    assert (found[:, real:] == 0).all()
    assert torch.allclose(found.float(), expected.float(), rtol=2.0**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-7)
    assert (found.data_ptr() == logits.data_ptr()) == (dtype == torch.float32)
    if dtype != torch.float32:
        assert torch.equal(logits.view(torch.int32), before.view(torch.int32))


def test_a_nan_logit_is_seen() -> None:
    logits, column = case(9000, 9000)
    logits[1, 4321] = float("nan")
    found = launch_statistics(logits, column, 9000, 1.0)
    assert found[1].isnan().tolist() == [False, True, False, False, False]
