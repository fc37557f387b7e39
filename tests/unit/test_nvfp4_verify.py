"""Verification passes what the quantiser wrote and finds every kind of damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_qerl.config.schema import CalibrationSection, QuantizeConfig
from megatron_qerl.nvfp4.checkpoint import ModelFolder
from megatron_qerl.nvfp4.format import PackedWeight
from megatron_qerl.nvfp4.layout import LINEARS
from megatron_qerl.nvfp4.manifest import tensor_record
from megatron_qerl.nvfp4.quantize import quantize
from megatron_qerl.nvfp4.verify import verify
from tests.unit.nvfp4_tiny_models import HEADS, LAYERS, write_model

torch.set_num_threads(1)
UP = "model.layers.1.mlp.up_proj"
Tensors = dict[str, Tensor]


def matmul(x: Tensor, weight: PackedWeight) -> Tensor:
    return x @ weight.decode(torch.float32).T


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A biased model with one value head a query head, so that AWQ folds everything, and its two checkpoints."""
    path = tmp_path_factory.mktemp("verify")
    write_model(path / "source", "qwen2", num_key_value_heads=HEADS)
    write_model(path / "other", "qwen2", num_key_value_heads=HEADS, seed=5)
    for method in ("max", "awq"):
        calibration = CalibrationSection(method=method, sequences=4, sequence_length=64)
        quantize(QuantizeConfig(source=path / "source", output=path / method, calibration=calibration, device="cpu"))
    return path


def damaged(root: Path, target: Path, change: Callable[[Tensors], None], method: str = "awq") -> Path:
    """A copy with changed tensors and a manifest that agrees with them, so that only the content gives it away."""
    target.mkdir()
    for file in (root / method).iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    folder = ModelFolder.open(target)
    manifest = json.loads((target / "manifest.json").read_text())
    manifest["tensors"] = {n: tensor_record(folder, n, folder.tensor_hash(n)) for n in folder.names()}
    (target / "manifest.json").write_text(json.dumps(manifest))
    return target


@pytest.mark.parametrize("method", ["max", "awq"])
def test_what_was_written_verifies(root: Path, method: str) -> None:
    report = verify(root / method, root / "source", matmul)
    assert report.problems == ()
    assert report.ok
    assert len(report.tensors) == LAYERS * len(LINEARS)
    errors = [check.relative_error for check in report.tensors]
    assert errors == sorted(errors, reverse=True), "worst first"
    assert all(0.05 < error < 0.13 for error in errors)
    assert all(0.5 < check.worst_step <= 1.0001 for check in report.tensors)
    assert all(0.0 <= check.matmul_error <= 1.0 for check in report.tensors)


def test_the_report_is_a_table_with_a_verdict(root: Path) -> None:
    text = verify(root / "max", root / "source", matmul).render(limit=3)
    lines = text.splitlines()
    assert lines[0].split()[:2] == ["tensor", "N"]
    assert "... and 11 tensors with smaller errors" in text
    assert lines[-1].endswith("ok")
    assert "-" in verify(root / "max", None).render(limit=1).splitlines()[1].split()


