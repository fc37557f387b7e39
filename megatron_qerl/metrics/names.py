"""The registry of every number a run records: name, unit, one-sentence definition, plot group.

A metric without a definition cannot be compared with anyone else's, and a misspelt one vanishes without a word. So
each name is declared once here, ``check_names`` refuses all others before a line is written, and the report prints the
definition beside the plot. Names are flat ``section/name`` strings. All metrics of one plot group share one unit,
because they share one axis.
"""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from megatron_qerl.errors import FaultError, NonFiniteError
from megatron_qerl.types import Outcome, StepMetrics

Reduction = Literal["mean", "max", "min", "last"]
Role = Literal["line", "lower", "upper", "spread", "total"]
PlotKind = Literal["lines", "band", "interval", "stacked", "steps"]

PHASES = ("rollout", "reward", "logprob", "train", "sync", "eval", "checkpoint", "noise")
"""Phases that ``PhaseClock`` accepts; ``other`` is what none of them covers."""


@dataclass(frozen=True)
class PlotGroup:
    """One plot of the report.

    Attributes:
        key: anchor of the section; metrics refer to it.
        title: heading in the report.
        axis: label of the vertical axis, with the unit.
        kind: ``lines``; ``band`` (the first line is shaded from the lower to the upper series, or by its spread);
            ``interval`` (points with error bars from ``_low`` to ``_high``); ``stacked``; ``steps`` (values that jump).
        log: logarithmic vertical axis; zeros are then marked on its lower edge.
    """

    key: str
    title: str
    axis: str
    kind: PlotKind = "lines"
    log: bool = False


@dataclass(frozen=True)
class Metric:
    """One registered number.

    Attributes:
        name: ``section/name``.
        unit: what one unit of the value is; ``1`` for a number without a unit.
        group: key of its ``PlotGroup``.
        definition: one sentence that says how the number comes about.
        reduce: how consecutive steps become one point when a plot has too many, chosen so that no spike is hidden.
        role: what the series is in its plot.
    """

    name: str
    unit: str
    group: str
    definition: str
    reduce: Reduction = "mean"
    role: Role = "line"


GROUPS: tuple[PlotGroup, ...] = (
    PlotGroup("reward", "Reward", "reward (score)", "band"),
    PlotGroup("accuracy", "Accuracy during training", "accuracy (fraction)", "interval"),
    PlotGroup("outcome", "Outcomes", "responses (fraction)", "stacked"),
    PlotGroup("valid", "Readable answers", "responses (fraction)"),
    PlotGroup("mixed", "Groups with a learning signal", "groups (fraction)"),
    PlotGroup("groups", "Groups generated, kept and dropped", "groups (count)", "stacked"),
    PlotGroup("score_variance", "Spread of the score within a group", "variance (score^2)"),
    PlotGroup("distinct", "Diversity within a group", "per group (count)"),
    PlotGroup("refills", "Refills of dropped groups", "per step (count)", "steps"),
    PlotGroup("length", "Response length", "length (tokens)", "band"),
    PlotGroup("truncation", "Responses cut at the length limit", "responses (fraction)"),
    PlotGroup("sigma", "Noise strength", "sigma", "steps", log=True),
    PlotGroup("log_step", "Noise: change that feedback asked for", "change of log sigma"),
    PlotGroup("stage", "Noise stage", "stage (index)", "steps"),
    PlotGroup("noise_modules", "Noise: modules touched", "modules (count)", "steps"),
    PlotGroup("near_zero", "Noise: scales near zero", "channels (count)", "steps"),
    PlotGroup("noise_change", "Noise: change of log-probability", "|change| (nats)", log=True),
    PlotGroup("engine_slope", "Noise: effect seen in the engine", "share of the effect"),
    PlotGroup("routing", "Mixture of experts: choices that differ", "share of the choices"),
    PlotGroup("entropy", "Entropy of the sampling distribution", "entropy (nats)"),
    PlotGroup("ratio", "Probability ratio", "ratio", "band", log=True),
    PlotGroup("ratio_std", "Spread of the ratio", "standard deviation"),
    PlotGroup("clip", "Clipped tokens", "tokens (fraction)"),
    PlotGroup("kl", "Divergence from the behaviour policy", "divergence (nats)"),
    PlotGroup("kl_base", "Divergence from the base model", "divergence (nats)"),
    PlotGroup("weights", "Importance weights", "weight"),
    PlotGroup("correction", "Importance correction: what is left", "tokens (fraction)"),
    PlotGroup("correction_responses", "Importance correction: responses left", "responses (fraction)"),
    PlotGroup("parity", "Engine and trainer compared", "|difference| (nats)", log=True),
    PlotGroup("loss", "Policy loss", "loss"),
    PlotGroup("learning_rate", "Learning rate", "learning rate"),
    PlotGroup("norms", "Gradient and update norms", "L2 norm", log=True),
    PlotGroup("gradient_clip", "Updates with a clipped gradient", "updates (fraction)"),
    PlotGroup("updates", "Optimizer updates", "updates (count)", "steps"),
    PlotGroup("tokens", "Tokens per step", "tokens (count)"),
    PlotGroup("time", "Time per step", "wall time (s)", "stacked"),
    PlotGroup("memory_peak", "Peak memory", "memory (bytes)", "steps"),
    PlotGroup("memory_parts", "Memory by what it holds", "memory (bytes)", "stacked"),
)

