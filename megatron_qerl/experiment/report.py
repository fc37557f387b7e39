"""The results as tables: once as Markdown, once as an HTML page that holds everything, from the same rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from megatron_qerl.experiment.curve import survival_svg
from megatron_qerl.experiment.published import NO_MATCH
from megatron_qerl.experiment.results import RESULTS_FILE, SUMMARY_FILE, summary
from megatron_qerl.metrics.intervals import CONFIDENCE
from megatron_qerl.report.summary import write_text
from megatron_qerl.report.template import STYLE

REPORT_HTML, REPORT_MARKDOWN = "report.html", "report.md"
UNITS = {"tokens": "completion tokens", "wall_s": "wall clock (s)", "device_hours": "GPU-hours or core-hours"}


@dataclass(frozen=True)
class Table:
    """One table with what has to be known to read it; ``figure`` is SVG for the page alone."""

    title: str
    notes: tuple[str, ...]
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    figure: str = ""


def write_results(folder: Path, results: Mapping[str, Any]) -> None:
    """results.json, summary.json, report.md and report.html, each whole or not at all.

    Raises:
        FaultError: the disk refuses.
    """
    write_text(folder / RESULTS_FILE, json.dumps(results, indent=1, allow_nan=False) + "\n")
    write_text(folder / SUMMARY_FILE, json.dumps(summary(results), indent=1, allow_nan=False) + "\n")
    write_text(folder / REPORT_MARKDOWN, markdown(results))
    write_text(folder / REPORT_HTML, page(results))


def tables(results: Mapping[str, Any]) -> list[Table]:
    """All tables in the order of the report."""
    found = [_accuracy(results), _runs(results), _benchmarks(results)]
    if results["comparisons"]:
        found.append(_comparisons(results))
    found += _times(results)
    if any(arm["trials"] for arm in results["tuning"].values()):
        found.append(_tuning(results))
    if results["matched_temperatures"]:
        found.append(_temperatures(results))
    return [*found, _settings(results), _definitions(results)]


def cautions(results: Mapping[str, Any]) -> Iterator[str]:
    """What the numbers do not show."""
    seeds, budget = len(results["seeds"]), results["budget"]
    yield (
        f"Intervals of accuracies and differences ({CONFIDENCE:.0%}) cover the choice of problems, with the "
        f"{seeds} training seed{'s' if seeds > 1 else ''} taken as given."
    )
    if seeds < 3:
        yield "With fewer than three seeds a difference between arms cannot be told from a difference between seeds."
    wanted, reached = budget["completion_tokens_wanted"], budget["completion_tokens"]
    if wanted is not None and reached < wanted:
        yield f"A run ended before {wanted} completion tokens, so all runs are read at {reached}."
    yield (
        f"Runs are read after the last stored step within {reached} completion tokens, so they differ by up to one "
        "step's tokens. All follow the schedules of the full number of steps, which the reading may cut."
    )
    yield (
        "Arms of a seed take prompts in the same order. An arm that refills more groups is further ahead in it after "
        "the same number of steps."
    )
    if not any(arm["published"] for arm in results["arms"].values()):
        yield f"Beside the paper: {NO_MATCH} (model, data, objective, evaluation and arm would have to be the same)."


def _accuracy(results: Mapping[str, Any]) -> Table:
    rows = []
    for arm in results["arms"].values():
        figure = arm["published"]
        beside = NO_MATCH
        if figure is not None:
            differs = f"; differs: {', '.join(figure['differs'])}" if figure["differs"] else ""
            beside = f"{figure['percent']} % ({figure['table']}{differs})"
        over = arm["accuracy_after"]["over_seeds"]
        rows.append((
            arm["title"], _interval(arm["accuracy_before"]), _interval(arm["accuracy_after"]),
            _interval(over) if over["low"] is not None else "one seed", f"{arm['learning_rate']:g}",
            f"{arm['temperature']:.4g}", beside,
        ))  # fmt: skip
    header = ("arm", "accuracy before", "accuracy after", "after, over seeds", "learning rate", "temperature", "paper")
    return Table("Accuracy", tuple(cautions(results)), header, tuple(rows))


def _runs(results: Mapping[str, Any]) -> Table:
    rows = tuple(
        (
            arm["title"], seed, _interval(run["accuracy_before"]), _interval(run["accuracy_after"]),
            _number(run["mixed_group_fraction"]), f"{run['tokens']:,}", f"{run['wall_s']:.1f}",
            f"{run['device_hours']:.3g}", f"{run['step']} of {run['steps_trained']}",
        )
        for arm in results["arms"].values()
        for seed, run in arm["seeds"].items()
    )  # fmt: skip
    header = (
        "arm", "seed", "accuracy before", "accuracy after", "mixed groups", "tokens", "wall (s)", "device-hours",
        "read at step",
    )  # fmt: skip
    return Table("Runs", (), header, rows)


def _benchmarks(results: Mapping[str, Any]) -> Table:
    arms = results["arms"].values()
    sources = sorted({source for arm in arms for source in arm["accuracy_after"]["benchmarks"]})
    rows = tuple(
        (arm["title"], source, _interval(arm["accuracy_before"]["benchmarks"][source]),
         _interval(arm["accuracy_after"]["benchmarks"][source]))
        for arm in arms
        for source in sources
    )  # fmt: skip
    return Table("By benchmark", (), ("arm", "benchmark", "accuracy before", "accuracy after"), rows)


def _comparisons(results: Mapping[str, Any]) -> Table:
    titles = {name: arm["title"] for name, arm in results["arms"].items()}
    rows = []
    for pair in results["comparisons"]:
        name = f"{titles[pair['first']]} - {titles[pair['second']]}"
        after, over = pair["after"], pair["after"]["over_seeds"]
        seeds = ", ".join(f"{seed}: {gap:+.3f}" for seed, gap in after["per_seed"].items())
        wide = _signed(over) if over["low"] is not None else "one seed"
        rows.append((name, "all", _signed(pair["before"]), _signed(after), wide, seeds))
        if len(pair["benchmarks_after"]) > 1:
            rows += [(name, s, "", _signed(gap), "", "") for s, gap in pair["benchmarks_after"].items()]
    notes = (
        "Same seeds, same problems. An interval that holds 0 shows no difference; it does not show that there is none.",
    )
    header = ("first - second", "benchmark", "before", "after", "after, over seeds", "after, each seed")
    return Table("Differences", notes, header, tuple(rows))


def _times(results: Mapping[str, Any]) -> Iterator[Table]:
    times, titles = results["time_to_quality"], {name: arm["title"] for name, arm in results["arms"].items()}
    for unit, label in UNITS.items():
        horizon = times[unit]["horizon"]
        rows, curves = [], {}
        for name, arm in times[unit]["arms"].items():
            mean = arm["restricted_mean"]
            median = "not reached" if arm["median"] is None else f"{arm['median']:.4g}"
            rows.append((titles[name], _restricted(mean), median, str(mean["reached"]), str(mean["censored"])))
            curves[titles[name]] = arm
        limit = f"{label}, restricted to {horizon:.4g}"
        notes = (f"Until accuracy {times['quality']:g}; {limit}. Censored: not reached by then.",)
        figure = survival_svg(curves, horizon, label) if horizon > 0.0 else ""
        header = ("arm", "restricted mean", "median", "reached", "censored")
        yield Table(f"Time to quality: {label}", notes, header, tuple(rows), figure)


def _tuning(results: Mapping[str, Any]) -> Table:
    rows = tuple(
        (results["arms"][name]["title"], f"{trial['learning_rate']:g}", str(trial["seed"]),
         f"{trial['selection_accuracy']:.3f}", _interval(trial["accuracy"]), f"{trial['tokens']:,}",
         "chosen" if trial["learning_rate"] == arm["learning_rate"] else "")
        for name, arm in results["tuning"].items()
        for trial in arm["trials"]
    )  # fmt: skip
    notes = (
        "All arms had the same rates first and equally many trials around their own best. Rates are chosen on clusters "
        "of problems that nothing else is reported on; the other accuracy compares arms at one rate.",
    )
    header = ("arm", "learning rate", "seed", "accuracy, selecting", "accuracy, reported", "tokens", "")
    return Table("Search for the learning rate", notes, header, rows)


def _temperatures(results: Mapping[str, Any]) -> Table:
    rows, notes = [], []
    for name, match in results["matched_temperatures"].items():
        rows.append((
            results["arms"][name]["title"], f"{match['temperature']:.4f}", f"{match['target_nats']:.4f}",
            f"{match['reached_nats']:.4f}", f"{match['recipe_nats']:.4f}", f"{match['target_rollout_nats']:.4f}",
            f"{match['matched_rollout_nats']:.4f}",
        ))  # fmt: skip
        method = f"{match['method'][0].upper()}{match['method'][1:]}; {match['tokens']} tokens."
        notes.append(f"{method} Equal at the start and on average over the schedule; the arms part as they learn.")
    header = (
        "arm", "temperature", "target (nats)", "reached", "at the recipe's temperature", "target on its own responses",
        "matched on its own responses",
    )  # fmt: skip
    return Table("Matched entropy", tuple(dict.fromkeys(notes)), header, tuple(rows))


def _settings(results: Mapping[str, Any]) -> Table:
    names = list(results["arms"])
    rows = tuple(
        (key, *(json.dumps(values[name]) for name in names)) for key, values in results["differing_settings"].items()
    )
    titles = tuple(results["arms"][name]["title"] for name in names)
    return Table("Settings in which arms differ", ("All others are the same.",), ("key", *titles), rows)


def _definitions(results: Mapping[str, Any]) -> Table:
    return Table("Definitions", (), ("name", "definition"), tuple(results["definitions"].items()))


def markdown(results: Mapping[str, Any]) -> str:
    """All tables as Markdown."""
    lines = [f"# {results['experiment']}", ""]
    for table in tables(results):
        lines += [f"## {table.title}", "", *(f"* {note}" for note in table.notes), *([""] if table.notes else [])]
        lines += [_markdown_row(table.header), _markdown_row(["---"] * len(table.header))]
        lines += [*(_markdown_row(row) for row in table.rows), ""]
    return "\n".join(lines)


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '\\|') for cell in cells)} |"


def page(results: Mapping[str, Any]) -> str:
    """All tables as one HTML page that loads nothing."""
    title = escape(results["experiment"])
    parts = [
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
        f"<title>{title}</title><style>{STYLE}</style></head><body><h1>{title}</h1>",
    ]
    for table in tables(results):
        parts.append(f"<section><h2>{escape(table.title)}</h2>")
        parts += [f'<p class="note">{escape(note)}</p>' for note in table.notes]
        if table.figure:
            parts.append(f"<figure>{table.figure}</figure>")
        parts.append("<table><tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in table.header) + "</tr>")
        for row in table.rows:
            parts.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>")
        parts.append("</table></section>")
    return "\n".join([*parts, "</body></html>\n"])


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}"


def _interval(values: Mapping[str, Any]) -> str:
    return f"{values['mean']:.3f} ({values['low']:.3f} to {values['high']:.3f})"


def _signed(values: Mapping[str, Any]) -> str:
    return f"{values['mean']:+.3f} ({values['low']:+.3f} to {values['high']:+.3f})"


def _restricted(mean: Mapping[str, Any]) -> str:
    bounds = "no interval" if mean["low"] is None else f"{mean['low']:.4g} to {mean['high']:.4g}"
    return f"{mean['mean']:.4g} ({bounds})"
