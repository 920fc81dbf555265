"""The runner, killed and interrupted in every way that is likely; `tiny.py` is what it runs."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import alive, eventually, seen
from terminal import Terminal
from tiny import CELLS, DOOMED, SEEDS, TINY

from shiftmend.errors import DataError
from shiftmend.research.bench import run as display_module
from shiftmend.research.bench import run as runner
from shiftmend.research.bench.benchmark import Cell, Outcome, Result, Setting
from shiftmend.research.bench.execute import Job, Preparation, list_preparations
from shiftmend.research.bench.plan import plan
from shiftmend.research.bench.run import Display, describe_result, format_left, run
from shiftmend.research.bench.store import STORE

FILE = str(Path(__file__).parents[2] / "helpers" / "tiny.py")
DIVERGED = "became NaN or infinite"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def go(home: Path, root: Path, name: str = "TINY", workers: int = 1, **options: Any) -> runner.Report:
    return run(f"{FILE}:{name}", home, root=root, device="cpu", workers=workers, **options)


def rows(home: Path, status: str = "done") -> dict[tuple[Any, ...], tuple[Any, ...]]:
    """Every byte of the store, by cell."""
    if not (home / STORE).exists():
        return {}
    with closing(sqlite3.connect(home / STORE)) as connection:
        found = connection.execute("SELECT * FROM cells WHERE status = ?", (status,)) if _is_made(connection) else ()
        return {row[:6]: row for row in found}


def _is_made(connection: sqlite3.Connection) -> bool:
    return bool(connection.execute("SELECT * FROM sqlite_master").fetchall())


@pytest.mark.slow
def test_every_cell_once_then_nothing_then_what_is_new(home: Path, root: Path) -> None:
    said: list[str] = []
    cells, doomed = CELLS // len(SEEDS), DOOMED // len(SEEDS)
    report = go(home, root, seeds=[1], say=said.append)
    assert (report.cells, report.already, report.done, len(report.failed)) == (cells, 0, cells - doomed, doomed)
    assert {result.cell.method for result in report.failed} == {"doomed"}
    assert all(DIVERGED in str(result.error) for result in report.failed)
    before = rows(home)
    assert (len(before), len(rows(home, "failed"))) == (cells - doomed, doomed)
    assert [line.split()[0] for line in said] == [f"{number}/{cells}" for number in range(1, cells + 1)]
    assert len(list(home.glob("sources/*"))) == len(list(home.glob("profiles/*"))) == 2

    again = go(home, root, seeds=[1])  # tries what failed, and that alone
    assert (again.already, again.done, len(again.failed)) == (cells - doomed, 0, doomed)
    assert rows(home) == before
    methods = ["source-only", "adabn", "fr", "shot"]
    idle = go(home, root, seeds=[1], methods=methods, progress=True)
    assert (idle.cells, idle.already, idle.done, idle.failed) == (cells - doomed, cells - doomed, 0, ())

    changed = go(home, root, "OTHER_RATE", seeds=[1], methods=methods)
    assert (changed.already, changed.done) == (cells - doomed - 2, 2)  # FR on two shifts
    assert before.items() <= rows(home).items()
    assert len(rows(home)) == len(before) + 2

    rates = go(home, root, methods=["fr"], shifts=["dark"], seeds=[1], rates=[0.01, 0.1])
    assert (rates.already, rates.done) == (0, 1)


@pytest.mark.slow
def test_what_failed_is_tried_again_and_can_succeed(home: Path, root: Path) -> None:
    (root / "break-noisy").touch()
    report = go(home, root, methods=["source-only", "adabn"], seeds=[2])
    assert (report.done, len(report.failed)) == (3, 2)
    assert {result.error for result in report.failed} == {"noisy is broken on purpose; remove the file"}
    (root / "break-noisy").unlink()
    report = go(home, root, methods=["source-only", "adabn"], seeds=[2])
    assert (report.already, report.done, report.failed) == (3, 2, ())
    assert (len(rows(home)), len(rows(home, "failed"))) == (5, 0)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_without_time_nothing_is_begun_and_nothing_lost(workers: int, home: Path, root: Path) -> None:
    options: dict[str, Any] = {"methods": ["source-only", "adabn"], "seeds": [1], "workers": workers}
    report = go(home, root, minutes=1e-9, **options)
    assert (report.cells, report.already, report.done, report.failed, report.left) == (5, 0, 0, (), 5)
    assert not rows(home)
    assert not list(home.glob("sources/*"))
    report = go(home, root, minutes=60.0, **options)
    assert (report.done, report.left) == (5, 0)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"benchmark": "digit"}, r"'digit'.*Try digits"),
        ({"benchmark": "no.py:TINY"}, "no.py, which is missing"),
        ({"protocol": "overnight"}, r"offline, online.*'overnight'"),
        ({"methods": ["adabm"]}, r"'adabm'.*Try adabn"),
        ({"shifts": ["darkness"]}, "shift.*'darkness'"),
        ({"seeds": []}, "seed"),
        ({"workers": 0}, "at least 1 worker"),
        ({"rates": [0.1, -1.0]}, "positive"),
        ({"rates": [float("nan")]}, "positive"),
        ({"minutes": 0.0}, "minutes"),
        ({"minutes": float("nan")}, "minutes"),
        ({"minutes": 5.0, "executor": "ray"}, "cluster"),
        ({"executor": "slurm"}, "slurm"),
        ({"root": "/nowhere/at/all"}, r"'/nowhere/at/all'.*exist"),
        ({"root": ""}, r"folder.*'', which.*exist"),
        ({"folder": FILE}, r"Expected a folder.*file"),
        ({"device": "cuda:99"}, r"available.*'cuda:99'"),
    ],
)
def test_mistakes_are_told_in_a_sentence(options: dict[str, Any], sentence: str, home: Path) -> None:
    given: dict[str, Any] = {"benchmark": f"{FILE}:TINY", "folder": home, "workers": 1} | options
    with pytest.raises(ValueError, match=sentence) as caught:
        run(**given)
    assert "\n" not in str(caught.value)
    assert not rows(home)


def test_missing_data_are_told_in_a_sentence(home: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz, which is missing"):
        run("mnist-c", home, root=root, methods=["source-only"], device="cpu", workers=1)
    monkeypatch.delenv("SHIFTMEND_DATA", raising=False)
    with pytest.raises(DataError, match="SHIFTMEND_DATA"):
        run("mnist-c", home, methods=["source-only"], device="cpu", workers=1)


@pytest.mark.slow
def test_workers_get_what_they_cannot_know(
    home: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine has neither this one's environment nor its working directory."""
    jobs = []
    run_here = runner.in_this_process
    monkeypatch.setattr(runner, "in_this_process", lambda job, advance: (jobs.append(job), run_here(job, advance))[1])
    monkeypatch.setenv("SHIFTMEND_DATA", str(root))
    monkeypatch.chdir(Path(FILE).parent)
    run("tiny.py:TINY", os.path.relpath(home), methods=["adabn"], shifts=["dark"], seeds=[1], device="cpu", workers=1)
    assert (jobs[0].benchmark, jobs[0].root) == (f"{FILE}:TINY", str(root))
    assert Path(jobs[0].home).is_absolute()
    assert Path(jobs[0].home).resolve() == home.resolve()
    assert seen(root) == {os.getpid()}


