"""The numbers of an experiment: per arm and seed, per arm, per pair of arms, per benchmark, and time to quality."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

from megatron_qerl.config.schema import RunConfig
from megatron_qerl.experiment.plan import Experiment
from megatron_qerl.experiment.published import published
from megatron_qerl.experiment.record import RunRecord, answers, share_correct
from megatron_qerl.experiment.runner import Finished, Reading
from megatron_qerl.identity import deciding_settings
from megatron_qerl.metrics.intervals import CONFIDENCE, Interval, accuracy_interval, difference_interval
from megatron_qerl.metrics.noise_information import student_quantile
from megatron_qerl.metrics.survival import (
    Observation,
    common_horizon,
    kaplan_meier,
    median_time,
    restricted_mean,
)
from megatron_qerl.report.summary import EvalProblem
from megatron_qerl.types import Outcome

RESULTS_FILE = "results.json"
SUMMARY_FILE = "summary.json"
#: Of the bootstrap; the same for every interval, so that a table can be made again.
_SEED = 0

DEFINITIONS = {
    "accuracy": "share of right answers of the clean policy (no noise) to the reported evaluation problems; before: "
    "untrained; after: after the last step within the token budget",
    "interval": f"{CONFIDENCE:.0%}, over the choice of problems (bootstrap over clusters); seeds are taken as given",
    "over_seeds": f"{CONFIDENCE:.0%} Student interval of the mean over seeds; with two seeds it is very wide",
    "mixed_group_fraction": "groups with unequal raw scores over groups generated, up to the reading",
    "tokens": "completion tokens generated up to the reading, groups dropped by dynamic sampling included",
    "wall_s": "seconds of training steps up to the reading, without evaluations, checkpoints and start-up",
    "device_hours": "wall_s times the GPUs, or CPU cores, that the run occupied, in hours",
    "time_to_quality": "until the first evaluation on the way whose accuracy is at least the quality; the truth lies "
    "between the evaluation before and this one. A run that is read before it gets there is censored",
    "restricted_mean": "mean of min(time, horizon): area under Kaplan and Meier's curve up to the longest time at "
    "which all arms' curves are known",
}


def build(experiment: Experiment, finished: Finished) -> dict[str, Any]:
    """All results as plain values, ready for JSON."""
    config, maker = experiment.config, _Maker(experiment, finished)
    return {
        "experiment": config.experiment.name,
        "definitions": DEFINITIONS,
        "budget": {
            "completion_tokens_wanted": config.budget.completion_tokens,
            "completion_tokens": finished.budget_tokens,
            "steps": config.budget.steps,
        },
        "seeds": list(config.seeds),
        "arms": {arm.name: maker.arm(arm.name) for arm in config.arms},
        "comparisons": [maker.comparison(first, second) for first, second in config.evaluation.comparisons],
        "differing_settings": differing_settings(finished.configs),
        "tuning": {name: maker.tuning(name) for name in finished.tuned},
        "time_to_quality": maker.time_to_quality(),
        "matched_temperatures": {name: asdict(match) for name, match in finished.temperatures.items()},
        "environment": _environment(finished),
    }


def summary(results: Mapping[str, Any]) -> dict[str, Any]:
    """Per arm and seed: accuracy before and after with interval, mixed_group_fraction, tokens, wall_s."""
    kept = ("accuracy_before", "accuracy_after", "mixed_group_fraction", "tokens", "wall_s")
    return {
        name: {seed: {key: values[key] for key in kept} for seed, values in arm["seeds"].items()}
        for name, arm in results["arms"].items()
    }


@dataclass(frozen=True)
class _Maker:
    experiment: Experiment
    finished: Finished

    def reported(self, cluster: str) -> bool:
        return not self.experiment.selects(cluster)

    def problems(self, reading: Reading, step: int) -> list[EvalProblem]:
        """Verdicts on the reported problems after ``step``."""
        return answers(reading.record.evals[step], self.reported)

    def arm(self, name: str) -> dict[str, Any]:
        readings, config = self.finished.readings[name], self.finished.configs[name]
        after = [p for r in readings for p in self.problems(r, r.step)]
        sources = sorted({p.source for p in after})
        section = self.experiment.arm(name)
        figure = published(section.paper_arm, config, sources)
        return {
            "title": section.title,
            "overrides": section.overrides,
            "model": str(config.model.path),
            "base_hash": readings[0].record.summary.base_hash,
            "learning_rate": config.optimizer.learning_rate,
            "temperature": config.rollout.temperature,
            "accuracy_before": self.over_runs(readings, lambda r: 0),
            "accuracy_after": self.over_runs(readings, lambda r: r.step),
            "seeds": {str(r.record.spec.seed): self.seed(r) for r in readings},
            "published": None if figure is None else asdict(figure),
        }

    def over_runs(self, readings: Sequence[Reading], step: Callable[[Reading], int]) -> dict[str, Any]:
        """Accuracy of all seeds together, by benchmark, and over seeds."""
        per_run = [self.problems(r, step(r)) for r in readings]
        together = [p for problems in per_run for p in problems]
        return {
            **asdict(self.interval(together)),
            "over_seeds": over_seeds([share_correct(problems) for problems in per_run]),
            "benchmarks": self.by_source(together),
        }

    def seed(self, reading: Reading) -> dict[str, Any]:
        record, step = reading.record, reading.step
        before, after = self.problems(reading, 0), self.problems(reading, step)
        return {
            "accuracy_before": asdict(self.interval(before)),
            "accuracy_after": asdict(self.interval(after)),
            "mixed_group_fraction": record.mixed[step] / record.groups[step] if step else None,
            "tokens": record.tokens[step],
            "wall_s": record.wall_s[step],
            "device_hours": record.wall_s[step] * self.devices(record) / 3600.0,
            "step": step,
            "steps_trained": record.steps,
            "benchmarks_before": self.by_source(before),
            "benchmarks_after": self.by_source(after),
            "run": record.spec.name,
        }

    def interval(self, problems: Sequence[EvalProblem]) -> Interval:
        resamples = self.experiment.config.evaluation.bootstrap_resamples
        return accuracy_interval(_verdicts(problems), [p.cluster for p in problems], resamples, _SEED)

    def by_source(self, problems: Sequence[EvalProblem]) -> dict[str, Any]:
        sources = sorted({p.source for p in problems})
        return {s: asdict(self.interval([p for p in problems if p.source == s])) for s in sources}

    def devices(self, record: RunRecord) -> int:
        """GPUs or CPU cores of a run: as the experiment says, else 1 GPU, or the CPU threads that the run had."""
        stated = self.experiment.config.experiment.devices
        if stated is not None:
            return stated
        hardware = record.summary.hardware or {}
        return 1 if "gpu" in hardware else int(hardware["cpu_threads"])

    def comparison(self, first: str, second: str) -> dict[str, Any]:
        """First less second, pair by pair: same seed, same problem."""
        arms = [self.finished.readings[name] for name in (first, second)]
        after = [[self.problems(r, r.step) for r in arm] for arm in arms]
        before = [[self.problems(r, 0) for r in arm] for arm in arms]
        gaps = [share_correct(a) - share_correct(b) for a, b in zip(*after, strict=True)]
        return {
            "first": first,
            "second": second,
            "after": {
                **self.difference(_joined(after[0]), _joined(after[1])),
                "over_seeds": over_seeds(gaps),
                "per_seed": {str(r.record.spec.seed): gap for r, gap in zip(arms[0], gaps, strict=True)},
            },
            "before": self.difference(_joined(before[0]), _joined(before[1])),
            "benchmarks_after": {
                source: self.difference(
                    [p for p in _joined(after[0]) if p.source == source],
                    [p for p in _joined(after[1]) if p.source == source],
                )
                for source in sorted({p.source for p in _joined(after[0])})
            },
        }

    def difference(self, first: Sequence[EvalProblem], second: Sequence[EvalProblem]) -> dict[str, Any]:
        assert [p.uid for p in first] == [p.uid for p in second], "pairs are of the same problem"
        resamples = self.experiment.config.evaluation.bootstrap_resamples
        clusters = [p.cluster for p in first]
        return asdict(difference_interval(_verdicts(first), _verdicts(second), clusters, resamples, _SEED))

    def tuning(self, arm: str) -> dict[str, Any]:
        """The arm's trials; their accuracy on the reported problems did not choose, and compares arms at one rate."""
        tuned = self.finished.tuned[arm]
        trials = [
            {
                "learning_rate": t.learning_rate,
                "seed": t.record.spec.seed,
                "selection_accuracy": t.selection_accuracy,
                "accuracy": asdict(self.interval(answers(t.record.evals[t.record.steps], self.reported))),
                "tokens": t.record.tokens[-1],
                "wall_s": t.record.wall_s[-1],
            }
            for t in tuned.trials
        ]
        return {"learning_rate": tuned.learning_rate, "trials": trials}

    def time_to_quality(self) -> dict[str, Any]:
        """Kaplan-Meier's curve and the restricted mean of each arm, in each unit."""
        units: dict[str, Callable[[RunRecord, int], float]] = {
            "wall_s": lambda record, step: record.wall_s[step],
            "tokens": lambda record, step: float(record.tokens[step]),
            "device_hours": lambda record, step: record.wall_s[step] * self.devices(record) / 3600.0,
        }
        result: dict[str, Any] = {"quality": self.experiment.config.evaluation.quality}
        for unit, clock in units.items():
            observed = {
                name: [self.observation(r, clock) for r in readings]
                for name, readings in self.finished.readings.items()
            }
            horizon = common_horizon(list(observed.values()))
            result[unit] = {"horizon": horizon, "arms": {n: _survival(o, horizon) for n, o in observed.items()}}
        return result

    def observation(self, reading: Reading, clock: Callable[[RunRecord, int], float]) -> Observation:
        """The first evaluation with the quality, or the reading without it."""
        quality, record = self.experiment.config.evaluation.quality, reading.record
        for step in sorted(record.evals):
            if step <= reading.step and share_correct(self.problems(reading, step)) >= quality:
                return Observation(clock(record, step), reached=True)
        return Observation(clock(record, reading.step), reached=False)


