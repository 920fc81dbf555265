from __future__ import annotations

import builtins
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_executors import eventually, seen, silent
from tiny import CELLS, DOOMED, TINY

from shiftmend.bench import clusters
from shiftmend.bench.executors import inline
from shiftmend.bench.planning import plan
from shiftmend.bench.runner import STORE, preparations, run
from shiftmend.bench.store import Store
from shiftmend.bench.tasks import Job, Preparation, Task, WorkerError
from shiftmend.errors import DataError, ShiftmendError

FILE = f"{Path(__file__).with_name('tiny.py')}:TINY"


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