def test_source_models_are_shared() -> None:
    needed = list_preparations(TINY, plan(TINY, seeds=[1, 2]))
    assert needed == [Preparation(source, seed, 0.01) for seed in (1, 2) for source in ("plain", "shot")]


def test_presets_of_one_source_model_are_one_preparation() -> None:
    """Two workers must not train the same model at the same time."""
    rows = {name: Setting("fr", {"epochs": 1}, preset=name) for name in ("reference", "sliced")}
    benchmark = replace(TINY, settings={"offline": rows})
    (needed,) = list_preparations(benchmark, plan(benchmark, seeds=[1]))
    assert sorted(needed.presets) == ["reference", "sliced"]


def test_where_cells_run_and_what_a_job_says(home: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[str, Job, Any]] = []

    def executor(name: str) -> Callable[..., AbstractContextManager[Any]]:
        @contextmanager
        def record(job: Job, *rest: Any) -> Iterator[Any]:
            taken.append((name, job, rest[-1]))
            yield lambda tasks: iter(())

        return record

    def place(**options: Any) -> tuple[str, int]:
        given = {"seeds": [1, 2], "methods": ["fr"], "device": "auto"} | options
        run(f"{FILE}:TINY", home, root=root, **given)
        return taken[-1][0], taken[-1][1].threads

    for name in ("in_this_process", "in_processes", "in_gpu_threads", "on_ray"):
        monkeypatch.setattr(runner, name, executor(name))
    monkeypatch.setattr(os, "cpu_count", lambda: 9)
    monkeypatch.setattr(runner.torch.cuda, "is_available", lambda: False)
    assert place(workers=3, rates=[1, 0.1], compile=True) == ("in_processes", 1)
    assert (taken[-1][1].rates, taken[-1][1].compile, taken[-1][2]) == ((1, 0.1), True, 3)
    assert place(workers=2, executor="ray") == ("on_ray", 1)
    monkeypatch.setattr(runner, "find", lambda name: replace(TINY, small=False, cells_per_gpu=3))
    assert place() == ("in_this_process", 0)  # with all threads
    assert place(workers=3) == ("in_processes", 3)
    assert place(workers=100) == ("in_processes", 2)  # there are but four cells
    assert taken[-1][2] == 4
    monkeypatch.setattr(runner.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(runner.torch.cuda, "device_count", lambda: 1)
    assert place() == ("in_gpu_threads", 3)
    assert place(device="cpu") == ("in_this_process", 0)


def arguments(home: Path, root: Path, workers: int) -> list[str]:
    place = ["--folder", str(home), "--data-root", str(root)]
    return ["bench", "run", f"{FILE}:TINY", *place, "--device", "cpu", "--workers", str(workers)]


def start(home: Path, root: Path, workers: int, **streams: Any) -> subprocess.Popen[str]:
    """The command line detached, as a terminal starts it."""
    adopt = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); " if "stdin" in streams else ""
    code = f"{adopt}from shiftmend.cli import main; main()"
    command = [sys.executable, "-c", code, *arguments(home, root, workers)]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} | streams
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "xterm"}
    return subprocess.Popen(command, start_new_session=True, text=True, env=environment, **piped)


