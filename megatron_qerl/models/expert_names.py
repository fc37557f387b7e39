"""Forms in which others take the adapters of experts.

Our canonical names are Hugging Face's module paths: ``mlp.experts.7.gate_proj.lora_A``; a factor that all experts share
is named without the number, ``mlp.experts.gate_proj.lora_A``. PEFT and vLLM want every factor of every expert: a shared
one is repeated. SGLang and its kin take one tensor a factor, [experts, ...], or [1, ...] where it is shared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

_FACTOR = re.compile(r"(?P<experts>.*\.mlp\.experts)\.((?P<index>\d+)\.)?(?P<projection>\w+_proj)\.(?P<kind>lora_[AB])")
_SLOTS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def _parse(tensors: Mapping[str, Tensor]) -> dict[str, re.Match[str]]:
    found = ((name, _FACTOR.fullmatch(name)) for name in tensors)
    return {name: match for name, match in found if match is not None}


def repeat_shared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Canonical tensors in which every expert has both factors of its own."""
    parsed = _parse(tensors)
    counts: dict[str, int] = {}
    for match in parsed.values():
        if match["index"] is not None:
            counts[match["experts"]] = max(counts.get(match["experts"], 0), int(match["index"]) + 1)
    repeated: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        factor = parsed.get(name)
        if factor is None or factor["index"] is not None:
            repeated[name] = tensor
            continue
        for expert in range(counts[factor["experts"]]):
            # A copy each: safetensors refuses tensors that share memory.
            repeated[f"{factor['experts']}.{expert}.{factor['projection']}.{factor['kind']}"] = tensor.clone()
    return repeated


def stack_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Canonical tensors with experts stacked: ``mlp.experts.w1.lora_A`` [experts or 1, r, K], and so on.

    ``w1`` is gate, ``w2`` down, ``w3`` up. SGLang reads a stack of one as shared with ``experts_shared_outer_loras``.
    """
    stacks: dict[str, dict[int, Tensor]] = {}
    stacked = {}
    for name, tensor in tensors.items():
        match = _FACTOR.fullmatch(name)
        if match is None:
            stacked[name] = tensor
            continue
        place = f"{match['experts']}.{_SLOTS[match['projection']]}.{match['kind']}"
        stacks.setdefault(place, {})[int(match["index"] or 0)] = tensor
    return stacked | {place: torch.stack([parts[e] for e in sorted(parts)]) for place, parts in stacks.items()}
