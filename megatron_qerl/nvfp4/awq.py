"""AWQ: scale a weight's salient input channels up before quantising, and what feeds them down by the same factor.

For a factor s per channel, ``W x = (W diag(s)) (x / s)`` exactly, but a channel with s > 1 is quantised more finely.
The division is folded into what produces x, so that no extra tensor is left for engines to apply:

    q, k, v    into the input layernorm's scale
    gate, up   into the post-attention layernorm's scale
    down       into the rows of up
    o          into the rows of v, when every query head has its own value head; otherwise o is left unscaled

The factors come from ModelOpt's awq_lite search on the original weights. A group keeps factor 1 where the search finds
nothing better than plain quantisation. Folding must not change the function: a folded norm scale is stored in the
checkpoint's own dtype, so it rounds, and the weight is scaled by the ratio that the *stored* norm scale implies.

Noise added to a folded scale g / s would act s times as strongly as on the original g. The factors are therefore stored
beside the weights, the manifest records their range, and the trainer divides its noise by them (``noise/registry.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_qerl.config.schema import CalibrationSection
from megatron_qerl.nvfp4.activations import DecoderActivations
from megatron_qerl.nvfp4.calibration import calibration_tokens
from megatron_qerl.nvfp4.checkpoint import ModelFolder
from megatron_qerl.nvfp4.layout import GROUPS, DecoderShape, LinearGroup, layer_prefix
from megatron_qerl.nvfp4.manifest import CalibrationRecord
from megatron_qerl.nvfp4.modelopt_edge import ScaleSearch, search_scale

FOLDING_FILE = "awq_folding.npz"

# A linear that reads another linear's output: the rows it divides. up * silu(gate) and attention's mixture of values
# are linear in up and v.
ROWS_BEFORE = {"o": "self_attn.v_proj", "down": "mlp.up_proj"}


@dataclass(frozen=True)
class LayerFold:
    """What was folded in one layer.

    Attributes:
        factors: group name -> float32 [K]. Weight columns were multiplied by it, and what feeds them was divided.
        searches: group name -> the search's result, also for groups left unscaled.
    """

    factors: dict[str, Tensor]
    searches: dict[str, ScaleSearch]


class AwqLayers:
    """Finds and folds AWQ factors, layer after layer."""

    def __init__(self, shape: DecoderShape, activations: DecoderActivations, record: CalibrationRecord) -> None:
        self._activations = activations
        self._groups = [g for g in GROUPS if g.name != "o" or shape.heads == shape.kv_heads]
        self.record = record
        self.folds: list[LayerFold] = []

    @classmethod
    def prepare(
        cls,
        source: ModelFolder,
        shape: DecoderShape,
        calibration: CalibrationSection,
        device: torch.device,
        scratch: Path,
        progress: Callable[[str, int, int], None],
    ) -> AwqLayers:
        """Tokenise the calibration text and embed it.

        Raises:
            DataError: the text cannot be read or is too short.
        """
        progress("calibration tokens", 0, 1)
        tokens, record = calibration_tokens(calibration, source.path)
        return cls(shape, DecoderActivations(source, tokens, device, scratch, calibration.seed), record)

    def fold(self, layer: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The layer's tensors with AWQ folded in. Linears come back as float32, all else in its own dtype."""
        sketches = self._activations.run(layer, tensors)
        searches = {g.name: search_scale(_fused(tensors, g), sketches[g.name]) for g in self._groups}
        wanted = {name: found.scale for name, found in searches.items() if found.loss < found.plain_loss}
        folded, factors = fold_layer(tensors, wanted)
        self.folds.append(LayerFold({name: f.cpu() for name, f in factors.items()}, searches))
        return folded

    def folding_record(self) -> dict[str, Any]:
        """For the manifest: how far each norm was changed, and what the search gained."""
        layers = {}
        for layer, fold in enumerate(self.folds):
            layers[layer_prefix(layer).rstrip(".")] = {
                name: {
                    "alpha": round(found.alpha, 3),
                    "error_ratio": round(found.loss / found.plain_loss, 4) if found.plain_loss else 1.0,
                    "norm_divided_by" if name in _NORM_OF else "rows_divided_by": _range(fold.factors.get(name)),
                }
                for name, found in fold.searches.items()
            }
        return {"norms_are_folded": True, "factors_file": FOLDING_FILE, "layers": layers}

    def close(self) -> None:
        self._activations.close()


_NORM_OF = {group.name: group.norm for group in GROUPS if group.norm is not None}


def _range(factor: Tensor | None) -> dict[str, float] | None:
    if factor is None:
        return None
    mean = float(factor.double().log().mean().exp())
    return {"smallest": float(factor.min()), "geometric_mean": mean, "largest": float(factor.max())}


def _fused(tensors: Mapping[str, Tensor], group: LinearGroup) -> Tensor:
    """A new float32 tensor: the weights of a group, one below the other."""
    return torch.cat([tensors[f"{member}.weight"].float() for member in group.members])


def fold_layer(
    tensors: Mapping[str, Tensor], scales: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Fold AWQ factors into a layer without changing what it computes.

    Args:
        tensors: the layer's tensors by name inside the layer.
        scales: group name -> positive float32 [K]; groups that are not named stay as they are.
    Returns:
        The tensors, with linears in float32, and the factors that were applied after rounding.
    """
    folded = {name: t.float() if _is_linear_weight(name) else t for name, t in tensors.items()}
    factors = {}
    for group in GROUPS:
        if group.name not in scales:
            continue
        wanted = _centred(scales[group.name])
        if group.norm is not None:
            name = f"{group.norm}.weight"
            folded[name], factor = _divide_stored(folded[name], wanted)
        else:
            rows = ROWS_BEFORE[group.name]
            bias = folded.get(f"{rows}.bias")
            factor = wanted
            if bias is not None:
                folded[f"{rows}.bias"], factor = _divide_stored(bias, wanted)
            folded[f"{rows}.weight"] = folded[f"{rows}.weight"] / factor.unsqueeze(1)
        for member in group.members:
            folded[f"{member}.weight"] = folded[f"{member}.weight"] * factor
        factors[group.name] = factor
    return folded, factors


def _is_linear_weight(name: str) -> bool:
    return name.endswith("_proj.weight")


def _centred(scale: Tensor) -> Tensor:
    """The factors times a power of two that brings their geometric mean near 1; quantisation does not notice it."""
    return scale * math.ldexp(1.0, -round(float(scale.log2().mean())))


def _divide_stored(values: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """``values / wanted`` in the dtype of ``values``, and the factor that the stored result stands for.

    A zero stays zero under any factor; it gets factor 1, so that noise added to it acts as it did before.
    """
    stored = (values.float() / wanted).to(values.dtype)
    exact = values.float() / stored.float()
    usable = torch.isfinite(exact) & (exact > 0)
    return torch.where(usable, stored, values), torch.where(usable, exact, torch.ones_like(exact))


def write_folding(folder: Path, folds: list[LayerFold]) -> None:
    """Write all factors beside the weights, as ``model.layers.<i>.<group>`` -> float32 [K]."""
    arrays: dict[str, Any] = {
        f"{layer_prefix(layer)}{name}": factor.numpy()
        for layer, fold in enumerate(folds)
        for name, factor in fold.factors.items()
    }
    np.savez(folder / FOLDING_FILE, **arrays)


def read_folding(folder: Path) -> dict[str, Tensor]:
    """The factors that :func:`write_folding` wrote; empty when the checkpoint has none."""
    file = folder / FOLDING_FILE
    if not file.is_file():
        return {}
    with np.load(file, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
