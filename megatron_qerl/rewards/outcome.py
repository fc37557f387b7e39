"""How often each verdict was given. Wrong, unparsable, truncated and timed out need different cures, so they are
counted apart and never folded into one error rate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_qerl.types import Judgement, Outcome


@dataclass(frozen=True)
class OutcomeCounts:
    """Completions by verdict; the five add up to ``total``."""

    correct: int = 0
    wrong: int = 0
    unparsable: int = 0
    truncated: int = 0
    timeout: int = 0

    @classmethod
    def of(cls, judgements: Iterable[Judgement]) -> OutcomeCounts:
        """Count some judgements."""
        counted = Counter(judgement.outcome for judgement in judgements)
        return cls(**{outcome.value: counted[outcome] for outcome in Outcome})

    def __add__(self, other: OutcomeCounts) -> OutcomeCounts:
        return OutcomeCounts(
            correct=self.correct + other.correct,
            wrong=self.wrong + other.wrong,
            unparsable=self.unparsable + other.unparsable,
            truncated=self.truncated + other.truncated,
            timeout=self.timeout + other.timeout,
        )

    @property
    def total(self) -> int:
        return self.correct + self.wrong + self.unparsable + self.truncated + self.timeout

    def fractions(self) -> dict[str, float]:
        """Registered metric name -> share of ``total``; the five sum to 1. Empty when nothing was counted."""
        if self.total == 0:
            return {}
        return {f"outcome/{outcome.value}_fraction": getattr(self, outcome.value) / self.total for outcome in Outcome}
