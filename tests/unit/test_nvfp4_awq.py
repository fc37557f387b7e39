"""AWQ: the sketch stands in for the activations, folding keeps the function, and the error really falls."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_qerl.config.schema import CalibrationSection, QuantizeConfig
from megatron_qerl.errors import UserError
from megatron_qerl.nvfp4 import activations as activations_module
from megatron_qerl.nvfp4 import awq as awq_module
from megatron_qerl.nvfp4.activations import DecoderActivations
from megatron_qerl.nvfp4.awq import fold_layer, read_folding
from megatron_qerl.nvfp4.calibration import calibration_tokens
from megatron_qerl.nvfp4.checkpoint import ModelFolder
from megatron_qerl.nvfp4.format import power_of_two_tensor_scale, quantize_blocks
from megatron_qerl.nvfp4.layout import GROUPS, layer_prefix
from megatron_qerl.nvfp4.manifest import read_manifest
from megatron_qerl.nvfp4.modelopt_edge import ScaleSearch, fake_quantize, search_scale
from megatron_qerl.nvfp4.quantize import quantize
from megatron_qerl.nvfp4.sketch import ActivationSketch, SketchBuilder, token_signs
from megatron_qerl.session import folded_norms
from tests.unit.nvfp4_tiny_models import FAMILIES, HEADS, LAYERS, write_model

torch.set_num_threads(1)
CPU = torch.device("cpu")
CALIBRATION = CalibrationSection(method="awq", sequences=8, sequence_length=64)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def layer_tensors(folder: ModelFolder, layer: int) -> dict[str, Tensor]:
    prefix = layer_prefix(layer)
    return {name.removeprefix(prefix): folder.read(name) for name in folder.names() if name.startswith(prefix)}


# -- simulated quantisation -------------------------------------------------------------------------------------------


def test_fake_quantisation_equals_the_reference_to_the_bit() -> None:
    weight = torch.randn(96, 256, generator=generator()) * torch.logspace(-7, 2, 96).unsqueeze(1)
    weight[5, 32:48] = 0.0
    weight[6] = torch.linspace(-6, 6, 256)  # meets every tie of the grid
    expected = quantize_blocks(weight, power_of_two_tensor_scale(float(weight.abs().max()))).decode(torch.float32)
    assert torch.equal(fake_quantize(weight), expected)


# -- the sketch -------------------------------------------------------------------------------------------------------


def test_a_sketch_of_few_tokens_is_the_activations_themselves() -> None:
    x = torch.randn(3, 10, 16, generator=generator())
    builder = SketchBuilder(16, token_signs(30, 0, CPU), rows=64)
    for batch in x.split(1):
        builder.add(batch)
    sketch = builder.finish()
    flat = x.reshape(30, 16)
    assert torch.allclose(sketch.rows.T @ sketch.rows, flat.T @ flat, rtol=1e-5, atol=1e-5)
    assert torch.allclose(sketch.mean_magnitude, flat.abs().mean(dim=0))


def test_a_sketch_of_many_tokens_has_the_right_second_moments_on_average() -> None:
    x = torch.randn(200, 8, generator=generator()) + 0.5  # a mean that unsigned sums would pile up
    exact = x.T @ x
    estimates = []
    for seed in range(300):
        builder = SketchBuilder(8, token_signs(200, seed, CPU), rows=16)
        builder.add(x)
        rows = builder.finish().rows
        assert rows.shape == (16, 8)
        estimates.append(rows.T @ rows)
    stacked = torch.stack(estimates)
    deviation = (stacked.mean(dim=0) - exact).abs() / (stacked.std(dim=0) / 300**0.5)
    assert float(deviation.max()) < 4.5  # 36 entries, each within its standard error


def test_the_search_on_a_sketch_judges_like_the_search_on_all_tokens() -> None:
    weight = torch.randn(48, 64, generator=generator(1)) * 0.05
    loud = torch.where(torch.arange(64) % 13 == 0, 15.0, 1.0)
    x = torch.randn(4096, 64, generator=generator(2)) * loud
    builder = SketchBuilder(64, token_signs(4096, 3, CPU))
    builder.add(x)
    sketch = builder.finish()
    all_tokens = ActivationSketch(x, x.abs().mean(dim=0))
    found = {name: search_scale(weight.clone(), read) for name, read in (("sketch", sketch), ("all", all_tokens))}
    ratios = {name: result.loss / result.plain_loss for name, result in found.items()}
    assert ratios["all"] < 0.8
    assert ratios["sketch"] == pytest.approx(ratios["all"], rel=0.1)
    assert abs(found["sketch"].alpha - found["all"].alpha) <= 0.1001


def test_the_reported_losses_are_real_output_errors() -> None:
    weight = torch.randn(32, 64, generator=generator(1)) * 0.05
    x = torch.randn(100, 64, generator=generator(2)) * torch.where(torch.arange(64) % 13 == 0, 15.0, 1.0)
    found = search_scale(weight.clone(), ActivationSketch(x, x.abs().mean(dim=0)))
    scaled = fake_quantize(weight * found.scale) / found.scale
    assert found.loss == pytest.approx(float((x @ (weight - scaled).T).square().mean()), rel=1e-3)
    assert found.plain_loss == pytest.approx(float((x @ (weight - fake_quantize(weight)).T).square().mean()), rel=1e-3)


# -- activations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("in_memory", [True, False])
def test_layer_by_layer_equals_the_whole_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, in_memory: bool
) -> None:
    from transformers import AutoModelForCausalLM

    write_model(tmp_path / "source", family)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float32)
    folder = ModelFolder.open(tmp_path / "source")
    if not in_memory:
        monkeypatch.setattr(activations_module, "_IN_MEMORY_BYTES", 0)
    monkeypatch.setitem(activations_module._BATCH_TOKENS, "cpu", 100)  # three sequences, so two batches
    tokens = torch.randint(0, 256, (3, 40), generator=generator())
    read: dict[str, list[Tensor]] = {}
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda _, inputs, name=name: read.setdefault(name, []).extend(inputs[:1]))
    with torch.no_grad():
        model(tokens)
    run = DecoderActivations(folder, tokens, CPU, tmp_path, seed=0)
    assert (tmp_path / "hidden_states.tmp").exists() != in_memory
    for layer in range(LAYERS):
        sketches = run.run(layer, layer_tensors(folder, layer))
        for group in GROUPS:
            x = read[layer_prefix(layer) + group.members[0]][0].reshape(120, -1)
            rows = sketches[group.name].rows
            assert torch.allclose(rows.T @ rows, x.T @ x, rtol=1e-4, atol=1e-5 * float(x.square().sum(0).max()))
            assert torch.allclose(sketches[group.name].mean_magnitude, x.abs().mean(0), rtol=1e-4, atol=1e-5)
    assert torch.allclose(run._hidden, read["model.norm"][0], rtol=1e-4, atol=1e-4)
    run.close()
    assert not (tmp_path / "hidden_states.tmp").exists()


def test_a_window_shorter_than_the_sequences_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "qwen2", use_sliding_window=True, sliding_window=32, max_window_layers=1)
    with pytest.raises(UserError, match=r"sequence_length = 40.*32 tokens"):
        DecoderActivations(ModelFolder.open(tmp_path), torch.zeros(1, 40, dtype=torch.long), CPU, tmp_path, seed=0)


# -- folding ----------------------------------------------------------------------------------------------------------


def run_layer(model: Any, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The first decoder layer with given tensors, in float64."""
    layer = model.model.layers[0].double()
    layer.load_state_dict({name: tensor.double() for name, tensor in tensors.items()}, strict=True)
    positions = torch.arange(x.shape[1]).unsqueeze(0)
    rope = model.model.rotary_emb(x, position_ids=positions)
    with torch.no_grad():
        out: Tensor = layer(x, attention_mask=None, position_ids=positions, position_embeddings=rope)
    return out


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kv_heads", [2, HEADS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_folding_keeps_the_function(tmp_path: Path, family: str, kv_heads: int, dtype: torch.dtype) -> None:
    biased = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    model = write_model(tmp_path, family, dtype=dtype, num_key_value_heads=kv_heads, **biased)
    tensors = layer_tensors(ModelFolder.open(tmp_path), 0)
    tensors["input_layernorm.weight"][3] = 0.0
    groups = [g for g in GROUPS if g.name != "o" or kv_heads == HEADS]
    sizes = {g.name: tensors[f"{g.members[0]}.weight"].shape[1] for g in groups}
    scales = {name: torch.exp(torch.randn(size, generator=generator(size))) for name, size in sizes.items()}
    folded, factors = fold_layer(tensors, scales)
    assert factors.keys() == scales.keys()
    assert {n: t.dtype for n, t in folded.items() if "proj.weight" not in n} == {
        n: t.dtype for n, t in tensors.items() if "proj.weight" not in n
    }
    for name, change in (("input_layernorm", "qkv"), ("post_attention_layernorm", "gate_up")):
        moved = folded[f"{name}.weight"] != tensors[f"{name}.weight"]
        assert moved.float().mean() > 0.9, f"{change} was not folded"
    x = torch.randn(2, 12, model.config.hidden_size, generator=generator(), dtype=torch.float64)
    original, after = run_layer(model, tensors, x), run_layer(model, folded, x)
    # A handful of float32 roundings, 2^-24 each, lie between the two.
    assert float((after - original).norm() / (original - x).norm()) < 16 * 2.0**-24


