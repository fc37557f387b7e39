"""Quantising tiny models with ModelOpt: the same bytes as ModelOpt's own export, and nothing left half done."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_qerl.config.schema import CalibrationSection, QuantizeConfig
from megatron_qerl.errors import BackendUnavailableError, CheckpointError, FaultError, UserError
from megatron_qerl.nvfp4 import modelopt_edge
from megatron_qerl.nvfp4 import quantize as quantize_module
from megatron_qerl.nvfp4.checkpoint import ModelFolder
from megatron_qerl.nvfp4.format import is_power_of_two, power_of_two_tensor_scale, quantize_blocks
from megatron_qerl.nvfp4.layout import LINEARS, fused_groups
from megatron_qerl.nvfp4.manifest import read_manifest, verify_manifest
from megatron_qerl.nvfp4.quantize import quantize
from tests.unit.nvfp4_tiny_models import FAMILIES, LAYERS, write_model

torch.set_num_threads(1)


def run(source: Path, output: Path, **options: Any) -> ModelFolder:
    return ModelFolder.open(quantize(QuantizeConfig(source=source, output=output, device="cpu", **options)))


@pytest.fixture(scope="module", params=FAMILIES)
def family_folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Source folder and its quantised folder, for each family."""
    path = tmp_path_factory.mktemp(request.param)
    write_model(path / "source", request.param)
    run(path / "source", path / "nvfp4")
    return path / "source", path / "nvfp4"


