"""Whole runs on several ranks: the same samples and metrics as on one, resumable on another layout, and no hang."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from megatron_qerl.cli.main import main
from megatron_qerl.errors import DataError, FaultError
from tests.support.distributed import ROOT, launch
from tests.support.tiny_run import write_run

RUN = "tests.multiprocess.training_cases:run_cases"
FAIL = "tests.multiprocess.training_cases:run_with_a_failure"
TP, SP = "parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"
COMMON = ["train.steps=3", "checkpoint.interval_steps=1", "checkpoint.keep=3", "eval.modes=[greedy, sampled]"]
LAYOUTS = {"tp2": [TP], "tp2_sp": [TP, SP], "dp2": [], "dp2_minibatches": ["train.minibatches_per_step=2"]}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def runs(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of all runs: each layout's, one rank's, and two that go on with another's first checkpoint."""
    for name, changes in (("one", []), ("one_minibatches", LAYOUTS["dp2_minibatches"])):
        assert main(["train", str(config), f"run.name={name}", *COMMON, *changes]) == 0
    folder = config.parent / "runs"
    moved = config.parent / "moved"
    for name in ("one", "tp2"):
        arguments = {k: (config, [f"run.name={k}", *COMMON, *v]) for k, v in LAYOUTS.items()} if name == "one" else {}
        if name == "one":
            results = launch(2, RUN, arguments, tmp_path_factory.mktemp("launch"), timeout_s=500)
            assert all(code == 0 for result in results for code in result.values())
        _shorten(folder / name, moved / name)
    again = {
        "tp2": (config, ["run.name=tp2", f"run.output_dir={moved}", "--resume", *COMMON]),  # as two replicas
        "one": (config, ["run.name=one", f"run.output_dir={moved}", "--resume", *COMMON, TP, SP]),
    }
    results = launch(2, RUN, again, tmp_path_factory.mktemp("again"), timeout_s=500)
    assert all(code == 0 for result in results for code in result.values())
    return folder


def _shorten(source: Path, target: Path) -> None:
    """A run as it was after its first step."""
    shutil.copytree(source, target)
    for step in (2, 3):
        shutil.rmtree(target / "checkpoints" / f"step_{step:06d}")


def recorded(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_same_run(one: Path, other: Path) -> None:
    """The same tokens, and metrics that differ by roundings: 1e-4 of a value, or 1e-5 where it is near zero."""
    assert (one / "samples.jsonl").read_bytes() == (other / "samples.jsonl").read_bytes()
    for name in [p.name for p in one.glob("eval_*.json")]:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    ours, theirs = recorded(one), recorded(other)
    assert len(ours) == len(theirs) == 3
    for a, b in zip(ours, theirs, strict=True):
        assert a["values"].keys() == b["values"].keys()
        assert a["info"]["noise"] == b["info"]["noise"]
        for key, value in a["values"].items():
            if not key.startswith(("time/", "memory/")):
                assert b["values"][key] == pytest.approx(value, rel=1e-4, abs=1e-5), (a["step"], key)
    last = "checkpoints/step_000003/adapter.safetensors"
    adapter = load_file(one / last)
    for name, tensor in load_file(other / last).items():
        # Three updates of 1e-2 by Adam, whose sign is open where a gradient is all rounding.
        assert float((tensor - adapter[name]).abs().max()) <= 1e-3, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_makes_the_same_run_as_one_rank(runs: Path, layout: str) -> None:
    one = runs / ("one_minibatches" if layout.endswith("minibatches") else "one")
    assert_same_run(one, runs / layout)
    assert sum(s["values"].get("optimizer/update_norm", 0.0) > 0 for s in recorded(runs / layout)) >= 2
    summary = json.loads((runs / layout / "summary.json").read_text())
    assert summary["noise_modules_touched"] == summary["noise_modules_expected"] == 4
    assert summary["steps"] == 3
    assert (runs / layout / "report.html").is_file()


@pytest.mark.parametrize("name", ["one", "tp2"])
def test_another_layout_goes_on_with_a_run(runs: Path, name: str) -> None:
    assert_same_run(runs / name, runs.parent / "moved" / name)


def test_the_command_of_the_readme_runs_under_torchrun(config: Path, runs: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "megatron_qerl.cli.main", "train", str(config), "run.name=torchrun", TP, *COMMON]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes)
    try:
        output, errors = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors[-3000:]
    assert output.count("run folder:") == 1
    assert_same_run(runs / "one", runs / "torchrun")


FAILURES = {
    # place, layout, error, what the failing rank says
    "in_generation_of_a_replica": ("generate", [], (FaultError, ("engine", "broke", "mend it")), "engine: broke"),
    "between_collectives_of_layers": ("generate", [TP], (FaultError, ("engine", "broke", "mend it")), "engine: broke"),
    "while_opening": ("tokenizer", [TP], (DataError, ("tokenizer", "x", "is odd", "use another")), "tokenizer = x"),
    "without_a_word": ("vanish", [], None, ""),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_failure_of_one_rank_ends_all(config: Path, tmp_path: Path, case: str) -> None:
    place, layout, error, says = FAILURES[case]
    arguments = {
        "rank": 1, "place": place, "error": error, "path": config, "folder": tmp_path,
        "overrides": [*COMMON, *layout, f"run.name={case}"],
    }  # fmt: skip
    waiting, failing = launch(2, FAIL, arguments, tmp_path, timeout_s=200)
    assert says in failing["said"]
    assert "rank 0 of 2" in waiting["said"]
    expected = f"stopped because rank 1 failed ({says}" if says else "lost contact with another rank"
    assert expected in waiting["said"]
    # Nobody waited for a timeout, which is half an hour.
    assert waiting["seconds"] < 150
