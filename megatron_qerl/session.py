"""Opening a model for use: the same steps for training, evaluation and export, in one place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_qerl.config.availability import refuse_unbuilt
from megatron_qerl.config.schema import RunConfig
from megatron_qerl.errors import CheckpointError, ConfigError
from megatron_qerl.models.adapter_state import adapter_hash, collect
from megatron_qerl.models.build import build_policy
from megatron_qerl.models.load import initialize_adapters, load_base
from megatron_qerl.models.policy import PolicyChunks
from megatron_qerl.models.shape import ModelShape, check_experts, read_shape, router_input
from megatron_qerl.models.walk import expected_norms, norms
from megatron_qerl.noise.registry import NoiseRegistry
from megatron_qerl.nvfp4.awq import read_folding
from megatron_qerl.nvfp4.checkpoint import ModelFolder, read_json
from megatron_qerl.nvfp4.manifest import verify_manifest
from megatron_qerl.parallel import setup
from megatron_qerl.parallel.ranks import Ranks
from megatron_qerl.rollout.engine import RolloutEngine
from megatron_qerl.trainer.optimizer import AdapterOptimizer
from megatron_qerl.types import NoiseState, PolicyVersion, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class Session:
    """A loaded policy with its tokenizer, noise and identity.

    Attributes:
        base_hash: SHA-256 naming the frozen base.
        stop_token_ids: tokens that end a response.
    """

    config: RunConfig
    parallel: setup.ParallelContext
    folder: ModelFolder
    shape: ModelShape
    model: PolicyChunks
    tokenizer: PreTrainedTokenizerBase
    registry: NoiseRegistry
    base_hash: str
    stop_token_ids: tuple[int, ...]

    @property
    def ranks(self) -> Ranks:
        """All processes of the run."""
        return self.parallel.ranks

    def engine(self) -> RolloutEngine:
        """The engine that ``rollout.engine`` names."""
        assert self.config.rollout.engine == "embedded", "refuse_unbuilt lets no other through"
        from megatron_qerl.rollout.engines.embedded import EmbeddedEngine

        return EmbeddedEngine(self.model, self.registry, self.config.rollout.max_batch_size)

    def optimizer(self) -> AdapterOptimizer:
        """The run's optimizer; Megatron's distributed one where the config says so, or by default, several replicas."""
        distributed = self.config.parallel.spreads_optimizer(self.parallel.data_size)
        train = self.config.train
        updates = train.steps * train.minibatches_per_step
        return AdapterOptimizer(self.model, self.config.optimizer, updates, distributed=distributed)

    def sampling(self, seed: int, temperature: float | None = None) -> SamplingParams:
        """Sampling parameters of the run, at another temperature if given."""
        rollout = self.config.rollout
        return SamplingParams(
            temperature=rollout.temperature if temperature is None else temperature,
            max_new_tokens=rollout.max_new_tokens,
            stop_token_ids=self.stop_token_ids,
            seed=seed,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
        )

    def policy(self, adapter_version: int, noise: NoiseState | None) -> PolicyVersion:
        """The version of the policy as it stands now, hashed from the adapter's bytes. A collective of all ranks."""
        rollout = self.config.rollout
        return PolicyVersion(
            base_hash=self.base_hash,
            adapter_version=adapter_version,
            adapter_hash=adapter_hash(collect(self.model, self.shape)),
            noise=noise if noise is not None and noise.active else None,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
        )

    def memory(self) -> dict[str, float]:
        """Bytes of the weights by kind, as metrics."""
        frozen: list[Any] = [m.frozen for m in self.model.modules() if hasattr(m, "install")]
        other = sum(p.numel() * p.element_size() for p in self.model.parameters() if not p.requires_grad)
        adapter = sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)
        return {
            "memory/weights_packed_bytes": float(sum(f.packed_bytes for f in frozen) + other),
            "memory/weights_cache_bytes": float(sum(f.cache_bytes for f in frozen) + self.model.wide_head_bytes),
            "memory/adapter_bytes": float(adapter),
        }


