"""The result files: written whole, read strictly, absent means not measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megatron_qerl.errors import FaultError, UserError
from megatron_qerl.metrics.intervals import Interval, accuracy_interval
from megatron_qerl.report.summary import (
    Accuracy,
    EvalProblem,
    EvalRecord,
    SampleRecord,
    Summary,
    append_samples,
    discard_samples_after,
    load,
    write_eval,
    write_summary,
)
from megatron_qerl.types import Outcome


def _sample(step: int, text: str = "2") -> SampleRecord:
    return SampleRecord(
        step=step, uid="p", question="1+1", answer="2", outcome=Outcome.CORRECT, score=1.0, reward=1.0, extracted="2",
        tokens=1, text=text,
    )  # fmt: skip


def test_a_summary_survives_writing_and_reading(tmp_path: Path) -> None:
    summary = Summary(
        accuracy_after=Accuracy(mean=0.5, low=0.4, high=0.6, count=100, clusters=50, method="cluster_bootstrap"),
        wall_s={"rollout": 1.5},
        noise={"roles": ["input"], "sigma_start": 0.01, "enabled": True},
        steps=3,
        likelihood="replay",
    )
    path = write_summary(tmp_path, summary)
    assert path == tmp_path / "summary.json"
    assert load(tmp_path) == summary
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


def test_no_summary_is_none_and_not_an_empty_one(tmp_path: Path) -> None:
    assert load(tmp_path) is None


def test_a_failed_write_leaves_the_old_summary_untouched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_summary(tmp_path, Summary(steps=1))

    def refuse(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(FaultError, match="No space left"):
        write_summary(tmp_path, Summary(steps=2))
    found = load(tmp_path)
    assert found is not None
    assert found.steps == 1


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('{"steps": -1}', "steps"),
        ('{"stepz": 1}', "stepz"),
        ('{"accuracy_after": {"mean": 0.5}}', "accuracy_after.low"),
        ('{"logprob_parity_max": NaN}', "the whole text|logprob_parity_max"),
        ("{", "the whole text"),
    ],
)
def test_a_damaged_summary_is_refused_with_the_field(tmp_path: Path, text: str, field: str) -> None:
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(UserError, match=rf"summary\.json = ({field})"):
        load(tmp_path)


def test_an_interval_becomes_an_accuracy_field_by_field() -> None:
    interval = accuracy_interval([True, False, True, True], ["a", "a", "b", "c"], resamples=50, seed=1)
    assert {field.name for field in dataclasses.fields(Interval)} == set(Accuracy.model_fields)
    assert Accuracy(**dataclasses.asdict(interval)).mean == 0.75


def test_an_interval_upside_down_is_refused() -> None:
    with pytest.raises(ValueError, match="exceeds high"):
        Accuracy(mean=0.5, low=0.6, high=0.4, count=1, clusters=1, method="x")


def test_an_evaluation_is_named_by_its_label_and_a_label_cannot_leave_the_folder(tmp_path: Path) -> None:
    problem = EvalProblem(uid="p", cluster="c", source="s", outcome=Outcome.TIMEOUT, score=0.0)
    record = EvalRecord(label="step_10.greedy", step=10, mode="greedy", problems=(problem,))
    path = write_eval(tmp_path, record)
    assert path.name == "eval_step_10.greedy.json"
    assert EvalRecord.model_validate_json(path.read_bytes()) == record
    with pytest.raises(ValueError, match="label"):
        EvalRecord(label="../x", step=1, mode="greedy")


def test_samples_of_steps_that_are_run_again_are_dropped(tmp_path: Path) -> None:
    discard_samples_after(tmp_path, 3)
    assert list(tmp_path.iterdir()) == []
    for step in (1, 2, 3, 4):
        append_samples(tmp_path, [_sample(step), _sample(step, text="line\nbreak")])
    path = tmp_path / "samples.jsonl"
    with path.open("a") as file:
        file.write('{"step": 5')
    discard_samples_after(tmp_path, 2)
    steps = [SampleRecord.model_validate_json(line).step for line in path.read_text().splitlines()]
    assert steps == [1, 1, 2, 2]