def test_progress_is_reported(root: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    verify(root / "max", None, progress=lambda *step: seen.append(step))
    assert ("compare weights", 14, 14) in seen


@pytest.mark.parametrize("method", ["max", "awq"])
def test_another_source_is_noticed(root: Path, method: str) -> None:
    report = verify(root / method, root / "other", None)
    assert not report.ok
    assert any("block scales from the source" in problem for problem in report.problems)
    assert any(problem.startswith("model.embed_tokens.weight: differs") for problem in report.problems)


def swap_nibbles(tensors: Tensors) -> None:
    packed = tensors[f"{UP}.weight"]
    tensors[f"{UP}.weight"] = (packed << 4) | (packed >> 4)


def flip_one_sign(tensors: Tensors) -> None:
    codes = tensors[f"{UP}.weight"]
    row, column = [int(i[0]) for i in torch.nonzero((codes & 0x07) == 0x07, as_tuple=True)]  # a code of magnitude 6
    codes[row, column] ^= 0x08


def shift_blocks(tensors: Tensors) -> None:
    scales = tensors[f"{UP}.weight_scale"].view(torch.uint8)
    tensors[f"{UP}.weight_scale"] = scales.roll(1, dims=1).contiguous().view(torch.float8_e4m3fn)


def unfold_a_norm(tensors: Tensors) -> None:
    tensors["model.layers.0.input_layernorm.weight"] *= 1.25


def change_a_value_bias(tensors: Tensors) -> None:
    tensors["model.layers.0.self_attn.v_proj.bias"][0] *= 2


def odd_scale(tensors: Tensors) -> None:
    for part in ("gate", "up"):
        tensors[f"model.layers.1.mlp.{part}_proj.weight_scale_2"] *= 1.0001


def part_the_group(tensors: Tensors) -> None:
    tensors[f"{UP}.weight_scale_2"] *= 2
    scales = tensors[f"{UP}.weight_scale"].float() / 2
    tensors[f"{UP}.weight_scale"] = scales.to(torch.float8_e4m3fn)


def tiny_block(tensors: Tensors) -> None:
    tensors[f"{UP}.weight_scale"].view(torch.uint8)[0, 0] = 1  # 2^-9
    tensors[f"{UP}.weight"][0, :8] = 0


def lose_a_tensor(tensors: Tensors) -> None:
    del tensors["model.norm.weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (swap_nibbles, "up_proj: a weight is"),
        (flip_one_sign, "up_proj: a weight is"),
        (shift_blocks, "up_proj: a weight is"),
        (unfold_a_norm, "input_layernorm.weight: differs from the source"),
        (change_a_value_bias, "v_proj.bias: differs from the source"),
        (odd_scale, "is not a power of two"),
        (part_the_group, "its fused group has 2 tensor scales"),
        (tiny_block, "below 2^-6"),
        (lose_a_tensor, "model.norm.weight: in the source, but missing here"),
    ],
)
def test_damage_that_the_hashes_agree_with_is_found(
    root: Path, tmp_path: Path, change: Callable[[Tensors], None], message: str
) -> None:
    report = verify(damaged(root, tmp_path / "copy", change), root / "source", matmul)
    assert not report.ok
    assert any(message in problem for problem in report.problems), report.problems
    assert "PROBLEM" in report.render()


def test_a_changed_byte_breaks_the_hash_even_without_a_source(root: Path, tmp_path: Path) -> None:
    copy = damaged(root, tmp_path / "copy", lambda tensors: None)
    assert verify(copy, None).ok
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "model.safetensors").write_bytes(bytes(data))
    problems = verify(copy, None).problems
    assert len(problems) == 1
    assert "SHA-256" in problems[0]


def high_nibble_first(x: Tensor, weight: PackedWeight) -> Tensor:
    swapped = (weight.packed << 4) | (weight.packed >> 4)
    return matmul(x, PackedWeight(swapped, weight.block_scale, weight.tensor_scale))


def rounded_weight(x: Tensor, weight: PackedWeight) -> Tensor:
    return x @ (weight.decode(torch.float32) * 1.00002).T


def half_precision_sum(x: Tensor, weight: PackedWeight) -> Tensor:
    return (x.bfloat16() @ weight.decode(torch.bfloat16).T).float()


@pytest.mark.parametrize("wrong", [high_nibble_first, rounded_weight, half_precision_sum])
def test_a_packed_path_that_computes_something_else_is_noticed(root: Path, wrong: Callable[..., Tensor]) -> None:
    report = verify(root / "max", None, wrong)
    assert not report.ok
    assert all("packed and reference product differ" in problem for problem in report.problems)


def test_a_packed_path_that_returns_bf16_is_judged_as_bf16(root: Path) -> None:
    assert verify(root / "max", None, lambda x, weight: matmul(x, weight).bfloat16()).ok
