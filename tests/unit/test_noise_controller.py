"""Closed-loop sigma: each rule alone, and a bandit on which it is compared with schedules at equal tokens."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pytest

from megatron_qerl.algorithms.advantage import group_advantages
from megatron_qerl.config.noise import FeedbackSection, NoiseSection
from megatron_qerl.noise.controller import Decision, FeedbackState, Signals, decide, start
from megatron_qerl.noise.schedule import sigma_of_stage, stage_of_step

SECTION = FeedbackSection(enabled=True, smoothing=1.0, dead_band=0.05, patience=3, sigma_min=1e-4, sigma_max=0.05)


def run(signals: list[Signals], section: FeedbackSection = SECTION, sigma: float = 0.01) -> list[Decision]:
    state, decisions = start(sigma), []
    for signal in signals:
        state, decision = decide(section, state, signal)
        assert state.sigma == decision.sigma_after
        decisions.append(decision)
    return decisions


def test_too_few_mixed_groups_raise_sigma_by_the_law() -> None:
    first, second, third = run([Signals(0.2), Signals(0.22), Signals(0.32)])
    # Ki e at first, for there is no change of the error yet; then Kp (change) + Ki e.
    assert first.reason == second.reason == "raised"
    assert math.log(first.sigma_after / first.sigma_before) == pytest.approx(0.2 * 0.3)
    assert math.log(second.sigma_after / second.sigma_before) == pytest.approx(0.5 * -0.02 + 0.2 * 0.28)
    assert third.reason == "lowered", "the share rises fast enough without more"
    assert third.wanted_log_step == pytest.approx(0.5 * -0.1 + 0.2 * 0.18)


def test_enough_mixed_groups_lower_it_and_the_dead_band_leaves_it() -> None:
    assert run([Signals(0.9)])[0].reason == "lowered"
    held = run([Signals(0.54)])[0]
    assert (held.reason, held.sigma_after) == ("dead_band", 0.01)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"invalid_fraction": 0.31}, "invalid_answers"),
        ({"entropy_nats": 2.1}, "entropy"),
        ({"ratio_drift_nats": 0.06}, "ratio_drift"),
    ],
)
def test_a_broken_limit_overrules_the_wish_for_more_noise(broken: dict[str, float], reason: str) -> None:
    decision = run([Signals(0.0, **broken)])[0]
    assert decision.reason == reason
    assert decision.sigma_after == pytest.approx(0.01 * SECTION.backoff)
    assert "exceeds" in decision.detail


def test_limits_that_hold_or_were_not_measured_break_nothing() -> None:
    held = Signals(0.2, invalid_fraction=0.3, entropy_nats=2.0, ratio_drift_nats=0.05)
    assert run([held])[0].reason == "raised"
    assert run([Signals(None)])[0].reason == "nothing_measured"
    assert run([Signals(None, entropy_nats=9.0)])[0].reason == "entropy"


def test_one_step_is_bounded() -> None:
    eager = FeedbackSection(enabled=True, smoothing=1.0, integral_gain=50.0, max_log_step=0.3)
    decision = run([Signals(0.0)], eager)[0]
    assert decision.wanted_log_step == pytest.approx(25.0)
    assert math.log(decision.sigma_after / decision.sigma_before) == pytest.approx(0.3)


def test_nothing_winds_up_at_a_bound() -> None:
    """After 200 steps held at the bound, the first error of the other sign moves sigma at once."""
    patient = FeedbackSection(enabled=True, smoothing=1.0, patience=1000, sigma_max=0.02)
    decisions = run([*[Signals(0.1)] * 200, Signals(0.9)], patient)
    assert decisions[199].reason == "at_upper_bound"
    assert decisions[199].sigma_after == 0.02
    assert decisions[200].reason == "lowered"
    assert decisions[200].sigma_after < 0.02 * 0.8
    low = run([Signals(1.0)] * 200 + [Signals(0.1)])
    assert low[199].reason == "at_lower_bound"
    assert low[200].sigma_after > low[199].sigma_after == SECTION.sigma_min


def test_raises_that_do_not_pay_off_are_taken_back_and_pause() -> None:
    decisions = run([Signals(0.2)] * 8)
    assert [d.reason for d in decisions] == ["raised"] * 3 + ["unproductive"] + ["waiting"] * 3 + ["raised"]
    assert decisions[3].sigma_after == 0.01, "back to where the row began"
    assert "3 raises" in decisions[3].detail


def test_staying_at_the_upper_bound_must_pay_off_too() -> None:
    section = FeedbackSection(enabled=True, smoothing=1.0, patience=3, sigma_max=0.0105)
    reasons = [d.reason for d in run([Signals(0.2)] * 5, section)]
    assert "unproductive" in reasons


def test_raises_that_pay_off_go_on() -> None:
    decisions = run([Signals(0.10 + 0.01 * i) for i in range(12)])
    assert {d.reason for d in decisions} == {"raised"}


def test_the_mixed_share_is_smoothed() -> None:
    section = FeedbackSection(enabled=True, smoothing=0.25)
    state = start(0.01)
    for value, mean in ((0.4, 0.4), (0.8, 0.5), (None, 0.5), (0.1, 0.4)):
        state, _ = decide(section, state, Signals(value))
        assert state.mixed_mean == pytest.approx(mean)


def test_a_resumed_controller_decides_as_an_uninterrupted_one() -> None:
    signals = [Signals(0.2 + 0.05 * (i % 4), invalid_fraction=0.1 * (i % 5)) for i in range(30)]
    state = start(0.01)
    for signal in signals[:17]:
        state, _ = decide(SECTION, state, signal)
    stored: dict[str, Any] = asdict(state)
    state, resumed = FeedbackState(**stored), []
    for signal in signals[17:]:
        state, decision = decide(SECTION, state, signal)
        resumed.append(decision)
    assert resumed == run(signals)[17:]


# A bandit at equal tokens --------------------------------------------------------------------------------------------

PROMPTS, ARMS, CHANNELS, GROUP, TOKENS = 24, 10, 6, 8, 60_000
INVALID_ARM = ARMS - 1  # runs to the length limit and has no answer


@dataclass
class Outcome:
    accuracy: float
    mixed: float
    invalid: float
    tokens: int
    sigmas: list[float]


def softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits - logits.max())
    return e / e.sum()


@dataclass(frozen=True)
class Task:
    """``confidence``: logits by which a wrong answer leads at the start; ``rate``: of learning."""

    confidence: float
    rate: float


HARD, EASY = Task(confidence=5.0, rate=8.0), Task(confidence=4.0, rate=4.0)


def bandit(task: Task, seed: int, sigma_of: Any, observe: Any = None) -> Outcome:
    """Prompts with ten answers each, a confident and mostly wrong policy, noise through shared features.

    The policy's logits are theta + U z with one z a step (scope rollout); training replays z. An answer costs 10
    tokens, the invalid one 40. Training stops when the tokens are spent, whatever the number of steps.
    """
    rng = np.random.default_rng(seed)
    theta = rng.standard_normal((PROMPTS, ARMS))
    right = rng.integers(0, INVALID_ARM, PROMPTS)
    theta[np.arange(PROMPTS), (right + 1) % INVALID_ARM] += task.confidence
    theta[:, INVALID_ARM] -= 1.0
    features = rng.standard_normal((PROMPTS, ARMS, CHANNELS))
    spent, step, mixed_sum, invalid_sum, sigmas = 0, 0, 0.0, 0.0, []
    while spent < TOKENS:
        sigma = sigma_of(spent / TOKENS)
        z = sigma * rng.standard_normal(CHANNELS)
        mixed, invalid, entropy = 0, 0, 0.0
        for q in rng.choice(PROMPTS, 8, replace=False):
            p = softmax(theta[q] + features[q] @ z)
            answers = np.minimum(np.searchsorted(p.cumsum(), rng.random(GROUP)), ARMS - 1)
            rewards = [float(a == right[q]) for a in answers]
            advantages = group_advantages(rewards, 1e-6, "leave_one_out")
            # REINFORCE under the recorded noise; the advantages sum to zero, so the terms in p cancel.
            theta[q] += task.rate / GROUP * np.bincount(answers, weights=advantages, minlength=ARMS)
            mixed += len(set(rewards)) > 1
            invalid += int((answers == INVALID_ARM).sum())
            entropy -= float((p * np.log(p + 1e-300)).sum())
            spent += int(np.where(answers == INVALID_ARM, 40, 10).sum())
        if observe is not None:
            observe(Signals(mixed / 8, invalid / (8 * GROUP), entropy / 8))
        mixed_sum, invalid_sum, step = mixed_sum + mixed / 8, invalid_sum + invalid / (8 * GROUP), step + 1
        sigmas.append(sigma)
    accuracy = float(np.mean([softmax(theta[q])[right[q]] for q in range(PROMPTS)]))
    return Outcome(accuracy, mixed_sum / step, invalid_sum / step, spent, sigmas)


def scheduled(task: Task, seed: int, sigma_start: float) -> Outcome:
    section = NoiseSection(sigma_start=sigma_start, sigma_end=sigma_start / 20, stages=10)
    return bandit(task, seed, lambda share: sigma_of_stage(section, stage_of_step(int(share * 1000), 1000, 10)))


def controlled(task: Task, seed: int, sigma_start: float) -> tuple[Outcome, list[Decision]]:
    section = FeedbackSection(enabled=True, target_mixed_fraction=0.5, sigma_min=1e-3, sigma_max=2.0)
    state, decisions = start(sigma_start), []

    def observe(signals: Signals) -> None:
        nonlocal state
        state, decision = decide(section, state, signals)
        decisions.append(decision)

    return bandit(task, seed, lambda share: state.sigma, observe), decisions


def compare(task: Task, sigma_start: float, seeds: int = 8) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Paired over seeds, controlled minus scheduled: (accuracy of the clean policy, mixed share, tokens)."""
    pairs = [(controlled(task, s, sigma_start)[0], scheduled(task, s, sigma_start)) for s in range(seeds)]
    return tuple(  # type: ignore[return-value]
        np.array([getattr(a, name) - getattr(b, name) for a, b in pairs]) for name in ("accuracy", "mixed", "tokens")
    )


