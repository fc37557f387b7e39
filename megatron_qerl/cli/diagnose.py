"""``megatron-qerl diagnose``: what the noise did to a run's policy."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megatron_qerl.cli.evaluate import positive_int

_DESCRIPTION = """\
Measure on a run's own model what its noise did.

Draws responses to training problems under several noise states, scores each under every state, and writes
diagnosis_step_N.json into the run folder: the entropy of responses within one noise state and between states, and the
gradients of one recorded batch under the three likelihood modes side by side. Nothing is learnt.
"""

_EPILOG = """\
examples:
  megatron-qerl diagnose --run runs/demo
  megatron-qerl diagnose --run runs/demo --checkpoint 20 --problems 8 --states 6 --responses 8
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``diagnose``."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("--run", required=True, type=Path, metavar="RUN_DIR", help="folder that train wrote")
    parser.add_argument("--checkpoint", default="latest", help="latest, or the step of a saved checkpoint")
    parser.add_argument("--problems", type=positive_int, default=8, metavar="N", help="training problems, the first N")
    parser.add_argument("--states", type=positive_int, default=4, metavar="M", help="noise states, 3 or more")
    parser.add_argument("--responses", type=positive_int, default=8, metavar="G", help="to a problem under each state")
    parser.add_argument("--sigma", type=float, help="of the noise; without it what was in force at the checkpoint")
    parser.add_argument("--dry-run", action="store_true", help="print the plan, do nothing")


def run(args: argparse.Namespace) -> int:
    """Measure, write, print the numbers without their definitions as JSON."""
    if args.dry_run:
        count = args.problems * args.states * args.responses
        print(f"# plan\n# run folder: {args.run}, checkpoint {args.checkpoint}")
        print(f"# draw {count} responses, score each under {args.states} noise states, three gradients of one batch")
        return 0

    from megatron_qerl.diagnosis import DiagnosisPlan, diagnose_run

    plan = DiagnosisPlan(args.problems, args.states, args.responses, args.sigma)
    result = diagnose_run(args.run, checkpoint=args.checkpoint, plan=plan)
    print(json.dumps({k: v for k, v in result.items() if k not in ("definitions", "states")}, indent=2))
    return 0
