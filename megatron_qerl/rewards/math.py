r"""Verdicts on answers to mathematics problems.

What part of a completion is the answer is decided in ``extraction``, whether it is right in ``worker``. Here the two
are joined with why generation ended:

==================  ============================================  =============  ===============
generation          answer                                        outcome        score
==================  ============================================  =============  ===============
stopped by itself   equal to the reference                        CORRECT        correct_score
stopped by itself   another one                                   WRONG          wrong_score
stopped by itself   none, or no mathematics                       UNPARSABLE     wrong_score
cut off             equal to the reference, counted as "judged"   CORRECT        correct_score
cut off             anything else                                 TRUNCATED      wrong_score
any                 no verdict within timeout_s                   TIMEOUT        wrong_score
==================  ============================================  =============  ===============

"Cut off" is finish reason ``length`` or ``abort``. With ``truncated_counts_as: wrong`` a response that was cut off is
not read at all and is always TRUNCATED.
"""

from __future__ import annotations

import queue
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

from megatron_qerl.config.schema import RewardSection
from megatron_qerl.errors import DataError
from megatron_qerl.rewards.extraction import extract_answer
from megatron_qerl.rewards.process import VerifierProcess
from megatron_qerl.types import Judgement, Outcome, Problem

_OUTCOMES = {"correct": Outcome.CORRECT, "wrong": Outcome.WRONG, "unparsable": Outcome.UNPARSABLE}
_REFERENCE_RULE = "math-verify cannot read the reference answer"
_REFERENCE_REMEDY = "write it as a number or as LaTeX without dollar signs, such as 7, 0.5 or \\frac{1}{2}"


class MathVerifier:
    """Judges completions in worker processes that start at the first need and serve until ``close``.

    Args:
        config: scores, time limit, and how a cut-off response counts.
        workers: processes; one is enough for short answers, several help with long formulas.
    """

    def __init__(self, config: RewardSection, workers: int = 1) -> None:
        assert workers >= 1, "a verifier has a process"
        self._config = config
        self._processes = [VerifierProcess() for _ in range(workers)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the processes. A later call starts new ones."""
        for process in self._processes:
            process.close()

    @property
    def restarts(self) -> int:
        """Workers that were replaced because they hung or died."""
        return sum(process.restarts for process in self._processes)

    def judge_all(self, items: Sequence[tuple[str, str, str]]) -> list[Judgement]:
        """One judgement an item, in order.

        Args:
            items: (completion text, reference answer, finish reason) each.

        Raises:
            DataError: a reference answer cannot be read.
            FaultError: the worker cannot be started.
        """
        extracted = [self._answer_of(text, finish_reason) for text, _, finish_reason in items]
        asked = [index for index, answer in enumerate(extracted) if answer is not None]
        verdicts = self._ask_all([(extracted[index], items[index][1]) for index in asked])
        by_index = dict(zip(asked, verdicts, strict=True))
        judgements = []
        for index, (_, reference, finish_reason) in enumerate(items):
            verdict = by_index.get(index, "unparsable")
            if verdict == "reference":
                raise DataError("answer", reference, _REFERENCE_RULE, _REFERENCE_REMEDY)
            judgements.append(self._judgement(verdict, extracted[index], finish_reason))
        return judgements

    def check_references(self, problems: Iterable[Problem]) -> None:
        """Raise DataError for the first problem whose reference answer cannot be read within the time limit.

        Each distinct answer is read once: about 1 ms for a number, 8 ms for a formula.
        """
        problems = list(problems)
        answers = list(dict.fromkeys(problem.answer for problem in problems))
        verdicts = dict(zip(answers, self._ask_all([(None, answer) for answer in answers]), strict=True))
        for problem in problems:
            if verdicts[problem.answer] != "correct":
                key = f"answer of problem {problem.uid} ({problem.source})"
                raise DataError(key, problem.answer, _REFERENCE_RULE, _REFERENCE_REMEDY)

    def _answer_of(self, text: str, finish_reason: str) -> str | None:
        if finish_reason != "stop" and self._config.truncated_counts_as == "wrong":
            return None
        return extract_answer(text)

    def _judgement(self, verdict: str | None, answer: str | None, finish_reason: str) -> Judgement:
        if verdict is None:
            outcome = Outcome.TIMEOUT
        elif verdict != "correct" and finish_reason != "stop":
            outcome = Outcome.TRUNCATED
        else:
            outcome = _OUTCOMES[verdict]
        score = self._config.correct_score if outcome is Outcome.CORRECT else self._config.wrong_score
        return Judgement(outcome=outcome, score=score, extracted=answer)

    def _ask_all(self, requests: Sequence[tuple[str | None, str]]) -> list[str | None]:
        """One verdict a request, in order; the processes take the next request as they become free."""
        verdicts: list[str | None] = [None] * len(requests)
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for index in range(len(requests)):
            waiting.put(index)

        def serve(process: VerifierProcess) -> None:
            while True:
                try:
                    index = waiting.get_nowait()
                except queue.Empty:
                    return
                verdicts[index] = process.ask(*requests[index], limit_s=self._config.timeout_s)

        if len(self._processes) == 1:
            serve(self._processes[0])
            return verdicts
        with ThreadPoolExecutor(len(self._processes)) as threads:
            for done in [threads.submit(serve, process) for process in self._processes]:
                done.result()
        return verdicts
