"""A run with a limited time, with a clock that the tests turn."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny import TINY

from shiftmend.errors import DataError
from shiftmend.research.bench.benchmark import Setting
from shiftmend.research.bench.execute import Preparation, Task, TimeLimit
from shiftmend.research.bench.plan import plan
from shiftmend.research.bench.run import preparations


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
    # 52 seconds are over after a fast one and two slow ones; a third would end at 77, three fast ones end at 58
    begun = work_off(limit, clock, [fast[0], *slow, *fast[1:]], {"fr": 25.0, "adabn": 2.0})
    assert begun == [fast[0], *slow[:2], *fast[1:]]
    assert limit.left == slow[2:]


def test_before_one_of_its_method_is_over_a_cell_is_taken_to_be_as_slow_as_the_slowest() -> None:
    clock = Clock()
    limit = TimeLimit(TINY, 1.0, clock)
    slow, unknown = (plan(TINY, "offline", methods=[method], seeds=[1]) for method in ("fr", "adabn"))
    # the source model takes longer, but is no cell
    begun = work_off(
        limit, clock, [*preparations(TINY, slow), slow[0], unknown[0]], {"source": 30.0, "fr": 10.0, "adabn": 10.0}
    )
    assert begun[1:] == [slow[0], unknown[0]]
    limit = TimeLimit(TINY, 1.0, clock)
    assert work_off(limit, clock, [slow[0], unknown[0]], {"fr": 35.0}) == slow[:1]
    assert limit.left == unknown[:1]


def test_what_is_under_way_says_how_long_its_kind_takes_at_least() -> None:
    clock = Clock()
    limit = TimeLimit(TINY, 1.0, clock)
    first, second = plan(TINY, "offline", methods=["fr"], seeds=[1])
    tasks = limit.within([first, second])
    assert next(tasks) == first
    clock.seconds += 35.0
    assert next(tasks, None) is None
    assert limit.left == [second]


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
