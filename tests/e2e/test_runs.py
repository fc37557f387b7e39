"""Whole runs in this process: every objective, evaluation, export, and what a run folder must hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from megatron_qerl.cli.main import main
from tests.support.tiny_run import write_run


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs"))


def train(config: Path, name: str, *arguments: str) -> Path:
    assert main(["train", str(config), f"run.name={name}", "train.steps=3", *arguments]) == 0
    return config.parent / "runs" / name


def recorded(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("likelihood", ["replay", "clean", "uncorrected"])
def test_every_likelihood_runs_and_checks_the_engine(config: Path, likelihood: str) -> None:
    run = train(config, likelihood, f"algorithm.likelihood={likelihood}", "algorithm.dynamic_sampling.enabled=false")
    steps = recorded(run)
    assert [s["step"] for s in steps] == [1, 2, 3]
    for step in steps:
        values = step["values"]
        assert values["parity/logprob_max_abs"] <= 1e-4
        assert ("correction/effective_sample_fraction" in values) == (likelihood == "clean")
        noisy = values["noise/sigma_nominal"] > 0
        assert noisy == (values.get("noise/modules_touched") == 4)
        assert noisy == (values.get("noise/logprob_change_max", 0.0) > 0)
        assert noisy == ("entropy/clean_mean_nats" in values)
        assert not noisy or values["entropy/noisy_mean_nats"] != values["entropy/clean_mean_nats"]
        readable = values["outcome/correct_fraction"] + values["outcome/wrong_fraction"]
        assert values["outcome/valid_fraction"] == pytest.approx(readable)
        assert (values["groups/score_variance"] > 0) == (values["groups/mixed_fraction"] > 0)
        assert (values["groups/distinct_answers"] > 0) == (values["outcome/valid_fraction"] > 0)
    assert [s["values"]["noise/stage"] for s in steps] == [0, 1, 2]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["likelihood"] == likelihood
    assert (run / "report.html").stat().st_size > 10_000


GSPO = ["ratio_level=sequence", "ratio_clip_low=3e-4", "ratio_clip_high=4e-4", "loss_aggregation=sequence_mean"]
OBJECTIVES = {
    "grpo": ["loss_aggregation=sequence_mean", "kl_coefficient=0.04", "kl_estimator=k3"],
    "dapo": [],
    "dr_grpo": ["advantage=leave_one_out", "loss_aggregation=constant"],
    "gspo": [*GSPO, "likelihood=clean", "importance_correction=sequence_mask"],
    "cispo": ["surrogate=clipped_weight"],
    "custom": ["surrogate=clipped_weight", "advantage=mean", "kl_coefficient=0.01", "entropy_coefficient=0.001"],
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_runs_and_updates(config: Path, name: str) -> None:
    """Two updates a rollout, so that the second is off its policy."""
    settings = [f"algorithm.{s}" for s in (f"name={name}", "dynamic_sampling.enabled=false", *OBJECTIVES[name])]
    run = train(config, f"objective_{name}", *settings, "train.minibatches_per_step=2", "train.steps=6")
    divergence = any("kl_coefficient" in s for s in settings)
    steps = [step["values"] for step in recorded(run)]
    assert steps[-1]["optimizer/updates"] == 2 * len(steps)
    for values in steps:
        assert values["parity/logprob_max_abs"] <= 1e-4
        assert ("kl/base_k3_nats" in values) == divergence
        assert ("correction/effective_response_fraction" in values) == (name == "gspo")
    assert any(values["optimizer/update_norm"] > 0 for values in steps)
    assert any(values["ratio/std"] > 0 for values in steps)
    if divergence:
        assert steps[-1]["kl/base_k3_nats"] > 0


def test_relative_noise_is_proved_in_engine_and_trainer(config: Path) -> None:
    run = train(config, "relative", "noise.budget=relative", "algorithm.dynamic_sampling.enabled=false")
    steps = recorded(run)
    assert [s["info"]["noise"]["budget"] for s in steps] == ["relative"] * 3
    for values in (s["values"] for s in steps):
        assert values["parity/logprob_max_abs"] <= 1e-4
    for step in steps[1:]:
        values = step["values"]
        assert values["noise/near_zero_channels"] == sum(step["info"].get("near_zero_channels", {}).values())
        assert values["noise/modules_touched"] == 4
        assert values["noise/engine_slope"] == pytest.approx(1.0, abs=0.05)
        assert values["noise/sigma_effective"] == pytest.approx(values["noise/sigma_nominal"], rel=0.25)


def test_off_policy_minibatches_grpo_and_noisy_evaluation(config: Path) -> None:
    run = train(
        config,
        "options",
        "algorithm.name=grpo",
        "algorithm.loss_aggregation=sequence_mean",
        "algorithm.dynamic_sampling.enabled=false",
        "train.minibatches_per_step=2",
        "eval.modes=[greedy, sampled]",
        "eval.noisy=true",
        "eval.interval_steps=2",
        "metrics.sinks=[wandb]",
        "metrics.console=true",
    )
    names = {p.name for p in run.glob("eval_*.json")}
    assert {"eval_before_sampled.json", "eval_step_000002_noisy_greedy.json", "eval_after_noisy_sampled.json"} <= names
    assert recorded(run)[-1]["values"]["optimizer/updates"] == 6
    assert list(run.rglob("*.wandb"))


def test_overlong_shaping_lowers_the_reward_and_not_the_score(config: Path) -> None:
    run = train(config, "overlong", "algorithm.overlong={enabled: true, buffer_tokens: 1, penalty: 0.5}")
    for step in recorded(run):
        values = step["values"]
        # The last of three tokens is the whole buffer: whatever is cut pays in full, and so may a stop just there.
        charged = (values["reward/score_mean"] - values["reward/mean"]) / 0.5
        assert values["length/truncated_fraction"] - 1e-9 <= charged <= 1.0
        assert charged > 0.5


def test_eval_and_export_of_a_finished_run(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(config, "finished", "checkpoint.interval_steps=1")
    assert main(["eval", "--run", str(run), "--mode", "greedy", "--noisy"]) == 0
    after = json.loads((run / "eval_after_greedy.json").read_text())
    again = json.loads((run / "eval_cli_step_000003_n12_greedy.json").read_text())
    assert again["problems"] == after["problems"]
    out = config.parent / "adapter"
    assert main(["export", "--run", str(run), "--output", str(out)]) == 0
    exported = load_file(out / "adapter_model.safetensors")
    stored = load_file(run / "checkpoints/step_000003/adapter.safetensors")
    assert {f"base_model.model.{n}.weight" for n in stored} == set(exported)
    assert len(list((run / "checkpoints").iterdir())) == 2
    capsys.readouterr()


def test_a_run_with_no_signal_makes_no_update_and_says_so(config: Path, tmp_path: Path) -> None:
    hopeless = tmp_path / "hopeless.jsonl"
    hopeless.write_text(json.dumps({"question": "1+1", "answer": "123456"}))
    run = train(config, "hopeless", f"data.train.path={hopeless}", "algorithm.dynamic_sampling.max_refills=1")
    values = recorded(run)[-1]["values"]
    assert values["optimizer/updates"] == 0
    assert values["groups/kept"] == 0
    assert values["groups/dropped_all_wrong"] == values["groups/generated"] == 8
    assert values["groups/shortfall"] == 4
    assert json.loads((run / "summary.json").read_text())["updates"] == 0
