"""From a config section to problems."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from megatron_qerl.config.schema import DatasetSection
from megatron_qerl.data.arithmetic import arithmetic_problems
from megatron_qerl.data.jsonl import read_problems
from megatron_qerl.errors import DataError
from megatron_qerl.types import Problem

#: Shuffle seed of evaluation sets. Not the run's seed: runs that differ in it must be measured on the same problems.
EVALUATION_SHUFFLE_SEED = 0


def load_dataset(section: DatasetSection, seed: int) -> tuple[Problem, ...]:
    """The problems of a section, shuffled by ``seed``, cut to ``section.limit``, with the suffix on each question.

    The shuffle sorts by a hash of seed and uid: which problems come first does not depend on the others, and adding a
    problem to a file moves none of the rest.

    Raises:
        DataError: the section yields no problems, or its file cannot be used.
    """
    if section.kind == "arithmetic":
        problems = arithmetic_problems(section)
        if not problems:
            raise DataError(
                "split",
                section.split,
                f"no operand pair is left with heldout_fraction = {section.heldout_fraction}, "
                f"max_sum_operand = {section.max_sum_operand}, max_product_operand = {section.max_product_operand}",
                "change heldout_fraction or allow larger operands",
            )
    else:
        assert section.path is not None, "the schema asks for a path"
        problems = read_problems(section.path, section.kind)

    def key(problem: Problem) -> bytes:
        return hashlib.sha256(f"{seed}/{problem.uid}".encode()).digest()

    chosen = sorted(problems, key=key)[: section.limit]
    return tuple(replace(problem, question=problem.question + section.prompt_suffix) for problem in chosen)


def require_disjoint(train: Sequence[Problem], evaluation: Sequence[Problem]) -> None:
    """Raise DataError if a cluster occurs on both sides: an accuracy on seen problems is no measure of learning."""
    shared = sorted({problem.cluster for problem in train} & {problem.cluster for problem in evaluation})
    if shared:
        raise DataError(
            "data.eval",
            f"{len(shared)} clusters, the first {shared[:3]}",
            "training and evaluation share problems",
            "use split: heldout with the same heldout_fraction on both sides, or another file",
        )
