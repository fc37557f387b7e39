"""Killing a real process and resuming gives the run that was never interrupted, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_qerl.config.noise import FeedbackSection
from megatron_qerl.noise.controller import Signals, decide
from megatron_qerl.noise.controller import start as begin
from tests.support.tiny_run import write_run

ROOT = Path(__file__).parents[2]


def command(config: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "megatron_qerl.cli.main", "train", str(config), *arguments]


def start(config: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command(config, *arguments),
        cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors[-3000:]


def steps(run: Path) -> list[dict[str, Any]]:
    """Recorded steps without what time and memory decide."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["values"] = {k: v for k, v in line["values"].items() if not k.startswith(("time/", "memory/"))}
    return lines


def tensors(run: Path) -> dict[str, bytes]:
    folder = run / "checkpoints" / "step_000006"
    return {f.name: f.read_bytes() for f in folder.iterdir() if f.suffix == ".safetensors"}


def run_and_kill(folder: Path, after: int, *arguments: str) -> tuple[Path, Path]:
    """Run folders: one uninterrupted, one killed after step ``after`` and not yet resumed."""
    config = write_run(folder)
    whole = start(config, "run.name=whole", *arguments)
    killed = start(config, "run.name=killed", *arguments)
    record = folder / "runs/killed/metrics.jsonl"
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and killed.poll() is None:
        if record.is_file() and record.read_bytes().count(b"\n") >= after:
            killed.send_signal(signal.SIGKILL)
            break
        time.sleep(0.002)
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL, "the run ended before it could be killed"
    finish(whole)
    return folder / "runs/whole", folder / "runs/killed"


@pytest.fixture(scope="module")
def whole_and_killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Run folders: one uninterrupted, one killed after its third step and not yet resumed."""
    return run_and_kill(tmp_path_factory.mktemp("resume"), 3)


def test_a_killed_run_resumes_bit_equal(whole_and_killed: tuple[Path, Path]) -> None:
    whole, killed = whole_and_killed
    assert 3 <= len(steps(killed)) < 6
    assert not (killed / "summary.json").exists()
    finish(start(killed.parents[1] / "tiny.yaml", "run.name=killed", "--resume"))
    assert steps(killed) == steps(whole)
    assert tensors(killed) == tensors(whole)
    assert any(s["values"].get("optimizer/update_norm", 0) > 0 for s in steps(whole))
    assert (killed / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()
    for name in ("eval_before_greedy.json", "eval_after_greedy.json"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
    summary = json.loads((killed / "summary.json").read_text())
    assert summary["accuracy_before"] is not None
    assert summary["noise_modules_touched"] == summary["noise_modules_expected"] == 4
    assert summary["logprob_parity_max"] <= 1e-4
    assert summary["tokens"] == json.loads((whole / "summary.json").read_text())["tokens"]


def test_a_run_asked_to_stop_saves_says_so_and_resumes_bit_equal(whole_and_killed: tuple[Path, Path]) -> None:
    whole, _ = whole_and_killed
    config, stopped = whole.parents[1] / "tiny.yaml", whole.parent / "stopped"
    words = ("run.name=stopped", "checkpoint.interval_steps=100")
    process = start(config, *words)
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        record = stopped / "metrics.jsonl"
        if record.is_file() and record.read_bytes().count(b"\n") >= 1:
            process.send_signal(signal.SIGUSR1)
            break
        time.sleep(0.002)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 75, errors[-3000:]
    done = len(steps(stopped))
    assert 1 <= done < 6
    assert f"stopped on request after step {done}" in errors
    assert [p.name for p in (stopped / "checkpoints").iterdir()] == [f"step_{done:06d}"]
    finish(start(config, *words, "--resume"))
    assert steps(stopped) == steps(whole)
    assert tensors(stopped) == tensors(whole)


def test_resume_under_another_config_is_refused(whole_and_killed: tuple[Path, Path]) -> None:
    whole, _ = whole_and_killed
    process = start(whole.parents[1] / "tiny.yaml", "run.name=whole", "--resume", "optimizer.learning_rate=0.5")
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 2
    assert "made with another config (optimizer.learning_rate: 0.01 -> 0.5)" in errors


def test_resume_before_the_first_checkpoint_starts_over(whole_and_killed: tuple[Path, Path]) -> None:
    whole, _ = whole_and_killed
    early = whole.parent / "early"
    shutil.copytree(whole, early)
    shutil.rmtree(early / "checkpoints")
    config = whole.parents[1] / "tiny.yaml"
    (early / "config.yaml").write_text((whole / "config.yaml").read_text().replace("whole", "early"))
    finish(start(config, "run.name=early", "--resume"))
    assert steps(early) == steps(whole)
    assert (early / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()


def test_resume_on_other_data_is_refused(whole_and_killed: tuple[Path, Path]) -> None:
    whole, _ = whole_and_killed
    data = whole.parents[1] / "train.jsonl"
    original = data.read_text()
    data.write_text("\n".join(original.splitlines()[:-3]))
    try:
        process = start(whole.parents[1] / "tiny.yaml", "run.name=whole", "--resume")
        _, errors = process.communicate(timeout=240)
    finally:
        data.write_text(original)
    assert process.returncode == 2
    assert "another set of problems" in errors


FEEDBACK = {"enabled": True, "target_mixed_fraction": 1.0, "max_invalid_fraction": 1.0, "max_entropy_nats": 9.0}
FEEDBACK |= {"sigma_max": 0.2}


def test_a_killed_run_under_feedback_resumes_bit_equal_and_its_decisions_are_those_of_the_law(tmp_path: Path) -> None:
    """Killed after its second noisy step, so that the checkpoint holds what the controller has learnt."""
    settings = [f"noise.feedback.{key}={str(value).lower()}" for key, value in FEEDBACK.items()]
    settings += ["noise.schedule=constant", "checkpoint.interval_steps=1"]
    whole, killed = run_and_kill(tmp_path, 4, *settings)
    finish(start(tmp_path / "tiny.yaml", "run.name=killed", "--resume", *settings))
    assert steps(killed) == steps(whole)
    assert tensors(killed) == tensors(whole)
    assert (killed / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()
    assert (killed / "report.html").read_text().count("Feedback&#39;s decisions on sigma") == 1
    recorded = steps(whole)
    assert ["feedback" in step["info"] for step in recorded] == [False] * 2 + [True] * 4  # two steps of stage 0
    state, section = begin(0.05), FeedbackSection.model_validate(FEEDBACK)
    sigmas, reasons = [], []
    for step in recorded[2:]:
        values, info = step["values"], step["info"]["feedback"]
        signals = Signals(
            values["groups/mixed_fraction"],
            values["outcome/unparsable_fraction"] + values["outcome/truncated_fraction"],
            values.get("entropy/sampling_mean_nats", values["entropy/noisy_mean_nats"]),
            values.get("kl/k3_nats"),
        )
        assert info["signals"] == pytest.approx(vars(signals))
        assert values["noise/sigma_nominal"] == step["info"]["noise"]["sigma"] == state.sigma
        state, decision = decide(section, state, Signals(**info["signals"]))
        assert (info["reason"], info["detail"]) == (decision.reason, decision.detail)
        assert values["noise/sigma_next"] == decision.sigma_after
        sigmas.append(state.sigma)
        reasons.append(decision.reason)
    assert len(set(sigmas)) > 1
    summary = json.loads((killed / "summary.json").read_text())
    assert summary["feedback"] == {reason: reasons.count(reason) for reason in reasons}
