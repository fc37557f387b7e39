"""Jobs on a real Slurm of four virtual nodes: same numbers as one rank, time limits, a dead node, a failed rank."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.slurm.launched import CPU, Launched
from tests.support.distributed import ROOT
from tests.support.virtual_slurm import VirtualSlurm

pytestmark = pytest.mark.slurm
PP2 = "parallel.pipeline_model_parallel_size=2"


def recorded(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["values"] = {k: v for k, v in line["values"].items() if not k.startswith(("time/", "memory/"))}
    return lines


def assert_bit_equal(one: Path, other: Path) -> None:
    assert recorded(one) == recorded(other)
    assert len(recorded(one)) == 6
    last = "checkpoints/step_000006"
    for file in (one / last).glob("*.safetensors"):
        assert file.read_bytes() == (other / last / file.name).read_bytes(), file.name
    assert (one / "samples.jsonl").read_bytes() == (other / "samples.jsonl").read_bytes()


@pytest.fixture(scope="module")
def whole(slurm: VirtualSlurm, workdir: Path, cluster_file: Path) -> Launched:
    """PP2 x DP2 over 2 nodes x 2 ranks, never interrupted."""
    job = Launched(slurm, workdir, cluster_file, "whole", PP2)
    assert job.wait()["JobState"] == "COMPLETED", job.said()
    return job


def test_two_nodes_train_what_one_rank_trains(whole: Launched, workdir: Path) -> None:
    command = [sys.executable, "-m", "megatron_qerl.cli.main", "train", str(workdir / "tiny.yaml"), CPU, "run.name=one"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    one = workdir / "runs/one"
    assert (one / "samples.jsonl").read_bytes() == (whole.run_dir / "samples.jsonl").read_bytes()
    for a, b in zip(recorded(one), recorded(whole.run_dir), strict=True):
        for key, value in a["values"].items():
            assert b["values"][key] == pytest.approx(value, rel=1e-4, abs=1e-5), (a["step"], key)
    assert any(line["values"].get("optimizer/update_norm", 0.0) > 0 for line in recorded(one))
    adapter = load_file(one / "checkpoints/step_000006/adapter.safetensors")
    for name, tensor in load_file(whole.run_dir / "checkpoints/step_000006/adapter.safetensors").items():
        assert float((tensor - adapter[name]).abs().max()) <= 1e-3, name


def test_every_rank_has_a_log_that_latest_leads_to(whole: Launched) -> None:
    latest = whole.log_root / "latest"
    assert latest.resolve() == (whole.log_root / whole.ids[0] / "attempt_0").resolve()
    assert {f.name for f in latest.glob("rank_*.log")} == {f"rank_{r}.log" for r in range(4)}
    assert "report.html" in (latest / "rank_0.log").read_text()
    assert "finished" in whole.said()


def test_a_time_limit_and_a_dead_node_later_the_run_ends_bit_equal(
    slurm: VirtualSlurm, whole: Launched, workdir: Path, cluster_file: Path
) -> None:
    job = Launched(slurm, workdir, cluster_file, "interrupted", PP2)
    slurm.until(lambda: job.steps_recorded() >= 1, 300, "a step of the first attempt")
    # The limit is lowered under the running job, so that the signal comes now and not after minutes. Slurm looks at
    # limits every half minute; until then the run is held.
    job.signal(signal.SIGSTOP)
    slurm.run("scontrol", "update", f"JobId={job.ids[0]}", "TimeLimit=14")
    slurm.until(lambda: "asked to stop" in job.said(), 90, "the signal before the limit")
    slurm.run("scontrol", "update", f"JobId={job.ids[0]}", "TimeLimit=60")  # of the next attempt
    job.signal(signal.SIGCONT)
    slurm.until(lambda: "requeued" in job.said(), 200, "requeue")
    found = re.search(r"asked to stop\n(?:srun.*\n)*.*stopped \(saved step ([1-5])\); requeued", job.said())
    assert found is not None, job.said()
    saved = int(found.group(1))

    slurm.until(lambda: job.steps_recorded() > max(saved, 2), 300, "a step of the second attempt")
    job.signal(signal.SIGSTOP)
    assert (job.log_root / "latest").resolve().name == "attempt_1"
    victim = next(node for node in slurm.nodes[:2] if node != slurm.info(job.ids[0])["BatchHost"])
    slurm.kill_node(victim)
    job.signal(signal.SIGCONT)
    try:
        info = job.wait()
        assert info["JobState"] == "COMPLETED", job.said()
        assert info["Restarts"] == "2"
        assert victim not in slurm.run("scontrol", "show", "hostnames", info["NodeList"]).split()
        assert_bit_equal(whole.run_dir, job.run_dir)
    finally:
        slurm.start_node(victim)
        slurm.until(lambda: slurm.idle() == len(slurm.nodes), 60, "all nodes idle again")


def test_arrays_and_chains_leave_finished_runs_alone(slurm: VirtualSlurm, workdir: Path, cluster_file: Path) -> None:
    for index in (0, 1):
        run = workdir / f"runs/done-{index}"
        run.mkdir(parents=True)
        (run / "summary.json").touch()
    job = Launched(slurm, workdir, cluster_file, "done", "--vary", "run.seed=[3, 4]", "--resume", "--chain", "2")
    first, second = job.ids
    slurm.until(lambda: len(list(job.log_root.glob("slurm-*.out"))) == 4, 60, "four jobs")
    for number in (first, second):
        for index in (0, 1):
            said = job.log_root / f"slurm-{number}_{index}.out"
            slurm.until(
                lambda said=said, index=index: f"the run is finished: {workdir}/runs/done-{index}" in said.read_text(),
                60,
                "end",
            )
    assert (job.log_root / f"{second}_1/latest").is_dir()
