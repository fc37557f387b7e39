"""Reading model folders: three layouts, slices, and everything that can be wrong with the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_qerl.errors import CheckpointError
from megatron_qerl.nvfp4.checkpoint import ModelFolder
from megatron_qerl.nvfp4.format import PackedWeight, quantize_blocks
from tests.unit.nvfp4_tiny_models import write_tokenizer

Q = "model.layers.0.self_attn.q_proj"
N, K = 24, 96


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed_weight(seed: int = 0, tensor_scale: float = 2.0**-9) -> PackedWeight:
    return quantize_blocks(random(N, K, seed=seed), tensor_scale)


def write_folder(path: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 320} | config))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def plain_folder(path: Path) -> Path:
    tensors = {f"{Q}.weight": random(N, K).bfloat16(), "model.norm.weight": random(K), "lm_head.weight": random(8, K)}
    return write_folder(path, tensors)


def modelopt_tensors(weight: PackedWeight) -> dict[str, Tensor]:
    scales = {f"{Q}.weight_scale": weight.block_scale, f"{Q}.weight_scale_2": weight.tensor_scale}
    return {f"{Q}.weight": weight.packed, **scales, "model.norm.weight": random(K)}


def modelopt_folder(path: Path, weight: PackedWeight | None = None) -> Path:
    declared = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}
    return write_folder(path, modelopt_tensors(weight or packed_weight()), quantization_config=declared)


def compressed_folder(path: Path, weight: PackedWeight) -> Path:
    tensors = {
        f"{Q}.weight_packed": weight.packed,
        f"{Q}.weight_scale": weight.block_scale,
        f"{Q}.weight_global_scale": (1.0 / weight.tensor_scale).reshape(1),
    }
    declared = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    return write_folder(path, tensors, quantization_config=declared)


def shard(path: Path) -> None:
    """Split the single file of a folder into two with an index."""
    tensors = load_file(path / "model.safetensors")
    names = sorted(tensors)
    files = {name: f"model-{1 + (i % 2):05d}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: tensors[n] for n in names if files[n] == file}, path / file)
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def assert_same(a: PackedWeight, b: PackedWeight) -> None:
    assert torch.equal(a.packed, b.packed)
    assert torch.equal(a.block_scale.view(torch.uint8), b.block_scale.view(torch.uint8))
    assert torch.equal(a.tensor_scale, b.tensor_scale)


# -- the three layouts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [False, True])
def test_plain_folder_gives_its_tensors_back(tmp_path: Path, sharded: bool) -> None:
    expected = load_file(plain_folder(tmp_path) / "model.safetensors")
    if sharded:
        shard(tmp_path)
    folder = ModelFolder.open(tmp_path)
    assert folder.names() == tuple(sorted(expected))
    assert not folder.quantized
    for name, tensor in expected.items():
        assert (folder.shape(name), folder.dtype(name)) == (tuple(tensor.shape), tensor.dtype)
        assert torch.equal(folder.read(name), tensor)


def test_slices_are_parts_of_the_whole(tmp_path: Path) -> None:
    folder = ModelFolder.open(plain_folder(tmp_path))
    whole = folder.read(f"{Q}.weight")
    assert torch.equal(folder.read(f"{Q}.weight", rows=slice(8, 16)), whole[8:16])
    assert torch.equal(folder.read(f"{Q}.weight", cols=slice(32, 64)), whole[:, 32:64])
    assert torch.equal(folder.read(f"{Q}.weight", rows=slice(0, 5), cols=slice(16, 48)), whole[:5, 16:48])
    assert torch.equal(folder.read("model.norm.weight", rows=slice(3, 9)), folder.read("model.norm.weight")[3:9])


def test_a_slice_beyond_the_tensor_is_refused_instead_of_cut(tmp_path: Path) -> None:
    folder = ModelFolder.open(plain_folder(tmp_path))
    with pytest.raises(CheckpointError, match="q_proj"):
        folder.read(f"{Q}.weight", rows=slice(16, 32))


@pytest.mark.parametrize("sharded", [False, True])
def test_modelopt_folder_gives_packed_weights(tmp_path: Path, sharded: bool) -> None:
    modelopt_folder(tmp_path, packed_weight())
    if sharded:
        shard(tmp_path)
    folder = ModelFolder.open(tmp_path)
    assert folder.quantized
    assert folder.is_nvfp4(Q)
    assert not folder.is_nvfp4("model.norm")
    assert folder.nvfp4_shape(Q) == (N, K)
    assert_same(folder.read_nvfp4(Q), packed_weight())


def test_compressed_tensors_folder_is_the_same_weight(tmp_path: Path) -> None:
    folder = ModelFolder.open(compressed_folder(tmp_path, packed_weight()))
    assert folder.nvfp4_modules == (Q,)
    assert_same(folder.read_nvfp4(Q), packed_weight())


def test_a_shard_of_a_packed_weight_is_that_part_of_the_matrix(tmp_path: Path) -> None:
    folder = ModelFolder.open(modelopt_folder(tmp_path, packed_weight()))
    matrix = packed_weight().decode(torch.float64)
    part = folder.read_nvfp4(Q, rows=slice(8, 16), cols=slice(48, 96))
    assert part.shape == (8, 48)
    assert torch.equal(part.decode(torch.float64), matrix[8:16, 48:96])


def test_a_shard_that_cuts_a_block_is_refused_with_the_name_and_the_sizes(tmp_path: Path) -> None:
    folder = ModelFolder.open(modelopt_folder(tmp_path))
    with pytest.raises(CheckpointError, match=r"q_proj.weight = K\[24:48\].*K = 96.*multiples of 16") as caught:
        folder.read_nvfp4(Q, cols=slice(24, 48))
    assert caught.value.exit_code == 2


# -- what can be wrong ------------------------------------------------------------------------------------------------


def test_missing_folder_and_missing_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        ModelFolder.open(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config\.json = missing"):
        ModelFolder.open(tmp_path)


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    (plain_folder(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        ModelFolder.open(tmp_path)


def test_a_shard_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    shard(plain_folder(tmp_path))
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors = missing"):
        ModelFolder.open(tmp_path)


def test_a_tensor_that_the_index_promises_must_be_in_its_file(tmp_path: Path) -> None:
    shard(plain_folder(tmp_path))
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.ghost.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"model\.ghost\.weight"):
        ModelFolder.open(tmp_path)


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.03, 0.5, 0.999])
def test_a_half_written_file_is_found_before_use(tmp_path: Path, kept: float) -> None:
    file = plain_folder(tmp_path) / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(CheckpointError, match="half-written") as caught:
        ModelFolder.open(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = ModelFolder.open(plain_folder(tmp_path))
    with pytest.raises(CheckpointError, match=r"model\.layers\.7\.mlp\.up_proj\.weight = missing"):
        folder.read("model.layers.7.mlp.up_proj.weight")


def test_a_packed_weight_without_its_scales_is_refused(tmp_path: Path) -> None:
    tensors = modelopt_tensors(packed_weight())
    del tensors[f"{Q}.weight_scale_2"]
    with pytest.raises(CheckpointError, match="weight_scale_2"):
        ModelFolder.open(write_folder(tmp_path, tensors))


def test_block_scales_of_another_shape_are_refused(tmp_path: Path) -> None:
    tensors = modelopt_tensors(packed_weight())
    tensors[f"{Q}.weight_scale"] = tensors[f"{Q}.weight_scale"][:, :3].contiguous()
    with pytest.raises(CheckpointError, match=r"weight_scale .*\(24, 6\)"):
        ModelFolder.open(write_folder(tmp_path, tensors)).read_nvfp4(Q)


@pytest.mark.parametrize("scale", [0.0, float("nan"), float("inf"), -1.0])
def test_a_tensor_scale_must_be_positive_and_finite(tmp_path: Path, scale: float) -> None:
    tensors = modelopt_tensors(packed_weight()) | {f"{Q}.weight_scale_2": torch.tensor(scale)}
    with pytest.raises(CheckpointError, match="weight_scale_2"):
        ModelFolder.open(write_folder(tmp_path, tensors)).read_nvfp4(Q)


def test_k_that_is_not_whole_blocks_is_refused(tmp_path: Path) -> None:
    tensors = modelopt_tensors(packed_weight()) | {f"{Q}.weight": torch.zeros(N, 44, dtype=torch.uint8)}
    with pytest.raises(CheckpointError, match="K = 88"):
        ModelFolder.open(write_folder(tmp_path, tensors)).read_nvfp4(Q)


@pytest.mark.parametrize(
    "declared",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    ],
)
def test_another_quantisation_is_refused_rather_than_misread(tmp_path: Path, declared: dict[str, Any]) -> None:
    write_folder(tmp_path, modelopt_tensors(packed_weight()), quantization_config=declared)
    with pytest.raises(CheckpointError, match="quantization_config"):
        ModelFolder.open(tmp_path)


def test_hf_quant_config_alone_declares_the_quantisation(tmp_path: Path) -> None:
    write_folder(tmp_path, modelopt_tensors(packed_weight()))
    file = tmp_path / "hf_quant_config.json"
    file.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    assert ModelFolder.open(tmp_path).quantized
    file.write_text(json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(CheckpointError, match="W4A8_AWQ"):
        ModelFolder.open(tmp_path)


def test_a_left_over_activation_scale_is_refused(tmp_path: Path) -> None:
    tensors = modelopt_tensors(packed_weight()) | {f"{Q}.pre_quant_scale": torch.ones(K)}
    with pytest.raises(CheckpointError, match="pre_quant_scale"):
        ModelFolder.open(write_folder(tmp_path, tensors))


def test_declared_but_unpacked_weights_are_refused(tmp_path: Path) -> None:
    declared = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}
    write_folder(tmp_path, {f"{Q}.weight": random(N, K)}, quantization_config=declared)
    with pytest.raises(CheckpointError, match="no tensor is packed"):
        ModelFolder.open(tmp_path)


# -- identity ---------------------------------------------------------------------------------------------------------


def test_base_hash_follows_the_weights_and_not_the_files(tmp_path: Path) -> None:
    first = ModelFolder.open(plain_folder(tmp_path / "a")).base_hash
    shard(plain_folder(tmp_path / "b"))
    assert ModelFolder.open(tmp_path / "b").base_hash == first
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    tensors["model.norm.weight"][0] += 1.0
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    assert ModelFolder.open(tmp_path / "a").base_hash != first


def test_base_hash_with_a_manifest_is_that_of_the_recorded_tensors(tmp_path: Path) -> None:
    folder = modelopt_folder(tmp_path)
    bare = ModelFolder.open(folder)
    record = {"tensors": {n: {"sha256": bare.tensor_hash(n)} for n in bare.names()}, "created": "one day"}
    (folder / "manifest.json").write_text(json.dumps(record))
    assert ModelFolder.open(folder).base_hash == bare.base_hash
    (folder / "manifest.json").write_text(json.dumps(record | {"created": "another day"}))
    assert ModelFolder.open(folder).base_hash == bare.base_hash
    record["tensors"][bare.names()[0]]["sha256"] = "0" * 64
    (folder / "manifest.json").write_text(json.dumps(record))
    assert ModelFolder.open(folder).base_hash != bare.base_hash


def test_tokenizer_of_a_larger_vocabulary_is_refused(tmp_path: Path) -> None:
    write_tokenizer(plain_folder(tmp_path))
    ModelFolder.open(tmp_path).check_tokenizer()
    write_folder(tmp_path, {"model.norm.weight": random(K)}, vocab_size=256)
    with pytest.raises(CheckpointError, match="257 token ids"):
        ModelFolder.open(tmp_path).check_tokenizer()


def test_tokenizer_that_differs_from_the_manifest_is_refused(tmp_path: Path) -> None:
    folder = modelopt_folder(tmp_path)
    write_tokenizer(folder)
    recorded = {"tokenizer_sha256": ModelFolder.open(folder).tokenizer_hash}
    (folder / "manifest.json").write_text(json.dumps(recorded))
    ModelFolder.open(folder).check_tokenizer()
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    with pytest.raises(CheckpointError, match="tokenizer"):
        ModelFolder.open(folder).check_tokenizer()


def test_chat_template_hash_is_none_without_one_and_follows_the_text(tmp_path: Path) -> None:
    plain_folder(tmp_path)

    def found() -> str | None:
        return ModelFolder.open(tmp_path).chat_template_hash

    assert found() is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "one"}))
    embedded = found()
    (tmp_path / "chat_template.jinja").write_text("one")
    assert found() == embedded
    (tmp_path / "chat_template.jinja").write_text("two")
    assert found() != embedded
