"""The step benchmark runs on a CPU, measures the same model in both arms, and survives an arm that fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import step
from benchmarks.step_model import random_weight

SETTINGS = step.Settings(tokens=32, sequence=16, steps=1, rank=4)


def test_random_weights_have_no_zero_and_the_stated_deviation() -> None:
    from megatron_qerl.layers.kernels import nvfp4_dequantize

    weight = random_weight(64, 256, torch.Generator().manual_seed(0))
    matrix = nvfp4_dequantize(weight, torch.float32)
    assert matrix.abs().min() > 0.0
    assert float(matrix.std()) == pytest.approx(0.018, rel=0.05)
    assert abs(float(matrix.mean())) < 1e-3


def test_both_arms_run_and_are_one_model() -> None:
    arms = {arm: step.run_arm("tiny", arm, SETTINGS) for arm in step.ARMS}
    ours, base = arms["nvfp4"], arms["bf16"]
    for arm in arms.values():
        assert arm["step_ms"] > 0.0
        assert 0.0 < arm["gradient_norm"] < 100.0
        assert arm["update_norm"] > 0.0
        assert arm["attention"]["name"] == "sdpa"
    assert ours["mean_logprob"] == pytest.approx(base["mean_logprob"], abs=1e-3)
    assert ours["gradient_norm"] == pytest.approx(base["gradient_norm"], rel=0.02)
    assert ours["static_bytes"]["weights_packed"] < 0.3 * base["static_bytes"]["weights_packed"]
    line = step.row("7B", SETTINGS, {n: a | {"peak_bytes": 4} for n, a in arms.items()})
    assert line["peak_ratio_bf16"] == 1.0
    assert line["targets_met"]["peak_ratio"] is False
    assert line["tokens_per_s_ratio_bf16"] == pytest.approx(base["step_ms"] / ours["step_ms"])


def test_an_arm_that_fails_is_recorded_and_the_row_is_still_made(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = step.spawn_arm("no such model", "nvfp4", SETTINGS, 60.0)
    assert failed["error"] == "exit status 1"
    assert any("no such model" in line for line in failed["log"])
    assert "no such model" in step.summary("7B", "nvfp4", failed)
    assert step.spawn_arm("tiny", "bf16", SETTINGS, 0.05)["error"] == "timed out after 0.05 s"
    line = step.row("32B", SETTINGS, {"nvfp4": failed, "bf16": {"step_ms": 1.0, "tokens_per_s": 1.0, "peak_bytes": 1}})
    assert line["tokens_per_s_ratio_bf16"] is None
    assert line["targets_met"] == {"speed": None, "peak": None}


def test_the_table_is_written_after_every_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, int]] = []

    def spawn(model: str, arm: str, settings: step.Settings, timeout_s: float) -> dict[str, object]:
        asked.append((model, arm, settings.tokens))
        return {"step_ms": 2.0, "tokens_per_s": 3.0, "peak_bytes": 5}

    monkeypatch.setattr(step, "spawn_arm", spawn)
    output = tmp_path / "step.json"
    step.main(["--models", "7B,32B", "--tokens", "4096", "--output", str(output)])
    rows = json.loads(output.read_text())["rows"]
    assert [r["model"] for r in rows] == ["7B", "32B"]
    assert asked == [(m, a, 4096) for m in ("7B", "32B") for a in ("nvfp4", "bf16")]
    with pytest.raises(SystemExit):
        step.main(["--models", "9B", "--output", str(output)])
