"""A finished run as the experiment sees it: tokens and time after each step, and who answered what, when."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from megatron_qerl.errors import FaultError, UserError
from megatron_qerl.experiment.plan import RunSpec
from megatron_qerl.report.load import RunData, load_run
from megatron_qerl.report.summary import EvalProblem, EvalRecord, Summary
from megatron_qerl.trainer.checkpoint import list_checkpoints, read_position
from megatron_qerl.types import Outcome

_APART = ("time/eval_s", "time/checkpoint_s")


@dataclass(frozen=True)
class RunRecord:
    """One run.

    Attributes:
        tokens, wall_s: after step k at place k, 0 at place 0: completion tokens generated, and seconds of training
            steps without evaluations and checkpoints.
        groups, mixed: the same for groups generated and groups with a signal.
        evals: finished steps -> evaluation of the clean policy in the experiment's mode.
        summary: what ``train`` wrote last.
        data_hash: of the rendered prompts of training and evaluation.
    """

    spec: RunSpec
    run_dir: Path
    tokens: tuple[int, ...]
    wall_s: tuple[float, ...]
    groups: tuple[float, ...]
    mixed: tuple[float, ...]
    evals: dict[int, EvalRecord]
    summary: Summary
    data_hash: str

    @property
    def steps(self) -> int:
        return len(self.tokens) - 1

    def last_step_within(self, budget_tokens: int) -> int:
        """The last step after which no more than ``budget_tokens`` had been generated; 0 is before training."""
        return max(step for step, tokens in enumerate(self.tokens) if tokens <= budget_tokens)

    def checkpoint_steps(self) -> set[int]:
        """Steps whose policy is stored."""
        return {int(folder.name.removeprefix("step_")) for folder in list_checkpoints(self.run_dir)}

    def reading_step(self, budget_tokens: int) -> int:
        """The last step within the budget whose policy was evaluated or is stored."""
        limit = self.last_step_within(budget_tokens)
        return max(step for step in {*self.evals, *self.checkpoint_steps()} if step <= limit)

    def keep_checkpoints(self, steps: Iterable[int]) -> None:
        """Delete the other checkpoints, but never the newest: exactness to a step needed them, the disk does not."""
        folders = list_checkpoints(self.run_dir)
        kept = set(steps)
        for folder in folders[:-1]:
            if int(folder.name.removeprefix("step_")) not in kept:
                shutil.rmtree(folder)


def read_run(spec: RunSpec, run_dir: Path, mode: str) -> RunRecord:
    """Read a finished run.

    Raises:
        UserError: a file of the run is damaged.
        FaultError: the run lacks something that ``train`` writes.
    """
    data = load_run(run_dir)
    checkpoints = list_checkpoints(run_dir)
    if data.summary is None or not checkpoints:
        rule = "has no summary.json or no checkpoint although it was brought to its end"
        raise FaultError(f"run {run_dir}", rule, "Remove its folder and start the experiment again")
    steps = len(data.steps)
    if data.steps != tuple(range(1, steps + 1)):
        raise UserError(
            f"{run_dir}/metrics.jsonl",
            f"{steps} steps from {data.steps[0]} to {data.steps[-1]}",
            "a step is missing, so tokens and time up to a step are unknown",
            "Remove the run's folder and start the experiment again",
        )
    seconds = _values(data, "time/step_s")
    for name in _APART:
        seconds = [total - part for total, part in zip(seconds, _values(data, name), strict=True)]
    groups = _values(data, "groups/generated")
    mixed = [f * g for f, g in zip(_values(data, "groups/mixed_fraction"), groups, strict=True)]
    return RunRecord(
        spec=spec,
        run_dir=run_dir,
        tokens=tuple(int(t) for t in accumulate(_values(data, "tokens/completion"), initial=0.0)),
        wall_s=tuple(accumulate(seconds, initial=0.0)),
        groups=tuple(accumulate(groups, initial=0.0)),
        mixed=tuple(accumulate(mixed, initial=0.0)),
        evals=_evaluations(data, mode),
        summary=data.summary,
        data_hash=read_position(checkpoints[-1]).data_hash,
    )


def _values(data: RunData, name: str) -> list[float]:
    series = data.series.get(name)
    if series is None or series.steps != data.steps:
        rule = f"{name} is not in every step"
        raise FaultError(f"{data.run_dir}/metrics.jsonl", rule, "Remove the run's folder and start again")
    return list(series.values)


def _evaluations(data: RunData, mode: str) -> dict[int, EvalRecord]:
    """By step; an evaluation on other problems than the run's own, such as a user's shorter one, is left out."""
    own = [e for e in data.evals if e.mode == mode and not e.noisy]
    before = next((e for e in own if e.label == f"before_{mode}"), None)
    if before is None:
        rule = f"there is no evaluation before training in mode {mode}"
        raise FaultError(f"run {data.run_dir}", rule, "Remove its folder and start the experiment again")
    asked = [p.uid for p in before.problems]
    return {e.step: e for e in own if [p.uid for p in e.problems] == asked}


def answers(record: EvalRecord, wanted: Callable[[str], bool]) -> list[EvalProblem]:
    """The verdicts on the clusters that ``wanted`` chooses, in the order asked."""
    return [p for p in record.problems if wanted(p.cluster)]


def share_correct(problems: Iterable[EvalProblem]) -> float:
    """Share of right answers."""
    verdicts = [p.outcome is Outcome.CORRECT for p in problems]
    return sum(verdicts) / len(verdicts)
