"""A run with a limited time, with a clock that the tests turn."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny import TINY

from shiftmend.bench.base import Setting
from shiftmend.bench.limits import TimeLimit
from shiftmend.bench.planning import plan
from shiftmend.bench.runner import preparations
from shiftmend.bench.tasks import Preparation, Task
from shiftmend.errors import DataError


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def work_off(limit: TimeLimit, clock: Clock, tasks: list[Task], seconds: dict[str, float]) -> list[Task]:
    """One after the other, as one worker does; how long a method takes is given."""
    begun = []
    for task in limit.within(tasks):
        begun.append(task)
        clock.seconds += seconds["source" if isinstance(task, Preparation) else task.method]
        limit.over(task)
    return begun


def test_what_would_not_be_over_in_time_is_left_and_what_is_faster_still_fits() -> None:
    clock = Clock()
    limit = TimeLimit(TINY, 1.0, clock)  # 60 seconds
    cells = plan(TINY, "offline", methods=["fr", "adabn"], seeds=[1, 2])
    slow, fast = ([cell for cell in cells if cell.method == method] for method in ("fr", "adabn"))
    assert len(slow) == len(fast) == 4
    # 50 seconds are over after two slow ones; a third would end at 75, four fast ones end at 58
    begun = work_off(limit, clock, [*slow, *fast], {"fr": 25.0, "adabn": 2.0})
    assert begun == [*slow[:2], *fast]
    assert limit.left == slow[2:]


def test_what_nothing_is_known_about_is_begun_and_finished_though_it_takes_longer() -> None:
    clock = Clock()
    limit = TimeLimit(TINY, 1.0, clock)
    first, second = plan(TINY, "offline", methods=["fr"], seeds=[1])
    assert work_off(limit, clock, [first, second], {"fr": 600.0}) == [first]
    assert limit.left == [second]


def test_the_slowest_of_a_kind_counts_not_the_last() -> None:
    clock = Clock()
    limit = TimeLimit(TINY, 1.0, clock)
    cells = plan(TINY, "offline", methods=["fr"], seeds=[1, 2])
    tasks = limit.within(cells)
    for taken in (28.0, 5.0):
        task = next(tasks)
        clock.seconds += taken
        limit.over(task)
    assert next(tasks, None) is None  # 27 seconds are left: another of 28 would not fit
    assert len(limit.left) == 2


def test_cells_whose_source_model_there_was_no_time_for_are_left() -> None:
    """Whichever of the model's profiles they start from."""
    methods = {"adabn": Setting("adabn"), "sliced": Setting("fr", preset="sliced")}
    two_profiles = replace(TINY, settings={"offline": methods})
    clock = Clock()
    limit = TimeLimit(two_profiles, 1.0, clock)
    cells = plan(two_profiles, "offline", methods=["adabn", "sliced"], seeds=[1, 2])
    needed = preparations(two_profiles, cells)
    assert [(one.seed, len(one.presets)) for one in needed] == [(1, 2), (2, 2)]
    assert work_off(limit, clock, list(needed), {"source": 40.0}) == needed[:1]
    begun = work_off(limit, clock, list(cells), {"adabn": 1.0, "sliced": 1.0})
    assert begun == [cell for cell in cells if cell.seed == 1]
    assert limit.left == [cell for cell in cells if cell.seed == 2]


def test_workers_side_by_side_are_timed_each_by_itself() -> None:
    clock = Clock()
    limit = TimeLimit(TINY, 1.0, clock)
    cells = plan(TINY, "offline", methods=["fr"], seeds=[1, 2])
    tasks = limit.within(cells)
    first, second = next(tasks), next(tasks)
    clock.seconds += 20.0
    limit.over(first)
    third = next(tasks)
    clock.seconds += 15.0
    limit.over(second)  # took 35: a fourth would end at 70
    limit.over(third)
    assert next(tasks, None) is None
    assert limit.left == cells[3:]


def test_without_a_limit_everything_is_begun() -> None:
    clock = Clock()
    limit = TimeLimit(TINY, None, clock)
    cells = plan(TINY, "offline", seeds=[1])
    assert work_off(limit, clock, list(cells), dict.fromkeys((cell.method for cell in cells), 1e9)) == cells
    assert limit.left == []


@pytest.mark.parametrize("minutes", [0.0, -1.0, float("inf"), float("nan")])
def test_impossible_limits_are_refused(minutes: float) -> None:
    with pytest.raises(DataError, match="minutes that a run may take must be a positive number"):
        TimeLimit(TINY, minutes)
