"""Proof that the noise acts, taken from the model itself and not from the code that meant to change it.

Three facts must hold while noise is in force, or the run stops: every expected norm holds a displacement that equals
the state's draw and changes its effective scale; no other norm holds one; and the log-probabilities of a probe prompt
move. The published implementation looks norms up by a class name that its engine does not use, and nothing fails.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_qerl.errors import NoiseProofError
from megatron_qerl.noise.registry import NoiseRegistry
from megatron_qerl.types import NoiseState


@dataclass(frozen=True)
class NoiseReadback:
    """What the norms on this rank hold, or those of all stages.

    Attributes:
        touched: norms whose effective scale differs from the clean one as the state demands.
        expected: norms that should be touched.
        square_sum: of the displacements of the effective scales, in the dtype that multiplies and in units of the scale
            before quantisation folded anything into it. Under a relative budget of displacement / scale, over the
            channels that are not near zero: what sigma is stated in.
        channels: how many displacements that is.
        near_zero: "block.role" -> channels whose scale is so close to zero that their noise was shrunk, of norms that
            have any; known under a relative budget alone.
    """

    touched: int
    expected: int
    square_sum: float
    channels: int
    near_zero: dict[str, int] = field(default_factory=dict)

    @property
    def sigma_effective(self) -> float:
        """Root mean square displacement."""
        return float(np.sqrt(self.square_sum / self.channels)) if self.channels else 0.0


def read_back(registry: NoiseRegistry, state: NoiseState) -> NoiseReadback:
    """Compare every norm's effective scale with the state.

    Raises:
        NoiseProofError: a count is wrong, a displacement is not the state's, or a norm outside the roles is noisy.
    """
    touched, squares, channels = 0, 0.0, 0
    for key, module in registry.targets.items():
        clean = module.weight.detach()
        effective = clean if module.noise is None else clean + module.noise
        displacement = (effective - clean).double().cpu()
        # What the state demands, pushed through the same FP32 addition.
        z = registry.displacement(state, key).to(clean.device)
        wanted = ((clean + z) - clean).double().cpu()
        if torch.equal(displacement, wanted) and bool((displacement != 0).any()):
            touched += 1
        # In units of the scale before anything was folded into it, which is what sigma is stated in.
        original = displacement * torch.from_numpy(registry.folded[key]) if key in registry.folded else displacement
        if key in registry.budgets:
            counted = np.ones(clean.numel(), dtype=bool)
            counted[list(registry.budgets[key].near_zero)] = False
            original = (original / torch.from_numpy(registry.scale(key)))[torch.from_numpy(counted)]
        squares += float(original.square().sum())
        channels += original.numel()
    stray = [k for k, m in registry._all.items() if k not in registry.targets and m.noise is not None]
    if stray:
        raise NoiseProofError("noise", f"norm {stray[0]} is noisy but not in noise.roles", "report this as a bug")
    near_zero = {f"{b}.{role}": len(n.near_zero) for (b, role), n in registry.budgets.items() if n.near_zero}
    return NoiseReadback(touched, len(registry.targets), squares, channels, near_zero)


def over_stages(local: NoiseReadback, group: dist.ProcessGroup) -> NoiseReadback:
    """The sum over the ranks of a pipeline, each of which holds the norms of its stages alone.

    Args:
        local: what ``read_back`` found on this rank.
        group: pipeline-parallel process group.
    """
    parts: list[NoiseReadback] = [local] * group.size()
    dist.all_gather_object(parts, local, group=group)
    return NoiseReadback(
        touched=sum(p.touched for p in parts),
        expected=sum(p.expected for p in parts),
        square_sum=sum(p.square_sum for p in parts),
        channels=sum(p.channels for p in parts),
        near_zero={name: count for p in parts for name, count in p.near_zero.items()},
    )


def check_counts(touched: int, expected: int, state: NoiseState) -> None:
    """Raises NoiseProofError unless all expected norms were touched (all ranks' sums are passed in)."""
    if touched != expected:
        raise NoiseProofError(
            f"noise stage {state.stage}, sigma {state.sigma:g}",
            f"changed {touched} norms, expected {expected}",
            "sigma may be too small for the scales' precision, or a module was replaced after the model was built",
        )


@dataclass(frozen=True)
class EngineComparison:
    """Engine against trainer on tokens that were drawn under noise.

    Attributes:
        max_abs, mean_abs: of |trainer under the noise - engine|, nats.
        slope: share of the noise's effect that the engine's log-probabilities show; 1 for the recorded noise, 0
            for none.
        slope_error: standard error of the slope.
        effect_mean_abs: of |trainer under the noise - trainer without|, nats.
        entropy_noisy, entropy_clean: mean token entropy under the noise and without, nats; None if not measured.
    """

    max_abs: float
    mean_abs: float
    slope: float
    slope_error: float
    effect_mean_abs: float
    entropy_noisy: float | None = None
    entropy_clean: float | None = None


def compare_engine(rollout_T: Tensor, noisy_T: Tensor, clean_T: Tensor) -> EngineComparison:
    """Regress (engine - clean trainer) on (noisy trainer - clean trainer), token by token.

    A bound on single differences must allow for rounding, and a noise whose effect is smaller passes under it. The
    slope averages over tokens. It has a limit too: both sides hold the clean trainer's rounding, so where the effect is
    not well above rounding the slope says nothing, and ``check_engine`` does not judge it.
    """
    effect, seen = (noisy_T - clean_T).double(), (rollout_T - clean_T).double()
    power = effect.square().sum()
    slope, error = 0.0, float("inf")
    if power > 0:
        slope = float((effect * seen).sum() / power)
        # HC3 (MacKinnon and White 1985): in a sharp policy one token can carry nearly all of the effect, and then its
        # own rounding decides the slope. Weighing residuals by leverage makes the error bar say so.
        leverage = effect.square() / power
        residual = (seen - slope * effect) / (1.0 - leverage).clamp(min=1e-6)
        error = float((effect.square() * residual.square()).sum().sqrt() / power)
    difference = (noisy_T - rollout_T).abs()
    return EngineComparison(float(difference.max()), float(difference.mean()), slope, error, float(effect.abs().mean()))


def check_engine(comparison: EngineComparison, state: NoiseState, rounding: float) -> None:
    """Raise NoiseProofError if the engine's tokens were, beyond doubt, not drawn under ``state``.

    Args:
        rounding: mean absolute difference of two log-probabilities that arithmetic alone explains, nats.
    """
    if comparison.effect_mean_abs < 10.0 * rounding:
        return
    if comparison.slope < 0.5 and comparison.slope + 4 * comparison.slope_error < 1.0:
        raise NoiseProofError(
            f"noise stage {state.stage}, sigma {state.sigma:g}",
            f"the engine's log-probabilities show {comparison.slope:.2f} +- {comparison.slope_error:.2f} of its "
            "effect, expected 1",
            "the engine generated under another noise than the one that was recorded",
        )


def logprob_change(clean_T: Tensor, noisy_T: Tensor, state: NoiseState) -> tuple[float, float]:
    """(mean, max) of |noisy - clean| log-probability on the probe.

    Raises:
        NoiseProofError: nothing moved although sigma is above zero.
    """
    change = (noisy_T - clean_T).abs()
    largest = float(change.max())
    if state.active and not largest > 0.0:
        raise NoiseProofError(
            f"noise stage {state.stage}, sigma {state.sigma:g}",
            "did not change a single log-probability of the probe",
            "raise sigma or use a wider model.dtype",
        )
    return float(change.mean()), largest
