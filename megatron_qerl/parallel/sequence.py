"""Sequence parallelism for training only.

It splits what tensor parallelism leaves whole along the sequence. A decode step has one token a row, which nothing can
split, so generation runs the same weights without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

#: Megatron's names of the switch, on modules and on their configs.
_SWITCHES = ("sequence_parallel", "scatter_to_sequence_parallel", "reduce_scatter_embeddings")


@contextmanager
def whole_sequences(model: nn.Module) -> Iterator[None]:
    """Sequence parallelism off within the block, on every module of ``model`` and its config."""
    holders: dict[int, Any] = {}
    for module in model.modules():
        holders[id(module)] = module
        config = getattr(module, "config", None)
        if config is not None:
            holders[id(config)] = config
    switched = [(h, name) for h in holders.values() for name in _SWITCHES if getattr(h, name, None) is True]
    for holder, name in switched:
        setattr(holder, name, False)
    try:
        yield
    finally:
        for holder, name in switched:
            setattr(holder, name, True)
