"""Microseconds of contenders in one run: interleaved, over rotating weights, medians.

Weights rotate through more memory than the L2 cache holds (60 MB on an H200), because in a model each layer's weights
come from memory. Contenders take turns in every round, so that a drifting clock hits all of them. Short calls are
captured into a CUDA graph of several calls, which takes the launch cost of Python out of the numbers; long ones are
timed singly with events.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from statistics import median

import torch
from torch import Tensor

#: call(i): one product with the weight copy i.
Call = Callable[[int], Tensor]
ROTATED_BYTES = 320 << 20
MOST_COPIES = 256
GRAPH_LIMIT_PRODUCTS = 1e11
ROUNDS = 20
FEWEST_ROUNDS = 5
TARGET_S = 0.03


def copies_for(weight_bytes: int) -> int:
    """Copies of a weight so that a sweep over them touches more than the cache holds."""
    return max(1, min(MOST_COPIES, math.ceil(ROTATED_BYTES / weight_bytes)))


@cache
def _capture_stream() -> torch.cuda.Stream:
    """One stream for all captures: cuBLAS and the library keep workspaces a stream."""
    return torch.cuda.Stream()


def _capture(call: Call, calls: int) -> torch.cuda.CUDAGraph:
    """A graph of ``calls`` calls.

    ``torch.cuda.graph`` would empty the allocator's cache each time, which costs more than the measurement.
    """
    graph = torch.cuda.CUDAGraph()
    stream = _capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Outside the capture, or the stream's workspaces would come from this graph's memory and die with it.
        call(0)
        stream.synchronize()
        graph.capture_begin()
        try:
            for i in range(calls):
                call(i)
        except BaseException:
            # Ends the broken capture, so that the stream is usable; the first error is the one to report.
            with suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def _cuda_rounds(steps: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Milliseconds of every round of every step, taken in turns."""

    def one_round() -> list[tuple[str, torch.cuda.Event, torch.cuda.Event]]:
        marks = []
        for name, step in steps.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            step()
            end.record()
            marks.append((name, begin, end))
        return marks

    one_round()
    marks = one_round()
    torch.cuda.synchronize()
    round_s = sum(begin.elapsed_time(end) for _, begin, end in marks) / 1e3
    rounds = max(FEWEST_ROUNDS, min(ROUNDS, math.ceil(TARGET_S * len(steps) / max(round_s, 1e-6))))
    for _ in range(rounds):
        marks += one_round()
    torch.cuda.synchronize()
    found: dict[str, list[float]] = {name: [] for name in steps}
    for name, begin, end in marks[len(steps) :]:
        found[name].append(begin.elapsed_time(end))
    return found


def _cpu_us(calls: Mapping[str, Call]) -> dict[str, float]:
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(FEWEST_ROUNDS):
        for name, call in calls.items():
            begin = time.perf_counter()
            call(turn)
            found[name].append(time.perf_counter() - begin)
    return {name: 1e6 * median(values) for name, values in found.items()}


def measure_us(calls: Mapping[str, Call], copies: Mapping[str, int], products: float, device: torch.device) -> dict:
    """Median microseconds a call.

    Args:
        calls: contender -> call(i); each must have run once before.
        copies: contender -> its number of weight copies.
        products: multiply-adds of a call, which decides between graphs and single calls.

    Returns:
        {"how": "graph" | "events" | "cpu", "us": {contender: microseconds}, "errors": {contender: text}}; a contender
        that cannot be captured is in ``errors`` and does not stop the others.
    """
    if device.type != "cuda":
        return {"how": "cpu", "us": _cpu_us(calls), "errors": {}}
    steps: dict[str, Callable[[], object]] = {}
    divide: dict[str, int] = {}
    errors: dict[str, str] = {}
    graphs: list[torch.cuda.CUDAGraph] = []
    use_graph = products <= GRAPH_LIMIT_PRODUCTS
    for name, call in calls.items():
        if use_graph:
            divide[name] = max(4, copies[name])
            try:
                graphs.append(_capture(call, divide[name]))
            except RuntimeError as error:
                errors[name] = f"capture: {error}"
                continue
            steps[name] = graphs[-1].replay
        else:
            divide[name] = 1
            steps[name] = _rotating(call)
    measured = _cuda_rounds(steps) if steps else {}
    us = {name: 1e3 * median(values) / divide[name] for name, values in measured.items()}
    return {"how": "graph" if use_graph else "events", "us": us, "errors": errors}


def _rotating(call: Call) -> Callable[[], Tensor]:
    turn = iter(range(1 << 30))
    return lambda: call(next(turn))
