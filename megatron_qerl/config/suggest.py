"""Finding the config key that the user probably meant.

Every key has a dotted name (``optimizer.learning_rate``). An unknown key is compared with all of them: first by the
name that the field calls it elsewhere (``lr``), then by its last part in another section, then by spelling.
"""

from __future__ import annotations

import difflib
import types
import typing
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

# What users of other trainers type, and what the key is called here. Values must be keys of RunConfig (tested).
KNOWN_AS = {
    "actor_lr": "optimizer.learning_rate",
    "batch_size": "rollout.prompts_per_step",
    "clip_ratio_high": "algorithm.ratio_clip_high",
    "clip_ratio_low": "algorithm.ratio_clip_low",
    "epsilon_high": "algorithm.ratio_clip_high",
    "epsilon_low": "algorithm.ratio_clip_low",
    "grad_clip": "optimizer.gradient_clip",
    "lora_alpha": "lora.alpha",
    "lora_rank": "lora.rank",
    "lr": "optimizer.learning_rate",
    "max_completion_length": "rollout.max_new_tokens",
    "max_prompt_length": "rollout.max_prompt_tokens",
    "max_response_length": "rollout.max_new_tokens",
    "max_steps": "train.steps",
    "model_name_or_path": "model.path",
    "num_generations": "rollout.group_size",
    "num_steps": "train.steps",
    "pp_size": "parallel.pipeline_model_parallel_size",
    "rollout_n": "rollout.group_size",
    "target_modules": "lora.targets",
    "tp_size": "parallel.tensor_model_parallel_size",
    "train_batch_size": "rollout.prompts_per_step",
}

_SPELLING_CUTOFF = 0.6
_ELSEWHERE_CUTOFF = 0.8  # a key of another section must look more alike


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The nested section that an annotation holds (``X`` or ``X | None``), or None for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        for member in typing.get_args(annotation):
            found = section_of(member)
            if found is not None:
                return found
    return None


def known_keys(model: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """All keys of ``model`` in schema order, sections included, as dotted name -> field."""
    keys: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        keys[prefix + name] = field
        nested = section_of(field.annotation)
        if nested is not None:
            keys.update(known_keys(nested, f"{prefix}{name}."))
    return keys


def choices(annotation: Any) -> tuple[str, ...]:
    """The values a ``Literal`` allows, also behind ``| None``, aliases and tuples; empty for other types."""
    if isinstance(annotation, typing.TypeAliasType):
        return choices(annotation.__value__)
    if typing.get_origin(annotation) is Literal:
        return tuple(str(value) for value in typing.get_args(annotation))
    return tuple(value for member in typing.get_args(annotation) for value in choices(member))


def closest_key(unknown: str, model: type[BaseModel]) -> str | None:
    """The known key most like ``unknown`` (dotted), or None when nothing comes near."""
    keys = list(known_keys(model))
    section, _, leaf = unknown.rpartition(".")
    if KNOWN_AS.get(leaf) in keys:
        return KNOWN_AS[leaf]
    siblings = [key for key in keys if key.rpartition(".")[0] == section]
    by_leaf = {key.rpartition(".")[2]: key for key in siblings}
    near = difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=_SPELLING_CUTOFF)
    if near:
        return by_leaf[near[0]]
    leaves = sorted({key.rpartition(".")[2] for key in keys})
    near = difflib.get_close_matches(leaf, leaves, n=1, cutoff=_ELSEWHERE_CUTOFF)
    if near:
        elsewhere = [key for key in keys if key.rpartition(".")[2] == near[0]]
        return max(elsewhere, key=lambda key: difflib.SequenceMatcher(None, unknown, key).ratio())
    if siblings:
        # The section exists, and what its keys share with the unknown one is no more than the section's name.
        return None
    near = difflib.get_close_matches(unknown, keys, n=1, cutoff=_SPELLING_CUTOFF)
    return near[0] if near else None


def closest_value(value: object, allowed: tuple[str, ...]) -> str | None:
    """The allowed value most like ``value``, or None."""
    near = difflib.get_close_matches(str(value).lower(), allowed, n=1, cutoff=_SPELLING_CUTOFF)
    return near[0] if near else None


def unknown_key_remedy(unknown: str, model: type[BaseModel]) -> str:
    """A sentence that names the key meant, or, when none comes near, the keys there are."""
    near = closest_key(unknown, model)
    if near is not None:
        return f"Did you mean {near}"
    section = unknown.rpartition(".")[0]
    siblings = [key for key in known_keys(model) if key.rpartition(".")[0] == section]
    if not siblings:
        section, siblings = "", list(model.model_fields)
    place = f"section {section}" if section else "a config"
    return f"The keys of {place} are {', '.join(key.rpartition('.')[2] for key in siblings)}"
