"""Soft overlong punishment (DAPO section 3.4): a response pays for the last stretch before the token limit.

A hard zero for truncated responses punishes sound reasoning for being cut off. Here the penalty grows linearly over the
last ``buffer_tokens`` of the budget instead. It touches the reward alone: the raw score stays what the verifier said,
and filters and accuracies read that.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_qerl.config.schema import OverlongSection
from megatron_qerl.types import ScoredCompletion


def overlong_penalty(length_tokens: int, max_new_tokens: int, section: OverlongSection) -> float:
    """What a response of this length adds to its reward: 0.0 down to ``-section.penalty``.

    With L_max = ``max_new_tokens`` and B = ``section.buffer_tokens``: 0 up to L_max - B, then linear, reaching
    ``-penalty`` at L_max, and ``-penalty`` beyond.
    """
    assert section.buffer_tokens <= max_new_tokens, "the buffer lies inside the budget"
    over_tokens = length_tokens - (max_new_tokens - section.buffer_tokens)
    if over_tokens <= 0:
        return 0.0
    return -section.penalty * min(1.0, over_tokens / section.buffer_tokens)


def shape(scored: ScoredCompletion, section: OverlongSection, max_new_tokens: int) -> ScoredCompletion:
    """The completion with ``reward`` = raw score + penalty; unchanged raw score. Applying it twice changes nothing."""
    penalty = 0.0
    if section.enabled:
        penalty = overlong_penalty(len(scored.completion.token_ids), max_new_tokens, section)
    return replace(scored, reward=scored.judgement.score + penalty)
