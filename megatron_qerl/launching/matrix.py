"""An experiment matrix: every combination of a few keys' values, each a run with a name of its own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_qerl.config import strict_yaml
from megatron_qerl.config.loader import parse_override
from megatron_qerl.config.schema import RunConfig
from megatron_qerl.errors import ConfigError


@dataclass(frozen=True)
class Cell:
    """One run of the matrix.

    Attributes:
        suffix: appended to run.name; empty where nothing varies.
        overrides: ``section.key=value`` texts.
    """

    suffix: str
    overrides: tuple[str, ...]


def cells(varied: Sequence[str]) -> list[Cell]:
    """The combinations of ``section.key=[a, b]`` texts, the last key fastest; one plain cell where there are none.

    Raises:
        ConfigError: a key is unknown or given twice, or its value is not a list of at least two different values.
    """
    axes: list[list[str]] = []
    keys: list[str] = []
    for text in varied:
        parse_override(text, RunConfig)  # refuses unknown keys
        key, _, value = text.partition("=")
        values = strict_yaml.parse(value, f"--vary {key}")
        shown = [strict_yaml.dump_short(v) for v in values] if isinstance(values, list) else []
        if len(shown) < 2 or len(set(shown)) < len(shown):
            raise ConfigError(f"--vary {key}", value, "must be a list of different values", f"Write {key}=[a, b]")
        if key.strip() in (*keys, "run.name"):
            rule = "is given twice" if key.strip() in keys else "is made from the run's number in the matrix"
            raise ConfigError("--vary", key, rule, "Remove one" if key.strip() in keys else "Remove it")
        keys.append(key.strip())
        axes.append([f"{key.strip()}={v}" for v in shown])
    combinations = list(itertools.product(*axes))
    digits = len(str(len(combinations) - 1))
    return [Cell(f"-{i:0{digits}d}" if axes else "", combination) for i, combination in enumerate(combinations)]
