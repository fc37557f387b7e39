"""The order in which problems are taken."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from megatron_qerl.data.order import DataOrder, shuffled


def test_every_epoch_takes_every_problem_once_in_another_order():
    order = DataOrder(37, seed=5)
    first, position = order.take(0, 37)
    second, position = order.take(position, 37)
    assert position == 74
    assert sorted(first) == sorted(second) == list(range(37))
    assert first != second
    assert first != tuple(range(37))


@pytest.mark.parametrize("cut", [1, 8, 37, 50])
def test_a_run_resumed_anywhere_takes_the_same_problems(cut):
    unbroken, end = DataOrder(37, seed=5).take(0, 120)
    first, position = DataOrder(37, seed=5).take(0, cut)
    rest, resumed_end = DataOrder(37, seed=5).take(int(str(position)), 120 - cut)
    assert first + rest == unbroken
    assert resumed_end == end


def test_batches_that_straddle_epochs_lose_no_problem():
    order, position, taken = DataOrder(10, seed=1), 0, Counter()
    for _ in range(10):
        indices, position = order.take(position, 7)
        taken.update(indices)
    assert set(taken.values()) == {7}


def test_the_seed_decides():
    assert DataOrder(100, 1).take(0, 100) != DataOrder(100, 2).take(0, 100)


def test_positions_are_spread_evenly():
    """Over 2,000 epochs each of 5 problems comes first 400 times, give or take 4.5 standard deviations of 18."""
    firsts = Counter(shuffled(5, 3, epoch)[0] for epoch in range(2000))
    assert all(abs(count - 400) < 80 for count in firsts.values())


def test_the_order_is_the_one_that_old_checkpoints_expect():
    assert DataOrder(8, seed=1).take(0, 10)[0] == PUBLISHED


def test_another_process_draws_the_same_order():
    code = "from megatron_qerl.data.order import DataOrder; print(DataOrder(8, seed=1).take(0, 10)[0])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == str(PUBLISHED)


def test_one_problem_is_taken_for_ever():
    assert DataOrder(1, seed=1).take(3, 4) == ((0, 0, 0, 0), 7)


def test_taking_none_moves_nothing():
    assert DataOrder(5, seed=1).take(3, 0) == ((), 3)


PUBLISHED = (5, 3, 7, 0, 4, 2, 6, 1, 5, 2)
