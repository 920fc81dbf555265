"""Several cells at once on one GPU."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import SEEDS

from shiftmend.errors import DataError
from shiftmend.methods import METHODS
from shiftmend.research.bench.benchmark import Cell, Result
from shiftmend.research.bench.execute import TASKS_PER_COLLECTION, Advance, Job, Preparation, Task, inline, lanes
from shiftmend.research.bench.plan import plan
from shiftmend.research.bench.resources import Workshop
from shiftmend.research.bench.run import preparations, run
from shiftmend.research.bench.store import Store
from shiftmend.research.bench.suite import find
from shiftmend.utils.gpu_sharing import has_turns, others_may_go, taking_turns

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
TINY = Path(__file__).parents[2] / "helpers" / "tiny.py"


def test_threads_run_one_at_a_time_but_where_they_wait() -> None:
    lock = threading.Lock()
    inside, most, waiting, most_waiting = [0], [0], [0], [0]
    counting = threading.Lock()

    def count(now: list[int], most_seen: list[int], by: int) -> None:
        with counting:
            now[0] += by
            most_seen[0] = max(most_seen[0], now[0])

    def lane() -> None:
        with taking_turns(lock):
            assert has_turns()
            for _ in range(5):
                count(inside, most, 1)
                time.sleep(0.001)
                count(inside, most, -1)
                with others_may_go():
                    count(waiting, most_waiting, 1)
                    time.sleep(0.02)
                    count(waiting, most_waiting, -1)
        assert not has_turns()

    threads = [threading.Thread(target=lane) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    assert most_waiting[0] > 1
    assert not lock.locked()


def test_without_lanes_nothing_is_given_up() -> None:
    assert not has_turns()
    with others_may_go():
        assert not has_turns()


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
    cells = plan(find(f"{TINY}:GENTLE"))
    found: dict[str, dict[str, Result]] = {}
    for name, executor in (("alone", inline), ("together", functools.partial(lanes, count=3))):
        job = Job(f"{TINY}:GENTLE", str(tmp_path / name), str(tmp_path), "cpu")
        ran: list[tuple[Task, int]] = []

        def advance(task: Task, done: int, total: int, ran: list[tuple[Task, int]] = ran) -> None:
            ran.append((task, threading.get_ident()))

        with executor(job, advance) as execute:
            outcomes = {**dict(execute(preparations(find(job.benchmark), cells))), **dict(execute(cells))}
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

    def work(job: Job, task: Task, advance: Advance, workshop: Workshop) -> None:
        if task.seed == 1:
            with others_may_go():
                assert others.wait(10)
            raise DataError("broken on purpose")
        for epoch in range(3000):
            advance(task, epoch, 0)
            others.set()
            with others_may_go():
                time.sleep(0.001)
        ended_by_themselves.append(task)

    monkeypatch.setattr("shiftmend.research.bench.execute.work", work)
    job = Job(f"{TINY}:GENTLE", str(tmp_path), str(tmp_path), "cpu")
    tasks = [Preparation("plain", seed, 0.01) for seed in range(1, 9)]
    before = torch.get_num_threads()
    with lanes(job, lambda task, done, total: None, 3) as execute, pytest.raises(DataError, match="broken on purpose"):
        list(execute(tasks))
    assert ended_by_themselves == []
    assert torch.get_num_threads() == before


def test_lanes_have_as_many_threads_of_torch_as_the_job_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", NoStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    found: list[int] = []
    monkeypatch.setattr("shiftmend.research.bench.execute.work", lambda *given: found.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    for threads in (1, 3, 0):
        job = Job(f"{TINY}:GENTLE", str(tmp_path), str(tmp_path), "cpu", threads=threads)
        with lanes(job, lambda task, done, total: None, 2) as execute:
            list(execute([Preparation("plain", 1, 0.01)]))
        assert torch.get_num_threads() == before
    assert found == [1, 3, before]


def test_a_lane_takes_a_task_when_it_is_free_and_has_one_workshop_and_one_stream_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And neither memory, which is that of all lanes, nor what was set for the run outlives it."""
    seen: list[Any] = []
    rooms: list[Workshop] = []
    before = sys.getswitchinterval()

    @contextmanager
    def within(stream: NoStream) -> Iterator[None]:
        seen.append("stream")
        yield
        seen.append("left")

    def work(job: Job, task: Cell, advance: Advance, workshop: Workshop) -> Result:
        assert sys.getswitchinterval() < before / 10
        seen.append("work")
        rooms.append(workshop)
        return Result(task, "own", peak_memory=5)

    def drawn() -> Iterator[Task]:
        for cell in cells:
            seen.append("drawn")
            yield cell

    monkeypatch.setattr(torch.cuda, "Stream", NoStream)
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr("shiftmend.research.bench.execute.work", work)
    monkeypatch.setattr("shiftmend.research.bench.execute.give_back", lambda device: seen.append("given back"))
    cells = plan(find(f"{TINY}:GENTLE"))[:2]
    job = Job(f"{TINY}:GENTLE", str(tmp_path), str(tmp_path / "data"), "cpu")
    with lanes(job, lambda task, done, total: seen.append((done, total)), 1) as execute:
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

    def work(job: Job, task: Task, advance: Advance, workshop: Workshop) -> None:
        if task.seed > 1:
            with others_may_go():
                assert leaving.wait(10)
            advance(task, 1, 2)
            ended_by_themselves.append(task)

    def full_disk() -> None:
        with lanes(job, lambda task, done, total: None, 2) as execute:
            outcomes = execute([Preparation("plain", seed, 0.01) for seed in (1, 2)])
            next(outcomes)
            raise OSError("the disk is full")

    monkeypatch.setattr("shiftmend.research.bench.execute.work", work)
    monkeypatch.setattr("shiftmend.research.bench.execute.ThreadPoolExecutor", Pool)
    job = Job(f"{TINY}:GENTLE", str(tmp_path), str(tmp_path), "cpu")
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

    def work(job: Job, task: Task, advance: Advance, workshop: Workshop) -> None:
        if task.seed > 1:
            ended.release()
            return
        kept = Cycle()
        left.append(weakref.ref(kept))
        with others_may_go():
            for _ in range(4):
                assert ended.acquire(timeout=10)

    monkeypatch.setattr("shiftmend.research.bench.execute.work", work)
    job = Job(f"{TINY}:GENTLE", str(tmp_path), str(tmp_path), "cpu")
    with lanes(job, lambda task, done, total: None, 2) as execute:
        for first, last in ((1, 5), (6, 5 + TASKS_PER_COLLECTION)):
            list(execute([Preparation("plain", seed, 0.01) for seed in range(first, last + 1)]))
        assert not gc.isenabled()
        assert [there() for there in left] == [None]
    assert gc.isenabled()


def _found(benchmark: str, folder: Path, root: Path, **options: Any) -> dict[Cell, Result]:
    run(f"{TINY}:{benchmark}", folder, root=root, device="cuda", progress=False, **options)
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
