"""What each rank computes in ``test_experts``: a mixture of experts on one layout, and rules broken on purpose."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_qerl.cli.main import main
from megatron_qerl.config.schema import RunConfig
from megatron_qerl.layers.expert_lora import ExpertAdapter
from megatron_qerl.layers.experts import ExpertLinear
from megatron_qerl.layers.routing import RoutingRecord
from megatron_qerl.models import load as load_module
from megatron_qerl.models.adapter_state import adapter_hash, collect, restore
from megatron_qerl.trainer.optimizer import AdapterOptimizer
from megatron_qerl.trainer.step import BeforeUpdate, StepStatistics, Trainer
from tests.multiprocess.tensor_data_cases import adapter_of, gradients, groups_of
from tests.support.layouts import run_each
from tests.support.loaded import Loaded, load

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EP2 = {"expert_model_parallel_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "dp": {},
    "ep2": EP2,
    "ep2_distributed": EP2 | {"use_distributed_optimizer": True},
    "ep2_allgather": EP2 | {"token_dispatcher": "allgather"},
    "ep4": {"expert_model_parallel_size": 4},
    "ep4_allgather": {"expert_model_parallel_size": 4, "token_dispatcher": "allgather"},
    "tp2_ep2": TP2 | EP2 | {"expert_tensor_parallel_size": 1},
    "tp2_ep2_allgather": TP2 | EP2 | {"expert_tensor_parallel_size": 1, "token_dispatcher": "allgather"},
    "tp2_etp2": TP2 | {"expert_tensor_parallel_size": 2},
    "tp2_etp1": TP2 | {"expert_tensor_parallel_size": 1},
    "tp2_ep2_etp2": TP2 | EP2 | {"expert_tensor_parallel_size": 2},
    "tp2_ep2_etp2_allgather": TP2 | EP2 | {"expert_tensor_parallel_size": 2, "token_dispatcher": "allgather"},
    "tp2_ep2_distributed": TP2 | EP2 | {"expert_tensor_parallel_size": 1, "use_distributed_optimizer": True},
    "pp2_ep2": EP2 | {"pipeline_model_parallel_size": 2},
    "cp2_ep2": EP2 | {"context_parallel_size": 2},
}


def _each_adapter(loaded: Loaded, change: Callable[[ExpertAdapter], None]) -> None:
    for module in loaded.model.modules():
        if isinstance(module, ExpertAdapter):
            change(module)


def _mark(kinds: tuple[str, ...], attribute: str, value: object) -> Callable[[Loaded], None]:
    def change(adapter: ExpertAdapter) -> None:
        for kind in kinds:
            setattr(getattr(adapter, kind), attribute, value)

    return lambda loaded: _each_adapter(loaded, change)


BOTH = ("lora_A", "lora_B")


def _whole_gradients_kept_apart(loaded: Loaded) -> None:
    """Forget to sum a replicated factor's gradient over the expert-tensor-parallel group."""

    def change(adapter: ExpertAdapter) -> None:
        adapter._whole = lambda kind: getattr(adapter, kind)  # type: ignore[method-assign]

    _each_adapter(loaded, change)


#: name -> what is done to the built model. Each breaks one rule that the layers keep.
SABOTAGE: dict[str, Callable[[Loaded], None]] = {
    "own factors are reduced like any other": _mark(BOTH, "allreduce", True),
    "shared factors are reduced like an expert's": _mark(BOTH, "allreduce", False),
    "shared factors are not summed over tensor ranks": _mark(BOTH, "sequence_parallel", False),
    "parts of a replicated factor's gradient stay apart": _whole_gradients_kept_apart,
    "split factors are left out of the norm": _mark(BOTH, "tensor_model_parallel", False),
    "replicated factors are counted on every rank": _mark(BOTH, "tensor_model_parallel", True),
}


def run_config(path: Path, layout: str, mode: str, recompute: str) -> RunConfig:
    """A config whose Adam is smooth: with epsilon near the gradients an update is a continuous function of them."""
    return RunConfig.model_validate(
        {
            "run": {"name": "t"},
            "model": {"path": path, "dtype": "float32", "max_sequence_length": 128},
            "lora": {"rank": 4, "alpha": 8.0, "expert_mode": mode},
            "parallel": dict(LAYOUTS[layout]),
            "noise": {"sigma_start": 0.05, "sigma_end": 0.01, "stages": 3},
            "data": {"train": {"kind": "arithmetic"}, "eval": {"kind": "arithmetic", "split": "heldout"}},
            "rollout": {"max_prompt_tokens": 10, "max_new_tokens": 12},
            "algorithm": {"name": "grpo", "likelihood": "replay"},
            "optimizer": {"learning_rate": 1e-2, "adam_epsilon": 1e-3, "gradient_clip": 0.05},
            "train": {"steps": 10, "microbatch_tokens": 64, "recompute": recompute},
        }
    )


