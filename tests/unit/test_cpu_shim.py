"""The cure for Megatron on a CPU is tied to one version: a new version must be looked at again."""

from __future__ import annotations

import inspect
import re
from importlib.metadata import version

import pytest
import torch

from megatron_qerl.parallel import cpu


def test_megatron_is_the_version_the_shim_was_written_for() -> None:
    assert version("megatron-core") == cpu.MEGATRON_VERSION


def test_the_lines_that_need_the_shim_are_where_it_expects_them() -> None:
    cpu.enable()
    from megatron.core.optimizer import clip_grads, optimizer
    from megatron.core.tensor_parallel import random as megatron_random

    assert hasattr(megatron_random, "_set_cuda_rng_state")
    assert re.search(r"device='cuda'", inspect.getsource(clip_grads))
    assert "param.type() == 'torch.cuda.FloatTensor'" in inspect.getsource(optimizer)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the shim does nothing where CUDA is available")
def test_literals_are_redirected_inside_the_context_only() -> None:
    with cpu.megatron_calls():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.ones(1).cuda().device.type == "cpu"
        assert torch.ones(1).to("cuda:0").device.type == "cpu"
        assert torch.ones(1).type() == "torch.cuda.FloatTensor"
    assert torch.ones(1).type() == "torch.FloatTensor"
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(2, device="cuda")