def standard_error(differences: np.ndarray) -> float:
    return float(differences.std(ddof=1) / math.sqrt(len(differences)))


def test_where_signal_is_rare_feedback_learns_more_from_the_same_tokens() -> None:
    accuracy, mixed, tokens = compare(HARD, sigma_start=0.3)
    assert np.abs(tokens).max() < 0.05 * TOKENS, "equal budgets, to one step"
    assert mixed.mean() > 3 * standard_error(mixed)
    assert accuracy.mean() > 3 * standard_error(accuracy)
    assert accuracy.mean() > 0.1


def test_where_a_schedule_fits_feedback_is_the_worse_choice() -> None:
    """It holds sigma up for the sake of mixed groups while the schedule lets the policy settle: no free lunch."""
    accuracy, _, _ = compare(EASY, sigma_start=1.0)
    assert accuracy.mean() < -3 * standard_error(accuracy)


def test_in_the_bandit_every_change_of_sigma_has_its_decision() -> None:
    outcome, decisions = controlled(HARD, 0, 0.3)
    assert len(decisions) == len(outcome.sigmas)
    assert [d.sigma_before for d in decisions] == outcome.sigmas
    assert all(1e-3 <= d.sigma_after <= 2.0 for d in decisions)
    assert {"raised", "lowered", "waiting"} <= {d.reason for d in decisions}


def test_noise_that_ruins_answers_is_taken_back() -> None:
    """Started far too high, sigma falls until the answers can be read."""
    section = FeedbackSection(
        enabled=True, target_mixed_fraction=0.5, sigma_min=1e-3, sigma_max=50.0, max_invalid_fraction=0.05
    )
    state, reasons = start(20.0), []

    def observe(signals: Signals) -> None:
        nonlocal state
        state, decision = decide(section, state, signals)
        reasons.append(decision.reason)

    outcome = bandit(HARD, 1, lambda share: state.sigma, observe)
    assert reasons.count("invalid_answers") >= 5
    assert np.mean(outcome.sigmas[-20:]) < 10.0
