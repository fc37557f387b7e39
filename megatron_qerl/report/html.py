"""The report of a run: one HTML file that holds everything, can be mailed, printed and read in ten years.

Each plot stands beside the definition of every number in it. What was not measured is listed, and the likelihood
mode comes with the sentence that says which policy was trained and with what bias.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import jinja2
from markupsafe import Markup

from megatron_qerl.metrics.intervals import CONFIDENCE
from megatron_qerl.metrics.names import GROUPS, METRICS, Metric, PlotGroup, metrics_of_group
from megatron_qerl.report.load import RunData, Series, load_run
from megatron_qerl.report.plots import MAX_POINTS, AccuracyRow, plot_accuracy, plot_group
from megatron_qerl.report.summary import Accuracy, EvalRecord, SampleRecord, Summary, write_text
from megatron_qerl.report.template import PAGE, STYLE
from megatron_qerl.types import Outcome

REPORT_FILE = "report.html"
MAX_SAMPLES = 12
MAX_SAMPLE_CHARACTERS = 6000

LIKELIHOOD_NOTES = {
    "replay": "The trainer replays the recorded noise, so both halves of the ratio belong to the noisy policy that "
    "generated. No bias from the noise; but it is the noise-conditioned policy that is trained, not the clean one that "
    "is deployed, which is why the clean one is evaluated apart.",
    "clean": "The clean policy is trained on responses of the noisy one, reweighted token by token with the ratio "
    "against the recorded behaviour log-probabilities. Truncating the weights keeps the variance finite and biases the "
    "estimate towards the noisy policy; the effective sample fraction says how much of the batch still counts.",
    "uncorrected": "Biased: the noisy policy generated, but the ratio is taken against the clean policy, as the "
    "published code does. The gradient is not that of either policy. Kept as a baseline to compare with.",
}
_METHODS = {
    "cluster_bootstrap": f"percentile bootstrap over clusters, {CONFIDENCE:.0%}",
    "wilson_on_clusters": f"Wilson on clusters, {CONFIDENCE:.0%}",
}
_NO_NOISE = (
    "The noise is switched off in this run, so the noisy and the clean policy are the same and the modes agree. "
)
_LIMITS = (
    "Other training seeds: this is one run. Its intervals cover the choice of evaluation problems only, and two runs "
    "that differ in one setting also differ by chance.",
    "The diversity between noise states, I(O;Z|q): the entropy recorded is the one within a noise state, and their sum "
    "is the entropy of the responses as a whole.",
    "Memory and time of other processes (rollout engines, verifiers), unless a row says so.",
)


@dataclass(frozen=True)
class _MetricRow:
    name: str
    unit: str
    definition: str
    recorded: str
    first: str
    last: str
    min: str
    max: str


@dataclass(frozen=True)
class _PlotSection:
    key: str
    title: str
    svg: Markup
    rows: tuple[_MetricRow, ...]
    missing: tuple[str, ...]
    thinned: str


def write_report(run_dir: Path) -> Path:
    """Read a run folder and write ``run_dir/report.html``.

    Returns:
        The path of the report. It refers to nothing outside itself.

    Raises:
        UserError: no finished step is recorded, or a file of the run is damaged.
        BackendUnavailableError: matplotlib is missing.
        FaultError: the report cannot be written.
    """
    return write_text(run_dir / REPORT_FILE, render(load_run(run_dir)))


def render(run: RunData) -> str:
    """The page as text."""
    summary = run.summary if run.summary is not None else Summary()
    likelihood = summary.likelihood or run.setting("algorithm.likelihood")
    noise_off = run.setting("noise.enabled") is False
    note = LIKELIHOOD_NOTES.get(str(likelihood), "The mode is unknown, so nothing can be said about its bias.")
    accuracies = list(_accuracies(run, summary))
    page = {
        "title": summary.run_name or run.setting("run.name") or run.run_dir.resolve().name,
        "subtitle": f"Megatron-QeRL training report, {_count(len(run.steps), 'step')} "
        f"({run.steps[0]} to {run.steps[-1]})",
        "header": _header(run, summary),
        "likelihood": likelihood or "not recorded",
        "likelihood_note": _NO_NOISE + note if noise_off and likelihood else note,
        "biased": likelihood not in ("replay", "clean") and not noise_off,
        "summary": _summary_rows(summary),
        "accuracy_plot": _markup(plot_accuracy([row for _, row in accuracies if row is not None])),
        "accuracies": [cells for cells, _ in accuracies],
        "outcomes": [outcome.value for outcome in Outcome],
        "evals": list(_outcome_counts(run.evals)),
        "changes": list(_changes(run.evals)),
        "diagnoses": [_diagnosis(found) for found in run.diagnoses],
        "plots": list(_plots(run)),
        "samples": _pick_samples(run.samples),
        "samples_note": f"{min(len(run.samples), MAX_SAMPLES)} of {_count(len(run.samples), 'recorded completion')}, "
        "spread evenly over the run.",
        "notes": list(_notes(run, summary)),
        "missing": [
            {"title": group.title, "metrics": missing}
            for group in GROUPS
            if (missing := [m for m in metrics_of_group(group.key) if m.name not in run.series])
        ],
        "config_text": run.config_text,
    }
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(PAGE).render(page=page, style=Markup(STYLE)) + "\n"


def _header(run: RunData, summary: Summary) -> list[tuple[str, str | None]]:
    versions = None if summary.versions is None else ", ".join(f"{k} {v}" for k, v in sorted(summary.versions.items()))
    hardware = None if summary.hardware is None else ", ".join(f"{k}: {v}" for k, v in summary.hardware.items())
    seed = summary.seed if summary.seed is not None else run.setting("run.seed")
    return [
        ("Model", summary.model or run.setting("model.path")),
        ("Base hash", summary.base_hash),
        ("Seed", None if seed is None else str(seed)),
        ("Started", summary.started_at),
        ("Finished", summary.finished_at),
        ("Hardware", hardware),
        ("Versions", versions),
        ("Config", summary.config_path),
    ]


def _summary_rows(summary: Summary) -> list[tuple[str, str | None]]:
    touched, expected = summary.noise_modules_touched, summary.noise_modules_expected
    modules = None if touched is None or expected is None else f"{touched} of {expected} expected"
    parity = summary.logprob_parity_max
    times = summary.wall_s
    return [
        ("Accuracy before training", _interval_text(summary.accuracy_before)),
        ("Accuracy after training", _interval_text(summary.accuracy_after)),
        ("Training steps", _integer(summary.steps)),
        ("Optimizer updates", _integer(summary.updates)),
        ("Norms that the noise changed", modules),
        ("Noise", None if summary.noise is None else _pairs(summary.noise)),
        ("Feedback's decisions on sigma", None if summary.feedback is None else _pairs(summary.feedback) or "none"),
        ("Largest engine-trainer difference of a log-probability", None if parity is None else f"{parity:.3g} nats"),
        ("Tokens", None if summary.tokens is None else ", ".join(f"{k} {v:,}" for k, v in summary.tokens.items())),
        ("Wall time", None if times is None else ", ".join(f"{k} {_number(v)} s" for k, v in times.items())),
    ]


def _accuracies(run: RunData, summary: Summary) -> Iterator[tuple[dict[str, Any], AccuracyRow | None]]:
    """Table cells and plot row of each evaluation; the summary's two stand in where no file holds them."""
    found = [
        (record.label, str(record.step), f"{record.mode}, {'noisy' if record.noisy else 'clean'}", record)
        for record in run.evals
    ]
    for label, step, decoding, record in found:
        accuracy = record.accuracy
        if accuracy is not None:
            yield _accuracy_cells(label, step, decoding, accuracy), AccuracyRow(f"{label} ({decoding})", accuracy)
        elif record.problems:
            share = fmean(problem.outcome is Outcome.CORRECT for problem in record.problems)
            cells = {"mean": f"{share:.3f}", "interval": None, "count": len(record.problems), "method": None}
            clusters = len({problem.cluster for problem in record.problems})
            yield {"label": label, "step": step, "decoding": decoding, "clusters": clusters, **cells}, None
    if not found:
        for label, accuracy in (("before", summary.accuracy_before), ("after", summary.accuracy_after)):
            if accuracy is not None:
                yield _accuracy_cells(label, "-", "see configuration", accuracy), AccuracyRow(label, accuracy)


