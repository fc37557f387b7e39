"""What a measurement run was asked, and a journal of what it has done, so that a crash costs one row.

A kernel that faults takes the CUDA context of its process with it, and one that deadlocks never returns. So a worker
process measures and writes what it is about to do and what it found, a line at a time; when it dies or stops, the
parent marks the step that was under way as lost and starts another worker, which reads the journal, leaves out what is
done or lost, and goes on.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.shapes import M_VALUES

#: ``rows`` have times; ``not_timed`` are those of a product that was refused, wrong or failed, and say why.
SECTIONS = (
    "rows",
    "not_timed",
    "dequantize",
    "norm",
    "lora",
    "step",
    "logprob",
    "negative_controls",
    "errors",
    "yardstick_errors",
)
PATHS = ("reference", "dequantize", "fused")
YARDSTICKS = ("cublas", "humming")
#: Exit status of a worker whose CUDA context is gone; it has written down why.
DEVICE_LOST = 75


@dataclass(frozen=True)
class Options:
    """One run.

    Attributes:
        layers: layer or model names of ``benchmarks.shapes``.
        tp: tensor-parallel sizes.
        m: rows.
        paths: of PATHS.
        passes: "forward", "dgrad".
        humming: measure against humming-kernels too.
        humming_search: also try neighbours of its schedules (costs a compilation each).
        lora: measure what a LoRA adapter adds to the fused path.
        memory: run the sections of benchmarks/kernels_memory.py.
        device: "cuda" or "cpu"; on a CPU times mean nothing and only the harness is proved.
        shrink: divide N and K of every layer by this, for a CPU.
        seed: of weights and inputs.
    """

    layers: tuple[str, ...] = ("32B",)
    tp: tuple[int, ...] = (1,)
    m: tuple[int, ...] = M_VALUES
    paths: tuple[str, ...] = ("fused", "dequantize")
    passes: tuple[str, ...] = ("forward",)
    humming: bool = False
    humming_search: bool = False
    lora: bool = False
    memory: bool = False
    device: str = "cuda"
    shrink: int = 1
    seed: int = 0

    @staticmethod
    def from_json(text: str) -> Options:
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(text).items()}
        return Options(**values)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass
class State:
    """A journal, read.

    Attributes:
        done: keys of finished units.
        lost: (key, step) during which a worker died or stopped.
        begun: the step under way at the end of the journal, or None.
        sections: rows by section.
        skipped: keys left out because the time was used up.
        notes: remarks on the run as a whole.
        environment: of the last worker.
        finished: the last worker came to its end.
    """

    done: set[str] = field(default_factory=set)
    lost: list[tuple[str, str]] = field(default_factory=list)
    begun: tuple[str, str] | None = None
    sections: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {name: [] for name in SECTIONS})
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    finished: bool = False


class Journal:
    """An append-only file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def _write(self, event: str, **values: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"event": event, **values}) + "\n")

    def begin(self, key: str, step: str) -> None:
        """``step`` of unit ``key`` starts now."""
        self._write("begin", key=key, step=step)

    def done(self, key: str) -> None:
        """The unit is finished, well or badly."""
        self._write("done", key=key)

    def lost(self, key: str, step: str, reason: str | None) -> None:
        """The worker went down in this step, for a reason that it could not write itself (or None)."""
        self._write("lost", key=key, step=step)
        if reason is not None:
            self.error(key, step, reason)

    def row(self, section: str, row: dict[str, Any]) -> None:
        """A result. Numbers that are not finite become None, since JSON has none."""
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._write("row", section=section, row=clean)

    def error(self, key: str, step: str, error: object) -> None:
        """A step failed; yardsticks are kept apart, since their failures are not ours."""
        section = "yardstick_errors" if any(step.endswith(name) for name in YARDSTICKS) else "errors"
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self.row(section, {"where": f"{key} {step}", "error": text[:800]})

    def skip(self, key: str) -> None:
        """No time left for this unit."""
        self._write("skip", key=key)

    def note(self, text: str) -> None:
        self._write("note", text=text)

    def environment(self, values: dict[str, Any]) -> None:
        self._write("environment", values=values)

    def finish(self) -> None:
        self._write("finish")

    def read(self) -> State:
        """Everything so far; a last line cut off by a crash is left out."""
        state = State()
        if not self.path.exists():
            return state
        for line in self.path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                _apply(state, json.loads(line))
        return state


def _apply(state: State, entry: dict[str, Any]) -> None:
    match entry["event"]:
        case "begin":
            state.begun, state.finished = (entry["key"], entry["step"]), False
        case "done":
            state.done.add(entry["key"])
            state.begun = None
        case "lost":
            state.lost.append((entry["key"], entry["step"]))
            state.begun = None
        case "row":
            state.sections[entry["section"]].append(entry["row"])
        case "skip":
            state.skipped.append(entry["key"])
        case "note":
            if entry["text"] not in state.notes:
                state.notes.append(entry["text"])
        case "environment":
            state.environment = entry["values"]
        case "finish":
            state.finished, state.begun = True, None
