"""``megatron-qerl eval``: measure a trained policy on held-out problems."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megatron_qerl.cli.common import is_first_process

_DESCRIPTION = """\
Measure the policy of a run on its evaluation problems.

By default it is the policy that would be deployed: base and adapter, without noise. With --noisy the policy under
the noise in force at the checkpoint is measured too, so that both can be compared. The numbers go to stdout as JSON.
"""

_EPILOG = """\
examples:
  megatron-qerl eval --run runs/demo
  megatron-qerl eval --run runs/demo --checkpoint 20 --mode greedy --mode sampled --noisy
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``eval``."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("--run", required=True, type=Path, metavar="RUN_DIR", help="folder that train wrote")
    parser.add_argument("--checkpoint", default="latest", help="latest, or the step of a saved checkpoint")
    parser.add_argument(
        "--mode",
        dest="modes",
        action="append",
        choices=("greedy", "sampled"),
        help="how tokens are chosen; may be repeated; without it the run's eval.modes",
    )
    parser.add_argument("--noisy", action="store_true", help="also measure under the checkpoint's noise")
    parser.add_argument(
        "--problems", type=positive_int, metavar="N", help="only the first N; without it as the run did"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the run's config and the plan, do nothing")


def run(args: argparse.Namespace) -> int:
    """Read the run's config, evaluate, print the numbers as JSON."""
    from megatron_qerl.config.loader import load_resolved_config, resolved_yaml

    config = load_resolved_config(args.run)
    modes = tuple(dict.fromkeys(args.modes)) if args.modes else config.eval.modes
    problems = args.problems if args.problems is not None else config.eval.problems
    if args.dry_run:
        policies = "clean and noisy" if args.noisy else "clean"
        print(resolved_yaml(config), end="")
        print(f"# plan\n# run folder: {args.run}, checkpoint {args.checkpoint}")
        print(f"# policies: {policies}; decoding: {', '.join(modes)}; problems: {problems or 'all'}")
        return 0

    from megatron_qerl.evaluation import evaluate_run

    result = evaluate_run(args.run, checkpoint=args.checkpoint, modes=modes, noisy=args.noisy, problems=problems)
    if is_first_process():
        print(json.dumps(result, indent=2))
    return 0


def positive_int(text: str) -> int:
    """argparse type: a whole number above zero."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a whole number above zero, not {text!r}")
    return int(text)