def _accuracy_cells(label: str, step: str, decoding: str, accuracy: Accuracy) -> dict[str, Any]:
    return {
        "label": label,
        "step": step,
        "decoding": decoding,
        "mean": f"{accuracy.mean:.3f}",
        "interval": f"{accuracy.low:.3f} to {accuracy.high:.3f}",
        "count": accuracy.count,
        "clusters": accuracy.clusters,
        "method": _METHODS.get(accuracy.method, accuracy.method),
    }


def _outcome_counts(evals: Iterable[EvalRecord]) -> Iterator[dict[str, Any]]:
    for record in evals:
        by_source: dict[str, Counter[Outcome]] = defaultdict(Counter)
        for problem in record.problems:
            by_source[problem.source][problem.outcome] += 1
        for source, counts in sorted(by_source.items()):
            yield {"label": record.label, "source": source, "counts": [counts[outcome] for outcome in Outcome]}


def _changes(evals: Iterable[EvalRecord]) -> Iterator[str]:
    """How single problems moved between the first and the last evaluation of one kind."""
    kinds: dict[tuple[str, bool], list[EvalRecord]] = defaultdict(list)
    for record in evals:
        kinds[record.mode, record.noisy].append(record)
    for (mode, noisy), records in kinds.items():
        first, last = _share_by_problem(records[0]), _share_by_problem(records[-1])
        both = first.keys() & last.keys()
        if records[0] is records[-1] or not both:
            continue
        better = sum(last[uid] > first[uid] for uid in both)
        worse = sum(last[uid] < first[uid] for uid in both)
        yield (
            f"From {records[0].label} to {records[-1].label} ({mode}, {'noisy' if noisy else 'clean'}): "
            f"{_count(better, 'problem')} answered correctly more often, {worse} less often, "
            f"{len(both) - better - worse} as often as before; {len(both)} are in both evaluations."
        )


