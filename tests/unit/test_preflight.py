"""What preflight concludes: each kind of fault names the right node, and a fault of all names none."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_qerl.config.cluster import ClusterConfig
from megatron_qerl.config.loader import config_from_mapping
from megatron_qerl.launching.preflight.facts import Facts, gather_facts, source_hash, versions
from megatron_qerl.launching.preflight.findings import RankFindings
from megatron_qerl.launching.preflight.judge import judge_facts, judge_ranks, missing_nodes
from megatron_qerl.launching.preflight.meeting import Meeting, Visitor
from megatron_qerl.launching.preflight.ranks import pattern

GIB = 2**30


def cluster(**preflight: object) -> ClusterConfig:
    data = {"kind": "slurm", "nodes": 3, "ranks_per_node": 2, "gpus_per_node": 2, "preflight": preflight}
    return config_from_mapping(data, ClusterConfig, "test")


def sound(node: str) -> Facts:
    return Facts(node, {"torch": "2.11.0"}, ("H200", "H200"), "580.1", 140 * GIB, 500 * GIB, 0.0, {}, {})


FACTS = [sound(node) for node in "abc"]


def ranks_of(**changes: dict[int, dict[str, object]]) -> dict[str, list[RankFindings]]:
    """Three nodes of two ranks, all well but for ``changes`` by rank."""
    by_rank = changes.get("changes", {})
    found = {}
    for index, node in enumerate("abc"):
        found[node] = [
            replace(
                RankFindings(rank, bandwidth_gb_per_s=100.0, node_bandwidth_gb_per_s=400.0, peak_bytes=20 * GIB),
                **by_rank.get(rank, {}),  # type: ignore[arg-type]
            )
            for rank in (2 * index, 2 * index + 1)
        ]
    return found


def test_sound_nodes_have_no_problem() -> None:
    assert judge_facts(FACTS, cluster(bandwidth_gb_per_s=50.0)) == []
    assert judge_ranks(ranks_of(), FACTS, cluster(bandwidth_gb_per_s=50.0), on_gpus=True) == []


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"versions": {"torch": "2.10.0"}}, "version of torch"),
        ({"versions": {}}, "version of torch"),
        ({"driver": "570.2"}, "driver"),
        ({"gpus": ("H200", "H100")}, "GPU model"),
        ({"clock_ahead_s": -30.0}, "clock"),
        ({"errors": {"GPUs": "has 7, gpus_per_node = 8"}}, "GPUs"),
    ],
)
@pytest.mark.parametrize("place", [0, 2])
def test_the_node_that_differs_is_named(changes: dict[str, object], check: str, place: int) -> None:
    facts = list(FACTS)
    facts[place] = replace(facts[place], **changes)  # type: ignore[arg-type]
    (problem,) = judge_facts(facts, cluster())
    assert (problem.node, problem.check) == ("abc"[place], check)


def test_a_wanted_driver_outvotes_all_nodes() -> None:
    assert [p.node for p in judge_facts(FACTS, cluster(driver="590"))] == ["a", "b", "c"]


def test_who_says_nothing_is_missing() -> None:
    assert [p.node for p in missing_nodes("abc", {"a": 1, "c": 2}, 120)] == ["b"]


@pytest.mark.parametrize(
    ("changes", "node", "check"),
    [
        ({3: {"error": "no CUDA"}}, "b", "ranks"),
        ({r: {"error": "no such model"} for r in range(6)}, None, "ranks"),
        ({r: {"wrong_from": [4]} for r in range(4)}, "c", "collectives"),
        ({1: {"wrong_sums": True}}, None, "collectives"),
        ({2: {"node_bandwidth_gb_per_s": 3.0}}, "b", "bandwidth"),
        ({r: {"bandwidth_gb_per_s": 3.0} for r in range(6)}, None, "bandwidth"),
        ({5: {"wrong_tensors": ["w"]}}, "c", "model files"),
        ({r: {"wrong_tensors": ["w"]} for r in range(6)}, None, "model files"),
        ({0: {"peak_bytes": 135 * GIB}}, None, "memory plan"),
        ({0: {"plan_error": "does not fit the heads"}}, None, "memory plan"),
    ],
)
def test_a_fault_among_ranks_names_its_node_or_none(
    changes: dict[int, dict[str, object]], node: str | None, check: str
) -> None:
    (problem,) = judge_ranks(ranks_of(changes=changes), FACTS, cluster(bandwidth_gb_per_s=50.0), on_gpus=True)
    assert (problem.node, problem.check) == (node, check)


def test_patterns_of_ranks_differ_and_their_sum_is_exact() -> None:
    import torch

    device = torch.device("cpu")
    patterns = [pattern(r, 4096, device) for r in range(64)]
    assert all(not torch.equal(patterns[0], p) for p in patterns[1:])
    assert torch.equal(sum(patterns), sum(p.double() for p in patterns).float())  # type: ignore[union-attr]


def test_nodes_meet_and_a_late_one_is_missed() -> None:
    deadline = time.monotonic() + 1.0
    meeting = Meeting(0, ("a", "b", "late"), deadline)
    try:
        verdicts: dict[str, object] = {}

        def visit(node: str) -> None:
            verdicts[node] = Visitor("127.0.0.1", meeting.port, node, deadline).tell("facts", {"from": node})

        threads = [threading.Thread(target=visit, args=(node,)) for node in "ab"]
        for thread in threads:
            thread.start()
        assert meeting.gathered("facts") == {"a": {"from": "a"}, "b": {"from": "b"}}
        assert time.monotonic() >= deadline
        meeting.decide("facts", "stop")
        for thread in threads:
            thread.join()
        assert verdicts == {"a": "stop", "b": "stop"}
        assert abs(Visitor("127.0.0.1", meeting.port, "a", deadline).clock_ahead_s()) < 1.0
    finally:
        meeting.close()


def test_facts_of_this_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/bash\necho 'NVIDIA H200, 580.159, 143771'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    settings = cluster(local_dir="$SCRATCH", local_free_gib=0.001, shared_free_gib=1e9)
    facts = gather_facts("here", settings, tmp_path, lambda: 0.5, None)
    assert set(facts.errors) == {"GPUs", "shared file system"}
    assert facts.errors["GPUs"] == "has 1, gpus_per_node = 2"
    assert "1e+09 GiB are asked for" in facts.errors["shared file system"]
    assert (facts.driver, facts.gpu_memory_bytes, facts.clock_ahead_s) == ("580.159", 143771 << 20, 0.5)
    assert facts.versions["source"] == source_hash() == versions()["source"]
    assert not list(tmp_path.glob(".preflight-*"))
    json.dumps(facts.versions)


def test_a_node_says_its_facts_without_torch() -> None:
    code = (
        "import sys, megatron_qerl.launching.preflight.run, megatron_qerl.cli.doctor; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_port_in_use_is_said(tmp_path: Path) -> None:
    meeting = Meeting(0, ("a",), time.monotonic() + 5)
    try:
        settings = cluster(local_dir=str(tmp_path), local_free_gib=0.0, shared_free_gib=0.0)
        facts = gather_facts("a", settings, tmp_path, lambda: 0.0, meeting.port)
    finally:
        meeting.close()
    assert "cannot be used" in facts.errors["ports"]
