"""From an experiment's config to the runs it consists of, and the folder that belongs to it alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_qerl.config.availability import refuse_unbuilt
from megatron_qerl.config.loader import load_config, resolved_yaml
from megatron_qerl.config.schema import RunConfig
from megatron_qerl.data.dataset import EVALUATION_SHUFFLE_SEED, load_dataset
from megatron_qerl.errors import ConfigError, FaultError, UserError
from megatron_qerl.experiment.config import ArmSection, ExperimentConfig
from megatron_qerl.identity import first_difference

CONFIG_FILE = "experiment.yaml"
RECIPE_FILE = "recipe.yaml"
#: Keys of the experiment that move or start runs and change no number.
FREE_KEYS = ("experiment.output_dir", "experiment.recipe", "experiment.launcher", "experiment.devices")

Stage = Literal["tune", "final"]


@dataclass(frozen=True)
class RunSpec:
    """One run: which arm, at which rate, with which seed, and whether it searches or counts."""

    stage: Stage
    arm: str
    learning_rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.stage}-{self.arm}-lr{self.learning_rate:g}-seed{self.seed}"


@dataclass(frozen=True)
class Experiment:
    """A config with its recipe and folder.

    Attributes:
        recipe_path: the recipe's file.
        recipe: the recipe with what the experiment changes for all arms.
        folder: the experiment's folder; runs are in ``folder/runs``.
    """

    config: ExperimentConfig
    recipe_path: Path
    recipe: RunConfig
    folder: Path

    @classmethod
    def open(cls, config: ExperimentConfig, config_path: Path) -> Experiment:
        """Load the recipe and check every arm against it, before anything is written.

        Raises:
            ConfigError: the recipe or an arm is not a valid config.
        """
        section = config.experiment
        recipe_path = config_path.parent / section.recipe
        recipe: RunConfig = load_config(recipe_path, options=section.overrides)
        experiment = cls(config, recipe_path, recipe, section.output_dir / section.name)
        for arm in config.arms:
            for stage in ("tune", "final") if experiment.searches else ("final",):
                rate, seed = config.tuning.learning_rates[0], config.seeds[0]
                spec = RunSpec(stage, arm.name, rate, seed)
                refuse_unbuilt(experiment.run_config(spec, recipe.rollout.temperature))
        experiment.check_arms()
        return experiment

    @property
    def runs_dir(self) -> Path:
        return self.folder / "runs"

    @property
    def searches(self) -> bool:
        """Whether there is a rate to choose; with one trial there is none, and all evaluation problems are reported."""
        tuning = self.config.tuning
        return len(tuning.learning_rates) + len(tuning.refine_factors) > 1

    def arm(self, name: str) -> ArmSection:
        """The arm called ``name``."""
        return next(arm for arm in self.config.arms if arm.name == name)

    def run_config(self, spec: RunSpec, temperature: float | None = None) -> RunConfig:
        """The config of a run.

        Args:
            spec: the run.
            temperature: found by the entropy probe; None for arms that are not matched.

        Raises:
            ConfigError: the arm's keys do not fit the recipe.
        """
        arm, budget, mode = self.arm(spec.arm), self.config.budget, self.config.evaluation.mode
        final = spec.stage == "final"
        steps = budget.steps if final else self.config.tuning.steps
        options: dict[str, Any] = {
            **self.config.experiment.overrides,
            **arm.overrides,
            "run.name": spec.name,
            "run.output_dir": str(self.runs_dir),
            "run.seed": spec.seed,
            "optimizer.learning_rate": spec.learning_rate,
            "train.steps": steps,
            "checkpoint.interval_steps": budget.checkpoint_every_steps if final else steps,
            "checkpoint.keep": steps if final else 1,
            "eval.interval_steps": budget.evaluate_every_steps if final else 0,
            "eval.modes": [mode],
            "eval.noisy": False,
        }
        if arm.match_entropy_of is not None and temperature is not None:
            options["rollout.temperature"] = temperature
        try:
            return load_config(self.recipe_path, options=options)
        except ConfigError as error:
            where = f"arm {arm.name} on {self.recipe_path}: {error.key}"
            raise ConfigError(where, error.value, error.rule, error.remedy) from error

    def check_arms(self) -> None:
        """What must be the same in all arms, or no difference between them could be attributed.

        Raises:
            ConfigError: an arm changes it.
        """
        shared = ("data", "reward", "eval", "checkpoint")
        first = self.config.arms[0].name
        specs = {arm.name: RunSpec("final", arm.name, 1.0, 0) for arm in self.config.arms}
        reference = self.run_config(specs[first])
        for name, spec in specs.items():
            config = self.run_config(spec)
            for section in shared:
                if getattr(config, section) != getattr(reference, section):
                    rule = f"arms {first} and {name} differ in it, so their accuracies could not be compared"
                    raise ConfigError(f"arms.{name}.overrides", section, rule, f"Set {section} in the recipe")
            sizes = config.rollout.prompts_per_step, config.rollout.group_size, config.rollout.max_new_tokens
            wanted = reference.rollout
            if sizes != (wanted.prompts_per_step, wanted.group_size, wanted.max_new_tokens):
                rule = f"arms {first} and {name} differ in prompts_per_step, group_size or max_new_tokens"
                raise ConfigError(f"arms.{name}.overrides", "rollout", rule, "Set them in the recipe")

    def grid(self, arm: str) -> list[RunSpec]:
        """The trials at the common rates."""
        tuning = self.config.tuning
        return [RunSpec("tune", arm, rate, seed) for rate in tuning.learning_rates for seed in tuning.seeds]

    def refinement(self, arm: str, best: float) -> list[RunSpec]:
        """The arm's further trials around its ``best`` rate of the grid."""
        tuning = self.config.tuning
        rates = [float(f"{best * factor:.4g}") for factor in tuning.refine_factors]
        return [RunSpec("tune", arm, rate, seed) for rate in rates for seed in tuning.seeds]

    def finals(self, rates: Mapping[str, float]) -> list[RunSpec]:
        """The final runs at each arm's rate; seed by seed, so that an early stop leaves whole pairs."""
        return [RunSpec("final", arm, rates[arm], seed) for seed in self.config.seeds for arm in rates]

    def selects(self, cluster: str) -> bool:
        """Whether a cluster of evaluation problems chooses rates; the others are reported. Seeds do not enter."""
        if not self.searches:
            return False
        fraction = int.from_bytes(hashlib.sha256(f"selection/{cluster}".encode()).digest()[:8], "big") / 2.0**64
        return fraction < self.config.tuning.selection_share

    def check_split(self) -> None:
        """Both halves of the evaluation problems must hold clusters.

        Raises:
            DataError: the evaluation data cannot be read.
            ConfigError: nothing would be left to select by, or to report.
        """
        problems = load_dataset(self.recipe.data.eval, EVALUATION_SHUFFLE_SEED)[: self.recipe.eval.problems]
        clusters = {p.cluster for p in problems}
        selecting = sum(self.selects(c) for c in clusters)
        if selecting == len(clusters) or (self.searches and selecting == 0):
            raise ConfigError(
                "tuning.selection_share",
                self.config.tuning.selection_share,
                f"of {len(clusters)} evaluation clusters {selecting} would choose rates and "
                f"{len(clusters) - selecting} be reported; both need at least one",
                "change it, or evaluate on more problems",
            )

    def check_models(self) -> None:
        """Every arm's model folder can be opened, and all have the same tokenizer and chat template.

        Raises:
            CheckpointError: a folder cannot be used.
            ConfigError: prompts would differ between arms.
        """
        from megatron_qerl.nvfp4.checkpoint import ModelFolder

        rate, seed = self.config.tuning.learning_rates[0], self.config.seeds[0]
        paths = {a.name: self.run_config(RunSpec("final", a.name, rate, seed)).model.path for a in self.config.arms}
        first, *_ = paths.values()
        wanted = ModelFolder.open(first)
        for name, path in paths.items():
            found = ModelFolder.open(path)
            same = (found.tokenizer_hash, found.chat_template_hash) == (
                wanted.tokenizer_hash,
                wanted.chat_template_hash,
            )
            if not same:
                rule = f"its tokenizer or chat template is not that of {first}, so prompts would be no pairs"
                raise ConfigError(
                    f"arms.{name}: model.path", path, rule, "Quantise the folder that the others train on"
                )

    def claim(self) -> None:
        """Make the folder this experiment's, or see that it is.

        Raises:
            UserError: it holds another experiment; what differs is named.
            FaultError: the disk refuses.
        """
        mine, recipe = self.folder / CONFIG_FILE, self.folder / RECIPE_FILE
        if mine.is_file() and recipe.is_file():
            found = differences(load_config(mine, model=ExperimentConfig), self.config)
            changed = first_difference(load_config(recipe), self.recipe)
            if changed is not None:
                found.append(f"recipe {changed}")
            if found:
                rule = f"holds an experiment with another config ({'; '.join(found[:5])})"
                remedy = "Undo the change, or start another one under a new experiment.name"
                raise UserError("experiment folder", self.folder, rule, remedy)
            return
        if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            rule = f"has content and no {CONFIG_FILE} with {RECIPE_FILE}"
            raise UserError("experiment folder", self.folder, rule, "Choose another experiment.name, or remove it")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            recipe.write_text(resolved_yaml(self.recipe))
            mine.write_text(resolved_yaml(self.config))
        except OSError as error:
            what = f"experiment folder {self.folder}: {error}"
            raise FaultError(what, "it must be writable", "Choose another experiment.output_dir") from error


