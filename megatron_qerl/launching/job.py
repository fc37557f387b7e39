"""What a launch starts, decided once: the frozen configs, where they lie and where the runs write."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path

from megatron_qerl.config.cluster import ClusterConfig
from megatron_qerl.config.loader import resolved_yaml
from megatron_qerl.config.schema import RunConfig
from megatron_qerl.errors import ConfigError, FaultError, UserError
from megatron_qerl.parallel.layout import check_world

_PLAIN_PATH = re.compile(r"[A-Za-z0-9_@+=,./-]+")


@dataclass(frozen=True)
class Job:
    """A script and the files that it reads.

    Attributes:
        name: of the job.
        cluster: where it runs.
        configs: file name in ``folder`` -> config, one a run; several are an array.
        workdir: absolute; where relative paths of the configs start.
        log_root: absolute; logs of all jobs of this name.
        folder: absolute; script and configs of this launch.
    """

    name: str
    cluster: ClusterConfig
    configs: dict[str, RunConfig]
    workdir: Path
    log_root: Path
    folder: Path

    @property
    def script_file(self) -> Path:
        """What sbatch, or bash, is given."""
        return self.folder / "job.sh"

    def run_dirs(self) -> list[Path]:
        """Absolute run folders, in the order of ``configs``."""
        return [self.workdir / c.run.output_dir / c.run.name for c in self.configs.values()]


def plan_job(name: str, cluster: ClusterConfig, configs: list[RunConfig], *, resume: bool) -> Job:
    """Check that configs and cluster fit, and decide on the paths. Reads the disk, changes nothing.

    Args:
        name: of the job; a single config's run.name.
        configs: the runs.
        resume: whether run folders may hold an earlier attempt.

    Raises:
        ConfigError: the layout does not fit the ranks, a path is not plain, or plain hosts get several runs.
        UserError: a run folder holds a run.
    """
    if cluster.kind == "hosts" and len(configs) > 1:
        raise ConfigError("--vary", len(configs), "an experiment matrix needs a scheduler", "Launch one run at a time")
    for config in configs:
        check_world(config.parallel, cluster.nodes * cluster.ranks_per_node)
    workdir = (cluster.workdir or Path()).absolute()
    log_root = workdir / cluster.log_dir / name
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    folder = log_root / f"launch-{stamp}-{os.getpid()}"
    for key, path in (("workdir", workdir), ("log_dir", log_root)):
        if not _PLAIN_PATH.fullmatch(str(path)):
            rule = "sbatch and container mounts give a meaning to blanks, '%', ':' and the like"
            raise ConfigError(key, path, rule, "Use a path of letters, digits and _ @ + = , . / -")
    digits = len(str(len(configs) - 1))
    files = ["config.yaml"] if len(configs) == 1 else [f"config_{i:0{digits}d}.yaml" for i in range(len(configs))]
    job = Job(name, cluster, dict(zip(files, configs, strict=True)), workdir, log_root, folder)
    if not resume:
        _refuse_used_folders(job)
    return job


def _refuse_used_folders(job: Job) -> None:
    for run_dir in job.run_dirs():
        if run_dir.is_dir() and any(run_dir.iterdir()):
            remedy = "Use --resume to go on with it, another run.name, or remove the folder"
            raise UserError("run folder", run_dir, "holds an earlier run", remedy)


def template(name: str) -> str:
    """Text of a shell file that comes with this package."""
    return resources.files("megatron_qerl.launching").joinpath(name).read_text(encoding="utf-8")


def write_job(job: Job, script: str) -> Path:
    """Write the launch folder: script, frozen configs, the node's part. Returns the script.

    Raises:
        FaultError: it cannot be written.
    """
    files = {"job.sh": script, "node.sh": template("node.sh"), "cluster.yaml": resolved_yaml(job.cluster)}
    files |= {name: resolved_yaml(config) for name, config in job.configs.items()}
    try:
        job.folder.mkdir(parents=True)
        for name, text in files.items():
            (job.folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise FaultError(
            f"launch folder {job.folder}", f"cannot be written ({error})", "Choose another log_dir"
        ) from error
    return job.script_file
