"""The model's base back in Hugging Face names: the inverse of ``load``, for round-trip proofs and for merging."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_qerl.layers.frozen import DenseFrozen, FrozenWeight, NVFP4Frozen
from megatron_qerl.layers.layout import FusedLayout
from megatron_qerl.models.families import ExpertRule, LinearRule, NormRule, RouterRule
from megatron_qerl.models.policy import PolicyChunks
from megatron_qerl.models.shape import ModelShape
from megatron_qerl.models.walk import hf_name, modules


def base_tensors(model: PolicyChunks, shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the frozen base, as a ModelOpt or Hugging Face checkpoint stores it; one rank only.

    Dense tensors come in the model's dtype, norms in FP32, packed weights as ``weight``, ``weight_scale`` and
    ``weight_scale_2`` byte for byte.
    """
    assert parallel_state.get_tensor_model_parallel_world_size() == 1, "gathering a sharded base is not needed here"
    for block, rule, module in modules(model, shape):
        if isinstance(rule, NormRule | RouterRule):
            yield hf_name(rule.hf, block), module.weight.data
        elif isinstance(rule, ExpertRule):
            for expert in range(module.num_local):
                paths = {p: hf_name(path, block, expert) for p, path in rule.parts.items()}
                yield from _matrix(paths, module.frozen.expert(expert), module.layout)
        elif isinstance(rule, LinearRule):
            yield from _linear(rule, block, module)
        elif module.weight is not None:
            yield rule.hf, module.weight.data[: shape.vocab_size]


def _linear(rule: LinearRule, block: int | None, module: Any) -> Iterator[tuple[str, Tensor]]:
    paths = {projection: hf_name(path, block) for projection, path in rule.parts.items()}
    yield from _matrix(paths, module.frozen, module.layout)
    if module.bias is not None:
        for projection, tensor in module.layout.split_rows(module.bias.data).items():
            yield f"{paths[projection]}.bias", tensor


def _matrix(paths: dict[str, str], frozen: FrozenWeight, layout: FusedLayout) -> Iterator[tuple[str, Tensor]]:
    """The parts of one fused matrix; ``paths`` is projection -> module path."""
    if isinstance(frozen, NVFP4Frozen):
        packed = layout.split_rows(frozen.weight.packed)
        scales = layout.split_rows(frozen.weight.block_scale.view(torch.uint8))
        for projection, name in paths.items():
            yield f"{name}.weight", packed[projection]
            yield f"{name}.weight_scale", scales[projection].view(torch.float8_e4m3fn)
            yield f"{name}.weight_scale_2", torch.tensor(frozen.weight.tensor_scale)
    elif isinstance(frozen, DenseFrozen):
        for projection, tensor in layout.split_rows(frozen.weight).items():
            yield f"{paths[projection]}.weight", tensor