_OUTCOME_MEANING = {
    Outcome.CORRECT: "its answer equals the reference answer",
    Outcome.WRONG: "it finished and its answer was read, but differs from the reference",
    Outcome.UNPARSABLE: "it finished, but no answer could be read from it",
    Outcome.TRUNCATED: "it ran into the length limit and was not judged correct",
    Outcome.TIMEOUT: "the verifier ran out of time on it",
}
_PHASE_MEANING = {
    "rollout": "generating responses",
    "reward": "verifying answers",
    "logprob": "recomputing log-probabilities with the trainer's policy outside the update",
    "train": "forward, backward and optimizer",
    "sync": "publishing adapter and noise state to the engine",
    "eval": "evaluation",
    "checkpoint": "saving",
    "noise": "drawing, applying, proving and removing noise",
    "other": "everything that no other phase covers (the step minus their sum)",
}
_EVAL_MODES = {
    "greedy_accuracy": "greedy decoding of the clean policy, the one that is deployed",
    "sampled_accuracy": "sampling from the clean policy",
    "noisy_greedy_accuracy": "greedy decoding under the noise then in force",
    "noisy_sampled_accuracy": "sampling under the noise then in force",
}


def _quality() -> Iterable[Metric]:
    """Rewards, outcomes, groups, lengths, evaluation."""
    yield Metric(
        "reward/mean", "score", "reward", "Mean reward (after length shaping) over all responses generated in the step."
    )
    yield Metric(
        "reward/std",
        "score",
        "reward",
        "Population standard deviation of the reward over all responses generated in the step.",
        role="spread",
    )
    yield Metric(
        "reward/score_mean",
        "score",
        "reward",
        "Mean raw task score (before length shaping) over all responses generated in the step.",
    )
    for outcome in Outcome:
        yield Metric(
            f"outcome/{outcome.value}_fraction",
            "fraction",
            "outcome",
            f"Share of the responses generated in the step that count as {outcome.value}: {_OUTCOME_MEANING[outcome]}.",
        )
    yield Metric(
        "outcome/valid_fraction",
        "fraction",
        "valid",
        "Share of the responses generated in the step whose answer was read and judged: correct or wrong.",
    )
    yield Metric(
        "groups/mixed_fraction",
        "fraction",
        "mixed",
        "Share of all groups generated in the step whose raw scores are not all equal; only these teach anything.",
    )
    for name, definition in (
        ("kept", "Groups that entered the update."),
        ("dropped_all_correct", "Groups dropped because every response had the full raw score."),
        ("dropped_all_wrong", "Groups dropped because all raw scores were equal and not the full score."),
        ("dropped_other", "Groups dropped for another reason: every answer timed out, or right and wrong score alike."),
    ):
        yield Metric(f"groups/{name}", "count", "groups", definition)
    yield Metric(
        "groups/score_variance",
        "score^2",
        "score_variance",
        "Population variance of the raw score within a group, mean over all groups generated in the step.",
    )
    yield Metric(
        "groups/distinct_answers",
        "count",
        "distinct",
        "Different answers among the judged responses of a group, mean over all groups generated in the step.",
    )
    yield Metric(
        "groups/distinct_solutions",
        "count",
        "distinct",
        "Different solutions among the correct responses of a group (two are alike if they hold the same numbers in "
        "the same order), mean over all groups generated in the step.",
    )
    generated = "Groups generated in the step, refills included: the kept and the dropped ones."
    yield Metric("groups/generated", "count", "groups", generated, role="total")
    yield Metric("groups/refill_rounds", "count", "refills", "Extra rounds of generation after groups were dropped.")
    shortfall = "Groups still missing from the planned number when the refills were used up."
    yield Metric("groups/shortfall", "count", "refills", shortfall, "max")
    where = "the responses generated in the step, stop token included."
    yield Metric("length/mean_tokens", "tokens", "length", f"Mean length of {where}")
    yield Metric("length/max_tokens", "tokens", "length", f"Longest of {where}", "max", "upper")
    yield Metric("length/min_tokens", "tokens", "length", f"Shortest of {where}", "min", "lower")
    yield Metric(
        "length/truncated_fraction",
        "fraction",
        "truncation",
        "Share of responses that ended at the length limit, whatever their outcome (a cut response may be correct).",
    )
    for name, how in _EVAL_MODES.items():
        yield Metric(f"eval/{name}", "fraction", "accuracy", f"Share of evaluation answers judged correct: {how}.")
        for end in ("low", "high"):
            yield Metric(
                f"eval/{name}_{end}",
                "fraction",
                "accuracy",
                f"{'Lower' if end == 'low' else 'Upper'} end of the confidence interval of eval/{name}.",
                role="lower" if end == "low" else "upper",
            )


