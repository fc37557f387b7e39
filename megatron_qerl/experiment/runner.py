"""The experiment: match temperatures, search rates, run the final runs, read them at equal tokens, write results.

Every stage leaves files, and a stage whose files are there is not done again. So the same command starts an experiment
and goes on with one that was interrupted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from megatron_qerl.config.loader import RESOLVED_CONFIG_FILENAME, load_resolved_config
from megatron_qerl.config.schema import RunConfig
from megatron_qerl.errors import FaultError, UserError
from megatron_qerl.experiment.entropy import MatchedTemperature, read_match
from megatron_qerl.experiment.launch import Launch
from megatron_qerl.experiment.plan import Experiment, RunSpec
from megatron_qerl.experiment.record import RunRecord, answers, read_run, share_correct
from megatron_qerl.identity import first_difference
from megatron_qerl.report.summary import SUMMARY_FILE

Say = Callable[[str], None]


@dataclass(frozen=True)
class Trial:
    """One trial of the search: its run, and the share of right answers on the selecting clusters at its end."""

    record: RunRecord
    selection_accuracy: float

    @property
    def learning_rate(self) -> float:
        return self.record.spec.learning_rate


@dataclass(frozen=True)
class Tuned:
    """An arm's rate and the trials that led to it."""

    learning_rate: float
    trials: tuple[Trial, ...]


@dataclass(frozen=True)
class Reading:
    """A final run and the step at which it is read."""

    record: RunRecord
    step: int


@dataclass(frozen=True)
class Finished:
    """A finished experiment: everything that results are made of.

    Attributes:
        temperatures: arm -> what its probe found, for matched arms.
        tuned: arm -> rate and trials.
        configs: arm -> its config, with the first seed.
        readings: arm -> one reading a seed, in the order of the seeds.
        budget_tokens: completion tokens at which runs are read.
    """

    temperatures: Mapping[str, MatchedTemperature]
    tuned: Mapping[str, Tuned]
    configs: Mapping[str, RunConfig]
    readings: Mapping[str, tuple[Reading, ...]]
    budget_tokens: int