def expert_hashes(loaded: Loaded) -> dict[str, str]:
    """``{block}.{fc}.{expert}`` -> SHA-256 of this rank's bytes of that expert."""
    found = {}
    for layer in (layer for chunk in loaded.model.models for layer in chunk.decoder.layers):
        for name, module in layer.named_modules():
            if isinstance(module, ExpertLinear):
                dispatched = layer.mlp.token_dispatcher.local_expert_indices
                for local, expert in enumerate(dispatched):
                    matrix = module.frozen.expert(local).matrix(torch.float32).contiguous()
                    digest = hashlib.sha256(matrix.numpy().tobytes()).hexdigest()
                    found[f"{(layer.layer_number - 1) // 2}.{name.rpartition('.')[2]}.{expert}"] = digest
    return found


def train(
    path: Path,
    layout: str,
    mode: str,
    lengths: list[list[int]],
    rollout: Tensor | None,
    *,
    recompute: str = "none",
    sabotage: str | None = None,
    routes: list[int] | None = None,
    shift: int = 0,
) -> dict[str, Any]:
    """Everything a layout must agree on: log-probabilities, gradient, and the adapter after two updates.

    Args:
        rollout: log-probabilities of the engine; None makes them, for the reference.
        sabotage: a rule to break, of ``SABOTAGE``.
        routes: experts that every token is sent to.
        shift: added to the index of the first expert that a rank loads.
    """
    config = run_config(path, layout, mode, recompute)
    load_experts = load_module.load_experts
    if shift:
        load_module.load_experts = lambda *a, **k: _shifted(load_experts, shift, *a, **k)  # type: ignore[assignment]
    try:
        loaded = load(
            path, lora=config.lora, noise=config.noise, layout=config.parallel, recompute=config.train.recompute
        )
    finally:
        load_module.load_experts = load_experts  # type: ignore[assignment]
    restore(loaded.model, loaded.shape, adapter_of(loaded), "test")
    if sabotage is not None:
        SABOTAGE[sabotage](loaded)
    distributed = bool(config.parallel.use_distributed_optimizer)
    trainer = Trainer(
        loaded.model,
        loaded.registry,
        AdapterOptimizer(loaded.model, config.optimizer, 10, distributed=distributed),
        config,
    )
    loaded.model.train()
    noise = loaded.registry.state(5, 10)
    groups = groups_of(lengths, rollout)
    found: dict[str, Any] = {"start": adapter_hash(collect(loaded.model, loaded.shape))}
    found["hashes"] = expert_hashes(loaded)
    found["logprobs"] = torch.cat([trainer.probe([g], noise) for g in groups])
    if rollout is None:
        found["rollout"] = found["logprobs"] + 0.1 * torch.sin(torch.arange(found["logprobs"].numel()))
        groups = groups_of(lengths, found["rollout"])
    batches = trainer._own_microbatches(groups)
    found["rows"] = sum(b.tokens.total_tokens for b in batches)
    if routes is not None:
        for batch in batches:
            sent = torch.tensor(routes, dtype=torch.int16).repeat(batch.tokens.total_tokens, 1)
            batch.tokens.params.routing = RoutingRecord(dict.fromkeys(range(loaded.shape.num_blocks), sent))
    with loaded.registry.applied(noise):
        trainer._accumulate(batches, [BeforeUpdate()] * len(batches), StepStatistics(), compare=False)
    found["gradient"] = gradients(loaded, trainer)
    if routes is None:
        updates = [u for _ in range(2) for u in trainer.train_step(groups, noise).updates]
        found["norms"] = [(u.gradient_norm, u.update_norm) for u in updates]
        found["adapter"] = collect(loaded.model, loaded.shape)
    return found


def _shifted(load_experts: Callable[..., None], shift: int, *arguments: Any, **named: Any) -> None:
    module = arguments[3]
    first, count = module.first, module.num_local * module.groups.ep.size()
    module.first = (first + shift) % count
    load_experts(*arguments, **named)
    module.first = first


def run_cases(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Body of a rank: name -> what ``train`` returns."""
    return run_each(arguments, lambda options: options["layout"], lambda options: train(**options))


def whole_runs(rank: int, world_size: int, arguments: dict[str, list[str]]) -> dict[str, int]:
    """Body of a rank: name -> exit code of ``megatron-qerl`` with these arguments."""
    return {name: main(line) for name, line in arguments.items()}
