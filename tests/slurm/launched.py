"""Jobs that ``megatron-qerl launch --submit`` started."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.distributed import ROOT
from tests.support.virtual_slurm import VirtualSlurm

CPU = "model.device=cpu"


class Launched:
    """One of them."""

    def __init__(self, slurm: VirtualSlurm, workdir: Path, cluster: Path, name: str, *words: str) -> None:
        self.slurm, self.name = slurm, name
        self.run_dir = workdir / "runs" / name
        self.log_root = workdir / "logs" / name
        command = [sys.executable, "-m", "megatron_qerl.cli.main", "launch", str(workdir / "tiny.yaml")]
        command += [f"run.name={name}", CPU, "--cluster", str(cluster), "--submit", *words]
        environment = slurm.env | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found = re.search(r"^jobs: (.*)$", done.stdout, re.MULTILINE)
        assert found is not None
        self.ids = found.group(1).split()
        self.output = self.log_root / f"slurm-{self.ids[0]}.out"

    def wait(self, timeout_s: float = 400) -> dict[str, str]:
        return self.slurm.wait(self.ids[0], timeout_s, self.output)

    def steps_recorded(self) -> int:
        record = self.run_dir / "metrics.jsonl"
        return record.read_bytes().count(b"\n") if record.exists() else 0

    def ranks(self) -> dict[int, int]:
        """Rank -> process id of those that run now."""
        found = {}
        for process in Path("/proc").iterdir():
            if not process.name.isdigit():
                continue
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
                variables = dict(v.partition(b"=")[::2] for v in (process / "environ").read_bytes().split(b"\0"))
            except OSError:
                continue
            if b"RANK" in variables and any(f"/{self.name}/".encode() in word for word in words):
                found[int(variables[b"RANK"])] = int(process.name)
        return found

    def signal(self, number: int) -> None:
        """To all ranks: SIGSTOP holds the run where it is until SIGCONT."""
        for pid in self.ranks().values():
            os.kill(pid, number)

    def said(self) -> str:
        return self.output.read_text()
