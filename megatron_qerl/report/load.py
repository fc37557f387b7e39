"""Reads a run folder into what the report shows, and remembers what was missing or odd.

A report on doubtful numbers is worse than none: a broken line, a step that is there twice or an unreadable file stops
it with the place and the remedy. What is merely absent becomes a note. The last line may be torn, since a report can be
made of a run that is still going.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_qerl.config.loader import RESOLVED_CONFIG_FILENAME
from megatron_qerl.errors import UserError
from megatron_qerl.metrics.names import METRICS
from megatron_qerl.metrics.sinks.jsonl import FILE_NAME as METRICS_FILE
from megatron_qerl.report.summary import (
    DIAGNOSIS_PATTERN,
    EVAL_PATTERN,
    SAMPLES_FILE,
    SUMMARY_FILE,
    EvalRecord,
    SampleRecord,
    Summary,
    load,
    parse_file,
)


@dataclass(frozen=True)
class Series:
    """One metric over the run: two tuples of equal length, steps increasing. Steps without the metric are left out."""

    steps: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class RunData:
    """Everything the report shows.

    Attributes:
        run_dir: the folder.
        steps: recorded steps, increasing, at least one.
        series: registered metric -> its series, in the registry's order; only metrics that were recorded.
        unregistered: recorded names that this version does not know.
        summary: None when the run has not finished.
        config: the resolved config, empty when missing; ``config_text`` is the file as it stands.
        evals: evaluations by step, mode and noise.
        samples: recorded completions in the order of the file.
        diagnoses: what ``megatron-qerl diagnose`` measured, by checkpoint.
        notes: what was missing or ignored, one sentence each.
    """

    run_dir: Path
    steps: tuple[int, ...]
    series: dict[str, Series]
    unregistered: tuple[str, ...]
    summary: Summary | None
    config: dict[str, Any]
    config_text: str
    evals: tuple[EvalRecord, ...]
    samples: tuple[SampleRecord, ...]
    diagnoses: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]

    def setting(self, dotted: str) -> Any:
        """A value of the config by its dotted key, None when it is not there."""
        node: Any = self.config
        for part in dotted.split("."):
            if not isinstance(node, dict) or part not in node:
                return None
            node = node[part]
        return node


def load_run(run_dir: Path) -> RunData:
    """Read a run folder.

    Raises:
        UserError: the folder or its metrics.jsonl is missing or holds no finished step, or a file in it is damaged.
    """
    if not run_dir.is_dir():
        raise UserError("run folder", run_dir, "is not a folder", "Name the folder that train wrote")
    notes: list[str] = []
    steps, recorded = _read_metrics(run_dir / METRICS_FILE, notes)
    series = {name: Series(*recorded[name]) for name in METRICS if name in recorded}
    summary = load(run_dir)
    if summary is None:
        notes.append(f"{SUMMARY_FILE} is missing: the run has not finished, or was stopped.")
    config, config_text = _read_config(run_dir / RESOLVED_CONFIG_FILENAME, notes)
    return RunData(
        run_dir=run_dir,
        steps=steps,
        series=series,
        unregistered=tuple(sorted(set(recorded) - set(METRICS))),
        summary=summary,
        config=config,
        config_text=config_text,
        evals=_read_evals(run_dir, notes),
        samples=_read_samples(run_dir / SAMPLES_FILE, notes),
        diagnoses=_read_diagnoses(run_dir),
        notes=tuple(notes),
    )


def _complete_lines(path: Path, notes: list[str]) -> list[tuple[int, bytes]]:
    """Numbered lines that have their line end; a torn last line is dropped with a note."""
    lines = path.read_bytes().split(b"\n")
    if lines.pop():
        notes.append(f"The last line of {path.name} was incomplete and is left out.")
    return [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def _read_metrics(
    path: Path, notes: list[str]
) -> tuple[tuple[int, ...], dict[str, tuple[tuple[int, ...], tuple[float, ...]]]]:
    lines = _complete_lines(path, notes) if path.is_file() else []
    if not lines:
        found = "holds no finished step" if path.is_file() else "is not there"
        raise UserError(
            str(path),
            found,
            "a report needs at least one finished training step",
            "Let the run finish a step, or look at its output for the error that stopped it",
        )
    steps: list[int] = []
    points: dict[str, tuple[list[int], list[float]]] = {}
    for number, line in lines:
        step, values = _parse_line(path, number, line)
        if steps and step <= steps[-1]:
            raise UserError(
                f"{path}, line {number}",
                f"step {step} after step {steps[-1]}",
                "steps increase from line to line",
                "Two runs were mixed in one file; remove the lines of one of them",
            )
        steps.append(step)
        for name, value in values.items():
            at, of = points.setdefault(name, ([], []))
            at.append(step)
            of.append(value)
    return tuple(steps), {name: (tuple(at), tuple(of)) for name, (at, of) in points.items()}


def _parse_line(path: Path, number: int, line: bytes) -> tuple[int, dict[str, float]]:
    remedy = "Restore the file from a copy, or remove the line"

    def broken(value: object, rule: str) -> UserError:
        return UserError(f"{path}, line {number}", value, rule, remedy)

    try:
        document = json.loads(line)
    except ValueError as error:
        raise broken(line[:60].decode(errors="replace"), f"every line is one JSON object ({error})") from error
    if not isinstance(document, dict) or not isinstance(document.get("step"), int):
        raise broken(line[:60].decode(errors="replace"), "every line is an object with a whole number as step")
    values = document.get("values")
    if not isinstance(values, dict):
        raise broken(type(values).__name__, "values is an object of names and numbers")
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise broken(f"{name}: {value!r}", "a metric is one finite number")
    return document["step"], values


def _read_config(path: Path, notes: list[str]) -> tuple[dict[str, Any], str]:
    if not path.is_file():
        notes.append(f"{path.name} is missing, so the settings of the run are unknown.")
        return {}, ""
    text = path.read_text(encoding="utf-8")
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(str(path), "not YAML", str(error), "Restore the file that train wrote") from error
    if not isinstance(config, dict):
        raise UserError(str(path), type(config).__name__, "a config is a mapping", "Restore the file that train wrote")
    return config, text


def _read_evals(run_dir: Path, notes: list[str]) -> tuple[EvalRecord, ...]:
    evals = [parse_file(EvalRecord, path, path.read_bytes()) for path in sorted(run_dir.glob(EVAL_PATTERN))]
    if not evals:
        notes.append("There is no eval_*.json, so the outcome of single evaluation problems is unknown.")
    return tuple(sorted(evals, key=lambda record: (record.step, record.mode, record.noisy, record.label)))


_DIAGNOSIS_KEYS = ("checkpoint", "sigma", "states", "modes", "entropy", "definitions")


def _read_diagnoses(run_dir: Path) -> tuple[dict[str, Any], ...]:
    """What ``megatron-qerl diagnose`` wrote, by checkpoint."""
    found = []
    for path in sorted(run_dir.glob(DIAGNOSIS_PATTERN)):
        try:
            document = json.loads(path.read_bytes())
            missing = [key for key in _DIAGNOSIS_KEYS if key not in document]
        except (ValueError, TypeError) as error:
            raise UserError(str(path), "damaged", str(error), "Remove it, or diagnose that checkpoint again") from error
        if missing:
            raise UserError(str(path), f"no {missing[0]}", "it is incomplete", "Diagnose that checkpoint again")
        found.append(document)
    return tuple(found)


def _read_samples(path: Path, notes: list[str]) -> tuple[SampleRecord, ...]:
    if not path.is_file():
        notes.append(f"{path.name} is missing, so there are no completions to read.")
        return ()
    return tuple(parse_file(SampleRecord, path, line, number) for number, line in _complete_lines(path, notes))
