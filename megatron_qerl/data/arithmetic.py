"""One-digit sums and small products in several phrasings: a task that a very small model can learn in minutes.

Sums have operands 1 to ``max_sum_operand``, products factors 2 to ``max_product_operand``. Zero and, for products, one
are left out, because there the answer stands in the question and repeating it would be right.

What is held out is the *operand pair*, without regard to order: a model that has seen 3 + 4 has in effect seen 4 + 3,
in whatever words. Which side a pair falls on is a hash of the pair alone. It does not depend on the seed, on the other
operands in range or on the phrasing, so training and held-out problems of one ``heldout_fraction`` never meet.
"""

from __future__ import annotations

import hashlib
from typing import Literal

from megatron_qerl.config.schema import DatasetSection
from megatron_qerl.types import Problem

Operation = Literal["add", "mul"]

SOURCE = "arithmetic"
SMALLEST_OPERAND: dict[Operation, int] = {"add": 1, "mul": 2}
PHRASINGS: dict[Operation, tuple[str, ...]] = {
    "add": (
        "What is {a} + {b}?",
        "What is {a} plus {b}?",
        "{a} plus {b} equals what?",
        "Add {a} and {b}.",
        "Compute {a} + {b}.",
        "{a} + {b} = ?",
    ),
    "mul": (
        "What is {a} x {b}?",
        "What is {a} times {b}?",
        "{a} times {b} equals what?",
        "Multiply {a} and {b}.",
        "Compute {a} * {b}.",
        "{a} x {b} = ?",
    ),
}


def arithmetic_problems(section: DatasetSection) -> tuple[Problem, ...]:
    """All problems of one split: pairs x orders x phrasings, in a fixed order.

    ``cluster`` names operation and unordered pair ("add:3,4"); ``uid`` adds the order and the phrasing's index
    ("add:4,3:2"), so it survives a change of seed, split or range. May be empty, if the range or the fraction leaves
    nothing.
    """
    largest: dict[Operation, int] = {"add": section.max_sum_operand, "mul": section.max_product_operand}
    problems = []
    for operation in section.operations:
        for low in range(SMALLEST_OPERAND[operation], largest[operation] + 1):
            for high in range(low, largest[operation] + 1):
                if is_held_out(operation, low, high, section.heldout_fraction) == (section.split == "heldout"):
                    problems += _pair_problems(operation, low, high)
    return tuple(problems)


def is_held_out(operation: Operation, a: int, b: int, fraction: float) -> bool:
    """Whether a pair is held out; the same for (a, b) and (b, a). A larger fraction holds out a superset."""
    digest = hashlib.sha256(cluster_name(operation, a, b).encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2.0**64


def cluster_name(operation: Operation, a: int, b: int) -> str:
    """Operation and unordered pair."""
    return f"{operation}:{min(a, b)},{max(a, b)}"


def _pair_problems(operation: Operation, low: int, high: int) -> list[Problem]:
    answer = str(low + high if operation == "add" else low * high)
    orders = [(low, high)] if low == high else [(low, high), (high, low)]
    return [
        Problem(
            uid=f"{operation}:{a},{b}:{index}",
            question=phrasing.format(a=a, b=b),
            answer=answer,
            cluster=cluster_name(operation, low, high),
            source=SOURCE,
        )
        for a, b in orders
        for index, phrasing in enumerate(PHRASINGS[operation])
    ]
