"""The configuration of the objective, and which settings an objective's name allows.

A run's name of the objective goes into reports, so it must not claim what the settings do not do. Under ``custom``
everything may be combined that has a meaning.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from megatron_qerl.config.section import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section
from megatron_qerl.types import LikelihoodMode


class DynamicSamplingSection(Section):
    """DAPO's dynamic sampling: groups without spread of the raw score are dropped and refilled."""

    enabled: bool = False
    max_refills: NonNegativeInt = Field(default=3, description="extra rounds of generation at most, per step")


class OverlongSection(Section):
    """DAPO's soft overlong punishment: a linear penalty over the last ``buffer_tokens`` before max_new_tokens."""

    enabled: bool = False
    buffer_tokens: PositiveInt = 256
    penalty: NonNegativeFloat = 1.0


class AlgorithmSection(Section):
    """The objective. ``likelihood`` has no default: it decides which policy is trained."""

    name: Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo", "custom"]
    likelihood: LikelihoodMode = Field(
        description="replay: the noise-conditioned policy; clean: the clean policy, importance-corrected; "
        "uncorrected: the published code's biased ratio"
    )
    advantage: Literal["mean_std", "mean", "leave_one_out"] = Field(
        default="mean_std", description="(R - mean) / std, R - mean, or R - mean of the others of its group"
    )
    ratio_level: Literal["token", "sequence"] = Field(
        default="token", description="sequence: one length-normalised ratio a response (GSPO)"
    )
    surrogate: Literal["clipped_ratio", "clipped_weight"] = Field(
        default="clipped_ratio", description="clipped_weight: the clipped ratio weighs log-probabilities (CISPO)"
    )
    ratio_clip_low: PositiveFloat = 0.2
    ratio_clip_high: PositiveFloat = 0.28
    loss_aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    loss_constant_tokens: PositiveInt | None = Field(
        default=None, description="constant: divides the sum of every response; null: rollout.max_new_tokens"
    )
    advantage_epsilon: PositiveFloat = 1e-6
    importance_correction: Literal["token_truncate", "sequence_truncate", "token_mask", "sequence_mask"] = Field(
        default="token_truncate", description="clean: unit of a weight, and what becomes of one out of bounds"
    )
    importance_weight_cap: PositiveFloat = Field(default=2.0, description="clean: largest weight")
    importance_weight_floor: PositiveFloat = Field(default=0.5, description="clean, *_mask: smallest weight kept")
    kl_coefficient: NonNegativeFloat = Field(default=0.0, description="weight of the divergence from the base model")
    kl_estimator: Literal["k1", "k2", "k3"] = Field(default="k2", description="k2 has the reverse KL's gradient")
    entropy_coefficient: NonNegativeFloat = Field(default=0.0, description="weight of the entropy bonus")
    dynamic_sampling: DynamicSamplingSection = DynamicSamplingSection()
    overlong: OverlongSection = OverlongSection()

    @model_validator(mode="after")
    def _settings_have_a_meaning(self) -> Self:
        problem = _without_meaning(self) or _without_effect(self)
        if problem:
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _name_is_true(self) -> Self:
        for key, allowed in _REQUIRED[self.name].items():
            value = getattr(self, key)
            if value not in allowed:
                raise ValueError(
                    f"{key} = {value} is not {_TITLE[self.name]}'s ({' or '.join(map(str, allowed))}); "
                    f"set {key}: {allowed[0]} or name: {_home(key, value)}"
                )
        extras = self.dynamic_sampling.enabled or self.overlong.enabled
        if self.name not in ("dapo", "custom") and extras:
            raise ValueError(
                "dynamic_sampling and overlong belong to DAPO; set name: dapo (or custom), "
                f"or disable both under name: {self.name}"
            )
        return self


