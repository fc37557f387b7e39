"""The report: complete, self-contained, honest about what is missing, and refused on doubtful numbers."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron_qerl.errors import UserError
from megatron_qerl.metrics.names import METRICS
from megatron_qerl.report.html import LIKELIHOOD_NOTES, MAX_SAMPLE_CHARACTERS, MAX_SAMPLES, render, write_report
from megatron_qerl.report.load import load_run
from megatron_qerl.report.summary import EvalRecord, SampleRecord, Summary, append_samples, write_eval, write_summary
from megatron_qerl.types import Outcome
from tests.unit.report_run import write_run

VOID = {"meta", "br", "img", "hr", "link", "input", "path", "use"}


class _Page(HTMLParser):
    """Collects what a browser would see: text, ids, links, and whether every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.outside: list[str] = []
        self.anchors: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name == "id" and value:
                self.ids.append(value)
            if name in ("href", "src", "xlink:href", "srcset", "data") and value:
                (self.anchors if value.startswith("#") else self.outside).append(value)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.texts))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"), 40)


@pytest.fixture(scope="module")
def page(run_dir: Path) -> _Page:
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    return _Page(path.read_text(encoding="utf-8"))


def _metrics_only(run_dir: Path, *lines: str) -> Path:
    (run_dir / "metrics.jsonl").write_text("".join(lines))
    return run_dir


def _line(step: int, **values: float) -> str:
    return json.dumps({"step": step, "values": values or {"reward/mean": 0.5}, "info": {}}) + "\n"


def test_the_page_is_one_whole_and_fetches_nothing(page: _Page) -> None:
    assert page.open == []
    assert page.outside == []
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert len(page.ids) == len(set(page.ids))
    assert {anchor[1:] for anchor in page.anchors} <= set(page.ids)
    style = page.text[: page.text.index("smollm2-arithmetic Megatron")]
    assert "url(" not in style
    assert "@import" not in style


def test_every_recorded_metric_has_its_definition_and_every_other_is_listed(run_dir: Path, page: _Page) -> None:
    recorded = load_run(run_dir).series.keys()
    assert len(recorded) == 70
    for name, metric in METRICS.items():
        assert page.text.count(re.sub(r"\s+", " ", metric.definition)) >= 1, name
    before, after = page.text.split(" What was not measured ")[-2:]
    assert "memory/device_peak_bytes" in after
    assert "noise/sigma_effective" in before
    assert "noise/sigma_effective" not in after


def test_the_header_says_what_the_numbers_depend_on(page: _Page) -> None:
    for fact in ("9f2c9f2c", "torch 2.11.0", "Seed 3", "2026-03-02T10:31:20+00:00", "Likelihood: clean.", "40 steps"):
        assert fact in page.text
    assert LIKELIHOOD_NOTES["clean"] in page.text


def test_accuracies_stand_with_interval_and_method_and_problems_are_compared(run_dir: Path, page: _Page) -> None:
    for record in load_run(run_dir).evals:
        assert record.accuracy is not None
        assert f"{record.accuracy.low:.3f} to {record.accuracy.high:.3f}" in page.text
    assert "percentile bootstrap over clusters, 95%" in page.text
    records = {record.label: record for record in load_run(run_dir).evals}
    pairs = zip(records["before"].problems, records["after"].problems, strict=True)
    moves = [(b.outcome is Outcome.CORRECT, a.outcome is Outcome.CORRECT) for b, a in pairs]
    better, worse = moves.count((False, True)), moves.count((True, False))
    assert (
        f"{better} problems answered correctly more often, {worse} less often, {120 - better - worse} as" in page.text
    )


def test_one_step_is_enough(tmp_path: Path) -> None:
    page = _Page(write_report(write_run(tmp_path, 1)).read_text())
    assert "1 step (1 to 1)" in page.text
    assert page.tags.count("svg") > 20


def test_no_step_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    for folder in (tmp_path, _metrics_only(tmp_path, "")):
        with pytest.raises(UserError, match=r"metrics\.jsonl.*at least one finished training step.*look at its output"):
            write_report(folder)
    with pytest.raises(UserError, match="is not a folder"):
        write_report(tmp_path / "absent")
    assert not (tmp_path / "report.html").exists()


def test_five_thousand_steps_stay_a_file_one_can_mail(tmp_path: Path) -> None:
    text = write_report(write_run(tmp_path, 5000)).read_text()
    assert len(text.encode()) < 5_000_000
    assert "at most 400 points" in text
    assert "5000 of 5000" in text


def test_a_bare_record_is_rendered_and_what_is_missing_is_said(tmp_path: Path) -> None:
    page = _Page(write_report(_metrics_only(tmp_path, _line(1), _line(2), _line(5))).read_text())
    assert page.tags.count("svg") == 1
    assert page.text.count("not measured") > 15
    for note in (
        "summary.json is missing",
        "config.yaml is missing",
        "There is no eval_*.json",
        "samples.jsonl is missing",
        "2 steps between the first and the last recorded step",
        "The mode is unknown",
        f"1 of {len(METRICS)} registered metrics",
    ):
        assert note in page.text


