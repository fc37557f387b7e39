"""A request to stop is seen by signal and by file, and answered in the file."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from megatron_qerl.parallel.ranks import Ranks
from megatron_qerl.parallel.stop import StopRequest


def test_a_signal_is_a_request_only_while_listening() -> None:
    stop = StopRequest()
    before = signal.getsignal(signal.SIGUSR1)
    with stop.listening():
        assert not stop.asked(Ranks())
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.asked(Ranks())
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_file_is_a_request_that_is_answered(tmp_path: Path) -> None:
    stop = StopRequest(tmp_path / "stop")
    assert not stop.asked(Ranks())
    (tmp_path / "stop").touch()
    assert stop.asked(Ranks())
    error = stop.stop(Ranks(), 7, tmp_path)
    assert (tmp_path / "stop").read_text() == "saved step 7\n"
    assert error.exit_code == 75
    assert "stopped on request after step 7" in str(error)


def test_one_rank_that_was_asked_is_enough() -> None:
    class Two(Ranks):
        def gather(self, value: object) -> list[object]:  # type: ignore[override]
            return [value, True]

    assert StopRequest().asked(Two())