class Runner:
    """Brings an experiment to its end.

    Args:
        experiment: opened and claimed.
        say: gets one line for each thing done.
    """

    def __init__(self, experiment: Experiment, say: Say) -> None:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            rule = "the experiment starts the processes of its runs itself"
            raise UserError("WORLD_SIZE", os.environ["WORLD_SIZE"], rule, "Start it once, and set experiment.launcher")
        self.experiment, self.say = experiment, say
        self.launch = Launch(experiment.config.experiment.launcher, experiment.folder)
        self.temperatures: dict[str, float] = {}

    def run(self) -> Finished:
        """All stages in order."""
        experiment, config = self.experiment, self.experiment.config
        matches = {arm.name: self.match(arm.name) for arm in config.arms if arm.match_entropy_of is not None}
        tuned = {arm.name: Tuned(config.tuning.learning_rates[0], ()) for arm in config.arms}
        if experiment.searches:
            tuned = {arm.name: self.tune(arm.name) for arm in config.arms}
        specs = experiment.finals({name: found.learning_rate for name, found in tuned.items()})
        records = []
        for spec in specs:
            records.append(self.train(spec))
            if config.budget.completion_tokens is not None:
                check_readable(records[-1], config.budget.completion_tokens)
        self.check_pairs(records)
        budget, readings = self.read(records)
        by_arm = {arm.name: tuple(r for r in readings if r.record.spec.arm == arm.name) for arm in config.arms}
        configs = {arm.name: load_resolved_config(by_arm[arm.name][0].record.run_dir) for arm in config.arms}
        return Finished(matches, tuned, configs, by_arm, budget)

    def match(self, arm: str) -> MatchedTemperature:
        """The arm's temperature; measured once and then kept."""
        experiment, config = self.experiment, self.experiment.config
        path = experiment.folder / "entropy" / f"{arm}.json"
        other = experiment.arm(arm).match_entropy_of
        assert other is not None, "only matched arms are matched"
        if not path.is_file():
            self.say(f"entropy: finding the temperature of {arm} that matches {other}")
            rate, seed = config.tuning.learning_rates[0], config.seeds[0]
            target, own = (experiment.run_config(RunSpec("final", name, rate, seed)) for name in (other, arm))
            self.launch.match_temperature(target, own, config.entropy, path)
        found = read_match(path)
        self.temperatures[arm] = found.temperature
        self.say(f"entropy: {arm} samples at temperature {found.temperature:.4f}")
        return found

    def train(self, spec: RunSpec) -> RunRecord:
        """Bring one run to its end; a finished one is only checked and read.

        Raises:
            UserError: a run of this name was made with another config.
        """
        experiment = self.experiment
        config = experiment.run_config(spec, self.temperatures.get(spec.arm))
        run_dir = experiment.runs_dir / spec.name
        if (run_dir / RESOLVED_CONFIG_FILENAME).is_file():
            changed = first_difference(load_resolved_config(run_dir), config)
            if changed is not None:
                rule = f"was made with another config ({changed})"
                remedy = "Undo the change, or start another experiment under a new experiment.name"
                raise UserError("run folder", run_dir, rule, remedy)
        if (run_dir / SUMMARY_FILE).is_file():
            self.say(f"{spec.name}: finished before")
        else:
            resumes = any(run_dir.glob("checkpoints/step_*"))
            self.say(f"{spec.name}: {'resumed' if resumes else 'started'}")
            self.launch.train(config)
        return read_run(spec, run_dir, experiment.config.evaluation.mode)

    def tune(self, arm: str) -> Tuned:
        """The common grid, then the arm's refinement around its best; the best of all trials wins."""
        experiment = self.experiment
        trials = [self._trial(spec) for spec in experiment.grid(arm)]
        trials += [self._trial(spec) for spec in experiment.refinement(arm, best_rate(trials))]
        rate = best_rate(trials)
        self.say(f"{arm}: learning rate {rate:g}, the best of {len(trials)} trials")
        return Tuned(rate, tuple(trials))

    def _trial(self, spec: RunSpec) -> Trial:
        record = self.train(spec)
        chosen = answers(record.evals[record.steps], self.experiment.selects)
        return Trial(record, share_correct(chosen))

    def check_pairs(self, records: Sequence[RunRecord]) -> None:
        """Runs of one seed must have seen the same problems, and all runs been asked the same.

        Raises:
            FaultError: they were not.
        """
        remedy = "Give all arms models with the same tokenizer and chat template, and leave data files alone"
        asked = {tuple(p.uid for p in record.evals[0].problems) for record in records}
        if len(asked) > 1:
            raise FaultError("final runs", "were evaluated on different problems", remedy)
        bases: dict[Path, str | None] = {}
        for record in records:
            path, found = load_resolved_config(record.run_dir).model.path, record.summary.base_hash
            if bases.setdefault(path, found) != found:
                raise FaultError(f"model {path}", "was changed between two final runs", "Start another experiment")
        for seed in self.experiment.config.seeds:
            if len({record.data_hash for record in records if record.spec.seed == seed}) > 1:
                raise FaultError(f"final runs of seed {seed}", "had different prompts, so they are no pairs", remedy)

    def read(self, records: Sequence[RunRecord]) -> tuple[int, list[Reading]]:
        """The token budget in force, and each run read at it; evaluates where training did not."""
        wanted, mode = self.experiment.config.budget.completion_tokens, self.experiment.config.evaluation.mode
        reached = min(record.tokens[-1] for record in records)
        budget = reached if wanted is None else min(reached, wanted)
        for record in records:
            check_readable(record, budget)
        if wanted is not None and reached < wanted:
            self.say(
                f"budget: a run ended after {reached} completion tokens, so all are read there and not at {wanted}"
            )
        readings = []
        for record in records:
            step = record.reading_step(budget)
            if step not in record.evals:
                self.say(f"{record.spec.name}: evaluating the policy after step {step} of {record.steps}")
                self.launch.evaluate(record.run_dir, step, mode)
                record = read_run(record.spec, record.run_dir, mode)  # noqa: PLW2901
            record.keep_checkpoints([step])
            readings.append(Reading(record, step))
        return budget, readings


def check_readable(record: RunRecord, budget_tokens: int) -> None:
    """Some trained policy of the run must lie within the budget.

    Raises:
        UserError: none does.
    """
    if record.reading_step(budget_tokens) == 0:
        raise UserError(
            "budget.completion_tokens",
            budget_tokens,
            f"run {record.spec.name} had generated {record.tokens[1]} tokens in its first step, and none of its stored "
            "policies lies within the budget but the untrained one",
            "raise it (or budget.steps, if another run ended early), or lower budget.checkpoint_every_steps, under a "
            "new experiment.name",
        )


def best_rate(trials: Sequence[Trial]) -> float:
    """The rate with the highest mean accuracy over its seeds; of equals the smallest rate."""
    rates = sorted({trial.learning_rate for trial in trials})
    return max(rates, key=lambda r: fmean(t.selection_accuracy for t in trials if t.learning_rate == r))
