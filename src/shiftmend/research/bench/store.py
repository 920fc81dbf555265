"""Storage of results: an SQLite file that runs write to, exports, and a compact JSON file to keep with source code.

The compact file is read back wherever a store is:

    {"format": "shiftmend results", "version": 2, "sha256": "...",
     "columns": [...], "shared": {...}, "rows": [[...], ...]}

A row is a cell. What many manifests have in common stands once under `shared`: for each entry of a manifest the values
that occur, and in the last place of a row which of them are its own. Left out are histories, reliability bins, and what
a manifest says a second time. Numbers are rounded to six digits, which no table shows.
"""

from __future__ import annotations

import csv
import gc
import hashlib
import io
import json
import math
import os
import sqlite3
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, get_args

from shiftmend.errors import DataError
from shiftmend.research.bench.benchmark import SIGNALS, Cell, Origin, Outcome, Result, Which
from shiftmend.utils import sealing
from shiftmend.utils.checks import one_line
from shiftmend.utils.json import dumps, from_strict_json, loads, to_strict_json
from shiftmend.utils.signing import Key
from shiftmend.utils.terminal import neutralise_cell

STORE = "results.sqlite"
"""The store's name in a folder of results."""

VERSION = 1
APPLICATION_ID = b"shmd"
"""Application id that marks the file as ours, in SQLite's header (bytes 68 to 71)."""

SECONDS_TO_WAIT = 60.0
"""Seconds to wait for another process that is writing."""

UNSEALED = {"unsealed": True}
"""Entry that is added to the manifest of a result without a seal, since changes would go unnoticed."""

COMPACT_FORMAT = "shiftmend results"
COMPACT_VERSION = 2
"""Files of version 1 have no seal."""
COMPACT_DIGITS = 6

Value = str | int | float | None

_KEY = tuple(field.name for field in fields(Cell))
_SCORES = tuple(field.name for field in fields(Outcome))
_MOMENTS: tuple[str, ...] = get_args(Which)
_SCALARS = ("restoration_distance", "alignment_loss", "ece_per_batch")

COLUMNS: dict[str, str] = {
    **{name: "INTEGER" if name == "seed" else "TEXT" for name in _KEY},
    "status": "TEXT",
    "error": "TEXT",
    "origin": "TEXT",
    **{f"{moment}_{score}": "INTEGER" if score == "epoch" else "REAL" for moment in _MOMENTS for score in _SCORES},
    **dict.fromkeys((*SIGNALS, *_SCALARS), "REAL"),
    "epochs": "INTEGER",
    "seconds": "REAL",
    "peak_memory": "INTEGER",
    "finished": "TEXT",
    "history": "TEXT",
    "manifest": "TEXT",
}
"""The flat form of a result: names and SQL types, in the order of the table and of exports."""

REQUIRED = (*_KEY, "status", "origin", "epochs", "finished", "history", "manifest")
"""Columns that are never empty. `seconds` may be NaN, which SQLite stores as NULL."""

_PYTHON_TYPES = {"REAL": (int, float), "INTEGER": (int,), "TEXT": (str,)}
_TYPE_NAMES = {"REAL": "a number", "INTEGER": "a whole number of at most 64 bits", "TEXT": "text in Unicode"}


def load_results(
    folder: str | os.PathLike[str], benchmark: str | None = None, *, brief: bool = False, trust: str | None = None
) -> list[Result]:
    """Load all results of a folder's store, of a store, or of a compact file.

    Args:
        folder: The folder, the store or the compact file.
        benchmark: Load only results of this benchmark.
        brief: Whether to load only what `Store.brief_results` returns.
        trust: Public key that the file must be signed with. A store cannot be signed, so it is refused.
    """
    place = Path(folder)
    if place.is_file() and not _read_header(place).startswith(_SQLITE_HEADER):
        return [result for result in read_compact(place, trust) if benchmark in (None, result.cell.benchmark)]
    if trust is not None:
        raise DataError(
            f"Expected a signed export, got the store {place}, which bears no signature. Try a file of `bench export "
            "--sign`."
        )
    with Store(place if place.is_file() else place / STORE, read_only=True, check=not brief) as store:
        return store.brief_results(benchmark) if brief else store.results(benchmark=benchmark)


# ---- the store

_SQLITE_HEADER = b"SQLite format 3\0"

# SQLite has no NaN: the column `not_a_number` names the values of a row that are.
_STORED = (*COLUMNS, "not_a_number")

