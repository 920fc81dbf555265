"""A run that has to end at a given time begins nothing that would not be over by then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from shiftmend.bench.base import Benchmark
from shiftmend.bench.cells import Cell
from shiftmend.bench.tasks import Preparation, Task, preparation
from shiftmend.errors import DataError


class TimeLimit:
    """Lets tasks through as long as there is time for them, going by the slowest of their kind so far.

    Of its own kind are cells of the same method, and source models of the same recipe; one that is under way takes at
    least as long as it has by now. Before one of a kind is over, it is taken to be as slow as the slowest cell, or
    source model, of any kind. What nothing is known about is begun. Nothing is stopped: what was begun in time is
    finished. Earlier runs do not count: they may have been on another machine.
    """

    def __init__(
        self, benchmark: Benchmark, minutes: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if minutes is not None and not 0 < minutes < float("inf"):
            raise DataError(f"the minutes that a run may take must be a positive number, got {minutes}")
        self.left: list[Cell] = []
        """Cells that there was no time for."""
        self._benchmark, self._clock = benchmark, clock
        self._end = float("inf") if minutes is None else clock() + 60 * minutes
        self._begun: dict[Task, float] = {}
        self._slowest: dict[tuple[type[Task], str], float] = {}
        self._lacking: set[Preparation] = set()

    def within(self, tasks: Iterable[Task]) -> Iterator[Task]:
        """Those to begin, each at the moment when it is asked for: whoever asks has a worker free."""
        for task in tasks:
            now = self._clock()
            model = _model(task if isinstance(task, Preparation) else preparation(self._benchmark, task))
            if now + self._expected(task, now) < self._end and model not in self._lacking:
                self._begun[task] = now
                yield task
            elif isinstance(task, Preparation):
                self._lacking.add(model)
            else:
                self.left.append(task)

    def _expected(self, task: Task, now: float) -> float:
        """Seconds."""
        own = _kind(task)
        alike = [own] if own in self._slowest else [kind for kind in self._slowest if kind[0] is own[0]]
        under_way = [now - begun for other, begun in self._begun.items() if _kind(other) == own]
        return max([self._slowest[kind] for kind in alike] + under_way, default=0.0)

    def over(self, task: Task) -> None:
        """A task has ended."""
        taken = self._clock() - self._begun.pop(task)
        self._slowest[_kind(task)] = max(taken, self._slowest.get(_kind(task), 0.0))


def _kind(task: Task) -> tuple[type[Task], str]:
    return type(task), task.method if isinstance(task, Cell) else task.source


def _model(made: Preparation) -> Preparation:
    """Which source model, whatever profiles are made of it."""
    return replace(made, presets=(), temperature=0.0)
