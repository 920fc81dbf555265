""""""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shiftmend.errors import DataError
from shiftmend.research.bench import store as store_module
from shiftmend.research.bench.benchmark import SIGNALS, Cell, Origin, Outcome, Result
from shiftmend.research.bench.store import (
    COLUMNS,
    Store,
    flatten,
    from_compact,
    load_results,
    read_compact,
    to_compact,
    to_csv,
    to_json,
    unflatten,
)

CELL = Cell("emnist-da", "offline", "bufr", "sky", 123, "a1b2")
EARLIER, LATER = "2022-04-25T09:00:00Z", "2022-04-25T10:00:00Z"


def done(accuracy: float = 0.8, cell: Cell = CELL, **facts: Any) -> Result:
    return Result(cell, "published", last=Outcome(9, accuracy, 0.1, 0.2, 0.7, 0.3), **facts)


def failed(error: str = "out of memory", cell: Cell = CELL, finished: str = EARLIER) -> Result:
    return Result(cell, "published", error=error, finished=finished)


def seeds(count: int) -> list[Result]:
    return [done(seed / 100, replace(CELL, seed=seed)) for seed in range(count)]


def filled(path: Path, *results: Result) -> Path:
    with Store(path) as store:
        for result in results:
            store.record(result)
    return path


def contents(path: Path) -> list[Result]:
    with Store(path, read_only=True) as store:
        return store.results()


def same(first: Any, second: Any) -> bool:
    """Equality of values and types for which NaN equals NaN."""
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second or (first != first and second != second))


# Recording and reading

# Not the lone surrogates, which are no Unicode, nor the words that stand for numbers in JSON.
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=8).filter(lambda text: text != "NaN")
numbers = st.floats()
counts = st.integers(-(2**63), 2**63 - 1)
outcomes = st.builds(Outcome, counts, numbers, numbers, numbers, numbers, numbers)
trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
cells = st.builds(Cell, texts, texts, texts, texts, counts, texts)
facts: dict[str, st.SearchStrategy[Any]] = {
    "origin": st.sampled_from(get_args(Origin)),
    "best": st.none() | outcomes,
    "selected": st.none() | outcomes,
    "signals": st.fixed_dictionaries({}, optional=dict.fromkeys(SIGNALS, numbers)),
    "restoration_distance": st.none() | numbers,
    "alignment_loss": st.none() | numbers,
    "ece_per_batch": st.none() | numbers,
    "epochs": counts,
    "seconds": numbers,
    "peak_memory": st.none() | counts,
    "history": st.lists(st.dictionaries(texts, trees, max_size=3), max_size=3).map(tuple),
    "manifest": st.dictionaries(texts, trees, max_size=3),
    "finished": texts,
}
any_result = st.builds(Result, cells, last=outcomes, error=st.none(), **facts) | st.builds(
    Result, cells, last=st.none() | outcomes, error=texts, **facts
)


@pytest.mark.slow
@settings(max_examples=60)
@given(any_result)
def test_any_result_comes_back_as_it_was(result: Result) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = filled(Path(folder, "store.sqlite"), result)
        (found,) = contents(path)
        assert same(asdict(found), asdict(result))
        with Store(path, read_only=True) as store:
            assert store.cells() == (set() if result.failed else {result.cell})


def test_nan_is_null_to_sql_and_nan_to_us(tmp_path: Path) -> None:
    diverged = replace(
        done(math.nan),
        signals={"entropy": math.nan, "slices": math.inf},
        alignment_loss=-math.inf,
        history=({"loss": math.nan, "nll": [math.inf, -math.inf]},),
    )
    path = filled(tmp_path / "store", diverged, done(0.5, replace(CELL, seed=1)))
    (found, _) = contents(path)[::-1]
    assert found.last is not None
    assert math.isnan(found.last.accuracy)
    assert math.isnan(found.signals["entropy"])
    assert (found.signals["slices"], found.alignment_loss) == (math.inf, -math.inf)
    assert "marginals" not in found.signals
    assert math.isnan(found.history[0]["loss"])
    assert found.history[0]["nll"] == [math.inf, -math.inf]
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT avg(last_accuracy) FROM cells").fetchone() == (0.5,)
    row = connection.execute("SELECT not_a_number, json_extract(history, '$[0].loss') FROM cells WHERE seed = 123")
    assert row.fetchone() == ("last_accuracy entropy", "NaN")
    connection.close()