def _policy() -> Iterable[Metric]:
    """Entropy, ratio, correction, parity and noise."""
    yield Metric(
        "entropy/sampling_mean_nats",
        "nats",
        "entropy",
        "Entropy of the sampling distribution at each generated token, over the whole vocabulary and at the sampling "
        "temperature, under the policy that the trainer evaluated, averaged over tokens; it is the entropy within one "
        "noise state and leaves out the diversity between noise states.",
    )
    compared = "over the tokens of the step's first group, at the sampling temperature."
    yield Metric(
        "entropy/noisy_mean_nats",
        "nats",
        "entropy",
        f"Entropy at each token under the step's noise, by the trainer, {compared}",
    )
    yield Metric(
        "entropy/clean_mean_nats",
        "nats",
        "entropy",
        f"Entropy at the same tokens without noise, by the trainer, {compared}",
    )
    ratio = "ratio of trainer to behaviour probability over the trained tokens"
    yield Metric("ratio/mean", "1", "ratio", f"Mean {ratio}; 1 when both policies agree.")
    yield Metric("ratio/max", "1", "ratio", f"Largest {ratio}.", "max", "upper")
    yield Metric("ratio/min", "1", "ratio", f"Smallest {ratio}.", "min", "lower")
    yield Metric("ratio/std", "1", "ratio_std", f"Population standard deviation of the {ratio}.", "max")
    yield Metric(
        "ratio/clip_low_fraction",
        "fraction",
        "clip",
        "Share of trained tokens on which the lower clip bound took effect: a clipped ratio (negative advantage, ratio "
        "below it) has no gradient, a clipped weight a bounded one.",
    )
    yield Metric(
        "ratio/clip_high_fraction",
        "fraction",
        "clip",
        "Share of trained tokens on which the upper clip bound took effect: a clipped ratio (positive advantage, ratio "
        "above it) has no gradient, a clipped weight a bounded one.",
    )
    yield Metric(
        "kl/k1_nats",
        "nats",
        "kl",
        "Mean of log(behaviour / trainer) over trained tokens: unbiased, of high variance, can be negative.",
    )
    yield Metric("kl/k3_nats", "nats", "kl", "Mean of r - 1 - log r over trained tokens, r the ratio: never negative.")
    base = "over trained tokens, computed where the loss has a divergence from the base (kl_coefficient above 0)."
    yield Metric(
        "kl/base_k1_nats",
        "nats",
        "kl_base",
        f"Mean of log(trainer / base model without adapter) {base}",
    )
    yield Metric("kl/base_k3_nats", "nats", "kl_base", f"Mean of b - 1 - log b, b = base / trainer, {base}")
    yield Metric(
        "correction/weight_mean", "1", "weights", "Mean importance weight after truncation, over trained tokens."
    )
    yield Metric(
        "correction/weight_max",
        "1",
        "weights",
        "Largest importance weight before truncation, over trained tokens.",
        "max",
    )
    yield Metric(
        "correction/effective_sample_fraction",
        "fraction",
        "correction",
        "(sum w)^2 / (n sum w^2) over the n trained tokens with truncated weights w: 1 when all weigh the same.",
        "min",
    )
    yield Metric(
        "correction/truncated_fraction",
        "fraction",
        "correction",
        "Share of trained tokens whose importance weight was cut to the cap.",
        "max",
    )
    yield Metric(
        "correction/dropped_fraction",
        "fraction",
        "correction",
        "Share of trained tokens whose importance weight was out of bounds and set to 0 (the mask rules).",
        "max",
    )
    yield Metric(
        "correction/effective_response_fraction",
        "fraction",
        "correction_responses",
        "(sum w)^2 / (n sum w^2) over the n trained responses with their one weight each (the sequence rules).",
        "min",
    )
    yield Metric("noise/stage", "index", "stage", "Stage of the noise schedule; stage 0 has no noise.", "last")
    yield Metric(
        "noise/sigma_nominal", "1", "sigma", "Standard deviation that the schedule or feedback asks for.", "last"
    )
    yield Metric(
        "noise/sigma_effective",
        "1",
        "sigma",
        "Root mean square of the change of the norm scales in the dtype that the kernel multiplies with; under a "
        "relative budget of the change as a share of the scale, over scales that are not near zero.",
        "last",
    )
    yield Metric(
        "noise/sigma_next",
        "1",
        "sigma",
        "Standard deviation that feedback chose for the next step; the reason is in the step's info.",
        "last",
    )
    yield Metric(
        "noise/wanted_log_step",
        "1",
        "log_step",
        "Change of log sigma that feedback's law asked for, before limits and bounds; 0 where a limit decided.",
    )
    yield Metric("noise/modules_expected", "count", "noise_modules", "Norms that the roles call for.", "last")
    yield Metric("noise/modules_touched", "count", "noise_modules", "Norms whose scale changed.", "min")
    yield Metric(
        "noise/near_zero_channels",
        "count",
        "near_zero",
        "Channels whose norm scale is below a tenth of its norm's median size, where noise relative to the scale was "
        "shrunk; reported under noise.budget: relative.",
        "last",
    )
    change = "absolute change of a probe token's log-probability between clean and noisy policy."
    yield Metric("noise/logprob_change_mean", "nats", "noise_change", f"Mean {change}")
    yield Metric("noise/logprob_change_max", "nats", "noise_change", f"Largest {change}", "max")
    yield Metric(
        "noise/engine_slope",
        "1",
        "engine_slope",
        "Share of the noise's effect on the log-probabilities that the engine's own numbers show: 1 if it generated "
        "under the recorded noise, 0 if it had none (regression over the tokens of one group).",
    )
    choices = "Share of (token, block, expert) choices of the routers"
    yield Metric(
        "routing/flipped_by_noise",
        "fraction",
        "routing",
        f"{choices} that the noise changes, on the tokens of one group; the largest over the ranks.",
        "max",
    )
    yield Metric(
        "routing/flipped_by_engine",
        "fraction",
        "routing",
        f"{choices} that the engine made and the trainer, under the same noise, would not have made. With "
        "rollout.routing_replay the trainer makes the engine's.",
        "max",
    )
    difference = "absolute difference of the engine's and the trainer's log-probability of a generated token"
    yield Metric("parity/logprob_max_abs", "nats", "parity", f"Largest {difference}.", "max")
    yield Metric("parity/logprob_mean_abs", "nats", "parity", f"Mean {difference}.")


