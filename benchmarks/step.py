"""One whole training step, frozen base in NVFP4 against the same code with the base in BF16.

python -m benchmarks.step --models 7B,32B --tokens 8192 --output results/step.json --arms nvfp4,bf16

A step is the trainer's own (``Trainer.train_step``): packed sequences through the Megatron model with full
recomputation, log-probabilities from the head, clipped loss, gradients of the rank-32 adapters on all seven
projections, Megatron's optimizer. Weights are random, made on the device; both arms hold the same matrices, so their
log-probabilities must agree too. Every arm is a process of its own: its peak is its own, and one that fails is recorded
with its last words while the others go on.

Columns: ``tokens_per_s`` packed tokens over the median step; ``peak_bytes`` the most that torch's allocator had handed
out during the measured steps; ``activations_bytes`` that peak less what is allocated between steps.
``--recompute full_offload`` (the default) keeps the layers' checkpoints in host memory, in both arms.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.step_model import MODELS, Settings, install_random, random_groups, run_config

if TYPE_CHECKING:
    import torch

    from megatron_qerl.config.schema import ParallelSection, RunConfig
    from megatron_qerl.models.policy import PolicyChunks
    from megatron_qerl.noise.registry import NoiseRegistry

ARMS = ("nvfp4", "bf16")
MIN_SPEED_RATIO = 0.95
MAX_PEAK_RATIO = {"7B": 0.5}
MAX_PEAK_BYTES = {"32B": 80 << 30}


class Gauge:
    """Time and memory of the device; on a CPU there is no allocator to ask and bytes are zero."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._cuda = torch.cuda if device.type == "cuda" else None

    def synchronize(self) -> None:
        if self._cuda is not None:
            self._cuda.synchronize()

    def reset_peak(self) -> None:
        if self._cuda is not None:
            self._cuda.reset_peak_memory_stats()

    @property
    def allocated_bytes(self) -> int:
        return 0 if self._cuda is None else int(self._cuda.memory_allocated())

    @property
    def peak_bytes(self) -> int:
        return 0 if self._cuda is None else int(self._cuda.max_memory_allocated())

    @property
    def reserved_bytes(self) -> int:
        return 0 if self._cuda is None else int(self._cuda.max_memory_reserved())

    def milliseconds(self, work: Any) -> float:
        """Wall time of ``work()`` including what it left on the device."""
        self.synchronize()
        start = time.perf_counter()
        work()
        self.synchronize()
        return (time.perf_counter() - start) * 1e3


def static_bytes(model: PolicyChunks, optimizer_bytes: int) -> dict[str, int]:
    """What stays allocated between steps, by kind."""
    from te_extensions.workspace import workspace_for

    def total(trainable: bool) -> int:
        return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad is trainable)

    return {
        "weights_packed": sum(m.frozen.packed_bytes for m in model.modules() if hasattr(m, "install")),
        "embedding_head_norms": total(False),
        "adapters": total(True),
        "gradients_and_optimizer": optimizer_bytes,
        "workspace": workspace_for(model.inv_freq.device).nbytes,
    }


def run_arm(model_name: str, arm: str, settings: Settings, layout: ParallelSection | None = None) -> dict[str, Any]:
    """Build, warm up and measure one arm in this process, one of those that ``layout`` needs."""
    hf_config = MODELS[model_name]
    from megatron_qerl.config.schema import ParallelSection
    from megatron_qerl.models.build import build_policy
    from megatron_qerl.models.shape import read_shape
    from megatron_qerl.models.walk import expected_norms, norms
    from megatron_qerl.noise.registry import NoiseRegistry
    from megatron_qerl.parallel.setup import initialize

    begin = time.perf_counter()
    layout = layout or ParallelSection()
    parallel = initialize(layout, "auto", 1)
    config = run_config(settings)
    shape = read_shape(hf_config, Path("random"))
    model = build_policy(
        hf_config,
        config.model,
        layout,
        config.lora,
        seed=1,
        recompute=settings.recompute,
        shares_prompts=False,
    )
    install_random(model, arm, seed=1)
    whole = layout.pipeline_model_parallel_size == 1
    registry = NoiseRegistry(norms(model, shape), expected_norms(shape), config.noise, 1, complete=whole)
    distributed = layout.spreads_optimizer(parallel.data_size)
    return _measure(model, registry, config, settings, distributed=distributed) | {
        "attention": asdict(model.attention),
        "arm_s": time.perf_counter() - begin,
    }


