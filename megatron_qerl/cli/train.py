"""``megatron-qerl train``: run the loop that a config describes."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_qerl.cli.common import claim_run_folder, is_first_process
from megatron_qerl.cli.config_args import add_config_arguments, config_from_args

if TYPE_CHECKING:
    from megatron_qerl.config.schema import ParallelSection, RunConfig

_DESCRIPTION = """\
Train a LoRA adapter with reinforcement learning on a frozen NVFP4 base.

The run writes everything into output_dir/name: config.yaml (every key with the value used), metrics.jsonl,
checkpoints and the report. A folder that holds an earlier run is refused unless you say what to do with it.

SIGUSR1 to a rank, or the appearance of --stop-file, asks the run to stop: it finishes or drops the step it is in,
saves, and exits with 75. With --resume it goes on as if nothing had happened.
"""

_EPILOG = """\
examples:
  megatron-qerl train configs/demo.yaml
  megatron-qerl train configs/demo.yaml --dry-run
  megatron-qerl train configs/demo.yaml train.steps=50 optimizer.learning_rate=1e-4 run.name=longer
  megatron-qerl train configs/demo.yaml --resume

on several ranks, here two that share each weight (the command's arguments stay the same on one machine or many):
  torchrun --nproc-per-node 2 -m megatron_qerl.cli.main train configs/demo.yaml parallel.tensor_model_parallel_size=2
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``train``."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    add_config_arguments(parser)
    parser.add_argument(
        "--stop-file", type=Path, default=None, metavar="FILE", help="stop, save and exit with 75 once FILE exists"
    )
    folder = parser.add_mutually_exclusive_group()
    folder.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of this run, if any")
    folder.add_argument("--overwrite", action="store_true", help="delete this run's folder and start anew")


def run(args: argparse.Namespace) -> int:
    """Validate, claim the run folder, train."""
    from megatron_qerl.config.availability import refuse_unbuilt
    from megatron_qerl.config.loader import RESOLVED_CONFIG_FILENAME, resolved_yaml
    from megatron_qerl.config.schema import RunConfig

    config = config_from_args(args, RunConfig)
    run_dir = config.run.output_dir / config.run.name
    if args.dry_run:
        refuse_unbuilt(config)
        if is_first_process():
            print(resolved_yaml(config), end="")
            print("\n".join(f"# {line}" for line in plan(config, resume=args.resume, overwrite=args.overwrite)))
        return 0
    if is_first_process():
        claim_run_folder(run_dir, marker=RESOLVED_CONFIG_FILENAME, resume=args.resume, overwrite=args.overwrite)

    from megatron_qerl.controller import train

    written = train(config, resume=args.resume, stop_file=args.stop_file)
    if is_first_process():
        print(f"run folder: {written}")
        print(f"report: {written / 'report.html'}")
    return 0


def plan(config: RunConfig, *, resume: bool, overwrite: bool) -> Iterator[str]:
    """What ``train`` would do, one fact a line; reads the disk, changes nothing."""
    yield "plan"
    run_dir = config.run.output_dir / config.run.name
    yield f"run folder: {run_dir} ({_folder_fate(run_dir, resume=resume, overwrite=overwrite)})"
    here = "found" if (config.model.path / "config.json").is_file() else "NOT FOUND here"
    yield f"base model: {config.model.path} ({here}), activations in {config.model.dtype}"
    for name, dataset in (("training", config.data.train), ("evaluation", config.data.eval)):
        source = str(dataset.path) if dataset.path is not None else f"generated, split {dataset.split}"
        missing = ", NOT FOUND here" if dataset.path is not None and not dataset.path.is_file() else ""
        yield f"{name} problems: {dataset.kind} ({source}{missing})"
    yield f"ranks: {_layout(config.parallel)}"
    rollout, train = config.rollout, config.train
    per_step = rollout.prompts_per_step * rollout.group_size
    updates = train.steps * train.minibatches_per_step
    yield f"steps: {train.steps}, each {rollout.prompts_per_step} prompts x {rollout.group_size} responses = {per_step}"
    yield f"responses: {train.steps * per_step}, at most {train.steps * per_step * rollout.max_new_tokens} new tokens"
    sampling = config.algorithm.dynamic_sampling
    if sampling.enabled:
        yield f"dynamic sampling: up to {sampling.max_refills} more rounds a step while groups lack reward spread"
    yield f"optimizer updates: {updates} at learning rate {config.optimizer.learning_rate:g}"
    yield f"objective: {config.algorithm.name}, likelihood {config.algorithm.likelihood}"
    yield from _noise_plan(config)
    yield f"checkpoints: every {config.checkpoint.interval_steps} steps, the newest {config.checkpoint.keep} are kept"
    when = f"every {config.eval.interval_steps} steps" if config.eval.interval_steps else "before and after training"
    yield f"evaluation: {when}, {' and '.join(config.eval.modes)}"


def _layout(layout: ParallelSection) -> str:
    """Sizes above one, and what the number of processes must be."""
    sizes = {
        "tensor": layout.tensor_model_parallel_size,
        "pipeline": layout.pipeline_model_parallel_size,
        "context": layout.context_parallel_size,
    }
    copy = math.prod(sizes.values())
    named = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    return f"{copy} a copy of the policy ({named}), a multiple of it in all" if named else "one copy of the policy each"


def _noise_plan(config: RunConfig) -> Iterator[str]:
    from megatron_qerl.noise.schedule import sigma_of_stage, stage_of_step

    noise, steps = config.noise, config.train.steps
    if not noise.enabled:
        yield "noise: off"
        return
    yield f"noise: {noise.application}, one draw a {noise.scope}, on {', '.join(noise.roles)}"
    first_steps: dict[int, int] = {}
    for step in range(steps):
        first_steps.setdefault(stage_of_step(step, steps, noise.stages), step)
    sigmas = (f"{step}: {sigma_of_stage(noise, stage):.2g}" for stage, step in first_steps.items())
    yield f"sigma from step: {', '.join(sigmas)}"


def _folder_fate(run_dir: Path, *, resume: bool, overwrite: bool) -> str:
    if not run_dir.exists() or not any(run_dir.iterdir()):
        return "new"
    if resume:
        return "holds a run, would be resumed"
    return "holds a run, would be deleted" if overwrite else "holds a run: would be refused, see --resume, --overwrite"