def test_missing_fields_of_the_summary_are_named(tmp_path: Path) -> None:
    write_summary(tmp_path, Summary(steps=1))
    page = _Page(write_report(_metrics_only(tmp_path, _line(1))).read_text())
    assert "Not in summary.json: run_name, model, accuracy_before" in page.text
    assert "Accuracy before training not measured" in page.text


@pytest.mark.parametrize("mode", ["replay", "clean", "uncorrected"])
def test_each_likelihood_mode_comes_with_its_sentence(tmp_path: Path, mode: str) -> None:
    (tmp_path / "config.yaml").write_text(f"algorithm: {{likelihood: {mode}}}\n")
    text = write_report(_metrics_only(tmp_path, _line(1))).read_text()
    assert f"Likelihood: {mode}." in text
    assert LIKELIHOOD_NOTES[mode] in text.replace("&#39;", "'")
    assert ('class="note biased"' in text) == (mode == "uncorrected")


def test_without_noise_the_page_says_that_the_modes_agree(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("noise: {enabled: false}\nalgorithm: {likelihood: uncorrected}\n")
    text = write_report(_metrics_only(tmp_path, _line(1))).read_text()
    assert "the modes agree" in text
    assert 'class="note biased"' not in text


def test_what_a_model_wrote_cannot_become_markup(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script><b>&amp;"
    sample = SampleRecord(
        step=1, uid=hostile, question=hostile, answer=hostile, outcome=Outcome.UNPARSABLE, score=0.0, reward=0.0,
        extracted=None, tokens=3, text=hostile + "x" * MAX_SAMPLE_CHARACTERS,
    )  # fmt: skip
    append_samples(tmp_path, [sample])
    write_summary(tmp_path, Summary(run_name=hostile, versions={hostile: "1"}))
    (tmp_path / "config.yaml").write_text(f"note: '{hostile}'\n")
    page = _Page(write_report(_metrics_only(tmp_path, _line(1))).read_text())
    assert "script" not in page.tags
    assert "b" not in page.tags
    assert page.text.count("<script>alert(1)</script>") >= 6
    assert f"[... {len(hostile)} more characters are left out here]" in page.text


def test_samples_are_spread_over_the_run(tmp_path: Path) -> None:
    samples = [
        SampleRecord(
            step=step, uid=f"p{step}", question="q", answer="a", outcome=Outcome.WRONG, score=0.0, reward=0.0,
            extracted="b", tokens=1, text=f"answer of step {step}.",
        )
        for step in range(1, 101)
    ]  # fmt: skip
    append_samples(tmp_path, samples)
    page = _Page(write_report(_metrics_only(tmp_path, _line(1))).read_text())
    shown = [int(step) for step in re.findall(r"answer of step (\d+)\.", page.text)]
    assert len(shown) == MAX_SAMPLES
    assert (shown[0], shown[-1]) == (1, 100)
    assert f"{MAX_SAMPLES} of 100 recorded completions" in page.text


def test_a_torn_last_line_is_left_out_and_mentioned(tmp_path: Path) -> None:
    run = load_run(_metrics_only(tmp_path, _line(1), '{"step": 2, "val'))
    assert run.steps == (1,)
    assert any("incomplete" in note for note in run.notes)


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("{broken}\n", "one JSON object"),
        ('{"values": {}}\n', "whole number as step"),
        ('{"step": 3}\n', "values is an object"),
        ('{"step": 3, "values": {"reward/mean": NaN}}\n', "one finite number"),
        ('{"step": 3, "values": {"reward/mean": "0.5"}}\n', "one finite number"),
        (_line(2), "steps increase"),
        (_line(1), "steps increase"),
    ],
)
def test_a_damaged_record_is_refused_with_the_line(tmp_path: Path, line: str, rule: str) -> None:
    with pytest.raises(UserError, match=rf"line 3 = .*{rule}"):
        load_run(_metrics_only(tmp_path, _line(1), _line(2), line, _line(4)))


def test_other_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    _metrics_only(tmp_path, _line(1))
    for name, text in (
        ("eval_x.json", '{"label": "x"}'),
        ("samples.jsonl", "{}\n"),
        ("config.yaml", "a: [1"),
        ("config.yaml", "- 1\n"),
        ("diagnosis_x.json", "{"),
        ("diagnosis_x.json", "{}"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match=re.escape(name)):
            load_run(tmp_path)
        (tmp_path / name).unlink()


def test_a_name_from_another_version_is_mentioned_and_not_lost(tmp_path: Path) -> None:
    run = load_run(_metrics_only(tmp_path, _line(1, **{"future/metric": 1.0, "reward/mean": 0.5})))
    assert run.unregistered == ("future/metric",)
    assert "future/metric" in render(run)


def test_an_evaluation_without_an_interval_shows_its_share_and_says_so(tmp_path: Path) -> None:
    write_run(tmp_path, 1)
    full = load_run(tmp_path).evals[0]
    write_eval(tmp_path, EvalRecord(label="bare", step=1, mode="sampled", problems=full.problems))
    page = _Page(write_report(tmp_path).read_text())
    share = sum(p.outcome is Outcome.CORRECT for p in full.problems) / len(full.problems)
    assert f"bare 1 sampled, clean {share:.3f} not measured 120 60 not measured" in page.text