def _measure(
    model: PolicyChunks, registry: NoiseRegistry, config: RunConfig, settings: Settings, *, distributed: bool
) -> dict[str, Any]:
    from megatron_qerl.trainer.optimizer import AdapterOptimizer
    from megatron_qerl.trainer.step import Trainer

    optimizer = AdapterOptimizer(model, config.optimizer, config.train.steps, distributed=distributed)
    trainer = Trainer(model, registry, optimizer, config)
    gauge = Gauge(trainer.device)
    noise = registry.state(50, 100)
    model.train()
    logprobs = trainer.probe(random_groups(settings, model.real_vocab_size, None), noise)
    groups = random_groups(settings, model.real_vocab_size, logprobs.cpu())
    warm_up_ms = gauge.milliseconds(lambda: trainer.train_step(groups, noise))
    resting = gauge.allocated_bytes
    gauge.reset_peak()
    forward_ms = gauge.milliseconds(lambda: trainer.probe(groups, noise))
    forward_peak = gauge.peak_bytes
    gauge.reset_peak()
    reports: list[Any] = []
    times = [
        gauge.milliseconds(lambda: reports.append(trainer.train_step(groups, noise))) for _ in range(settings.steps)
    ]
    peak = gauge.peak_bytes
    result = {
        "step_ms": median(times),
        "steps_ms": times,
        "warm_up_ms": warm_up_ms,
        "forward_ms": forward_ms,
        "tokens_per_s": settings.tokens / median(times) * 1e3,
        "peak_bytes": peak,
        "peak_reserved_bytes": gauge.reserved_bytes,
        "forward_peak_bytes": forward_peak,
        "resting_bytes": resting,
        "static_bytes": static_bytes(model, optimizer.state_bytes),
        "activations_bytes": peak - resting,
        "mean_logprob": float(logprobs.double().mean()),
        "gradient_norm": reports[-1].updates[0].gradient_norm,
        "update_norm": reports[-1].updates[0].update_norm,
    }
    if settings.profile:
        result["profile"] = _profile(lambda: trainer.train_step(groups, noise))
    return result


def _profile(step: Any) -> list[str]:
    """The kernels that take most of a step, as lines of text."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        step()
    return str(recorded.key_averages().table(sort_by="cuda_time_total", row_limit=25)).splitlines()


def spawn_arm(model_name: str, arm: str, settings: Settings, timeout_s: float) -> dict[str, Any]:
    """``run_arm`` in a process of its own; a failure becomes {"error": its last lines}."""
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "arm.json", Path(folder) / "log"
        command = [sys.executable, "-m", "benchmarks.step", "--arm", f"{model_name}:{arm}", "--output", str(result)]
        for key, value in asdict(settings).items():
            flag = f"--{key.replace('_', '-')}"
            command += ([flag] if value else []) if isinstance(value, bool) else [flag, str(value)]
        try:
            with log.open("w") as stream:
                code = subprocess.run(command, stdout=stream, stderr=stream, timeout=timeout_s, check=False).returncode
        except subprocess.TimeoutExpired:
            code = None
        last = log.read_text(errors="replace").splitlines()[-15:]
        if code == 0:
            found: dict[str, Any] = json.loads(result.read_text())
            return found
        return {"error": f"timed out after {timeout_s:g} s" if code is None else f"exit status {code}", "log": last}


def row(model_name: str, settings: Settings, arms: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One line of the table: the two arms beside each other, and whether the targets are met."""
    ours, base = arms.get("nvfp4", {}), arms.get("bf16", {})
    speed = peak = None
    if "step_ms" in ours and "step_ms" in base:
        speed = ours["tokens_per_s"] / base["tokens_per_s"]
        peak = ours["peak_bytes"] / base["peak_bytes"] if base["peak_bytes"] else None
    targets: dict[str, bool | None] = {"speed": None if speed is None else speed >= MIN_SPEED_RATIO}
    if model_name in MAX_PEAK_RATIO:
        targets["peak_ratio"] = None if peak is None else peak <= MAX_PEAK_RATIO[model_name]
    if model_name in MAX_PEAK_BYTES:
        targets["peak"] = ours["peak_bytes"] < MAX_PEAK_BYTES[model_name] if "peak_bytes" in ours else None
    return {
        "model": model_name,
        "tokens": settings.tokens,
        "tokens_per_s_ratio_bf16": speed,
        "peak_bytes": ours.get("peak_bytes"),
        "peak_ratio_bf16": peak,
        "step_ms": {name: arm.get("step_ms") for name, arm in arms.items()},
        "targets_met": targets,
        "arms": arms,
    }


