"""Pydantic's findings as one line that a user can act on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from megatron_qerl.config.strict_yaml import dump_short
from megatron_qerl.config.suggest import (
    choices,
    closest_key,
    closest_value,
    known_keys,
    section_of,
    unknown_key_remedy,
)
from megatron_qerl.errors import ConfigError

_RULES = {
    "bool_type": "must be true or false",
    "dict_type": "must be a section (key: value lines)",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_from_float": "must be a whole number",
    "int_type": "must be a whole number",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "model_type": "must be a section (key: value lines)",
    "path_type": "must be a path",
    "string_too_short": "must not be empty",
    "string_type": "must be text",
    "too_short": "must have at least {min_length} entry",
    "tuple_type": "must be a list, such as [a, b]",
}


def explain(error: ValidationError, model: type[BaseModel], origins: Mapping[str, str], source: str) -> ConfigError:
    """One ConfigError for the finding that most likely caused the others, with the names of the rest.

    Args:
        error: what pydantic found.
        model: the schema that was applied.
        origins: dotted key -> the layer that set it.
        source: the config as the user named it, for rules that span sections.
    """
    # A misspelt key also leaves the right one missing, so unknown keys come first.
    found = sorted(error.errors(include_url=False), key=lambda item: item["type"] != "extra_forbidden")
    first = _explain_one(found[0], model, origins, source)
    meant = closest_key(first.key, model) if found[0]["type"] == "extra_forbidden" else None
    others = [key for item in found[1:] if (key := _dotted(item["loc"])) != meant]
    if not others:
        return first
    more = f" (and {len(others)} more: {', '.join(others[:3])}{', ...' if len(others) > 3 else ''})"
    return ConfigError(first.key, first.value, first.rule, first.remedy + more)


def _dotted(loc: tuple[int | str, ...]) -> str:
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def _explain_one(item: ErrorDetails, model: type[BaseModel], origins: Mapping[str, str], source: str) -> ConfigError:
    key = _dotted(item["loc"])
    plain = ".".join(part for part in item["loc"] if isinstance(part, str))
    field = known_keys(model).get(plain)
    origin = origins.get(plain)
    shown = dump_short(item["input"]) + (f" ({origin})" if origin else "")
    kind = item["type"]
    if kind == "extra_forbidden":
        return ConfigError(key, shown, "unknown key", unknown_key_remedy(plain, model))
    if kind == "missing":
        return _explain_missing(key, field, source)
    if kind == "value_error":
        return _explain_rule(item, plain, shown, source)
    allowed = choices(field.annotation) if field is not None else ()
    if kind == "literal_error":
        near = closest_value(item["input"], allowed)
        remedy = f"Did you mean {near}" if near else f"Choose one of {', '.join(allowed)}"
        return ConfigError(key, shown, f"must be one of {', '.join(allowed)}", remedy)
    template = _RULES.get(kind)
    rule = template.format(**item.get("ctx", {})) if template else item["msg"].lower()
    return ConfigError(key, shown, rule, _remedy(kind, plain, item["input"], field))


def _explain_missing(key: str, field: FieldInfo | None, source: str) -> ConfigError:
    shown = f"missing (in {source})"
    nested = section_of(field.annotation) if field is not None else None
    if nested is not None:
        needed = [name for name, sub in nested.model_fields.items() if sub.is_required()]
        remedy = f"Add the section with {', '.join(needed)}" if needed else "Add the section"
        return ConfigError(key, shown, "this section is required", remedy)
    meaning = f" ({field.description})" if field is not None and field.description else ""
    allowed = choices(field.annotation) if field is not None else ()
    remedy = f"Set {key} to one of {', '.join(allowed)}" if allowed else f"Set {key}"
    return ConfigError(key, shown, f"this key is required and has no default{meaning}", remedy)


def _explain_rule(item: ErrorDetails, plain: str, shown: str, source: str) -> ConfigError:
    """A validator's own words: everything after the last semicolon or sentence is the remedy."""
    text = item["msg"].removeprefix("Value error, ").rstrip(".")
    rule, separator, remedy = text.rpartition("; ")
    if not separator:
        rule, separator, remedy = text.rpartition(". ")
    if not separator:
        rule, remedy = text, f"Change {plain}" if plain else "Change one of the keys named"
    remedy = remedy[0].upper() + remedy[1:]
    return ConfigError(plain, shown, rule, remedy) if plain else ConfigError("config", source, rule, remedy)


def _remedy(kind: str, plain: str, value: Any, field: FieldInfo | None) -> str:
    if kind == "bool_type" and str(value).lower() in ("true", "false", "yes", "no", "on", "off", "1", "0"):
        word = "true" if str(value).lower() in ("true", "yes", "on", "1") else "false"
        return f"Write {word} without quotes"
    if kind in ("int_type", "float_type") and isinstance(value, str) and _is_number(value):
        return "Write the number without quotes"
    known_default = field is not None and not field.is_required() and section_of(field.annotation) is None
    if known_default and field is not None:
        meaning = f"; {plain.rpartition('.')[2]} is: {field.description}" if field.description else ""
        default = field.default if not isinstance(field.default, tuple) else list(field.default)
        return f"Change it or remove the key for the default, {dump_short(default)}{meaning}"
    if field is not None and field.description:
        return f"Set it to: {field.description}"
    return f"Change {plain}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
