"""How sigma falls over a run: K stages, the first without noise (paper section 3.3, equation 8 and algorithm 1).

Stage 0 has sigma 0. Stages 1 .. K-1 run from ``sigma_start`` to ``sigma_end``, both hit exactly:

    sigma_k = sigma_start * (sigma_end / sigma_start) ** ((k - 1) / (K - 2))
"""

from __future__ import annotations

from megatron_qerl.config.schema import NoiseSection


def stage_of_step(step: int, total_steps: int, stages: int) -> int:
    """Stage in force at ``step`` (0-based) of ``total_steps``: K intervals as equal as integers allow."""
    assert 0 <= step < total_steps
    return step * stages // total_steps


def sigma_of_stage(config: NoiseSection, stage: int) -> float:
    """Nominal sigma of a stage."""
    assert 0 <= stage < config.stages
    if not config.enabled or stage == 0:
        return 0.0
    if config.schedule == "constant":
        return config.sigma_start
    if stage == config.stages - 1:
        return config.sigma_end
    exponent = (stage - 1) / (config.stages - 2)
    return float(config.sigma_start * (config.sigma_end / config.sigma_start) ** exponent)