# The seal of a row is the SHA-256 of all its other values. Rows of earlier versions have none.
_SEALED = (*_STORED, "sha256")

_BRIEF = (*_KEY, "status", "error", "origin", "seconds", "finished")

_CREATE = "CREATE TABLE cells ({}, CHECK (status IN ('done', 'failed')), PRIMARY KEY ({}))".format(
    ", ".join(
        f"{name} {COLUMNS.get(name, 'TEXT')}" + (" NOT NULL" if name in (*REQUIRED, "not_a_number") else "")
        for name in _SEALED
    ),
    ", ".join(_KEY),
)

_PUT = "INSERT INTO cells ({}) VALUES ({}) ON CONFLICT ({}) DO UPDATE SET {} WHERE cells.status = 'failed'".format(
    ", ".join(_SEALED),
    ", ".join(f":{name}" for name in _SEALED),
    ", ".join(_KEY),
    ", ".join(f"{name} = excluded.{name}" for name in _SEALED if name not in _KEY),
)

_PUT_IF_BETTER = _PUT + " AND (excluded.status = 'done' OR excluded.finished > cells.finished)"


class Store:
    """A connection to an SQLite file of benchmark results.

    Several processes may open the same file at once. Each connection is used only by the thread that opened it.

    Args:
        path: The file. It is created if it is missing, but its folder must exist.
        read_only: Whether to refuse to write. A missing or empty file is then an error too. What a killed process left
            half written is still rolled back.
        check: Whether to read the whole file to find damage. Otherwise only damage in what is read later is found.

    Raises:
        DataError: If the file cannot be used: foreign, damaged, of another version, or missing or write-protected.
    """

    def __init__(self, path: str | os.PathLike[str], *, read_only: bool = False, check: bool = True) -> None:
        self.path = Path(path)
        _check_place(self.path, read_only)
        if os.path.exists(self.path):
            _check_header(self.path)
        # "rw" also to read: only who may write can roll back what a killed process left half written. SQLite itself
        # falls back to reading where the file is write-protected.
        address = f"{self.path.absolute().as_uri()}?mode={'rw' if read_only else 'rwc'}"
        with _explain_errors(self.path):
            self._connection = sqlite3.connect(address, uri=True, timeout=SECONDS_TO_WAIT, isolation_level=None)
            try:
                self._prepare(read_only, check)
            except BaseException:
                self._connection.close()
                raise

    def _prepare(self, read_only: bool, check: bool) -> None:
        # The journal stays SQLite's default, a file beside the store that is deleted at each commit, rather than a
        # write-ahead log: then the one file is all there is to copy to another machine, it can be read in a folder that
        # is write-protected, and it works on network drives. A log is faster, but a cell takes minutes. EXTRA also
        # flushes the folder after the journal is deleted, so that not even a power cut takes back an acknowledged row.
        self._connection.execute("PRAGMA synchronous = EXTRA")
        if self._is_blank():
            if read_only:
                raise _refuse_missing(self.path)
            with self._transaction():
                # Another process may have been faster.
                if self._is_blank():
                    self._connection.execute(_CREATE)
                    self._connection.execute(f"PRAGMA application_id = {int.from_bytes(APPLICATION_ID)}")
                    self._connection.execute(f"PRAGMA user_version = {VERSION}")
        version = self._pragma("user_version")
        if version != VERSION:
            raise DataError(
                f"Expected a store of version {VERSION}, got {version} in {self.path}. Open it with the shiftmend that "
                "wrote it, or name a new file."
            )
        if check and self._pragma("quick_check") != "ok":
            raise _refuse_damaged(self.path)
        self._has_seals = self._find_seals()
        if not read_only and not self._has_seals:
            with self._transaction():
                # Another process may have been faster.
                if not self._find_seals():
                    self._connection.execute("ALTER TABLE cells ADD COLUMN sha256 TEXT")
            self._has_seals = True
        if read_only:
            self._connection.execute("PRAGMA query_only = ON")

    def _is_blank(self) -> bool:
        """Tell if the file is new, or its first process was killed before it had made the table."""
        return not self._connection.execute("SELECT * FROM sqlite_master").fetchall()

    def _find_seals(self) -> bool:
        columns = self._connection.execute("SELECT name FROM pragma_table_info('cells')").fetchall()
        return ("sha256",) in columns

    def _pragma(self, name: str) -> Any:
        return self._connection.execute(f"PRAGMA {name}").fetchone()[0]

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with _explain_errors(self.path):
            try:
                # IMMEDIATE: two processes that first read and then both want to write would wait for each other.
                self._connection.execute("BEGIN IMMEDIATE")
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def record(self, result: Result) -> bool:
        """Store a result permanently: once this returns, it survives a crash and a power cut.

        A finished cell keeps its first result; a failed one is replaced by any other.

        Returns:
            True if `result` is what the store now holds.
        """
        row = _to_row(result)
        with self._transaction():
            return self._connection.execute(_PUT, row).rowcount == 1

    def merge(self, results: Iterable[Result]) -> int:
        """Add results of other stores, and return how many were added.

        A finished cell of this store stays, as with `record`. A failure is replaced by any success, and by a later
        failure.
        """
        rows = [_to_row(result) for result in results]
        with self._transaction():
            return sum(self._connection.execute(_PUT_IF_BETTER, row).rowcount for row in rows)

    def results(
        self,
        benchmark: str | None = None,
        protocol: str | None = None,
        method: str | None = None,
        shift: str | None = None,
        seed: int | None = None,
        recipe: str | None = None,
        status: Literal["done", "failed"] | None = None,
    ) -> list[Result]:
        """List the results that match all arguments, failed ones included, in the order of their cells."""
        asked = zip((*_KEY, "status"), (benchmark, protocol, method, shift, seed, recipe, status), strict=True)
        wanted = {name: value for name, value in asked if value is not None}
        conditions = " AND ".join(f"{name} = :{name}" for name in wanted) or "1"
        read = f"{', '.join(_STORED)}, {'sha256' if self._has_seals else 'NULL'}"
        query = f"SELECT {read} FROM cells WHERE {conditions} ORDER BY {', '.join(_KEY)}"
        try:
            with _explain_errors(self.path):
                # Rows are read one at a time, because the text of all rows would take several times the memory of the
                # results.
                return [_from_row(row) for row in self._connection.execute(query, wanted)]
        except DataError as error:
            raise DataError(f"the store {self.path}: {error}") from None

    def brief_results(self, benchmark: str | None = None) -> list[Result]:
        """List which cells are done and which failed, in any order, without outcomes, histories and manifests.

        Seals are not checked. A hundred thousand rows take a second.
        """
        condition = "1" if benchmark is None else "benchmark = ?"
        # NOT INDEXED: to find rows by an index, one after the other, takes twice as long as to read all of them.
        query = f"SELECT {', '.join(_BRIEF)} FROM cells NOT INDEXED WHERE {condition}"
        with _explain_errors(self.path):
            rows = self._connection.execute(query, () if benchmark is None else (benchmark,))
            with _without_collections():
                return [_from_brief_row(row) for row in rows]

    def cells(self) -> set[Cell]:
        """List the finished cells; failed ones are tried again."""
        with _explain_errors(self.path):
            rows = self._connection.execute(f"SELECT {', '.join(_KEY)} FROM cells WHERE status = 'done'").fetchall()
        return {Cell(*row) for row in rows}

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def _without_collections() -> Iterator[None]:
    """Keep Python from looking for garbage again and again while many objects are made that are all kept."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _to_row(result: Result) -> dict[str, Value]:
    row = flatten(result)
    missing = [name for name, value in row.items() if isinstance(value, float) and math.isnan(value)]
    stored = row | dict.fromkeys(missing) | {"not_a_number": " ".join(missing)}
    return stored | {"sha256": _hash_row(stored)}


def _hash_row(row: Mapping[str, Value]) -> str:
    """Hash the values of a row as SQLite returns them: integers in a column of floats become floats."""
    values = [
        float(row[name] or 0) if COLUMNS.get(name) == "REAL" and row[name] is not None else row[name]
        for name in _STORED
    ]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def _from_row(row: tuple[Any, ...]) -> Result:
    values = dict(zip(_SEALED, row, strict=True))
    digest = values.pop("sha256")
    try:
        damaged = digest is not None and digest != _hash_row(values)
    except (TypeError, ValueError):
        # A column of floats contains text.
        damaged = True
    if damaged:
        cell = Cell(*(values[name] for name in _KEY))
        raise DataError(f"The row of {cell} is damaged: it does not match its SHA-256. Delete it and run it again.")
    result = unflatten(values | dict.fromkeys(str(values["not_a_number"]).split(), math.nan))
    return result if digest is not None else replace(result, manifest=result.manifest | UNSEALED)


def _from_brief_row(row: tuple[Any, ...]) -> Result:
    # Rows share their strings, because names of methods and shifts occur thousands of times.
    shared: list[Any] = [sys.intern(value) if type(value) is str else value for value in row]
    *key, status, error, origin, seconds, finished = shared
    cell = Cell(*key)
    if status != ("done" if error is None else "failed") or not isinstance(seconds, float | None):
        raise DataError(f"The row of {cell} is damaged. Delete it and run it again.")
    seconds = math.nan if seconds is None else seconds
    return Result(cell, origin=origin, error=error, seconds=seconds, finished=finished)


def _check_place(path: Path, read_only: bool) -> None:
    """Refuse paths that SQLite would report as 'unable to open database file', or only at the first write."""
    if os.path.isdir(path):
        raise DataError(f"Expected the name of a store of benchmark results, got the folder {path}. Name a file in it.")
    if read_only:
        if not os.path.exists(path):
            raise _refuse_missing(path)
    elif not os.path.isdir(path.parent):
        raise DataError(
            f"Expected the folder of the store {path.name}, got {path.parent}, which does not exist. Make it first."
        )
    elif not os.access(path.parent, os.W_OK | os.X_OK) or (os.path.exists(path) and not os.access(path, os.W_OK)):
        raise DataError(
            f"Expected a store that can be written, got {path}, which is write-protected. Permit writing, or name "
            "another place."
        )


def _check_header(path: Path) -> None:
    """Refuse a foreign file before SQLite opens it, which might change it."""
    header = _read_header(path)
    # An empty file may be a store that another process has just created.
    if header and not header.startswith(_SQLITE_HEADER):
        raise DataError(
            f"Expected a store of benchmark results, got {path}, which is no SQLite database. Name another file."
        )
    if header and header[68:72] != APPLICATION_ID:
        raise DataError(
            f"Expected a store of benchmark results, got {path}, another SQLite database. Name another file."
        )


def _read_header(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(100)
    except OSError as error:
        raise DataError(f"File {path} cannot be read: {error.strerror}. Permit it, or name another file.") from None


def _refuse_missing(path: Path) -> DataError:
    return DataError(f"Expected a store of benchmark results at {path}, got none. Run a benchmark to make it.")


def _refuse_damaged(path: Path) -> DataError:
    return DataError(
        f"The store {path} is damaged. Go back to a copy, or rescue what is left with the sqlite3 shell's .recover."
    )


@contextmanager
def _explain_errors(path: Path) -> Iterator[None]:
    """Turn errors of the database into sentences. Errors of wrong use, such as after `close`, pass unchanged."""
    try:
        yield
    except sqlite3.ProgrammingError:
        raise
    except UnicodeDecodeError:
        # The message of SQLite quotes a schema that is no text.
        raise _refuse_damaged(path) from None
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", None) or ""
        # Text that cannot be decoded was not written by us.
        if str(error).startswith("Could not decode") or name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            raise _refuse_damaged(path) from None
        if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            why = f"has been held by another process for {SECONDS_TO_WAIT:g} seconds; end it or try later"
        elif name == "SQLITE_FULL":
            why = "has no room left on its disk; make some and run again"
        elif name == "SQLITE_READONLY_DBMOVED":
            why = "was moved or deleted while it was in use; put it back and run again"
        elif name.startswith("SQLITE_READONLY"):
            why = "is open for reading only or write-protected"
        else:
            why = f"cannot be used: {error}"
        raise DataError(f"the store {path} {why}") from error


# ---- results as flat rows


def flatten(result: Result) -> dict[str, Value]:
    """Convert a result to the form of `COLUMNS`, with history and manifest as JSON text."""
    values: dict[str, Any] = asdict(result.cell) | {name: result.signals.get(name) for name in SIGNALS}
    for moment in _MOMENTS:
        outcome: Outcome | None = getattr(result, moment)
        values |= {f"{moment}_{score}": None if outcome is None else getattr(outcome, score) for score in _SCORES}
    values |= {
        "status": "failed" if result.failed else "done",
        # Messages may quote file names that are not UTF-8.
        "error": None if result.error is None else result.error.encode("utf-8", "backslashreplace").decode(),
        "history": dumps(result.history, "history"),
        "manifest": dumps(result.manifest, "manifest"),
    }
    return {name: values[name] if name in values else getattr(result, name) for name in COLUMNS}


def unflatten(row: Mapping[str, Any]) -> Result:
    """Undo `flatten`, except that tuples in history and manifest have become lists."""
    cell = Cell(*(row[name] for name in _KEY))
    try:
        _check_row(row)
        history, manifest = (from_strict_json(loads(row[name])) for name in ("history", "manifest"))
        if not (isinstance(history, list) and isinstance(manifest, dict)):
            raise TypeError("history or manifest is of the wrong form")
        return Result(
            cell,
            origin=row["origin"],
            last=_read_outcome(row, "last"),
            best=_read_outcome(row, "best"),
            selected=_read_outcome(row, "selected"),
            signals={name: row[name] for name in SIGNALS if row[name] is not None},
            restoration_distance=row["restoration_distance"],
            alignment_loss=row["alignment_loss"],
            ece_per_batch=row["ece_per_batch"],
            epochs=row["epochs"],
            seconds=row["seconds"],
            peak_memory=row["peak_memory"],
            history=tuple(history),
            manifest=manifest,
            error=row["error"],
            finished=row["finished"],
        )
    except (TypeError, ValueError) as error:
        raise DataError(f"The row of {cell} is damaged ({error}). Delete it and run it again.") from None


def _check_row(row: Mapping[str, Any]) -> None:
    """Refuse a manually changed row that would make a table wrong or fail."""
    for name, kind in COLUMNS.items():
        value = row[name]
        if value is None and name not in (*REQUIRED, "seconds"):
            continue
        if not isinstance(value, _PYTHON_TYPES[kind]) or isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}, expected {_TYPE_NAMES[kind]}")
    for moment in _MOMENTS:
        known = {score: row[f"{moment}_{score}"] is not None for score in _SCORES}
        if any(known.values()) and not all(known.values()):
            lacking = next(score for score, there in known.items() if not there)
            raise ValueError(f"{moment}_{lacking} is missing")
    if row["origin"] not in get_args(Origin):
        raise ValueError(f"origin is {row['origin']!r}, expected one of {', '.join(get_args(Origin))}")
    if row["status"] != ("done" if row["error"] is None else "failed"):
        raise ValueError(f"status is {row['status']!r}, but the error is {row['error']!r}")
    if row["error"] is None and row["last_epoch"] is None:
        raise ValueError("there is neither a last outcome nor an error")


def _read_outcome(row: Mapping[str, Any], moment: str) -> Outcome | None:
    return None if row[f"{moment}_epoch"] is None else Outcome(*(row[f"{moment}_{score}"] for score in _SCORES))


# ---- exports


def to_csv(results: Iterable[Result]) -> str:
    """Write a CSV with a header and one line per result, including failed ones; unknown values are empty, NaN is `nan`.

    History and manifest are JSON text in the last two columns.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for result in results:
        row = flatten(result)
        writer.writerow({name: neutralise_cell(v) if isinstance(v, str) else v for name, v in row.items()})
    return text.getvalue()


