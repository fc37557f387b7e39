"""YAML without its traps.

PyYAML follows YAML 1.1: ``1e-5`` is a string, ``on`` is true, ``010`` is eight, ``1:30`` is ninety, and of two equal
keys the last one wins without a word. A learning rate that turns into text is refused later, a duplicate key never is.
The reader here takes the numbers and booleans of YAML 1.2, keeps dates as text, and refuses duplicates with the line.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from megatron_qerl.errors import ConfigError

_RESOLVERS: tuple[tuple[str, str, str], ...] = (
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", "~nN\0"),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9][0-9_]*", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("tag:yaml.org,2002:merge", r"<<", "<"),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own attribute)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        return int(str(node.value).replace("_", ""))

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        first_line: dict[str, int] = {}
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a plain word", key_node.start_mark)
            if key_node.value in first_line and key_node.value != "<<":
                problem = f"key {key_node.value!r} is given twice, first in line {first_line[key_node.value]}"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            first_line[key_node.value] = line
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes whatever either reader, PyYAML's or ours, would take for something else than text."""


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
for _tag, _pattern, _first in _RESOLVERS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), ["" if c == "\0" else c for c in _first])


def _problem(error: yaml.YAMLError) -> tuple[int | None, str]:
    mark = getattr(error, "problem_mark", None)
    text = str(getattr(error, "problem", None) or error).splitlines()[0]
    if "'\\t'" in text:
        text = "a tab is used for indentation"
    return (None if mark is None else mark.line + 1), text


def parse(text: str, origin: str) -> Any:
    """Parse one YAML document.

    Args:
        text: the document.
        origin: file or option that it came from, for the message.

    Raises:
        ConfigError: with ``origin:line`` on a syntax error, a duplicate key or a tag that names a Python object.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        line, problem = _problem(error)
        where = origin if line is None else f"{origin}:{line}"
        remedy = "Mend the line; indent with spaces and write key: value"
        raise ConfigError("YAML", where, problem, remedy) from error


def read_mapping(path: Path, key: str) -> dict[str, Any]:
    """Read a file that holds one mapping; an empty file is an empty mapping.

    Args:
        path: the file.
        key: what the user called it, for the message (``config``, ``overlay``, ``base``).
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(key, path, "no such file", f"Check the path; it is relative to {Path.cwd()}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(key, path, "is not UTF-8 text", "Give a YAML file") from error
    except OSError as error:
        raise ConfigError(key, path, f"cannot be read ({error.strerror})", "Give a readable YAML file") from error
    data = parse(text, str(path))
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(key, path, "must hold sections of key: value lines", "See configs/demo.yaml for the form")
    return data


def dump(data: Any) -> str:
    """YAML text that ``parse`` reads back to equal values, keys in their given order."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True, width=100)


def dump_short(value: Any, limit: int = 80) -> str:
    """A value as one line of YAML, cut to ``limit`` characters, for messages."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**9).strip().removesuffix("...").strip()
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