def test_the_factors_keep_the_norms_scale_on_average() -> None:
    norm = torch.ones(64)
    tensors = {"input_layernorm.weight": norm, "self_attn.q_proj.weight": torch.ones(4, 64)}
    tensors |= {f"self_attn.{p}_proj.weight": torch.ones(4, 64) for p in "kv"}
    scale = 37.0 * torch.exp(0.2 * torch.randn(64, generator=generator()))
    folded, factors = fold_layer(tensors, {"qkv": scale})
    assert 2**-0.5 <= float(folded["input_layernorm.weight"].log().mean().exp()) <= 2**0.5
    power = (scale / factors["qkv"]).log2()
    assert torch.allclose(power, power.round(), atol=1e-5), "only a power of two may separate them"


# -- the whole quantiser ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[("llama", 2), ("qwen2", HEADS), ("qwen3", 2)])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model, and the folder that holds its source, max and awq checkpoints."""
    family, kv_heads = request.param
    path = tmp_path_factory.mktemp(family)
    model = write_model(path / "source", family, num_key_value_heads=kv_heads)
    for method in ("max", "awq"):
        calibration = CALIBRATION.model_copy(update={"method": method})
        quantize(QuantizeConfig(source=path / "source", output=path / method, calibration=calibration, device="cpu"))
    return model.float(), path