def to_json(results: Iterable[Result]) -> str:
    """Write a list of objects, one a line, failed ones too: the columns of the CSV, history and manifest as objects.

    JSON has no word for the numbers that are not finite: they are "NaN", "Infinity" and "-Infinity".
    """
    lines = []
    for result in results:
        *flat, history, manifest = flatten(result).items()
        parts = [f"{json.dumps(name)}: {dumps(value, name)}" for name, value in flat]
        # These two are JSON already.
        parts += [f"{json.dumps(name)}: {text}" for name, text in (history, manifest)]
        lines.append("{" + ", ".join(parts) + "}")
    return "[" + ",\n ".join(lines) + "]\n"


# ---- the compact file

_EXPECTED = "expected what `shiftmend bench export --format compact` writes"

_FLAT = tuple(name for name in COLUMNS if name not in ("history", "manifest"))

_LEFT_OUT = (
    # Columns of their own.
    *("benchmark", "cell", "seed", "origin"),
    *("epochs", "selected_epoch", "seconds", "seconds_in_epochs", "status", "kept", "warnings"),
    # Other ones for each cell, and large.
    *("adapted_weights", "reliability"),
    # Said of the file that a result came from.
    "unsealed",
)


def to_compact(results: Iterable[Result], key: Key | None = None) -> str:
    """Write a compact file in the order of the cells, signed if there is a key.

    What `from_compact` reads is again written as the same text.
    """
    flat = [flatten(result) for result in sorted(results, key=lambda result: result.cell)]
    shared: dict[str, dict[str, int]] = {}
    rows = []
    for row in flat:
        own = {}
        for name, value in _thin(json.loads(str(row["manifest"]))).items():
            known = shared.setdefault(name, {})
            own[name] = known.setdefault(_write(_round(value)), len(known))
        rows.append(([_round(to_strict_json(row[name], name)) for name in _FLAT], own))
    lines = [f"[{_write(values)[1:-1]}, {_write([own.get(name) for name in shared])}]" for values, own in rows]
    parts = [f"  {_write(name)}: [{_put_on_lines(list(values), 3)}]" for name, values in shared.items()]
    seal = "".join(f" {_write(name)}: {_write(value)},\n" for name, value in sealing.blank_entries(key).items())
    text = (
        f'{{"format": {_write(COMPACT_FORMAT)}, "version": {COMPACT_VERSION},\n'
        f"{seal}"
        f' "columns": {_write([*_FLAT, "manifest"])},\n'
        f' "shared": {{{_put_on_lines(parts, 0)}}},\n'
        f' "rows": [{_put_on_lines(lines, 2)}]}}\n'
    )
    return sealing.seal_json(text, key)


