"""``megatron-qerl experiment``: several arms and seeds as one command, with one table at the end."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_qerl.cli.config_args import add_config_arguments, config_from_args

_DESCRIPTION = """\
Run an experiment: arms that differ in a few keys of one recipe, with several seeds, at equal generated tokens.

First each arm's learning rate is searched (a common grid, then equally many trials around each arm's best), then the
final runs are made and read. Every run is an ordinary run folder. The same command goes on with an experiment that was
interrupted; finished runs are not made again, and a changed config is refused.
"""

_EPILOG = """\
examples:
  megatron-qerl experiment configs/experiments/five_arms.yaml --dry-run
  megatron-qerl experiment configs/experiments/five_arms.yaml
  megatron-qerl experiment configs/experiments/five_arms.yaml seeds=[1,2,3] experiment.name=three_seeds
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``experiment``."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Validate, claim the experiment's folder, run what is missing, write the results."""
    from megatron_qerl.config.loader import resolved_yaml
    from megatron_qerl.experiment.config import ExperimentConfig
    from megatron_qerl.experiment.plan import Experiment, describe

    config = config_from_args(args, ExperimentConfig)
    experiment = Experiment.open(config, Path(args.config))
    data = experiment.recipe.data.eval.path
    if not args.dry_run or data is None or data.is_file():
        experiment.check_split()
    if args.dry_run:
        print(resolved_yaml(config), end="")
        print("\n".join(f"# {line}" for line in ["plan", *describe(experiment)]))
        return 0

    from megatron_qerl.experiment.report import REPORT_HTML, write_results
    from megatron_qerl.experiment.results import RESULTS_FILE, build
    from megatron_qerl.experiment.runner import Runner

    experiment.check_models()
    experiment.claim()
    finished = Runner(experiment, lambda line: print(f"experiment: {line}", flush=True)).run()
    write_results(experiment.folder, build(experiment, finished))
    print(f"results: {experiment.folder / RESULTS_FILE}")
    print(f"report: {experiment.folder / REPORT_HTML}")
    return 0
