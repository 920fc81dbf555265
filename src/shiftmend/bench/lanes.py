"""Several source models or cells at once on one GPU: a small network leaves most of the chip idle.

Separate processes only take turns on a GPU. Threads of one process, each with a stream of its own, do not: their
captured steps run side by side, and replaying one is a single call that needs Python for a few microseconds. Everything
else they do in turn, see `turns.py`.
"""

from __future__ import annotations

import gc
import itertools
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from shiftmend.bench.cells import Result
from shiftmend.bench.executors import Execute, Outcomes
from shiftmend.bench.memory import give_back
from shiftmend.bench.suite import find
from shiftmend.bench.tasks import Advance, Job, Task, work
from shiftmend.bench.workshop import Shelf, Workshop
from shiftmend.captures import no_collection
from shiftmend.turns import taking_turns

TARGETS_AT_ONCE = 32
TASKS_PER_COLLECTION = 16
"""A collection of all garbage takes a tenth of a second, in which no lane gets anywhere."""


@contextmanager
def lanes(job: Job, advance: Advance, count: int) -> Iterator[Execute]:
    """An executor of `count` threads, each with a stream and a workshop of its own; they share the data."""
    benchmark = find(job.benchmark)
    root = Path(job.root) if job.root else None
    data = Shelf(TARGETS_AT_ONCE)
    own = threading.local()
    stopped, turn = threading.Event(), threading.Lock()
    ended = itertools.count(1)

    def going_on(task: Task, done: int, total: int) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        advance(task, done, total)

    def run(task: Task) -> Result | None:
        with taking_turns(turn):
            going_on(task, 0, 0)  # while this lane waited for its turn, another may have failed
            if not hasattr(own, "workshop"):
                own.workshop = Workshop(benchmark, Path(job.home), root, job.device, data, job.compile)
                own.stream = torch.cuda.Stream(own.workshop.device)
            with torch.cuda.stream(own.stream):
                result = work(job, task, going_on, own.workshop)
                own.stream.synchronize()
                # what was in use while other lanes collected has grown old by that: now and then also old garbage
                gc.collect(2 if next(ended) % TASKS_PER_COLLECTION == 0 else 1)
                give_back(own.workshop.device)
        if result is None:
            return None
        # memory is that of all lanes together, and time that of a lane among others
        return replace(result, peak_memory=None, manifest=result.manifest | {"lanes": count})

    def execute(tasks: Iterable[Task]) -> Outcomes:
        waiting, pending = iter(tasks), dict[Future[Result | None], Task]()
        try:
            while True:
                while len(pending) < count and (task := next(waiting, None)) is not None:
                    pending[pool.submit(run, task)] = task
                if not pending:
                    return
                done, _ = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    yield pending.pop(future), future.result()
        except BaseException:
            stopped.set()
            raise

    # garbage is collected between tasks
    with no_collection(), _short_turns(), _torch_threads(job.threads), ThreadPoolExecutor(count) as pool:
        try:
            yield execute
        except BaseException:
            stopped.set()
            raise


@contextmanager
def _torch_threads(number: int) -> Iterator[None]:
    """So many threads for whatever torch does on the CPU; 0 leaves them as they are."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _short_turns() -> Iterator[None]:
    """To replay a graph takes Python microseconds; a thread must not wait for another's milliseconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