@pytest.mark.slow
def test_killed_at_any_moment_and_gone_on(home: Path, root: Path) -> None:
    """Rows that are there stay as they are, to the byte, and the rest is made exactly once."""
    (root / "slow").touch()
    moments: list[tuple[int, Callable[[], object]]] = [
        (2, lambda: len(seen(root)) == 2),  # both train a source model
        (1, lambda: any(root.glob("seen/*"))),
        (1, lambda: len(rows(home)) >= 1),
        (2, lambda: len(list(root.glob("seen/noisy-*"))) == 2),  # stuck there, as in a long computation
    ]
    (root / "stuck-noisy").touch()
    for workers, moment in moments:
        if moment is moments[-1][1]:
            (root / "slow").unlink()
        for file in root.glob("seen/*"):
            file.unlink()
        known = rows(home)
        process = start(home, root, workers)
        came = eventually(moment, process)
        busy = seen(root)
        process.kill()
        process.wait()
        followed = eventually(lambda busy=busy: not any(map(alive, busy)), seconds=5)  # type: ignore[misc]
        said, _ = process.communicate()  # only now: workers hold its pipe, too
        assert came, said
        assert len(busy) == workers
        assert followed
        assert known.items() <= rows(home).items()
        assert len(rows(home)) < CELLS - DOOMED
    known = rows(home)
    assert len(known) >= 3
    (root / "stuck-noisy").unlink()
    report = go(home, root)
    assert (report.cells, report.already, report.done) == (CELLS, len(known), CELLS - DOOMED - len(known))
    assert known.items() <= rows(home).items()
    assert (len(rows(home)), len(rows(home, "failed"))) == (CELLS - DOOMED, DOOMED)
    assert not list(home.rglob("*.checkpoint"))


def check_that_all_is_whole(home: Path) -> None:
    """An interrupted adaptation must not pass for a result."""
    names = [column[1] for column in sqlite3.connect(home / STORE).execute("PRAGMA table_info(cells)")]
    for row in rows(home).values():
        found = dict(zip(names, row, strict=True))
        expected = {"source-only": 0, "adabn": 2, "fr": 4, "shot": 2}[found["method"]]
        assert found["epochs"] == expected
        assert json.loads(found["manifest"])["status"] == "finished"
    assert all(DIVERGED in str(row) for row in rows(home, "failed").values())


