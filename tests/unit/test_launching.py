"""Scripts rendered from configs, matrices, and what is refused before anything is submitted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_qerl.cli.main import main
from megatron_qerl.config import strict_yaml
from megatron_qerl.config.cluster import ClusterConfig
from megatron_qerl.config.loader import config_from_mapping, load_config
from megatron_qerl.errors import ConfigError
from megatron_qerl.launching.job import template
from megatron_qerl.launching.matrix import cells

ROOT = Path(__file__).parents[2]
CLUSTERS = ROOT / "configs/cluster"
SHELLCHECK = Path(sys.executable).with_name("shellcheck")
DEMO = str(ROOT / "configs/demo.yaml")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no earlier run lies: after make demo there is one in the repository."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)


def rendered(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["launch", *words, "--dry-run"]) == 0
    return capsys.readouterr().out


def options(script: str) -> dict[str, str]:
    found = (line.removeprefix("#SBATCH --").partition("=") for line in script.splitlines() if line.startswith("#SB"))
    return {name: value for name, _, value in found}


def cluster_with(tmp_path: Path, **changes: object) -> str:
    data = strict_yaml.read_mapping(CLUSTERS / "example_slurm.yaml", "cluster") | changes
    file = tmp_path / "cluster.yaml"
    file.write_text(strict_yaml.dump(data))
    return str(file)


@pytest.mark.parametrize("path", sorted(CLUSTERS.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_cluster_config_renders_a_script_that_shellcheck_accepts(
    path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "job.sh"
    script.write_text(rendered(capsys, DEMO, "--cluster", str(path)))
    for file in (script, *(tmp_path / name for name in ("node.sh",))):
        if file.name == "node.sh":
            file.write_text(template("node.sh"))
        subprocess.run(["bash", "-n", str(file)], check=True)
        done = subprocess.run([SHELLCHECK, str(file)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_a_slurm_script_asks_for_what_the_cluster_config_says(capsys: pytest.CaptureFixture[str]) -> None:
    script = rendered(capsys, DEMO, "--cluster", str(CLUSTERS / "example_slurm.yaml"))
    found = options(script)
    assert (found["nodes"], found["ntasks-per-node"], found["gpus-per-node"]) == ("2", "1", "8")
    assert found["cpus-per-task"] == "64"
    assert found["signal"] == "B:USR1@600"
    assert {"requeue", "exclusive"} <= found.keys()
    assert "array" not in found
    assert "export NCCL_DEBUG='WARN'" in script


def test_a_container_is_mounted_and_started_by_srun(capsys: pytest.CaptureFixture[str]) -> None:
    script = rendered(capsys, DEMO, "--cluster", str(CLUSTERS / "example_pyxis.yaml"))
    assert "'--container-image=/shared/images/megatron-qerl.sqsh'" in script
    assert f"'--container-mounts={Path.cwd()}:{Path.cwd()},/shared/models:/shared/models:ro'" in script
    assert options(script)["time"] == "1-00:00:00"


def test_a_matrix_is_an_array_of_all_combinations(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--vary", "run.seed=[1, 2, 3]", "--vary", "noise.enabled=[true, false]"]
    script = rendered(capsys, DEMO, "--cluster", str(CLUSTERS / "example_slurm.yaml"), *words)
    assert options(script)["array"] == "0-5%4"
    assert "configs=('config_0.yaml'" in script
    assert f"'{Path.cwd()}/runs/demo-5'" in script
    assert [c.overrides for c in cells(["run.seed=[1, 2]", "train.steps=[8, 9]"])][1] == ("run.seed=1", "train.steps=9")


@pytest.mark.parametrize(
    ("vary", "says"),
    [
        ("run.sead=[1, 2]", "unknown key"),
        ("run.seed=1", "must be a list of different values"),
        ("run.seed=[1, 1]", "must be a list of different values"),
        ("run.name=[a, b]", "is made from the run's number"),
    ],
)
def test_a_matrix_that_would_waste_runs_is_refused(vary: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        cells([vary])


def test_a_written_job_is_frozen_and_an_older_run_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = cluster_with(tmp_path, workdir=str(tmp_path))
    assert main(["launch", DEMO, "--cluster", cluster, "run.seed=7"]) == 0
    (folder,) = (tmp_path / "logs/demo").glob("launch-*")
    assert load_config(folder / "config.yaml").run.seed == 7
    assert load_config(folder / "cluster.yaml", model=ClusterConfig).workdir == tmp_path
    assert (folder / "node.sh").read_text() == template("node.sh")
    assert f"sbatch {folder}/job.sh" in capsys.readouterr().out
    (tmp_path / "runs/demo").mkdir(parents=True)
    (tmp_path / "runs/demo/config.yaml").touch()
    assert main(["launch", DEMO, "--cluster", cluster]) == 2
    assert "holds an earlier run" in capsys.readouterr().err
    assert main(["launch", DEMO, "--cluster", cluster, "--resume", "--dry-run"]) == 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ranks_per_node": 4}, "a rank computes on one GPU of its own"),
        ({"kind": "hosts"}, "kind hosts needs the section hosts"),
        ({"slurm": {"time_limit": "10 hours"}}, "must be [days-]hours:minutes[:seconds]"),
        ({"slurm": {"time_limit": "00:05:00"}}, "stop_before_s = 300 must be less than time_limit = 300 s"),
        ({"slurm": {"extra": ["--signal=USR2"]}}, "is set by launch"),
        ({"slurm": {"extra": ["-N 4"]}}, "must be one long option"),
        ({"container": {"image": "x.sqsh", "mounts": ["/data"]}}, "must be HOST:CONTAINER"),
        ({"environment": {"A B": "c"}}, "is not the name of an environment variable"),
        ({"nodez": 2}, "unknown key"),
    ],
)  # fmt: skip
def test_a_cluster_config_that_cannot_work_is_refused(changes: dict[str, object], says: str) -> None:
    data = {"kind": "slurm", "ranks_per_node": 8, "gpus_per_node": 8} | changes
    with pytest.raises(ConfigError) as error:
        config_from_mapping(data, ClusterConfig, "test")
    assert says in str(error.value)


def test_a_layout_that_the_ranks_cannot_make_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["parallel.pipeline_model_parallel_size=3", "--cluster", str(CLUSTERS / "example_slurm.yaml")]
    assert main(["launch", DEMO, *words, "--dry-run"]) == 2
    assert "must divide the number of processes, 16" in capsys.readouterr().err


def test_a_path_that_sbatch_would_read_otherwise_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = cluster_with(tmp_path, workdir=str(tmp_path / "100%"))
    assert main(["launch", DEMO, "--cluster", cluster, "--dry-run"]) == 2
    assert "Use a path of letters" in capsys.readouterr().err


def test_submitting_without_slurm_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["launch", DEMO, "--cluster", cluster_with(tmp_path, workdir=str(tmp_path)), "--submit"]) == 2
    assert "Run it on a login node" in capsys.readouterr().err
