"""Which part of a completion counts as its answer."""

from __future__ import annotations

import time

import pytest

from megatron_qerl.rewards.extraction import extract_answer, last_boxed

LAST_NUMBER = {
    "3 + 4 = 7.": "7",
    "The answer is 7": "7",
    "7": "7",
    "7 or 8": "8",
    "7, 8": "8",
    "7,8": "8",
    "3 + 4": "4",  # restating the question is not answering it
    "The answer is **7**.": "7",
    "**3 + 4 = 7**": "7",
    "3 x 4 = 12": "12",
    "3x4=12": "12",
    "3 \u00d7 4 = 12 apples": "12",
    "1. 3 + 4 = 7": "7",
    "It is 7!": "7",
    "(7)": "7",
    "x = -7": "-7",
    "\u22127": "-7",
    "(-7)": "-7",
    "3 + -4": "-4",
    "5-4": "4",
    "5 - 4": "4",
    "-$7": "-7",
    "$7 dollars": "7",
    "costs \\$7.50.": "7.50",
    "1,234": "1234",
    "The value is 1,234,567.89.": "1234567.89",
    "1,2345": "2345",
    "0.5": "0.5",
    ".5": ".5",
    "7.": "7",
    "7%": r"7\%",
    "50 percent": r"50\%",
    "1/2": r"\frac{1}{2}",
    "It is 1/2.": r"\frac{1}{2}",
    "-1/2": r"-\frac{1}{2}",
    "1 1/2 cups": r"1\frac{1}{2}",
    "12/4 = 3": "3",
    r"\frac{1}{2}": r"\frac{1}{2}",
    r"so -\dfrac{3}{4}": r"-\frac{3}{4}",
    "1.5e3": r"1.5\times 10^{3}",
    "7cm": "7",
    "100m2": "100",
    "12**2 = 144": "144",
    "The answer is 7, because 3 + 4 = 7": "7",
}


@pytest.mark.parametrize("text", LAST_NUMBER)
def test_the_last_number_is_the_answer(text):
    assert extract_answer(text) == LAST_NUMBER[text]


@pytest.mark.parametrize(
    "text", ["", "seven", "12^2", "12**2", "x2", "H2O", "mp3", "2x", "3x4", "x^2", "a_1", "\\boxed{}", "...", "$x$"]
)
def test_what_is_no_number_is_no_answer(text):
    assert extract_answer(text) is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{7}", "7"),
        (r"first \boxed{3}, then \boxed{ 7 } and 9", "7"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {x = 7}", "x = 7"),
        (r"\fbox{7}", "7"),
        ("#### 3\n\\boxed{7}", "7"),
        (r"\boxed{7", None),  # cut off: the answer was not finished
        (r"\boxed{3} so \boxed{7", None),
        (r"9 \boxed{}", None),
    ],
)
def test_the_last_box_goes_before_everything(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("3 + 4\n#### 7", "7"),
        ("#### 7\nThat took 2 steps", "7"),
        ("#### 3\n#### 1,234 dollars\n", "1234"),
        ("#### -5", "-5"),
        ("#### $18.50", "18.50"),
        ("#### 2. Add them\nso 9", "9"),
        ("#### Answer\n9", "9"),
    ],
)
def test_the_gsm8k_line_goes_before_the_last_number(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("$7$", "7"),
        (r"Thus \(3+4=7\).", "3+4=7"),
        ("\\[\nx = 7\n\\]", "x = 7"),
        ("$$\\frac12$$", r"\frac12"),
        (r"It is $\pi$.", r"\pi"),
        ("So $7$ is the value of $x$.", "7"),
        ("$7$ and then 8", "8"),
        ("8 and then $7$", "7"),
        ("It costs $5 and then $13", "13"),
        ("$5 + $3 = $8", "8"),
        ("It costs $5-$10.", "10"),
        ("She pays $5, so the answer is $7$", "7"),
        (r"\$5 and \$6", "6"),
        (r"$5 is \(6\)", "6"),
        ("$ 7 $", "7"),
    ],
)
def test_formulas_are_told_from_money(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    "piece", ["$", "$1 ", "$$", r"\[", r"\(", r"\boxed{", "{", "9", "-", "1,", "1/", "1 ", "#### ", "1,234", "e9", "."]
)
def test_time_is_linear_in_the_text(piece):
    """A model that repeats itself for 60,000 characters must not stall the run: 0.1 s measured at most."""
    start_s = time.process_time()
    extract_answer(piece * (60_000 // len(piece)))
    assert time.process_time() - start_s < 2.0


def test_last_boxed_reads_solutions():
    assert last_boxed(r"We get $\boxed{\left( 3, \frac{\pi}{2} \right)}.$") == r"\left( 3, \frac{\pi}{2} \right)"
    assert last_boxed(r"\framebox{204} minutes") == "204"
    assert last_boxed("no box") is None
