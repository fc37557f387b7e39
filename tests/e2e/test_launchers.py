"""One machine and plain hosts: start, ask to stop, go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_qerl.config import strict_yaml
from tests.support.distributed import ROOT
from tests.support.tiny_run import write_run

#: Enough that the run is not over before it hears of the request.
STEPS = 20
ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "",
}  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("launchers"))


def steps(run: Path) -> int:
    record = run / "metrics.jsonl"
    return record.read_bytes().count(b"\n") if record.exists() else 0


def stop_after_a_step(process: subprocess.Popen[str], run: Path, number: int) -> None:
    deadline = time.monotonic() + 400
    while steps(run) < 1 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process.poll() is None, process.communicate()
    os.killpg(process.pid, number)  # as a terminal does with Ctrl-C


def test_one_machine_saves_on_ctrl_c_and_goes_on(config: Path) -> None:
    run, logs = config.parent / "runs/local", config.parent / "local"
    command = ["bash", str(ROOT / "launch/local.sh"), str(config), "run.name=local", "model.device=cpu"]
    command += [f"train.steps={STEPS}"]
    environment = ENVIRONMENT | {"RANKS": "2", "PYTHON": sys.executable, "LOGS": str(logs)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)  # type: ignore[call-overload]
    stop_after_a_step(process, run, signal.SIGINT)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 75, output
    assert "stopped (saved step" in output
    assert f"after step {steps(run)}" in (logs / "rank_1.log").read_text()
    assert 1 <= steps(run) < STEPS
    done = subprocess.run([*command, "--resume"], env=environment, check=False, timeout=400, **pipes)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout
    assert "report.html" in done.stdout
    assert steps(run) == STEPS


def test_plain_hosts_are_started_by_ssh(config: Path, tmp_path: Path) -> None:
    ssh = tmp_path / "bin/ssh"
    ssh.parent.mkdir()
    ssh.write_text(
        f'#!/bin/bash\necho "$*" >>{tmp_path}/ssh.log\nwhile [ $# -gt 2 ]; do shift; done\nexec bash -c "$2"\n'
    )
    ssh.chmod(0o755)
    variables = {k: ENVIRONMENT[k] for k in ("PYTHONPATH", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")}
    settings = {
        "kind": "hosts", "nodes": 2, "ranks_per_node": 1, "gpus_per_node": 0, "python": sys.executable,
        "workdir": str(tmp_path), "environment": variables | {"TITLE": "two words"},
        "preflight": {"shared_free_gib": 0.01, "local_free_gib": 0.01, "message_mib": 1, "time_limit_s": 300},
        "hosts": {"names": ["localhost", "me@127.0.0.1"], "port": 23117},
    }  # fmt: skip
    cluster = tmp_path / "hosts.yaml"
    cluster.write_text(strict_yaml.dump(settings))
    command = [sys.executable, "-m", "megatron_qerl.cli.main", "launch", str(config), "run.name=hosts", "train.steps=3"]
    command += ["model.device=cpu", "--cluster", str(cluster), "--submit"]
    environment = ENVIRONMENT | {"PATH": f"{ssh.parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "finished" in done.stdout
    assert steps(config.parent / "runs/hosts") == 3
    logs = tmp_path / "logs/hosts/latest"
    assert {f.name for f in logs.glob("*.log")} == {
        f"{kind}_{i}.log" for kind in ("preflight", "node", "rank") for i in (0, 1)
    }
    assert "preflight: 0 problems" in done.stdout
    assert "-o BatchMode=yes -o ServerAliveInterval=15 me@127.0.0.1 cd " in (tmp_path / "ssh.log").read_text()
