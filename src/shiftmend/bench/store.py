"""The results of benchmarks in one SQLite file, which the sqlite3 shell can be asked as well.

    sqlite3 results.sqlite "select method, avg(last_accuracy) from cells where status = 'done' group by method"

SQLite knows no NaN: such a number is NULL in its column, so that `avg` leaves it out, and the column's name stands in
`not_a_number`, so that it is read back as what it was. In the JSON columns, whose standard has no word for them either,
the three numbers that are not finite are the strings "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import math
import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from shiftmend.bench.cells import Cell, Result
from shiftmend.bench.exports import COLUMNS, KEY, REQUIRED, Value, flatten, unflatten
from shiftmend.errors import DataError

APPLICATION = b"shmd"
"""Marks the file as ours, in the place that SQLite's header has for this (bytes 68 to 71)."""
VERSION = 1
PATIENCE = 60.0
"""Seconds to wait for another process that is writing."""

_SQLITE = b"SQLite format 3\0"
_STORED = (*COLUMNS, "not_a_number")
_SCHEMA = "CREATE TABLE cells ({}, CHECK (status IN ('done', 'failed')), PRIMARY KEY ({}))".format(
    ", ".join(
        f"{name} {COLUMNS.get(name, 'TEXT')}" + (" NOT NULL" if name in (*REQUIRED, "not_a_number") else "")
        for name in _STORED
    ),
    ", ".join(KEY),
)
_PUT = "INSERT INTO cells ({}) VALUES ({}) ON CONFLICT ({}) DO UPDATE SET {} WHERE cells.status = 'failed'".format(
    ", ".join(_STORED),
    ", ".join(f":{name}" for name in _STORED),
    ", ".join(KEY),
    ", ".join(f"{name} = excluded.{name}" for name in _STORED if name not in KEY),
)
_PUT_IF_BETTER = _PUT + " AND (excluded.status = 'done' OR excluded.finished > cells.finished)"


class Store:
    """One file of results, opened by one process and thread; any number of processes may have it open at once.

    The file is made if it is missing, but not its folder. With `read_only`, for whoever only looks, a missing file is
    an error and nothing is ever recorded.
    """

    def __init__(self, path: str | os.PathLike[str], *, read_only: bool = False) -> None:
        self.path = Path(path)
        _check_place(self.path, read_only)
        if os.path.exists(self.path):
            _check_header(self.path)
        # "rw" also to read: what a killed process left half written can only be rolled back by who may write. SQLite
        # itself falls back to reading where the file is write-protected.
        address = f"{self.path.absolute().as_uri()}?mode={'rw' if read_only else 'rwc'}"
        with _explained(self.path):
            self._connection = sqlite3.connect(address, uri=True, timeout=PATIENCE, isolation_level=None)
            try:
                self._prepare(read_only)
            except BaseException:
                self._connection.close()
                raise

    def _prepare(self, read_only: bool) -> None:
        # The journal stays SQLite's default, a file beside the store that is deleted at each commit, rather than a
        # write-ahead log: then the one file is all there is to copy to another machine, it can be read in a folder that
        # is write-protected, and it works on network drives. A log is faster, but a cell takes minutes. EXTRA also
        # flushes the folder after the journal is deleted, so that not even a power cut takes back an acknowledged row.
        self._connection.execute("PRAGMA synchronous = EXTRA")
        if self._is_blank():
            if read_only:
                raise _missing(self.path)
            with self._transaction():
                if self._is_blank():  # still: another process may have been faster
                    self._connection.execute(_SCHEMA)
                    self._connection.execute(f"PRAGMA application_id = {int.from_bytes(APPLICATION)}")
                    self._connection.execute(f"PRAGMA user_version = {VERSION}")
        version = self._pragma("user_version")
        if version != VERSION:
            raise DataError(
                f"the store {self.path} has version {version}, expected {VERSION}; "
                "open it with the shiftmend that wrote it, or name a new file"
            )
        if self._pragma("quick_check") != "ok":
            raise _damaged(self.path)
        if read_only:
            self._connection.execute("PRAGMA query_only = ON")

    def _is_blank(self) -> bool:
        """Whether this is a new file, or one whose first process was killed before it had made the table."""
        return not self._connection.execute("SELECT * FROM sqlite_master").fetchall()

    def _pragma(self, name: str) -> Any:
        return self._connection.execute(f"PRAGMA {name}").fetchone()[0]

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with _explained(self.path):
            try:
                # At once, not at the first write: two processes that first read and then both want to write would each
                # wait for the other.
                self._connection.execute("BEGIN IMMEDIATE")
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def record(self, result: Result) -> bool:
        """Keep `result` for good: once this returns, it survives the end of the process and of the machine's power.

        A finished cell keeps its first result, whatever is recorded afterwards; a failed one is replaced by any other.
        Returns whether `result` is what the store now holds.
        """
        row = _bindable(result)
        with self._transaction():
            return self._connection.execute(_PUT, row).rowcount == 1

    def merge(self, results: Iterable[Result]) -> int:
        """Take over results from elsewhere; returns how many came in.

        As with `record`, finished cells stay as they are, so where a cell was finished in both places the row of this
        store stays. A failure is replaced by a success, whenever that was, and by a later failure.
        """
        rows = [_bindable(result) for result in results]
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
        """The results with all that is asked for, failed ones included, in the order of their cells."""
        asked = zip((*KEY, "status"), (benchmark, protocol, method, shift, seed, recipe, status), strict=True)
        wanted = {name: value for name, value in asked if value is not None}
        conditions = " AND ".join(f"{name} = :{name}" for name in wanted) or "1"
        query = f"SELECT {', '.join(_STORED)} FROM cells WHERE {conditions} ORDER BY {', '.join(KEY)}"
        with _explained(self.path):
            rows = self._connection.execute(query, wanted).fetchall()
        try:
            return [_restored(row) for row in rows]
        except DataError as error:
            raise DataError(f"the store {self.path}: {error}") from None

    def cells(self) -> set[Cell]:
        """The cells that are done; failed ones are to be tried again."""
        with _explained(self.path):
            rows = self._connection.execute(f"SELECT {', '.join(KEY)} FROM cells WHERE status = 'done'").fetchall()
        return {Cell(*row) for row in rows}

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _bindable(result: Result) -> dict[str, Value]:
    row = flatten(result)
    missing = [name for name, value in row.items() if isinstance(value, float) and math.isnan(value)]
    return row | dict.fromkeys(missing) | {"not_a_number": " ".join(missing)}


