"""The configuration of an experiment: a recipe, what each arm changes in it, and how the arms are compared."""

from __future__ import annotations

import math
import re
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from megatron_qerl.config.section import FolderName, NonNegativeInt, PositiveFloat, PositiveInt, Section

#: Keys that the experiment sets in every run, so that no arm and no recipe decides them.
OWN_KEYS = (
    "run.name", "run.output_dir", "run.seed", "optimizer.learning_rate", "train.steps", "checkpoint.interval_steps",
    "checkpoint.keep", "eval.interval_steps", "eval.modes",
)  # fmt: skip

PaperArm = Literal["bf16_lora", "nvfp4_lora", "nvfp4_lora_aqn"]


def _checked(overrides: dict[str, Any]) -> dict[str, Any]:
    for key in overrides:
        if key in OWN_KEYS:
            raise ValueError(f"{key} is set by the experiment, the same in all arms; remove it from overrides")
        if "." not in key:
            raise ValueError(f"{key} must be a dotted key; write for example noise.enabled: false")
    return overrides


class ExperimentSection(Section):
    """Where the experiment lives and how a run is started."""

    name: FolderName = Field(description="name of the experiment; its folder is output_dir/name")
    output_dir: Path = Field(default=Path("runs"), description="parent of the experiment's folder")
    recipe: Path = Field(description="config of train that every run starts from, relative to the experiment's file")
    overrides: dict[str, Any] = Field(default={}, description="dotted key of the recipe -> value, for all arms")
    launcher: tuple[str, ...] = Field(
        default=(),
        description="command that starts a run's processes, such as [torchrun, --nproc-per-node, '8']; "
        "empty: in this process",
    )
    devices: PositiveInt | None = Field(
        default=None, description="GPUs, or CPU cores, that a run occupies; null: 1 GPU, or torch's CPU threads"
    )

    @field_validator("overrides")
    @classmethod
    def _overrides_are_free(cls, overrides: dict[str, Any]) -> dict[str, Any]:
        return _checked(overrides)


class ArmSection(Section):
    """One arm: the recipe with these keys changed."""

    name: str = Field(description="short name, used in folder names")
    title: str = Field(description="name in tables")
    overrides: dict[str, Any] = Field(default={}, description="dotted key of the recipe -> value")
    match_entropy_of: str | None = Field(
        default=None, description="another arm; rollout.temperature is set so that the token entropies are equal"
    )
    paper_arm: PaperArm | None = Field(default=None, description="the arm of the paper's tables that this one is")

    @field_validator("name")
    @classmethod
    def _name_fits_a_folder(cls, name: str) -> str:
        if not re.fullmatch(r"[a-z0-9][a-z0-9_]*", name):
            raise ValueError("must be lower-case letters, digits or '_', and begin with a letter or digit")
        return name

    @field_validator("overrides")
    @classmethod
    def _overrides_are_free(cls, overrides: dict[str, Any]) -> dict[str, Any]:
        return _checked(overrides)


class BudgetSection(Section):
    """What each final run may spend. Arms are compared at equal completion tokens."""

    steps: PositiveInt = Field(description="training steps of a final run, the same in all arms")
    completion_tokens: PositiveInt | None = Field(
        default=None, description="generated tokens at which runs are read; null: the most that every run reached"
    )
    evaluate_every_steps: PositiveInt = Field(description="evaluations on the way, for time to quality")
    checkpoint_every_steps: PositiveInt = Field(
        default=1, description="a run is read at a checkpoint, so this is how exactly the budget is met"
    )