@pytest.mark.slow
def test_ctrl_c_with_one_process(home: Path, root: Path) -> None:
    """In the middle of FR, which answers an interruption with what it has reached."""
    (root / "slow").touch()
    with start(home, root, 1) as process:
        assert eventually(lambda: len(rows(home)) >= 2)
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "adabn on dark" in said
    assert 2 <= len(rows(home)) < CELLS - DOOMED
    check_that_all_is_whole(home)


@pytest.mark.slow
def test_ctrl_c_on_a_terminal_with_two_processes(home: Path, root: Path) -> None:
    """What is seen on the way, too: cells done, time left, and how far those are that are running."""
    (root / "slow").touch()
    with Terminal() as terminal:
        process = start(home, root, 2, stdin=terminal.inner, stdout=terminal.inner, stderr=terminal.inner)
        assert terminal.shows(r"tiny +\S+ preparing: \d of 4 source models")
        assert terminal.shows(r"  source model (plain|shot), seed \d +\S+ \d+ of 10")
        assert terminal.shows(rf"tiny +\S+ [1-9]\d* of {CELLS} cells, \d+ (s|min) left")
        assert terminal.shows(r"  fr on (dark|noisy), seed \d +\S+ \d of 4")
        assert "source model" not in terminal.screen()
        assert terminal.shows(r"doomed on dark, seed 1: failed: .*finite")  # at once, not at the end
        terminal.type("\x03")
        assert process.wait(20) == 130
        assert "Traceback" not in terminal.everything
    busy = seen(root)
    assert len(busy) == 2
    assert process.pid not in busy
    assert not any(map(alive, busy))
    assert 1 <= len(rows(home)) < CELLS - DOOMED
    check_that_all_is_whole(home)


