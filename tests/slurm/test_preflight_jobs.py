"""Preflight as the first step of real jobs: bad nodes are named, excluded, and the run finishes on others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_qerl.config import strict_yaml
from tests.slurm.launched import Launched
from tests.support.virtual_slurm import VirtualSlurm

pytestmark = pytest.mark.slurm


def cluster_with(workdir: Path, cluster_file: Path, name: str, **changes: Any) -> Path:
    settings = strict_yaml.read_mapping(cluster_file, "cluster") | {"gpus_per_node": 2} | changes
    local = {"enabled": True, "local_dir": f"{workdir}/local_$SLURMD_NODENAME", "time_limit_s": 300}
    settings["preflight"] = settings["preflight"] | local
    file = workdir / f"{name}.yaml"
    file.write_text(strict_yaml.dump(settings))
    return file


def verdict(job: Launched, attempt: int) -> dict[str, Any]:
    file = job.log_root / job.ids[0] / f"attempt_{attempt}/preflight/verdict.json"
    read: dict[str, Any] = json.loads(file.read_text())
    return read


@pytest.fixture
def three_bad_nodes(workdir: Path) -> Iterator[None]:
    """qn2 lost a GPU, qn3's disk is full, qn4 has another version of a package."""
    fake = workdir / "fake/safetensors-0.0.1.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: safetensors\nVersion: 0.0.1\n")
    hooks = {workdir / "qn2.sh": "GPUS=1\n", workdir / "qn4.sh": f"PYTHONPATH={workdir}/fake:$PYTHONPATH\n"}
    for file, text in hooks.items():
        file.write_text(text)
    full = workdir / "local_qn3"
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(full)], check=True)
    try:
        (full / "filled").write_bytes(bytes(1 << 20))
        yield
    finally:
        subprocess.run(["umount", str(full)], check=True)
        for file in hooks:
            file.unlink()


@pytest.mark.usefixtures("three_bad_nodes")
def test_three_bad_nodes_are_named_with_what_is_wrong(slurm: VirtualSlurm, workdir: Path, cluster_file: Path) -> None:
    cluster = cluster_with(workdir, cluster_file, "four", nodes=4, ranks_per_node=2)
    job = Launched(slurm, workdir, cluster, "refused")
    assert job.wait()["JobState"] == "FAILED", job.said()
    assert "not requeued: 1 other nodes are in batch, and nodes = 4" in job.said()
    said = job.said()
    assert "bad node qn2: GPUs: has 1, gpus_per_node = 2" in said
    assert "bad node qn3: local disk:" in said
    assert "bad node qn4: version of safetensors: is 0.0.1, 3 of 4 nodes have" in said
    assert {p["node"] for p in verdict(job, 0)["problems"]} == {"qn2", "qn3", "qn4"}
    assert not job.run_dir.exists()


def test_a_bad_node_is_excluded_and_a_rank_that_fails_on_the_others_is_named(
    slurm: VirtualSlurm, workdir: Path, cluster_file: Path
) -> None:
    (workdir / "qn1.sh").write_text("GPUS=1\n")
    cluster = cluster_with(workdir, cluster_file, "two")
    job = Launched(slurm, workdir, cluster, "replaced", "train.steps=1000", "eval.problems=2")
    try:
        slurm.until(lambda: job.steps_recorded() >= 1, 400, "a step")
    finally:
        (workdir / "qn1.sh").unlink()
    assert [p["node"] for p in verdict(job, 0)["problems"]] == ["qn1"]
    info = slurm.info(job.ids[0])
    assert (info["Restarts"], info["ExcNodeList"]) == ("1", "qn1"), job.said()
    second = verdict(job, 1)
    assert second["problems"] == []
    ranks = [r for node in second["ranks"].values() for r in node]
    assert len(ranks) == 4
    assert all(r["bandwidth_gb_per_s"] > 0 and r["node_bandwidth_gb_per_s"] > 0 for r in ranks)
    assert sum(r["bytes_hashed"] for r in ranks) > 0
    assert "memory plan:" in (job.log_root / "latest/preflight/verdict.txt").read_text()

    os.kill(job.ranks()[3], signal.SIGKILL)  # as the kernel does when memory is short
    assert job.wait(60)["JobState"] == "FAILED", job.said()
    assert f"rank 3 failed; its log is {job.log_root}/{job.ids[0]}/attempt_1/rank_3.log" in job.said(), job.said()
