from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import Pipe, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import run
from typing import Any

import pytest
import torch
from processes import alive, eventually, seen, silent
from tiny import TINY

from shiftmend.errors import DataError
from shiftmend.research.bench import execute as executors
from shiftmend.research.bench.benchmark import Cell, Result
from shiftmend.research.bench.execute import (
    Advance,
    Job,
    Preparation,
    Task,
    WorkerError,
    inline,
    lost,
    processes,
    workshop_of,
)
from shiftmend.research.bench.plan import plan
from shiftmend.research.bench.run import preparations

FILE = f"{Path(__file__).parents[2] / 'helpers' / 'tiny.py'}:TINY"
CELL = Cell("tiny", "offline", "fr", "dark", 1, "abc")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    (tmp_path / "root").mkdir()
    (tmp_path / "home").mkdir()
    return Job(FILE, str(tmp_path / "home"), str(tmp_path / "root"), "cpu", threads=1)


@pytest.mark.slow
def test_workers_that_die_cost_their_own_cell_and_nothing_else(job: Job, tmp_path: Path) -> None:
    """While they wait, in the first task of the next process, and with the progress of the others still told."""
    cells = plan(TINY, methods=["source-only", "fr"], seeds=[1])
    needed = preparations(TINY, cells)
    told: list[tuple[Task, int, int]] = []
    with processes(job, lambda *news: told.append(news), workers=2) as execute:
        assert list(execute(needed)) == [(needed[0], None)]
        (idle,) = seen(tmp_path / "root")
        (blocked,) = re.findall(r"SigBlk:\s+(\w+)", Path(f"/proc/{idle}/status").read_text())
        assert int(blocked, 16) & 1 << signal.SIGINT - 1  # Ctrl-C is for the parent to answer
        os.kill(idle, signal.SIGKILL)
        assert eventually(lambda: not alive(idle))
        (tmp_path / "root" / "kill-dark").touch()
        outcomes = dict(execute(cells))
    assert set(outcomes) == set(cells)
    results = [result for result in outcomes.values() if result is not None]
    (dead,) = (result for result in results if result.failed)
    assert dead.cell.shift == "dark"
    assert dead.error == "its process was ended by SIGKILL (killed, or out of memory)"
    assert dead.finished.endswith("Z")
    assert dead.seconds > 0
    assert all(result.last is not None for result in results if result is not dead)
    begun = dict.fromkeys(task for task, done, total in told if (done, total) == (0, 0))
    assert list(begun) == [*needed, *cells]
    assert all(done <= total for _, done, total in told)
    assert {task for task, done, _ in told if done} & {*needed, *cells}
    assert multiprocessing.active_children() == []
    assert not any(map(alive, seen(tmp_path / "root")))


class Mortal:
    """In place of a process."""

    pid, exitcode = None, -signal.SIGKILL

    def __init__(self) -> None:
        self.alive = True

    def is_alive(self) -> bool:
        return self.alive

    def join(self, timeout: float | None = None) -> None: ...

    def close(self) -> None: ...