def _system() -> Iterable[Metric]:
    """Optimizer, tokens, time, memory."""
    yield Metric(
        "loss/policy", "1", "loss", "Loss that was minimised, regularizers included, mean over the step's updates."
    )
    yield Metric("optimizer/learning_rate", "1", "learning_rate", "Learning rate of the step's last update.", "last")
    yield Metric(
        "optimizer/gradient_norm",
        "1",
        "norms",
        "L2 norm of all adapter gradients before clipping, the largest of the step's updates.",
        "max",
    )
    yield Metric(
        "optimizer/update_norm", "1", "norms", "L2 norm of the change of all adapter parameters over the step.", "max"
    )
    yield Metric(
        "optimizer/clipped", "fraction", "gradient_clip", "Share of the step's updates whose gradient norm was clipped."
    )
    yield Metric("optimizer/updates", "count", "updates", "Optimizer updates since the run began.", "last")
    yield Metric(
        "policy/adapter_version", "count", "updates", "Version of the adapter that generated the responses.", "last"
    )
    yield Metric("tokens/prompt", "tokens", "tokens", "Prompt tokens of the step, each prompt counted once a response.")
    yield Metric("tokens/completion", "tokens", "tokens", "Tokens generated in the step, dropped groups included.")
    yield Metric("tokens/trained", "tokens", "tokens", "Tokens with a loss in the step, counted once per rollout.")
    for phase, meaning in _PHASE_MEANING.items():
        yield Metric(
            f"time/{phase}_s", "s", "time", f"Wall seconds of the step spent on {meaning}; inner phases excluded."
        )
    yield Metric("time/step_s", "s", "time", "Wall seconds of the whole step.", role="total")
    for name, definition in (
        ("peak_rss_bytes", "Largest resident memory of this process since it started."),
        ("device_peak_bytes", "Most device memory allocated by torch in this process since it started."),
        ("device_reserved_peak_bytes", "Most device memory reserved by torch's allocator since the process started."),
    ):
        yield Metric(f"memory/{name}", "bytes", "memory_peak", definition, "max")
    for name, definition in (
        ("weights_packed_bytes", "Frozen base weights as stored, block and tensor scales included."),
        ("weights_cache_bytes", "Dequantised copies of base weights that are kept."),
        ("adapter_bytes", "Adapter parameters."),
        ("optimizer_bytes", "Optimizer state, master weights and gradient buffers."),
        ("kv_cache_bytes", "Largest key-value cache of the step's rollout."),
    ):
        yield Metric(f"memory/{name}", "bytes", "memory_parts", definition, "max")