def test_how_many_count_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(runner.torch.cuda, "is_available", lambda: False)
    assert runner._count_workers(TINY, "auto") == 4
    monkeypatch.setattr(runner.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(runner.torch.cuda, "device_count", lambda: 2)
    assert [runner._count_workers(TINY, device) for device in ("auto", "cuda", "cuda:1", "cpu")] == [2, 2, 1, 4]


# ----

FR, BUFR = (Cell("tiny", "offline", method, "dark", 1, "abc") for method in ("fr", "bufr"))
MODEL, OTHER = Preparation("plain", 1, 0.01), Preparation("plain", 2, 0.01)


def done(cell: Cell, accuracy: float = 0.5) -> Result:
    last, best = (Outcome(epoch, value, 0.1, 0.2, 0.3, 0.4) for epoch, value in ((4, accuracy), (2, 0.75)))
    return Result(cell, "own", last, best, last, seconds=1.26)


def failed(cell: Cell) -> Result:
    return Result(cell, "own", error="it [broke]")


@contextmanager
def standard_error_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm")
    with Terminal() as terminal, os.fdopen(os.dup(terminal.inner), "w") as stream, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", stream)
        yield terminal


@pytest.mark.slow
@pytest.mark.parametrize("show", [None, True])
def test_on_a_terminal(show: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        standard_error_on_a_terminal(monkeypatch) as terminal,
        Display(show, "tiny [x]", cells=4, preparations=2) as display,
    ):
        assert terminal.shows(r"tiny \[x\] +\S+ preparing: 0 of 2 source models")
        for task in (MODEL, OTHER):
            display.advance(task, 0, 0)
        display.advance(OTHER, 3, 10)
        assert terminal.shows(r"  source model plain, seed 2 +\S+ 3 of 10")
        assert "  source model plain, seed 1" in terminal.screen()
        display.end(MODEL, None)
        assert terminal.shows("preparing: 1 of 2 source models")
        assert "seed 1" not in terminal.screen()
        display.end(OTHER, None)
        assert terminal.shows("0 of 4 cells, time left unknown")
        assert "source model" not in terminal.screen()
        for cell in (FR, BUFR):
            display.advance(cell, 0, 0)
        assert terminal.shows(r"  fr on dark, seed 1 +\S+ *\n")
        display.advance(FR, 1, 4)
        display.advance(BUFR, 7, 7)  # which does not know how much there is
        assert terminal.shows(r"  fr on dark, seed 1 +\S+ 1 of 4")
        assert terminal.shows(r"  bufr on dark, seed 1 +\S+ 7 *(\n|$)")
        display.advance(FR, 4, 4)
        assert terminal.shows(r"  fr on dark, seed 1 +\S+ 4 of 4")
        display.end(FR, done(FR))
        assert terminal.shows(r"1 of 4 cells, \d+ s left")
        assert "  fr on dark" not in terminal.screen()
        display.end(BUFR, failed(BUFR))
        assert terminal.shows(r"2 of 4 cells, \d+ s left")
        assert "  bufr on dark" not in terminal.screen()
        assert "\nbufr on dark, seed 1: failed: it [broke]" in "\n" + terminal.screen()
    assert terminal.screen().strip() == "bufr on dark, seed 1: failed: it [broke]"  # the bars are gone


def test_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    for show, say in ((None, said.append), (False, said.append), (True, None), (None, None), (False, None)):
        with Display(show, "tiny", cells=2, preparations=1, say=say) as display:
            display.advance(MODEL, 3, 10)
            display.end(MODEL, None)
            display.advance(FR, 1, 4)
            display.end(FR, done(FR))
            display.end(BUFR, failed(BUFR))
    lines = [
        "1/2  fr on dark, seed 1: 50.0 % (selected 50.0, best 75.0), 1.3 s  (0 s left)",
        "2/2  bufr on dark, seed 1: failed: it [broke]  (0 s left)",
    ]
    assert said == 2 * lines
    shown = capsys.readouterr()
    assert (shown.out, shown.err.splitlines()) == ("", lines)


def test_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(display_module.time, "monotonic", lambda: clock[0])
    with Display(False, "tiny", cells=10, preparations=1) as display:
        clock[0] += 1000  # preparing says nothing about cells
        display.advance(MODEL, 9, 10)
        assert display.remaining() != display.remaining()
        display.end(MODEL, None)
        clock[0] += 30
        display.advance(FR, 0, 0)
        assert display.remaining() != display.remaining()
        display.advance(FR, 1, 4)
        display.advance(BUFR, 7, 7)
        assert display.remaining() == pytest.approx(30 * 9.75 / 0.25)
        display.advance(BUFR, 8, 16)
        assert display.remaining() == pytest.approx(30 * 9.25 / 0.75)
        clock[0] += 30
        display.end(FR, done(FR))
        assert display.remaining() == pytest.approx(60 * 8.5 / 1.5)
        display.end(BUFR, failed(BUFR))
        assert display.remaining() == pytest.approx(60 * 8 / 2)


def test_several_threads_may_say_how_far_they_are() -> None:
    cells = [Cell("tiny", "offline", "fr", str(number), 1, "recipe") for number in range(200)]
    errors: list[BaseException] = []
    interval = sys.getswitchinterval()
    with Display(False, "tiny", cells=len(cells)) as display:

        def lane(own: list[Cell]) -> None:
            try:
                for cell in own * 20:
                    display.advance(cell, 1, 2)
                    display.remaining()
                    display.end(cell, None)
            except RuntimeError as error:
                errors.append(error)

        threads = [threading.Thread(target=lane, args=(cells[start::4],)) for start in range(4)]
        sys.setswitchinterval(1e-6)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
    assert errors == []
    assert display.done == 20 * len(cells)


def test_times_in_words() -> None:
    words = {0.4: "0 s left", 89: "89 s left", 90: "2 min left", 5399: "90 min left", 9000: "2.5 h left"}
    assert {seconds: format_left(seconds) for seconds in words} == words
    assert format_left(float("nan")) == "time left unknown"


@given(st.floats(0, 1e7))
def test_times_in_words_are_close(seconds: float) -> None:
    number, unit, _ = format_left(seconds).split()
    scale, half = {"s": (1, 0.5), "min": (60, 30), "h": (3600, 180)}[unit]
    assert abs(float(number) * scale - seconds) <= half + 1e-6


def test_one_line_for_a_result() -> None:
    assert describe_result(done(FR, 0.5)) == "fr on dark, seed 1: 50.0 % (selected 50.0, best 75.0), 1.3 s"
    assert describe_result(failed(FR)) == "fr on dark, seed 1: failed: it [broke]"