def open_session(config: RunConfig) -> Session:
    """Check the model folder, start the process groups, build and load the policy: on each rank its part of it.

    Raises:
        CheckpointError: the folder cannot be used.
        ConfigError: the config does not fit the model or the machine.
    """
    refuse_unbuilt(config)
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    folder = ModelFolder.open(config.model.path)
    shape = read_shape(folder.config, folder.path)
    _check_folder(folder, config)
    check_experts(shape, config.parallel)
    context = setup.initialize(config.parallel, config.model.device, config.run.seed)
    _check_tensors(folder, context.ranks)
    tokenizer = load_tokenizer(folder.path)
    model = build_policy(
        folder.config,
        config.model,
        config.parallel,
        config.lora,
        seed=config.run.seed,
        recompute=config.train.recompute,
        shares_prompts=config.train.share_prompt_prefix,
        router_input=router_input(shape, config.noise),
    )
    load_base(model, shape, folder, resident=config.model.weight_cache == "resident")
    initialize_adapters(model, shape)
    registry = NoiseRegistry(
        norms(model, shape),
        expected_norms(shape),
        config.noise,
        config.run.seed,
        complete=config.parallel.pipeline_model_parallel_size == 1,
        folded=folded_norms(folder),
    )
    return Session(
        config=config,
        parallel=context,
        folder=folder,
        shape=shape,
        model=model,
        tokenizer=tokenizer,
        registry=registry,
        base_hash=folder.base_hash,
        stop_token_ids=stop_tokens(folder.path, tokenizer),
    )


def _check_folder(folder: ModelFolder, config: RunConfig) -> None:
    """The tokenizer belongs to the weights, and the model can take the lengths asked for."""
    folder.check_tokenizer()
    longest = folder.config.get("max_position_embeddings")
    if longest is not None and config.model.max_sequence_length > int(longest):
        raise ConfigError(
            "model.max_sequence_length",
            config.model.max_sequence_length,
            f"exceeds the model's max_position_embeddings = {longest}",
            "lower it",
        )


def _check_tensors(folder: ModelFolder, ranks: Ranks) -> None:
    """Hash the folder's tensors, each rank a share of its machine's files, and compare with the manifest.

    A rank reads a whole tensor only here, to hash it, and drops it at once.

    Raises:
        CheckpointError: a tensor is not the manifest's.
        FaultError: the ranks' machines have different models.
    """
    index, count = ranks.neighbours()
    own = {name: folder.tensor_hash(name) for name in folder.names()[index::count]}
    for host, hashes in ranks.gather((ranks.host, own)):
        if host == ranks.host:
            folder.remember_hashes(hashes)
    if folder.manifest is not None:
        verify_manifest(folder)
    ranks.same(f"the model in {folder.path}", folder.base_hash)


_FOLDED_ROLES = {"qkv": "input", "gate_up": "post_attention"}


def folded_norms(folder: ModelFolder) -> dict[tuple[int, str], NDArray[np.float32]]:
    """(block, role) -> what AWQ divided that norm's scale by; empty for a checkpoint without folding.

    Raises:
        CheckpointError: the manifest says that norms were folded, and the factors are missing or not the recorded ones.
    """
    record = (folder.manifest or {}).get("folding") or {}
    factors = read_folding(folder.path)
    folded = {}
    for layer, groups in record.get("layers", {}).items():
        for group, entry in groups.items():
            bounds = entry.get("norm_divided_by")
            if group not in _FOLDED_ROLES or bounds is None:  # None: the search found nothing better than no factor
                continue
            name = f"{layer}.{group}"
            factor = factors.get(name)
            found = None if factor is None else (float(factor.min()), float(factor.max()))
            if factor is None or found != (bounds["smallest"], bounds["largest"]):
                raise CheckpointError(
                    f"folding factors of {name} in {folder.path}",
                    found,
                    f"the manifest recorded {(bounds['smallest'], bounds['largest'])}; the noise would be wrong",
                    "copy the whole folder again",
                )
            folded[(int(layer.rpartition(".")[2]), _FOLDED_ROLES[group])] = factor.float().numpy()
    return folded


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder, from its files alone.

    Raises:
        CheckpointError: the folder has no usable tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, clean_up_tokenization_spaces=False)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"tokenizer in {path}", type(error).__name__, "cannot be read", "copy tokenizer.json and its config there"
        ) from error
    if tokenizer.eos_token_id is None:
        raise CheckpointError(f"eos_token in {path}", None, "a response could never stop", "use a complete tokenizer")
    return tokenizer


def stop_tokens(path: Path, tokenizer: Any) -> tuple[int, ...]:
    """End-of-sequence tokens of the tokenizer and of generation_config.json."""
    stops = {int(tokenizer.eos_token_id)}
    file = path / "generation_config.json"
    if file.is_file():
        found = read_json(file).get("eos_token_id")
        stops.update(found if isinstance(found, list) else [] if found is None else [found])
    return tuple(sorted(stops))
