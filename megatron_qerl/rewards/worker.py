r"""The verifier's process: reads one JSON object a line, writes one verdict a line.

It runs apart from the trainer because symbolic algebra on text that a model wrote can loop or eat memory, and a thread
cannot be killed. It loads math-verify and nothing of the trainer (no torch), starts once and serves the whole run.

Request ``{"id": 1, "answer": "\\frac{1}{2}", "reference": "0.5", "limit_s": 5.0}``; reply ``{"id": 1, "verdict":
"correct"}``. A request with ``"answer": null`` asks whether the reference itself can be read. Verdicts: ``correct``,
``wrong``, ``unparsable`` (the answer is no mathematics), ``reference`` (the reference is none).

Equality is math-verify's, with one rule more. When the reference is a number, the answer must be a number too:
``3+4``, ``\sqrt{49}`` or ``\frac{14}{2}`` equal 7, but leave the work undone, and rewarding them would teach a model to
repeat the question. Of an equation the last side counts.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
import sys
from functools import lru_cache
from typing import Any, TextIO

import sympy  # type: ignore[import-untyped]
from math_verify import LatexExtractionConfig, parse, verify

from megatron_qerl.rewards.extraction import number_latex

# Backstop for a parent that died while an answer was being judged: it can no longer kill this process.
_GRACE_S = 5.0
_MEMORY_LIMIT_BYTES = 4 * 1024**3
_EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0),)

_DIGIT_GROUPING = re.compile(r"(?<=\d)(?:\{,\}|,?\\[,!;]\s*)(?=\d{3}(?!\d))")
_EQUALS = re.compile(r"(?<![<>!\\])=|\\approx|\\equiv")
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\{([^{}]*)\}")
_WORDS = re.compile(r"\s*[A-Za-z]{2,}[A-Za-z\s]*\.?")
_FRACTION = re.compile(r"-?\\[dt]?frac\s*\{?\s*(\d{1,99})\s*\}?\s*\{?\s*(\d{1,99})\s*\}?|-?(\d{1,99})\s*/\s*(\d{1,99})")


def judge(answer: str, reference: str) -> str:
    """The verdict on one extracted answer, both as LaTeX."""
    expected = parse_reference(reference)
    if expected is None:
        return "reference"
    if is_written_number(expected[0]):
        answer = last_side(answer)
        given = parse_answer(answer)
        if given is not None and not is_written_number(given[0]):
            given = parse_number_with_words(answer) or given
        finished = given is not None and is_written_number(given[0]) and not is_unreduced_integer(answer)
    else:
        given = parse_answer(answer)
        finished = given is not None
    if given is None:
        return "unparsable"
    return "correct" if finished and verify(expected, given, timeout_seconds=None) else "wrong"


@lru_cache(maxsize=4096)
def parse_reference(reference: str) -> list[Any] | None:
    """The reference as sympy expressions, or None if math-verify cannot read it or does not find it equal to itself."""
    parsed = parse_answer(reference)
    if parsed is None or not verify(parsed, parsed, timeout_seconds=None):
        return None
    return parsed


def parse_answer(latex: str) -> list[Any] | None:
    """math-verify's reading: the expression first, then its normalised text. None without an expression."""
    cleaned = _DIGIT_GROUPING.sub("", latex.strip()).rstrip(" .,;:")
    if not cleaned:
        return None
    parsed = parse(f"\\boxed{{{cleaned}}}", extraction_config=_EXTRACTION, parsing_timeout=None)
    return parsed if parsed and isinstance(parsed[0], sympy.Basic | sympy.MatrixBase) else None


def parse_number_with_words(latex: str) -> list[Any] | None:
    r"""The number in "7 dollars" or "\text{7 apples}", which math-verify reads as a product of letters."""
    plain = _TEXT_COMMAND.sub(r" \1 ", latex).strip()
    number = number_latex(plain)
    words = re.search(r"[A-Za-z]", plain.replace("\\", ""))
    if number is None or words is None or not _WORDS.fullmatch(plain, words.start()):
        return None
    return parse_answer(number)


def last_side(latex: str) -> str:
    """What follows the last equals sign: 7 in 3 + 4 = 7."""
    return _EQUALS.split(latex)[-1]


def is_written_number(expression: Any) -> bool:
    r"""A number written out: integer, decimal, fraction, per cent, c x 10^n, or digits inside ``\text``."""
    if isinstance(expression, sympy.Symbol):
        return str(expression.name).replace(".", "", 1).isdigit()
    if isinstance(expression, sympy.Mul) and len(expression.args) == 2:
        number, scale = expression.args
        is_percent = scale == sympy.UnevaluatedExpr(sympy.Rational(1, 100))
        is_power_of_ten = isinstance(scale, sympy.Pow) and scale.args[0] == 10
        is_scientific = is_power_of_ten and isinstance(scale.args[1], sympy.Integer)
        return isinstance(number, sympy.Number) and bool(is_percent or is_scientific)
    return isinstance(expression, sympy.Number)


def is_unreduced_integer(latex: str) -> bool:
    r"""Whether the answer is a division that comes out even, as \frac{14}{2}, and was not carried out."""
    match = _FRACTION.fullmatch(latex.strip().rstrip("."))
    if match is None:
        return False
    over, under = (int(part) for part in match.groups() if part is not None)
    return under != 0 and over % under == 0


def reply_to(request: dict[str, Any]) -> dict[str, Any]:
    """One reply, under an alarm that ends the process if the parent does not."""
    signal.setitimer(signal.ITIMER_REAL, request["limit_s"] + _GRACE_S)
    if request["answer"] is None:
        verdict = "reference" if parse_reference(request["reference"]) is None else "correct"
    else:
        verdict = judge(request["answer"], request["reference"])
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    return {"id": request["id"], "verdict": verdict}


def serve(requests: TextIO, replies: TextIO) -> None:
    """Answer until the requests end.

    The first formula costs seconds, spent on tables that later ones reuse. Two are judged before the worker calls
    itself ready, so that no answer's time limit pays for that.
    """
    assert judge(r"\frac{1}{2}", "0.5") == "correct"
    assert judge("(x + 1)^2", "x^2 + 2 x + 1") == "correct"
    replies.write(json.dumps({"ready": True}) + "\n")
    replies.flush()
    for line in requests:
        replies.write(json.dumps(reply_to(json.loads(line))) + "\n")
        replies.flush()


def main() -> None:
    """Entry of ``python -m megatron_qerl.rewards.worker``."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_LIMIT_BYTES, _MEMORY_LIMIT_BYTES))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    logging.disable(logging.CRITICAL)
    # Whatever a parser prints goes to stderr; the pipe carries replies alone.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin, replies)


if __name__ == "__main__":
    main()