_TITLE = {"grpo": "GRPO", "dapo": "DAPO", "dr_grpo": "Dr. GRPO", "gspo": "GSPO", "cispo": "CISPO", "custom": "custom"}
_TOKEN_CLIP: dict[str, tuple[object, ...]] = {"ratio_level": ("token",), "surrogate": ("clipped_ratio",)}
_BARE: dict[str, tuple[object, ...]] = {"kl_coefficient": (0.0,), "entropy_coefficient": (0.0,)}
_REQUIRED: dict[str, dict[str, tuple[object, ...]]] = {
    # GRPO as published averages over responses and has a KL term; both are often left out, so neither is demanded.
    "grpo": _TOKEN_CLIP | {"loss_aggregation": ("token_mean", "sequence_mean"), "advantage": ("mean_std",)},
    "dapo": _TOKEN_CLIP | _BARE | {"loss_aggregation": ("token_mean",), "advantage": ("mean_std",)},
    "dr_grpo": _TOKEN_CLIP | _BARE | {"loss_aggregation": ("constant",), "advantage": ("mean", "leave_one_out")},
    "gspo": _BARE
    | {
        "ratio_level": ("sequence",),
        "surrogate": ("clipped_ratio",),
        "loss_aggregation": ("sequence_mean",),
        "advantage": ("mean_std",),
    },
    "cispo": _BARE
    | {
        "ratio_level": ("token",),
        "surrogate": ("clipped_weight",),
        "loss_aggregation": ("token_mean",),
        "advantage": ("mean_std",),
    },
    "custom": {},
}
"""What an objective's paper fixes: arXiv 2402.03300, 2503.14476, 2503.20783, 2507.18071, 2506.13585."""


def _home(key: str, value: object) -> str:
    """The first named objective that allows the setting."""
    return next(name for name, rules in _REQUIRED.items() if value in rules.get(key, (value,)))


def _without_meaning(a: AlgorithmSection) -> str | None:
    """Why a combination has no meaning, whatever its name; None if it has one."""
    sequence, clean = a.ratio_level == "sequence", a.likelihood == "clean"
    unset = sorted({"ratio_clip_low", "ratio_clip_high"} - a.model_fields_set)
    rules = (
        (
            a.surrogate == "clipped_ratio" and a.ratio_clip_low >= 1.0,
            f"ratio_clip_low = {a.ratio_clip_low} would clip ratios below {1.0 - a.ratio_clip_low:g}, and there are "
            "none; use ratio_clip_low below 1",
        ),
        (
            sequence and a.surrogate != "clipped_ratio",
            "ratio_level = sequence with surrogate = clipped_weight: a weight of CISPO belongs to one token; "
            "use ratio_level: token or surrogate: clipped_ratio",
        ),
        (
            sequence and a.loss_aggregation != "sequence_mean",
            f"ratio_level = sequence with loss_aggregation = {a.loss_aggregation} would count a response once for "
            "each of its tokens; use loss_aggregation: sequence_mean",
        ),
        (
            sequence and clean and not a.importance_correction.startswith("sequence"),
            f"ratio_level = sequence with importance_correction = {a.importance_correction}: one ratio a response "
            "cannot carry a weight a token; use importance_correction: sequence_truncate or sequence_mask",
        ),
        (
            sequence and bool(unset),
            f"ratio_level = sequence has ratios very close to 1, which the default of {' and '.join(unset)} would "
            "never clip; set ratio_clip_low and ratio_clip_high (the paper of GSPO has 3e-4 and 4e-4)",
        ),
        (
            a.kl_coefficient > 0.0 and a.kl_estimator == "k1",
            "kl_estimator = k1 as a loss has a gradient of expectation zero, so kl_coefficient would add variance "
            "alone; use kl_estimator: k2, or k3 for the gradient of the forward divergence",
        ),
        (
            clean and a.importance_weight_cap <= 1.0,
            f"importance_weight_cap = {a.importance_weight_cap} cuts the weight of a token that needs no correction, "
            "which is 1; use a cap above 1",
        ),
        (
            clean and a.importance_correction.endswith("mask") and a.importance_weight_floor >= 1.0,
            f"importance_weight_floor = {a.importance_weight_floor} drops tokens that need no correction, whose "
            "weight is 1; use a floor below 1",
        ),
    )
    return next((message for broken, message in rules if broken), None)


def _without_effect(algorithm: AlgorithmSection) -> str | None:
    """Which setting would be read by nobody."""
    a = algorithm
    default = AlgorithmSection.model_fields["importance_correction"].default
    if a.likelihood != "clean" and a.importance_correction != default:
        return (
            f"importance_correction = {a.importance_correction} has no effect with likelihood = {a.likelihood}; "
            "set likelihood: clean or remove it"
        )
    if a.loss_aggregation != "constant" and a.loss_constant_tokens is not None:
        return (
            f"loss_constant_tokens has no effect with loss_aggregation = {a.loss_aggregation}; "
            "set loss_aggregation: constant or remove it"
        )
    return None
