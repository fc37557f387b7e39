"""Settings that the schema knows and this version cannot honour.

They are refused before anything is loaded; nothing is quietly ignored. A setting leaves this list when it is built and
proved.
"""

from __future__ import annotations

import os

from megatron_qerl.config.schema import RunConfig
from megatron_qerl.errors import ConfigError

_NOT_HERE = "is not available in this version"
_ONE_RANK = "training on several ranks is not proved yet"


def refuse_unbuilt(config: RunConfig) -> None:
    """Check a config against what is built.

    Raises:
        ConfigError: names the key and what to use.
    """
    noise, layout = config.noise, config.parallel
    checks: list[tuple[str, object, object, str]] = [
        ("WORLD_SIZE", int(os.environ.get("WORLD_SIZE", "1")), 1, _ONE_RANK),
        ("rollout.engine", config.rollout.engine, "embedded", _NOT_HERE),
        ("noise.scope", noise.scope if noise.enabled else "rollout", "rollout", _NOT_HERE),
        ("noise.application", noise.application if noise.enabled else "replace", "replace", _NOT_HERE),
        ("parallel.sequence_parallel", layout.sequence_parallel, False, "needs tensor parallelism; " + _ONE_RANK),
    ]
    checks += [
        (f"parallel.{name}", getattr(layout, name) or 1, 1, _ONE_RANK)
        for name in type(layout).model_fields
        if name != "sequence_parallel"
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
        ]
        if config.model.device == "cpu":
            checks.append(("model.device", "cpu", "cuda", wants + "computes on NVIDIA devices alone"))
    for key, value, only, rule in checks:
        if value != only:
            raise ConfigError(key, value, rule, f"use {str(only).lower()}")
