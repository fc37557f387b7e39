"""``megatron-qerl report``: a run's metrics as one HTML file."""

from __future__ import annotations

import argparse
from pathlib import Path

_DESCRIPTION = """\
Write (again) the report of a run from its metrics.jsonl; training writes it at its end by itself.
"""

_EPILOG = """\
example:
  megatron-qerl report runs/demo
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``report``."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="folder that train wrote")
    parser.add_argument("--dry-run", action="store_true", help="print the run's config and the plan, do nothing")


def run(args: argparse.Namespace) -> int:
    """Check that the folder is a run's, write the report, say where it is."""
    from megatron_qerl.config.loader import load_resolved_config, resolved_yaml

    config = load_resolved_config(args.run)
    if args.dry_run:
        print(resolved_yaml(config), end="")
        print(f"# plan\n# write the report of {args.run}")
        return 0

    from megatron_qerl.report.html import write_report

    print(f"report: {write_report(args.run)}")
    return 0
