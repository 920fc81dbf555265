"""Where cells are run: in this process, in several on this machine, or on a Ray cluster (`clusters.py`).

Every executor is a context that gives a function from tasks to what came of each, as soon as it is there and in any
order; with the context ends all that it has started. A worker that dies costs its own task only. There is no scheduler
here: processes take the next task when they are free, and Ray does its own.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

import torch

from shiftmend.bench.cells import Result
from shiftmend.bench.tasks import Advance, Job, Task, WorkerError, lost, work, workshop_of
from shiftmend.errors import ShiftmendError

SECONDS_BETWEEN_TICKS = 0.1
"""Progress that comes faster than anyone can see would fill the pipe of a parent that has something else to do."""
SECONDS_TO_FOLLOW = 0.5
"""How often a worker looks whether its parent is still there."""

Outcomes = Iterator[tuple[Task, Result | None]]
"""Cells with their results; a preparation has none but its files."""
Execute = Callable[[Iterable[Task]], Outcomes]
"""Takes a task when there is a worker for it, not before: what comes next may depend on the time."""


@contextmanager
def inline(job: Job, advance: Advance) -> Iterator[Execute]:
    """One task after the other, here."""
    threads = torch.get_num_threads()

    def execute(tasks: Iterable[Task]) -> Outcomes:
        for task in tasks:
            advance(task, 0, 0)
            result = work(job, task, advance)
            if interrupted():
                raise KeyboardInterrupt
            yield task, result

    try:
        with _interruptions() as interrupted:
            yield execute
    finally:
        torch.set_num_threads(threads)
        workshop_of.cache_clear()


@contextmanager
def _interruptions() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C has been pressed, whatever became of the exception.

    An adaptation answers it with what it has reached, and other libraries may make an error of it; neither is the
    result of a cell.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield lambda: False
        return
    pressed = False

    def note(number: int, frame: object) -> None:
        nonlocal pressed
        pressed = True
        before(number, frame)  # type: ignore[arg-type]

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def processes(job: Job, advance: Advance, workers: int) -> Iterator[Execute]:
    """Several processes on this machine, each with its GPU if there are any."""
    crew = [_Worker(replace(job, device=_device(job.device, number))) for number in range(workers)]

    def execute(tasks: Iterable[Task]) -> Outcomes:
        waiting = iter(tasks)
        while True:
            for worker in crew:
                if worker.task is None and (task := next(waiting, None)) is not None:
                    advance(task, 0, 0)
                    worker.start(task)
            busy = [worker for worker in crew if worker.task is not None]
            if not busy:
                return
            wait([worker.channel for worker in busy], timeout=0.5)
            for worker in busy:
                outcome = worker.outcome(advance)
                if outcome is not None:
                    yield outcome

    try:
        yield execute
    finally:
        for worker in crew:  # all of them first: whoever presses Ctrl-C twice must not leave some behind
            worker.kill()
        for worker in crew:
            worker.stop()


@dataclass(frozen=True)
class _Over:
    """A worker's last word on a task; the others are numbers, how far it is."""

    result: Result | None = None
    error: Exception | None = None
    gone: bool = False


class _Worker:
    """A process that does one task at a time; it is started when there is one, and replaced if it dies."""

    channel: Connection

    def __init__(self, job: Job) -> None:
        self.job = job
        self.task: Task | None = None
        self._process: SpawnProcess | None = None
        self._started = 0.0
        self._begun = False

    def start(self, task: Task) -> None:
        fresh = self._process is None or not self._process.is_alive()
        if fresh:
            self.stop()
            self._open()
        self.task, self._started = task, time.monotonic()
        self._begun = fresh  # whom an old process does not even hear is not lost with it
        with suppress(OSError):  # it has died this very moment, which `outcome` will find
            self.channel.send((self.job, task))

    def _open(self) -> None:
        context = get_context("spawn")  # a forked torch may hang, and cannot use CUDA
        self.channel, theirs = context.Pipe()
        # not a daemon: those may have no children, and data loaders are some
        self._process = context.Process(target=_serve, args=(theirs, os.getpid()))
        with _deaf_children():
            self._process.start()
        theirs.close()  # so that there is nobody to write once the worker has died

    def outcome(self, advance: Advance) -> tuple[Task, Result | None] | None:
        """What came of the task, if it is over; on the way, how far it is."""
        task = self.task
        assert task is not None
        while (message := self._hear()) is not None:
            if isinstance(message, tuple):
                self._begun = True
                advance(task, *message)
                continue
            self.task = None
            if message.error is not None:
                raise message.error
            if not message.gone:
                return task, message.result
            why = self._bury()
            if self._begun:
                return task, lost(self.job, task, why, time.monotonic() - self._started)
            self.start(task)
        return None

    def _hear(self) -> tuple[int, int] | _Over | None:
        """The next message if there is one."""
        assert self._process is not None
        gone = not self._process.is_alive()  # before looking: it may speak and go
        try:
            if self.channel.poll():
                message: tuple[int, int] | _Over = self.channel.recv()
                return message
        except (EOFError, OSError):
            gone = True
        return _Over(gone=True) if gone else None

    def _bury(self) -> str:
        """How the process ended."""
        assert self._process is not None
        self._process.join(timeout=5)
        code = self._process.exitcode
        self.stop()
        return _ending(code)

    def kill(self) -> None:
        """What the process was doing is lost, and only that."""
        if self._process is not None and self._process.pid is not None:
            self._process.kill()

    def stop(self) -> None:
        """End the process and give back what belongs to it."""
        self.kill()
        if self._process is not None:
            self.channel.close()
            if self._process.pid is not None:
                self._process.join()
            self._process.close()
            self._process = None


@contextmanager
def _deaf_children() -> Iterator[None]:
    """A process that is started inside leaves Ctrl-C to its parent: from its birth, or on Windows from `_serve` on."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # else the start would, and unblock the signal again
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _ending(code: int | None) -> str:
    if code is None or code >= 0:
        return "its process no longer answers" if code is None else f"its process ended with exit code {code}"
    name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
    return f"its process was ended by {name}" + (" (killed, or out of memory)" if name == "SIGKILL" else "")


def _serve(channel: Connection, parent: int) -> None:
    """The life of a worker: it takes a task, does it and says what came of it, as long as there is a parent."""

    own = parent_process()

    def follow() -> None:
        # on Windows the number of the parent outlives it
        while os.getppid() == parent and (own is None or own.is_alive()):
            time.sleep(SECONDS_TO_FOLLOW)
        os._exit(1)

    if not hasattr(signal, "pthread_sigmask"):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=follow, daemon=True).start()
    said = 0.0

    def advance(_: Task, done: int, total: int) -> None:
        nonlocal said
        if time.monotonic() - said >= SECONDS_BETWEEN_TICKS:
            said = time.monotonic()
            channel.send((done, total))

    with suppress(EOFError, OSError):  # nobody asks for more, or listens any more
        while True:
            job, task = channel.recv()
            channel.send((0, 0))
            try:
                over = _Over(work(job, task, advance))
            except Exception as error:
                over = _Over(error=_portable(error))
            channel.send(over)


def _portable(error: Exception) -> Exception:
    """The error as it can be sent: with its traceback, unless it is a sentence for the user; or at least its text."""
    if not isinstance(error, ShiftmendError | OSError):
        error.add_note("In the worker:\n" + "".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return WorkerError(f"{type(error).__name__}: {error}")
    return error


def _device(device: str, number: int) -> str:
    """Workers share the GPUs among them."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return f"cuda:{number % gpus}" if gpus > 1 and device in ("auto", "cuda") else device
