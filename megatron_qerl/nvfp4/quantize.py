"""A Hugging Face folder becomes an NVFP4 folder, one layer at a time.

    read a layer -> (awq: weigh its activations, fold the scales) -> pack with ModelOpt -> write in place -> forget it

so a 32B model needs the memory of one layer, not of the model. The output is laid out before the first layer is read
and written to a temporary folder next to the destination, which is renamed when everything is there: a folder with
the final name is always complete.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from megatron_qerl.config.schema import QuantizeConfig
from megatron_qerl.errors import BackendUnavailableError, CheckpointError, UserError
from megatron_qerl.nvfp4 import modelopt_edge
from megatron_qerl.nvfp4.awq import AwqLayers, write_folding
from megatron_qerl.nvfp4.checkpoint import ModelFolder
from megatron_qerl.nvfp4.format import BLOCK
from megatron_qerl.nvfp4.layout import DecoderShape, is_quantized_linear, layer_prefix
from megatron_qerl.nvfp4.manifest import tensor_record, write_manifest
from megatron_qerl.nvfp4.tensor_files import ShardWriter, TensorSpec, disk_faults
from megatron_qerl.nvfp4.tokenizer_files import CHAT_TEMPLATE_FILES, TOKENIZER_FILES

Progress = Callable[[str, int, int], None]
"""Called with the name of the stage, the pieces done and the pieces in all."""

_COPIED = (*TOKENIZER_FILES, *CHAT_TEMPLATE_FILES, "generation_config.json", "LICENSE", "LICENSE.txt", "NOTICE")


def quantize(config: QuantizeConfig, *, progress: Progress | None = None) -> Path:
    """Quantise the linears of a model to NVFP4 with ModelOpt.

    Args:
        config: what to read, where to write and how to calibrate.
        progress: told after each layer.
    Returns:
        The output folder.
    Raises:
        UserError: the output exists, the source cannot be used, or the calibration data are too few.
        BackendUnavailableError: ModelOpt or the asked device is absent.
        FaultError: the disk is full.
    """
    report = progress or (lambda stage, done, total: None)
    source = ModelFolder.open(config.source)
    shape = DecoderShape.of(source.config, config.source)
    _check_source(source, shape)
    if shape.experts and _is_awq(config):
        rule = f"is not available for {shape.family}: its activations differ from expert to expert"
        raise UserError("calibration.method", "awq", rule, "Use calibration.method: max")
    _check_output(config.output)
    device = _device(config.device)
    report("load ModelOpt", 0, 1)
    modelopt_edge.version()
    with disk_faults(config.output), _finished_or_absent(config.output) as folder:
        awq = AwqLayers.prepare(source, shape, config.calibration, device, folder, report) if _is_awq(config) else None
        with ShardWriter(folder, _plan(source, shape), config.max_shard_bytes) as writer:
            for layer in range(shape.layers):
                for name, tensor in _quantize_layer(source, shape, layer, device, awq).items():
                    writer.write(name, tensor)
                report("quantise layers", layer + 1, shape.layers)
            for name in _outside_layers(source, shape):
                writer.write(name, _read(source, name))
        _write_configs(source, shape, folder)
        if awq is not None:
            write_folding(folder, awq.folds)
            awq.close()
        written = ModelFolder.open(folder)
        write_manifest(
            folder,
            source=source,
            tensors={name: tensor_record(written, name, sha256) for name, sha256 in writer.sha256.items()},
            method=config.calibration.method,
            calibration=awq.record if awq is not None else None,
            folding=awq.folding_record() if awq is not None else None,
        )
    return config.output


def _is_awq(config: QuantizeConfig) -> bool:
    return config.calibration.method == "awq"


def _quantize_layer(
    source: ModelFolder, shape: DecoderShape, layer: int, device: torch.device, awq: AwqLayers | None
) -> dict[str, Tensor]:
    """All output tensors of one layer."""
    prefix = layer_prefix(layer)
    tensors = {
        name.removeprefix(prefix): _read(source, name).to(device) for name in source.names() if name.startswith(prefix)
    }
    for member in shape.linears:
        modelopt_edge.check_weight(f"{prefix}{member}.weight", tensors[f"{member}.weight"])
    if awq is not None:
        tensors = awq.fold(layer, tensors)
    groups = {group.name: {m: tensors.pop(f"{m}.weight") for m in group.members} for group in shape.groups}
    for member, weight in modelopt_edge.pack_layer(groups).items():
        tensors[f"{member}.weight"] = weight.packed
        tensors[f"{member}.weight_scale"] = weight.block_scale
        tensors[f"{member}.weight_scale_2"] = weight.tensor_scale
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _read(source: ModelFolder, name: str) -> Tensor:
    """Read a whole tensor and remember its hash for the manifest."""
    tensor = source.read(name)
    source.tensor_hash(name, tensor)
    return tensor


def _outside_layers(source: ModelFolder, shape: DecoderShape) -> list[str]:
    prefixes = tuple(layer_prefix(layer) for layer in range(shape.layers))
    return [name for name in source.names() if not name.startswith(prefixes)]


def _plan(source: ModelFolder, shape: DecoderShape) -> list[TensorSpec]:
    """Every tensor that will be written, layer by layer, then the rest."""
    plan = []
    for layer in range(shape.layers):
        prefix = layer_prefix(layer)
        for name in source.names():
            if name.startswith(prefix):
                plan += _output_specs(source, name)
    return plan + [source.spec(name) for name in _outside_layers(source, shape)]


def _output_specs(source: ModelFolder, name: str) -> list[TensorSpec]:
    spec = source.spec(name)
    module, _, kind = name.rpartition(".")
    if kind != "weight" or not is_quantized_linear(module):
        return [spec]
    n, k = spec.shape
    return [
        TensorSpec(name, torch.uint8, (n, k // 2)),
        TensorSpec(f"{name}_scale", torch.float8_e4m3fn, (n, k // BLOCK)),
        TensorSpec(f"{name}_scale_2", torch.float32, ()),
    ]


def _check_source(source: ModelFolder, shape: DecoderShape) -> None:
    """The source must be whole, unquantised and in floating point."""
    if source.quantized:
        rule = "is quantised already"
        raise CheckpointError(str(source.path), source.nvfp4_modules[0], rule, "Quantise the original model")
    source.check_tokenizer()
    for layer in range(shape.layers):
        for member in shape.linears:
            spec = source.spec(f"{layer_prefix(layer)}{member}.weight")
            if not spec.dtype.is_floating_point or spec.dtype.itemsize < 2:
                rule = "must be FP32, FP16 or BF16"
                raise CheckpointError(f"{source.path}: {spec.name}", spec.dtype, rule, "Quantise the original model")
            if spec.shape[1] % BLOCK:
                rule = f"K must be a multiple of {BLOCK}"
                raise CheckpointError(f"{source.path}: {spec.name}", spec.shape, rule, "Choose another model")


def _check_output(output: Path) -> None:
    if output.is_dir() and not any(output.iterdir()):
        return
    if output.exists() or output.is_symlink():
        raise UserError("output", output, "exists already", "Choose another folder or remove this one")


def _device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise BackendUnavailableError("device", "cuda", "torch sees no CUDA device", "Use device: cpu")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


@contextlib.contextmanager
def _finished_or_absent(output: Path) -> Iterator[Path]:
    """A temporary folder beside ``output``: renamed to it on success, removed on any failure."""
    partial = output.parent / f".{output.name}.partial-{uuid.uuid4().hex[:8]}"
    try:
        partial.mkdir(parents=True)
    except (PermissionError, FileExistsError, NotADirectoryError) as error:
        rule = f"cannot be created ({error.strerror})"
        raise UserError("output", output, rule, "Choose a folder that you may write to") from error
    try:
        yield partial
        partial.replace(output)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_configs(source: ModelFolder, shape: DecoderShape, folder: Path) -> None:
    """config.json and hf_quant_config.json as ModelOpt's export writes them; the other small files unchanged."""
    hf_quant_config, quantization_config = modelopt_edge.quantization_configs(shape.not_quantized)
    config = {**source.config, "quantization_config": quantization_config}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "hf_quant_config.json").write_text(json.dumps(hf_quant_config, indent=4) + "\n", encoding="utf-8")
    for name in _COPIED:
        if (source.path / name).is_file():
            shutil.copyfile(source.path / name, folder / name)
