"""A tiny policy, built and loaded in this process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_qerl.config.schema import LoraSection, ModelSection, NoiseSection, ParallelSection
from megatron_qerl.layers.lora import LoraSpec
from megatron_qerl.models.policy import PolicyChunks
from megatron_qerl.models.shape import ModelShape
from megatron_qerl.noise.registry import NoiseRegistry
from megatron_qerl.nvfp4.checkpoint import ModelFolder


@dataclass
class Loaded:
    """The pieces a test wants."""

    folder: ModelFolder
    shape: ModelShape
    model: PolicyChunks
    registry: NoiseRegistry


def load(
    path: Path,
    *,
    dtype: str = "float32",
    lora: LoraSection | None = None,
    noise: NoiseSection | None = None,
    resident: bool = False,
    seed: int = 1,
    recompute: str = "none",
    layout: ParallelSection | None = None,
    router_input: str = "noisy",
    attention: str = "auto",
    shares_prompts: bool = True,
) -> Loaded:
    """Build, load and initialise; process groups are started once a process, or once a layout if it shuts them down."""
    from megatron_qerl.models.build import build_policy
    from megatron_qerl.models.load import initialize_adapters, load_base
    from megatron_qerl.models.shape import read_shape
    from megatron_qerl.models.walk import expected_norms, norms
    from megatron_qerl.parallel.setup import initialize

    layout = layout or ParallelSection()
    initialize(layout, "auto", 1)
    folder = ModelFolder.open(path)
    shape = read_shape(folder.config, path)
    section = ModelSection(path=path, dtype=dtype, attention=attention)  # type: ignore[arg-type]
    model = build_policy(
        folder.config,
        section,
        layout,
        lora,
        seed=seed,
        recompute=recompute,
        shares_prompts=shares_prompts,
        router_input=router_input,
    )
    load_base(model, shape, folder, resident=resident)
    initialize_adapters(model, shape)
    whole = layout.pipeline_model_parallel_size == 1
    registry = NoiseRegistry(norms(model, shape), expected_norms(shape), noise or NoiseSection(), seed, complete=whole)
    return Loaded(folder, shape, model, registry)


def randomize_adapters(model: PolicyChunks, scale: float = 0.05, seed: int = 7) -> None:
    """Give B values, so that the adapter does something."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            parameter.data.copy_(scale * torch.randn(parameter.shape, generator=generator))


def lora_spec_of(model: PolicyChunks) -> LoraSpec:
    """The adapter settings that a model was built with."""
    return next(m.spec for m in model.modules() if hasattr(m, "spec") and isinstance(m.spec, LoraSpec))
