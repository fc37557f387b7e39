"""A whole run on a tiny mixture of experts in NVFP4: quantise, train, resume, export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_qerl.cli.main import main
from megatron_qerl.config.schema import QuantizeConfig
from megatron_qerl.layers.routing import RoutingRecord
from megatron_qerl.nvfp4.quantize import quantize
from megatron_qerl.rollout.routes import RouteTrace
from tests.support.tiny_model import write_model
from tests.support.tiny_run import write_run


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe_run")
    config = write_run(folder)
    source = write_model(folder / "source", "qwen3_moe", dtype=torch.bfloat16)
    quantize(QuantizeConfig(source=source, output=folder / "nvfp4", device="cpu"))
    return config


def train(config: Path, name: str, *arguments: str) -> tuple[int, Path]:
    model = f"model.path={config.parent / 'nvfp4'}"
    return main(["train", str(config), f"run.name={name}", model, *arguments]), config.parent / "runs" / name


@pytest.mark.parametrize("mode", ["per_expert", "shared_outer"])
def test_two_steps_and_an_export(mode: str, config: Path, tmp_path: Path) -> None:
    code, run = train(
        config, mode, "train.steps=3", f"lora.expert_mode={mode}", "noise.router=clean",
        "algorithm.dynamic_sampling.enabled=false",
    )  # fmt: skip
    assert code == 0
    steps = [json.loads(line)["values"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [s["optimizer/updates"] for s in steps] == [1.0, 2.0, 3.0]
    assert all(s["parity/logprob_max_abs"] <= 1e-4 for s in steps)
    assert steps[1]["noise/modules_touched"] == 4
    # The noise moves hidden states, and with them some choices, also where routers see none of it themselves.
    assert all(0.0 < s["routing/flipped_by_noise"] < 0.5 for s in steps[1:])
    # In FP32 the engine and the trainer choose alike.
    assert all(s["routing/flipped_by_engine"] == 0.0 for s in steps[1:])
    assert any(s["optimizer/gradient_norm"] > 0 for s in steps)
    stored = load_file(config.parent / "nvfp4" / "model.safetensors")
    packed = sum(t.numel() * t.element_size() for t in stored.values())
    assert 0 < steps[0]["memory/weights_packed_bytes"] < 2 * packed
    assert main(["export", "--run", str(run), "--output", str(tmp_path / "adapter")]) == 0
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert sum("experts" in name for name in tensors) == 2 * 8 * 3 * 2
    assert any(bool(t.any()) for name, t in tensors.items() if "experts" in name and "lora_B" in name)


def test_the_trainer_replays_the_engines_routes(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that says it chose other experts: the trainer follows it, unless it is told not to."""

    def elsewhere(self: RouteTrace, row: int, tokens: int) -> RoutingRecord:
        """As if every token had gone to the last experts."""
        record = response(self, row, tokens)
        return RoutingRecord({b: torch.arange(5, 8, dtype=torch.int16).expand_as(e) for b, e in record.experts.items()})

    response = RouteTrace.response
    monkeypatch.setattr(RouteTrace, "response", elsewhere)
    common = ["train.steps=3", "noise.router=clean", "rollout.parity_bound=100"]
    code, run = train(config, "replayed", *common)
    assert code == 0
    values = [json.loads(line)["values"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    flipped = [v["routing/flipped_by_engine"] for v in values if "routing/flipped_by_engine" in v]
    assert min(flipped) > 0.3
    assert max(v["parity/logprob_max_abs"] for v in values) > 0.01
    code, run = train(config, "free", *common, "rollout.routing_replay=false")
    assert code == 0
    values = [json.loads(line)["values"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert not any("routing/flipped_by_engine" in v for v in values)
    assert max(v["parity/logprob_max_abs"] for v in values) <= 1e-4


def test_a_router_must_be_decided_on(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = train(config, "undecided", "train.steps=3")
    assert code == 2
    assert "noise.router" in capsys.readouterr().err


def test_a_dense_model_has_no_router(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(config), "run.name=dense", "train.steps=3", "noise.router=clean"]) == 2
    assert "no router" in capsys.readouterr().err
