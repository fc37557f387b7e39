"""Starting a run: in this process, or as processes of its own through ``experiment.launcher``.

Either way it is the ordinary ``train`` and ``eval``; the second way is for several GPUs and for models of which two do
not fit into one process one after the other.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_qerl.config.loader import resolved_yaml
from megatron_qerl.config.schema import RunConfig
from megatron_qerl.errors import FaultError
from megatron_qerl.experiment.config import EntropySection

_MAIN = "megatron_qerl.cli.main"


@dataclass(frozen=True)
class Launch:
    """How runs are started.

    Attributes:
        launcher: the words before ``-m module``; empty for this process.
        folder: where configs and logs of launched processes are kept.
    """

    launcher: tuple[str, ...]
    folder: Path

    def train(self, config: RunConfig) -> None:
        """Begin or continue a run and bring it to its end."""
        if not self.launcher:
            from megatron_qerl.controller import train

            train(config, resume=True)
            return
        path = self._write(f"{config.run.name}.yaml", resolved_yaml(config))
        self._run(config.run.name, _MAIN, "train", str(path), "--resume")

    def evaluate(self, run_dir: Path, step: int, mode: str) -> None:
        """Evaluate the checkpoint after ``step`` steps; the record lands in the run's folder."""
        if not self.launcher:
            from megatron_qerl.config.loader import load_resolved_config
            from megatron_qerl.evaluation import evaluate_run

            problems = load_resolved_config(run_dir).eval.problems
            decoding: Any = mode
            evaluate_run(run_dir, checkpoint=str(step), modes=(decoding,), noisy=False, problems=problems)
            return
        words = ("eval", "--run", str(run_dir), "--checkpoint", str(step), "--mode", mode)
        self._run(f"eval-{run_dir.name}-step{step}", _MAIN, *words)

    def match_temperature(self, target: RunConfig, arm: RunConfig, section: EntropySection, output: Path) -> None:
        """Write the matched temperature and how it was found to ``output``."""
        if not self.launcher:
            from megatron_qerl.experiment.entropy import match_temperature, write_match

            write_match(match_temperature(target, arm, section), output)
            return
        name = f"entropy-{arm.run.name}"
        paths = [self._write(f"{name}-{who}.yaml", resolved_yaml(c)) for who, c in (("target", target), ("arm", arm))]
        task = {"target": str(paths[0]), "arm": str(paths[1]), "output": str(output)}
        task_path = self._write(f"{name}.json", json.dumps(task | {"section": section.model_dump(mode="json")}))
        self._run(name, "megatron_qerl.experiment.entropy", str(task_path))

    def _write(self, name: str, text: str) -> Path:
        path = self.folder / "configs" / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        except OSError as error:
            raise FaultError(f"writing {path}: {error}", "the folder must take it", "Free disk space") from error
        return path

    def _run(self, name: str, *module_and_words: str) -> None:
        """Run to the end; its output goes to a log.

        Raises:
            FaultError: it cannot be started, or fails; the log's last line is quoted.
        """
        log = self.folder / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [*self.launcher, "-m", *module_and_words]
        remedy = f"See {log}; the same command goes on from here"
        try:
            with log.open("ab") as out:
                code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False).returncode
        except OSError as error:
            what = f"starting {command[0]}: {error.strerror}"
            raise FaultError(what, "experiment.launcher must name a program", "Correct it") from error
        if code != 0:
            said = [line for line in log.read_text(errors="replace").splitlines() if "error:" in line]
            raise FaultError(
                f"run {name}", f"ended with exit code {code} ({said[-1] if said else 'no message'})", remedy
            )
