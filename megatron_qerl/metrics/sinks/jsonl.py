"""metrics.jsonl: the record of a run, one strict JSON object a line.

A line is written and flushed whole when its step is finished, so a killed run loses at most the line in flight. A
checkpoint stores ``checkpoint_position()``, the number of lines that belong to it; a resumed run cuts the file back to
that position before it writes, and so no step is there twice and no torn line stays in the middle.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from megatron_qerl.errors import CheckpointError, FaultError, NonFiniteError, UserError
from megatron_qerl.types import StepMetrics

FILE_NAME = "metrics.jsonl"


class JsonlSink:
    """Appends to ``path``; the parent folder must exist. Call ``start`` or ``resume`` once, then ``log``.

    An existing record is only continued through ``resume``: appending a second run to it would mix two runs.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = 0
        self._last_step: int | None = None
        self._file: TextIO | None = None

    def start(self) -> None:
        """Begin a new record.

        Raises:
            UserError: the file already holds a run, or cannot be opened.
        """
        assert self._file is None, "the record is open already"
        if self._path.is_file() and self._path.stat().st_size > 0:
            raise UserError(
                "run.name",
                self._path,
                "this folder already holds the record of a run",
                "Resume that run, or choose another run.name",
            )
        self._file = self._open()

    def resume(self, position_lines: int) -> None:
        """Keep the first ``position_lines`` lines, cut off what came after the checkpoint.

        Raises:
            CheckpointError: the file has fewer complete lines than the checkpoint counted, or one is not JSON.
        """
        assert self._file is None, "the record is open already"
        assert position_lines >= 0
        kept = self._read_lines(position_lines)
        with self._path.open("ab") as file:
            file.truncate(sum(len(line) for line in kept))
            file.flush()
            os.fsync(file.fileno())
        self._lines = len(kept)
        self._last_step = self._step_of(kept[-1]) if kept else None
        self._file = self._open()

    def log(self, metrics: StepMetrics) -> None:
        """Append one line.

        Raises:
            NonFiniteError: a value is NaN or infinite.
            FaultError: the step does not follow the last one, ``info`` is not JSON, or the disk refuses the line.
        """
        assert self._file is not None, "call start or resume first"
        if self._last_step is not None and metrics.step <= self._last_step:
            raise FaultError(
                f"{self._path}: step {metrics.step} after step {self._last_step}",
                "steps increase from line to line",
                "Log each step once, with everything that was measured in it",
            )
        line = encode_line(metrics)
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            file, self._file = self._file, None
            with suppress(OSError):  # closing tries the same write once more
                file.close()
            raise FaultError(
                f"writing step {metrics.step} to {self._path}: {error}",
                "the run folder must take one line a step",
                "Free disk space, then resume from the last checkpoint; a torn last line is cut off then",
            ) from error
        self._lines += 1
        self._last_step = metrics.step

    def checkpoint_position(self) -> int:
        """Force the lines so far to the disk and return their number, to be stored in a checkpoint."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
        return self._lines

    def close(self) -> None:
        """Every line was flushed when it was logged, so that nothing is left to fail here."""
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def _open(self) -> TextIO:
        try:
            return self._path.open("a", encoding="utf-8", newline="\n", buffering=1)
        except OSError as error:
            raise UserError(
                "run.output_dir",
                self._path,
                f"the record cannot be opened ({error.strerror})",
                "Name a folder that exists and can be written",
            ) from error

    def _read_lines(self, position_lines: int) -> list[bytes]:
        """The first ``position_lines`` complete lines, line ends included."""
        lines: list[bytes] = []
        if self._path.is_file():
            with self._path.open("rb") as file:
                for line in file:
                    if len(lines) == position_lines or not line.endswith(b"\n"):
                        break
                    lines.append(line)
        if len(lines) < position_lines:
            raise CheckpointError(
                str(self._path),
                f"{len(lines)} complete lines",
                f"the checkpoint was made after {position_lines} lines, so part of the record is lost",
                "Restore the file, or resume from an earlier checkpoint",
            )
        return lines

    def _step_of(self, line: bytes) -> int:
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                str(self._path),
                line[:60].decode(errors="replace"),
                "every line is a JSON object with a step",
                "Restore the file, or start a new run",
            ) from error


def encode_line(metrics: StepMetrics) -> str:
    """One line of strict JSON without its line end. Dataclasses and paths in ``info`` are converted.

    Raises:
        NonFiniteError: a value is NaN or infinite; strict JSON has neither.
        FaultError: ``info`` holds something that JSON cannot express.
    """
    values: dict[str, float] = {}
    for name, value in metrics.values.items():
        if not math.isfinite(value):
            raise NonFiniteError(
                f"metrics of step {metrics.step}: {name} is {value}",
                "strict JSON has no NaN and no infinity",
                "Leave out what was not measured",
            )
        values[name] = value if isinstance(value, int) else float(value)
    document = {"step": metrics.step, "values": values, "info": metrics.info}
    try:
        return json.dumps(document, allow_nan=False, default=_plain)
    except (TypeError, ValueError) as error:
        raise FaultError(
            f"metrics of step {metrics.step}: info cannot be written ({error})",
            "info holds strings, finite numbers, booleans, lists, mappings, dataclasses and paths",
            "Convert it before logging",
        ) from error


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not JSON")
