"""What a rank reports to its node. No torch here: the node must be able to say that the ranks' torch is broken."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

#: Begins the line of a rank's output that holds its findings as JSON.
MARKER = "preflight-rank:"


@dataclass
class RankFindings:
    """One rank.

    Attributes:
        rank: its number.
        error: why it could not do its part; empty if it could.
        wrong_from: ranks whose numbers arrived wrong here.
        wrong_sums: whether an all-reduce of all ranks was wrong.
        bandwidth_gb_per_s: bus bandwidth of an all-reduce of all ranks; 0 for one rank.
        node_bandwidth_gb_per_s: the same among this node's ranks.
        wrong_tensors: tensors of the base that do not have the manifest's hash here.
        bytes_hashed: of the base, on this rank.
        peak_bytes: planned memory of the worst rank; from rank 0.
        plan_error: why nothing could be planned; from rank 0.
    """

    rank: int
    error: str = ""
    wrong_from: list[int] = field(default_factory=list)
    wrong_sums: bool = False
    bandwidth_gb_per_s: float = 0.0
    node_bandwidth_gb_per_s: float = 0.0
    wrong_tensors: list[str] = field(default_factory=list)
    bytes_hashed: int = 0
    peak_bytes: int = 0
    plan_error: str = ""


def start_command(config: Path, cluster: Path) -> list[str]:
    """The command of one rank, with this interpreter."""
    return [sys.executable, "-m", "megatron_qerl.launching.preflight.ranks", str(config), str(cluster)]
