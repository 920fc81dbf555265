"""Where cells are run: in this process, in several on this machine, or on a Ray cluster.

Every executor takes tasks and gives back what came of each as soon as it is there, in any order. A worker that dies
costs its own task only. There is no scheduler here: processes take the next task when they are free, and Ray does its
own.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from shiftmend.bench.cells import Cell, Result
from shiftmend.bench.running import run_cell
from shiftmend.bench.suite import find
from shiftmend.bench.workshop import Workshop
from shiftmend.errors import ShiftmendError


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


@dataclass(frozen=True)
class Preparation:
    """A source model and its profile, which cells share."""

    source: str
    seed: int
    temperature: float

    def __str__(self) -> str:
        return f"source model {self.source}, seed {self.seed}"


Task = Cell | Preparation
Advance = Callable[[Task, int, int], None]
"""Called with a task, how much of it is done, and how much there is (0 if that is not known)."""


class WorkerError(ShiftmendError):
    """The process that ran a task is gone."""


@functools.cache
def _workshop(job: Job) -> Workshop:
    if job.threads:
        torch.set_num_threads(job.threads)
    return Workshop(find(job.benchmark), Path(job.home), Path(job.root) if job.root else None, job.device)


def work(job: Job, task: Task, advance: Advance) -> Result | None:
    """Do one task in this process; a preparation gives nothing but its files."""
    workshop = _workshop(job)
    if isinstance(task, Cell):
        return run_cell(workshop, task, rates=job.rates, tick=lambda done, total: advance(task, done, total))
    epochs, done = workshop.benchmark.sources[task.source].epochs, 0

    def tick() -> None:
        nonlocal done
        done += 1
        advance(task, done, epochs)

    workshop.model(task.source, task.seed, tick)
    workshop.profile(task.source, task.seed, task.temperature)
    return None


def inline(job: Job, tasks: Sequence[Task], advance: Advance) -> Iterator[tuple[Task, Result | None]]:
    """One task after the other, here."""
    threads = torch.get_num_threads()
    try:
        for task in tasks:
            advance(task, 0, 0)
            yield task, work(job, task, advance)
    finally:
        torch.set_num_threads(threads)
        _workshop.cache_clear()


def processes(job: Job, tasks: Sequence[Task], advance: Advance, workers: int) -> Iterator[tuple[Task, Result | None]]:
    """Several processes on this machine, each with its GPU if there are any.

    Each worker is a pool of its own: one that dies breaks no other.
    """
    crew = [_Worker(replace(job, device=_device(job.device, number))) for number in range(min(workers, len(tasks)))]
    waiting = list(reversed(tasks))
    try:
        while waiting or any(worker.task for worker in crew):
            for worker in crew:
                if worker.task is None and waiting:
                    task = waiting.pop()
                    advance(task, 0, 0)
                    worker.start(task)
            wait([worker.future for worker in crew if worker.future], timeout=0.2, return_when=FIRST_COMPLETED)
            for worker in crew:
                worker.report(advance)
                if worker.future is not None and worker.future.done():
                    yield worker.finish()
    finally:
        for worker in crew:
            worker.stop()


class _Worker:
    """A process that does one task at a time, and is replaced if it dies."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.task: Task | None = None
        self.future: Future[Result | None] | None = None
        self._open()

    def _open(self) -> None:
        context = get_context("spawn")  # a forked torch may hang, and cannot use CUDA
        self._news = context.SimpleQueue()
        self._pool = ProcessPoolExecutor(1, mp_context=context, initializer=_begin, initargs=(self._news, os.getpid()))

    def start(self, task: Task) -> None:
        self.task = task
        self.future = self._pool.submit(_work_there, self.job, task)

    def report(self, advance: Advance) -> None:
        while self.task is not None and not self._news.empty():
            done, total = self._news.get()
            advance(self.task, done, total)

    def finish(self) -> tuple[Task, Result | None]:
        assert self.task is not None and self.future is not None  # noqa: PT018
        task, future, self.task, self.future = self.task, self.future, None, None
        try:
            return task, future.result()
        except BrokenProcessPool:
            self.stop()
            self._open()
            return task, _lost(self.job, task, "its process died (out of memory, or killed)")

    def stop(self) -> None:
        """At once: what the process was doing is lost, and only that."""
        for process in list((self._pool._processes or {}).values()):
            process.kill()
        with suppress(Exception):
            self._pool.shutdown(wait=True, cancel_futures=True)


_news: Any = None


def _begin(news: Any, parent: int) -> None:
    """In a new worker: Ctrl-C is for the parent to answer, and the worker does not outlive it."""
    global _news
    _news = news
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _work_there(job: Job, task: Task) -> Result | None:
    return work(job, task, lambda _, done, total: _news.put((done, total)))


def _device(device: str, number: int) -> str:
    """Workers share the GPUs among them."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return f"cuda:{number % gpus}" if gpus > 1 and device in ("auto", "cuda") else device


def _lost(job: Job, task: Task, why: str) -> Result:
    """What is recorded for a cell whose worker is gone; without its source model nothing can go on."""
    if isinstance(task, Preparation):
        raise WorkerError(f"{task} could not be made: {why}")
    benchmark = find(job.benchmark)
    return Result(task, benchmark.origin(task.shift, Path(job.root) if job.root else None), error=why)


def on_ray(
    job: Job, tasks: Sequence[Task], advance: Advance, workers: int | None
) -> Iterator[tuple[Task, Result | None]]:
    """Hand the tasks to Ray: to a running cluster if RAY_ADDRESS names one, else to one started here.

    Source models and profiles travel with the tasks, so machines need not share a disk; data sets do not travel: each
    machine needs them under the same data root.
    """
    try:
        import ray
    except ImportError as error:
        raise ShiftmendError("--executor ray needs Ray: pip install 'shiftmend[ray]'") from error
    mine = not ray.is_initialized()
    if mine:
        options: dict[str, Any] = (
            {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": workers, "include_dashboard": False}
        )
        ray.init(log_to_driver=False, **options)
    try:
        gpu = 1 if job.device != "cpu" and ray.cluster_resources().get("GPU") else 0
        remote = ray.remote(num_cpus=1, num_gpus=gpu, max_retries=0)(_work_on_ray)
        bundle = ray.put(_bundle(Path(job.home)))
        pending = {remote.remote(job, task, bundle): task for task in tasks}
        for task in tasks:
            advance(task, 0, 0)
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
                    first = str(error).strip().splitlines()[0]
                    yield task, _lost(job, task, f"its worker on the cluster died ({first})")
                    continue
                _unpack(Path(job.home), files)
                yield task, result
    finally:
        if mine:
            ray.shutdown()


def _work_on_ray(job: Job, task: Task, bundle: dict[str, bytes]) -> tuple[Result | None, dict[str, bytes]]:
    """A preparation also gives the files it made back."""
    home = Path(job.home)
    _unpack(home, bundle)
    result = work(job, task, lambda *_: None)
    return result, _bundle(home) if isinstance(task, Preparation) else {}


def _bundle(home: Path) -> dict[str, bytes]:
    """Source models and profiles, by their paths below `home`."""
    return {
        str(file.relative_to(home)): file.read_bytes()
        for folder in ("sources", "profiles")
        for file in sorted((home / folder).glob("*.safetensors"))
    }


def _unpack(home: Path, files: dict[str, bytes]) -> None:
    from shiftmend.files import write_atomically

    for name, content in files.items():
        if not (home / name).exists():
            write_atomically(home / name, content)