def _share_by_problem(record: EvalRecord) -> dict[str, float]:
    answers: dict[str, list[bool]] = defaultdict(list)
    for problem in record.problems:
        answers[problem.uid].append(problem.outcome is Outcome.CORRECT)
    return {uid: fmean(correct) for uid, correct in answers.items()}


_OVER_PROBLEMS = ("total", "conditional", "information", "information_upper")
_BY_MODE = (
    "gradient_norms",
    "gradient_cosines",
    "coefficient_norms",
    "coefficient_cosines",
    "effective_token_fraction",
)


def _diagnosis(found: dict[str, Any]) -> dict[str, Any]:
    """Table of one ``megatron-qerl diagnose``: name, value, definition."""
    modes, problems, mean = found["modes"], found["entropy"]["problems"], found["entropy"]["mean"]
    rows = []
    for name in _OVER_PROBLEMS if mean is not None else ():
        low, high = _number(mean[name]["low"]), _number(mean[name]["high"])
        rows.append((name, f"{_number(mean[name]['value'])} ({low} to {high})", found["definitions"][name]))
    states = _count(len(found["states"]), "noise state")
    saturated = sum(problem["saturated"] for problem in problems)
    rows.append(("saturated", f"{saturated} of {_count(len(problems), 'problem')}", found["definitions"]["saturated"]))
    for name in _BY_MODE:
        values = {mode: "not defined" if v is None else _number(v) for mode, v in modes[name].items()}
        rows.append((name, _pairs(values), found["definitions"][name]))
    return {
        "title": f"{found['checkpoint']}, sigma {_number(found['sigma'])}, {states}",
        "lead": f"{found['definitions']['modes']} {_count(modes['tokens'], 'token')} of "
        f"{_count(modes['groups'], 'group')}, {modes['mixed_groups']} of them with a signal. "
        f"Intervals: {found['definitions']['mean']}",
        "rows": rows,
    }


def _plots(run: RunData) -> Iterator[_PlotSection]:
    ends = (run.steps[0], run.steps[-1])
    bound = run.setting("rollout.parity_bound")
    for group in GROUPS:
        limit = ("rollout.parity_bound", float(bound)) if group.key == "parity" and bound is not None else None
        svg = plot_group(group, run.series, ends, limit)
        if svg is not None:
            metrics = metrics_of_group(group.key)
            rows = tuple(_metric_row(m, run.series[m.name], run) for m in metrics if m.name in run.series)
            missing = tuple(m.name for m in metrics if m.name not in run.series)
            yield _PlotSection(group.key, group.title, Markup(svg), rows, missing, _thinned_note(group, run.series))


