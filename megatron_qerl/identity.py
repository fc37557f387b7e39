"""What makes two runs the same run: the settings and the data that decide its numbers.

A resume under another learning rate or another dataset would continue into something that no single run ever was, so it
is refused, and the key that differs is named. Where results are stored and shown may change freely.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_qerl.config.schema import RunConfig
from megatron_qerl.types import Prompt

#: Keys that move results but do not change them, or by no more than the rounding of sums: any layout may resume.
FREE_KEYS = ("run.output_dir", "run.threads", "metrics.", "checkpoint.", "parallel.")


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def deciding_settings(config: RunConfig) -> dict[str, Any]:
    """Dotted key -> value of every setting that decides the run's numbers."""
    flat = _flat(config.model_dump(mode="json"))
    return {k: v for k, v in sorted(flat.items()) if not k.startswith(FREE_KEYS)}


def settings_hash(config: RunConfig) -> str:
    """SHA-256 over the deciding settings."""
    return hashlib.sha256(json.dumps(deciding_settings(config)).encode()).hexdigest()


def first_difference(old: RunConfig, new: RunConfig) -> str | None:
    """``key: old -> new`` of the first deciding setting that differs."""
    before, after = deciding_settings(old), deciding_settings(new)
    for key in sorted({*before, *after}):
        if before.get(key) != after.get(key):
            return f"{key}: {before.get(key)} -> {after.get(key)}"
    return None


def data_hash(train: Sequence[Prompt], evaluation: Sequence[Prompt]) -> str:
    """SHA-256 over uid, answer and token ids of all prompts, in order."""
    digest = hashlib.sha256()
    for prompts in (train, evaluation):
        for prompt in prompts:
            digest.update(json.dumps([prompt.problem.uid, prompt.problem.answer, prompt.token_ids]).encode())
        digest.update(b"\0")
    return digest.hexdigest()
