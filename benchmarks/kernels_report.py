"""The table and the targets of a kernel run, from its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """A ratio that every selected row must reach.

    Attributes:
        text: what is asked.
        ratio: field of a row, other's time over ours.
        least: the ratio to reach.
        selects: which best rows it is about.
    """

    text: str
    ratio: str
    least: float
    selects: Callable[[Row], bool]


def _forward(*layers: str) -> Callable[[Row], bool]:
    return lambda row: row["pass"] == "forward" and row["tp"] == 1 and row["layer"] in layers


_WIDE = _forward("32B.gate_up", "32B.down")
_NARROW = _forward("32B.qkv", "32B.o")
TARGETS = (
    Target("32B gate_up, down, M <= 16: 3.0x cuBLAS", "ratio_cublas", 3.0, lambda r: _WIDE(r) and r["m"] <= 16),
    Target("32B qkv, o, M <= 16: 1.5x cuBLAS", "ratio_cublas", 1.5, lambda r: _NARROW(r) and r["m"] <= 16),
    Target("32B gate_up, down, M = 64: 2.3x cuBLAS", "ratio_cublas", 2.3, lambda r: _WIDE(r) and r["m"] == 64),
    Target("32B gate_up, down, M = 128: 1.4x cuBLAS", "ratio_cublas", 1.4, lambda r: _WIDE(r) and r["m"] == 128),
    Target("M = 2048, all layers: 0.88x cuBLAS", "ratio_cublas", 0.88, lambda r: r["m"] == 2048),
    Target("M >= 4096, all layers: 0.95x cuBLAS", "ratio_cublas", 0.95, lambda r: r["m"] >= 4096),
    Target("never slower than humming", "ratio_humming", 1.0, lambda r: True),
)


def best_rows(rows: Iterable[Row]) -> list[Row]:
    """The fastest path of each (layer, tp, M, pass), which is what the dispatcher should choose, in order."""
    best: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = (row["layer"], row["tp"], row["pass"], row["m"])
        held = best.get(key)
        if held is None or (row["us"] or float("inf")) < (held["us"] or float("inf")):
            best[key] = row
    return list(best.values())


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def table(rows: list[Row]) -> list[str]:
    """One line a (layer, tp, M): the best of our paths, and the time of the other ones at the end of the line."""
    lines = [
        f"{'layer':<22}{'tp':>3}{'M':>6} {'pass':<8}{'path':<11}{'us':>9}{'cublas':>9}{'humming':>9}"
        f"{'x cublas':>9}{'x humm.':>8}{'TB/s':>6} {'rel_err':>8}  other paths"
    ]
    for row in best_rows(rows):
        same = [r for r in rows if all(r[k] == row[k] for k in ("layer", "tp", "pass", "m")) and r is not row]
        others = [f"{r['path']} {_number(r['us'], '.1f') if r['us'] else r['not_run'] or 'no time'}" for r in same]
        speed = None if row["bytes_per_s"] is None else row["bytes_per_s"] / 1e12
        tail = row["not_run"] or "; ".join(others)
        lines.append(
            f"{row['layer']:<22}{row['tp']:>3}{row['m']:>6} {row['pass']:<8}{row['path']:<11}"
            f"{_number(row['us'], '9.1f'):>9}{_number(row['us_cublas'], '9.1f'):>9}"
            f"{_number(row['us_humming'], '9.1f'):>9}{_number(row['ratio_cublas'], '9.2f'):>9}"
            f"{_number(row['ratio_humming'], '8.2f'):>8}{_number(speed, '6.2f'):>6} "
            f"{_number(row['rel_err'], '8.1e'):>8}  {tail[:60]}"
        )
    return lines


def targets(rows: list[Row]) -> list[str]:
    """Each target with its verdict and its worst row; one without a timed row is "not measured"."""
    lines = []
    for target in TARGETS:
        found = [r for r in best_rows(rows) if target.selects(r) and r[target.ratio] is not None]
        if not found:
            lines.append(f"not measured  {target.text}")
            continue
        worst = min(found, key=lambda row: float(row[target.ratio]))
        missed = sum(row[target.ratio] < target.least for row in found)
        verdict = "met" if missed == 0 else "MISSED"
        lines.append(
            f"{verdict:<13} {target.text}: worst {worst[target.ratio]:.2f} at {worst['layer']} tp{worst['tp']} "
            f"M={worst['m']} {worst['pass']}" + (f" ({missed} of {len(found)} rows below)" if missed else "")
        )
    return lines


def other_lines(sections: dict[str, list[Row]]) -> list[str]:
    """LoRA overhead, negative controls and failures, shortly."""
    lines = []
    for row in sections["lora"]:
        lines.append(
            f"lora {row['layer']} tp{row['tp']} M={row['m']} rank {row['rank']}: +{100 * row['overhead']:.1f} % in the "
            f"kernel, +{100 * row['overhead_separate']:.1f} % after it, rel_err {row['rel_err']:.1e}"
        )
    controls = sections["negative_controls"]
    if controls:
        good = sum(row["as_it_must"] for row in controls)
        lines.append(f"negative controls: {good} of {len(controls)} as they must be")
    lines += [f"yardstick failed: {row['where']}: {row['error'][:160]}" for row in sections["yardstick_errors"]]
    lines += [f"ERROR {row['where']}: {row['error'][:300]}" for row in sections["errors"]]
    return lines