def _metric_row(metric: Metric, data: Series, run: RunData) -> _MetricRow:
    return _MetricRow(
        metric.name,
        "none" if metric.unit == "1" else metric.unit,
        metric.definition,
        recorded=f"{len(data.steps)} of {len(run.steps)}",
        first=_value(metric, data.values[0]),
        last=_value(metric, data.values[-1]),
        min=_value(metric, min(data.values)),
        max=_value(metric, max(data.values)),
    )


def _thinned_note(group: PlotGroup, series: dict[str, Series]) -> str:
    here = [metric for metric in metrics_of_group(group.key) if metric.name in series]
    if all(len(series[metric.name].steps) <= MAX_POINTS for metric in here):
        return ""
    names: dict[str, list[str]] = defaultdict(list)
    for metric in here:
        names[metric.reduce].append(metric.name)
    how = next(iter(names)) if len(names) == 1 else ", ".join(f"{k} of {' and '.join(v)}" for k, v in names.items())
    return f"The plot has at most {MAX_POINTS} points, each combining neighbouring steps ({how})."


def _pick_samples(samples: tuple[SampleRecord, ...]) -> list[dict[str, Any]]:
    """At most ``MAX_SAMPLES``, evenly spread, the first and the last among them; long texts are cut and say so."""
    count = min(len(samples), MAX_SAMPLES)
    picked = (samples[round(i * (len(samples) - 1) / max(count - 1, 1))] for i in range(count))
    return [
        {
            **sample.model_dump(),
            "question": _cut(sample.question),
            "text": _cut(sample.text),
            "reward": f"{sample.reward:.3g}",
            "score": f"{sample.score:.3g}",
        }
        for sample in picked
    ]


def _cut(text: str) -> str:
    left = len(text) - MAX_SAMPLE_CHARACTERS
    return text if left <= 0 else f"{text[:MAX_SAMPLE_CHARACTERS]}\n[... {left} more characters are left out here]"


def _notes(run: RunData, summary: Summary) -> Iterator[str]:
    yield from run.notes
    if run.unregistered:
        yield f"Recorded under names that this version does not know, and not shown: {', '.join(run.unregistered)}."
    if run.summary is not None:
        absent = [name for name in Summary.model_fields if getattr(summary, name) is None]
        if absent:
            yield f"Not in summary.json: {', '.join(absent)}."
    partly = [name for name, data in run.series.items() if len(data.steps) < len(run.steps)]
    if partly:
        yield f"Measured in some steps only: {', '.join(partly)}."
    gaps = sum(later - earlier - 1 for earlier, later in zip(run.steps, run.steps[1:], strict=False))
    if gaps:
        yield f"{_count(gaps, 'step')} between the first and the last recorded step left no line in metrics.jsonl."
    yield from _LIMITS
    yield f"{len(run.series)} of {len(METRICS)} registered metrics were recorded; the others are listed below."


def _value(metric: Metric, value: float) -> str:
    if metric.unit != "bytes":
        return _number(value)
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"


def _number(value: float) -> str:
    """Four significant digits; whole numbers in full."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.3e}" if abs(value) < 1e-3 or abs(value) >= 1e6 else f"{value:.4g}"


def _integer(value: int | None) -> str | None:
    return None if value is None else f"{value:,}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{k}: {', '.join(v) if isinstance(v, list) else v}" for k, v in values.items())


def _interval_text(accuracy: Accuracy | None) -> str | None:
    if accuracy is None:
        return None
    method = _METHODS.get(accuracy.method, accuracy.method)
    return (
        f"{accuracy.mean:.3f} ({accuracy.low:.3f} to {accuracy.high:.3f}; {method}; "
        f"{_count(accuracy.count, 'answer')} in {_count(accuracy.clusters, 'cluster')})"
    )


def _markup(svg: str | None) -> Markup | None:
    return None if svg is None else Markup(svg)
