"""The result files of a run folder besides metrics.jsonl, as models that the writer and the report share.

``summary.json`` holds what is true of the whole run, ``eval_*.json`` one evaluation with the outcome of every problem,
``samples.jsonl`` a few completions to read. Every quantity is optional, and None means that it was not measured; the
report says so, instead of showing a zero. Files are written beside their name and renamed, so none is ever half there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from megatron_qerl.errors import FaultError, UserError
from megatron_qerl.types import LikelihoodMode, Outcome

SUMMARY_FILE = "summary.json"
SAMPLES_FILE = "samples.jsonl"
EVAL_PATTERN = "eval_*.json"
DIAGNOSIS_PATTERN = "diagnosis_*.json"

Count = Annotated[int, Field(ge=0)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Accuracy(_Record):
    """A share of correct answers with its confidence interval.

    Attributes:
        mean: share of answers judged correct, 0 to 1.
        low, high: ends of the interval; a bootstrap interval of few clusters need not contain the mean.
        count: answers judged.
        clusters: independent clusters among them; the interval's true sample size.
        method: how the interval came about, as ``megatron_qerl.metrics.intervals.Interval`` names it.
    """

    mean: Annotated[float, Field(ge=0.0, le=1.0)]
    low: Annotated[float, Field(ge=0.0, le=1.0)]
    high: Annotated[float, Field(ge=0.0, le=1.0)]
    count: Count
    clusters: Count
    method: str

    @model_validator(mode="after")
    def _ordered(self) -> Accuracy:
        if self.low > self.high:
            raise ValueError(f"low {self.low} exceeds high {self.high}")
        return self


class Summary(_Record):
    """What is true of the whole run.

    Attributes:
        accuracy_before, accuracy_after: of the deployed (clean) policy on the evaluation problems, decoded in
            ``accuracy_mode``.
        noise_modules_expected, noise_modules_touched: the proof that the noise reached the norms.
        logprob_parity_max: largest |engine - trainer| log-probability of the run, in nats.
        wall_s: seconds by phase over the run, as ``PhaseClock.totals_s`` returns them.
        steps, updates: finished training steps and optimizer updates.
        seed: the run's seed.
        versions: package -> version.
        base_hash: SHA-256 of the frozen base checkpoint's manifest.
        likelihood: which policy was trained.
        noise: the noise settings, name -> value.
        feedback: reason -> how many of the closed loop's decisions it made.
        tokens: kind -> count over the run (prompt, completion, trained).
        hardware: what it ran on, name -> value.
        run_name, model: as in the config.
        config_path: the resolved config.
        started_at, finished_at: ISO 8601 with the offset from UTC.
    """

    run_name: str | None = None
    model: str | None = None
    accuracy_before: Accuracy | None = None
    accuracy_after: Accuracy | None = None
    accuracy_mode: Literal["greedy", "sampled"] | None = None
    noise_modules_expected: Count | None = None
    noise_modules_touched: Count | None = None
    logprob_parity_max: Annotated[float, Field(ge=0.0)] | None = None
    wall_s: dict[str, Annotated[float, Field(ge=0.0)]] | None = None
    steps: Count | None = None
    updates: Count | None = None
    seed: int | None = None
    versions: dict[str, str] | None = None
    base_hash: str | None = None
    likelihood: LikelihoodMode | None = None
    noise: dict[str, JsonValue] | None = None
    feedback: dict[str, Count] | None = None
    tokens: dict[str, Count] | None = None
    hardware: dict[str, str] | None = None
    config_path: str | None = None
    started_at: str | None = None
    finished_at: str | None = None


class EvalProblem(_Record):
    """The verdict on one answer. A problem that was sampled several times appears several times."""

    uid: str
    cluster: str
    source: str
    outcome: Outcome
    score: float


class EvalRecord(_Record):
    """One evaluation.

    Attributes:
        label: name of the evaluation; its file is ``eval_{label}.json``.
        step: finished training steps when it was made; 0 is before training.
        mode: how tokens were chosen.
        noisy: whether the noise then in force was on; the deployed policy is the one without.
        accuracy: over all problems; None when no interval was computed.
        problems: one entry an answer.
    """

    label: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    step: Count
    mode: Literal["greedy", "sampled"]
    noisy: bool = False
    accuracy: Accuracy | None = None
    problems: tuple[EvalProblem, ...] = ()


class SampleRecord(_Record):
    """One completion kept for reading. ``text`` is the decoded response, ``score`` the raw score before shaping."""

    step: Count
    uid: str
    question: str
    answer: str
    outcome: Outcome
    score: float
    reward: float
    extracted: str | None
    tokens: Count
    text: str


def write_summary(run_dir: Path, summary: Summary) -> Path:
    """Write ``run_dir/summary.json`` atomically and return its path; FaultError if the disk refuses."""
    return write_text(run_dir / SUMMARY_FILE, summary.model_dump_json(indent=2) + "\n")


def write_eval(run_dir: Path, record: EvalRecord) -> Path:
    """Write ``run_dir/eval_{label}.json`` atomically and return its path; FaultError if the disk refuses."""
    return write_text(run_dir / f"eval_{record.label}.json", record.model_dump_json() + "\n")


def append_samples(run_dir: Path, samples: Iterable[SampleRecord]) -> None:
    """Append completions to ``run_dir/samples.jsonl``; FaultError if the disk refuses."""
    path = run_dir / SAMPLES_FILE
    text = "".join(sample.model_dump_json() + "\n" for sample in samples)
    try:
        with path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(text)
    except OSError as error:
        raise FaultError(f"writing {path}: {error}", "the run folder must take it", "Free disk space") from error


def discard_samples_after(run_dir: Path, step: int) -> None:
    """Drop the completions of steps after ``step``, which a run resumed from its checkpoint records again.

    Raises:
        UserError: a line is not a sample.
        FaultError: the disk refuses.
    """
    path = run_dir / SAMPLES_FILE
    if not path.is_file():
        return
    samples = (
        parse_file(SampleRecord, path, line, number)
        for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1)
        if line.endswith(b"\n")  # a torn last line belongs to a later step
    )
    write_text(path, "".join(s.model_dump_json() + "\n" for s in samples if s.step <= step))


def load(run_dir: Path) -> Summary | None:
    """The run's summary; None when there is none yet (the run is going on or was stopped).

    Raises:
        UserError: the file is there and is not a summary; the first wrong field is named.
    """
    path = run_dir / SUMMARY_FILE
    return parse_file(Summary, path, path.read_bytes()) if path.is_file() else None


def parse_file[ModelT: BaseModel](model: type[ModelT], path: Path, data: bytes, line: int | None = None) -> ModelT:
    """Parse JSON from ``path`` (its ``line``, if given) into ``model``; UserError names the first wrong field."""
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = f"{path}{'' if line is None else f', line {line}'}"
        field = ".".join(str(part) for part in first["loc"]) or "the whole text"
        raise UserError(
            where,
            field,
            f"{first['msg']} ({model.__name__} expected)",
            "Correct or remove the file, then make the report again",
        ) from error


def write_text(path: Path, text: str) -> Path:
    """Write ``path`` beside its name and rename it there; FaultError if the disk refuses."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise FaultError(
            f"writing {path}: {error}", "the run folder must take it", "Free disk space or repair permissions"
        ) from error
    return path
