"""Execution of tasks (cells, and the source models that they share): here, in processes, in threads of one GPU, on Ray.

Each of `in_this_process`, `in_processes`, `in_gpu_threads` and `on_ray` is a context manager that gives a function from
tasks to results. Workers end with the context.
"""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch

from shiftmend.accelerate.cuda_graphs import pause_garbage_collection
from shiftmend.errors import DataError, ShiftmendError
from shiftmend.research.bench.benchmark import USUAL_PRESET, Benchmark, Cell, Rehearsed, Result
from shiftmend.research.bench.cell import collect_warnings, now_in_utc, release_unused_memory, run_cell
from shiftmend.research.bench.plan import settings_of
from shiftmend.research.bench.resources import Cache, Resources
from shiftmend.research.bench.suite import find
from shiftmend.utils.checks import require
from shiftmend.utils.files import write_atomically
from shiftmend.utils.gpu_sharing import share_gpu

SECONDS_BETWEEN_TICKS = 0.1
"""Seconds between two progress messages of a worker, so that they do not fill the pipe of a busy parent."""

SECONDS_BETWEEN_PARENT_CHECKS = 0.5
"""Seconds between two checks of a worker whether its parent still exists; it ends itself if not."""

TARGETS_IN_MEMORY = 32

TASKS_PER_COLLECTION = 16
"""Number of tasks between two full garbage collections, each of which stops all threads for a tenth of a second."""


@dataclass(frozen=True)
class Job:
    """The facts about a run that a worker needs; all of them can be sent to another machine."""

    benchmark: str
    home: str
    root: str | None = None
    device: str = "auto"
    rates: tuple[float, ...] = ()
    threads: int = 0
    """Number of torch threads in each worker; 0 keeps the default."""
    compile: bool = False
    """Whether to compile the steps of adaptation on a GPU."""


@dataclass(frozen=True)
class Preparation:
    """The task of preparing a source model and its profiles, which several cells share."""

    source: str
    seed: int
    temperature: float
    presets: tuple[str, ...] = (USUAL_PRESET,)
    rehearsed: Rehearsed | None = None
    """The protocol that the profiles are rehearsed for, if it rehearses."""

    def __str__(self) -> str:
        return f"source model {self.source}, seed {self.seed}"


Task = Cell | Preparation

Advance = Callable[[Task, int, int], None]
"""Function that is called with a task, its progress, and its total (0 if unknown)."""

Outcomes = Iterator[tuple[Task, Result | None]]
"""Cells with their results; a preparation gives None and writes files."""

Execute = Callable[[Iterable[Task]], Outcomes]
"""Function that takes a task only when a worker is free, because the next task may depend on the time."""


def preparation_for(benchmark: Benchmark, cell: Cell) -> Preparation:
    """Return the preparation of the source model and the profile that a cell starts from."""
    setting = settings_of(benchmark, cell.protocol)[cell.method]
    source, protocol = benchmark.source_for(setting, cell.shift), benchmark.protocols[cell.protocol]
    rehearsed = protocol if isinstance(protocol, Rehearsed) else None
    return Preparation(source, cell.seed, protocol.temperature, (setting.preset,), rehearsed)


def list_preparations(benchmark: Benchmark, cells: Sequence[Cell]) -> list[Preparation]:
    """Return one preparation for each source model that `cells` use, with a profile for every preset of these cells."""
    presets: dict[Preparation, tuple[str, ...]] = {}
    for one in dict.fromkeys(preparation_for(benchmark, cell) for cell in cells):
        model = replace(one, presets=())
        presets[model] = presets.get(model, ()) + one.presets
    return [replace(model, presets=found) for model, found in presets.items()]


@functools.lru_cache(maxsize=1)
def get_resources(job: Job) -> Resources:
    """Return the resources of this process; those of another job are dropped."""
    if job.threads:
        torch.set_num_threads(job.threads)
    root = Path(job.root) if job.root else None
    return Resources(find(job.benchmark), Path(job.home), root, job.device, compile=job.compile)


