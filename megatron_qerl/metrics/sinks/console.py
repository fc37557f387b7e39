"""The run on a terminal: a progress bar with the time left, and one line a step.

Where standard output is no terminal (a batch system's log), the bar gives way to plain lines that carry the time left
themselves. A number that the step did not measure is shown as ``-``.
"""

from __future__ import annotations

import sys
from collections import deque
from statistics import fmean
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from megatron_qerl.types import StepMetrics

_ETA_WINDOW_STEPS = 20


class ConsoleSink:
    """Writes to ``stream``; one ``log`` call is one finished step.

    Args:
        total_steps: planned steps of the run.
        completed_steps: steps finished before this process, when a run is resumed.
        stream: where to write; standard output by default.
    """

    def __init__(self, total_steps: int, completed_steps: int = 0, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stdout
        self._total = total_steps
        self._completed = completed_steps
        self._recent_s: deque[float] = deque(maxlen=_ETA_WINDOW_STEPS)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        if self._stream.isatty():
            self._progress = Progress(
                TextColumn("steps"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[left]}"),
                console=Console(file=self._stream, highlight=False),
            )
            self._task = self._progress.add_task("steps", total=total_steps, completed=completed_steps, left="")
            self._progress.start()

    def log(self, metrics: StepMetrics) -> None:
        self._completed += 1
        if "time/step_s" in metrics.values:
            self._recent_s.append(metrics.values["time/step_s"])
        line, left = format_step(metrics, self._completed, self._total), self._time_left()
        if self._progress is None or self._task is None:
            print(f"{line} | {left}" if left else line, file=self._stream, flush=True)
            return
        self._progress.console.print(line, markup=False, soft_wrap=True)
        self._progress.update(self._task, completed=self._completed, left=left)

    def close(self) -> None:
        """Leave the bar as it stands; without one there is nothing to do."""
        if self._progress is not None:
            self._progress.stop()

    def _time_left(self) -> str:
        """``ETA 1 h 02 min`` from the mean of the last steps; empty when no step has a time or none is left."""
        if not self._recent_s or self._completed >= self._total:
            return ""
        return f"ETA {format_duration(fmean(self._recent_s) * (self._total - self._completed))}"


def format_step(metrics: StepMetrics, completed_steps: int, total_steps: int) -> str:
    """The one-line summary of a step, for example
    ``step   7/200 | reward 0.312 | mixed 62 % | sigma 1.0e-02 | length 143 tokens | 8.4 s``."""
    values = metrics.values

    def show(name: str, form: str, scale: float = 1.0) -> str:
        return format(values[name] * scale, form) if name in values else "-"

    width = len(str(total_steps))
    return " | ".join(
        (
            f"step {completed_steps:>{width}}/{total_steps}",
            f"reward {show('reward/mean', '.3f')}",
            f"mixed {show('groups/mixed_fraction', '.0f', 100.0)} %",
            f"sigma {show('noise/sigma_nominal', '.1e')}",
            f"length {show('length/mean_tokens', '.0f')} tokens",
            f"{show('time/step_s', '.1f')} s",
        )
    )


def format_duration(seconds: float) -> str:
    """Seconds as ``42 s``, ``7 min 05 s``, ``3 h 20 min`` or ``2 d 04 h``."""
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60:02d} s"
    if total < 86400:
        return f"{total // 3600} h {total % 3600 // 60:02d} min"
    return f"{total // 86400} d {total % 86400 // 3600:02d} h"