def from_compact(text: str, trust: str | None = None) -> list[Result]:
    """Read results from the text of a compact file.

    A compact file has no histories, only a part of each manifest, and numbers rounded to `COMPACT_DIGITS` digits.

    Args:
        text: Content of the file, as `to_compact` writes it.
        trust: Public key that must have signed the file. By default any file is read.

    Returns:
        The results. Files of version 1 have no seal; the manifests of their results get the entry `unsealed`.

    Raises:
        DataError: If the file is damaged, altered, of an unknown version, not signed with `trust`, or has a cell twice.
    """
    try:
        content, seal = sealing.check_json(text, trust)
    except ValueError as error:
        raise DataError(f"it is altered, not to be trusted or no JSON ({one_line(error)}); {_EXPECTED}") from None
    if content.get("format") != COMPACT_FORMAT:
        raise DataError(f"it holds no results; {_EXPECTED}")
    if content.get("version") != (COMPACT_VERSION if seal.sealed else 1):
        raise DataError(
            f"it has version {one_line(content.get('version'))}, expected {COMPACT_VERSION} with a seal or 1 without; "
            "read it with a later shiftmend, or make it again"
        )
    try:
        results = [_read_compact_row(content["columns"], row, content["shared"]) for row in content["rows"]]
    except DataError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"it is damaged ({type(error).__name__}: {error}); make it again") from None
    if not seal.sealed:
        results = [replace(result, manifest=result.manifest | UNSEALED) for result in results]
    for cell, times in Counter(result.cell for result in results).items():
        if times > 1:
            raise DataError(f"it has {times} rows of {cell} of the same recipe, expected one; make it again")
    return results


