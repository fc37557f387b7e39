"""``megatron-qerl launch``: start a run on a cluster, from the same config that ``train`` takes."""

from __future__ import annotations

import argparse
import subprocess
from typing import TYPE_CHECKING

from megatron_qerl.cli.config_args import add_config_arguments, config_from_args

if TYPE_CHECKING:
    from megatron_qerl.config.schema import RunConfig
    from megatron_qerl.launching.matrix import Cell

_DESCRIPTION = """\
Write the script that starts a run on a cluster, and submit it if asked to.

The config is frozen into log_dir/NAME/launch-TIME beside the script, so later changes of the file do not reach a job
that waits. Every attempt checks its nodes first, saves before the time limit, is requeued and resumes.
"""

_EPILOG = """\
examples:
  megatron-qerl launch configs/qwen2.5-32b-bigmath.yaml --cluster configs/cluster/example_slurm.yaml --dry-run
  megatron-qerl launch configs/qwen2.5-32b-bigmath.yaml --cluster my.yaml --submit
  megatron-qerl launch configs/qwen2.5-7b-gsm8k.yaml --cluster my.yaml --submit --vary run.seed=[1,2,3] \\
      --vary noise.enabled=[true,false]
  megatron-qerl launch configs/qwen2.5-7b-gsm8k.yaml --cluster my.yaml --submit --chain 4
"""


def _links(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above zero, not {text!r}")
    return count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``launch``."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    add_config_arguments(parser)
    parser.add_argument("--cluster", required=True, metavar="FILE", help="YAML file, see configs/cluster")
    parser.add_argument("--submit", action="store_true", help="hand the script to sbatch; on plain hosts, run it")
    parser.add_argument("--resume", action="store_true", help="run folders may hold an earlier attempt, to go on with")
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="section.key=[a,b]",
        help="start a job array of all combinations; may be repeated",
    )
    parser.add_argument("--after", default=None, metavar="DEPENDENCY", help="as sbatch takes it, such as afterok:1234")
    parser.add_argument(
        "--chain", type=_links, default=1, metavar="N", help="N jobs in a row instead of requeueing one"
    )


def run(args: argparse.Namespace) -> int:
    """Render, write, submit."""
    from megatron_qerl.config.cluster import ClusterConfig
    from megatron_qerl.config.loader import load_config
    from megatron_qerl.errors import UserError
    from megatron_qerl.launching.job import plan_job, write_job
    from megatron_qerl.launching.matrix import cells
    from megatron_qerl.launching.script import hosts_script, slurm_script
    from megatron_qerl.launching.submit import submit

    cluster = load_config(args.cluster, model=ClusterConfig)
    if cluster.kind == "hosts" and (args.after or args.chain > 1):
        raise UserError("--after, --chain", args.after or args.chain, "need a scheduler", "Leave them out")
    configs = [_cell_config(args, cell) for cell in cells(args.vary)]
    name = configs[0].run.name if len(configs) == 1 else configs[0].run.name.rpartition("-")[0]
    job = plan_job(name, cluster, configs, resume=args.resume)
    slurm = cluster.kind == "slurm"
    script = slurm_script(job, requeue=args.chain == 1) if slurm else hosts_script(job)
    if args.dry_run:
        print(script, end="")
        return 0
    path = write_job(job, script)
    print(f"script: {path}")
    if not args.submit:
        print(f"start it with: {'sbatch' if slurm else 'bash'} {path}")
        return 0
    if not slurm:
        return subprocess.run(["bash", str(path)], check=False).returncode
    print(f"jobs: {' '.join(submit(path, after=args.after, links=args.chain))}")
    print(f"logs of the newest attempt: {job.log_root / 'latest'}")
    return 0


def _cell_config(args: argparse.Namespace, cell: Cell) -> RunConfig:
    """The config of one run of the matrix, as valid as any other."""
    from megatron_qerl.config.availability import refuse_unbuilt
    from megatron_qerl.config.loader import load_config
    from megatron_qerl.config.schema import RunConfig

    config = config_from_args(args, RunConfig)
    if cell.suffix:
        overrides = [*args.overrides, *args.set_overrides, *cell.overrides]
        options = {"run.name": config.run.name + cell.suffix}
        config = load_config(args.config, args.overlays, overrides, RunConfig, options=options)
    refuse_unbuilt(config)
    return config