def modelopt_export(source: Path, folder: Path) -> None:
    """ModelOpt's own whole-model path, with each fused group's amax set to a power-of-two scale."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    mtq.quantize(model, mtq.W4A16_NVFP4_CFG, forward_loop=lambda _: None)
    groups: dict[str, list[Any]] = {}
    for name, module in model.named_modules():
        if name.endswith("weight_quantizer") and getattr(module, "_amax", None) is not None:
            key = re.sub(r"[qkv]_proj", "qkv", re.sub(r"(gate|up)_proj", "gate_up", name))
            groups.setdefault(key, []).append(module)
    for quantizers in groups.values():
        amax = max(float(quantizer._amax) for quantizer in quantizers)
        for quantizer in quantizers:
            quantizer._amax.fill_(2688.0 * power_of_two_tensor_scale(amax))
    export_hf_checkpoint(model, export_dir=folder)


def test_every_tensor_and_config_equals_modelopts_export(family_folders: tuple[Path, Path], tmp_path: Path) -> None:
    source, output = family_folders
    modelopt_export(source, tmp_path)
    exported, ours = load_file(tmp_path / "model.safetensors"), load_file(output / "model.safetensors")
    assert ours.keys() == exported.keys()
    for name, tensor in exported.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
        same = torch.equal(ours[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
        assert same, name
    for file in ("config.json", "hf_quant_config.json"):
        assert json.loads((output / file).read_text()) == json.loads((tmp_path / file).read_text()), file


def test_the_bytes_equal_the_independent_reference(family_folders: tuple[Path, Path]) -> None:
    source, output = family_folders
    original, folder = ModelFolder.open(source), ModelFolder.open(output)
    assert len(folder.nvfp4_modules) == LAYERS * len(LINEARS)
    for module in folder.nvfp4_modules:
        stored = folder.read_nvfp4(module)
        expected = quantize_blocks(original.read(f"{module}.weight"), float(stored.tensor_scale))
        assert torch.equal(stored.packed, expected.packed), module
        assert torch.equal(stored.block_scale.view(torch.uint8), expected.block_scale.view(torch.uint8)), module


def test_tensor_scales_are_powers_of_two_shared_in_groups(family_folders: tuple[Path, Path]) -> None:
    folder = ModelFolder.open(family_folders[1])
    for group in fused_groups(LAYERS):
        scales = {float(folder.read_nvfp4(module).tensor_scale) for module in group}
        assert len(scales) == 1, group
        assert is_power_of_two(scales.pop())


def test_what_is_not_a_linear_is_copied_unchanged(family_folders: tuple[Path, Path]) -> None:
    source, output = family_folders
    original, folder = load_file(source / "model.safetensors"), load_file(output / "model.safetensors")
    plain = [name for name in original if not name.removesuffix(".weight").endswith(LINEARS)]
    assert "lm_head.weight" in plain
    assert "model.embed_tokens.weight" in plain
    assert all(torch.equal(folder[name], original[name]) for name in plain)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (output / file).read_bytes() == (source / file).read_bytes()


def test_the_manifest_is_written_and_holds(family_folders: tuple[Path, Path]) -> None:
    source, output = family_folders
    written = ModelFolder.open(output)
    verify_manifest(written)
    manifest = read_manifest(written)
    assert manifest["source"]["tensors_sha256"] == ModelFolder.open(source).base_hash
    assert (manifest["quantization"]["method"], manifest["calibration"]) == ("max", None)
    written.check_tokenizer()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama") / "source"
    write_model(path, "llama")
    return path


def edit(source: Path, target: Path, change: Any) -> Path:
    """A copy of a model folder with its tensors changed."""
    target.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_block_scales_never_fall_below_the_smallest_normal(llama: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj"

    def whisper(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{name}.weight"][3, :16] = 1e-6
        tensors[f"{name}.weight"][4, :16] = 0.0

    folder = run(edit(llama, tmp_path / "source", whisper), tmp_path / "out")
    stored = folder.read_nvfp4(name)
    assert stored.block_scale.float().min() == 2.0**-6
    assert stored.block_scale[3, 0].float() == 2.0**-6
    assert stored.block_scale[4, 0].float() == 1.0
    assert torch.equal(stored.decode(torch.float32)[4, :16], torch.zeros(16))


def test_small_shards_hold_the_same_tensors(llama: Path, tmp_path: Path) -> None:
    one, many = run(llama, tmp_path / "one"), run(llama, tmp_path / "many", max_shard_bytes=20_000)
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 3
    assert one.names() == many.names()
    assert one.tensors_hash() == many.tensors_hash()


def test_progress_counts_the_layers(llama: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    config = QuantizeConfig(source=llama, output=tmp_path / "out")
    quantize(config, progress=lambda stage, done, total: seen.append((stage, done, total)))
    assert [entry for entry in seen if entry[0] == "quantise layers"] == [
        ("quantise layers", i, LAYERS) for i in range(1, LAYERS + 1)
    ]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_a_failure_half_way_leaves_nothing(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    real, calls = modelopt_edge.pack_layer, []

    def fail_in_the_second_layer(groups: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise error
        return real(groups)

    monkeypatch.setattr(quantize_module.modelopt_edge, "pack_layer", fail_in_the_second_layer)
    with pytest.raises(FaultError if isinstance(error, OSError) else KeyboardInterrupt):
        run(llama, tmp_path / "out")
    assert len(calls) == 2
    assert list(tmp_path.iterdir()) == []


def test_an_output_with_content_is_refused_and_an_empty_one_is_filled(llama: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    run(llama, output)
    before = (output / "manifest.json").read_bytes()
    with pytest.raises(UserError, match="exists already"):
        run(llama, output)
    assert (output / "manifest.json").read_bytes() == before


def test_an_output_below_a_file_is_refused(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be created"):
        run(llama, tmp_path / "file" / "out")


def test_a_quantised_source_is_refused(llama: Path, tmp_path: Path) -> None:
    run(llama, tmp_path / "once")
    with pytest.raises(CheckpointError, match="quantised already"):
        run(tmp_path / "once", tmp_path / "twice")


def test_an_unknown_family_is_refused_by_name(llama: Path, tmp_path: Path) -> None:
    source = edit(llama, tmp_path / "source", lambda tensors: None)
    config = json.loads((source / "config.json").read_text()) | {"model_type": "mamba"}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="model_type = mamba"):
        run(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({"model.layers.1.mlp.down_proj.weight": torch.ones(64, 88)}), "K must be a multiple of 16"),
        (lambda t: t["model.layers.1.self_attn.k_proj.weight"].fill_(float("nan")), "k_proj.weight = NaN"),
        (lambda t: t.pop("model.layers.1.self_attn.o_proj.weight"), "o_proj.weight = missing"),
    ],
)
def test_a_weight_that_cannot_be_quantised_is_named(llama: Path, tmp_path: Path, change: Any, message: str) -> None:
    source = edit(llama, tmp_path / "source", change)
    with pytest.raises(CheckpointError, match=message):
        run(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_asking_for_cuda_without_it_is_refused(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendUnavailableError, match="cuda"):
        quantize(QuantizeConfig(source=llama, output=tmp_path / "out", device="cuda"))


def test_absent_modelopt_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "modelopt", None)
    modelopt_edge._modelopt.cache_clear()
    with pytest.raises(BackendUnavailableError, match=r"nvidia-modelopt==0\.47\.0") as caught:
        modelopt_edge.version()
    assert caught.value.exit_code == 2
    monkeypatch.undo()
    modelopt_edge._modelopt.cache_clear()


def test_the_calibration_method_defaults_to_max() -> None:
    assert CalibrationSection().method == "max"
