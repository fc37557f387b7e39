"""Launched runs: what is called, and what a failure says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megatron_qerl.config.loader import load_config
from megatron_qerl.config.schema import RunConfig
from megatron_qerl.errors import FaultError
from megatron_qerl.experiment.config import EntropySection
from megatron_qerl.experiment.launch import Launch

RECORDER = """\
import json, sys
with open({seen!r}, "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
print("megatron-qerl: error: the model is missing")
sys.exit({code})
"""
DEMO = Path(__file__).parents[2] / "configs/demo.yaml"


def launch(tmp_path: Path, code: int = 0) -> Launch:
    script = tmp_path / "launcher.py"
    script.write_text(RECORDER.format(seen=str(tmp_path / "seen"), code=code))
    return Launch((sys.executable, str(script), "--nproc-per-node", "8"), tmp_path / "experiment")


def seen(tmp_path: Path) -> list[list[str]]:
    return [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]


def test_a_launched_run_is_the_ordinary_train_and_can_resume(tmp_path: Path) -> None:
    config: RunConfig = load_config(DEMO)
    launch(tmp_path).train(config)
    ((*words, path, last),) = seen(tmp_path)
    assert words == ["--nproc-per-node", "8", "-m", "megatron_qerl.cli.main", "train"]
    assert last == "--resume"
    assert load_config(path) == config


def test_a_launched_evaluation_and_probe_name_what_they_need(tmp_path: Path) -> None:
    config: RunConfig = load_config(DEMO)
    started = launch(tmp_path)
    started.evaluate(tmp_path / "runs/first", 7, "greedy")
    started.match_temperature(config, config, EntropySection(prompts=3), tmp_path / "out.json")
    evaluation, probe = (line[2:] for line in seen(tmp_path))
    assert evaluation[1:3] == ["megatron_qerl.cli.main", "eval"]
    assert evaluation[3:] == ["--run", str(tmp_path / "runs/first"), "--checkpoint", "7", "--mode", "greedy"]
    assert probe[:2] == ["-m", "megatron_qerl.experiment.entropy"]
    task = json.loads(Path(probe[2]).read_text())
    assert load_config(task["target"]) == load_config(task["arm"]) == config
    assert (task["section"]["prompts"], task["output"]) == (3, str(tmp_path / "out.json"))


def test_a_failed_run_stops_the_experiment_with_the_runs_own_words(tmp_path: Path) -> None:
    with pytest.raises(
        FaultError, match=r"run demo: ended with exit code 3 \(.*the model is missing\)\. See .*demo\.log"
    ):
        launch(tmp_path, code=3).train(load_config(DEMO))


def test_a_launcher_that_is_no_program_is_named(tmp_path: Path) -> None:
    with pytest.raises(FaultError, match=r"starting no-such-program"):
        Launch(("no-such-program",), tmp_path).train(load_config(DEMO))