@torch.no_grad()
def logits(model: Any, folder: ModelFolder, tokens: Tensor) -> Tensor:
    state = model.state_dict()
    for name in folder.names():
        if name in state and name.removesuffix(".weight") not in folder.nvfp4_modules:
            state[name].copy_(folder.read(name))
    for module in folder.nvfp4_modules:
        state[f"{module}.weight"].copy_(folder.read_nvfp4(module).decode(torch.float32))
    out: Tensor = model(tokens).logits
    return out


def test_awq_lowers_the_error_on_text_it_has_not_seen(folders: tuple[Any, Path]) -> None:
    model, path = folders
    tokens, _ = calibration_tokens(CALIBRATION.model_copy(update={"seed": 99}), path / "source")
    opened = {name: ModelFolder.open(path / name) for name in ("source", "max", "awq")}
    wanted = logits(model, opened["source"], tokens)
    error = {name: float((logits(model, opened[name], tokens) - wanted).norm() / wanted.norm()) for name in opened}
    assert error["source"] == 0.0
    assert error["awq"] < 0.85 * error["max"], error


def test_awq_and_max_write_the_same_tensors(folders: tuple[Any, Path]) -> None:
    _, path = folders
    plain, scaled = ModelFolder.open(path / "max"), ModelFolder.open(path / "awq")
    assert plain.names() == scaled.names()
    assert all(plain.spec(name) == scaled.spec(name) for name in plain.names())
    assert not [name for name in scaled.names() if "pre_quant" in name]
    assert plain.config == scaled.config


def test_the_manifest_records_calibration_and_folding(folders: tuple[Any, Path]) -> None:
    model, path = folders
    manifest = read_manifest(ModelFolder.open(path / "awq"))
    _, record = calibration_tokens(CALIBRATION, path / "source")
    assert manifest["calibration"]["tokens_sha256"] == record.tokens_sha256
    folding = manifest["folding"]
    assert folding["norms_are_folded"] is True
    assert len(folding["layers"]) == LAYERS
    factors = read_folding(path / "awq")
    has_o = model.config.num_key_value_heads == HEADS
    for name, groups in folding["layers"].items():
        assert set(groups) == {"qkv", "gate_up", "down"} | ({"o"} if has_o else set())
        recorded = groups["qkv"]["norm_divided_by"]
        assert recorded["smallest"] == pytest.approx(float(factors[f"{name}.qkv"].min()))
        assert recorded["largest"] == pytest.approx(float(factors[f"{name}.qkv"].max()))
        assert groups["qkv"]["error_ratio"] < 1.0


def test_the_same_seed_gives_the_same_bytes(folders: tuple[Any, Path], tmp_path: Path) -> None:
    _, path = folders
    quantize(QuantizeConfig(source=path / "source", output=tmp_path / "again", calibration=CALIBRATION, device="cpu"))
    assert ModelFolder.open(tmp_path / "again").tensors_hash() == ModelFolder.open(path / "awq").tensors_hash()
    assert (tmp_path / "again" / "awq_folding.npz").is_file()
    with np.load(tmp_path / "again" / "awq_folding.npz") as arrays:
        assert set(arrays.files) == set(read_folding(path / "awq"))


def test_a_search_that_gains_nothing_leaves_the_weights_alone(
    folders: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hopeless(weight: Tensor, sketch: ActivationSketch) -> ScaleSearch:
        found = search_scale(weight, sketch)
        return dataclasses.replace(found, loss=found.plain_loss)

    monkeypatch.setattr(awq_module, "search_scale", hopeless)
    _, path = folders
    quantize(QuantizeConfig(source=path / "source", output=tmp_path / "out", calibration=CALIBRATION, device="cpu"))
    assert ModelFolder.open(tmp_path / "out").tensors_hash() == ModelFolder.open(path / "max").tensors_hash()
    layers = json.loads((tmp_path / "out" / "manifest.json").read_text())["folding"]["layers"]
    assert layers["model.layers.0"]["qkv"]["norm_divided_by"] is None
    # A run finds no norm to correct its noise for, and does not take the missing factors for lost ones.
    assert folded_norms(ModelFolder.open(tmp_path / "out")) == {}
    assert folded_norms(ModelFolder.open(path / "awq")) != {}
