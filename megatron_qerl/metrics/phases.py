"""Where the wall time of a step goes.

Phases may nest (a rollout that verifies rewards as it goes), and then each second belongs to the innermost phase alone,
so that the phases and ``other`` add up to the step. The clock is monotonic: a change of the system's date cannot make a
phase negative. On a GPU kernels run behind the host's back: pass ``synchronize`` and the device is waited for at each
boundary, otherwise a phase pays for the kernels that an earlier one launched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_qerl.metrics.names import PHASES


class PhaseClock:
    """Adds up wall seconds by phase, for the step and for the run. Used from one thread.

    Args:
        now: monotonic clock in seconds; replaced in tests.
        synchronize: waits for the device's queued work; None on a CPU.
    """

    def __init__(
        self, now: Callable[[], float] = time.perf_counter, synchronize: Callable[[], None] | None = None
    ) -> None:
        self._now = now
        self._synchronize = synchronize
        self._open: list[str] = []
        self._step_s: dict[str, float] = {}
        self._totals_s: dict[str, float] = dict.fromkeys((*PHASES, "other"), 0.0)
        self._step_started: float | None = None
        self._mark = now()
        self._run_started = self._mark

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the enclosed time to ``name``, less what phases inside it take. Works inside and outside a step."""
        assert name in PHASES, f"unknown phase {name!r}; known: {PHASES}"
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def start_step(self) -> None:
        """Begin a step: the per-step times restart at zero, the totals go on."""
        assert self._step_started is None, "the last step was not finished"
        assert not self._open, f"phase {self._open[-1]} is still open"
        self._charge()
        self._step_s = dict.fromkeys((*PHASES, "other"), 0.0)
        self._step_started = self._mark

    def finish_step(self) -> dict[str, float]:
        """End the step and return ``time/{phase}_s`` for every phase, ``time/other_s`` and ``time/step_s``."""
        assert self._step_started is not None, "no step was started"
        assert not self._open, f"phase {self._open[-1]} is still open"
        self._charge()
        values = {f"time/{phase}_s": seconds for phase, seconds in self._step_s.items()}
        values["time/step_s"] = self._mark - self._step_started
        self._step_started = None
        return values

    @property
    def totals_s(self) -> dict[str, float]:
        """Seconds by phase since the clock was made, with ``other`` and their sum ``run``."""
        self._charge()
        return {**self._totals_s, "run": self._mark - self._run_started}

    def _charge(self) -> None:
        """Give the time since the last boundary to the innermost open phase."""
        if self._synchronize is not None:
            self._synchronize()
        now = self._now()
        elapsed = now - self._mark
        assert elapsed >= 0.0, "the clock went backwards"
        self._mark = now
        owner = self._open[-1] if self._open else "other"
        self._totals_s[owner] += elapsed
        if self._step_started is not None:
            self._step_s[owner] += elapsed
