"""Cells on a Ray cluster."""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch

from shiftmend.accelerate.cuda_graphs import pause_garbage_collection
from shiftmend.errors import DataError, ShiftmendError
from shiftmend.research.bench.benchmark import USUAL_PRESET, Benchmark, Cell, Result
from shiftmend.research.bench.cell import give_back, run_cell
from shiftmend.research.bench.plan import settings_of
from shiftmend.research.bench.resources import Shelf, Workshop
from shiftmend.research.bench.suite import find
from shiftmend.utils.files import write_atomically
from shiftmend.utils.gpu_sharing import taking_turns


@dataclass(frozen=True)
class Job:
    """What a worker has to know about a run; all of it can travel to another machine."""

    benchmark: str
    home: str
    root: str | None = None
    device: str = "auto"
    rates: tuple[float, ...] = ()
    threads: int = 0
    """Of torch in each worker; 0 leaves them as they are."""
    compile: bool = False
    """Steps of adaptation, on a GPU."""


@dataclass(frozen=True)
class Preparation:
    """A source model and its profiles, which cells share."""

    source: str
    seed: int
    temperature: float
    presets: tuple[str, ...] = (USUAL_PRESET,)

    def __str__(self) -> str:
        return f"source model {self.source}, seed {self.seed}"


Task = Cell | Preparation


Advance = Callable[[Task, int, int], None]
"""Called with a task, how much of it is done, and how much there is (0 if that is not known)."""


class WorkerError(ShiftmendError):
    """The process that ran a task is gone, or failed at it in a way that cannot be told otherwise."""


def preparation(benchmark: Benchmark, cell: Cell) -> Preparation:
    """What a cell starts from."""
    setting = settings_of(benchmark, cell.protocol)[cell.method]
    source, temperature = benchmark.source_for(setting, cell.shift), benchmark.protocols[cell.protocol].temperature
    return Preparation(source, cell.seed, temperature, (setting.preset,))


@functools.lru_cache(maxsize=1)
def workshop_of(job: Job) -> Workshop:
    """This process's workshop; the one of another job, with its data, is given up for it."""
    if job.threads:
        torch.set_num_threads(job.threads)
    root = Path(job.root) if job.root else None
    return Workshop(find(job.benchmark), Path(job.home), root, job.device, compile=job.compile)


def work(job: Job, task: Task, advance: Advance, workshop: Workshop | None = None) -> Result | None:
    """Do one task, in this process's workshop or another; a preparation gives nothing but its files."""
    workshop = workshop or workshop_of(job)
    if isinstance(task, Cell):
        return run_cell(workshop, task, rates=job.rates, tick=lambda done, total: advance(task, done, total))
    epochs, done = workshop.benchmark.sources[task.source].epochs, 0

    def tick() -> None:
        nonlocal done
        done += 1
        advance(task, done, epochs)

    workshop.model(task.source, task.seed, tick)
    for preset in task.presets:
        workshop.profile(task.source, task.seed, task.temperature, preset)
    return None


def lost(job: Job, task: Task, why: str, seconds: float = 0.0) -> Result:
    """What is recorded for a cell whose worker is gone; without its source model nothing can go on."""
    if isinstance(task, Preparation):
        raise WorkerError(f"{task} could not be made: {why}; run again to go on from what is done")
    return Result(
        task,
        find(job.benchmark).origin(task.shift, Path(job.root) if job.root else None),
        error=why,
        seconds=round(seconds, 3),
        finished=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


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
                done, _ = futures.wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    yield pending.pop(future), future.result()
        except BaseException:
            stopped.set()
            raise

    # garbage is collected between tasks
    with pause_garbage_collection(), _short_turns(), _torch_threads(job.threads), ThreadPoolExecutor(count) as pool:
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


@contextmanager
def on_ray(job: Job, workers: int) -> Iterator[Execute]:
    """On the cluster that the caller is connected to, else on the one in RAY_ADDRESS, else on one started here.

    Source models and profiles travel with the tasks, so machines need not share a disk; data sets do not travel: each
    machine needs them under the same data root, and a folder under the same path as that of the results which it can
    write to. A cell has one CPU core, and one GPU if the cluster has any.
    """
    try:
        import ray
    except ImportError as error:
        raise ShiftmendError("--executor ray needs Ray: pip install 'shiftmend[ray]'") from error
    benchmark = find(job.benchmark)
    pending: dict[Any, Task] = {}

    def execute(tasks: Iterable[Task]) -> Outcomes:
        gpus = 1 if _wants_gpu(job.device, ray.cluster_resources()) else 0
        there = replace(job, device="cuda") if gpus else job  # of one process, the only GPU it can see
        remote = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(_work_there)
        bundles: dict[str, Any] = {}
        for task in tasks:
            pattern = _files(benchmark, task)
            if pattern not in bundles:
                bundles[pattern] = ray.put(_bundle(Path(job.home), pattern))
            pending[remote.remote(there, task, pattern, bundles[pattern])] = task
        while pending:
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=1.0)
            for reference in ready:
                task = pending.pop(reference)
                try:
                    result, files = ray.get(reference)
                except ray.exceptions.RayTaskError as error:  # an error of the task itself, not of its worker
                    cause = error.cause if isinstance(error.cause, Exception) else error
                    raise cause from None
                except ray.exceptions.RayError as error:
                    first = (str(error).strip() or type(error).__name__).splitlines()[0]
                    yield task, lost(job, task, f"its worker on the cluster is gone ({first})")
                    continue
                _unpack(Path(job.home), files)
                yield task, result

    with _connected(ray, workers):
        try:
            yield execute
        finally:
            for reference in pending:  # nobody waits for them any more
                with suppress(ray.exceptions.RayError):
                    ray.cancel(reference, force=True)


@contextmanager
def _connected(ray: Any, workers: int) -> Iterator[None]:
    if ray.is_initialized():
        yield
        return
    here: dict[str, Any] = {"address": "local", "num_cpus": workers, "include_dashboard": False}
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **({} if os.environ.get("RAY_ADDRESS") else here))
        yield
    finally:
        ray.shutdown()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray puts its own in the place of the caller's


def _wants_gpu(device: str, resources: dict[str, float]) -> bool:
    """Asked for, or there; one that is asked for but not there yet is waited for, since clusters may grow."""
    return device.startswith("cuda") or (device == "auto" and resources.get("GPU", 0) >= 1)


def _work_there(job: Job, task: Task, pattern: str, bundle: dict[str, bytes]) -> tuple[Result | None, dict[str, bytes]]:
    """A preparation also gives back the files that it made."""
    home = Path(job.home)
    _unpack(home, bundle)
    result = work(job, task, lambda *_: None)
    made = _bundle(home, pattern) if isinstance(task, Preparation) else {}
    return result, {name: content for name, content in made.items() if name not in bundle}


def _files(benchmark: Benchmark, task: Task) -> str:
    """Which source models and profiles may be the task's: exactly which depends on data that only workers read."""
    needed = task if isinstance(task, Preparation) else preparation(benchmark, task)
    return f"{benchmark.sources[needed.source].network}-*-{needed.seed}"


def _bundle(home: Path, pattern: str) -> dict[str, bytes]:
    """Files by their paths below `home`."""
    found = (*home.glob(f"sources/{pattern}.safetensors"), *home.glob(f"profiles/{pattern}-*.safetensors"))
    return {str(file.relative_to(home)): file.read_bytes() for file in sorted(found)}


def _unpack(home: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        if not (home / name).exists():
            write_atomically(home / name, content)
