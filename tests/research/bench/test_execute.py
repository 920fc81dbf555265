""""""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from multiprocessing import Pipe, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import alive, eventually, seen, silent
from safetensors.torch import load_file
from tiny import CELLS, DOOMED, SEEDS, TINY

from shiftmend.errors import DataError, ShiftmendError
from shiftmend.methods import METHODS
from shiftmend.research.bench import execute as execution
from shiftmend.research.bench.benchmark import Cell, Result, Setting
from shiftmend.research.bench.execute import (
    TASKS_PER_COLLECTION,
    Advance,
    Job,
    Preparation,
    Task,
    TimeLimit,
    fail_task,
    get_resources,
    in_gpu_threads,
    in_processes,
    in_this_process,
    list_preparations,
)
from shiftmend.research.bench.plan import plan
from shiftmend.research.bench.resources import Resources
from shiftmend.research.bench.run import run
from shiftmend.research.bench.store import STORE, Store
from shiftmend.research.bench.suite import find
from shiftmend.utils.gpu_sharing import is_sharing_gpu, release_gpu, share_gpu

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
    needed = list_preparations(TINY, cells)
    told: list[tuple[Task, int, int]] = []
    with in_processes(job, lambda *news: told.append(news), workers=2) as execute:
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
    worker: Any = execution._Worker(job)

    def another(worker: Any) -> None:
        worker.channel, end = Pipe()
        worker._process = Mortal()
        theirs.append(end)

    def die() -> None:
        worker._process.alive = False
        theirs[-1].close()

    monkeypatch.setattr(execution._Worker, "_open", another)
    another(worker)
    theirs[0].close()
    worker.start(CELL)
    die()
    assert worker.outcome(silent) is None
    assert theirs[1].recv() == (job, CELL)
    die()
    task, result = worker.outcome(silent)
    assert (task, result.cell, result.error) == (CELL, CELL, execution._describe_exit(-signal.SIGKILL))
    assert (len(theirs), worker.task) == (2, None)


@pytest.mark.slow
def test_an_error_in_a_worker_is_the_caller_s(job: Job, tmp_path: Path) -> None:
    needed: list[Task] = [Preparation("plain", 1, 0.01)]
    with in_processes(job, silent, workers=2) as execute:
        (tmp_path / "root" / "break-source").touch()
        with pytest.raises(DataError, match="broken on purpose"):
            list(execute(needed))
        (tmp_path / "root" / "break-source").unlink()
        (tmp_path / "root" / "kill-source").touch()
        expected = r"plain, seed 1.*SIGKILL"
        with pytest.raises(ShiftmendError, match=expected):
            list(execute(needed))
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_nothing_of_a_run_stays_in_this_process(job: Job) -> None:
    cells = plan(TINY, methods=["adabn"], shifts=["dark"], seeds=[1])
    handler, threads = signal.getsignal(signal.SIGINT), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        inside = []
        with in_this_process(job, lambda *_: inside.append(torch.get_num_threads())) as execute:
            list(execute([*list_preparations(TINY, cells), *cells]))
        assert inside[-1] == 1
        assert torch.get_num_threads() == 2
        with in_this_process(job, silent) as execute:
            next(execute(cells))  # and no further
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert signal.getsignal(signal.SIGINT) is handler
    assert get_resources.cache_info().currsize == 0  # models and data


