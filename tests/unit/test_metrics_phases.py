"""The phase clock: exclusive times that add up to the step."""

from __future__ import annotations

import time

import pytest

from megatron_qerl.metrics.names import check_names
from megatron_qerl.metrics.phases import PhaseClock
from megatron_qerl.types import StepMetrics


class ManualTime:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def manual() -> ManualTime:
    return ManualTime()


def test_an_inner_phase_is_not_counted_twice(manual: ManualTime) -> None:
    clock = PhaseClock(manual)
    clock.start_step()
    with clock.phase("rollout"):
        manual.now_s += 2.0
        with clock.phase("reward"):
            manual.now_s += 5.0
        manual.now_s += 1.0
    manual.now_s += 0.5
    values = clock.finish_step()
    assert values["time/rollout_s"] == 3.0
    assert values["time/reward_s"] == 5.0
    assert values["time/other_s"] == 0.5
    assert values["time/step_s"] == 8.5


def test_a_phase_nested_in_itself_counts_its_time_once(manual: ManualTime) -> None:
    clock = PhaseClock(manual)
    clock.start_step()
    with clock.phase("train"):
        manual.now_s += 1.0
        with clock.phase("train"):
            manual.now_s += 1.0
    assert clock.finish_step()["time/train_s"] == 2.0


def test_phases_and_other_add_up_to_the_step_and_none_is_negative() -> None:
    clock = PhaseClock()
    clock.start_step()
    for _ in range(200):
        with clock.phase("rollout"), clock.phase("reward"):
            pass
        with clock.phase("train"):
            time.sleep(0.0001)
    values = clock.finish_step()
    step_s = values.pop("time/step_s")
    assert min(values.values()) >= 0.0
    assert sum(values.values()) == pytest.approx(step_s, abs=1e-9)
    assert values["time/train_s"] >= 0.02


def test_a_step_restarts_at_zero_and_the_run_goes_on(manual: ManualTime) -> None:
    clock = PhaseClock(manual)
    with clock.phase("eval"):  # before training, outside any step
        manual.now_s += 10.0
    for seconds in (1.0, 2.0):
        clock.start_step()
        with clock.phase("train"):
            manual.now_s += seconds
        values = clock.finish_step()
        assert values["time/train_s"] == seconds
        assert values["time/eval_s"] == 0.0
        manual.now_s += 0.25
    totals = clock.totals_s
    assert totals["train"] == 3.0
    assert totals["eval"] == 10.0
    assert totals["other"] == 0.5
    assert totals["run"] == sum(seconds for phase, seconds in totals.items() if phase != "run") == 13.5


def test_time_is_charged_also_when_the_phase_fails(manual: ManualTime) -> None:
    clock = PhaseClock(manual)
    clock.start_step()

    def fail() -> None:
        with clock.phase("sync"):
            manual.now_s += 4.0
            raise RuntimeError("engine died")

    with pytest.raises(RuntimeError, match="engine died"):
        fail()
    manual.now_s += 1.0
    values = clock.finish_step()
    assert values["time/sync_s"] == 4.0
    assert values["time/other_s"] == 1.0


def test_queued_device_work_is_charged_to_the_phase_that_queued_it(manual: ManualTime) -> None:
    queued_s = 0.0

    def synchronize() -> None:
        nonlocal queued_s
        manual.now_s, queued_s = manual.now_s + queued_s, 0.0

    clock = PhaseClock(manual, synchronize)
    clock.start_step()
    with clock.phase("train"):
        queued_s = 3.0  # launched, not yet run
    with clock.phase("sync"):
        manual.now_s += 1.0
    values = clock.finish_step()
    assert values["time/train_s"] == 3.0
    assert values["time/sync_s"] == 1.0


def test_misuse_is_refused(manual: ManualTime) -> None:
    clock = PhaseClock(manual)
    with pytest.raises(AssertionError, match="unknown phase 'rolout'"), clock.phase("rolout"):
        pass
    with pytest.raises(AssertionError, match="no step"):
        clock.finish_step()
    clock.start_step()
    with pytest.raises(AssertionError, match="not finished"):
        clock.start_step()
    with pytest.raises(AssertionError, match="still open"), clock.phase("train"):
        clock.finish_step()


def test_every_name_it_returns_is_registered(manual: ManualTime) -> None:
    clock = PhaseClock(manual)
    clock.start_step()
    check_names(StepMetrics(1, clock.finish_step()))
