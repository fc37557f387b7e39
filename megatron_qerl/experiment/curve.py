"""Kaplan and Meier's curves as one small inline SVG: text stays text, and nothing refers outside the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666", "#000000")
_DASHES = ("", "7 3", "2 2", "7 2 2 2")
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 680, 250, 60, 12, 42
_LEGEND_ROW = 18


def survival_svg(arms: Mapping[str, Mapping[str, Any]], horizon: float, axis: str) -> str:
    """Share of runs that have not reached the quality, over the horizon; ticks mark censored runs.

    Args:
        arms: title -> ``curve`` and ``observations`` as the results hold them.
        horizon: right end of the axis, above zero.
        axis: what the horizontal axis shows, with the unit.
    """
    width, height = _WIDTH - _LEFT - 20, _HEIGHT - _TOP - _BOTTOM
    total = _HEIGHT + _LEGEND_ROW * len(arms)

    def x(time: float) -> float:
        return _LEFT + width * min(time, horizon) / horizon

    def y(survival: float) -> float:
        return _TOP + height * (1.0 - survival)

    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {total}" role="img" font-family="sans-serif" font-size="12">',
        f"<title>Runs below the quality, by {escape(axis)}</title>",
    ]
    for share in (0.0, 0.5, 1.0):
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + width}" y1="{y(share):.1f}" y2="{y(share):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y(share) + 4:.1f}" text-anchor="end">{share:g}</text>')
    for part in (0.0, 0.5, 1.0):
        label = f"{horizon * part:.4g}"
        parts.append(f'<text x="{x(horizon * part):.1f}" y="{_TOP + height + 16}" text-anchor="middle">{label}</text>')
    parts.append(f'<text x="{_LEFT + width / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(axis)}</text>')
    for number, (title, arm) in enumerate(arms.items()):
        style = f'stroke="{_COLOURS[number % len(_COLOURS)]}" stroke-width="2" fill="none"'
        dash = _DASHES[number % len(_DASHES)]
        style += f' stroke-dasharray="{dash}"' if dash else ""
        points = _steps(arm["curve"], horizon)
        parts.append(f'<polyline points="{" ".join(f"{x(t):.1f},{y(s):.1f}" for t, s in points)}" {style}/>')
        for observation in arm["observations"]:
            if not observation["reached"] and observation["time"] <= horizon:
                at, level = x(observation["time"]), y(_level(points, observation["time"]))
                parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{level - 5:.1f}" y2="{level + 5:.1f}" {style}/>')
        row = _HEIGHT + _LEGEND_ROW * number + 8
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + 34}" y1="{row}" y2="{row}" {style}/>')
        parts.append(f'<text x="{_LEFT + 42}" y="{row + 4}">{escape(title)}</text>')
    return "".join([*parts, "</svg>"])


def _steps(curve: Sequence[Mapping[str, Any]], horizon: float) -> list[tuple[float, float]]:
    """Corners of the step function from (0, 1) to the horizon."""
    corners, level = [(0.0, 1.0)], 1.0
    for point in curve:
        if point["time"] <= horizon:
            corners += [(point["time"], level), (point["time"], point["survival"])]
            level = point["survival"]
    return [*corners, (horizon, level)]


def _level(corners: Sequence[tuple[float, float]], time: float) -> float:
    return [survival for at, survival in corners if at <= time][-1]