def test_what_swallows_ctrl_c_gives_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adaptation hands back what it has when interrupted; other code may turn the interruption into an error."""

    def work(job: Job, task: Task, advance: Advance) -> Result:
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
            waited.append(task)  # as if nobody had pressed anything
        return Result(CELL, "own", error="something broke")

    monkeypatch.setattr(execution, "do_task", work)
    given, waited = [], list[Task]()
    with pytest.raises(KeyboardInterrupt), in_this_process(Job(FILE, "nowhere"), silent) as execute:
        given.extend(execute([CELL, CELL]))
    assert given == waited == []


def test_from_another_thread(job: Job) -> None:
    """Signals can be caught in the main thread only."""
    given: list[Any] = []

    def go() -> None:
        with in_this_process(job, silent) as execute:
            given.extend(execute([Preparation("plain", 1, 0.01)]))

    thread = threading.Thread(target=go)
    thread.start()
    thread.join()
    assert given == [(Preparation("plain", 1, 0.01), None)]


@contextmanager
def serving(monkeypatch: pytest.MonkeyPatch, work: Callable[..., None]) -> Iterator[Connection]:
    """A worker that has been given a cell, and the end of its pipe."""
    monkeypatch.setattr(execution, "do_task", work)
    ours, theirs = Pipe()
    worker = threading.Thread(target=execution._serve, args=(theirs, os.getppid()))
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
        assert heard[-1] == execution._Over()


@pytest.mark.slow
def test_workers_need_no_masks_for_signals(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows has none, and no tracker of resources that could be started."""
    resource_tracker.ensure_running()
    monkeypatch.setattr(execution, "resource_tracker", None)
    monkeypatch.delattr(signal, "pthread_sigmask")
    (needed,) = list_preparations(TINY, plan(TINY, methods=["source-only"], seeds=[1]))
    with in_processes(job, silent, workers=1) as execute:
        assert list(execute([needed])) == [(needed, None)]


@pytest.mark.slow
def test_a_worker_ends_with_its_parent_though_the_number_of_that_stays() -> None:
    code = """if True:
        import os, signal
        from multiprocessing import Pipe
        from types import SimpleNamespace
        from shiftmend.research.bench import execute as execution
        execution.parent_process = lambda: SimpleNamespace(is_alive=lambda: False)
        execution.time.sleep = None
        ours, theirs = Pipe()
        execution._serve(theirs, os.getppid())
    """
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 1