def summary(model_name: str, arm: str, found: dict[str, Any]) -> str:
    """An arm in a line, or its last words."""
    if "error" in found:
        return "\n  ".join((f"{model_name} {arm}: {found['error']}", *found["log"]))
    return (
        f"{model_name} {arm}: {found['step_ms']:.1f} ms a step, {found['tokens_per_s']:.0f} tokens/s, "
        f"peak {found['peak_bytes'] / 2**30:.2f} GiB"
    )


def surroundings() -> dict[str, Any]:
    """What the numbers depend on."""
    import torch

    from benchmarks.kernels_environment import environment
    from megatron_qerl.bookkeeping import versions

    return environment(torch.device("cuda" if torch.cuda.is_available() else "cpu")) | {"versions": versions()}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="7B,32B", help=f"comma-separated, of {', '.join(MODELS)}")
    parser.add_argument("--arms", default=",".join(ARMS), help=f"comma-separated, of {', '.join(ARMS)}")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto", help="cpu hides every GPU")
    parser.add_argument("--tiny", action="store_true", help="the tiny model and few tokens, to prove the script")
    parser.add_argument("--timeout-s", type=float, default=100.0, help="limit of one arm")
    parser.add_argument("--arm", help="MODEL:ARM to run in this process; used by the script itself")
    for key, value in asdict(Settings()).items():
        flag = f"--{key.replace('_', '-')}"
        if isinstance(value, bool):
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=type(value), default=value)
    parsed = parser.parse_args(argv)
    for name, known in (("models", MODELS), ("arms", ARMS)):
        unknown = set(getattr(parsed, name).split(",")) - set(known)
        if unknown:
            parser.error(f"--{name}: {', '.join(sorted(unknown))} unknown; choose from {', '.join(known)}")
    return parsed


def main(argv: list[str] | None = None) -> None:
    """Run the arms one after another and write the table after each model."""
    options = parse(argv)
    if options.device == "cpu":
        import os

        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    settings = Settings(**{key: getattr(options, key) for key in asdict(Settings())})
    if options.tiny:
        options.models = "tiny"
        settings = Settings(**asdict(settings) | {"tokens": 64, "sequence": 16, "steps": 2, "rank": 4})
    if options.arm:
        logging.basicConfig(level=logging.INFO)
        model_name, arm = options.arm.split(":")
        options.output.write_text(json.dumps(run_arm(model_name, arm, settings)))
        return
    # Before the arms: a machine that cannot say what it is must not cost a measurement.
    around = surroundings()
    rows = []
    for model_name in options.models.split(","):
        arms = {}
        for arm in options.arms.split(","):
            arms[arm] = spawn_arm(model_name, arm, settings, options.timeout_s)
            print(summary(model_name, arm, arms[arm]), flush=True)
        rows.append(row(model_name, settings, arms))
        print({k: v for k, v in rows[-1].items() if k != "arms"}, flush=True)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        found = {"environment": around, "settings": asdict(settings), "rows": rows}
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
