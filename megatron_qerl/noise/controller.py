"""Closed-loop sigma: as much noise as groups need to disagree, and no more than answers can bear.

A schedule lowers sigma by the calendar. This controller reads what noise is for, the share of groups whose rewards
differ, and moves log sigma towards a target share; entropy, answers that cannot be read and the drift of the ratio are
limits, not goals. It is a proposal to be compared with a fixed schedule at equal tokens (reading, section 12.3), not a
part of the paper.

Why it looks as it does:

* It acts on log sigma, since noise matters by factors. The law is a PI controller in its incremental form,
  ``d log sigma = Kp (e - e_before) + Ki e``, with e the target minus a running mean of the mixed share. There is no
  integral to wind up: a change that the bounds cut off is forgotten.
* More noise helps only up to a point. Beyond it answers get worse and fewer groups are mixed, and a controller that
  sees the share alone would raise sigma for ever. So a broken limit always wins and backs off by a factor, and raises
  that have not paid off after ``patience`` steps are taken back, followed by as many steps without a raise.
* The step's numbers may be absent (no group, nothing trained). What was not measured decides nothing.

Everything is a pure function of frozen values, so that a resumed run decides as an uninterrupted one would.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from megatron_qerl.config.noise import FeedbackSection

Reason = Literal[
    "nothing_measured",
    "invalid_answers",
    "entropy",
    "ratio_drift",
    "unproductive",
    "dead_band",
    "waiting",
    "raised",
    "lowered",
    "at_upper_bound",
    "at_lower_bound",
]


@dataclass(frozen=True)
class Signals:
    """What one finished step showed; None is what was not measured.

    Attributes:
        mixed_fraction: mixed groups over all groups generated, judged on the raw score; refills included.
        invalid_fraction: responses without a readable answer over all responses (unparsable or truncated).
        entropy_nats: mean token entropy of the sampling distribution under the step's noise.
        ratio_drift_nats: mean k3 of the ratio over the trained tokens.
    """

    mixed_fraction: float | None
    invalid_fraction: float | None = None
    entropy_nats: float | None = None
    ratio_drift_nats: float | None = None


@dataclass(frozen=True)
class FeedbackState:
    """What the controller carries from step to step; a few numbers, to be saved with the checkpoint.

    Attributes:
        sigma: in force for the next step.
        mixed_mean: running mean of the mixed share; None before the first measurement.
        error: of the last decision, for the proportional part.
        raises: raises in a row so far.
        mixed_before: the running mean when that row began.
        sigma_before: sigma when that row began.
        waiting: steps in which no raise is allowed.
    """

    sigma: float
    mixed_mean: float | None = None
    error: float | None = None
    raises: int = 0
    mixed_before: float = 0.0
    sigma_before: float = 0.0
    waiting: int = 0


@dataclass(frozen=True)
class Decision:
    """One step's decision, as it is recorded.

    Attributes:
        reason: the rule that decided.
        detail: the numbers it compared, in words.
        sigma_before, sigma_after: in force in the step just finished, and from now on.
        wanted_log_step: change of log sigma that the law asked for, before limits and bounds; 0 if it was not asked.
        signals: what was seen.
    """

    reason: Reason
    detail: str
    sigma_before: float
    sigma_after: float
    wanted_log_step: float
    signals: Signals


def start(sigma: float) -> FeedbackState:
    """The state before the first noisy step."""
    return FeedbackState(sigma=sigma)


def decide(section: FeedbackSection, state: FeedbackState, signals: Signals) -> tuple[FeedbackState, Decision]:
    """Sigma for the next step, from what the finished one showed.

    Args:
        section: bounds, gains and limits.
        state: as the last decision left it.
        signals: of the finished step, which ran under ``state.sigma``.
    """
    measured = signals.mixed_fraction
    if measured is not None:
        before = state.mixed_mean
        mean = measured if before is None else before + section.smoothing * (measured - before)
        state = replace(state, mixed_mean=mean)
    broken = _broken_limit(section, signals)
    if broken is not None:
        return _back_off(section, state, signals, *broken)
    if measured is None or state.mixed_mean is None:
        return state, _decision("nothing_measured", "no group was judged", state, state.sigma, 0.0, signals)
    return _steer(section, state, state.mixed_mean, signals)


def _broken_limit(section: FeedbackSection, signals: Signals) -> tuple[Reason, str] | None:
    limits: tuple[tuple[Reason, float | None, float], ...] = (
        ("invalid_answers", signals.invalid_fraction, section.max_invalid_fraction),
        ("entropy", signals.entropy_nats, section.max_entropy_nats),
        ("ratio_drift", signals.ratio_drift_nats, section.max_ratio_drift_nats),
    )
    for reason, value, limit in limits:
        if value is not None and value > limit:
            return reason, f"{value:.4g} exceeds {limit:.4g}"
    return None


def _back_off(
    section: FeedbackSection, state: FeedbackState, signals: Signals, reason: Reason, detail: str
) -> tuple[FeedbackState, Decision]:
    """A broken limit overrules the law and ends a row of raises; the next error starts afresh."""
    sigma = max(section.sigma_min, state.sigma * section.backoff)
    after = replace(state, sigma=sigma, error=None, raises=0)
    return after, _decision(reason, detail, state, sigma, 0.0, signals)


def _steer(
    section: FeedbackSection, state: FeedbackState, mean: float, signals: Signals
) -> tuple[FeedbackState, Decision]:
    """The law, its dead band, its patience and its bounds."""
    error = section.target_mixed_fraction - mean
    detail = f"mixed {mean:.3f}, target {section.target_mixed_fraction:.3f}"
    waiting = max(0, state.waiting - 1)
    rested = replace(state, error=error, raises=0, waiting=waiting)
    if abs(error) <= section.dead_band:
        return rested, _decision("dead_band", detail, state, state.sigma, 0.0, signals)
    change = 0.0 if state.error is None else error - state.error
    wanted = section.proportional_gain * change + section.integral_gain * error
    step = min(section.max_log_step, max(-section.max_log_step, wanted))
    sigma = min(section.sigma_max, max(section.sigma_min, state.sigma * math.exp(step)))
    if step <= 0.0:
        # The law may ask for less noise while the share is still low, because it is rising fast.
        reason: Reason = "lowered" if sigma < state.sigma else "at_lower_bound"
        return replace(rested, sigma=sigma), _decision(reason, detail, state, sigma, wanted, signals)
    if state.waiting:
        return rested, _decision("waiting", f"{detail}; raises did not help", state, state.sigma, wanted, signals)
    if state.raises >= section.patience and mean <= state.mixed_before:
        after = replace(rested, sigma=state.sigma_before, waiting=section.patience)
        detail += f"; {state.raises} raises from sigma {state.sigma_before:.3g} began at {state.mixed_before:.3f}"
        return after, _decision("unproductive", detail, state, state.sigma_before, wanted, signals)
    after = replace(state, sigma=sigma, error=error, raises=state.raises + 1, waiting=0)
    if state.raises == 0 or state.raises >= section.patience:  # a new row, or one that has paid off so far
        after = replace(after, raises=1, mixed_before=mean, sigma_before=state.sigma)
    # A raise that the bound swallows counts as one: staying at the bound must pay off too.
    reason = "raised" if sigma > state.sigma else "at_upper_bound"
    return after, _decision(reason, detail, state, sigma, wanted, signals)


def _decision(
    reason: Reason, detail: str, state: FeedbackState, sigma: float, wanted: float, signals: Signals
) -> Decision:
    return Decision(reason, detail, state.sigma, sigma, wanted, signals)
