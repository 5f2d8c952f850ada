"""PeriodicFunction: when an action is due."""

import pytest

from forgather.ml.trainer.periodic_function import PeriodicFunction
from forgather.ml.trainer.trainer_types import IntervalStrategy


def due_steps(periodic: PeriodicFunction, until: int) -> list[int]:
    return [step for step in range(periodic.global_step + 1, until + 1) if periodic.step()]


def test_resumed_run_keeps_the_cadence_of_the_global_step() -> None:
    assert due_steps(PeriodicFunction(0, "steps", 4, 100), until=6) == [4]
    assert due_steps(PeriodicFunction(6, "steps", 4, 100), until=20) == [8, 12, 16, 20]


def test_each_strategy_uses_its_own_period() -> None:
    assert due_steps(PeriodicFunction(0, "no", 1, 1), until=9) == []
    assert due_steps(PeriodicFunction(0, IntervalStrategy.STEPS, 3, 5), until=10) == [3, 6, 9]
    assert due_steps(PeriodicFunction(0, IntervalStrategy.EPOCH, 3, 5), until=10) == [5, 10]


def test_nothing_is_due_before_the_first_step() -> None:
    assert due_steps(PeriodicFunction(0, "steps", 2, 100, first_step=6), until=9) == [6, 8]
    assert due_steps(PeriodicFunction(0, "steps", 2, 100, first_step=5), until=9) == [6, 8]


def test_query_of_a_step_changes_nothing() -> None:
    periodic = PeriodicFunction(0, "steps", 4, 100)
    assert [periodic.due(step) for step in (0, 4, 5, 8)] == [False, True, False, True]
    assert periodic.global_step == 0


def test_reset_ends_an_epoch_early() -> None:
    periodic = PeriodicFunction(0, "epoch", 1, 5)
    due_steps(periodic, until=7)
    periodic.reset()
    assert due_steps(periodic, until=17) == [12, 17]


def test_resumed_run_counts_from_the_start_of_its_epoch() -> None:
    periodic = PeriodicFunction(9, "epoch", 1, 5)
    periodic.reset(epoch_start_step=7)
    assert due_steps(periodic, until=17) == [12, 17]


def test_reset_does_not_shift_the_cadence_of_steps() -> None:
    periodic = PeriodicFunction(6, "steps", 4, 100)
    periodic.reset()
    assert due_steps(periodic, until=12) == [8, 12]


def test_wrong_settings_are_rejected_only_if_used() -> None:
    with pytest.raises(ValueError, match="period=0"):
        PeriodicFunction(0, "steps", 0, 5)
    with pytest.raises(ValueError, match="epoch_period=0"):
        PeriodicFunction(0, "epoch", 5, 0)
    with pytest.raises(ValueError, match=r"'sometimes'.*'no', 'steps', 'epoch'"):
        PeriodicFunction(0, "sometimes", 1, 1)
    PeriodicFunction(0, "steps", 5, 0)
    PeriodicFunction(0, "no", 0, 0)


def test_relative_step_counts_from_the_last_multiple_of_the_period() -> None:
    periodic = PeriodicFunction(6, "steps", 4, 100)
    assert periodic.rel_step == 2
    assert [(periodic.step(), periodic.rel_step) for _ in range(3)] == [(False, 3), (True, 0), (False, 1)]
    by_epoch = PeriodicFunction(7, "epoch", 1, 5)
    by_epoch.reset()
    assert by_epoch.rel_step == 0
    by_epoch.step()
    assert by_epoch.rel_step == 1
    assert PeriodicFunction(3, "no", 0, 0).rel_step == 3
