"""Plots show every spike, fit on one page together, and come out the same every time."""

from __future__ import annotations

import re
import sys
from xml.etree import ElementTree

import pytest

from megatron_qerl.errors import BackendUnavailableError
from megatron_qerl.metrics.names import GROUPS, PlotGroup
from megatron_qerl.report.load import Series
from megatron_qerl.report.plots import MAX_POINTS, AccuracyRow, plot_accuracy, plot_group, thin
from megatron_qerl.report.summary import Accuracy

BY_KEY = {group.key: group for group in GROUPS}


def _series(*values: float) -> Series:
    return Series(tuple(range(1, len(values) + 1)), values)


def _group(key: str) -> PlotGroup:
    return BY_KEY[key]


def test_thinning_keeps_the_spike_of_a_maximum_and_the_sum_of_a_mean() -> None:
    values = [1.0] * 5000
    values[2345] = 99.0
    data = _series(*values)
    assert max(thin(data, "max").values) == 99.0
    assert min(thin(_series(*(-v for v in values)), "min").values) == -99.0
    mean = thin(data, "mean")
    assert len(mean.steps) <= MAX_POINTS
    assert sum(mean.values) / len(mean.values) == pytest.approx(sum(values) / 5000, rel=0.01)
    last = thin(data, "last")
    assert (last.steps[-1], last.values[-1]) == (5000, 1.0)
    assert list(last.steps) == sorted(set(last.steps))


def test_a_short_series_is_left_alone() -> None:
    data = _series(3.0, 1.0, 2.0)
    assert thin(data, "mean") is data
    full = _series(*([0.5] * MAX_POINTS))
    assert thin(full, "max") is full


def test_a_group_without_a_recorded_metric_has_no_plot() -> None:
    assert plot_group(_group("reward"), {"loss/policy": _series(1.0)}, (1, 1)) is None
    assert plot_accuracy([]) is None


def test_an_svg_is_well_formed_names_itself_and_refers_to_nothing_outside() -> None:
    svg = plot_group(_group("sigma"), {"noise/sigma_nominal": _series(0.0, 0.01, 0.005)}, (1, 3))
    assert svg is not None
    root = ElementTree.fromstring(svg)
    assert root.attrib["aria-label"] == "Noise strength"
    assert "width" not in root.attrib
    assert "viewBox" in root.attrib
    assert "<metadata" not in svg
    assert not re.search(r"""(href|src)=["'](?!#)""", svg)
    ids = set(re.findall(r'\bid="([^"]+)"', svg))
    assert all(name.startswith("sigma-") for name in ids)
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg)) <= ids


def test_texts_of_the_plot_are_texts() -> None:
    svg = plot_group(_group("noise_change"), {"noise/logprob_change_max": _series(0.5, 0.0)}, (1, 2))
    assert svg is not None
    texts = {"".join(node.itertext()) for node in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")}
    assert {"|change| (nats)", "training step", "noise/logprob_change_max", "noise/logprob_change_max = 0"} <= texts


def test_the_same_data_gives_the_same_bytes() -> None:
    series = {"reward/mean": _series(0.1, 0.2), "reward/std": _series(0.1, 0.1)}
    assert plot_group(_group("reward"), series, (1, 2)) == plot_group(_group("reward"), series, (1, 2))


def test_bytes_are_shown_in_a_readable_unit() -> None:
    small = plot_group(_group("memory_peak"), {"memory/peak_rss_bytes": _series(3.0 * 2**20)}, (1, 1))
    large = plot_group(_group("memory_peak"), {"memory/peak_rss_bytes": _series(3.0 * 2**30)}, (1, 1))
    assert small is not None
    assert large is not None
    assert "memory (MiB)" in small
    assert "memory (GiB)" in large


def test_all_zero_values_can_be_drawn_on_a_logarithmic_axis() -> None:
    assert plot_group(_group("sigma"), {"noise/sigma_nominal": _series(0.0, 0.0)}, (1, 2)) is not None


def test_only_the_edges_of_a_band_can_be_drawn() -> None:
    series = {"ratio/min": _series(0.9, 0.8), "ratio/max": _series(1.2, 1.4)}
    assert plot_group(_group("ratio"), series, (1, 2)) is not None


@pytest.mark.parametrize("steps", [3, 300])
def test_a_part_that_some_steps_do_not_mention_still_stacks(steps: int) -> None:
    series = {
        "time/rollout_s": _series(*([2.0] * steps)),
        "time/checkpoint_s": Series((2,), (1.0,)),
        "time/step_s": _series(*([2.5] * steps)),
    }
    svg = plot_group(_group("time"), series, (1, steps))
    assert svg is not None
    assert "time/checkpoint_s" in svg


def test_a_bound_is_drawn_and_labelled() -> None:
    series = {"parity/logprob_max_abs": _series(0.01, 0.02)}
    svg = plot_group(_group("parity"), series, (1, 2), ("rollout.parity_bound", 0.08))
    assert svg is not None
    assert "rollout.parity_bound" in svg


def test_accuracies_carry_their_value() -> None:
    accuracy = Accuracy(mean=0.625, low=0.5, high=0.7, count=8, clusters=8, method="x")
    svg = plot_accuracy([AccuracyRow("before", accuracy), AccuracyRow("after", accuracy)])
    assert svg is not None
    assert svg.count("0.625") == 2


def test_a_missing_matplotlib_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BackendUnavailableError, match="pip install matplotlib"):
        plot_group(_group("loss"), {"loss/policy": _series(1.0)}, (1, 1))