def do_task(job: Job, task: Task, advance: Advance, resources: Resources | None = None) -> Result | None:
    """Run a cell and return its result, or prepare a source model and its profiles, which only writes files."""
    resources = resources or get_resources(job)
    if isinstance(task, Cell):
        return run_cell(resources, task, rates=job.rates, tick=lambda done, total: advance(task, done, total))
    epochs, done = resources.benchmark.sources[task.source].epochs, 0

    def tick() -> None:
        nonlocal done
        done += 1
        advance(task, done, epochs)

    # Warnings about a source model that is trained as published would not help, and would break the progress bars.
    with collect_warnings():
        resources.model(task.source, task.seed, tick)
        for preset in task.presets:
            if task.rehearsed is None:
                resources.profile(task.source, task.seed, task.temperature, preset)
            else:
                resources.rehearsed(task.source, task.seed, task.rehearsed, preset)
    return None


def fail_task(job: Job, task: Task, why: str, seconds: float = 0.0) -> Result:
    """Make a failed result for a task whose worker process died.

    Args:
        job: The job that the task belongs to.
        task: A cell, or the preparation of a source model and its profiles.
        why: Reason for the failure, for the error message.
        seconds: Time since the task was started.

    Returns:
        A result of the cell with `why` as its error, and without scores.

    Raises:
        ShiftmendError: If the task is a preparation, because other tasks need its files.
    """
    if isinstance(task, Preparation):
        raise ShiftmendError(f"Task {task} could not be made: {why}. Run again to go on from what is done.")
    origin = find(job.benchmark).origin(task.shift, Path(job.root) if job.root else None)
    return Result(task, origin, error=why, seconds=round(seconds, 3), finished=now_in_utc())


