"""From YAML files and command line to a validated, frozen configuration.

A configuration is a stack of layers, each merged over the one below: the file named by ``base:`` (and its own base),
the file itself, overlays in the order given, overrides in the order given. Sections merge key by key; anything else,
lists included, replaces. Types are strict (``true`` is not 1, ``"8"`` is not 8), because a value that was quietly
converted is a value the user did not write.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from megatron_qerl.config import strict_yaml
from megatron_qerl.config.messages import explain
from megatron_qerl.config.schema import RunConfig, Section
from megatron_qerl.config.suggest import known_keys, section_of, unknown_key_remedy
from megatron_qerl.errors import ConfigError

RESOLVED_CONFIG_FILENAME = "config.yaml"

_BASE = "base"


def load_config[M: Section](
    path: Path | str | None,
    overlays: Iterable[Path | str] = (),
    overrides: Iterable[str] = (),
    model: type[M] = RunConfig,  # type: ignore[assignment]  # PEP 696 defaults need Python 3.13
    *,
    options: Mapping[str, Any] | None = None,
) -> M:
    """Load, merge and validate.

    Args:
        path: YAML file; it may name a file to build on with ``base: other.yaml``, relative to itself. None starts
            from nothing.
        overlays: YAML files merged over it in this order. An overlay has no ``base``.
        overrides: ``section.key=value`` texts; the value is YAML (``null``, ``[a, b]``, ``1e-5``). The last one wins.
        model: the schema.
        options: dotted key -> value (of a JSON type) from dedicated options of a command, applied last.

    Raises:
        ConfigError: one line that names the key, the value and where it was set, the rule and the remedy.
    """
    layers = [] if path is None else _file_layers(Path(path))
    for overlay in overlays:
        data = strict_yaml.read_mapping(Path(overlay), "overlay")
        if _BASE in data:
            rule = "an overlay cannot have a base: it would undo the config it is put over"
            raise ConfigError("base", f"{data[_BASE]} (in {overlay})", rule, "Remove base from the overlay")
        layers.append((data, f"in {overlay}"))
    layers.extend((parse_override(text, model), "on the command line") for text in overrides)
    layers.extend((_nested(key, value), "on the command line") for key, value in (options or {}).items())
    return _merge_and_validate(layers, model, "the command line" if path is None else str(path))


def config_from_mapping[M: Section](data: Mapping[str, Any], model: type[M], origin: str) -> M:
    """Validate a plain mapping by the same rules and with the same messages as ``load_config``."""
    return _merge_and_validate([(dict(data), f"in {origin}")], model, origin)


def load_resolved_config(run_dir: Path | str) -> RunConfig:
    """The configuration a run was started with, from ``RUN_DIR/config.yaml``.

    Raises:
        ConfigError: the folder is not a run folder, or its config does not fit this version of the schema.
    """
    path = Path(run_dir) / RESOLVED_CONFIG_FILENAME
    if not path.is_file():
        remedy = (
            f"Name a folder written by megatron-qerl train (output_dir/name), which holds {RESOLVED_CONFIG_FILENAME}"
        )
        raise ConfigError("run folder", run_dir, f"has no {RESOLVED_CONFIG_FILENAME}", remedy)
    return load_config(path)


def resolved_yaml(config: Section) -> str:
    """Every key with the value in force, as YAML that ``load_config`` reads back to an equal config."""
    return strict_yaml.dump(config.model_dump(mode="json"))


def parse_override(text: str, model: type[Section]) -> dict[str, Any]:
    """``a.b=value`` -> ``{"a": {"b": value}}``, for a key that ``model`` has."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(
            "override", text, "must have the form section.key=value", "Write train.steps=100, for example"
        )
    if key not in known_keys(model):
        raise ConfigError(key, f"{value} (on the command line)", "unknown key", unknown_key_remedy(key, model))
    return _nested(key, strict_yaml.parse(value, f"override {key}"))


def _nested(key: str, value: Any) -> dict[str, Any]:
    first, _, rest = key.partition(".")
    return {first: _nested(rest, value) if rest else value}


def _file_layers(path: Path) -> list[tuple[dict[str, Any], str]]:
    """The file and what it is based on, lowest first."""
    layers: list[tuple[dict[str, Any], str]] = []
    seen: list[Path] = []
    key = "config"
    while True:
        if path.resolve() in seen:
            raise ConfigError("base", path, f"{path.name} is based on itself", "Remove one base line of the circle")
        seen.append(path.resolve())
        data = strict_yaml.read_mapping(path, key)
        layers.insert(0, (data, f"in {path}"))
        if _BASE not in data:
            return layers
        base, key = data.pop(_BASE), "base"
        if not isinstance(base, str):
            shown = f"{strict_yaml.dump_short(base)} (in {path})"
            raise ConfigError("base", shown, "must be the name of one YAML file", "Write base: other.yaml")
        path = path.parent / base


def _merge(lower: dict[str, Any], upper: Mapping[str, Any], origin: str, origins: dict[str, str], at: str = "") -> None:
    """Merge ``upper`` into ``lower`` in place, and note for each value which layer it came from."""
    for key, value in upper.items():
        dotted = f"{at}{key}"
        origins[dotted] = origin
        if isinstance(value, dict):
            below = lower.get(key)
            lower[key] = dict(below) if isinstance(below, dict) else {}
            _merge(lower[key], value, origin, origins, f"{dotted}.")
        else:
            lower[key] = value


def _with_path_defaults(data: dict[str, Any], model: type[Section]) -> dict[str, Any]:
    """Fill in defaults that JSON cannot hold as they are: pydantic checks defaults by the rules of the input."""
    filled = dict(data)
    for name, field in model.model_fields.items():
        nested = section_of(field.annotation)
        if nested is not None and isinstance(filled.get(name), dict):
            filled[name] = _with_path_defaults(filled[name], cast(type[Section], nested))
        elif isinstance(field.default, Path):
            filled.setdefault(name, str(field.default))
    return filled


def _merge_and_validate[M: Section](layers: list[tuple[dict[str, Any], str]], model: type[M], origin: str) -> M:
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for data, layer_origin in layers:
        _merge(merged, data, layer_origin, origins)
    # As JSON, since only there strict types go together with paths and tuples, which YAML has no words for.
    text = json.dumps(_with_path_defaults(merged, model))
    try:
        return model.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise explain(error, model, origins, origin) from error
