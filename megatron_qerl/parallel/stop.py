"""A request to stop: the scheduler is about to end the job, so save what is done and leave.

It arrives as SIGUSR1, or as a file, because a launcher between the scheduler and the ranks (torchrun, a container) does
not hand signals on. One rank that has seen it is enough: the ranks agree before anybody acts. The file is also the
answer: the first rank writes into it which step was saved, and whoever started the job reads there that it may go on.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from megatron_qerl.errors import StoppedError
from megatron_qerl.parallel.ranks import Ranks

SAVED = "saved step"


class StopRequest:
    """Whether this run was asked to stop.

    Args:
        file: its existence is a request; None where signals are the only way.
    """

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self._signalled = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGUSR1 as a request instead of dying of it."""
        before = signal.signal(signal.SIGUSR1, self._on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGUSR1, before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    def asked(self, ranks: Ranks) -> bool:
        """Whether any rank was asked. A collective of all ranks, which all get the same answer."""
        here = self._signalled or (ranks.first and self.file is not None and self.file.exists())
        return any(ranks.gather(here))

    def stop(self, ranks: Ranks, step: int, run_dir: Path) -> StoppedError:
        """The error to leave with, after the checkpoint of ``step`` was written."""
        if ranks.first and self.file is not None:
            self.file.write_text(f"{SAVED} {step}\n")
        return StoppedError(str(run_dir), f"stopped on request after step {step}", "Go on with --resume")
