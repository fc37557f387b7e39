"""One virtual cluster for all tests of this folder, and a run that every one of them can start."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_qerl.config import strict_yaml
from tests.support.distributed import ROOT
from tests.support.tiny_run import write_run
from tests.support.virtual_slurm import VirtualSlurm, missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip where Slurm is not installed; .ci/run sets QERL_NEEDS_SLURM, so that there they fail instead."""
    reason = missing()
    if reason and not os.environ.get("QERL_NEEDS_SLURM"):
        for item in items:
            if item.get_closest_marker("slurm") is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def slurm() -> Iterator[VirtualSlurm]:
    assert not missing(), missing()
    with tempfile.TemporaryDirectory(prefix="qs", dir="/tmp") as folder:
        cluster = VirtualSlurm(Path(folder) / "c")
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


@pytest.fixture(scope="session")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, data and config, and an interpreter that can be told to be another one on a node."""
    folder = tmp_path_factory.mktemp("slurm")
    write_run(folder)
    _program(folder / "python", f'{_HOOK.format(folder=folder)}\nexec {sys.executable} "$@"')
    (folder / "bin").mkdir()
    _program(
        folder / "bin/nvidia-smi",
        f"{_HOOK.format(folder=folder)}\nfor _ in $(seq ${{GPUS:-2}}); do echo 'NVIDIA H200, 580.159, 143771'; done",
    )
    for node in ("qn1", "qn2", "qn3", "qn4"):
        (folder / f"local_{node}").mkdir()
    return folder


# What a test puts into qnN.sh holds on that node alone.
_HOOK = '[ ! -e {folder}/"$(hostname).sh" ] || . {folder}/"$(hostname).sh"'


def _program(file: Path, text: str) -> None:
    file.write_text(f"#!/bin/bash\n{text}\n")
    file.chmod(0o755)


@pytest.fixture(scope="session")
def cluster_file(workdir: Path) -> Path:
    """Two nodes of two ranks."""
    file = workdir / "cluster.yaml"
    variables = {
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1", "PATH": f"{workdir}/bin:{os.environ['PATH']}",
    }  # fmt: skip
    settings = {
        "kind": "slurm", "nodes": 2, "ranks_per_node": 2, "gpus_per_node": 0, "cpus_per_rank": 1,
        "python": str(workdir / "python"), "workdir": str(workdir), "environment": variables,
        "slurm": {"time_limit": "01:00:00", "stop_before_s": 900},
        "preflight": {"enabled": False, "shared_free_gib": 0.01, "local_free_gib": 0.01, "message_mib": 1},
    }  # fmt: skip
    file.write_text(strict_yaml.dump(settings))
    return file