def _restored(row: tuple[Any, ...]) -> Result:
    values = dict(zip(_STORED, row, strict=True))
    return unflatten(values | dict.fromkeys(values["not_a_number"].split(), math.nan))


def _check_place(path: Path, read_only: bool) -> None:
    """What SQLite would report as 'unable to open database file', or only at the first write, in words."""
    if os.path.isdir(path):
        raise DataError(f"{path} is a folder, expected the name of a store of benchmark results")
    if read_only:
        if not os.path.exists(path):
            raise _missing(path)
    elif not os.path.isdir(path.parent):
        raise DataError(f"the folder {path.parent} of the store {path.name} does not exist; make it first")
    elif not os.access(path.parent, os.W_OK | os.X_OK) or (os.path.exists(path) and not os.access(path, os.W_OK)):
        raise DataError(f"the store {path} or its folder is write-protected; permit writing or name another place")


def is_database(path: Path) -> bool:
    """Whether a file is one of SQLite's, by how it begins."""
    return _header(path).startswith(_SQLITE)


def _header(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(100)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; permit it or name another file") from None


def _check_header(path: Path) -> None:
    """Refuse a file that is not ours before SQLite opens it, which may change it: to mend what its owner left open."""
    header = _header(path)
    if not header:
        return  # its first process has come no further yet
    if not header.startswith(_SQLITE):
        raise DataError(f"{path} is no SQLite database, expected a store of benchmark results; name another file")
    if header[68:72] != APPLICATION:
        raise DataError(f"{path} is an SQLite database but no store of benchmark results; name another file")


def _missing(path: Path) -> DataError:
    return DataError(f"there is no store of benchmark results at {path} yet; run a benchmark to make it")


def _damaged(path: Path) -> DataError:
    return DataError(
        f"the store {path} is damaged; go back to a copy, or rescue what is left with the sqlite3 shell's .recover"
    )


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn the errors of the database into sentences; those of wrong use, such as after `close`, stay what they are."""
    try:
        yield
    except sqlite3.ProgrammingError:
        raise
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", None) or ""
        unreadable = str(error).startswith("Could not decode")  # whatever is in there, it was not written as text
        if unreadable or name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            raise _damaged(path) from None
        if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            raise DataError(
                f"the store {path} has been held by another process for {PATIENCE:g} seconds; end it or try later"
            ) from None
        if name == "SQLITE_FULL":
            raise DataError(f"the store {path} has no room left on its disk; make some and run again") from None
        if name == "SQLITE_READONLY_DBMOVED":
            raise DataError(
                f"the store {path} was moved or deleted while it was in use; put it back and run again"
            ) from None
        if name.startswith("SQLITE_READONLY"):
            raise DataError(f"the store {path} is open for reading only or write-protected") from None
        raise DataError(f"the store {path} cannot be used: {error}") from error
