"""How sigma falls over a run: K stages, the first without noise (paper section 3.3, equation 8 and algorithm 1).

Stage 0 has sigma 0. Stages 1 .. K-1 run from ``sigma_start`` to ``sigma_end``, both hit exactly. With the fraction
f = (k - 1) / (K - 2) of the way, 0 at the first noisy stage and 1 at the last:

    exponential   start * (end / start) ** f                        the paper's; equal ratios between stages
    linear        start + (end - start) * f
    cosine        end + (start - end) * (1 + cos(pi f)) / 2         flat at both ends
    constant      start

QeRL has been published with three pairs of sigmas: 5e-2 -> 5e-4 in the paper's main text, 1e-2 -> 5e-4 in its Table 4,
1e-2 -> 1e-4 in the scripts. ``noise.source`` names the one that a config uses (``config.noise.PUBLISHED_SIGMAS``).

What a schedule means for the policy depends on how noise is applied. Replaced, the displacement from the clean scale
has the variance of the current draw; accumulated, the sum over all draws so far, which grows although sigma falls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from megatron_qerl.config.noise import NoiseSection


def stage_of_step(step: int, total_steps: int, stages: int) -> int:
    """Stage in force at ``step`` (0-based) of ``total_steps``: K intervals as equal as integers allow."""
    assert 0 <= step < total_steps
    return step * stages // total_steps


def sigma_of_stage(config: NoiseSection, stage: int) -> float:
    """Nominal sigma of a stage."""
    assert 0 <= stage < config.stages
    if not config.enabled or stage == 0:
        return 0.0
    start, end, last = config.sigma_start, config.sigma_end, config.stages - 1
    # The last stage first: with two stages it is also the first noisy one, and the config makes both sigmas equal.
    if config.schedule == "constant" or stage == 1 < last:
        return start
    if stage == last:
        return end
    fraction = (stage - 1) / (last - 1)
    if config.schedule == "linear":
        return start + (end - start) * fraction
    if config.schedule == "cosine":
        return end + (start - end) * (1.0 + math.cos(math.pi * fraction)) / 2.0
    return float(start * (end / start) ** fraction)


def displacement_variances(sigmas: Sequence[float], application: str) -> tuple[float, ...]:
    """Variance of a scale's displacement from its clean value after each draw, per channel (reading, section 9).

    Args:
        sigmas: deviation of each draw in order: one a rollout, not one a stage.
        application: ``replace``: sigma_k^2; ``accumulate``: the sum of sigma_i^2 over i <= k, for independent draws.
    """
    assert application in ("replace", "accumulate"), application
    squares = [sigma * sigma for sigma in sigmas]
    return tuple(squares if application == "replace" else accumulate(squares))
