r"""Problems from a JSONL file: one JSON object a line, in one of three layouts.

=========  =====================================================================================================
kind       fields
=========  =====================================================================================================
``jsonl``  ``question``, ``answer``; optional ``uid`` and ``cluster``
``gsm8k``  ``question``, ``answer`` whose last line is ``#### 18``
``math``   ``problem`` (or ``question``), and ``answer`` or a ``solution`` whose last ``\boxed{...}`` is the answer
=========  =====================================================================================================

Other fields are ignored; benchmark files carry many. Every complaint names file and line.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from megatron_qerl.errors import DataError
from megatron_qerl.rewards.extraction import last_boxed
from megatron_qerl.types import Problem

FileKind = Literal["jsonl", "gsm8k", "math"]

_GSM8K_ANSWER = re.compile(r"####\s*(-?[\d,.]*\d)\s*$")


def read_problems(path: Path, kind: FileKind) -> tuple[Problem, ...]:
    """All problems of a file, in its order.

    ``source`` is the row's ``benchmark`` field, or the folder's and the file's name ("gsm8k/train"). Without a ``uid``
    field the uid is a hash of the question, so it survives reordering and moving the file; a question that occurs again
    gets "-2" added. Without a ``cluster`` field the cluster is the question's hash, so that copies of a question are
    not counted as independent.

    Raises:
        DataError: the file is missing, empty or not UTF-8; a line is not a JSON object; a problem lacks a question or
            an answer; a uid occurs twice.
    """
    rows = _read_rows(path)
    if not rows:
        raise DataError("path", path, "the dataset is empty", "write one JSON object a line")
    source = f"{path.parent.name}/{path.stem}" if path.parent.name else path.stem
    seen: dict[str, int] = {}
    copies: Counter[str] = Counter()
    problems = []
    for line, row in rows:
        question, answer = _FIELDS[kind](row, f"{path}:{line}")
        digest = hashlib.sha256(question.encode()).hexdigest()[:16]
        copies[digest] += 1
        uid = _text(row, "uid") or (digest if copies[digest] == 1 else f"{digest}-{copies[digest]}")
        if uid in seen:
            raise DataError(
                f"{path}:{line}: uid",
                uid,
                f"it was used on line {seen[uid]} already, and sampling seeds are keyed by it",
                "give each problem its own uid, or remove the field",
            )
        seen[uid] = line
        cluster, benchmark = _text(row, "cluster") or digest, _text(row, "benchmark") or source
        problems.append(Problem(uid, question, answer, cluster, benchmark))
    return tuple(problems)


def _read_rows(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """(line number, object) of every line that is not blank."""
    if not path.is_file():
        raise DataError("path", path, "no such file", "check the path; relative paths start at the working directory")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError("path", path, f"not UTF-8 at byte {error.start}", "save the file as UTF-8") from error
    # Not splitlines: JSON strings may hold U+2028, which splitlines would cut at.
    numbered = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    return [(number, _parse_row(line, f"{path}:{number}")) for number, line in numbered]


def _parse_row(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        shown = line if len(line) <= 60 else line[:57] + "..."
        remedy = "write one complete JSON object a line; for a JSON array run: jq -c '.[]' in.json > out.jsonl"
        raise DataError(place, shown, f"not JSON ({error.msg}, column {error.colno})", remedy) from error
    if not isinstance(row, dict):
        raise DataError(place, type(row).__name__, "a line must hold a JSON object", 'write {"question": ..., ...}')
    return row


def _text(row: dict[str, Any], field: str) -> str | None:
    """A field as text without outer blanks; None if missing, null, blank or not text or a number."""
    value = row.get(field)
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # 27.0 in a benchmark file means 27
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    return str(value).strip() or None


def _required(row: dict[str, Any], fields: tuple[str, ...], place: str) -> str:
    for field in fields:
        value = _text(row, field)
        if value is not None:
            return value
    names = " or ".join(fields)
    present = f"found {sorted(row)}" if row else "found no field"
    raise DataError(f"{place}: {names}", row.get(fields[0]), f"a problem needs it as text ({present})", f"add {names}")


def _plain_fields(row: dict[str, Any], place: str) -> tuple[str, str]:
    return _required(row, ("question",), place), _required(row, ("answer",), place)


def _gsm8k_fields(row: dict[str, Any], place: str) -> tuple[str, str]:
    question, worked = _plain_fields(row, place)
    match = _GSM8K_ANSWER.search(worked)
    if match is None:
        rule = "the answer must end with a line such as '#### 18'"
        raise DataError(f"{place}: answer", worked[-40:], rule, "add it, or use kind: jsonl for bare answers")
    return question, match.group(1).replace(",", "")


def _math_fields(row: dict[str, Any], place: str) -> tuple[str, str]:
    question = _required(row, ("problem", "question"), place)
    answer = _text(row, "answer")
    if answer is not None:
        return question, answer
    boxed = last_boxed(_required(row, ("answer", "solution"), place))
    if boxed is None:
        rule = "there is no answer field and the solution has no \\boxed{...}"
        raise DataError(f"{place}: solution", "...", rule, "add an answer field")
    return question, boxed


_FIELDS: dict[FileKind, Callable[[dict[str, Any], str], tuple[str, str]]] = {
    "jsonl": _plain_fields,
    "gsm8k": _gsm8k_fields,
    "math": _math_fields,
}
