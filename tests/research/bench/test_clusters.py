from __future__ import annotations

import builtins
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from processes import eventually, seen, silent
from tiny import CELLS, DOOMED, TINY

from shiftmend.errors import DataError, ShiftmendError
from shiftmend.research.bench import execute as clusters
from shiftmend.research.bench.execute import Job, Preparation, Task, WorkerError, inline
from shiftmend.research.bench.plan import plan
from shiftmend.research.bench.run import STORE, preparations, run
from shiftmend.research.bench.store import Store

pytestmark = pytest.mark.slow

FILE = f"{Path(__file__).parents[2] / 'helpers' / 'tiny.py'}:TINY"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of two workers as `on_ray` starts it where there is none; tests find it and leave it running."""
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    before = signal.getsignal(signal.SIGTERM)
    with clusters._connected(ray, workers=2):
        assert ray.cluster_resources()["CPU"] == 2
        yield ray
        assert ray.is_initialized()
    assert not ray.is_initialized()
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


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
    with pytest.raises(DataError, match=r"^source is broken on purpose; remove the file$") as caught:
        run(FILE, tmp_path / "home", **given)
    assert type(caught.value) is DataError
    (root / "break-source").unlink()
    (root / "kill-source").touch()
    with pytest.raises(WorkerError, match=r"^source model plain, seed 1 could not be made: its worker on the cluster"):
        run(FILE, tmp_path / "home", **given)


def test_what_nobody_waits_for_is_cancelled(cluster: Any, tmp_path: Path, root: Path) -> None:
    """On a cluster that is not ours and goes on running."""
    job = Job(FILE, str(tmp_path), str(root), "cpu", threads=1)
    cells = plan(TINY)
    with inline(job, silent) as execute:
        list(execute(preparations(TINY, cells)))
    (root / "slow").touch()
    with clusters.on_ray(job, 2) as execute:
        next(execute(cells))
    # all of them would take many times as long
    assert eventually(lambda: cluster.available_resources().get("CPU") == 2, seconds=5)


def test_files_travel_to_workers_without_a_shared_disk(tmp_path: Path, root: Path) -> None:
    near, far, elsewhere = (tmp_path / name for name in ("near", "far", "elsewhere"))
    task: Task = Preparation("plain", 1, 0.01)
    pattern = clusters._files(TINY, task)
    job = Job(FILE, str(far), str(root), "cpu")
    result, files = clusters._work_there(job, task, pattern, {})
    assert result is None
    assert sorted(Path(name).parent.name for name in files) == ["profiles", "sources"]
    clusters._unpack(near, files)
    assert clusters._bundle(near, pattern) == files

    (cell,) = plan(TINY, methods=["adabn"], shifts=["dark"], seeds=[1])
    assert clusters._files(TINY, cell) == pattern
    before = {name: (near / name).stat().st_mtime_ns for name in files}
    bundle = clusters._bundle(near, pattern)
    result, made = clusters._work_there(Job(FILE, str(elsewhere), str(root), "cpu"), cell, pattern, bundle)
    assert result is not None
    assert not result.failed
    assert made == {}  # the source model was not trained again
    assert {name: (elsewhere / name).read_bytes() for name in files} == files
    assert clusters._work_there(job, task, pattern, bundle) == (None, {})
    clusters._unpack(near, files)
    assert {name: (near / name).stat().st_mtime_ns for name in files} == before
    other = clusters._files(TINY, Preparation("plain", 11, 0.01))  # seed 11 is not seed 1
    assert clusters._bundle(near, other) == {}


def test_a_gpu_for_each_task_where_there_are_some() -> None:
    assert clusters._wants_gpu("auto", {"CPU": 4.0, "GPU": 2.0})
    assert clusters._wants_gpu("cuda", {"CPU": 4.0})  # the cluster may still grow
    assert not clusters._wants_gpu("auto", {"CPU": 4.0})
    assert not clusters._wants_gpu("cpu", {"CPU": 4.0, "GPU": 2.0})


def test_without_ray(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = builtins.__import__

    def missing(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "ray":
            raise ModuleNotFoundError("No module named 'ray'")
        return found(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ShiftmendError, match=r"^--executor ray needs Ray: pip install 'shiftmend\[ray\]'$"):
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
    monkeypatch.setattr(clusters, "_work_there", lambda job, *given: (devices.append(job.device), {}))
    with clusters.on_ray(Job(FILE, str(tmp_path), None, "auto"), 2) as execute:
        assert [task for task, _ in execute(cells)] == cells
    assert devices == [device] * 2
    assert ray.asked == {"num_cpus": 1, "num_gpus": int(gpus > 0), "max_retries": 0}


@pytest.mark.parametrize("address", ["", "ray://head:10001"])
def test_the_cluster_that_is_named_is_used_and_left_as_it_was_found(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray, before = Pretended(), signal.getsignal(signal.SIGTERM)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(KeyboardInterrupt), clusters._connected(ray, workers=3):
        raise KeyboardInterrupt
    here = {"address": "local", "num_cpus": 3, "include_dashboard": False}
    assert {name: value for name, value in ray.begun.items() if not name.startswith("log")} == ({} if address else here)
    assert ray.over == 1
    assert signal.getsignal(signal.SIGTERM) == before
