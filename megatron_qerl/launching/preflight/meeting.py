"""Where the nodes meet before there is any process group: lines of JSON to a socket of the first node.

A node that cannot come, or comes too late, is missing by name. Files would not do: a network file system may show a new
one to other nodes only after a minute.
"""

from __future__ import annotations

import json
import socket
import socketserver
import threading
import time
from dataclasses import dataclass, field
from typing import Any

_RETRY_S = 0.2


@dataclass
class _Phase:
    told: dict[str, Any] = field(default_factory=dict)
    verdict: Any = None


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    meeting: Meeting


class _Handler(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        for line in self.rfile:
            message = json.loads(line)
            answer = time.time() if message["phase"] == "clock" else self.server.meeting.hear(**message)
            self.wfile.write(json.dumps(answer).encode() + b"\n")


class Meeting:
    """The first node's side.

    Args:
        port: where to listen.
        nodes: names of all nodes.
        deadline: on ``time.monotonic()``; who has not spoken by then is missing.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, port: int, nodes: tuple[str, ...], deadline: float) -> None:
        self.nodes, self.deadline = nodes, deadline
        self._phases: dict[str, _Phase] = {}
        self._changed = threading.Condition()
        self._server = _Server(("", port), _Handler)
        self._server.meeting = self
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def note(self, phase: str, node: str, data: Any) -> None:
        """Keep what a node says."""
        with self._changed:
            self._phases.setdefault(phase, _Phase()).told[node] = data
            self._changed.notify_all()

    def hear(self, phase: str, node: str, data: Any) -> Any:
        """Keep what a node says and give it the verdict of the phase once there is one."""
        self.note(phase, node, data)
        with self._changed:
            state = self._phases[phase]
            self._changed.wait_for(lambda: state.verdict is not None, max(0.0, self.deadline - time.monotonic()) + 10)
            return state.verdict

    def gathered(self, phase: str) -> dict[str, Any]:
        """What each node said in a phase, when all have spoken or time is up."""
        with self._changed:
            state = self._phases.setdefault(phase, _Phase())
            self._changed.wait_for(
                lambda: len(state.told) == len(self.nodes), max(0.0, self.deadline - time.monotonic())
            )
            return dict(state.told)

    def decide(self, phase: str, verdict: Any) -> None:
        """Tell all nodes the verdict, which must not be None."""
        with self._changed:
            self._phases.setdefault(phase, _Phase()).verdict = verdict
            self._changed.notify_all()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Visitor:
    """Every node's side, the first one's too.

    Args:
        host, port: of the meeting.
        node: own name.
        deadline: on ``time.monotonic()``.
    """

    def __init__(self, host: str, port: int, node: str, deadline: float) -> None:
        self.address, self.node, self.deadline = (host, port), node, deadline

    def clock_ahead_s(self) -> float:
        """How far this clock is ahead of the meeting's, to half of the time that the question took.

        Raises:
            OSError: the meeting cannot be reached.
        """
        before = time.time()
        theirs = float(self._ask({"phase": "clock"}, 10.0))
        return (before + time.time()) / 2 - theirs

    def tell(self, phase: str, data: Any) -> Any:
        """Say something and wait for the verdict.

        Raises:
            OSError: the meeting cannot be reached, or gave no answer in time.
        """
        answer = self._ask({"phase": phase, "node": self.node, "data": data}, 15.0)
        if answer is None:
            raise TimeoutError("the first node came to no verdict")
        return answer

    def _ask(self, message: dict[str, Any], grace_s: float) -> Any:
        """One question; the meeting may open later than this node starts."""
        while True:
            left = self.deadline - time.monotonic()
            try:
                with socket.create_connection(self.address, timeout=max(1.0, left)) as connection:
                    connection.settimeout(max(1.0, left) + grace_s)
                    connection.sendall(json.dumps(message).encode() + b"\n")
                    with connection.makefile() as lines:
                        line = lines.readline()
                if not line:
                    raise ConnectionError("the first node hung up")
                return json.loads(line)
            except ConnectionRefusedError:
                if left < 0:
                    raise
                time.sleep(_RETRY_S)
