"""``megatron-qerl doctor``: what this machine can run, what is missing, and how to get it."""

from __future__ import annotations

import argparse
import io
import math
import os
import platform
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_qerl.backends import Finding

_DESCRIPTION = """\
Say what this machine can run, what is missing and how to get it.

Every package is imported and put to a small use in a process of its own, so a broken one cannot take doctor with it.
Nothing is installed or changed. The first run takes a minute or two, because large packages are read from disk.

With --cluster it is the first step of a job instead: run on every node at the same time, it checks GPUs, driver,
versions, disks, clocks, ports, collectives, the model's files and the memory plan, and names the node that is bad.
megatron-qerl launch writes that command into its scripts.

Start here when an installation is new or a run refuses to start. Rows marked "required" are needed to quantize, train
and evaluate on a CPU; all others add speed, engines or services, and you can do without them.
"""

_EPILOG = """\
exit code: 0 when everything required is usable, 1 when something required is not, 2 when an argument is wrong;
with --cluster 3 when a node is bad.

examples:
  megatron-qerl doctor
  megatron-qerl doctor --json
  megatron-qerl doctor --cluster configs/cluster/hosts.yaml --run-config configs/demo.yaml --nodes localhost
  megatron-qerl doctor --engine-python ~/envs/sglang/bin/python --engine-python ~/envs/vllm/bin/python
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``doctor``."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("--json", action="store_true", help="print JSON for programs, not a table for people")
    parser.add_argument(
        "--engine-python",
        dest="engine_pythons",
        action="append",
        type=Path,
        default=[],
        metavar="PATH",
        help="interpreter of another environment that holds sglang or vllm, which never share one with the trainer; "
        "may be repeated",
    )
    parser.add_argument(
        "--timeout-s", type=positive_seconds, default=120.0, metavar="SECONDS", help="time limit for each trial"
    )
    parser.add_argument("--dry-run", action="store_true", help="list what would be tried, try nothing")
    group = parser.add_argument_group("nodes of a job")
    group.add_argument("--cluster", metavar="FILE", help="check this node of a cluster, see configs/cluster")
    group.add_argument("--run-config", metavar="FILE", help="the run that is to start, with --cluster")
    group.add_argument("--report", type=Path, default=Path("preflight"), metavar="DIR", help="shared folder")
    group.add_argument("--nodes", metavar="A,B", help="names of all nodes, those meet on the first; default: this one")
    group.add_argument("--node-index", type=int, default=None, metavar="I", help="default: SLURM_NODEID, or 0")
    group.add_argument("--port", type=int, default=29600, metavar="P", help="first of eight ports")


def run(args: argparse.Namespace) -> int:
    """Try everything and print the findings; returns the exit code."""
    from megatron_qerl.backends import COMPONENTS, as_json, cpu_path_usable, probe_all

    if args.cluster is not None:
        return _check_node(args)
    if args.dry_run:
        for component in COMPONENTS:
            print(f"{component.name}: {component.purpose}{' (required)' if component.required else ''}")
        for python in (Path(sys.executable), *args.engine_pythons):
            print(f"sglang, vllm: in {python}")
        print("slurm: submitting jobs to a cluster")
        return 0
    print("trying each component, which can take a minute or two ...", file=sys.stderr, flush=True)
    findings = probe_all(args.engine_pythons, args.timeout_s)
    print(as_json(findings) if args.json else as_text(findings))
    return 0 if cpu_path_usable(findings) else 1


def _check_node(args: argparse.Namespace) -> int:
    """Preflight of this node; see ``megatron_qerl.launching.preflight``."""
    from megatron_qerl.config.cluster import ClusterConfig
    from megatron_qerl.config.loader import load_config
    from megatron_qerl.config.schema import RunConfig
    from megatron_qerl.errors import UserError
    from megatron_qerl.launching.preflight.run import Place, preflight

    if args.run_config is None:
        raise UserError("--run-config", None, "is needed with --cluster", "Name the config of the run to be started")
    cluster = load_config(args.cluster, model=ClusterConfig)
    config: RunConfig = load_config(args.run_config)
    nodes = tuple(args.nodes.split(",")) if args.nodes else (platform.node(),)
    index = int(os.environ.get("SLURM_NODEID", "0")) if args.node_index is None else args.node_index
    if len(set(nodes)) < len(nodes) or not 0 <= index < len(nodes):
        rule = f"must be different names, more than --node-index {index} of them"
        raise UserError("--nodes", args.nodes, rule, "Name all nodes of the job, first the one that all can reach")
    if args.dry_run:
        print(f"would check node {nodes[index]}, {index + 1} of {len(nodes)}, and meet the others on {nodes[0]}")
        return 0
    files = (Path(args.run_config).absolute(), Path(args.cluster).absolute())
    return preflight(Place(nodes, index, args.port, args.report), cluster, config, files)


def as_text(findings: Sequence[Finding], width: int | None = None) -> str:
    """A table, what to do about the rows that are not usable, and the verdict."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from megatron_qerl.backends import cpu_path_usable

    table = Table("component", "needed for", "usable", "what was found")
    for finding in findings:
        usable = "yes" if finding.usable else ("NO (required)" if finding.required else "no")
        table.add_row(*(escape(text) for text in (finding.name, finding.purpose, usable, finding.found)))
    columns = width if width is not None else max(80, shutil.get_terminal_size((120, 24)).columns)
    drawn = io.StringIO()
    Console(file=drawn, width=columns, no_color=True).print(table)
    lines = [f"Python {platform.python_version()} ({sys.executable})", drawn.getvalue().rstrip("\n")]
    for heading, required in (("Required, and not usable:", True), ("Optional, and not usable here:", False)):
        rows = [finding for finding in findings if not finding.usable and finding.required == required]
        lines += [heading] if rows else []
        for finding in rows:
            lines.append(_wrapped(f"* {finding.name}: {finding.reason}.", columns))
            lines.append(_wrapped(f"  {finding.remedy}.", columns))
    lines.append(
        "The CPU path is ready: quantize, train, eval, export and report can run here."
        if cpu_path_usable(findings)
        else "The CPU path is NOT ready: mend the required rows first."
    )
    return "\n".join(lines)


def _wrapped(text: str, columns: int) -> str:
    return textwrap.fill(
        text, columns, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


def positive_seconds(text: str) -> float:
    """argparse type: a finite number of seconds above zero."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above zero, not {text!r}")
    return seconds