class TuningSection(Section):
    """The search for each arm's learning rate: a common grid, then equally many trials around each arm's best."""

    learning_rates: tuple[PositiveFloat, ...] = Field(min_length=1, description="the grid, the same for all arms")
    refine_factors: tuple[PositiveFloat, ...] = Field(
        default=(), description="further trials of each arm, as factors on its best rate of the grid"
    )
    steps: PositiveInt = Field(description="training steps of a trial")
    seeds: tuple[NonNegativeInt, ...] = Field(default=(1000,), min_length=1, description="apart from the final seeds")
    selection_share: float = Field(
        default=0.3, gt=0.0, lt=1.0, description="share of the evaluation clusters that choose rates; never reported"
    )

    @model_validator(mode="after")
    def _trials_differ(self) -> Self:
        for best in self.learning_rates:
            trials = [*self.learning_rates, *(best * factor for factor in self.refine_factors)]
            for rate, other in combinations(trials, 2):
                if not math.isclose(rate, other, rel_tol=1e-3):
                    continue
                raise ValueError(
                    f"a refined rate meets {rate:g} again, so one arm could get fewer trials than another; "
                    "choose factors that are no ratio of two rates of the grid"
                )
        return self


class EvaluationSection(Section):
    """How policies are measured and compared."""

    mode: Literal["greedy", "sampled"] = "greedy"
    quality: float = Field(gt=0.0, lt=1.0, description="accuracy whose first reaching is timed")
    bootstrap_resamples: PositiveInt = 2000
    comparisons: tuple[tuple[str, str], ...] = Field(
        default=(), description="pairs of arms; the difference is the first's accuracy less the second's"
    )


class EntropySection(Section):
    """The probe that finds the temperature of an arm with ``match_entropy_of``."""

    prompts: PositiveInt = Field(default=32, description="training problems in the probe")
    draws: PositiveInt = Field(default=2, description="noise draws of each stage of the schedule")
    temperature_low: PositiveFloat = 0.5
    temperature_high: PositiveFloat = 2.0
    relative_tolerance: PositiveFloat = Field(default=1e-4, description="of the entropy")


class ExperimentConfig(Section):
    """One experiment."""

    experiment: ExperimentSection
    arms: tuple[ArmSection, ...] = Field(min_length=1)
    seeds: tuple[NonNegativeInt, ...] = Field(min_length=1, description="of the final runs, the same for all arms")
    budget: BudgetSection
    tuning: TuningSection
    evaluation: EvaluationSection
    entropy: EntropySection = EntropySection()

    @model_validator(mode="after")
    def _arms_are_comparable(self) -> Self:
        names = [arm.name for arm in self.arms]
        for what, values in (
            ("arms", names), ("seeds", [*self.seeds, *self.tuning.seeds]),
            ("comparisons", [*self.evaluation.comparisons]),
        ):  # fmt: skip
            twice = [value for value, count in Counter(values).items() if count > 1]
            if twice:
                raise ValueError(f"{what}: {twice[0]} is there twice (tuning.seeds included); remove one")
        for first, second in self.evaluation.comparisons:
            for name in (first, second):
                if name not in names:
                    raise ValueError(f"evaluation.comparisons: there is no arm {name}; choose from {', '.join(names)}")
            if first == second:
                raise ValueError(f"evaluation.comparisons: {first} is compared with itself; name two arms")
        if self.entropy.temperature_low >= self.entropy.temperature_high:
            raise ValueError("entropy.temperature_low must be below entropy.temperature_high; change one")
        for arm in self.arms:
            _check_match(arm, self)
        return self


def _check_match(arm: ArmSection, config: ExperimentConfig) -> None:
    if arm.match_entropy_of is None:
        return
    others = {a.name: a for a in config.arms if a.name != arm.name}
    other = others.get(arm.match_entropy_of)
    if other is None or other.match_entropy_of is not None:
        possible = ", ".join(n for n, a in others.items() if a.match_entropy_of is None)
        raise ValueError(
            f"arm {arm.name}: match_entropy_of = {arm.match_entropy_of} must be another arm, itself not matched; "
            f"choose from {possible}"
        )
    if "rollout.temperature" in arm.overrides:
        raise ValueError(
            f"arm {arm.name}: match_entropy_of finds rollout.temperature; remove rollout.temperature from its overrides"
        )
    if config.evaluation.mode == "sampled":
        raise ValueError(
            f"evaluation.mode = sampled would measure arm {arm.name} at its own temperature and the others at theirs; "
            "use evaluation.mode: greedy"
        )