def test_a_person_can_query_it(tmp_path: Path) -> None:
    path = filled(tmp_path / "store.sqlite", done(0.75, manifest={"rate": 0.01}), failed(cell=replace(CELL, seed=5)))
    connection = sqlite3.connect(path)
    assert [row[1] for row in connection.execute("PRAGMA table_info(cells)")] == [*COLUMNS, "not_a_number", "sha256"]
    key = [row[1] for row in sorted(connection.execute("PRAGMA table_info(cells)"), key=lambda row: row[5]) if row[5]]
    assert key == ["benchmark", "protocol", "method", "shift", "seed", "recipe"]
    query = "SELECT status, error, last_accuracy, json_extract(manifest, '$.rate') FROM cells ORDER BY seed"
    assert connection.execute(query).fetchall() == [("failed", "out of memory", None, None), ("done", None, 0.75, 0.01)]
    connection.close()


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        (done(0.5), done(0.9), False),
        (done(0.5), failed(), False),
        (failed(finished=LATER), done(0.9, finished=EARLIER), True),
        (failed("one"), failed("two"), True),
        (failed("one", finished=LATER), failed("two", finished=EARLIER), True),  # clocks may be set back
    ],
)
def test_a_finished_cell_stays_and_a_failed_one_gives_way(
    before: Result, after: Result, kept: bool, tmp_path: Path
) -> None:
    with Store(tmp_path / "store") as store:
        assert store.record(before) is True
        assert store.record(after) is kept
        assert store.results() == [after if kept else before]


def test_another_recipe_is_another_cell(tmp_path: Path) -> None:
    newer = replace(CELL, recipe="c3d4")
    assert contents(filled(tmp_path / "store", done(0.9, newer), done(0.5))) == [done(0.5), done(0.9, newer)]


def test_filters_and_a_fixed_order(tmp_path: Path) -> None:
    everything = [
        done(cell=Cell(benchmark, protocol, method, shift, seed, "r"))
        for benchmark in ("b1", "b2")
        for protocol in ("offline", "online")
        for method in ("bufr", "fr")
        for shift in ("Sky", "fog")
        for seed in (2, 10)
    ]
    lost = [failed(cell=Cell("b1", "offline", "bufr", "fog", 3, "r"))]
    with Store(filled(tmp_path / "store", *everything[::-1], *lost)) as store:
        assert store.results() == sorted([*everything, *lost], key=lambda result: result.cell)
        assert store.results(status="done") == everything
        assert store.cells() == {result.cell for result in everything}
        assert store.results(status="failed") == lost
        assert store.results("b1", "offline", "bufr", "fog", 3) == lost
        assert store.results("b1", "offline", "bufr", "fog", 3, status="done") == []
        for name in ("benchmark", "protocol", "method", "shift", "seed", "recipe"):
            value = getattr(everything[5].cell, name)
            expected = [result for result in everything if getattr(result.cell, name) == value]
            assert store.results(status="done", **{name: value}) == expected
        assert store.results(benchmark="' OR 1 --") == []


