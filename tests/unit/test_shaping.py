"""Soft overlong punishment."""

from __future__ import annotations

import pytest

from megatron_qerl.algorithms.shaping import overlong_penalty, shape
from megatron_qerl.config.schema import OverlongSection
from tests.support.groups import make_scored

SECTION = OverlongSection(enabled=True, buffer_tokens=4, penalty=0.5)


@pytest.mark.parametrize(
    ("length_tokens", "expected"),
    [(1, 0.0), (15, 0.0), (16, 0.0), (17, -0.125), (18, -0.25), (19, -0.375), (20, -0.5), (25, -0.5)],
)
def test_penalty_is_zero_then_linear_then_full(length_tokens, expected):
    assert overlong_penalty(length_tokens, max_new_tokens=20, section=SECTION) == expected


def test_shaping_touches_the_reward_and_never_the_raw_score():
    scored = make_scored(score=1.0, length_tokens=18)
    shaped = shape(scored, SECTION, max_new_tokens=20)
    assert shaped.reward == 0.75
    assert shaped.judgement == scored.judgement
    assert shaped.completion is scored.completion


def test_shaping_twice_is_shaping_once():
    once = shape(make_scored(score=1.0, length_tokens=20), SECTION, max_new_tokens=20)
    assert shape(once, SECTION, max_new_tokens=20) == once


def test_disabled_shaping_pays_the_raw_score():
    off = OverlongSection(enabled=False, buffer_tokens=4, penalty=0.5)
    assert shape(make_scored(score=1.0, length_tokens=20, reward=0.3), off, max_new_tokens=20).reward == 1.0
