"""The process that proves and measures: python -m benchmarks.kernels_worker JOURNAL DEADLINE_S OPTIONS_JSON

Started by ``benchmarks.kernels``, perhaps more than once a run. A unit is (layer slice, pass, M): each contender's
product is checked against float64 first, then those that are right are timed together. A failing step is written down
and the unit goes on without it.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.kernels_environment import environment
from benchmarks.kernels_journal import DEVICE_LOST, Journal, Options
from benchmarks.kernels_paths import (
    Contender,
    LoraCalls,
    cublas_contender,
    humming_contender,
    own_call,
    own_contender,
)
from benchmarks.kernels_proof import (
    NORM_BOUND,
    Difference,
    Poison,
    Reference,
    corrupted,
    decode,
    difference,
    random_weight,
)
from benchmarks.kernels_timing import copies_for, measure_us
from benchmarks.shapes import Layer, Slice, slices
from te_extensions.weight import NVFP4Weight

#: Times that a contender may take the device down within one layer before it is left out there.
MOST_LOSSES = 2
LORA_RANK = 32
T = TypeVar("T")


class DeviceLostError(RuntimeError):
    """Nothing runs on the device any more."""


@dataclass
class Case:
    """A layer slice with its weights, inputs and reference, for one pass."""

    part: Slice
    weights: list[NVFP4Weight]
    inputs: Tensor
    reference: Reference
    contenders: dict[str, Contender]


class Worker:
    """Runs what the journal does not have yet.

    Args:
        options: the run.
        journal: where results go.
        deadline: ``time.monotonic()`` after which no unit is started.
    """

    def __init__(self, options: Options, journal: Journal, deadline: float) -> None:
        self.options, self.journal, self.deadline = options, journal, deadline
        self.device = torch.device(options.device)
        self.state = journal.read()
        self.poison = Poison(self.device)
        self.generator = torch.Generator(self.device)

    def run(self) -> None:
        """All sections, the proofs first."""
        self.journal.environment(environment(self.device))
        parts, missing = slices(self.options.layers, self.options.tp)
        for text in missing:
            self.journal.note(f"no slice: {text}")
        parts = [_shrunk(part, self.options.shrink) for part in parts]
        for path in self.options.paths:
            self._once(f"controls|{path}", lambda path=path: self._controls(path))
        if self.options.humming:
            self._once("humming", lambda: self._compile_humming(parts))
        for part in parts:
            for pass_name in self.options.passes:
                self._case(part, pass_name)
        if self.options.memory:
            self._memory()
        self.journal.finish()

    # Steps

    def attempt(self, key: str, step: str, work: Callable[[], T]) -> T | None:
        """Run a step; None when it failed now, or took an earlier worker down.

        Raises:
            DeviceLostError: the device no longer answers.
        """
        if (key, step) in self.state.lost:
            return None
        self.journal.begin(key, step)
        try:
            result = work()
            self._synchronize()
        # Whatever one kernel or shape raises must not lose the results of the others: it becomes a record.
        except Exception as error:
            self.journal.error(key, step, error)
            self._require_device(error)
            return None
        return result

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _require_device(self, cause: Exception) -> None:
        try:
            self._synchronize()
        except RuntimeError as error:
            raise DeviceLostError(str(error)) from cause
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _once(self, key: str, work: Callable[[], None]) -> None:
        if key not in self.state.done:
            self.attempt(key, "run", work)
            self.journal.done(key)

    # Sections

    def _controls(self, path: str) -> None:
        """The check must accept this path's product and reject it for wrong weights."""
        rows, n, k = 32, 512, 1024
        self.generator.manual_seed(self.options.seed + 1)
        weight = random_weight(n, k, self.generator)
        x = self._random_input(rows, k)
        reference = x.double() @ decode(weight).t()
        for name, wrong in {"right_weight": weight, **corrupted(weight)}.items():
            found = difference(own_call(path, "forward", [wrong])(x, 0), reference)
            detected = (found.fault is None) if name == "right_weight" else not found.rel_err <= NORM_BOUND
            self.journal.row(
                "negative_controls",
                {"path": path, "control": name, "rel_err": found.rel_err, "bound": NORM_BOUND, "as_it_must": detected},
            )
            if not detected:
                self.journal.error(f"controls|{path}", name, f"rel_err {found.rel_err:.2e}: the check is blind to this")

    def _memory(self) -> None:
        for section in ("dequantize", "norm", "logprob"):
            self._once(f"memory|{section}", lambda section=section: self._rows(section))

    def _rows(self, section: str) -> None:
        from benchmarks import kernels_memory

        # They differentiate; products here do not.
        with torch.enable_grad():
            rows = getattr(kernels_memory, f"{section}_rows")(self.options.device, self.options.shrink)
        for row in rows:
            self.journal.row(section, row)

    def _compile_humming(self, parts: list[Slice]) -> None:
        from benchmarks.yardsticks import compile_all

        shapes = sorted({(part.n, part.k) for part in parts})
        for text in compile_all(shapes, self.options.m):
            self.journal.note(text)

    # Products

    def _case(self, part: Slice, pass_name: str) -> None:
        key = f"{part.key}|{pass_name}"
        units = {m: f"{key}|m{m}" for m in self.options.m}
        with_lora = self.options.lora and pass_name == "forward" and "fused" in self.options.paths
        open_units = [u for u in units.values() if not {u, *([f"{u}|lora"] if with_lora else [])} <= self.state.done]
        if not open_units:
            return
        if time.monotonic() > self.deadline:
            for unit in open_units:
                self.journal.skip(unit)
            return
        case = self.attempt(key, "setup", lambda: self._setup(part, pass_name, key))
        if case is None:
            return
        for m, unit in units.items():
            for name, work in ((unit, self._unit), *([(f"{unit}|lora", self._lora)] if with_lora else [])):
                if name in self.state.done:
                    continue
                if time.monotonic() > self.deadline:
                    self.journal.skip(name)
                    continue
                work(case, pass_name, m, name)
                self.journal.done(name)
        del case
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _random_input(self, rows: int, features: int) -> Tensor:
        shape = (rows, features)
        return torch.randn(shape, generator=self.generator, device=self.device).to(torch.bfloat16)

    def _setup(self, part: Slice, pass_name: str, key: str) -> Case:
        self.generator.manual_seed(self.options.seed)
        n, k = part.n, part.k
        copies = copies_for(n * k * 9 // 16) if self.device.type == "cuda" else 2
        weights = [random_weight(n, k, self.generator) for _ in range(copies)]
        matrix = decode(weights[0])
        if pass_name == "forward":
            inputs = self._random_input(max(self.options.m), k)
        else:
            inputs, matrix = self._random_input(max(self.options.m), n), matrix.t().contiguous()
        makers: dict[str, Callable[[], Contender]] = {
            path: (lambda path=path: own_contender(path, pass_name, weights))  # type: ignore[misc]
            for path in self.options.paths
            if pass_name == "forward" or path != "fused"
        }
        makers["cublas"] = lambda: cublas_contender(pass_name, weights)
        if self.options.humming and pass_name == "forward":
            makers["humming"] = lambda: humming_contender(weights, search=self.options.humming_search)
        contenders = {name: self.attempt(key, f"prepare {name}", make) for name, make in makers.items()}
        made = {name: contender for name, contender in contenders.items() if contender is not None}
        return Case(part, weights, inputs, Reference(inputs, matrix, self.generator), made)

    def _check(self, case: Case, contender: Contender, m: int) -> tuple[Difference, bool]:
        contender.prepare(m)
        self.poison.spread(2 * m * case.reference.matrix.shape[0])
        y = contender.call(case.inputs[:m], 0)
        return case.reference.check(y), self.poison.reached(y)

    def _unit(self, case: Case, pass_name: str, m: int, key: str) -> None:
        part = case.part
        checks: dict[str, tuple[Difference, bool]] = {}
        reasons: dict[str, str] = {}
        for name, contender in case.contenders.items():
            step = f"check {name}"
            losses = sum(k.startswith(part.key) and s == step for k, s in self.state.lost)
            refusal = contender.refusal(m)
            if losses >= MOST_LOSSES:
                refusal = f"took the device down {losses} times in this layer"
            if refusal is not None:
                reasons[name] = refusal
                continue
            found = self.attempt(key, step, lambda contender=contender: self._check(case, contender, m))
            if found is None:
                reasons[name] = "failed: see errors"
            else:
                checks[name] = found
                if found[0].fault is not None:
                    reasons[name] = found[0].fault
                    self.journal.error(key, step, found[0].fault)
        right = {name: c for name, c in case.contenders.items() if name in checks and name not in reasons}
        timing = self.attempt(key, "timing", lambda: self._time(case, right, m))
        us = {} if timing is None else timing["us"]
        for name, text in ({} if timing is None else timing["errors"]).items():
            self.journal.error(key, f"timing {name}", text)
            reasons[name] = text
        for path in self.options.paths:
            if path not in case.contenders:
                continue
            difference_, poisoned = checks.get(path, (None, False))
            self.journal.row(
                "rows" if path in us else "not_timed",
                {
                    "layer": part.layer.name, "tp": part.tp, "n": part.n, "k": part.k, "m": m, "pass": pass_name,
                    "path": path, **_ratios(us, path),
                    "bytes_per_s": (case.weights[0].nbytes + 2 * m * (part.n + part.k)) / us[path] * 1e6
                    if path in us else None,
                    "rel_err": None if difference_ is None else difference_.rel_err,
                    "max_err": None if difference_ is None else difference_.max_err,
                    "checked_columns": None if difference_ is None else difference_.columns,
                    "poisoned": poisoned,
                    "timing": None if timing is None else timing["how"],
                    "not_run": reasons.get(path),
                    "yardsticks_not_run": {k: v for k, v in reasons.items() if k in ("cublas", "humming")},
                },
            )  # fmt: skip

    def _time(self, case: Case, right: dict[str, Contender], m: int) -> dict[str, Any]:
        x, products = case.inputs[:m], float(m) * case.part.n * case.part.k
        for name, contender in right.items():
            if contender.search is not None:
                contender.choose(x, m, products, self.device)
                fault = self._check(case, contender, m)[0].fault
                if fault is not None:
                    raise ValueError(f"{name} with the schedule {contender.chosen.get(m)}: {fault}")
        calls = {name: (lambda i, call=c.call: call(x, i)) for name, c in right.items()}
        return measure_us(calls, {name: c.copies for name, c in right.items()}, products, self.device)

    def _lora(self, case: Case, _pass_name: str, m: int, key: str) -> None:
        """What an adapter of rank 32 adds: u = s x A^T with s folded into A, u B^T inside the kernel or after it."""
        fused = case.contenders.get("fused")
        if fused is None or fused.refusal(m) is not None:
            return

        def work() -> dict[str, Any]:
            calls = LoraCalls(case.weights, case.part.parts, case.inputs[:m], LORA_RANK, self.generator)
            base, columns = case.reference.product(m)
            calls.scale_to(base)
            expected = base + calls.term(columns)
            self.poison.spread(2 * m * case.part.n)
            y = calls.fused(0)
            found = difference(y if columns is None else y[:, columns], expected, None)
            if found.fault is not None:
                raise ValueError(found.fault)
            steps = {"plain": calls.plain, "fused": calls.fused, "separate": calls.separate}
            copies = dict.fromkeys(steps, len(case.weights))
            for step in steps.values():
                step(0)
            products = float(m) * case.part.n * case.part.k
            timing = measure_us(steps, copies, products, self.device)
            if timing["errors"]:
                raise RuntimeError(str(timing["errors"]))
            us = timing["us"]
            return {
                "layer": case.part.layer.name, "tp": case.part.tp, "m": m, "rank": calls.width, "us": us["plain"],
                "us_lora": us["fused"], "overhead": us["fused"] / us["plain"] - 1.0,
                "overhead_separate": us["separate"] / us["plain"] - 1.0, "rel_err": found.rel_err,
            }  # fmt: skip

        row = self.attempt(key, "lora", work)
        if row is not None:
            self.journal.row("lora", row)


def _ratios(us: dict[str, float], path: str) -> dict[str, float | None]:
    """Times, and other's time over ours: above 1 ours is faster."""
    row: dict[str, float | None] = {"us": us.get(path)}
    for name in ("cublas", "humming"):
        row[f"us_{name}"] = us.get(name)
        row[f"ratio_{name}"] = us[name] / us[path] if name in us and path in us else None
    return row


def _shrunk(part: Slice, divide: int) -> Slice:
    """A slice of a small layer with the same name, for a CPU; K stays a multiple of 64."""
    if divide == 1:
        return part
    k = max(64, part.k // divide // 64 * 64)
    parts = tuple(max(8, rows // divide) for rows in part.parts)
    layer: Layer = part.layer
    return replace(part, layer=layer, parts=parts, k=k)


def main(arguments: list[str]) -> int:
    """Run to the end, to the deadline, or until the device is lost."""
    journal_path, deadline_s, options = arguments
    worker = Worker(Options.from_json(options), Journal(Path(journal_path)), time.monotonic() + float(deadline_s))
    with torch.no_grad():
        try:
            worker.run()
        except DeviceLostError as error:
            print(f"device lost: {error}", file=sys.stderr)
            # The interpreter's own teardown would touch the broken context and may hang.
            sys.stderr.flush()
            os._exit(DEVICE_LOST)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