def test_what_cannot_be_kept_changes_nothing(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store:
        store.record(done(0.5))
        with pytest.raises(DataError, match=r"manifest\.x.*an object"):
            store.record(done(cell=replace(CELL, seed=1), manifest={"x": object()}))
        assert store.record(done(0.6, replace(CELL, seed=2))) is True
    assert len(contents(tmp_path / "store")) == 2


# Merging

stores = st.lists(
    st.builds(
        # What is done is a function of its cell, as it is on machines that compute alike.
        lambda seed, ok, finished: (
            done(seed / 10, replace(CELL, seed=seed)) if ok else failed(finished, replace(CELL, seed=seed), finished)
        ),
        st.integers(0, 5),
        st.booleans(),
        st.sampled_from([EARLIER, LATER]),
    ),
    max_size=8,
)


@pytest.mark.slow
@settings(max_examples=30)
@given(st.lists(stores, min_size=2, max_size=3))
def test_merging_is_idempotent_and_knows_no_order_of_what_is_done(parts: list[list[Result]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = [filled(Path(folder, str(index)), *part) for index, part in enumerate(parts)]
        merged = []
        for order in (paths, paths[::-1]):
            with Store(Path(folder, f"from {order[0].name}")) as store:
                before = 0
                for path in order:
                    store.merge(load_results(path))
                    assert store.merge(load_results(path)) == 0
                    assert len(store.cells()) >= before
                    before = len(store.cells())
                merged.append((store.results(status="done"), [result.cell for result in store.results()]))
        assert merged[0] == merged[1]
        assert merged[0][0] == sorted(
            {result.cell: result for part in parts for result in part if not result.failed}.values(),
            key=lambda result: result.cell,
        )


@pytest.mark.parametrize(
    ("here", "there", "winner"),
    [
        (done(0.5, finished=LATER), done(0.9, finished=EARLIER), "here"),
        (done(0.5), failed(finished=LATER), "here"),
        (failed(finished=LATER), done(0.9, finished=EARLIER), "there"),
        (failed("one", finished=EARLIER), failed("two", finished=LATER), "there"),
        (failed("one", finished=LATER), failed("two", finished=EARLIER), "here"),
    ],
)
def test_who_wins_a_merge(here: Result, there: Result, winner: str, tmp_path: Path) -> None:
    other = filled(tmp_path / "other", there, done(cell=replace(CELL, seed=1)))
    untouched = other.read_bytes()
    with Store(filled(tmp_path / "store", here)) as store:
        assert store.merge(load_results(other)) == (2 if winner == "there" else 1)
        assert store.results(seed=123) == [there if winner == "there" else here]
        assert store.merge(store.results()) == 0  # with itself
    assert other.read_bytes() == untouched


def test_an_export_is_merged_like_the_store_it_was_made_from(tmp_path: Path) -> None:
    known = [done(0.25), done(0.5, replace(CELL, seed=1)), failed("it broke", replace(CELL, seed=2))]
    (tmp_path / "export.json").write_text(to_compact(known))
    with Store(filled(tmp_path / "store", known[0])) as store:
        assert store.merge(load_results(tmp_path / "export.json")) == 2
        assert [(found.cell, found.error) for found in store.results()] == [
            (result.cell, result.error) for result in sorted(known, key=lambda result: result.cell)
        ]
        assert store.cells() == {known[0].cell, known[1].cell}


# Opening what is not a good store


def foreign(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


def overwritten(path: Path) -> None:
    filled(path, *(replace(result, manifest={"long": "x" * 3000}) for result in seeds(40)))
    content = bytearray(path.read_bytes())
    content[4096 : 4096 * 3] = b"\xa5" * (4096 * 2)
    path.write_bytes(content)


def one_row_less(path: Path) -> None:
    """Each page can be read, but the one with the rows counts one of them less."""
    content = bytearray(filled(path, *seeds(2)).read_bytes())
    assert content[4096:4101] == b"\x0d\0\0\0\x02", "expected a leaf of two rows"
    content[4100] = 1
    path.write_bytes(content)


def truncated(path: Path) -> None:
    filled(path, *(replace(result, manifest={"long": "x" * 3000}) for result in seeds(40)))
    os.truncate(path, path.stat().st_size // 2)


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "text": (lambda path: path.write_text("method,accuracy\nbufr,0.8\n"), "is no SQLite database"),
    "one byte": (lambda path: path.write_bytes(b"\0"), "is no SQLite database"),
    "zeros": (lambda path: path.write_bytes(bytes(8192)), "is no SQLite database"),
    "header alone": (lambda path: path.write_bytes(b"SQLite format 3\0"), "a store of benchmark"),
    "another program's": (lambda path: foreign(path, "CREATE TABLE photos (name)"), "a store of benchmark"),
    "another program's table of that name": (
        lambda path: foreign(path, "CREATE TABLE cells (name)", "PRAGMA user_version = 1"),
        "a store of benchmark",
    ),
    "another version": (
        lambda path: foreign(filled(path, done()), "PRAGMA user_version = 2"),
        "a store of version 1",
    ),
    "overwritten pages": (overwritten, "is damaged. Go back"),
    "a row less": (one_row_less, "is damaged. Go back"),
    "half the file": (truncated, "is damaged. Go back"),
    "a folder": (Path.mkdir, "got the folder"),
}


@pytest.mark.slow
@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_gets_one_sentence_and_stays_as_it_is(name: str, read_only: bool, tmp_path: Path) -> None:
    make, message = BAD[name]
    path = tmp_path / "some store.sqlite"
    make(path)
    before = None if path.is_dir() else (path.read_bytes(), path.stat().st_mtime_ns)
    with pytest.raises(DataError, match=message) as caught:
        Store(path, read_only=read_only)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert before is None or (path.read_bytes(), path.stat().st_mtime_ns) == before
    assert list(tmp_path.iterdir()) == [path]


def test_text_that_cannot_be_decoded_is_damage_in_a_short_sentence(tmp_path: Path) -> None:
    path = filled(tmp_path / "store.sqlite", replace(done(), manifest={"long": "x" * 3000}))
    content = path.read_bytes()
    assert content.count(b"x" * 500) > 1
    path.write_bytes(content.replace(b"x" * 500, b"\xff" * 500, 1))
    with pytest.raises(DataError, match=r"damaged.*copy"):
        contents(path)


def test_a_damaged_row_is_named_with_its_store(tmp_path: Path) -> None:
    """Which of several stores that are merged it is in would not be known otherwise."""
    path = filled(tmp_path / "store.sqlite", replace(done(), manifest={"long": "x" * 3000}))
    path.write_bytes(path.read_bytes().replace(b"x" * 500, b"\n" * 500, 1))
    with pytest.raises(DataError, match=r"store\.sqlite.*bufr.*123 is damaged"):
        contents(path)


def test_another_programs_unfinished_business_is_not_finished(tmp_path: Path) -> None:
    """SQLite would move a write-ahead log into the file of whoever left it there."""
    owner = sqlite3.connect(tmp_path / "theirs")
    owner.executescript("PRAGMA journal_mode = WAL; CREATE TABLE photos (name); INSERT INTO photos VALUES ('x')")
    shutil.copytree(tmp_path, tmp_path / "copy")
    owner.close()
    before = {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()}
    assert len(before["theirs-wal"]) > 0
    with pytest.raises(DataError, match=r"SQLite database|no store"):
        Store(tmp_path / "copy" / "theirs")
    assert {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()} == before


def test_reading_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a store.*Run a benchmark"):
        Store(tmp_path / "store", read_only=True)
    with pytest.raises(DataError, match="Expected a store"):
        Store(tmp_path / "folder" / "store", read_only=True)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "empty").touch()  # as it is while its first process starts
    with pytest.raises(DataError, match="Expected a store"):
        Store(tmp_path / "empty", read_only=True)
    assert (tmp_path / "empty").stat().st_size == 0
    with Store(tmp_path / "empty") as store:
        assert store.results() == []


def test_who_reads_cannot_write(tmp_path: Path) -> None:
    path = filled(tmp_path / "store", done())
    before = path.read_bytes()
    with Store(path, read_only=True) as store:
        with pytest.raises(DataError, match="open for reading only"):
            store.record(failed(cell=replace(CELL, seed=1)))
        assert store.results() == [done()]
    assert path.read_bytes() == before


def test_a_missing_folder_is_not_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in ("missing", "file"):
        with pytest.raises(DataError, match=f"{folder}.*does not exist"):
            Store(tmp_path / folder / "results")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_write_protected_place_is_named(tmp_path: Path) -> None:
    path = filled(tmp_path / "store", done())
    for protected, mode in ((path, 0o444), (tmp_path, 0o555)):
        before = protected.stat().st_mode
        protected.chmod(mode)
        try:
            with pytest.raises(DataError, match="write-protected"):
                Store(path)
            assert contents(path) == [done()]  # but it can be read
        finally:
            protected.chmod(before)


def test_whoever_may_not_write_is_told_before_anything_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = filled(tmp_path / "store", done())
    for protected in (path, tmp_path):
        monkeypatch.setattr(os, "access", lambda place, mode, protected=protected: Path(place) != protected)
        with pytest.raises(DataError, match="write-protected"):
            Store(path)
        assert contents(path) == [done()]


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = filled(tmp_path / "store", done())

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    for look in (load_results, Store):
        with pytest.raises(DataError, match=r"read.*Permission denied"):
            look(path)


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder in which nobody can make files")
def test_a_folder_that_takes_no_files_is_named() -> None:
    with pytest.raises(DataError, match="/proc/shiftmend"):
        Store("/proc/shiftmend.sqlite")


def test_names_with_odd_characters(tmp_path: Path) -> None:
    path = filled(tmp_path / "a?b=c#d %41 é.sqlite", done())
    assert contents(path) == [done()]
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_said_and_takes_nothing_with_it(tmp_path: Path) -> None:
    with Store(filled(tmp_path / "store", done())) as store:
        store._connection.execute("PRAGMA max_page_count = 4")  # the only disk a test can fill
        with pytest.raises(DataError, match="no room"):
            store.record(done(cell=replace(CELL, seed=1), manifest={"long": "x" * 100_000}))
        assert store.record(done(cell=replace(CELL, seed=2))) is True
        assert [result.cell.seed for result in store.results()] == [2, 123]


def test_a_store_that_was_taken_away_takes_no_result_with_it(tmp_path: Path) -> None:
    with Store(filled(tmp_path / "store", done())) as store:
        (tmp_path / "store").rename(tmp_path / "elsewhere")
        with pytest.raises(DataError, match="moved or deleted"):
            store.record(done(cell=replace(CELL, seed=1)))
    assert contents(tmp_path / "elsewhere") == [done()]


# Several processes, and their deaths

WRITER = """
import sys
from dataclasses import replace
from shiftmend.research.bench.benchmark import Cell
from shiftmend.research.bench.benchmark import Outcome
from shiftmend.research.bench.benchmark import Result
from shiftmend.research.bench.store import Store

path, name, first, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
print("ready", flush=True)
sys.stdin.readline()
with Store(path) as store:
    for seed in range(first, first + count):
        cell = Cell("emnist-da", "offline", "bufr", "sky", seed, "a1b2")
        history = tuple({"epoch": epoch, "loss": 0.5} for epoch in range(400))
        result = Result(cell, "published", last=Outcome(9, 0.8, 0.1, 0.2, 0.7, 0.3), history=history, finished=name)
        print(seed, int(store.record(result)), flush=True)
"""


def writer(path: Path, name: str, first: int, count: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), name, str(first), str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def start(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def acknowledged(lines: list[str]) -> dict[int, bool]:
    """What a writer was told, but for a last line that it was killed in."""
    return {int(seed): kept == "1" for seed, kept in (line.split() for line in lines if line.endswith("\n"))}


@pytest.mark.slow
def test_what_was_acknowledged_survives_sigkill(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    known: dict[int, bool] = {}
    for round_number in range(3):
        process = writer(path, "killed", 10_000 * round_number, 10_000)
        start(process)
        assert process.stdout is not None
        # Some way into the loop, and then at no particular moment of it.
        lines = [process.stdout.readline() for _ in range(5)]
        time.sleep(0.02 + 0.0137 * round_number)
        os.kill(process.pid, signal.SIGKILL)
        lines += process.stdout.readlines()
        assert process.wait(10) == -signal.SIGKILL
        process.stdout.close()
        told = acknowledged(lines)
        assert len(told) >= 5
        assert all(told.values())
        known |= told
        found = [result.cell.seed for result in contents(path)]
        assert len(found) == len(set(found))
        unannounced = set(found) - set(known)
        assert set(known) <= set(found)
        assert len(unannounced) <= 1  # committed, but killed before it could say so
        known |= dict.fromkeys(unannounced, True)
        assert all(len(result.history) == 400 for result in contents(path))
    with Store(path) as store:
        assert store.record(done(cell=replace(CELL, seed=-1))) is True


KILLED_WITHIN = """
import os, signal, sys
from shiftmend.research.bench.store import Store

store = Store(sys.argv[1])
store._connection.execute("PRAGMA cache_size = 1")  # writes pages before the commit
store._connection.execute("BEGIN IMMEDIATE")
store._connection.execute("UPDATE cells SET manifest = manifest || zeroblob(9000), last_accuracy = 0")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("read_only", [True, False])
def test_half_a_transaction_is_taken_back_by_whoever_comes_next(read_only: bool, tmp_path: Path) -> None:
    path = filled(tmp_path / "store", *seeds(60))
    before = path.read_bytes()
    killed = subprocess.run([sys.executable, "-c", KILLED_WITHIN, str(path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "store-journal").stat().st_size > 0
    assert path.read_bytes() != before  # really half written
    with Store(path, read_only=read_only) as store:
        assert store.results() == seeds(60)
    assert not (tmp_path / "store-journal").exists()


@pytest.mark.slow
def test_two_processes_write_the_same_and_different_cells(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"  # which both find missing
    processes = [writer(path, "first", 0, 60), writer(path, "second", 30, 60)]
    for process in processes:
        start(process)
    told = []
    for process in processes:
        assert process.stdout is not None
        told.append(acknowledged(process.stdout.readlines()))
        assert process.wait(60) == 0
        process.stdout.close()
    assert [len(answers) for answers in told] == [60, 60]
    results = contents(path)
    assert [result.cell.seed for result in results] == list(range(90))
    for result in results:
        keepers = [
            name for name, answers in zip(("first", "second"), told, strict=True) if answers.get(result.cell.seed)
        ]
        assert keepers == [result.finished]


@pytest.mark.slow
def test_a_writer_waits_for_another_and_says_so_if_in_vain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = filled(tmp_path / "store", done())
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    monkeypatch.setattr(store_module, "SECONDS_TO_WAIT", 0.1)
    with Store(path) as store:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(DataError, match=r"process.*0.1 seconds"):
            store.record(done(cell=replace(CELL, seed=1)))
        assert store.results() == [done()]  # reading goes on
    monkeypatch.setattr(store_module, "SECONDS_TO_WAIT", 20.0)
    with Store(path) as store:
        release = threading.Timer(0.2, other.execute, ("COMMIT",))
        release.start()
        assert store.record(done(cell=replace(CELL, seed=1))) is True
        release.join()
    other.close()


def test_a_closed_store_is_closed(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store:
        store.record(done())
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        store.results()


# ---- Results in a small file: what comes back, what is left out, and how large it is

MANIFEST: dict[str, Any] = {
    "environment": {"torch": "2.5", "device": "cpu", "platform": "Linux-6.1"},
    "cell": {"seed": 123},
    "source": {"name": "größer", "recipe": {"learning_rate": 0.1}},
    "target": {"mean": [[0.123456789, 2 / 3]]},
    "reliability": [{"lower": 0.0, "count": 3}],
    "verification": {"before": {"divergence": 1.2345678, "verdict": "not restored"}, "after": {"divergence": 0.5}},
    "adapted_weights": "ab" * 32,
}
DONE = Result(
    CELL,
    "rebuilt",
    last=Outcome(150, 0.853563829787234, 0.05, 0.1, 0.7, 0.3),
    best=Outcome(140, 0.81, 0.04, 0.11, 0.69, 0.29),
    signals={"slices": 0.5, "entropy": 0.4},
    restoration_distance=1.25,
    alignment_loss=0.5,
    epochs=150,
    seconds=12.5,
    peak_memory=2**40,
    history=({"epoch": 0, "loss": 3.5},),
    manifest=MANIFEST,
    finished="2022-04-25T09:00:00Z",
)
FAILED = Result(replace(CELL, seed=234), "rebuilt", error='out of "memory",\nafter all', manifest=MANIFEST)


def test_everything_comes_back_but_what_is_left_out() -> None:
    first, second = from_compact(to_compact([FAILED, DONE]))
    kept = {
        "environment": {"torch": "2.5", "device": "cpu"},
        "source": MANIFEST["source"],
        "target": {"mean": [[0.123457, 0.666667]]},
        "verification": {"before": {"divergence": 1.23457, "verdict": "not restored"}, "after": {}},
    }
    assert first == replace(DONE, last=replace(DONE.last, accuracy=0.853564), history=(), manifest=kept)  # type: ignore[type-var]
    assert second == replace(FAILED, manifest=kept)
    for judged in ({"before": {"divergence": 1.5}}, {"after": None}, {}, None):  # as after an interrupted verification
        (back,) = from_compact(to_compact([replace(DONE, manifest={"verification": judged})]))
        assert back.manifest == {"verification": judged}


def test_what_manifests_share_stands_once_and_cells_are_lines() -> None:
    cells = [replace(DONE, cell=replace(CELL, seed=seed)) for seed in range(50)]
    text = to_compact(cells)
    assert text.count("größer") == 1
    assert json.loads(text)["shared"]["environment"] == [{"torch": "2.5", "device": "cpu"}]
    assert sum(line.startswith('  ["emnist-da"') for line in text.splitlines()) == 50
    other = replace(cells[7], seconds=3.0)
    changed = to_compact([*cells[:7], other, *cells[8:]])
    # The cell, and the seal.
    assert sum(a != b for a, b in zip(text.splitlines(), changed.splitlines(), strict=True)) == 2


@pytest.mark.slow
def test_a_thousand_cells_stay_below_a_megabyte() -> None:
    """With digits that do not end, and a target, a profile and a verdict of its own for every seed and shift."""
    results = []
    for number in range(1000):
        seed, place = number % 5, number % 65
        third = (number + 1) / 3e3
        outcome = Outcome(137, third, third / 3, third / 7, third * 7, third / 11)
        manifest = MANIFEST | {
            "target": {"sha256": f"{place:064x}", "samples": 18800, "mean": [third] * 3, "deviation": [third] * 3},
            "profile_sha256": f"{seed:064x}",
            "method": {"name": f"method-{number % 14}", "learning_rate": 0.1, "epochs": 150},
            "verification": {"before": {"divergence": place / 7, "floor": 0.000123456789}, "after": {"floor": 0.1}},
        }
        cell = Cell("emnist-da", "few-shot-20", f"method-{number % 14}", f"some_noise-{place}", number, "0" * 16)
        results.append(
            replace(DONE, cell=cell, last=outcome, best=outcome, selected=outcome, manifest=manifest)
            if number
            else DONE
        )
    results = [replace(one, signals=dict.fromkeys(SIGNALS, 1 / 3)) for one in results]
    assert len(to_compact(results).encode()) < 1_000_000


compact_numbers = st.floats(allow_nan=True, allow_infinity=True)
values = st.recursive(st.none() | st.integers(-9, 9) | compact_numbers | st.text(max_size=5), st.lists)


@pytest.mark.slow
@given(
    accuracy=compact_numbers,
    signals=st.dictionaries(st.sampled_from(SIGNALS), compact_numbers),
    distance=st.none() | compact_numbers,
    manifest=st.dictionaries(st.text(max_size=4), values, max_size=3),
)
def test_what_was_read_is_written_again_as_it_was(
    accuracy: float, signals: dict[str, float], distance: float | None, manifest: dict[str, Any]
) -> None:
    result = replace(
        DONE,
        last=Outcome(1, accuracy, 0.1, 0.1, 0.1, 0.1),
        signals=signals,
        restoration_distance=distance,
        manifest=manifest,
    )
    text = to_compact([result, FAILED])
    first, _ = back = from_compact(text)
    assert to_compact(back) == text
    assert first.last is not None
    assert first.last.accuracy == pytest.approx(accuracy, rel=1e-5, nan_ok=True)
    assert first.signals == pytest.approx(signals, rel=1e-5, nan_ok=True)
    assert (first.restoration_distance is None) == (distance is None)


def test_numbers_that_are_not_finite_come_back() -> None:
    odd = replace(DONE, last=Outcome(1, 0.1, math.nan, 0.1, math.inf, 0.9), alignment_loss=-math.inf)
    text = to_compact([odd])
    json.loads(text, parse_constant=pytest.fail)
    (back,) = from_compact(text)
    assert back.last is not None
    assert math.isnan(back.last.ece)
    assert (back.last.nll, back.alignment_loss) == (math.inf, -math.inf)


def test_nothing_is_a_file_too() -> None:
    assert from_compact(to_compact([])) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: [], "holds no object"),
        (lambda content: content | {"format": "other"}, "it holds no results"),
        (lambda content: content | {"version": 9}, "has version 9, expected"),
        (lambda content: {key: value for key, value in content.items() if key != "rows"}, "damaged .KeyError"),
        (lambda content: content | {"rows": [content["rows"][0][:-1]]}, "damaged .ValueError"),
        (lambda content: content | {"shared": {**content["shared"], "source": []}}, "damaged .IndexError"),
        (lambda content: content | {"rows": [[*content["rows"][0][:4], "7", *content["rows"][0][5:]]]}, "seed is '7'"),
        (lambda content: content | {"rows": content["rows"] * 2}, "it has 2 rows of bufr on sky, seed 123"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, change: Any, message: str) -> None:
    file = tmp_path / "results.json"
    content = json.loads(to_compact([DONE])) | {"version": 1}
    del content["sha256"]
    file.write_text(json.dumps(change(content)))
    with pytest.raises(DataError, match=rf"results\.json.*{message}"):
        read_compact(file)


def test_a_changed_digit_is_noticed_and_a_file_of_before_is_marked(tmp_path: Path) -> None:
    text = to_compact([DONE])
    assert "unsealed" not in from_compact(text)[0].manifest
    place = text.rindex("0.5")
    with pytest.raises(DataError, match="SHA-256"):
        from_compact(f"{text[:place]}0.6{text[place + 3 :]}")
    content = json.loads(text)
    del content["sha256"]
    with pytest.raises(DataError, match="version"):
        from_compact(json.dumps(content))
    content["version"] = 1
    (before,) = from_compact(json.dumps(content))
    assert before.manifest["unsealed"] is True
    assert to_compact([before]) == text


def test_a_changed_number_in_a_store_is_noticed_and_rows_of_before_are_marked(tmp_path: Path) -> None:
    path = filled(tmp_path / "store.sqlite", done(0.75))
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE cells SET last_accuracy = 0.76")
    with Store(path, read_only=True) as store, pytest.raises(DataError, match="SHA-256"):
        store.results()
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("ALTER TABLE cells DROP COLUMN sha256")
    with Store(path, read_only=True) as store:
        (result,) = store.results()
    assert result.manifest["unsealed"] is True
    with Store(path) as store:
        store.record(done(0.5, cell=replace(CELL, seed=77)))
        marks = {found.cell.seed: "unsealed" in found.manifest for found in store.results()}
    assert marks == {CELL.seed: True, 77: False}


def test_a_schema_that_is_no_text(tmp_path: Path) -> None:
    path = filled(tmp_path / "store.sqlite", done(0.75))
    content = path.read_bytes()
    path.write_bytes(content.replace(b"CREATE TABLE cells (benchmark", b"CREATE TABLE cells (\xff\xfe\xff\xfehmark"))
    assert path.read_bytes() != content
    with pytest.raises(DataError, match="damaged"):
        Store(path, read_only=True)


@pytest.mark.parametrize("column", ["history", "manifest"])
def test_a_row_without_bottom(tmp_path: Path, column: str) -> None:
    path = filled(tmp_path / "store.sqlite", done(0.75))
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE cells SET {column} = ?, sha256 = NULL", ("[" * 50_000,))
    with Store(path, read_only=True) as store, pytest.raises(DataError, match="damaged"):
        store.results()


def test_brief_results_are_the_same_cells(tmp_path: Path) -> None:
    path = filled(tmp_path / "store.sqlite", done(0.75), failed(cell=replace(CELL, seed=5)))
    with Store(path, read_only=True) as store:
        brief, whole = sorted(store.brief_results(), key=lambda one: one.cell), store.results()
    for mine, theirs in zip(brief, whole, strict=True):
        assert (mine.cell, mine.failed, mine.error) == (theirs.cell, theirs.failed, theirs.error)
        assert (mine.seconds, mine.origin, mine.finished) == (theirs.seconds, theirs.origin, theirs.finished)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="bytes cannot be read"):
        read_compact(tmp_path / "bytes")


# ----

EXPORTED = Result(
    CELL,
    "published",
    last=Outcome(150, 0.8, 0.05, 0.1, 0.7, 0.3),
    best=Outcome(140, 0.81, 0.04, 0.11, 0.69, 0.29),
    selected=None,
    signals={"slices": 0.01, "entropy": 0.4},
    restoration_distance=1.25,
    alignment_loss=0.5,
    ece_per_batch=None,
    epochs=150,
    seconds=12.5,
    peak_memory=2**40,
    history=({"epoch": 0, "loss": 3.5}, {"epoch": 1, "loss": math.inf, "why": 'a "quoted", line\nand another'}),
    manifest={"rate": 0.01, "parts": [0.8, 0.1, 0.1], "source": {"epochs": 150, "name": "größer"}},
    finished="2022-04-25T09:00:00Z",
)
EXPORTED_FAILED = Result(replace(CELL, seed=234), "published", error="out of memory,\nafter all")


def test_every_fact_has_a_column() -> None:
    row = flatten(EXPORTED)
    assert list(row) == list(COLUMNS)
    assert [row[name] for name in ("benchmark", "protocol", "method", "shift", "seed", "recipe")] == [
        *("emnist-da", "offline", "bufr", "sky", 123, "a1b2")
    ]
    assert (row["status"], row["error"], row["origin"]) == ("done", None, "published")
    assert (row["last_epoch"], row["last_accuracy"], row["last_ece"]) == (150, 0.8, 0.05)
    assert (row["best_mce"], row["best_nll"], row["best_brier"]) == (0.11, 0.69, 0.29)
    assert all(row[f"selected_{score}"] is None for score in ("epoch", "accuracy", "ece", "mce", "nll", "brier"))
    assert [row[name] for name in SIGNALS] == [0.01, None, 0.4, None]
    assert (row["peak_memory"], row["seconds"], row["finished"]) == (2**40, 12.5, "2022-04-25T09:00:00Z")
    assert json.loads(str(row["manifest"])) == EXPORTED.manifest
    assert unflatten(row) == EXPORTED


def test_csv_has_the_columns_and_one_line_a_result() -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv([EXPORTED, EXPORTED_FAILED]))))
    assert [list(row) for row in rows] == [list(COLUMNS)] * 2
    for row, result in zip(rows, (EXPORTED, EXPORTED_FAILED), strict=True):
        assert row == {name: "" if value is None else str(value) for name, value in flatten(result).items()}
    assert rows[1]["status"] == "failed"
    assert rows[1]["error"] == "out of memory,\nafter all"
    assert float(rows[0]["last_accuracy"]) == 0.8


def test_csv_of_nothing_is_a_header() -> None:
    assert to_csv([]).split("\n") == [",".join(COLUMNS), ""]


def test_json_holds_history_and_manifest_as_objects() -> None:
    first, second = json.loads(to_json([EXPORTED, EXPORTED_FAILED]), parse_constant=pytest.fail)
    assert list(first) == list(COLUMNS)
    assert first["manifest"] == EXPORTED.manifest
    assert first["history"][0] == EXPORTED.history[0]
    assert first["history"][1]["loss"] == "Infinity"
    assert first["last_accuracy"] == 0.8
    assert (second["status"], second["last_accuracy"], second["history"]) == ("failed", None, [])
    assert json.loads(to_json([])) == []


def test_numbers_that_are_not_finite_stay_visible() -> None:
    result = replace(EXPORTED, last=Outcome(1, 0.1, math.nan, 0.1, math.inf, 0.9), alignment_loss=-math.inf)
    (row,) = csv.DictReader(io.StringIO(to_csv([result])))
    assert (row["last_ece"], row["last_nll"], row["alignment_loss"]) == ("nan", "inf", "-inf")
    (entry,) = json.loads(to_json([result]), parse_constant=pytest.fail)
    assert (entry["last_ece"], entry["last_nll"], entry["alignment_loss"]) == ("NaN", "Infinity", "-Infinity")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"manifest": {"a": [{"b": Path("x")}]}}, r"manifest\.a\[0\]\.b.*a PosixPath"),
        ({"manifest": {"rates": {0: 0.1}}}, r"manifest\.rates.*keys"),
        ({"history": ({"loss": torch.zeros(2)},)}, r"history\[0\]\.loss.*a Tensor"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        flatten(replace(EXPORTED, **changes))


def test_words_that_stand_for_numbers_come_back_as_these() -> None:
    found = unflatten(flatten(replace(EXPORTED, manifest={"a": "Infinity", "b": ["-Infinity", "nan", "NaN and more"]})))
    assert found.manifest == {"a": math.inf, "b": [-math.inf, "nan", "NaN and more"]}


def test_whole_numbers_of_64_bits_are_kept() -> None:
    for seed in (-(2**63), 2**63 - 1):
        assert flatten(replace(EXPORTED, cell=replace(CELL, seed=seed)))["seed"] == seed


def test_an_error_may_quote_a_file_name_that_is_not_unicode() -> None:
    assert flatten(replace(EXPORTED_FAILED, error="no file \udcff"))["error"] == r"no file \udcff"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"history": "[1"}, "Expecting"),
        ({"history": "{}"}, "history or manifest is of the wrong form"),
        ({"manifest": "[]"}, "history or manifest is of the wrong form"),
        ({"manifest": None}, "manifest is None, expected text"),
        ({"last_accuracy": None}, "last_accuracy is missing"),
        ({"last_epoch": None}, "last_epoch is missing"),
        ({"last_accuracy": "high"}, "last_accuracy is 'high', expected a number"),
        ({"last_accuracy": True}, "last_accuracy is True, expected a number"),
        (
            {f"last_{score}": None for score in ("epoch", "accuracy", "ece", "mce", "nll", "brier")},
            "there is neither a last",
        ),
        ({"selected_nll": 0.5}, "selected_epoch is missing"),
        ({"seconds": None}, "seconds is None, expected a number"),
        ({"origin": "elsewhere"}, "origin is 'elsewhere', expected one of published"),
        ({"status": "failed"}, "status is 'failed', but the error is None"),
        ({"error": "boom"}, "status is 'done', but the error is 'boom'"),
    ],
)
def test_a_damaged_row_is_named(damage: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"bufr.*123 is damaged.*{message}"):
        unflatten(flatten(EXPORTED) | damage)


def test_a_stored_error_is_no_formula_and_steers_no_terminal() -> None:
    (row,) = csv.DictReader(io.StringIO(to_csv([failed(error="=1+1\x1b[2J")])))
    assert row["error"] == r"'=1+1\x1b[2J"
