"""Preflight on one node: facts first, then, if all nodes are sound, what their ranks find out together.

Every node runs this; the first one judges. Two rounds, because collectives with a broken node only hang.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_qerl.config.cluster import ClusterConfig
from megatron_qerl.config.schema import RunConfig
from megatron_qerl.errors import FaultError
from megatron_qerl.launching.preflight.facts import Facts, gather_facts
from megatron_qerl.launching.preflight.findings import MARKER, RankFindings, start_command
from megatron_qerl.launching.preflight.judge import Problem, judge_facts, judge_ranks, missing_nodes
from megatron_qerl.launching.preflight.meeting import Meeting, Visitor

#: Ports of a job beside the ranks' own.
MEETING_PORT, RANKS_PORT = 4, 5
EXIT_BAD_NODE = 3


@dataclass(frozen=True)
class Place:
    """This node among the nodes of a job.

    Attributes:
        nodes: names of all, the first one is where they meet.
        index: of this one.
        port: first of the job's ports.
        report: shared folder for the verdict.
    """

    nodes: tuple[str, ...]
    index: int
    port: int
    report: Path

    @property
    def node(self) -> str:
        return self.nodes[self.index]


def preflight(place: Place, cluster: ClusterConfig, config: RunConfig, files: tuple[Path, Path]) -> int:
    """Check this node and, on the first one, judge all.

    Args:
        place: this node.
        cluster, config: where and what.
        files: their files, run config first, for the ranks.

    Returns:
        0: all is well. 3: a node is bad, and named in ``report/bad_nodes``. 1: something else forbids the run.
    """
    deadline = time.monotonic() + cluster.preflight.time_limit_s
    meeting = None
    if place.index == 0:
        try:
            meeting = Meeting(place.port + MEETING_PORT, place.nodes, deadline)
        except OSError as error:
            problem = Problem(place.node, "ports", f"port {place.port + MEETING_PORT} is taken ({error.strerror})")
            return _conclude(place, [problem], {})
    try:
        return _rounds(place, cluster, config, files, deadline, meeting)
    finally:
        if meeting is not None:
            meeting.close()


def _rounds(
    place: Place,
    cluster: ClusterConfig,
    config: RunConfig,
    files: tuple[Path, Path],
    deadline: float,
    meeting: Meeting | None,
) -> int:
    visitor = Visitor(place.nodes[0], place.port + MEETING_PORT, place.node, deadline)
    shared = _nearest(config.run.output_dir)
    own = gather_facts(place.node, cluster, shared, visitor.clock_ahead_s, place.port if place.index == 0 else None)
    if meeting is None:
        if visitor.tell("facts", asdict(own)) != "ranks":
            return 0
        visitor.tell("ranks", _run_ranks(place, cluster, files, deadline))
        return 0
    meeting.note("facts", place.node, asdict(own))
    told = meeting.gathered("facts")
    facts = [Facts(**told[node]) for node in place.nodes if node in told]
    problems = missing_nodes(place.nodes, told, cluster.preflight.time_limit_s) + judge_facts(facts, cluster)
    record: dict[str, Any] = {"facts": told}
    meeting.decide("facts", "stop" if problems else "ranks")
    if not problems:
        meeting.note("ranks", place.node, _run_ranks(place, cluster, files, deadline))
        said = meeting.gathered("ranks")
        record["ranks"] = said
        meeting.decide("ranks", "done")
        problems = missing_nodes(place.nodes, said, cluster.preflight.time_limit_s)
        found = {node: [RankFindings(**r) for r in said[node]] for node in place.nodes if node in said}
        on_gpus = bool(cluster.gpus_per_node) and config.model.device != "cpu"
        problems += judge_ranks(found, facts, cluster, on_gpus=on_gpus)
    return _conclude(place, problems, record)


def _nearest(folder: Path) -> Path:
    """The folder or its nearest parent that exists."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _run_ranks(place: Place, cluster: ClusterConfig, files: tuple[Path, Path], deadline: float) -> list[dict[str, Any]]:
    """Findings of this node's ranks; one that said nothing has an error that tells its last line."""
    count = cluster.ranks_per_node
    common = {
        "WORLD_SIZE": str(count * len(place.nodes)),
        "MASTER_ADDR": place.nodes[0],
        "MASTER_PORT": str(place.port + RANKS_PORT),
        "OMP_NUM_THREADS": "1",
    }
    processes = []
    for local in range(count):
        rank = {"RANK": str(place.index * count + local), "LOCAL_RANK": str(local)}
        processes.append(
            subprocess.Popen(
                start_command(*files),
                env=os.environ | common | rank,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
    findings = []
    for local, process in enumerate(processes):
        try:
            output, _ = process.communicate(timeout=max(1.0, deadline - 5 - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output = process.communicate()[0] + "\nnot finished in time"
        findings.append(_finding(place.index * count + local, output))
    return findings


def _finding(rank: int, output: str) -> dict[str, Any]:
    lines = [line for line in output.splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith(MARKER):
            found: dict[str, Any] = json.loads(line.removeprefix(MARKER))
            return found
    return asdict(RankFindings(rank, error=f"rank {rank}: {lines[-1] if lines else 'ended without a word'}"))


def _conclude(place: Place, problems: list[Problem], record: dict[str, Any]) -> int:
    """Print and write the verdict; returns the exit code.

    Raises:
        FaultError: the report folder cannot be written.
    """
    bad = sorted({p.node for p in problems if p.node is not None})
    lines = [f"bad node {p}" if p.node else f"problem {p}" for p in problems]
    lines += _summary(record)
    lines.append(f"preflight: {len(problems)} problems, bad nodes: {' '.join(bad) or 'none'}")
    print("\n".join(lines), flush=True)
    verdict = {"problems": [asdict(p) for p in problems], **record}
    try:
        place.report.mkdir(parents=True, exist_ok=True)
        (place.report / "verdict.json").write_text(json.dumps(verdict, indent=1))
        (place.report / "verdict.txt").write_text("\n".join(lines) + "\n")
        (place.report / "bad_nodes").write_text("".join(f"{node}\n" for node in bad))
    except OSError as error:
        raise FaultError(f"preflight report {place.report}", str(error), "Choose another log_dir") from error
    return EXIT_BAD_NODE if bad else 1 if problems else 0


def _summary(record: dict[str, Any]) -> list[str]:
    ranks = [r for node in record.get("ranks", {}).values() for r in node if not r["error"]]
    if not ranks:
        return []
    slowest = min(r["bandwidth_gb_per_s"] for r in ranks)
    return [
        f"all-reduce of {len(ranks)} ranks: {slowest:.3g} GB/s",
        f"model files: {sum(r['bytes_hashed'] for r in ranks) / 1e6:.1f} MB hashed",
        f"memory plan: {max(r['peak_bytes'] for r in ranks) / 2**30:.2f} GiB a rank",
    ]
