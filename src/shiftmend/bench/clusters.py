"""Cells on a Ray cluster."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from shiftmend.bench.base import Benchmark
from shiftmend.bench.cells import Result
from shiftmend.bench.executors import Execute, Outcomes
from shiftmend.bench.suite import find
from shiftmend.bench.tasks import Job, Preparation, Task, lost, preparation, work
from shiftmend.errors import ShiftmendError
from shiftmend.files import write_atomically


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