def _register(metrics: Iterable[Metric]) -> dict[str, Metric]:
    registry: dict[str, Metric] = {}
    units: dict[str, str] = {}
    groups = {group.key for group in GROUPS}
    for metric in metrics:
        assert metric.name not in registry, f"metric {metric.name} is declared twice"
        assert metric.group in groups, f"metric {metric.name}: no plot group {metric.group}"
        assert units.setdefault(metric.group, metric.unit) == metric.unit, f"group {metric.group} mixes units"
        registry[metric.name] = metric
    return registry


METRICS: dict[str, Metric] = _register((*_quality(), *_policy(), *_system()))
"""Name -> Metric, in the order of the report."""


def metrics_of_group(key: str) -> tuple[Metric, ...]:
    """The metrics that share one plot, in order of declaration."""
    return tuple(metric for metric in METRICS.values() if metric.group == key)


def check_names(metrics: StepMetrics) -> None:
    """Refuse a line whose names are not registered or whose values are not finite real numbers.

    Raises:
        FaultError: a name is unknown (the closest registered name is suggested) or a value is not a number.
        NonFiniteError: a value is NaN or infinite. A quantity that was not measured is left out, never NaN.
    """
    unknown = [name for name in metrics.values if name not in METRICS]
    if unknown:
        described = []
        for name in unknown:
            close = difflib.get_close_matches(name, METRICS, n=1)
            described.append(f"{name} (did you mean {close[0]}?)" if close else name)
        raise FaultError(
            f"metrics of step {metrics.step}: {', '.join(described)}",
            "every metric is registered in megatron_qerl/metrics/names.py",
            "Correct the spelling, or register the name there with its unit and definition",
        )
    for name, value in metrics.values.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise FaultError(
                f"metrics of step {metrics.step}: {name} is {value!r} ({type(value).__name__})",
                "a metric is one real number",
                "Convert it with float(), or put it in StepMetrics.info",
            )
        if not math.isfinite(value):
            raise NonFiniteError(
                f"metrics of step {metrics.step}: {name} is {value}",
                "a metric is finite, since strict JSON knows no NaN",
                "Leave out what was not measured; if it was measured, look for the first step with a bad value",
            )
