"""Which experts each token went to: recorded in one forward, forced in another.

A router's choice is a hard decision about nearly equal numbers. The engine computes them in other shapes than the
trainer, or under noise, so that now and then a token goes elsewhere and its log-probability jumps by more than any
rounding. Replaying the recorded choice removes the jump: the set of experts is the engine's, their weights are computed
from the trainer's own logits, so the gradient is that of the policy that generated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_qerl.errors import FaultError


@dataclass(frozen=True)
class RoutingRecord:
    """Experts of some tokens.

    Attributes:
        experts: block -> int16 [T, k] on the host, ascending within a token; only blocks of this pipeline stage. The
            tokens are all those of a forward, in the order of its rows: row ``s * B + b`` of hidden states [S, B, H].
    """

    experts: Mapping[int, Tensor]

    @property
    def tokens(self) -> int:
        """T."""
        return next((e.shape[0] for e in self.experts.values()), 0)

    def rows(self, index: Tensor) -> RoutingRecord:
        """The record of the tokens ``index``, int64 [n]."""
        return RoutingRecord({block: e[index] for block, e in self.experts.items()})

    @staticmethod
    def concatenate(records: list[RoutingRecord]) -> RoutingRecord:
        """One record of all tokens, in order."""
        blocks = records[0].experts.keys()
        return RoutingRecord({b: torch.cat([r.experts[b] for r in records]) for b in blocks})

    @staticmethod
    def union(records: Sequence[RoutingRecord]) -> RoutingRecord:
        """One record of the same tokens, with the blocks of all pipeline stages."""
        return RoutingRecord({block: experts for r in records for block, experts in r.experts.items()})

    def flipped_share(self, other: RoutingRecord) -> float:
        """Share of this record's (token, block, expert) choices that ``other``, of the same tokens, did not make.

        Raises:
            FaultError: the two are not of the same tokens and blocks.
        """
        if self.experts.keys() != other.experts.keys() or self.tokens != other.tokens:
            raise FaultError(
                "routing records",
                f"of {self.tokens} and {other.tokens} tokens, {len(self.experts)} and {len(other.experts)} blocks",
                "compare two forwards of one batch",
            )
        flipped = total = 0
        for block, mine in self.experts.items():
            kept = (mine[:, :, None] == other.experts[block][:, None, :]).any(dim=2)
            flipped += int((~kept).sum())
            total += kept.numel()
        return flipped / total if total else 0.0


@dataclass
class Recording:
    """Choices of the forwards in a ``recording`` block."""

    experts: dict[int, list[Tensor]] = field(default_factory=dict)

    def record(self) -> RoutingRecord:
        """What they chose, forward after forward."""
        return RoutingRecord({block: torch.cat(parts) for block, parts in self.experts.items()})


class RoutingContext:
    """What the routers of one model look at; they hold it from their construction.

    Outside of ``recording`` and ``replaying`` the routers choose freely and nothing is kept. A pack that carries its
    own record (``PackedGroups.routing``) is replayed whatever the context says, also when it is recomputed.
    """

    def __init__(self) -> None:
        self._recording: Recording | None = None
        self._replayed: RoutingRecord | None = None

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Keep the choices of the forwards inside. Without gradients: recomputation would be another forward."""
        assert self._recording is None, "recordings do not nest"
        self._recording = Recording()
        try:
            yield self._recording
        finally:
            self._recording = None

    @contextmanager
    def replaying(self, record: RoutingRecord) -> Iterator[None]:
        """Force ``record`` on the forward inside."""
        assert self._replayed is None, "one record is replayed at a time"
        self._replayed = record
        try:
            yield
        finally:
            self._replayed = None

    def forced(self, block: int, carried: RoutingRecord | None) -> Tensor | None:
        """int16 [T, k] that block ``block`` must choose, or None.

        Raises:
            FaultError: the record in force has nothing for the block.
        """
        record = carried if carried is not None else self._replayed
        if record is None:
            return None
        if block not in record.experts:
            raise FaultError(
                f"routing record, block {block}",
                f"is missing; the record has blocks {sorted(record.experts)}",
                "replay a record of the same model",
            )
        return record.experts[block]

    @property
    def records(self) -> bool:
        """Whether choices are being kept."""
        return self._recording is not None

    def observe(self, block: int, experts: Tensor) -> None:
        """Keep a block's choices, [T, k]."""
        assert self._recording is not None, "nothing is being recorded"
        self._recording.experts.setdefault(block, []).append(experts.to(torch.int16).cpu())


def pack_routes(groups: Sequence[tuple[int, Sequence[RoutingRecord]]], *, share_prefix: bool) -> RoutingRecord:
    """The record of a pack, in the order of its rows.

    Args:
        groups: tokens of each prompt, and each response's record: the prompt's tokens, then its own but the last.
        share_prefix: as ``packing.pack`` was called with.
    """
    parts: list[RoutingRecord] = []
    for prompt_tokens, records in groups:
        if not share_prefix:
            parts += records
            continue
        parts.append(records[0].rows(torch.arange(prompt_tokens)))
        parts += [r.rows(torch.arange(prompt_tokens, r.tokens)) for r in records]
    return RoutingRecord.concatenate(parts)
