"""Handing scripts to sbatch."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from megatron_qerl.errors import BackendUnavailableError, FaultError

_TIMEOUT_S = 60.0


def submit(script: Path, *, after: str | None = None, links: int = 1) -> list[str]:
    """Submit a script, or a chain of jobs of it, each starting when the one before has ended.

    Args:
        script: the job.
        after: a dependency of the first job, as sbatch takes it, such as afterok:1234.
        links: number of jobs.

    Returns:
        Job ids.

    Raises:
        BackendUnavailableError: there is no sbatch.
        FaultError: sbatch refused.
    """
    if shutil.which("sbatch") is None:
        remedy = "Run it on a login node, or leave --submit out and copy the script there"
        raise BackendUnavailableError("--submit", "sbatch", "is not on PATH", remedy)
    ids: list[str] = []
    for _ in range(links):
        ids.append(_sbatch(script, after))
        after = f"afterany:{ids[-1]}"
    return ids


def _sbatch(script: Path, after: str | None) -> str:
    command: Sequence[str] = ["sbatch", "--parsable", *([f"--dependency={after}"] if after else []), str(script)]
    # An outer job's variables would act as options here, and its size as this job's.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_")) or k == "SLURM_CONF"}
    try:
        done = subprocess.run(
            command,
            check=False,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise FaultError("sbatch", f"did not answer in {_TIMEOUT_S:g} s", "See whether the controller is up") from None
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise FaultError(f"sbatch {script}", said, "Change the section slurm of the cluster config")
    return done.stdout.strip().partition(";")[0]
