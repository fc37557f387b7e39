"""The norms of a model by logical role, and the only code that sets or clears their noise.

Modules are found through the family's table, never by class name; how many there must be follows from the config
alone. If the two counts differ, nothing runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_qerl.config.schema import NoiseSection
from megatron_qerl.errors import ConfigError, FaultError, NoiseProofError
from megatron_qerl.noise.budget import relative_budget
from megatron_qerl.noise.schedule import sigma_of_stage, stage_of_step
from megatron_qerl.noise.state import draw, modules_hash
from megatron_qerl.types import NoiseState

NormKey = tuple[int, str]


class NoisyNorm(Protocol):
    """A norm that takes noise: an FP32 clean scale and a replaceable FP32 displacement."""

    weight: Tensor
    noise: Tensor | None

    def set_noise(self, z: Tensor | None) -> None:
        """Replace the displacement; None clears it."""
        ...


class NoiseRegistry:
    """Noise of one model on this rank.

    Args:
        norms: (block, role) -> norm on this rank.
        expected: (block, role) -> channels of every norm of the whole model.
        config: noise settings.
        seed: the run's seed.
        complete: this rank holds every norm; False on a pipeline stage, whose counts are summed over the stages.
        folded: FP32 [channels] by which quantisation divided a norm's scale (AWQ). Noise belongs to the scale that the
            model was trained with: u (w + z) W = u (w / s + z / s) (s W), so what is added here is z / s. Without
            this a channel whose scale was divided by 10 would get noise ten times too strong.

    Attributes:
        budgets: under a relative budget, the noise of each norm on this rank at sigma 1; empty under an absolute one.

    Raises:
        ConfigError: a role that the model does not have.
        NoiseProofError: a norm is missing or has other channels.
    """

    def __init__(
        self,
        norms: Mapping[NormKey, NoisyNorm],
        expected: Mapping[NormKey, int],
        config: NoiseSection,
        seed: int,
        *,
        complete: bool = True,
        folded: Mapping[NormKey, NDArray[np.float32]] | None = None,
    ) -> None:
        known = {role for _, role in expected}
        for role in config.roles if config.enabled else ():
            if role not in known:
                raise ConfigError(
                    "noise.roles", role, f"this model has no such norm (it has {sorted(known)})", "remove the role"
                )
        self.config, self.seed = config, seed
        self.expected = {k: c for k, c in expected.items() if config.enabled and k[1] in config.roles}
        self.targets = {k: m for k, m in norms.items() if k in self.expected}
        self._all = dict(norms)
        absent = sorted(set(self.expected) - set(self.targets))
        if absent and complete:
            raise NoiseProofError(
                f"norm {absent[0]}",
                f"is missing from the model, with {len(absent) - 1} others of the {len(self.expected)} expected",
                "the model was not built from this config.json",
            )
        for key, module in self.targets.items():
            if module.weight.numel() != self.expected[key]:
                raise NoiseProofError(
                    f"norm {key}",
                    f"has {module.weight.numel()} channels, the family's table says {self.expected[key]}",
                    "the model and its config.json do not belong together",
                )
        self.folded = {k: np.asarray(f, dtype=np.float32) for k, f in (folded or {}).items() if k in self.expected}
        self.hash = modules_hash(self.expected, self.folded)
        self.budgets = {k: relative_budget(self.scale(k), 1.0) for k in self.targets if config.budget == "relative"}

    def scale(self, key: NormKey) -> NDArray[np.float64]:
        """float64 [channels]: the clean scale of a norm on this rank, as the model was trained."""
        stored = self.targets[key].weight.detach().double().cpu().numpy()
        return np.asarray(stored * self.folded[key] if key in self.folded else stored, dtype=np.float64)

    def state(self, step: int, total_steps: int, steered: float | None = None) -> NoiseState:
        """The noise of one training step.

        Args:
            steered: sigma that feedback chose, in place of the schedule's; stage 0 stays clean.
        """
        stage = stage_of_step(step, total_steps, self.config.stages) if self.config.enabled else 0
        sigma = sigma_of_stage(self.config, stage) if self.config.enabled else 0.0
        if steered is not None and sigma > 0.0:
            sigma = steered
        return NoiseState(
            stage=stage,
            sigma=sigma,
            seed=self.seed,
            step=step,
            scope=self.config.scope,
            roles=tuple(sorted(self.config.roles)) if self.config.enabled else (),
            modules_hash=self.hash,
            budget=self.config.budget,
        )

    def apply(self, state: NoiseState | None) -> None:
        """Put ``state`` in force, replacing whatever was there; None or sigma 0 leaves every norm clean.

        Raises:
            FaultError: the state belongs to another model or another set of roles.
        """
        for module in self._all.values():
            module.set_noise(None)
        if state is None or not state.active:
            return
        if state.modules_hash != self.hash:
            raise FaultError(
                f"noise state of step {state.step}",
                f"was recorded for modules {state.modules_hash[:12]}, this model has {self.hash[:12]}",
                "replay it on the model and noise.roles that it was recorded with",
            )
        if state.budget != self.config.budget:
            raise FaultError(
                f"noise state of step {state.step}",
                f"was recorded under noise.budget: {state.budget}, this run has {self.config.budget}",
                "replay it under the budget that it was recorded with",
            )
        for key, module in self.targets.items():
            module.set_noise(self.displacement(state, key))

    def displacement(self, state: NoiseState, key: NormKey) -> Tensor:
        """FP32 [channels]: what ``state`` adds to the scale of norm ``key`` as this checkpoint stores it."""
        budget = self.budgets.get(key)
        size = None if budget is None else budget.sigma * budget.shrink
        z = draw(state, key[0], key[1], self.expected[key], size=size)
        return torch.from_numpy(z / self.folded[key] if key in self.folded else z)

    @contextmanager
    def applied(self, state: NoiseState | None) -> Iterator[None]:
        """``state`` in force within the block, every norm clean after it."""
        self.apply(state)
        try:
            yield
        finally:
            self.apply(None)
