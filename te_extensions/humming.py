"""The optional package ``humming-kernels`` as a path of a linear layer. Only ever by name: ``path="humming"``.

Its kernels do not read ModelOpt's bytes: they want the codes and block scales in an order of their own. So the first
product with a weight makes a second copy of all its bytes (0.5625 a parameter), which lives as long as the weight
does. That is why no dispatch table may choose it. Nothing is converted but the order: W4A16, the same matrix.

Preparation allocates, and the first product of a shape compiles the package's schedules (some ninety kernels, minutes
without its cache): make one product with each weight before a CUDA graph is captured. Its schedules may sum in an order
that depends on M.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from te_extensions.weight import NVFP4Weight
from te_extensions.workspace import Fingerprint

_prepared: dict[int, tuple[Fingerprint, float, Callable[[Tensor], Tensor]]] = {}


@cache
def _installed() -> bool:
    return find_spec("humming") is not None


def humming_refusal(x_rows: int, weight: NVFP4Weight, device: torch.device) -> str | None:
    """Why the package cannot serve this product, or None."""
    if device.type != "cuda":
        return f"device {device} is not a CUDA device"
    if not _installed():
        return "the package humming-kernels is not installed: pip install humming-kernels==0.1.20"
    rows, cols = weight.shape
    if rows % 128 or cols % 64:
        return f"N = {rows}, K = {cols} are not whole tiles of 128 x 64"
    if x_rows < 1:
        return "no rows"
    if weight.packed.is_inference() or weight.block_scale.is_inference():
        return "the weight was made in inference mode, where a later write to it could not be noticed"
    return None


def _prepare(weight: NVFP4Weight) -> Callable[[Tensor], Tensor]:
    """A layer of the package around a repacked copy of ``weight``."""
    rows, cols = weight.shape
    device = weight.packed.device
    with torch.cuda.device(device), torch.no_grad():
        layer: Any = (
            import_module("humming.layer")
            .HummingLayer(
                shape_n=rows,
                shape_k=cols,
                weight_config={"quant_method": "modelopt", "quant_algo": "nvfp4"},
                torch_dtype=torch.bfloat16,
            )
            .to(device)
        )
        scale = torch.tensor([weight.tensor_scale], dtype=torch.float32, device=device)
        layer.load_from_tensors({"weight": weight.packed, "weight_scale": weight.block_scale, "weight_scale_2": scale})
        layer.transform()
    forward: Callable[[Tensor], Tensor] = layer.forward
    return forward


def humming_linear(x: Tensor, weight: NVFP4Weight) -> Tensor:
    """x W^T, no autograd.

    Args:
        x: BF16 [M, K], contiguous.
        weight: N x K; repacked at its first use, and again after a write to it.

    Returns:
        BF16 [M, N].

    Raises:
        ValueError: the package cannot serve this product.
    """
    reason = humming_refusal(x.shape[0], weight, x.device)
    if reason is not None:
        raise ValueError(f"humming_linear cannot run: {reason}; use path='dequantize'")
    now = Fingerprint((weight.packed, weight.block_scale))
    key = weight.packed.data_ptr()
    found = _prepared.get(key)
    if found is None or found[1] != weight.tensor_scale or not found[0].same(now):
        for stale in [k for k, (source, _, _) in _prepared.items() if source.expired]:
            del _prepared[stale]
        # Out of the table before its successor is made, so that there are never two copies.
        _prepared.pop(key, None)
        found = _prepared[key] = (now, weight.tensor_scale, _prepare(weight))
    return found[2](x)
