"""The configuration of the noise on the norm scales."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from megatron_qerl.config.section import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, Section
from megatron_qerl.types import NoiseScope

NOISE_ROLES = ("input", "post_attention", "final", "q_norm", "k_norm")

PUBLISHED_SIGMAS: dict[str, tuple[float, float]] = {
    "paper main text": (5e-2, 5e-4),
    "paper Table 4": (1e-2, 5e-4),
    "published scripts": (1e-2, 1e-4),
}
"""``noise.source`` -> (sigma_start, sigma_end) of the three settings that QeRL has been published with."""


class FeedbackSection(Section):
    """Closed-loop sigma: steered by the mixed-group fraction, within bounds (``noise/controller.py``)."""

    enabled: bool = False
    target_mixed_fraction: Fraction = Field(default=0.5, description="share of groups with a signal to aim for")
    dead_band: Fraction = Field(default=0.05, description="errors up to this size change nothing")
    smoothing: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        default=0.3, description="weight of the newest step in the running mean of the mixed fraction"
    )
    proportional_gain: NonNegativeFloat = Field(default=0.5, description="change of log sigma per change of the error")
    integral_gain: PositiveFloat = Field(default=0.2, description="change of log sigma a step, per unit of error")
    max_log_step: PositiveFloat = Field(default=0.3, description="largest change of log sigma in one step")
    sigma_min: PositiveFloat = 1e-4
    sigma_max: PositiveFloat = 5e-2
    max_invalid_fraction: Fraction = Field(default=0.3, description="more responses without an answer: back off")
    max_entropy_nats: PositiveFloat = Field(default=2.0, description="more entropy a token: back off")
    max_ratio_drift_nats: PositiveFloat = Field(default=0.05, description="more divergence (k3) a token: back off")
    backoff: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(default=0.7, description="factor on sigma")
    patience: PositiveInt = Field(default=8, description="raises in a row that must pay off, or sigma goes back")

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> Self:
        if self.sigma_min >= self.sigma_max:
            raise ValueError(
                f"sigma_min = {self.sigma_min} leaves no room below sigma_max = {self.sigma_max}; "
                "raise sigma_max or lower sigma_min"
            )
        return self


class NoiseSection(Section):
    """Adaptive quantization noise on the RMSNorm scales (paper section 3.3, algorithm 1)."""

    enabled: bool = True
    schedule: Literal["exponential", "linear", "cosine", "constant"] = "exponential"
    sigma_start: NonNegativeFloat = Field(default=1e-2, description="sigma of stage 1 (paper table 4: 1e-2)")
    sigma_end: NonNegativeFloat = Field(
        default=5e-4, description="sigma of the last stage, unless constant (paper table 4: 5e-4)"
    )
    stages: PositiveInt = Field(default=10, description="K, counting the noise-free stage 0")
    scope: NoiseScope = "rollout"
    application: Literal["replace", "accumulate"] = "replace"
    budget: Literal["absolute", "relative"] = Field(
        default="absolute",
        description="absolute: sigma is the deviation of z on every norm; relative: that of z / w, norm by norm",
    )
    feedback: FeedbackSection = FeedbackSection()
    roles: tuple[Literal["input", "post_attention", "final", "q_norm", "k_norm"], ...] = ("input", "post_attention")
    router: Literal["clean", "noisy"] | None = Field(
        default=None,
        description="required for a mixture of experts: whether the router sees the post-attention norm with its noise",
    )
    source: str = Field(default="", description="which published setting the sigmas come from")

    @model_validator(mode="after")
    def _schedule_is_defined(self) -> Self:
        if not self.enabled:
            return self
        if not self.roles:
            raise ValueError("noise.roles is empty although noise.enabled is true; list roles or set enabled: false")
        if len(set(self.roles)) != len(self.roles):
            raise ValueError("a noise role is listed twice")
        if self.stages < 2 or self.sigma_start == 0.0:
            raise ValueError(
                f"stages = {self.stages}, sigma_start = {self.sigma_start} would never add noise (stage 0 has none); "
                "use stages >= 2 and sigma_start > 0, or set enabled: false"
            )
        if self.schedule == "exponential" and self.sigma_end == 0.0:
            raise ValueError(
                "an exponential schedule needs sigma_start > 0 and sigma_end > 0; "
                "for no noise set noise.enabled: false, for one value use schedule: constant"
            )
        if self.schedule != "constant" and self.stages == 2 and self.sigma_start != self.sigma_end:
            raise ValueError("two stages have one noisy stage, which cannot hit two sigmas; use stages >= 3")
        return self

    @model_validator(mode="after")
    def _source_is_true(self) -> Self:
        published = PUBLISHED_SIGMAS.get(self.source)
        if not self.enabled or published is None:
            return self
        if self.budget == "relative":
            raise ValueError(
                f"source = {self.source} adds one sigma to every norm, budget = relative does not; "
                "use budget: absolute, or name another source"
            )
        if (self.sigma_start, self.sigma_end) != published:
            raise ValueError(
                f"source = {self.source} has sigma {published[0]:g} -> {published[1]:g}, the config "
                f"{self.sigma_start:g} -> {self.sigma_end:g}; correct the sigmas, or name another source"
            )
        return self

    @model_validator(mode="after")
    def _feedback_starts_within_its_bounds(self) -> Self:
        feedback = self.feedback
        if not feedback.enabled:
            return self
        if not self.enabled:
            raise ValueError(
                "noise.enabled = false leaves noise.feedback.enabled = true nothing to steer; "
                "set noise.feedback.enabled: false, or enable the noise"
            )
        if not feedback.sigma_min <= self.sigma_start <= feedback.sigma_max:
            raise ValueError(
                f"sigma_start = {self.sigma_start} lies outside feedback.sigma_min = {feedback.sigma_min} .. "
                f"feedback.sigma_max = {feedback.sigma_max}; move one of them"
            )
        if self.application == "accumulate":
            raise ValueError(
                "feedback steers the size of one displacement, and application: accumulate adds displacements up; "
                "use application: replace"
            )
        if self.schedule != "constant":
            raise ValueError(
                f"schedule = {self.schedule} would be overruled by feedback after the first noisy step; "
                "set schedule: constant, whose sigma_start is where feedback begins"
            )
        return self
