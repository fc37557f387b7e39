"""This process among the others: who generates what, who judges and writes, and how one failure stops all.

A replica is the ranks that hold one copy of the policy together. Replicas generate different prompts; the ranks of one
replica generate the same ones in lockstep. Its first rank is its leader.

Python values (completions, metrics, decisions) travel through a group of their own over gloo, also where tensors travel
through NCCL. A rank that fails leaves a note in the store that all ranks started from and ends. Its connections close
with it, so the others, wherever they wait for it, wake up, find the note and end with its message.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_qerl.errors import FaultError, QerlError

T = TypeVar("T")
_NOTE = "failure"


@dataclass(frozen=True)
class Ranks:
    """All processes of a run, as one of them sees them.

    Attributes:
        rank, size: this process's number and how many there are.
        replica, replicas: number of this rank's replica and how many there are. Where experts are spread over more
            ranks than one copy of the dense layers, those copies are one replica: their experts answer together.
        leads: whether this rank is the first of its replica.
        leads_stage: whether it is the first of its replica that holds its layers.
        host: name of this machine.
        group: gloo group of all ranks; None if there is one rank.
        store: what all ranks can reach without each other; None if there is one rank.
    """

    rank: int = 0
    size: int = 1
    replica: int = 0
    replicas: int = 1
    leads: bool = True
    leads_stage: bool = True
    host: str = ""
    group: dist.ProcessGroup | None = None
    store: dist.Store | None = None

    @property
    def first(self) -> bool:
        """Whether this rank writes the run folder."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: T) -> T:
        """The first rank's value."""
        if self.size == 1:
            return value
        values: list[Any] = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def same(self, what: str, value: object) -> None:
        """Check that every rank has the same value.

        Raises:
            FaultError: on every rank, if one differs.
        """
        values = self.gather(value)
        different = [r for r, v in enumerate(values) if v != values[0]]
        if different:
            raise FaultError(
                what,
                f"differs between ranks: {_short(values[0])} on rank 0, {_short(values[different[0]])} on rank "
                f"{different[0]} ({len(different)} of {self.size} differ from rank 0)",
                "the ranks must read the same files and compute the same numbers; report this if they do",
            )

    def largest(self, values: dict[str, float]) -> dict[str, float]:
        """Each value's largest over all ranks."""
        everywhere = self.gather(values)
        return {k: max(v[k] for v in everywhere if k in v) for v in everywhere for k in v}

    def neighbours(self) -> tuple[int, int]:
        """This rank's number on its machine, and how many ranks are there."""
        hosts = self.gather(self.host)
        return hosts[: self.rank].count(self.host), hosts.count(self.host)

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Around all that ranks do together: an error of one becomes the end of all.

        Raises:
            FaultError: on ranks that were only waiting, with the message of the one that failed.
        """
        try:
            yield
        except BaseException as error:
            if self.store is None:
                raise
            rank, message = self._note(error)
            if rank != self.rank and not isinstance(error, QerlError):
                what = f"rank {self.rank} of {self.size}"
                rule = f"stopped because rank {rank} failed ({message})"
                raise FaultError(what, rule, f"see the output of rank {rank}") from error
            if rank == self.rank and _is_contact(error):
                what = f"rank {self.rank} of {self.size}"
                remedy = "see the other ranks' output; one may have been killed, for memory perhaps"
                raise FaultError(what, f"lost contact with another rank ({message})", remedy) from error
            raise

    def _note(self, error: BaseException) -> tuple[int, str]:
        """Leave a note of this rank's failure, unless another was first; returns whose note stands and what it says."""
        assert self.store is not None
        message = (str(error).splitlines() or [""])[0] or type(error).__name__
        mine = f"{self.rank} {message}"
        try:
            stands = self.store.compare_set(_NOTE, "", mine).decode()
        except (RuntimeError, OSError):  # whoever held the store is gone too
            return self.rank, message
        rank, _, text = stands.partition(" ")
        return int(rank), text


def _is_contact(error: BaseException) -> bool:
    """Whether an error says that another rank does not answer."""
    words = ("connection closed", "connection reset", "timed out", "timeout", "broken pipe")
    text = str(error).lower()
    return isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or any(w in text for w in words))


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def host_name() -> str:
    """Name of this machine."""
    return socket.gethostname()