def over_seeds(values: Sequence[float]) -> dict[str, Any]:
    """Mean over seeds with Student's interval; no interval for one seed."""
    mean = fmean(values)
    if len(values) < 2:
        return {"mean": mean, "low": None, "high": None, "seeds": len(values)}
    half = student_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return {"mean": mean, "low": mean - half, "high": mean + half, "seeds": len(values)}


def _survival(observations: Sequence[Observation], horizon: float) -> dict[str, Any]:
    return {
        "observations": [asdict(o) for o in observations],
        "curve": [asdict(point) for point in kaplan_meier(observations)],
        "restricted_mean": asdict(restricted_mean(observations, horizon)),
        "median": median_time(observations),
    }


def _verdicts(problems: Iterable[EvalProblem]) -> list[bool]:
    return [p.outcome is Outcome.CORRECT for p in problems]


def _joined(runs: Iterable[Sequence[EvalProblem]]) -> list[EvalProblem]:
    return [p for problems in runs for p in problems]


def _environment(finished: Finished) -> dict[str, Any]:
    record = next(iter(finished.readings.values()))[0].record
    return {
        "versions": record.summary.versions,
        "hardware": record.summary.hardware,
        "finished_at": max(r.record.summary.finished_at or "" for rs in finished.readings.values() for r in rs),
    }


def differing_settings(configs: Mapping[str, RunConfig]) -> dict[str, dict[str, Any]]:
    """Dotted key -> arm -> value, of every setting in which two arms differ: what a difference can be due to."""
    settings = {name: deciding_settings(config) for name, config in configs.items()}
    keys = sorted({key for values in settings.values() for key in values} - {"run.name"})
    return {
        key: {name: values.get(key) for name, values in settings.items()}
        for key in keys
        if len({repr(values.get(key)) for values in settings.values()}) > 1
    }