def differences(old: ExperimentConfig, new: ExperimentConfig) -> list[str]:
    """``key: old -> new`` of every setting that decides numbers; an arm goes by its name, not by its place."""
    before, after = dict(_settings(old)), dict(_settings(new))
    return [
        f"{key}: {before.get(key, 'absent')} -> {after.get(key, 'absent')}"
        for key in sorted({*before, *after})
        if before.get(key, _ABSENT) != after.get(key, _ABSENT)
    ]


_ABSENT = object()


def _settings(config: ExperimentConfig) -> Iterator[tuple[str, Any]]:
    data = config.model_dump(mode="json")
    data["arms"] = {arm["name"]: arm for arm in data["arms"]}
    for key, value in _flat(data, ""):
        if key not in FREE_KEYS:
            yield key, value


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def describe(experiment: Experiment) -> Iterator[str]:
    """What the experiment would do, one fact a line."""
    config, tuning, budget = experiment.config, experiment.config.tuning, experiment.config.budget
    arms = len(config.arms)
    yield f"experiment folder: {experiment.folder} ({'exists' if experiment.folder.exists() else 'new'})"
    for arm in config.arms:
        run = experiment.run_config(RunSpec("final", arm.name, tuning.learning_rates[0], config.seeds[0]))
        matched = f", temperature matched to {arm.match_entropy_of}" if arm.match_entropy_of else ""
        here = "found" if (run.model.path / "config.json").is_file() else "NOT FOUND here"
        noise = "noise on" if run.noise.enabled else "noise off"
        yield f"arm {arm.name} ({arm.title}): {run.model.path} ({here}), {noise}{matched}"
    data = experiment.recipe.data.eval.path
    if data is not None and not data.is_file():
        yield f"evaluation problems: {data} (NOT FOUND here)"
    if experiment.searches:
        rates, factors = _list(tuning.learning_rates), _list(tuning.refine_factors)
        trials = (len(tuning.learning_rates) + len(tuning.refine_factors)) * len(tuning.seeds)
        yield f"tuning: {trials} trials of {tuning.steps} steps an arm, {trials * arms} in all; rates {rates} for all,"
        yield f"  then the arm's best times {factors or 'nothing'}; {tuning.selection_share:g} of the clusters choose"
    else:
        yield f"tuning: none, learning rate {tuning.learning_rates[0]:g} for all"
    yield f"final runs: {arms} arms x {len(config.seeds)} seeds x {budget.steps} steps"
    tokens = budget.completion_tokens
    yield f"read at {f'{tokens} completion tokens' if tokens else 'the most tokens that every run reached'}"


def _list(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)
