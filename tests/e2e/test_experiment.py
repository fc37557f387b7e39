"""A tiny experiment as one command: a dense and a quantised arm at matched entropy, interrupted, resumed, refused."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_qerl.cli.main import EXIT_INTERRUPTED, main
from megatron_qerl.config.schema import QuantizeConfig
from megatron_qerl.controller import TrainingRun
from megatron_qerl.nvfp4.quantize import quantize
from tests.support.tiny_run import write_run

TEMPLATE = """
experiment: {{name: two_arms, output_dir: {folder}/experiments, recipe: tiny.yaml}}
arms:
  - {{name: packed, title: NVFP4 + noise, overrides: {{model.path: {folder}/packed}}}}
  - name: dense
    title: Dense at matched entropy
    overrides: {{noise.enabled: false, rollout.max_batch_size: 64}}
    match_entropy_of: packed
seeds: [1]
budget: {{steps: 4, evaluate_every_steps: 2}}
tuning: {{learning_rates: [1.0e-2], steps: 3}}
evaluation: {{quality: 0.2, bootstrap_resamples: 200, comparisons: [[packed, dense]]}}
entropy: {{prompts: 8, draws: 1}}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experiment")
    write_run(folder)
    quantize(QuantizeConfig(source=folder / "model", output=folder / "packed", device="cpu"))
    path = folder / "two_arms.yaml"
    path.write_text(TEMPLATE.format(folder=folder))
    return path


def steps(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_model_that_is_missing_or_reads_other_prompts_is_refused_before_anything_runs(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = config.parent / "other"
    shutil.copytree(config.parent / "model", other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["0"], tokenizer["model"]["vocab"]["1"] = 4, 3
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    for folder, words in (("nowhere", "nowhere"), ("other", "its tokenizer or chat template is not that of")):
        path = config.with_name(f"{folder}.yaml")
        path.write_text(config.read_text().replace("/packed", f"/{folder}").replace("two_arms", folder))
        assert main(["experiment", str(path)]) == 2
        assert words in capsys.readouterr().err
        assert not (config.parent / "experiments" / folder).exists()


def test_an_experiment_is_interrupted_resumed_and_refused_when_changed(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = config.parent / "experiments/two_arms"
    packed, dense = (folder / f"runs/final-{arm}-lr0.01-seed1" for arm in ("packed", "dense"))
    finish = TrainingRun.finish_step

    def stop_in_the_second_run(run: TrainingRun, *args: Any) -> None:
        finish(run, *args)
        if run.run_dir.name == dense.name and run.position.step == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, "finish_step", stop_in_the_second_run)
        assert main(["experiment", str(config)]) == EXIT_INTERRUPTED
    assert not (folder / "results.json").exists()
    finished = (packed / "summary.json").stat().st_mtime_ns
    first_steps = steps(dense)[:2]
    assert not (dense / "summary.json").exists()
    capsys.readouterr()

    # The rest in processes of their own, as on a cluster; the probe is made again, to compare it.
    probe = folder / "entropy/dense.json"
    here = json.loads(probe.read_text())
    probe.unlink()
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    launcher = f"experiment.launcher=[{sys.executable}]"
    assert main(["experiment", str(config), launcher]) == 0
    assert json.loads(probe.read_text()) == here
    assert (folder / f"logs/{dense.name}.log").is_file()
    said = capsys.readouterr().out
    assert f"{packed.name}: finished before" in said
    assert f"{dense.name}: resumed" in said
    assert (packed / "summary.json").stat().st_mtime_ns == finished
    assert steps(dense)[:2] == first_steps

    results = json.loads((folder / "results.json").read_text())
    match = results["matched_temperatures"]["dense"]
    assert match["reached_nats"] == pytest.approx(match["target_nats"], rel=1e-4)
    assert results["arms"]["dense"]["temperature"] == match["temperature"] != 1.0
    assert [stage["sigma"] for stage in match["stages"]] == [0.0, 0.05, 0.01]
    assert len({arm["base_hash"] for arm in results["arms"].values()}) == 2
    budget = results["budget"]["completion_tokens"]
    totals = {run: sum(int(s["values"]["tokens/completion"]) for s in steps(run)) for run in (packed, dense)}
    assert budget == min(totals.values())
    summary = json.loads((folder / "summary.json").read_text())
    for arm, run in (("packed", packed), ("dense", dense)):
        values = summary[arm]["1"]
        spent = [int(s["values"]["tokens/completion"]) for s in steps(run)]
        read = results["arms"][arm]["seeds"]["1"]["step"]
        assert values["tokens"] == sum(spent[:read]) <= budget < sum(spent) + spent[-1]
        assert read == 4 or sum(spent[: read + 1]) > budget
        assert values["accuracy_after"]["count"] == 12
        assert 0.0 < values["mixed_group_fraction"] <= 1.0
        assert values["wall_s"] > 0.0
    for name in ("report.html", "report.md"):
        assert "NVFP4 + noise - Dense at matched entropy" in (folder / name).read_text()

    assert main(["experiment", str(config), "budget.steps=5"]) == 2
    assert "holds an experiment with another config (budget.steps: 4 -> 5)" in capsys.readouterr().err
    assert main(["experiment", str(config), "--dry-run", "experiment.name=other"]) == 0
    printed = capsys.readouterr().out
    assert "# final runs: 2 arms x 1 seeds x 4 steps" in printed
    assert not (config.parent / "experiments/other").exists()
