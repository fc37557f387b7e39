"""The model's base back in Hugging Face names: the inverse of ``load``, for round-trip proofs and for merging."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_qerl.layers.frozen import DenseFrozen, NVFP4Frozen
from megatron_qerl.models.families import LinearRule, NormRule
from megatron_qerl.models.policy import PolicyModel
from megatron_qerl.models.shape import ModelShape
from megatron_qerl.models.walk import hf_name, modules


def base_tensors(model: PolicyModel, shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the frozen base, as a ModelOpt or Hugging Face checkpoint stores it; one rank only.

    Dense tensors come in the model's dtype, norms in FP32, packed weights as ``weight``, ``weight_scale`` and
    ``weight_scale_2`` byte for byte.
    """
    assert parallel_state.get_tensor_model_parallel_world_size() == 1, "gathering a sharded base is not needed here"
    for block, rule, module in modules(model, shape):
        if isinstance(rule, NormRule):
            yield hf_name(rule.hf, block), module.weight.data
        elif isinstance(rule, LinearRule):
            yield from _linear(rule, block, module)
        elif module.weight is not None:
            yield rule.hf, module.weight.data[: shape.vocab_size]


def _linear(rule: LinearRule, block: int | None, module: object) -> Iterator[tuple[str, Tensor]]:
    frozen = module.frozen  # type: ignore[attr-defined]
    layout = module.layout  # type: ignore[attr-defined]
    bias = module.bias  # type: ignore[attr-defined]
    if isinstance(frozen, NVFP4Frozen):
        packed = layout.split_rows(frozen.weight.packed)
        scales = layout.split_rows(frozen.weight.block_scale.view(torch.uint8))
        for projection, path in rule.parts.items():
            name = hf_name(path, block)
            yield f"{name}.weight", packed[projection]
            yield f"{name}.weight_scale", scales[projection].view(torch.float8_e4m3fn)
            yield f"{name}.weight_scale_2", torch.tensor(frozen.weight.tensor_scale)
    elif isinstance(frozen, DenseFrozen):
        for projection, tensor in layout.split_rows(frozen.weight).items():
            yield f"{hf_name(rule.parts[projection], block)}.weight", tensor
    if bias is not None:
        for projection, tensor in layout.split_rows(bias.data).items():
            yield f"{hf_name(rule.parts[projection], block)}.bias", tensor