def read_compact(path: Path, trust: str | None = None) -> list[Result]:
    """Read the results of a compact file; errors name the file."""
    try:
        return from_compact(path.read_text(encoding="utf-8"), trust)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"File {path} cannot be read ({error}). Name another file.") from None
    except DataError as error:
        raise DataError(f"{path} cannot be used as results: {one_line(error)}") from None


def _read_compact_row(columns: list[str], row: list[Any], shared: Mapping[str, list[Any]]) -> Result:
    values = dict(zip(columns, row, strict=True))
    numbers = {name: from_strict_json(values[name]) for name, kind in COLUMNS.items() if kind == "REAL"}
    manifest = {
        name: shared[name][which] for name, which in zip(shared, values["manifest"], strict=True) if which is not None
    }
    return unflatten({**values, **numbers, "history": "[]", "manifest": json.dumps(manifest)})


def _thin(manifest: dict[str, Any]) -> dict[str, Any]:
    """Remove what is not kept. The divergence after adaptation is the signal `slices`, and stands there.

    The platform names the kernel of a machine, which decides no result and is nobody's business.
    """
    kept = {name: value for name, value in manifest.items() if name not in _LEFT_OUT}
    if isinstance(kept.get("environment"), dict):
        kept["environment"] = {name: value for name, value in kept["environment"].items() if name != "platform"}
    judged = kept.get("verification")
    if isinstance(judged, dict) and isinstance(judged.get("after"), dict):
        after = {name: value for name, value in judged["after"].items() if name != "divergence"}
        kept["verification"] = judged | {"after": after}
    return kept


def _round(value: Any) -> Any:
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.{COMPACT_DIGITS}g}")
    if isinstance(value, list):
        return [_round(entry) for entry in value]
    if isinstance(value, dict):
        return {key: _round(entry) for key, entry in value.items()}
    return value


def _write(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def _put_on_lines(lines: list[str], indent: int) -> str:
    """Put each on a line of its own, so that a changed cell is a changed line."""
    return "".join(("," if number else "") + "\n" + " " * indent + line for number, line in enumerate(lines))
