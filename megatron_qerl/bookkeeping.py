"""What a run writes down about a step: the numbers of ``metrics.names`` from what the stages returned."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

import torch

from megatron_qerl.config.schema import RunConfig
from megatron_qerl.metrics.exploration import exploration_signals
from megatron_qerl.noise.controller import Decision, Signals
from megatron_qerl.noise.proof import EngineComparison, NoiseReadback
from megatron_qerl.report.summary import SampleRecord
from megatron_qerl.rewards.outcome import OutcomeCounts
from megatron_qerl.rollout.collect import CollectedStep
from megatron_qerl.trainer.step import StepStatistics
from megatron_qerl.types import NoiseState, ScoredCompletion


def _responses(collected: CollectedStep) -> list[ScoredCompletion]:
    return [r for g in collected.generated for r in g.responses]


def _group_values(collected: CollectedStep, *, filtered: bool) -> dict[str, float]:
    """Counts of groups; without dynamic sampling nothing is dropped or missing, whatever the groups hold."""
    values = collected.report.as_metrics()
    if not filtered:
        values |= {k: 0.0 for k in values if "dropped" in k or k == "groups/shortfall"}
        values["groups/kept"] = float(len(collected.trainable))
    return values


def rollout_values(collected: CollectedStep, *, filtered: bool) -> dict[str, float]:
    """Rewards, outcomes, groups, lengths and token counts of everything generated in the step."""
    responses = _responses(collected)
    rewards = [r.reward for r in responses]
    lengths = [len(r.completion.token_ids) for r in responses]
    mean = sum(rewards) / len(rewards)
    fractions = OutcomeCounts.of(r.judgement for r in responses).fractions()
    return {
        "reward/mean": mean,
        "reward/std": math.sqrt(sum((x - mean) ** 2 for x in rewards) / len(rewards)),
        "reward/score_mean": sum(r.judgement.score for r in responses) / len(responses),
        **fractions,
        **_group_values(collected, filtered=filtered),
        **exploration_signals(collected.generated).as_metrics(),
        "length/mean_tokens": sum(lengths) / len(lengths),
        "length/max_tokens": float(max(lengths)),
        "length/min_tokens": float(min(lengths)),
        "length/truncated_fraction": sum(r.completion.finish_reason == "length" for r in responses) / len(responses),
        "tokens/prompt": float(sum(len(g.prompt.token_ids) * len(g.responses) for g in collected.generated)),
        "tokens/completion": float(sum(lengths)),
    }


def training_values(stats: StepStatistics) -> dict[str, float]:
    """Loss, ratio, correction, entropy, parity and optimizer numbers; empty when nothing was trained."""
    if stats.tokens == 0:
        return {}
    base = stats.base_tokens
    divergence = (
        {"kl/base_k1_nats": stats.base_k1_sum / base, "kl/base_k3_nats": stats.base_k3_sum / base} if base else {}
    )
    return {
        "loss/policy": stats.loss_sum / stats.normaliser,
        "entropy/sampling_mean_nats": stats.entropy_sum / stats.tokens,
        **stats.ratio.as_metrics(),
        **stats.weights.as_metrics(),
        **divergence,
        "tokens/trained": float(stats.tokens),
        "optimizer/learning_rate": stats.updates[-1].learning_rate,
        "optimizer/gradient_norm": max(u.gradient_norm for u in stats.updates),
        "optimizer/update_norm": max(u.update_norm for u in stats.updates),
        "optimizer/clipped": sum(u.clipped for u in stats.updates) / len(stats.updates),
    }


def parity_values(stats: StepStatistics) -> dict[str, float]:
    """Engine against trainer; empty when no token was compared."""
    if stats.parity_tokens == 0:
        return {}
    return {
        "parity/logprob_max_abs": stats.parity_max,
        "parity/logprob_mean_abs": stats.parity_sum / stats.parity_tokens,
    }


def noise_values(
    state: NoiseState, readback: NoiseReadback | None, change: tuple[float, float] | None
) -> dict[str, float]:
    """The step's noise and its proof; a stage without noise reports zeros and no counts."""
    values = {"noise/stage": float(state.stage), "noise/sigma_nominal": state.sigma, "noise/sigma_effective": 0.0}
    if readback is not None and change is not None:
        values["noise/sigma_effective"] = readback.sigma_effective
        values["noise/modules_expected"] = float(readback.expected)
        values["noise/modules_touched"] = float(readback.touched)
        if state.budget == "relative":
            values["noise/near_zero_channels"] = float(sum(readback.near_zero.values()))
        values["noise/logprob_change_mean"], values["noise/logprob_change_max"] = change
    return values


