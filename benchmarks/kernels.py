"""Prove and measure the NVFP4 linear kernels: python -m benchmarks.kernels --output PATH [--quick | options]

    python -m benchmarks.kernels --layers 32B.gate_up,32B.o --tp 1 --m 1,16,64 --paths fused,dequantize \
        --passes forward --humming --output results/kernels_h200.json --budget-s 120

Every product is checked against float64 before it is timed (``kernels_proof``), our paths and the yardsticks take turns
(``kernels_timing``), and a kernel that faults or hangs costs its own row (``kernels_journal``). The result is JSON:
{"environment", "rows", "dequantize", "norm", "lora", "step", "logprob", "negative_controls", "errors", ...}; ratios are
the other's time over ours, so above 1 ours is faster. PATH.journal holds the same as it comes in, for a run that is
cut off. Exit status 1 when one of our products is wrong or failed, or a negative control passed; a failed yardstick or
a unit left out for lack of time is reported and does not fail the run.

The module imports no torch: it only starts workers and reads what they wrote.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.kernels_journal import DEVICE_LOST, PATHS, Journal, Options, State
from benchmarks.kernels_report import other_lines, table, targets
from benchmarks.shapes import LAYERS, M_VALUES, TP_SIZES

MOST_WORKERS = 8
QUICK = Options(
    layers=("32B.gate_up", "32B.down", "32B.qkv", "32B.o"),
    m=(1, 16, 64, 128, 512, 2048, 8192),
)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(int(word) for word in _words(text))
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected positive numbers with commas between them")
    return numbers


def parse(arguments: list[str]) -> tuple[Options, argparse.Namespace]:
    """The run and how to run it."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.kernels", description="Prove and measure the NVFP4 linear kernels."
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--quick", action="store_true", help="a sensible small set; other options change it")
    parser.add_argument("--layers", type=_words, help=f"of {', '.join(LAYERS)}, or a model; default 32B")
    parser.add_argument("--tp", type=_numbers, help=f"tensor-parallel sizes, such as {TP_SIZES}; default 1")
    parser.add_argument("--m", type=_numbers, help=f"rows; default {M_VALUES}")
    parser.add_argument("--paths", type=_words, help=f"of {', '.join(PATHS)}; default fused,dequantize")
    parser.add_argument("--passes", type=_words, help="of forward, dgrad; default forward")
    parser.add_argument("--humming", action="store_true", help="measure against humming-kernels as well")
    parser.add_argument("--humming-search", action="store_true", help="also try neighbours of its schedules")
    parser.add_argument("--lora", action="store_true", help="measure what an adapter adds to the fused path")
    parser.add_argument("--memory", action="store_true", help="run benchmarks/kernels_memory.py too")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="cpu proves the harness; its times mean nothing")
    parser.add_argument("--shrink", type=int, help="divide N and K by this (for a CPU)")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--budget-s", type=float, default=540.0, help="seconds after which no unit is started")
    parser.add_argument("--stall-s", type=float, default=90.0, help="seconds without progress that count as a hang")
    found = parser.parse_args(arguments)
    names = ("layers", "tp", "m", "paths", "passes", "device", "shrink", "seed")
    given: dict[str, Any] = {k: getattr(found, k) for k in names if getattr(found, k) is not None}
    given |= {k: True for k in ("humming", "humming_search", "lora", "memory") if getattr(found, k)}
    options = replace(QUICK if found.quick else Options(), **given)
    for name, allowed in (("paths", PATHS), ("passes", ("forward", "dgrad"))):
        unknown = set(getattr(options, name)) - set(allowed)
        if unknown:
            parser.error(f"--{name} {','.join(sorted(unknown))}: not one of {', '.join(allowed)}")
    return options, found


def _watch(command: list[str], journal: Path, stall_s: float, end: float) -> str | None:
    """Run a worker to its end; why it did not come to a good one ("" where it wrote that itself), or None."""
    child = subprocess.Popen(command)
    size, moved = -1, time.monotonic()
    while child.poll() is None:
        time.sleep(0.1)
        now = time.monotonic()
        found = journal.stat().st_size if journal.exists() else 0
        if found != size:
            size, moved = found, now
        if now - moved > stall_s or now > end:
            child.kill()
            child.wait()
            return f"no progress for {stall_s:.0f} s" if now <= end else "still running at the end of the time"
    return {0: None, DEVICE_LOST: ""}.get(child.returncode, f"the worker ended with status {child.returncode}")


def supervise(worker: list[str], options: str, journal: Journal, budget_s: float, stall_s: float) -> State:
    """Start workers until one comes to its end, the time is used up, or restarting does not help.

    Args:
        worker: command that takes the journal, its seconds and the options as further words.
        options: as the worker reads them.
        budget_s: seconds after which workers start nothing new; a worker still busy 60 s later is killed.
    """
    begin = time.monotonic()
    for _ in range(MOST_WORKERS):
        left = budget_s - (time.monotonic() - begin)
        if left <= 0:
            break
        command = [*worker, str(journal.path), f"{left:.1f}", options]
        reason = _watch(command, journal.path, stall_s, begin + budget_s + 60.0)
        state = journal.read()
        if reason is None and state.finished:
            return state
        if state.begun is None:
            journal.row("errors", {"where": "worker", "error": f"{reason or 'it stopped'}, outside any step"})
            break
        journal.lost(*state.begun, "the worker stopped" if reason is None else reason or None)
    return journal.read()


def result(state: State, options: Options) -> dict[str, Any]:
    """The JSON of a run."""
    return {
        "environment": state.environment,
        "options": json.loads(options.to_json()),
        **state.sections,
        "not_run_for_lack_of_time": state.skipped,
        "notes": state.notes,
        "complete": state.finished and not state.skipped,
    }


def main(arguments: list[str]) -> int:
    """Run, write, print; 0 when everything that ran was right."""
    options, found = parse(arguments)
    output: Path = found.output
    output.parent.mkdir(parents=True, exist_ok=True)
    journal = Journal(output.with_name(output.name + ".journal"))
    journal.path.unlink(missing_ok=True)
    worker = [sys.executable, "-m", "benchmarks.kernels_worker"]
    state = supervise(worker, options.to_json(), journal, found.budget_s, found.stall_s)
    output.write_text(json.dumps(result(state, options), indent=1) + "\n")
    rows = state.sections["rows"]
    lines = [*state.notes, *table([*rows, *state.sections["not_timed"]]), *other_lines(state.sections)]
    lines += targets(rows) if options.device == "cuda" else ["a CPU run: the times mean nothing"]
    if state.skipped:
        lines.append(f"not run for lack of time: {len(state.skipped)} units, from {state.skipped[0]}")
    if not state.finished:
        lines.append("INCOMPLETE: no worker came to its end")
    print("\n".join(lines))
    return 0 if state.finished and not state.sections["errors"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
