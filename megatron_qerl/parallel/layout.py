"""Which numbers of processes a parallel layout can be made of. No torch here: a launcher asks too."""

from __future__ import annotations

from megatron_qerl.config.schema import ParallelSection
from megatron_qerl.errors import ConfigError


def check_world(layout: ParallelSection, world_size: int) -> None:
    """Check that a layout can be made of so many processes.

    Raises:
        ConfigError: it cannot.
    """
    product = layout.tensor_model_parallel_size * layout.pipeline_model_parallel_size * layout.context_parallel_size
    if world_size % product:
        raise ConfigError(
            "parallel",
            f"tensor {layout.tensor_model_parallel_size} x pipeline {layout.pipeline_model_parallel_size} x context "
            f"{layout.context_parallel_size} = {product}",
            f"must divide the number of processes, {world_size}",
            f"start a multiple of {product} processes or shrink the layout",
        )
    _check_experts(layout, world_size)


def _check_experts(layout: ParallelSection, world_size: int) -> None:
    """Experts are spread over the ranks of a pipeline stage, in groups that hold whole copies of the rest or fit in."""
    copy = layout.tensor_model_parallel_size * layout.context_parallel_size
    width = layout.expert_tensor_parallel_size or layout.tensor_model_parallel_size
    span, stage = layout.expert_model_parallel_size * width, world_size // layout.pipeline_model_parallel_size
    value = f"expert {layout.expert_model_parallel_size} x expert tensor {width} = {span}"
    if stage % span:
        raise ConfigError(
            "parallel",
            value,
            f"must divide the processes of a pipeline stage, {stage}",
            f"start a multiple of {span * layout.pipeline_model_parallel_size} processes or shrink the layout",
        )
    if max(span, copy) % min(span, copy):
        raise ConfigError(
            "parallel",
            value,
            f"and tensor x context = {copy}: one must divide the other, or experts would cut a replica in two",
            f"use sizes whose product is a multiple of {copy}, or divides it",
        )