def engine_values(measured: Sequence[EngineComparison]) -> dict[str, float]:
    """The engine's proof over the replicas: the slope farthest from 1 and the largest differences.

    Entropies are the first replica's, whose group every layout has: feedback may decide by them.
    """
    values = {
        "noise/engine_slope": max((c.slope for c in measured), key=lambda slope: abs(slope - 1.0)),
        "parity/logprob_max_abs": max(c.max_abs for c in measured),
        "parity/logprob_mean_abs": max(c.mean_abs for c in measured),
    }
    first = {"noisy": measured[0].entropy_noisy, "clean": measured[0].entropy_clean}
    return values | {f"entropy/{name}_mean_nats": value for name, value in first.items() if value is not None}


def feedback_signals(
    collected: CollectedStep, stats: StepStatistics, noise_metrics: Mapping[str, float], config: RunConfig
) -> Signals:
    """What a finished noisy step showed to the controller of sigma.

    The trainer's entropy is that under the noise only where it replays the noise; elsewhere the engine's proof has it,
    from fewer tokens.
    """
    found = exploration_signals(collected.generated)
    trained = training_values(stats)
    entropy = noise_metrics.get("entropy/noisy_mean_nats")
    if config.algorithm.likelihood == "replay":
        entropy = trained.get("entropy/sampling_mean_nats", entropy)
    return Signals(found.mixed_fraction, found.invalid_fraction, entropy, trained.get("kl/k3_nats"))


def feedback_values(decision: Decision) -> dict[str, float]:
    """A decision as metrics; its reason and detail go into the step's info."""
    return {"noise/sigma_next": decision.sigma_after, "noise/wanted_log_step": decision.wanted_log_step}


def sample_records(collected: CollectedStep, step: int, count: int) -> Iterator[SampleRecord]:
    """The first response of the first ``count`` groups: a fixed rule, so that nobody picks the pretty ones."""
    for group in collected.generated[:count]:
        response = group.responses[0]
        yield SampleRecord(
            step=step,
            uid=group.prompt.problem.uid,
            question=group.prompt.problem.question,
            answer=group.prompt.problem.answer,
            outcome=response.judgement.outcome,
            score=response.judgement.score,
            reward=response.reward,
            extracted=response.judgement.extracted,
            tokens=len(response.completion.token_ids),
            text=response.text,
        )


def versions() -> dict[str, str]:
    """Versions of what decides the numbers; packages that are absent are left out."""
    found = {"python": platform.python_version()}
    for package in (
        "megatron-qerl",
        "torch",
        "megatron-core",
        "transformers",
        "nvidia-modelopt",
        "math-verify",
        "transformer-engine",
    ):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, str]:
    """What the run is on."""
    found = {"machine": platform.machine(), "cpu_threads": str(torch.get_num_threads())}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    else:
        found["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    return found


def add_counts(total: Mapping[str, int], values: Mapping[str, float]) -> dict[str, int]:
    """Run totals of the ``tokens/`` metrics."""
    kinds = ("prompt", "completion", "trained")
    return {k: total.get(k, 0) + int(values.get(f"tokens/{k}", 0.0)) for k in kinds}
