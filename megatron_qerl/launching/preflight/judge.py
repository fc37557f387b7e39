"""Which node is bad, and why: pure functions from what the nodes said to problems that name them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_qerl.config.cluster import ClusterConfig
from megatron_qerl.launching.preflight.facts import Facts
from megatron_qerl.launching.preflight.findings import RankFindings


@dataclass(frozen=True)
class Problem:
    """A finding that forbids the run.

    Attributes:
        node: the node to be replaced; None where another node would not help.
        check: what was looked at.
        text: what is wrong.
    """

    node: str | None
    check: str
    text: str

    def __str__(self) -> str:
        return f"{self.node or 'all nodes'}: {self.check}: {self.text}"


def missing_nodes(nodes: Sequence[str], told: Mapping[str, object], limit_s: int) -> list[Problem]:
    """Nodes that said nothing in time."""
    text = f"did not answer within preflight.time_limit_s = {limit_s}"
    return [Problem(node, "answer", text) for node in nodes if node not in told]


def judge_facts(facts: Sequence[Facts], cluster: ClusterConfig) -> list[Problem]:
    """Problems that single nodes see, and differences between nodes.

    Args:
        facts: by node, the first node first: where a vote ties, it is taken as right.
        cluster: the limits.
    """
    problems = [Problem(f.node, check, text) for f in facts for check, text in f.errors.items()]
    for name in sorted({name for f in facts for name in f.versions}):
        problems += _outvoted({f.node: f.versions.get(name, "not installed") for f in facts}, f"version of {name}")
    if cluster.gpus_per_node:
        drivers = {f.node: f.driver for f in facts if f.driver}
        wanted = cluster.preflight.driver
        if wanted is None:
            problems += _outvoted(drivers, "driver")
        problems += [
            Problem(node, "driver", f"is {found}, preflight.driver = {wanted}")
            for node, found in drivers.items()
            if wanted not in (None, found)
        ]
        problems += _outvoted({f.node: ", ".join(sorted(set(f.gpus))) for f in facts if f.gpus}, "GPU model")
    reachable = [f for f in facts if "network" not in f.errors]
    clocks = sorted(f.clock_ahead_s for f in reachable)
    middle = clocks[(len(clocks) - 1) // 2] if clocks else 0.0
    limit = cluster.preflight.clock_skew_s
    problems += [
        Problem(f.node, "clock", f"is {f.clock_ahead_s - middle:+.1f} s off the others, limit {limit:g} s")
        for f in reachable
        if abs(f.clock_ahead_s - middle) > limit
    ]
    return problems


def _outvoted(values: Mapping[str, str], check: str) -> list[Problem]:
    """Nodes whose value is not the most frequent one; the earliest wins a tie."""
    if len(set(values.values())) < 2:
        return []
    usual, count = Counter(values.values()).most_common(1)[0]
    return [
        Problem(node, check, f"is {value}, {count} of {len(values)} nodes have {usual}")
        for node, value in values.items()
        if value != usual
    ]


def judge_ranks(
    found: Mapping[str, Sequence[RankFindings]], facts: Sequence[Facts], cluster: ClusterConfig, *, on_gpus: bool
) -> list[Problem]:
    """Problems that the ranks saw together.

    Args:
        found: node -> its ranks' findings, the first node first.
        facts: what the nodes said before, for their memory.
        cluster: the limits.
        on_gpus: whether the run computes on GPUs.
    """
    problems: list[Problem] = []
    owner = {f.rank: node for node, ranks in found.items() for f in ranks}
    everyone = [f for ranks in found.values() for f in ranks]
    unable = {node: [f.error for f in ranks if f.error] for node, ranks in found.items()}
    failing = [node for node, errors in unable.items() if errors]
    # The same on every node is the config's or the model's fault, and other nodes would say it again.
    shared = len(failing) == len(found) > 1
    if shared:
        problems.append(Problem(None, "ranks", unable[failing[0]][0]))
    else:
        problems += [Problem(node, "ranks", unable[node][0]) for node in failing]
    senders = Counter(owner[r] for f in everyone for r in f.wrong_from if r in owner)
    if senders:
        node, times = senders.most_common(1)[0]
        problems.append(Problem(node, "collectives", f"its numbers arrived wrong at {times} ranks"))
    elif any(f.wrong_sums for f in everyone):
        problems.append(Problem(None, "collectives", "an all-reduce gave a wrong sum, and single transfers did not"))
    problems += _slow(found, everyone, cluster)
    problems += _wrong_files(found)
    problems += _memory(everyone, facts, cluster, on_gpus=on_gpus)
    return problems


def _slow(
    found: Mapping[str, Sequence[RankFindings]], everyone: Sequence[RankFindings], cluster: ClusterConfig
) -> list[Problem]:
    least = cluster.preflight.bandwidth_gb_per_s
    able = [f for f in everyone if not f.error]
    within = {n: [f.node_bandwidth_gb_per_s for f in ranks if not f.error] for n, ranks in found.items()}
    slow = [
        Problem(node, "bandwidth", f"{min(rates):.3g} GB/s within it, preflight.bandwidth_gb_per_s = {least:g}")
        for node, rates in within.items()
        if cluster.ranks_per_node > 1 and rates and min(rates) < least
    ]
    if not slow and len(able) > 1 and (overall := min(f.bandwidth_gb_per_s for f in able)) < least:
        text = f"{overall:.3g} GB/s between nodes, preflight.bandwidth_gb_per_s = {least:g}"
        slow.append(Problem(None, "bandwidth", text))
    return slow


def _wrong_files(found: Mapping[str, Sequence[RankFindings]]) -> list[Problem]:
    wrong = {node: sorted({t for f in ranks for t in f.wrong_tensors}) for node, ranks in found.items()}
    nodes = [node for node, tensors in wrong.items() if tensors]
    text = "{} does not have the hash in manifest.json; copy the model again"
    if len(nodes) == len(found) and nodes:
        return [Problem(None, "model files", text.format(wrong[nodes[0]][0]))]
    return [Problem(node, "model files", text.format(wrong[node][0]) + " to this node") for node in nodes]


def _memory(
    everyone: Sequence[RankFindings], facts: Sequence[Facts], cluster: ClusterConfig, *, on_gpus: bool
) -> list[Problem]:
    first = next((f for f in everyone if f.rank == 0), None)
    if first is None or first.error:
        return []
    if first.plan_error:
        return [Problem(None, "memory plan", first.plan_error)]
    reserve = round(cluster.preflight.memory_reserve_gib * 2**30) if on_gpus else 0
    share = {f.node: (f.gpu_memory_bytes if on_gpus else f.memory_bytes // cluster.ranks_per_node) for f in facts}
    limit = min(share.values()) - reserve
    if first.peak_bytes <= limit:
        return []
    what = "GPU" if on_gpus else "rank"
    text = (
        f"a rank needs {first.peak_bytes / 2**30:.2f} GiB, a {what} has {limit / 2**30:.2f} GiB to give; "
        "megatron-qerl plan says what would fit"
    )
    return [Problem(None, "memory plan", text)]
