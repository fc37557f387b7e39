"""What each rank computes in ``test_pipeline_context``: one policy on one pipeline and context layout."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_qerl.errors import NonFiniteError
from megatron_qerl.layers.attention import KVCache
from megatron_qerl.layers.frozen import DenseFrozen, NVFP4Frozen
from megatron_qerl.models.adapter_state import adapter_hash, collect
from megatron_qerl.models.families import LinearRule, NormRule, VocabRule
from megatron_qerl.models.walk import hf_name, modules
from megatron_qerl.noise.proof import over_stages, read_back
from megatron_qerl.trainer.step import BeforeUpdate, StepStatistics, Trainer
from tests.multiprocess import tensor_data_cases
from tests.multiprocess.tensor_data_cases import gradients, groups_of
from tests.support.layouts import run_each, sizes_of
from tests.support.loaded import Loaded


def prepare(path: Path, changes: dict[str, Any]) -> tuple[Loaded, Trainer]:
    """The policy on the layout that ``changes`` name, with the same adapter on all."""
    return tensor_data_cases.prepare(path, "one", changes)


def everything(path: Path, changes: dict[str, Any], lengths: list[list[int]], rollout: Tensor | None) -> dict[str, Any]:
    """What all layouts must agree on, from log-probabilities to the adapter after one update."""
    loaded, trainer = prepare(path, changes)
    noise = loaded.registry.state(5, 10)
    found: dict[str, Any] = {"start": adapter_hash(collect(loaded.model, loaded.shape))}
    groups = groups_of(lengths, rollout)
    found["logprobs"] = torch.cat([trainer.probe([g], noise) for g in groups]).cpu()
    found["entropies"] = torch.cat([e for _, e in trainer.logprobs(trainer._microbatches(groups), None)]).cpu()
    if rollout is None:  # the reference: the batch is scored by the policy itself, and then a little off-policy
        found["rollout"] = found["logprobs"] + 0.1 * torch.sin(torch.arange(found["logprobs"].numel()))
        groups = groups_of(lengths, found["rollout"])
    found["engine"] = asdict(trainer.measure_engine(groups, noise))
    with loaded.registry.applied(noise):
        readback = over_stages(read_back(loaded.registry, noise), parallel_state.get_pipeline_model_parallel_group())
    found["noise"] = (readback.touched, readback.expected, readback.sigma_effective)
    batches = trainer._own_microbatches(groups)
    found["rows"] = [b.tokens.total_tokens for b in batches]
    with loaded.registry.applied(noise):
        trainer._accumulate(batches, [BeforeUpdate()] * len(batches), StepStatistics(), compare=False)
    found["gradient"] = gradients(loaded, trainer)
    stats = trainer.train_step(groups, noise)
    found["statistics"] = asdict(stats)
    found["adapter"] = collect(loaded.model, loaded.shape)
    return found


def decode(path: Path, changes: dict[str, Any]) -> Tensor:
    """Logits [steps, B, V] of two left-padded prompts and three tokens after them, through a key-value cache."""
    loaded, _ = prepare(path, changes)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 73, (2, 8), generator=generator)
    padding = torch.tensor([0, 2])
    positions = (torch.arange(8)[None] - padding[:, None]).clamp(min=0)
    blocked = torch.arange(11)[None] < padding[:, None]
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1)[None] | blocked[:, None, :5]
    mask &= ~torch.eye(5, dtype=torch.bool)[None]
    cache = KVCache(2, 11)
    found = []
    loaded.model.eval()
    with torch.no_grad():
        found.append(loaded.model(ids[:, :5], positions[:, :5], mask[:, None], inference_context=cache))
        for t in range(5, 8):
            step = blocked[:, None, None, : t + 1]
            found.append(loaded.model(ids[:, t : t + 1], positions[:, t : t + 1], step, inference_context=cache))
    return torch.stack(found)


def digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    return hashlib.sha256(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def layer_bytes(path: Path, changes: dict[str, Any]) -> dict[str, str]:
    """Hugging Face name -> hash of the bytes that this rank holds for it, heads of tied models as ``head``."""
    loaded, _ = prepare(path, changes)
    found: dict[str, str] = {}
    for block, rule, module in modules(loaded.model, loaded.shape):
        if isinstance(rule, NormRule):
            found[hf_name(rule.hf, block)] = digest(module.weight)
        elif isinstance(rule, VocabRule):
            found[rule.hf] = digest(module.weight[: loaded.shape.vocab_size])
        elif isinstance(rule, LinearRule):
            frozen, layout = module.frozen, module.layout
            assert isinstance(frozen, NVFP4Frozen | DenseFrozen)
            stored = frozen.weight.packed if isinstance(frozen, NVFP4Frozen) else frozen.weight
            for projection, part in layout.split_rows(stored).items():
                found[f"{hf_name(rule.parts[projection], block)}.weight"] = digest(part)
    if loaded.model.post_process:
        found["head"] = digest(loaded.model.models[-1].head().weight[: loaded.shape.vocab_size])
    return found


def non_finite(path: Path, changes: dict[str, Any], lengths: list[list[int]], response: int) -> dict[str, Any]:
    """What a step does whose response number ``response`` was recorded with an impossible log-probability."""
    loaded, trainer = prepare(path, changes)
    noise = loaded.registry.state(5, 10)
    before = adapter_hash(collect(loaded.model, loaded.shape))
    flat = groups_of(lengths)
    sizes = [len(r.token_ids) for g in flat for r in g.responses]
    rollout = torch.cat([trainer.probe([g], noise) for g in flat])
    rollout[sum(sizes[:response])] = -1e4  # exp(logprob + 1e4) overflows
    try:
        trainer.train_step(groups_of(lengths, rollout), noise)
        message = ""
    except NonFiniteError as error:
        message = str(error)
    return {"message": message, "changed": adapter_hash(collect(loaded.model, loaded.shape)) != before}


def run_cases(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Body of a rank: name -> what the case named ``function`` returns."""
    return run_each(arguments, lambda case: sizes_of(case[1]["changes"]), lambda case: globals()[case[0]](**case[1]))
