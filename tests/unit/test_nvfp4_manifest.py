"""The manifest notices every change to a quantised folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_qerl.errors import CheckpointError
from megatron_qerl.nvfp4.checkpoint import ModelFolder
from megatron_qerl.nvfp4.format import quantize_blocks
from megatron_qerl.nvfp4.manifest import (
    CalibrationRecord,
    manifest_problems,
    read_manifest,
    tensor_record,
    verify_manifest,
    write_manifest,
)
from tests.unit.nvfp4_tiny_models import write_tokenizer

Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small quantised folder with a manifest, and the plain folder that it claims to come from."""
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    packed = quantize_blocks(weight, 2.0**-9)
    source, output = tmp_path / "source-model", tmp_path / "quantised"
    for path, tensors in (
        (source, {f"{Q}.weight": weight, "model.norm.weight": torch.ones(32)}),
        (
            output,
            {
                f"{Q}.weight": packed.packed,
                f"{Q}.weight_scale": packed.block_scale,
                f"{Q}.weight_scale_2": packed.tensor_scale,
                "model.norm.weight": torch.ones(32),
            },
        ),
    ):
        write_tokenizer(path)
        (path / "config.json").write_text(json.dumps({"vocab_size": 320}))
        save_file(tensors, path / "model.safetensors")
    opened = ModelFolder.open(output)
    write_manifest(
        output,
        source=ModelFolder.open(source),
        tensors={name: tensor_record(opened, name, opened.tensor_hash(name)) for name in opened.names()},
        method="awq",
        calibration=CalibrationRecord("built-in", 2, 16, 1, "ab" * 32),
        folding=None,
    )
    return output


def problems(folder: Path) -> tuple[str, ...]:
    return manifest_problems(ModelFolder.open(folder))


def test_an_untouched_folder_verifies(folder: Path) -> None:
    verify_manifest(ModelFolder.open(folder))
    assert problems(folder) == ()


def test_the_manifest_says_what_and_whence(folder: Path) -> None:
    manifest = read_manifest(ModelFolder.open(folder))
    assert manifest["source"]["name"] == "source-model"
    assert manifest["source"]["tensors_sha256"] == ModelFolder.open(folder.parent / "source-model").base_hash
    assert manifest["calibration"]["tokens_sha256"] == "ab" * 32
    assert manifest["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert manifest["tensors"][f"{Q}.weight"] == {
        "dtype": "U8",
        "shape": [8, 16],
        "sha256": ModelFolder.open(folder).tensor_hash(f"{Q}.weight"),
    }


@pytest.mark.parametrize("suffix", ["weight", "weight_scale", "weight_scale_2"])
def test_one_changed_bit_is_named(folder: Path, suffix: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    flipped = tensors[f"{Q}.{suffix}"].reshape(-1).view(torch.uint8).clone()
    flipped[0] ^= 1
    tensors[f"{Q}.{suffix}"] = flipped.view(tensors[f"{Q}.{suffix}"].dtype).view(tensors[f"{Q}.{suffix}"].shape)
    save_file(tensors, folder / "model.safetensors")
    assert [p.partition(":")[0] for p in problems(folder)] == [f"{Q}.{suffix}"]
    with pytest.raises(CheckpointError, match=f"{Q}.{suffix}: SHA-256") as caught:
        verify_manifest(ModelFolder.open(folder))
    assert caught.value.exit_code == 2


def test_a_lost_and_a_new_tensor_are_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.other.weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors")
    assert problems(folder) == (
        "model.norm.weight: recorded, but missing from the files",
        "model.other.weight: in the files, but not recorded",
    )


def test_another_tokenizer_or_template_is_a_problem(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("other")
    (folder / "tokenizer_config.json").write_text("{}")
    assert len(problems(folder)) == 2


def test_a_foreign_manifest_is_refused(folder: Path) -> None:
    (folder / "manifest.json").write_text(json.dumps({"format": "something else"}))
    with pytest.raises(CheckpointError, match="something else"):
        read_manifest(ModelFolder.open(folder))
