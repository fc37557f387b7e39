"""One verifier process, seen from the trainer: start it, ask it, and kill it when it takes too long.

The worker is a fresh interpreter running a module, not a fork: the parent has torch loaded with many threads, and a
fork of such a process can inherit a locked lock. It lives in its own session, so that Ctrl-C reaches the trainer alone,
and it ends when its standard input does, so that none outlives a trainer that was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from megatron_qerl.errors import FaultError

START_LIMIT_S = 120.0
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])


def default_command() -> tuple[str, ...]:
    """The worker module. ``-P`` keeps files of the user's working directory from shadowing modules."""
    return (sys.executable, "-P", "-m", "megatron_qerl.rewards.worker")


class VerifierProcess:
    """Owns one worker process and its pipes; starts it on the first request. Not safe for two threads at once.

    Args:
        command: the worker, speaking the protocol of ``rewards.worker``.
        start_limit_s: how long the worker may take to import what it needs.
    """

    def __init__(self, command: Sequence[str] | None = None, start_limit_s: float = START_LIMIT_S) -> None:
        self._command = tuple(command or default_command())
        self._start_limit_s = start_limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._errors: IO[bytes] | None = None
        self._buffer = b""
        self._serial = 0
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        """Process id of the running worker."""
        return None if self._process is None else self._process.pid

    def ask(self, answer: str | None, reference: str, limit_s: float) -> str | None:
        """The worker's verdict, or None if it gave none within ``limit_s`` seconds or died; it is then replaced.

        Raises:
            FaultError: the worker cannot be started, or breaks the protocol.
        """
        self._serial += 1
        request = {"id": self._serial, "answer": answer, "reference": reference, "limit_s": limit_s}
        self._send(json.dumps(request).encode() + b"\n")
        line = self._read_line(limit_s)
        if line is None:
            self.close()
            self.restarts += 1
            return None
        reply = json.loads(line)
        if reply.get("id") != self._serial:
            self.close()
            raise FaultError("verifier process", f"reply {reply} to request {self._serial}", "report this as a defect")
        return str(reply["verdict"])

    def close(self) -> None:
        """End the worker and wait for it; does nothing when none runs."""
        if self._finalizer is not None:
            self._finalizer()
        if self._errors is not None:
            self._errors.close()
        self._process = self._finalizer = self._errors = None
        self._buffer = b""

    def _send(self, line: bytes) -> None:
        for attempt in range(2):
            process = self._running()
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
                return
            except BrokenPipeError as error:
                # It died between two requests, so this request is not to blame: once more, with a fresh worker.
                notes = self._error_tail()
                self.close()
                self.restarts += 1
                if attempt == 1:
                    raise FaultError("verifier process", f"died twice before a request: {notes}", _REMEDY) from error

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            # The parent need not have found the package through sys.path's own means (a test run, an editable install).
            search_path = os.pathsep.join(filter(None, (_PACKAGE_ROOT, os.environ.get("PYTHONPATH"))))
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**os.environ, "PYTHONPATH": search_path, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
            self._finalizer = weakref.finalize(self, _end, self._process)
            if self._read_line(self._start_limit_s) is None:
                notes = self._error_tail()
                self.close()
                raise FaultError(
                    f"start of the verifier process ({' '.join(self._command)})",
                    f"not ready within {self._start_limit_s:g} s: {notes}",
                    _REMEDY,
                )
        return self._process

    def _read_line(self, limit_s: float) -> bytes | None:
        """One line of the worker's output without its newline; None on the time limit or at the end of the output."""
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        poller = select.poll()  # select.select fails on descriptors above 1023, which a big trainer has
        poller.register(descriptor, select.POLLIN | select.POLLHUP)
        deadline_s = time.monotonic() + limit_s
        while b"\n" not in self._buffer:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not poller.poll(left_s * 1000):
                return None
            chunk = os.read(descriptor, 65536)
            if not chunk:
                return None
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _error_tail(self) -> str:
        """The last line of what the worker wrote to stderr."""
        assert self._errors is not None
        self._errors.seek(0)
        lines = self._errors.read()[-4096:].decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


_REMEDY = "run `python -m megatron_qerl.rewards.worker` by hand to see why; math-verify 0.9.0 must be installed"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill and reap. In a forked child Popen finds that the worker is not the child's own, and sends nothing."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # an unsent request went down with its worker
                pipe.close()