class TimeLimit:
    """A time limit that starts a task only if the slowest task of the same kind would still fit.

    Cells of one method are of one kind, and so are source models of one recipe. A running task counts with its time so
    far. Until a task of a kind has finished, the slowest task of any kind stands in for it. Without any information,
    the task is started. Started tasks are never stopped. Earlier runs do not count, because they may have been on
    another machine.
    """

    def __init__(
        self, benchmark: Benchmark, minutes: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if minutes is not None and not 0 < minutes < float("inf"):
            raise DataError(f"Expected a positive number of minutes for a run, got {minutes}.")
        self.left: list[Cell] = []
        """Cells for which there was no time."""
        self._benchmark, self._clock = benchmark, clock
        self._end = float("inf") if minutes is None else clock() + 60 * minutes
        self._begun: dict[Task, float] = {}
        self._slowest: dict[tuple[type[Task], str], float] = {}
        self._lacking: set[Preparation] = set()

    def within(self, tasks: Iterable[Task]) -> Iterator[Task]:
        """Yield the tasks to start, each when it is requested by a free worker."""
        for task in tasks:
            now = self._clock()
            needed = task if isinstance(task, Preparation) else preparation_for(self._benchmark, task)
            model = replace(needed, presets=(), temperature=0.0)
            if now + self._expect_seconds(task, now) < self._end and model not in self._lacking:
                self._begun[task] = now
                yield task
            elif isinstance(task, Preparation):
                self._lacking.add(model)
            else:
                self.left.append(task)

    def _expect_seconds(self, task: Task, now: float) -> float:
        own = _kind(task)
        alike = [own] if own in self._slowest else [kind for kind in self._slowest if kind[0] is own[0]]
        under_way = [now - begun for other, begun in self._begun.items() if _kind(other) == own]
        return max([self._slowest[kind] for kind in alike] + under_way, default=0.0)

    def end(self, task: Task) -> None:
        """Record the end of a task."""
        taken = self._clock() - self._begun.pop(task)
        self._slowest[_kind(task)] = max(taken, self._slowest.get(_kind(task), 0.0))


def _kind(task: Task) -> tuple[type[Task], str]:
    return type(task), task.method if isinstance(task, Cell) else task.source


# ---- here


@contextmanager
def in_this_process(job: Job, advance: Advance) -> Iterator[Execute]:
    """Run one task after the other in this process."""
    threads = torch.get_num_threads()

    def execute(tasks: Iterable[Task]) -> Outcomes:
        for task in tasks:
            advance(task, 0, 0)
            result = do_task(job, task, advance)
            if interrupted():
                raise KeyboardInterrupt
            yield task, result

    try:
        with _watch_interruptions() as interrupted:
            yield execute
    finally:
        torch.set_num_threads(threads)
        get_resources.cache_clear()


@contextmanager
def _watch_interruptions() -> Iterator[Callable[[], bool]]:
    """Remember whether Ctrl-C was pressed, even if the exception was caught.

    An adaptation handles Ctrl-C by returning early, and other libraries may turn it into an error. Neither is the
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


# ---- in processes of this machine


@contextmanager
def in_processes(job: Job, advance: Advance, workers: int) -> Iterator[Execute]:
    """Run tasks in several processes on this machine, each with its own GPU if there are any."""
    pool = [_Worker(replace(job, device=_share_gpus(job.device, number))) for number in range(workers)]

    def execute(tasks: Iterable[Task]) -> Outcomes:
        waiting = iter(tasks)
        while True:
            for worker in pool:
                if worker.task is None and (task := next(waiting, None)) is not None:
                    advance(task, 0, 0)
                    worker.start(task)
            busy = [worker for worker in pool if worker.task is not None]
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
        # All are killed first, so that a second Ctrl-C leaves none behind.
        for worker in pool:
            worker.kill()
        for worker in pool:
            worker.stop()


def _share_gpus(device: str, number: int) -> str:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return f"cuda:{number % gpus}" if gpus > 1 and device in ("auto", "cuda") else device


@dataclass(frozen=True)
class _Over:
    """A worker's last message about a task; the other messages are its progress."""

    result: Result | None = None
    error: Exception | None = None
    gone: bool = False


class _Worker:
    """A process that does one task at a time. It is started with its first task, and replaced if it dies."""

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
        # A task that the dead process never received is not lost.
        self._begun = fresh
        # The process may die at this moment, which `outcome` will detect.
        with suppress(OSError):
            self.channel.send((self.job, task))

    def _open(self) -> None:
        # A forked torch may hang, and cannot use CUDA.
        context = get_context("spawn")
        self.channel, theirs = context.Pipe()
        # Daemons may have no children, and data loaders are some.
        self._process = context.Process(target=_serve, args=(theirs, os.getpid()))
        with _block_interrupts():
            self._process.start()
        # This copy is closed, so that the channel ends when the worker dies.
        theirs.close()

    def outcome(self, advance: Advance) -> tuple[Task, Result | None] | None:
        """Return the task and its result if it has ended; meanwhile, report its progress."""
        task = self.task
        assert task is not None
        while (message := self._receive()) is not None:
            if isinstance(message, tuple):
                self._begun = True
                advance(task, *message)
                continue
            self.task = None
            if message.error is not None:
                raise message.error
            if not message.gone:
                return task, message.result
            assert self._process is not None
            self._process.join(timeout=5)
            why = _describe_exit(self._process.exitcode)
            self.stop()
            if self._begun:
                return task, fail_task(self.job, task, why, time.monotonic() - self._started)
            self.start(task)
        return None

    def _receive(self) -> tuple[int, int] | _Over | None:
        """Receive the next message if there is one."""
        assert self._process is not None
        # This is checked before the channel is read, because a process may send a message and end.
        gone = not self._process.is_alive()
        try:
            if self.channel.poll():
                message: tuple[int, int] | _Over = self.channel.recv()
                return message
        except (EOFError, OSError):
            gone = True
        return _Over(gone=True) if gone else None

    def kill(self) -> None:
        """Kill the process; only its current task is lost."""
        if self._process is not None and self._process.pid is not None:
            self._process.kill()

    def stop(self) -> None:
        """Kill the process and release its resources."""
        self.kill()
        if self._process is not None:
            self.channel.close()
            if self._process.pid is not None:
                self._process.join()
            self._process.close()
            self._process = None


def _describe_exit(code: int | None) -> str:
    if code is None or code >= 0:
        return "its process no longer answers" if code is None else f"its process ended with exit code {code}"
    name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
    return f"its process was ended by {name}" + (" (killed, or out of memory)" if name == "SIGKILL" else "")


@contextmanager
def _block_interrupts() -> Iterator[None]:
    """Make a process that is started inside ignore Ctrl-C, which its parent handles."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # Else the start would run the tracker, and unblock the signal again.
    resource_tracker.ensure_running()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _serve(channel: Connection, parent: int) -> None:
    """Run tasks from the channel and send back their results, as long as there is a parent.

    An unexpected error ends the process, with its traceback on standard error.
    """
    own = parent_process()

    def follow_parent() -> None:
        # On Windows, the process id of the parent outlives it.
        while os.getppid() == parent and (own is None or own.is_alive()):
            time.sleep(SECONDS_BETWEEN_PARENT_CHECKS)
        os._exit(1)

    if not hasattr(signal, "pthread_sigmask"):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=follow_parent, daemon=True).start()
    sent = 0.0

    def advance(_: Task, done: int, total: int) -> None:
        nonlocal sent
        if time.monotonic() - sent >= SECONDS_BETWEEN_TICKS:
            sent = time.monotonic()
            channel.send((done, total))

    # The channel ends when the parent has no more tasks.
    with suppress(EOFError, OSError):
        while True:
            job, task = channel.recv()
            channel.send((0, 0))
            try:
                over = _Over(do_task(job, task, advance))
            except (ShiftmendError, OSError) as error:
                over = _Over(error=error)
            channel.send(over)


# ---- in threads that share one GPU


@contextmanager
def in_gpu_threads(job: Job, advance: Advance, count: int) -> Iterator[Execute]:
    """Run tasks in `count` threads that share one GPU and the data, each with its own stream and resources."""
    benchmark = find(job.benchmark)
    root = Path(job.root) if job.root else None
    data = Cache(TARGETS_IN_MEMORY)
    own = threading.local()
    stopped, turn = threading.Event(), threading.Lock()
    ended = itertools.count(1)

    def advance_or_stop(task: Task, done: int, total: int) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        advance(task, done, total)

    def run(task: Task) -> Result | None:
        with share_gpu(turn):
            # While this thread waited for its turn, another may have failed.
            advance_or_stop(task, 0, 0)
            if not hasattr(own, "resources"):
                own.resources = Resources(benchmark, Path(job.home), root, job.device, data, job.compile)
                own.stream = torch.cuda.Stream(own.resources.device)
            with torch.cuda.stream(own.stream):
                result = do_task(job, task, advance_or_stop, own.resources)
                own.stream.synchronize()
                # Objects that were in use during other threads' collections have become old, so old garbage is
                # collected sometimes.
                gc.collect(2 if next(ended) % TASKS_PER_COLLECTION == 0 else 1)
                release_unused_memory(own.resources.device)
        if result is None:
            return None
        # Memory is that of all threads together, and time that of one thread among others. Stored manifests call the
        # number of threads `lanes`.
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

    # Garbage is collected between tasks.
    with pause_garbage_collection(), _switch_often(), _torch_threads(job.threads), ThreadPoolExecutor(count) as pool:
        try:
            yield execute
        except BaseException:
            stopped.set()
            raise


@contextmanager
def _torch_threads(number: int) -> Iterator[None]:
    """Set the number of torch's CPU threads; 0 keeps it unchanged."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _switch_often() -> Iterator[None]:
    """Shorten Python's switch interval: to replay a graph takes microseconds, which must not wait for milliseconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


# ---- on a Ray cluster


@contextmanager
def on_ray(job: Job, workers: int) -> Iterator[Execute]:
    """Run tasks on the connected Ray cluster, else on that in RAY_ADDRESS, else on a local one.

    Source models and profiles are sent with the tasks, so machines need not share a disk. Data sets are not sent: each
    machine needs them under the same data root, and a writable folder under the path of the results. A cell gets one
    CPU core, and one GPU if the cluster has any.
    """
    ray: Any = require("ray", "ray")
    benchmark = find(job.benchmark)
    pending: dict[Any, Task] = {}

    def execute(tasks: Iterable[Task]) -> Outcomes:
        gpus = 1 if _wants_gpu(job.device, ray.cluster_resources()) else 0
        # A process sees only the GPU that Ray assigns to it.
        there = replace(job, device="cuda") if gpus else job
        remote = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(_do_task_on_ray)
        bundles: dict[str, Any] = {}
        for task in tasks:
            pattern = _file_pattern(benchmark, task)
            if pattern not in bundles:
                bundles[pattern] = ray.put(_bundle(Path(job.home), pattern))
            pending[remote.remote(there, task, pattern, bundles[pattern])] = task
        while pending:
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=1.0)
            for reference in ready:
                task = pending.pop(reference)
                try:
                    result, files = ray.get(reference)
                except ray.exceptions.RayTaskError as error:
                    # The task itself failed, not its worker.
                    cause = error.cause if isinstance(error.cause, Exception) else error
                    raise cause from None
                except ray.exceptions.RayError as error:
                    first = (str(error).strip() or type(error).__name__).splitlines()[0]
                    yield task, fail_task(job, task, f"its worker on the cluster is gone ({first})")
                    continue
                _unpack(Path(job.home), files)
                yield task, result

    with _connect(ray, workers):
        try:
            yield execute
        finally:
            # The remaining results are no longer needed.
            for reference in pending:
                with suppress(ray.exceptions.RayError):
                    ray.cancel(reference, force=True)


@contextmanager
def _connect(ray: Any, workers: int) -> Iterator[None]:
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
        # Ray replaces the caller's signal handler.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _wants_gpu(device: str, resources: dict[str, float]) -> bool:
    """Tell whether tasks need a GPU. A requested GPU that is not there yet is waited for, since clusters may grow."""
    return device.startswith("cuda") or (device == "auto" and resources.get("GPU", 0) >= 1)


def _do_task_on_ray(
    job: Job, task: Task, pattern: str, bundle: dict[str, bytes]
) -> tuple[Result | None, dict[str, bytes]]:
    """Do a task; a preparation also returns the files that it made."""
    home = Path(job.home)
    _unpack(home, bundle)
    result = do_task(job, task, lambda *_: None)
    made = _bundle(home, pattern) if isinstance(task, Preparation) else {}
    return result, {name: content for name, content in made.items() if name not in bundle}


def _file_pattern(benchmark: Benchmark, task: Task) -> str:
    """Return a pattern for source models and profiles that may belong to the task; only workers know exactly which."""
    needed = task if isinstance(task, Preparation) else preparation_for(benchmark, task)
    return f"{benchmark.sources[needed.source].network}-*-{needed.seed}"


def _bundle(home: Path, pattern: str) -> dict[str, bytes]:
    """Read all files below `home` that match a pattern; return their contents by relative path."""
    found = (*home.glob(f"sources/{pattern}.safetensors"), *home.glob(f"profiles/{pattern}-*.safetensors"))
    return {str(file.relative_to(home)): file.read_bytes() for file in sorted(found)}


def _unpack(home: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        if not (home / name).exists():
            write_atomically(home / name, content)
