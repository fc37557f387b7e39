"""The only place that touches NVIDIA ModelOpt.

ModelOpt calibrates each weight and packs it; what this project adds is set through ModelOpt's own state. The largest
magnitude that a quantiser found is raised to 2688 * 2^k, shared by the members of a fused group, which makes ModelOpt
write a power-of-two tensor scale; block scales are kept at or above 2^-6 before ModelOpt divides by them.

ModelOpt is imported on first use: it takes seconds and pulls in much that training does not need.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_qerl.errors import BackendUnavailableError, CheckpointError
from megatron_qerl.nvfp4.format import (
    BLOCK,
    E2M1_MAX,
    MIN_BLOCK_SCALE,
    TENSOR_SCALE_DIVISOR,
    PackedWeight,
    block_scales_of,
    power_of_two_tensor_scale,
)
from megatron_qerl.nvfp4.sketch import ActivationSketch

VERSION_SERIES = "0.47."
ALGORITHM = "W4A16_NVFP4"
_ROWS_AT_ONCE_ELEMENTS = 1 << 24  # ModelOpt's packing needs some 20 bytes an element of scratch memory
_PIECE_ELEMENTS = 1 << 22  # bounds the scratch memory of the simulated quantisation
_BACKEND = "megatron_qerl_nvfp4"
_FLOAT32_EXPONENT = 0x7F800000


@functools.cache
def _modelopt() -> Any:
    """ModelOpt's names that are used here, imported once."""
    try:
        with _quiet():
            import modelopt
            import modelopt.torch.quantization as mtq
            from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
            from modelopt.torch.quantization.nn import register_quant_backend
            from modelopt.torch.quantization.qtensor import NVFP4QTensor
    except ImportError as error:
        remedy = f"Install nvidia-modelopt=={VERSION_SERIES}0, or quantise the model where it is installed"
        raise BackendUnavailableError("quantize", "modelopt", f"cannot be imported ({error})", remedy) from error
    if not modelopt.__version__.startswith(VERSION_SERIES):
        rule = f"this project drives internals of ModelOpt {VERSION_SERIES}x"
        raise BackendUnavailableError("modelopt", modelopt.__version__, rule, f"Install {VERSION_SERIES}0")
    register_quant_backend(_BACKEND, lambda weight, quantizer: fake_quantize(weight))
    return SimpleNamespace(
        version=modelopt.__version__, mtq=mtq, NVFP4QTensor=NVFP4QTensor, convert=convert_hf_quant_config_format
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """ModelOpt prints a line a call and its optional plugins warn about what they lack; neither is for the user."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def version() -> str:
    """ModelOpt's version.

    Raises:
        BackendUnavailableError: ModelOpt is absent or of another series.
    """
    return str(_modelopt().version)


def quantization_configs(not_quantized: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What ModelOpt's export writes beside the weights.

    Args:
        not_quantized: modules that stay in full precision.
    Returns:
        The content of hf_quant_config.json, and ``quantization_config`` of config.json.
    """
    modelopt = _modelopt()
    hf_quant_config = {
        "producer": {"name": "modelopt", "version": modelopt.version},
        "quantization": {
            "quant_algo": ALGORITHM,
            "kv_cache_quant_algo": None,
            "group_size": BLOCK,
            "exclude_modules": sorted(not_quantized),
        },
    }
    return hf_quant_config, modelopt.convert(hf_quant_config)


def pack_layer(groups: Mapping[str, Mapping[str, Tensor]]) -> dict[str, PackedWeight]:
    """Quantise the linears of one layer with ModelOpt's max calibration.

    Args:
        groups: group name -> member name -> weight [N, K], finite, K a multiple of 16. The members of a group get one
            tensor scale. Member names are unique; with "_" for "." they name the modules to ModelOpt.
    Returns:
        member name -> packed weight, on the CPU.
    """
    modelopt = _modelopt()
    layer = nn.ModuleDict(
        {_module_name(member): _linear(weight) for members in groups.values() for member, weight in members.items()}
    )
    with _quiet(), torch.no_grad():
        modelopt.mtq.quantize(layer, copy.deepcopy(modelopt.mtq.W4A16_NVFP4_CFG), forward_loop=None)
    packed = {}
    for members in groups.values():
        quantizers: list[Any] = [layer.get_submodule(_module_name(m)).weight_quantizer for m in members]
        amax = max(float(quantizer._amax) for quantizer in quantizers)
        for quantizer in quantizers:
            quantizer._amax = torch.full_like(quantizer._amax, _written_amax(amax), dtype=torch.float32)
        for member, quantizer in zip(members, quantizers, strict=True):
            packed[member] = _pack(members[member], quantizer)
    _release(layer)
    return packed


def _release(layer: nn.ModuleDict) -> None:
    """Let go of the weights: ModelOpt's modules refer to themselves, so they live until the cycle collector runs."""
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = torch.empty(0)


def _written_amax(amax: float) -> float:
    """The amax that makes ModelOpt's tensor scale, amax / 2688, a power of two."""
    return TENSOR_SCALE_DIVISOR * power_of_two_tensor_scale(amax)


def _module_name(member: str) -> str:
    return member.replace(".", "_")


def _linear(weight: Tensor) -> nn.Linear:
    """A linear around an existing weight, without a copy."""
    n, k = weight.shape
    linear = nn.Linear(k, n, bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


@torch.no_grad()
def _pack(weight: Tensor, quantizer: Any) -> PackedWeight:
    """Pack one weight with ModelOpt's tensor class, some rows at a time to bound the scratch memory."""
    qtensor = _modelopt().NVFP4QTensor
    tensor_scale = qtensor.get_weights_scaling_factor_2_from_quantizer(quantizer)
    k = weight.shape[1]
    rows = max(1, _ROWS_AT_ONCE_ELEMENTS // k)
    packed, scales = [], []
    for part in torch.split(weight, rows):
        scale, _ = qtensor.get_weights_scaling_factor(part, BLOCK, tensor_scale)
        scale = scale.float().clamp(min=MIN_BLOCK_SCALE).to(torch.float8_e4m3fn)
        quantized, _, _ = qtensor.quantize(part, BLOCK, scale, tensor_scale)
        packed.append(quantized._quantized_data.cpu())
        scales.append(scale.view(torch.uint8).cpu())  # torch has no cat for FP8; the bytes are what moves
    return PackedWeight(
        packed=torch.cat(packed),
        block_scale=torch.cat(scales).view(torch.float8_e4m3fn),
        tensor_scale=tensor_scale.detach().float().reshape(()).cpu(),
    )


@dataclass(frozen=True)
class ScaleSearch:
    """Result of an AWQ search for one linear.

    Attributes:
        scale: float32 [K]; multiplies the weight's columns, and the input is divided by it.
        alpha: the exponent that won.
        loss: mean squared output error on the sketch with ``scale``.
        plain_loss: the same without scaling.
    """

    scale: Tensor
    alpha: float
    loss: float
    plain_loss: float


def search_scale(weight: Tensor, sketch: ActivationSketch) -> ScaleSearch:
    """ModelOpt's ``awq_lite`` search on sketched activations.

    ModelOpt asks for the data twice: once to average magnitudes, once to measure output errors. The first pass gets
    one row, the mean magnitudes themselves; the second gets the sketch. The simulated quantisation is this project's,
    through ModelOpt's own backend registry: ModelOpt's kernel needs CUDA, and it simulates a tensor scale that is not
    a power of two, which is not what will be written.

    Args:
        weight: float32 [N, K]; a fused group is one weight. ModelOpt overwrites it, to spare a copy.
        sketch: what the linear reads.
    """
    modelopt = _modelopt()
    plain_loss = float((sketch.rows @ (weight - fake_quantize(weight)).T).square().mean())
    layer = nn.ModuleDict({"linear": _linear(weight)})
    passes = iter((sketch.mean_magnitude.unsqueeze(0), sketch.rows))
    with _quiet(), torch.no_grad():
        modelopt.mtq.quantize(layer, _awq_config(modelopt), forward_loop=lambda model: model["linear"](next(passes)))
    linear: Any = layer["linear"]
    found = linear.awq_lite
    alpha = float(found.best_alpha)
    result = ScaleSearch(found.best_scale.detach().float(), alpha, float(found.loss[alpha]), plain_loss)
    _release(layer)
    return result


def _awq_config(modelopt: Any) -> dict[str, Any]:
    """ModelOpt's weight-only NVFP4 config with the awq_lite algorithm and our simulated quantisation."""
    config: dict[str, Any] = copy.deepcopy(modelopt.mtq.W4A16_NVFP4_CFG)
    config["algorithm"] = {"method": "awq_lite", "alpha_step": 0.1, "debug": True}  # debug keeps the losses
    entries = [entry for entry in config["quant_cfg"] if entry["quantizer_name"] == "*weight_quantizer"]
    assert len(entries) == 1, config["quant_cfg"]
    entries[0]["cfg"]["backend"] = _BACKEND
    return config


@torch.no_grad()
def fake_quantize(weight: Tensor) -> Tensor:
    """Quantise and decode at once, fast: what ``quantize_blocks`` followed by ``decode`` gives, to the bit.

    The tensor scale is the power of two for the weight's own amax.

    Args:
        weight: float32 [N, K].
    """
    n, k = weight.shape
    blocks = weight.view(n, k // BLOCK, BLOCK)
    rows = max(1, _PIECE_ELEMENTS // k)
    amax = torch.cat([part.abs().amax(dim=-1) for part in torch.split(blocks, rows)])
    tensor_scale = power_of_two_tensor_scale(float(amax.max()))
    scales = (block_scales_of(amax, tensor_scale).float() * tensor_scale).unsqueeze(-1)
    result = torch.empty_like(blocks)
    for part, scale, out in zip(*(torch.split(t, rows) for t in (blocks, scales, result)), strict=True):
        values = part / scale
        # The spacing of E2M1 is half the power of two below the magnitude, counted from 1 up to 4.
        power = values.abs().clamp_(1.0, 4.0).view(torch.int32).bitwise_and_(_FLOAT32_EXPONENT).view(torch.float32)
        values.div_(power).mul_(2.0).round_().mul_(0.5).mul_(power).clamp_(-E2M1_MAX, E2M1_MAX)
        torch.mul(values, scale, out=out)
    return result.view(n, k)


def check_weight(name: str, weight: Tensor) -> None:
    """Refuse what NVFP4 cannot hold.

    Raises:
        CheckpointError: K is not a multiple of 16, or a weight is not finite.
    """
    n, k = weight.shape
    if k % BLOCK:
        raise CheckpointError(name, f"[{n}, {k}]", f"K must be a multiple of {BLOCK}", "This model cannot be quantised")
    if not torch.isfinite(weight.abs().amax()):
        raise CheckpointError(name, "NaN or infinity", "weights must be finite", "Copy the source model again")
