"""Megatron-core on a machine without CUDA: every cure in one place, each as narrow as it can be.

Megatron writes ``torch.cuda.current_device()`` and ``device="cuda"`` as literals. ``enable`` replaces the few
``torch.cuda`` functions that would raise on such a machine; nothing else can be using them there. The literals inside
the optimizer, gradient clipping and pipeline schedules are redirected only within ``megatron_calls()``, because a
function mode slows every torch call and generation must not pay for it. With CUDA present both do nothing.

The list follows the lines of one Megatron version; ``tests/unit/test_cpu_shim.py`` fails when that version changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

MEGATRON_VERSION = "0.19.2"
_CPU = torch.device("cpu")
_enabled = False


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":")[0] == "cuda"


class CudaLiteralsToCpu(TorchFunctionMode):
    """``device="cuda"``, ``.cuda()``, ``.to("cuda")``, pinned memory and type names, as a CPU understands them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        result = func(*args, **kwargs)
        # The optimizer sorts parameters by the names of CUDA tensor types.
        if func is torch.Tensor.type and isinstance(result, str) and not result.startswith("torch.cuda"):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


class _NullStream:
    """Stands for torch.cuda.Stream and Event: work on a CPU is already in order."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, *_: Any) -> _NullStream:
        return _NullStream()


def enable() -> None:
    """Make Megatron importable and usable without CUDA. Idempotent; a no-op where CUDA is available."""
    global _enabled  # noqa: PLW0603
    if _enabled or torch.cuda.is_available():
        return
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.synchronize = lambda *_, **__: None
    cuda.is_current_stream_capturing = lambda: False
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_, **__: None
    cuda.Stream = cuda.Event = _NullStream
    cuda.current_stream = lambda *_, **__: _NullStream()
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = cuda.manual_seed_all = _seed_cpu
    from megatron.core.tensor_parallel import random as megatron_random

    megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    _enabled = True


def _seed_cpu(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


@contextlib.contextmanager
def megatron_calls() -> Iterator[None]:
    """Around calls into Megatron's optimizer, gradient finalisation and schedules."""
    if torch.cuda.is_available():
        yield
        return
    with CudaLiteralsToCpu():
        yield