def test_an_unexpected_error_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its traceback goes to standard error, and the parent tells how the process ended."""

    def work(*given: Any) -> None:
        raise KeyError("unexpected")

    monkeypatch.setattr(execution, "do_task", work)
    ours, theirs = Pipe()
    ours.send((Job(FILE, "nowhere"), CELL))
    with pytest.raises(KeyError, match="unexpected"):
        execution._serve(theirs, os.getppid())


def test_sentences_for_the_user_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (DataError("no such folder"), FileNotFoundError(2, "No such file", "x")):

        def work(*given: Any, error: Exception = error) -> None:
            raise error

        with serving(monkeypatch, work) as ours:
            assert ours.recv() == (0, 0)
            sent = ours.recv().error
        assert (type(sent), str(sent)) == (type(error), str(error))


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
    assert execution._describe_exit(code) == f"its process {said}"


def test_lost_cells_and_lost_preparations(job: Job) -> None:
    result = fail_task(job, CELL, "its process left", 1.23456)
    assert (result.cell, result.error, result.seconds, result.last) == (CELL, "its process left", 1.235, None)
    with pytest.raises(ShiftmendError, match="could not be made"):
        fail_task(job, Preparation("shot", 3, 0.01), "its process left")


def test_workers_share_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [execution._share_gpus("auto", number) for number in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert execution._share_gpus("cuda:1", 0) == "cuda:1"
    assert execution._share_gpus("cpu", 1) == "cpu"


# ---- Several cells at once on one GPU

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
TINY_FILE = Path(__file__).parents[2] / "helpers" / "tiny.py"


def test_threads_run_one_at_a_time_but_where_they_wait() -> None:
    lock = threading.Lock()
    inside, most, waiting, most_waiting = [0], [0], [0], [0]
    counting = threading.Lock()

    def count(now: list[int], most_seen: list[int], by: int) -> None:
        with counting:
            now[0] += by
            most_seen[0] = max(most_seen[0], now[0])

    def lane() -> None:
        with share_gpu(lock):
            assert is_sharing_gpu()
            for _ in range(5):
                count(inside, most, 1)
                time.sleep(0.001)
                count(inside, most, -1)
                with release_gpu():
                    count(waiting, most_waiting, 1)
                    time.sleep(0.02)
                    count(waiting, most_waiting, -1)
        assert not is_sharing_gpu()

    threads = [threading.Thread(target=lane) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    assert most_waiting[0] > 1
    assert not lock.locked()


def test_without_lanes_nothing_is_given_up() -> None:
    assert not is_sharing_gpu()
    with release_gpu():
        assert not is_sharing_gpu()


class NoStream:
    """In place of a CUDA stream."""

    def __init__(self, device: torch.device) -> None: ...

    def synchronize(self) -> None: ...


@pytest.mark.slow
def test_source_models_and_cells_run_in_threads_and_give_what_they_give_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, where nothing is replayed: threads run one at a time throughout."""
    monkeypatch.setattr(torch.cuda, "Stream", NoStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    cells = plan(find(f"{TINY_FILE}:GENTLE"))
    found: dict[str, dict[str, Result]] = {}
    for name, executor in (("alone", in_this_process), ("together", functools.partial(in_gpu_threads, count=3))):
        job = Job(f"{TINY_FILE}:GENTLE", str(tmp_path / name), str(tmp_path), "cpu")
        ran: list[tuple[Task, int]] = []

        def advance(task: Task, done: int, total: int, ran: list[tuple[Task, int]] = ran) -> None:
            ran.append((task, threading.get_ident()))

        with executor(job, advance) as execute:
            outcomes = {**dict(execute(list_preparations(find(job.benchmark), cells))), **dict(execute(cells))}
        assert all(isinstance(task, Cell) == (result is not None) for task, result in outcomes.items())
        assert {task for task, _ in ran} == set(outcomes)
        assert len({thread for _, thread in ran}) == (1 if name == "alone" else 3)
        found[name] = {str(task): result for task, result in outcomes.items() if result is not None}
    assert found["alone"].keys() == found["together"].keys()
    for cell, result in found["alone"].items():
        other = found["together"][cell]
        assert not result.failed
        assert (result.last, result.signals) == (other.last, other.signals)
        assert other.manifest["lanes"] == 3
    files = [sorted((tmp_path / name / "sources").glob("*.safetensors")) for name in ("alone", "together")]
    assert [file.name for file in files[0]] == [file.name for file in files[1]]
    assert len(files[0]) == len(SEEDS)
    for one, other in zip(*(map(load_file, group) for group in files), strict=True):
        assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_an_error_in_a_lane_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", NoStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    others = threading.Event()
    ended_by_themselves: list[Task] = []

    def work(job: Job, task: Task, advance: Advance, resources: Resources) -> None:
        if task.seed == 1:
            with release_gpu():
                assert others.wait(10)
            raise DataError("broken on purpose")
        for epoch in range(3000):
            advance(task, epoch, 0)
            others.set()
            with release_gpu():
                time.sleep(0.001)
        ended_by_themselves.append(task)

    monkeypatch.setattr("shiftmend.research.bench.execute.do_task", work)
    job = Job(f"{TINY_FILE}:GENTLE", str(tmp_path), str(tmp_path), "cpu")
    tasks = [Preparation("plain", seed, 0.01) for seed in range(1, 9)]
    before = torch.get_num_threads()
    with (
        in_gpu_threads(job, lambda task, done, total: None, 3) as execute,
        pytest.raises(DataError, match="broken on purpose"),
    ):
        list(execute(tasks))
    assert ended_by_themselves == []
    assert torch.get_num_threads() == before


def test_lanes_have_as_many_threads_of_torch_as_the_job_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", NoStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    found: list[int] = []
    monkeypatch.setattr(
        "shiftmend.research.bench.execute.do_task", lambda *given: found.append(torch.get_num_threads())
    )
    before = torch.get_num_threads()
    for threads in (1, 3, 0):
        job = Job(f"{TINY_FILE}:GENTLE", str(tmp_path), str(tmp_path), "cpu", threads=threads)
        with in_gpu_threads(job, lambda task, done, total: None, 2) as execute:
            list(execute([Preparation("plain", 1, 0.01)]))
        assert torch.get_num_threads() == before
    assert found == [1, 3, before]


def test_a_lane_takes_a_task_when_it_is_free_and_has_one_workshop_and_one_stream_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And neither memory, which is that of all lanes, nor what was set for the run outlives it."""
    seen: list[Any] = []
    rooms: list[Resources] = []
    before = sys.getswitchinterval()

    @contextmanager
    def within(stream: NoStream) -> Iterator[None]:
        seen.append("stream")
        yield
        seen.append("left")

    def work(job: Job, task: Cell, advance: Advance, resources: Resources) -> Result:
        assert sys.getswitchinterval() < before / 10
        seen.append("work")
        rooms.append(resources)
        return Result(task, "own", peak_memory=5)

    def drawn() -> Iterator[Task]:
        for cell in cells:
            seen.append("drawn")
            yield cell

    monkeypatch.setattr(torch.cuda, "Stream", NoStream)
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr("shiftmend.research.bench.execute.do_task", work)
    monkeypatch.setattr(
        "shiftmend.research.bench.execute.release_unused_memory", lambda device: seen.append("given back")
    )
    cells = plan(find(f"{TINY_FILE}:GENTLE"))[:2]
    job = Job(f"{TINY_FILE}:GENTLE", str(tmp_path), str(tmp_path / "data"), "cpu")
    with in_gpu_threads(job, lambda task, done, total: seen.append((done, total)), 1) as execute:
        for _, result in execute(drawn()):
            assert result is not None
            seen.append((result.peak_memory, result.manifest["lanes"]))
    assert seen == ["drawn", (0, 0), "stream", "work", "given back", "left", (None, 1)] * 2
    assert rooms[0] is rooms[1]
    assert rooms[0].root == tmp_path / "data"
    assert sys.getswitchinterval() == before


def test_what_the_caller_raises_is_the_caller_s_and_ends_the_lanes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", NoStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    leaving = threading.Event()
    ended_by_themselves: list[Task] = []

    class Pool(ThreadPoolExecutor):
        def shutdown(self, *given: Any, **options: Any) -> None:
            leaving.set()
            super().shutdown(*given, **options)

    def work(job: Job, task: Task, advance: Advance, resources: Resources) -> None:
        if task.seed > 1:
            with release_gpu():
                assert leaving.wait(10)
            advance(task, 1, 2)
            ended_by_themselves.append(task)

    def full_disk() -> None:
        with in_gpu_threads(job, lambda task, done, total: None, 2) as execute:
            outcomes = execute([Preparation("plain", seed, 0.01) for seed in (1, 2)])
            next(outcomes)
            raise OSError("the disk is full")

    monkeypatch.setattr("shiftmend.research.bench.execute.do_task", work)
    monkeypatch.setattr("shiftmend.research.bench.execute.ThreadPoolExecutor", Pool)
    job = Job(f"{TINY_FILE}:GENTLE", str(tmp_path), str(tmp_path), "cpu")
    with pytest.raises(OSError, match="the disk is full"):
        full_disk()
    assert ended_by_themselves == []


class Cycle:
    """Only a collection of garbage ends it, as some layers of torch."""

    def __init__(self) -> None:
        self.own = self


@pytest.mark.slow
def test_what_a_task_leaves_behind_is_collected_in_the_end_however_long_it_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", NoStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    ended = threading.Semaphore(0)
    left: list[weakref.ref[Cycle]] = []

    def work(job: Job, task: Task, advance: Advance, resources: Resources) -> None:
        if task.seed > 1:
            ended.release()
            return
        kept = Cycle()
        left.append(weakref.ref(kept))
        with release_gpu():
            for _ in range(4):
                assert ended.acquire(timeout=10)

    monkeypatch.setattr("shiftmend.research.bench.execute.do_task", work)
    job = Job(f"{TINY_FILE}:GENTLE", str(tmp_path), str(tmp_path), "cpu")
    with in_gpu_threads(job, lambda task, done, total: None, 2) as execute:
        for first, last in ((1, 5), (6, 5 + TASKS_PER_COLLECTION)):
            list(execute([Preparation("plain", seed, 0.01) for seed in range(first, last + 1)]))
        assert not gc.isenabled()
        assert [there() for there in left] == [None]
    assert gc.isenabled()


def _found(benchmark: str, folder: Path, root: Path, **options: Any) -> dict[Cell, Result]:
    run(f"{TINY_FILE}:{benchmark}", folder, root=root, device="cuda", progress=False, **options)
    with Store(folder / "results.sqlite", read_only=True) as store:
        return {result.cell: result for result in store.results()}


def _close(one: Result, other: Result) -> None:
    assert one.last is not None
    assert other.last is not None
    assert one.last.accuracy == pytest.approx(other.last.accuracy, abs=0.06)
    assert one.signals["slices"] == pytest.approx(other.signals["slices"], rel=0.05)


@pytest.mark.gpu
@gpu
def test_what_fails_fails_in_lanes_as_well(tmp_path: Path) -> None:
    alone = _found("TINY", tmp_path / "alone", tmp_path, workers=1)
    together = _found("TINY", tmp_path / "together", tmp_path, workers=3)
    assert {cell: result.failed for cell, result in alone.items()} == {
        cell: result.failed for cell, result in together.items()
    }
    assert all(result.manifest["lanes"] == 3 for result in together.values())


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("compile", [False, True])
def test_lanes_give_what_one_cell_after_the_other_gives(tmp_path: Path, compile: bool) -> None:
    """Source models, dropout and adaptation; compiled or not."""
    alone = _found("GENTLE", tmp_path / "alone", tmp_path, workers=1, shifts=["noisy"])
    together = _found("GENTLE", tmp_path / "together", tmp_path, workers=3, shifts=["noisy"], compile=compile)
    assert alone.keys() == together.keys()
    assert not any(result.failed for result in (*alone.values(), *together.values()))
    for cell, result in alone.items():
        other = together[cell]
        assert other.manifest.get("compile", False) == (compile and METHODS[cell.method].trains)
        assert not any("captured" in warning for warning in other.manifest.get("warnings", ()))
        _close(result, other)
    sources = list((tmp_path / "alone" / "sources").glob("*.safetensors"))
    assert len(sources) == len(SEEDS)
    for file in sources:
        one, other = (load_file(tmp_path / name / "sources" / file.name) for name in ("alone", "together"))
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, rtol=1e-2, atol=1e-3)


# ---- A run with a limited time, with a clock that the tests turn


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
        limit.end(task)
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
        limit, clock, [*list_preparations(TINY, slow), slow[0], unknown[0]], {"source": 30.0, "fr": 10.0, "adabn": 10.0}
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
        limit.end(task)
    assert next(tasks, None) is None  # 27 seconds are left: another of 28 would not fit
    assert len(limit.left) == 2


def test_cells_whose_source_model_there_was_no_time_for_are_left() -> None:
    """Whichever of the model's profiles they start from."""
    methods = {"adabn": Setting("adabn"), "sliced": Setting("fr", preset="sliced")}
    two_profiles = replace(TINY, settings={"offline": methods})
    clock = Clock()
    limit = TimeLimit(two_profiles, 1.0, clock)
    cells = plan(two_profiles, "offline", methods=["adabn", "sliced"], seeds=[1, 2])
    needed = list_preparations(two_profiles, cells)
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
    limit.end(first)
    third = next(tasks)
    clock.seconds += 15.0
    limit.end(second)  # took 35: a fourth would end at 70
    limit.end(third)
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
    with pytest.raises(DataError, match="minutes"):
        TimeLimit(TINY, minutes)


# ----


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of two workers as `on_ray` starts it where there is none; tests find it and leave it running."""
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    before = signal.getsignal(signal.SIGTERM)
    with execution._connect(ray, workers=2):
        assert ray.cluster_resources()["CPU"] == 2
        yield ray
        assert ray.is_initialized()
    assert not ray.is_initialized()
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.mark.slow
def test_the_same_results_and_a_dead_worker_costs_its_cell(cluster: Any, tmp_path: Path, root: Path) -> None:
    (root / "kill-noisy").touch()
    given: dict[str, Any] = {"root": root, "device": "cpu", "seeds": [1]}
    cells, doomed = CELLS // 2, DOOMED // 2
    first = run(FILE, tmp_path / "there", executor="ray", workers=2, **given)
    assert (first.done, len(first.failed)) == (cells - doomed - 1, doomed + 1)
    (dead,) = (result for result in first.failed if result.cell.method != "doomed")
    assert dead.cell.shift == "noisy"
    assert str(dead.error).startswith("its worker on the cluster is gone (The worker died unexpectedly")
    assert os.getpid() not in seen(root)

    again = run(FILE, tmp_path / "there", executor="ray", workers=2, **given)
    assert (again.already, again.done, len(again.failed)) == (cells - doomed - 1, 1, doomed)
    run(FILE, tmp_path / "here", workers=1, **given)
    with Store(tmp_path / "there" / STORE) as there, Store(tmp_path / "here" / STORE) as here:
        pairs = list(zip(there.results(status="done"), here.results(status="done"), strict=True))
    assert len(pairs) == cells - doomed
    for one, other in pairs:
        assert (one.cell, one.last, one.best, one.selected) == (other.cell, other.last, other.best, other.selected)
        assert one.signals == other.signals
        assert one.restoration_distance == other.restoration_distance
    for folder in ("sources", "profiles"):
        names = [sorted(file.name for file in (tmp_path / side / folder).iterdir()) for side in ("there", "here")]
        assert len(names[0]) == 2
        assert names[0] == names[1]


def test_preparations_that_fail_end_the_run_in_a_sentence(cluster: Any, tmp_path: Path, root: Path) -> None:
    given: dict[str, Any] = {"root": root, "device": "cpu", "executor": "ray", "methods": ["adabn"], "seeds": [1]}
    (root / "break-source").touch()
    with pytest.raises(DataError, match="broken on purpose") as caught:
        run(FILE, tmp_path / "home", **given)
    assert type(caught.value) is DataError
    (root / "break-source").unlink()
    (root / "kill-source").touch()
    with pytest.raises(ShiftmendError, match=r"plain, seed 1.*worker"):
        run(FILE, tmp_path / "home", **given)


@pytest.mark.slow
def test_what_nobody_waits_for_is_cancelled(cluster: Any, tmp_path: Path, root: Path) -> None:
    """On a cluster that is not ours and goes on running."""
    job = Job(FILE, str(tmp_path), str(root), "cpu", threads=1)
    cells = plan(TINY)
    with in_this_process(job, silent) as execute:
        list(execute(list_preparations(TINY, cells)))
    (root / "slow").touch()
    with execution.on_ray(job, 2) as execute:
        next(execute(cells))
    # all of them would take many times as long
    assert eventually(lambda: cluster.available_resources().get("CPU") == 2, seconds=10)


@pytest.mark.slow
def test_files_travel_to_workers_without_a_shared_disk(tmp_path: Path, root: Path) -> None:
    near, far, elsewhere = (tmp_path / name for name in ("near", "far", "elsewhere"))
    task: Task = Preparation("plain", 1, 0.01)
    pattern = execution._file_pattern(TINY, task)
    job = Job(FILE, str(far), str(root), "cpu")
    result, files = execution._do_task_on_ray(job, task, pattern, {})
    assert result is None
    assert sorted(Path(name).parent.name for name in files) == ["profiles", "sources"]
    execution._unpack(near, files)
    assert execution._bundle(near, pattern) == files

    (cell,) = plan(TINY, methods=["adabn"], shifts=["dark"], seeds=[1])
    assert execution._file_pattern(TINY, cell) == pattern
    before = {name: (near / name).stat().st_mtime_ns for name in files}
    bundle = execution._bundle(near, pattern)
    result, made = execution._do_task_on_ray(Job(FILE, str(elsewhere), str(root), "cpu"), cell, pattern, bundle)
    assert result is not None
    assert not result.failed
    assert made == {}  # the source model was not trained again
    assert {name: (elsewhere / name).read_bytes() for name in files} == files
    assert execution._do_task_on_ray(job, task, pattern, bundle) == (None, {})
    execution._unpack(near, files)
    assert {name: (near / name).stat().st_mtime_ns for name in files} == before
    other = execution._file_pattern(TINY, Preparation("plain", 11, 0.01))  # seed 11 is not seed 1
    assert execution._bundle(near, other) == {}


def test_a_gpu_for_each_task_where_there_are_some() -> None:
    assert execution._wants_gpu("auto", {"CPU": 4.0, "GPU": 2.0})
    assert execution._wants_gpu("cuda", {"CPU": 4.0})  # the cluster may still grow
    assert not execution._wants_gpu("auto", {"CPU": 4.0})
    assert not execution._wants_gpu("cpu", {"CPU": 4.0, "GPU": 2.0})


def test_without_ray(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # None stands for a module that cannot be imported.
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ShiftmendError, match=r"shiftmend\[ray\]"):
        run(FILE, tmp_path / "home", root=root, executor="ray")


class Pretended:
    """As much of Ray as an executor touches; tasks run here, when they are asked for."""

    exceptions = SimpleNamespace(RayTaskError=type("RayTaskError", (Exception,), {}), RayError=OSError)

    def __init__(self, **resources: float) -> None:
        self.resources, self.asked, self.begun, self.over = resources, dict[str, Any](), dict[str, Any](), 0

    def is_initialized(self) -> bool:
        return False

    def init(self, **options: Any) -> None:
        self.begun = options
        signal.signal(signal.SIGTERM, lambda *_: None)

    def shutdown(self) -> None:
        self.over += 1

    def cluster_resources(self) -> dict[str, float]:
        return self.resources

    def remote(self, **options: Any) -> Callable[..., Any]:
        self.asked = options
        return lambda function: SimpleNamespace(remote=lambda *given: functools.partial(function, *given))

    def put(self, value: Any) -> Any:
        return value

    def wait(self, waiting: list[Any], **options: Any) -> tuple[list[Any], list[Any]]:
        return waiting[:1], waiting[1:]

    def get(self, task: Callable[[], Any]) -> Any:
        return task()


@pytest.mark.parametrize(("gpus", "device"), [(2.0, "cuda"), (0.0, "auto")])
def test_a_task_is_given_what_it_needs_and_what_is_lost_is_not_run_twice(
    gpus: float, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that has a GPU sees no other, whatever its number; one that killed its worker would kill the next."""
    cells, devices = plan(TINY, methods=["fr"], seeds=[1]), list[str]()
    monkeypatch.setitem(sys.modules, "ray", ray := Pretended(CPU=4.0, GPU=gpus))
    monkeypatch.setattr(execution, "_do_task_on_ray", lambda job, *given: (devices.append(job.device), {}))
    with execution.on_ray(Job(FILE, str(tmp_path), None, "auto"), 2) as execute:
        assert [task for task, _ in execute(cells)] == cells
    assert devices == [device] * 2
    assert ray.asked == {"num_cpus": 1, "num_gpus": int(gpus > 0), "max_retries": 0}


@pytest.mark.slow
@pytest.mark.parametrize("address", ["", "ray://head:10001"])
def test_the_cluster_that_is_named_is_used_and_left_as_it_was_found(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray, before = Pretended(), signal.getsignal(signal.SIGTERM)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(KeyboardInterrupt), execution._connect(ray, workers=3):
        raise KeyboardInterrupt
    here = {"address": "local", "num_cpus": 3, "include_dashboard": False}
    assert {name: value for name, value in ray.begun.items() if not name.startswith("log")} == ({} if address else here)
    assert ray.over == 1
    assert signal.getsignal(signal.SIGTERM) == before
