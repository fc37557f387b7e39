"""Plots as inline SVG; the only file that imports matplotlib.

Text stays text (searchable, scalable), nothing refers outside the page, and the same data gives the same bytes. Lines
differ in dash as well as in a colour-blind-safe colour, so that a printed page can be read. Long runs are thinned by
each metric's own reduction, chosen in the registry so that a spike of a maximum is never averaged away.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from megatron_qerl.errors import BackendUnavailableError
from megatron_qerl.metrics.names import Metric, PlotGroup, Reduction, metrics_of_group
from megatron_qerl.report.load import Series
from megatron_qerl.report.summary import Accuracy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_POINTS = 400
_WIDTH_INCHES = 9.2
_BAR_POINTS = 60
_MARKER_POINTS = 40
_COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#666666",
    "#000000",
    "#8C6D31",
    "#B8B800",
)
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)))
_OUTCOME_COLOURS = {
    "outcome/correct_fraction": "#009E73",
    "outcome/wrong_fraction": "#D55E00",
    "outcome/unparsable_fraction": "#CC79A7",
    "outcome/truncated_fraction": "#E69F00",
    "outcome/timeout_fraction": "#666666",
}
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "megatron-qerl",
    "font.family": "sans-serif",
    "font.size": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "legend.fontsize": 8.8,
    "figure.facecolor": "white",
}


@dataclass(frozen=True)
class AccuracyRow:
    """One line of the accuracy plot."""

    label: str
    accuracy: Accuracy


def thin(series: Series, reduce: Reduction, max_points: int = MAX_POINTS) -> Series:
    """At most ``max_points`` points: runs of equally many neighbours become one, at the step of their last member."""
    size = math.ceil(len(series.steps) / max_points)
    if size <= 1:
        return series
    parts = [slice(start, start + size) for start in range(0, len(series.steps), size)]
    return Series(
        tuple(series.steps[part][-1] for part in parts),
        tuple(_combine(series.values[part], reduce) for part in parts),
    )


def _combine(values: Sequence[float], reduce: Reduction) -> float:
    match reduce:
        case "mean":
            return fmean(values)
        case "max":
            return max(values)
        case "min":
            return min(values)
        case "last":
            return values[-1]


def plot_group(
    group: PlotGroup, series: Mapping[str, Series], steps: Sequence[int], bound: tuple[str, float] | None = None
) -> str | None:
    """One plot of the registry as an ``<svg>`` element; None when none of its metrics was recorded.

    Args:
        group: the plot.
        series: recorded metrics of the run, this group's among them.
        steps: first and last recorded step set the horizontal axis, so that all plots of a report line up.
        bound: label and value of a horizontal line, if a rule bounds the quantity.

    Raises:
        BackendUnavailableError: matplotlib is missing.
    """
    recorded = {metric: series[metric.name] for metric in metrics_of_group(group.key) if metric.name in series}
    if not recorded:
        return None
    if group.kind == "stacked":
        recorded = _on_all_steps(recorded)
    drawn = {metric.name: (metric, thin(data, metric.reduce)) for metric, data in recorded.items()}
    with _style():
        figure = _new_figure(3.1)
        axes = figure.add_subplot()
        scale, axis_label = _scale_bytes(group, drawn)
        drawn = {name: (metric, _scaled(data, scale)) for name, (metric, data) in drawn.items()}
        if group.kind == "stacked":
            _draw_stacked(axes, drawn)
        elif group.kind == "interval":
            _draw_intervals(axes, drawn)
        else:
            _draw_lines(axes, group, drawn)
        if bound is not None:
            axes.axhline(bound[1], color="#B00020", linewidth=1.0, linestyle=(0, (2, 2)), label=bound[0])
        _set_vertical_axis(axes, group, drawn)
        axes.set_ylabel(axis_label)
        _set_step_axis(axes, steps)
        _legend(figure, axes, reverse=group.kind == "stacked")
        return _to_svg(figure, group.title, prefix=group.key)


def plot_accuracy(rows: Sequence[AccuracyRow]) -> str | None:
    """Accuracies with their intervals, one a line, first row on top; None without rows."""
    if not rows:
        return None
    with _style():
        figure = _new_figure(0.9 + 0.42 * len(rows))
        figure.subplots_adjust(left=0.28, right=0.97)  # the labels stand on the left, and there is no legend
        axes = figure.add_subplot()
        for place, row in enumerate(rows):
            value = row.accuracy
            axes.hlines(-place, value.low, value.high, color=_COLOURS[0], linewidth=1.6)
            axes.plot([value.low, value.high], [-place] * 2, "|", color=_COLOURS[0], markersize=9)
            axes.plot(value.mean, -place, "o", color=_COLOURS[0])
            axes.annotate(
                f"{value.mean:.3f}", (value.mean, -place), xytext=(0, 6), textcoords="offset points", ha="center"
            )
        axes.set_yticks([-place for place in range(len(rows))], [row.label for row in rows])
        axes.set_ylim(-len(rows) + 0.4, 0.7)
        axes.set_xlim(0.0, 1.0)
        axes.set_xlabel("accuracy (fraction), with confidence interval")
        return _to_svg(figure, "Accuracy with confidence intervals", prefix="accuracy-rows")


def _style() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise BackendUnavailableError(
            "report", "matplotlib", "the package matplotlib is not installed", "Install it with: pip install matplotlib"
        ) from error
    return matplotlib.rc_context(_STYLE)


def _new_figure(height_inches: float) -> Figure:
    # No pyplot: its global figure list would keep every plot alive.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_INCHES, height_inches))
    # Fixed margins: the step axes of all plots lie below each other, and the legend has the right third.
    figure.subplots_adjust(left=0.095, right=0.63, top=1 - 0.22 / height_inches, bottom=0.5 / height_inches)
    return figure


def _scale_bytes(group: PlotGroup, drawn: Mapping[str, tuple[Metric, Series]]) -> tuple[float, str]:
    """Factor and axis label; bytes become MiB or GiB."""
    if next(iter(drawn.values()))[0].unit != "bytes":
        return 1.0, group.axis
    largest = max(max(data.values) for _, data in drawn.values())
    power, unit = (30, "GiB") if largest >= 2**30 else (20, "MiB")
    return 2.0**-power, group.axis.replace("bytes", unit)


def _scaled(data: Series, scale: float) -> Series:
    return data if scale == 1.0 else Series(data.steps, tuple(value * scale for value in data.values))


def _draw_lines(axes: Axes, group: PlotGroup, drawn: Mapping[str, tuple[Metric, Series]]) -> None:
    lines = [(metric, data) for metric, data in drawn.values() if metric.role == "line"]
    if group.kind == "band":
        _draw_band(axes, drawn, lines)
    if not lines:  # only the band's edges were recorded
        lines = list(drawn.values())
    for index, (metric, data) in enumerate(lines):
        axes.plot(
            data.steps,
            _without_zeros(data.values) if group.log else data.values,
            color=_COLOURS[index % len(_COLOURS)],
            linestyle=_DASHES[index % len(_DASHES)],
            drawstyle="steps-post" if group.kind == "steps" else "default",
            marker="o" if len(data.steps) <= _MARKER_POINTS else None,
            markersize=3.5,
            label=metric.name,
        )
        if group.log:
            zeros = [step for step, value in zip(data.steps, data.values, strict=True) if value == 0.0]
            if zeros:
                axes.plot(
                    zeros, [0.02] * len(zeros), "v", color=_COLOURS[index % len(_COLOURS)], markersize=5,
                    transform=axes.get_xaxis_transform(), clip_on=False, label=f"{metric.name} = 0",
                )  # fmt: skip


def _draw_band(axes: Axes, drawn: Mapping[str, tuple[Metric, Series]], lines: list[tuple[Metric, Series]]) -> None:
    """Shade from lower to upper, or the first line plus and minus its spread."""
    by_role = {metric.role: (metric, data) for metric, data in drawn.values()}
    if "lower" in by_role and "upper" in by_role:
        (low, low_data), (high, high_data) = by_role["lower"], by_role["upper"]
        lower, upper = _on_common_steps(low_data, high_data)
        label = f"{low.name} to {high.name.partition('/')[2]}"
    elif "spread" in by_role and lines:
        (spread, spread_data), (centre, centre_data) = by_role["spread"], lines[0]
        middle, width = _on_common_steps(centre_data, spread_data)
        pairs = list(zip(middle.values, width.values, strict=True))
        lower = Series(middle.steps, tuple(m - w for m, w in pairs))
        upper = Series(middle.steps, tuple(m + w for m, w in pairs))
        label = f"{centre.name} ± {spread.name.partition('/')[2]}"
    else:
        return
    if len(lower.steps) == 1:  # an area needs two points
        axes.vlines(lower.steps, lower.values, upper.values, color=_COLOURS[0], alpha=0.35, linewidth=8, label=label)
        return
    axes.fill_between(lower.steps, lower.values, upper.values, color=_COLOURS[0], alpha=0.16, linewidth=0, label=label)


def _on_all_steps(recorded: Mapping[Metric, Series]) -> dict[Metric, Series]:
    """Every part of a stack at every step of any: a part that a step does not mention took nothing of it."""
    steps = tuple(sorted({step for data in recorded.values() for step in data.steps}))
    filled = {}
    for metric, data in recorded.items():
        known = dict(zip(data.steps, data.values, strict=True))
        filled[metric] = Series(steps, tuple(known.get(step, 0.0) for step in steps))
    return filled


def _draw_stacked(axes: Axes, drawn: Mapping[str, tuple[Metric, Series]]) -> None:
    parts = [(metric, data) for metric, data in drawn.values() if metric.role != "total"]
    colours = [_OUTCOME_COLOURS.get(m.name, _COLOURS[i % len(_COLOURS)]) for i, (m, _) in enumerate(parts)]
    places = parts[0][1].steps if parts else ()
    if len(places) > _BAR_POINTS:
        heights = [data.values for _, data in parts]
        axes.stackplot(places, heights, colors=colours, labels=[m.name for m, _ in parts], alpha=0.85, linewidth=0)
    elif parts:
        width = 0.8 * min((b - a for a, b in itertools.pairwise(places)), default=1)
        bottoms = [0.0] * len(places)
        for (metric, data), colour in zip(parts, colours, strict=True):
            axes.bar(places, data.values, width, bottoms, color=colour, alpha=0.85, label=metric.name)
            bottoms = [low + more for low, more in zip(bottoms, data.values, strict=True)]
    for metric, data in drawn.values():
        if metric.role == "total":
            axes.plot(data.steps, data.values, color="black", linewidth=1.0, linestyle=_DASHES[1], label=metric.name)


def _draw_intervals(axes: Axes, drawn: Mapping[str, tuple[Metric, Series]]) -> None:
    lines = [(metric, data) for metric, data in drawn.values() if metric.role == "line"]
    for index, (metric, data) in enumerate(lines):
        colour = _COLOURS[index % len(_COLOURS)]
        axes.plot(
            data.steps, data.values, "o", linestyle=_DASHES[index % len(_DASHES)], color=colour, label=metric.name
        )
        ends = [drawn.get(f"{metric.name}_{end}") for end in ("low", "high")]
        if ends[0] is not None and ends[1] is not None:
            lower, upper = _on_common_steps(ends[0][1], ends[1][1])
            axes.vlines(lower.steps, lower.values, upper.values, color=colour, linewidth=1.2)


def _on_common_steps(first: Series, second: Series) -> tuple[Series, Series]:
    """Both series at the steps that both have."""
    one, two = (dict(zip(data.steps, data.values, strict=True)) for data in (first, second))
    steps = tuple(step for step in first.steps if step in two)
    return Series(steps, tuple(one[s] for s in steps)), Series(steps, tuple(two[s] for s in steps))


def _without_zeros(values: Sequence[float]) -> list[float]:
    return [value if value > 0.0 else math.nan for value in values]


def _set_vertical_axis(axes: Axes, group: PlotGroup, drawn: Mapping[str, tuple[Metric, Series]]) -> None:
    if group.log:
        if any(value > 0.0 for _, data in drawn.values() for value in data.values):
            axes.set_yscale("log")
        return
    lowest = min(min(data.values) for _, data in drawn.values())
    if group.key in ("outcome", "mixed", "accuracy"):
        axes.set_ylim(0.0, 1.0)
    elif lowest >= 0.0:
        top = max(axes.get_ylim()[1], 1e-12)
        axes.set_ylim(0.0, top)


def _set_step_axis(axes: Axes, steps: Sequence[int]) -> None:
    from matplotlib.ticker import MaxNLocator

    margin = 0.5 + 0.01 * (steps[-1] - steps[0])
    axes.set_xlim(steps[0] - margin, steps[-1] + margin)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, min_n_ticks=1))
    axes.set_xlabel("training step")


def _legend(figure: Figure, axes: Axes, *, reverse: bool) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if reverse:  # the order on the page follows the order of the stack
        handles, labels = handles[::-1], labels[::-1]
    figure.legend(handles, labels, loc="upper left", bbox_to_anchor=(0.64, 1.0), borderaxespad=0.6, handlelength=2.6)


def _to_svg(figure: Figure, title: str, prefix: str) -> str:
    """The figure as one ``<svg>`` element whose ids are unique on the page and which says what it shows."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'xlink:href="#', f'href="#{prefix}-', svg)
    svg = re.sub(r"url\(#", f"url(#{prefix}-", svg)
    size = re.search(r'width="([\d.]+)pt" height="([\d.]+)pt"', svg)
    assert size is not None, "matplotlib names its size in points"
    # The page sets the width; the view box keeps the proportions.
    svg = svg.replace(size.group(0), "", 1)
    return svg.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
