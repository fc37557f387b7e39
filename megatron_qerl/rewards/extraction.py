r"""Which part of a completion is its answer.

One rule, so that a number in a report can be checked by eye. The first that applies decides:

1. The last ``\boxed{...}`` (or ``\fbox``, ``\framebox``): what its braces hold. If the last one is never closed, there
   is no answer.
2. The last line of the form ``#### 18``, as in GSM8K: the number. Numbered headings (``#### 2. Add``) do not count.
3. The last number of the text, or the last formula between dollar signs, ``\(...\)`` or ``\[...\]`` if that ends later.
   A formula counts if it holds a digit or a command.

A number is a decimal with or without thousands commas, a fraction (``3/4``, ``\frac{3}{4}``, ``1 3/4``) or scientific
(``1.5e3``), with an optional sign, currency and per-cent sign. It is not one if a letter, ``_`` or ``^`` stands before
it (``x2``), if it is raised to a power (``12^2``), or if it is a coefficient (``2x``). An unevaluated ``3 + 4``
therefore yields 4, its last number: restating the question is no answer. Number words ("seven") are not read.

The answer is returned as LaTeX, which is what math-verify parses.
"""

from __future__ import annotations

import re
from collections import deque

# Possessive quantifiers (``++``) keep the lookaheads honest: without them 12 in 12^2 would be read as 1.
_DIGITS = r"(?:\d{1,3}+(?:,\d{3})++(?!\d)(?:\.\d++)?|\d++(?:\.\d++)?|\.\d++)"
_NUMBER = re.compile(
    r"(?<![A-Za-z0-9_^])(?<!\d\*\*)(?<!\d\.)"
    r"(?:(?<![A-Za-z0-9_)\]}])(?P<sign>[-\u2212]))?"
    r"(?:\\?[$\u20ac\u00a3\u00a5]\s?)?"
    r"(?:"
    r"\\[dt]?frac\s?\{(?P<latex_over>\d++)\}\s?\{(?P<latex_under>\d++)\}"
    r"|(?:(?P<whole>\d++)\s)?(?P<over>(?<![\d.,])\d++)\s?/\s?(?P<under>\d++)(?!/|\.\d)"
    rf"|(?P<decimal>{_DIGITS})(?:[eE](?P<exponent>[+-]?\d++))?+"
    r")"
    r"(?!\s?\^)(?!\*\*\d)(?![xyzn](?![A-Za-z]))"
    r"(?P<percent>\s?(?:\\?%|per\s?cent\b))?",
    re.ASCII,
)
_DELIMITER = re.compile(r"\\\$|\$\$|\$|\\\[|\\\]|\\\(|\\\)")
_CLOSERS = {"$$": "$$", "$": "$", r"\[": r"\]", r"\(": r"\)"}
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*\{")
_GSM8K_LINE = re.compile(r"^[ \t]*####[ \t]*(?=\S)", re.MULTILINE)
_NUMBERED_HEADING = re.compile(r"[.)][ \t]+\w")


def extract_answer(text: str) -> str | None:
    """The answer in a completion as LaTeX, or None when there is none. The module docstring is the rule."""
    if _BOX.search(text):
        return last_boxed(text)
    return _gsm8k_answer(text) or _last_value(text)


def last_boxed(text: str) -> str | None:
    r"""What the last ``\boxed{...}`` holds; None if there is none, if it is never closed, or if it holds nothing."""
    boxes = list(_BOX.finditer(text))
    return _braced(text, boxes[-1].end()) if boxes else None


def number_latex(text: str) -> str | None:
    """LaTeX of the number that ``text`` begins with, or None."""
    match = _NUMBER.match(text)
    return _latex(match) if match else None


def last_number(text: str) -> str | None:
    """LaTeX of the last number in ``text``, or None."""
    numbers = deque(_NUMBER.finditer(text), maxlen=1)
    return _latex(numbers[0]) if numbers else None


def _braced(text: str, start: int) -> str | None:
    """The text from ``start`` to the brace that closes the one before it; None if it is not closed or holds nothing."""
    depth = 1
    position = start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1  # an escaped brace is not a brace
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[start:position].strip() or None
        position += 1
    return None


def _gsm8k_answer(text: str) -> str | None:
    for line in reversed(list(_GSM8K_LINE.finditer(text))):
        number = _NUMBER.match(text, line.end())
        if number and not _NUMBERED_HEADING.match(text, number.end()):
            return _latex(number)
    return None


def _last_value(text: str) -> str | None:
    """Rule 3: the last number or formula."""
    formula, end = _last_formula(text)
    return last_number(text[end:]) or formula


def _last_formula(text: str) -> tuple[str | None, int]:
    """The last formula that holds a digit or a command, and where it ends; (None, 0) without one.

    One pass over the delimiters, so that a text of ten thousand unclosed ones costs no more than its length.
    """
    found: tuple[str | None, int] = (None, 0)
    opener: re.Match[str] | None = None
    for mark in _DELIMITER.finditer(text):
        if opener is not None and mark.group() == _CLOSERS[opener.group()] and _is_formula(text, opener, mark):
            body = text[opener.end() : mark.start()].strip()
            # $x$ is a name, not an answer, and does not hide an earlier answer.
            if re.search(r"\d|\\[A-Za-z]", body):
                found = (body, mark.end())
            opener = None
        elif mark.group() in _CLOSERS:
            opener = mark
    return found


def _is_formula(text: str, opener: re.Match[str], closer: re.Match[str]) -> bool:
    """Whether two delimiters enclose a formula. Single dollars with a blank inside ("$5 and then $13") are money."""
    if opener.group() != "$":
        return True
    body = text[opener.end() : closer.start()]
    return bool(body) and body == body.strip() and "\n" not in body


def _latex(match: re.Match[str]) -> str:
    part = match.groupdict()
    sign = "-" if part["sign"] else ""
    percent = r"\%" if part["percent"] else ""
    over, under = part["latex_over"] or part["over"], part["latex_under"] or part["under"]
    if over is not None:
        return f"{sign}{part['whole'] or ''}\\frac{{{over}}}{{{under}}}{percent}"
    decimal = part["decimal"].replace(",", "")
    if part["exponent"] is not None:
        return f"{sign}{decimal}\\times 10^{{{part['exponent'].lstrip('+')}}}{percent}"
    return f"{sign}{decimal}{percent}"
