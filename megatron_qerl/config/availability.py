"""Settings that the schema knows and this version cannot honour.

They are refused before anything is loaded; nothing is quietly ignored. A setting leaves this list when it is built and
proved.
"""

from __future__ import annotations

from megatron_qerl.config.schema import RunConfig
from megatron_qerl.errors import ConfigError

_NOT_HERE = "is not available in this version"
_NOT_PROVED = "is not proved yet"


def refuse_unbuilt(config: RunConfig) -> None:
    """Check a config against what is built.

    Raises:
        ConfigError: names the key and what to use.
    """
    noise, layout = config.noise, config.parallel
    checks: list[tuple[str, object, object, str]] = [
        ("rollout.engine", config.rollout.engine, "embedded", _NOT_HERE),
        ("noise.scope", noise.scope if noise.enabled else "rollout", "rollout", _NOT_HERE),
        ("noise.application", noise.application if noise.enabled else "replace", "replace", _NOT_HERE),
    ]
    if config.model.attention == "transformer_engine":
        wants = "model.attention: transformer_engine "
        checks += [
            (
                "train.share_prompt_prefix",
                config.train.share_prompt_prefix,
                False,
                wants + "knows whole sequences and cannot share a prompt between responses",
            ),
            ("model.dtype", config.model.dtype, "bfloat16", wants + "has fused kernels for BF16 alone"),
            (
                "parallel.context_parallel_size",
                layout.context_parallel_size,
                1,
                wants + "over context-parallel ranks " + _NOT_PROVED + " (sdpa is)",
            ),
        ]
        if config.model.device == "cpu":
            checks.append(("model.device", "cpu", "cuda", wants + "computes on NVIDIA devices alone"))
    for key, value, only, rule in checks:
        if value != only:
            raise ConfigError(key, value, rule, f"use {str(only).lower()}")