def test_what_a_dying_process_did_not_hear_is_given_to_the_next_once(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """It dies between two cells, just after it was seen alive; whether the task is to blame shows with the next."""
    theirs: list[Connection] = []
    worker: Any = executors._Worker(job)

    def another(worker: Any) -> None:
        worker.channel, end = Pipe()
        worker._process = Mortal()
        theirs.append(end)

    def die() -> None:
        worker._process.alive = False
        theirs[-1].close()

    monkeypatch.setattr(executors._Worker, "_open", another)
    another(worker)
    theirs[0].close()
    worker.start(CELL)
    die()
    assert worker.outcome(silent) is None
    assert theirs[1].recv() == (job, CELL)
    die()
    task, result = worker.outcome(silent)
    assert (task, result.cell, result.error) == (CELL, CELL, executors._ending(-signal.SIGKILL))
    assert (len(theirs), worker.task) == (2, None)


@pytest.mark.slow
def test_an_error_in_a_worker_is_the_caller_s(job: Job, tmp_path: Path) -> None:
    needed: list[Task] = [Preparation("plain", 1, 0.01)]
    with processes(job, silent, workers=2) as execute:
        (tmp_path / "root" / "break-source").touch()
        with pytest.raises(DataError, match=r"^source is broken on purpose; remove the file$"):
            list(execute(needed))
        (tmp_path / "root" / "break-source").unlink()
        (tmp_path / "root" / "kill-source").touch()
        expected = r"^source model plain, seed 1 could not be made: its process was ended by SIGKILL .*; run again"
        with pytest.raises(WorkerError, match=expected):
            list(execute(needed))
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_nothing_of_a_run_stays_in_this_process(job: Job) -> None:
    cells = plan(TINY, methods=["adabn"], shifts=["dark"], seeds=[1])
    handler, threads = signal.getsignal(signal.SIGINT), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        inside = []
        with inline(job, lambda *_: inside.append(torch.get_num_threads())) as execute:
            list(execute([*preparations(TINY, cells), *cells]))
        assert inside[-1] == 1
        assert torch.get_num_threads() == 2
        with inline(job, silent) as execute:
            next(execute(cells))  # and no further
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert signal.getsignal(signal.SIGINT) is handler
    assert workshop_of.cache_info().currsize == 0  # models and data


def test_what_swallows_ctrl_c_gives_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adaptation hands back what it has when interrupted; other code may turn the interruption into an error."""

    def work(job: Job, task: Task, advance: Advance) -> Result:
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
            waited.append(task)  # as if nobody had pressed anything
        return Result(CELL, "own", error="something broke")

    monkeypatch.setattr(executors, "work", work)
    given, waited = [], list[Task]()
    with pytest.raises(KeyboardInterrupt), inline(Job(FILE, "nowhere"), silent) as execute:
        given.extend(execute([CELL, CELL]))
    assert given == waited == []


def test_from_another_thread(job: Job) -> None:
    """Signals can be caught in the main thread only."""
    given: list[Any] = []

    def go() -> None:
        with inline(job, silent) as execute:
            given.extend(execute([Preparation("plain", 1, 0.01)]))

    thread = threading.Thread(target=go)
    thread.start()
    thread.join()
    assert given == [(Preparation("plain", 1, 0.01), None)]


@contextmanager
def serving(monkeypatch: pytest.MonkeyPatch, work: Callable[..., None]) -> Iterator[Connection]:
    """A worker that has been given a cell, and the end of its pipe."""
    monkeypatch.setattr(executors, "work", work)
    ours, theirs = Pipe()
    worker = threading.Thread(target=executors._serve, args=(theirs, os.getppid()))
    worker.start()
    try:
        ours.send((Job(FILE, "nowhere"), CELL))
        yield ours
    finally:
        ours.close()
        worker.join(20)
    assert not worker.is_alive()


def test_a_worker_does_not_wait_for_a_parent_that_does_not_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe holds 64 KiB; a stream of many small batches has more progress than that to tell."""
    finished = threading.Event()

    def work(job: Job, task: Task, advance: Advance) -> None:
        for number in range(100_000):
            advance(task, number, 100_000)
        finished.set()

    with serving(monkeypatch, work) as ours:
        assert finished.wait(20)
        heard = [ours.recv()]
        while isinstance(heard[-1], tuple):
            heard.append(ours.recv())
        assert heard[:2] == [(0, 0), (0, 100_000)]
        assert len(heard) < 500
        assert heard[-1] == executors._Over()


@pytest.mark.slow
def test_workers_need_no_masks_for_signals(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows has none, and no tracker of resources that could be started."""
    resource_tracker.ensure_running()
    monkeypatch.setattr(executors, "resource_tracker", None)
    monkeypatch.delattr(signal, "pthread_sigmask")
    (needed,) = preparations(TINY, plan(TINY, methods=["source-only"], seeds=[1]))
    with processes(job, silent, workers=1) as execute:
        assert list(execute([needed])) == [(needed, None)]


@pytest.mark.slow
def test_a_worker_ends_with_its_parent_though_the_number_of_that_stays() -> None:
    code = """if True:
        import os, signal
        from multiprocessing import Pipe
        from types import SimpleNamespace
        from shiftmend.research.bench import execute as executors
        executors.parent_process = lambda: SimpleNamespace(is_alive=lambda: False)
        executors.time.sleep = None
        ours, theirs = Pipe()
        executors._serve(theirs, os.getppid())
    """
    assert run([sys.executable, "-c", code], timeout=60, check=False).returncode == 1


def test_an_unexpected_error_in_a_worker_comes_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(*given: Any) -> None:
        raise KeyError("unexpected")

    with serving(monkeypatch, work) as ours:
        assert ours.recv() == (0, 0)
        assert ours.poll(20)
        error = ours.recv().error
    assert isinstance(error, KeyError)
    assert "in work" in error.__notes__[0]


class Unpicklable(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def test_errors_can_be_sent() -> None:
    for error in (DataError("no such folder"), FileNotFoundError(2, "No such file", "x")):
        sent = pickle.loads(pickle.dumps(executors._portable(error)))
        assert (type(sent), str(sent), hasattr(sent, "__notes__")) == (type(error), str(error), False)
    try:
        raise KeyError("unexpected")
    except KeyError as error:
        sent = pickle.loads(pickle.dumps(executors._portable(error)))
    assert "test_errors_can_be_sent" in sent.__notes__[0]
    assert str(executors._portable(Unpicklable("one", "two"))) == "Unpicklable: one two"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (-signal.SIGKILL, "was ended by SIGKILL (killed, or out of memory)"),
        (-signal.SIGSEGV, "was ended by SIGSEGV"),
        (-40, "was ended by signal 40"),
        (3, "ended with exit code 3"),
        (None, "no longer answers"),
    ],
)
def test_how_a_process_ended(code: int | None, said: str) -> None:
    assert executors._ending(code) == f"its process {said}"


def test_lost_cells_and_lost_preparations(job: Job) -> None:
    result = lost(job, CELL, "its process left", 1.23456)
    assert (result.cell, result.error, result.seconds, result.last) == (CELL, "its process left", 1.235, None)
    with pytest.raises(WorkerError, match="source model shot, seed 3 could not be made: its process left; run again"):
        lost(job, Preparation("shot", 3, 0.01), "its process left")


def test_workers_share_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [executors._device("auto", number) for number in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert executors._device("cuda:1", 0) == "cuda:1"
    assert executors._device("cpu", 1) == "cpu"
