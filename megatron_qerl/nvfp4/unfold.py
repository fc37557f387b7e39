"""The source model as a quantised folder sees it: with AWQ's factors applied.

Folding multiplied the columns of some weights and divided the norm scales, rows or biases before them. Given the
factors, the source's weights can be brought into the folded form, and folded norms back into the source's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_qerl.nvfp4.awq import ROWS_BEFORE
from megatron_qerl.nvfp4.checkpoint import ModelFolder
from megatron_qerl.nvfp4.layout import GROUPS, layer_of, layer_prefix

_ROUNDING = 2.0**-22  # of the float32 ratio that gives a folded value back


class SourceView:
    """Tensors of a source model, folded on request.

    Args:
        source: the original model.
        factors: ``model.layers.<i>.<group>`` -> float32 [K]; empty without AWQ.
    """

    def __init__(self, source: ModelFolder, factors: Mapping[str, Tensor]) -> None:
        self._source, self._factors = source, factors

    def weight(self, module: str, rows: slice) -> Tensor:
        """Rows of the weight that was quantised, float64 [rows, K]."""
        weight = self._source.read(f"{module}.weight", rows=rows).double()
        columns, divided = self._column_factor(module), self._divisor(f"{module}.weight")
        if columns is not None:
            weight = weight * columns.double()
        return weight if divided is None else weight / divided[rows].double().unsqueeze(1)

    def plain_names(self, quantized_modules: set[str]) -> set[str]:
        """Names of the source's tensors that are not weights of ``quantized_modules``."""
        return {name for name in self._source.names() if name.removesuffix(".weight") not in quantized_modules}

    def same(self, name: str, stored: Tensor) -> bool:
        """Whether a stored tensor is the source's, or gives it back once unfolded."""
        original = self._source.read(name)
        if stored.dtype != original.dtype or stored.shape != original.shape:
            return False
        divisor = self._divisor(name)
        if divisor is None:
            return torch.equal(stored.view(torch.uint8), original.view(torch.uint8))
        restored = stored.double() * divisor.double()
        return bool(((restored - original.double()).abs() <= _ROUNDING * original.double().abs()).all())

    def _column_factor(self, module: str) -> Tensor | None:
        prefix, inside = _split(module)
        group = next((g for g in GROUPS if inside in g.members), None)
        return self._factors.get(f"{prefix}{group.name}") if group is not None else None

    def _divisor(self, name: str) -> Tensor | None:
        """The factor that a norm scale, or the rows and bias of a linear, were divided by."""
        prefix, inside = _split(name)
        module = inside.rpartition(".")[0]
        for group in GROUPS:
            if module == (group.norm or ROWS_BEFORE[group.name]):
                return self._factors.get(f"{prefix}{group.name}")
        return None


def _split(name: str) -> tuple[str, str]:
    layer = layer_of(name)
    prefix = "" if layer is None else layer_prefix(layer)
    return prefix, name.removeprefix(prefix)
