"""Results in one small JSON file, to be kept with the source code and read back wherever a store is.

    {"format": "shiftmend results", "version": 1, "columns": [...], "shared": {...}, "rows": [[...], ...]}

A row is a cell. What many manifests have in common stands once under `shared`: for each entry of a manifest the values
that occur, and in the last place of a row which of them are its own. Left out are histories, reliability bins, and what
a manifest says a second time. Numbers are rounded to six digits, which no table shows.
"""

from __future__ import annotations

import csv
import io
import json
import math
import operator
import os
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, get_args

from shiftmend.errors import DataError
from shiftmend.research.bench.benchmark import SIGNALS, Cell, Origin, Outcome, Result
from shiftmend.utils.json import dumps, from_strict_json, to_strict_json

Value = str | int | float | None


KEY = tuple(field.name for field in fields(Cell))


_SCORES = tuple(field.name for field in fields(Outcome))


_MOMENTS = ("last", "best", "selected")


_SCALARS = ("restoration_distance", "alignment_loss", "ece_per_batch")


COLUMNS: dict[str, str] = {
    **{name: "INTEGER" if name == "seed" else "TEXT" for name in KEY},
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
"""The flat form of a result: names and SQL types, in the order of the table and of the exports."""


REQUIRED = (*KEY, "status", "origin", "epochs", "finished", "history", "manifest")
"""Columns without empty places. `seconds` is none of them: a NaN would be one."""


_KINDS = {"REAL": (int, float), "INTEGER": (int,), "TEXT": (str,)}


_TYPES = {"REAL": "a number", "INTEGER": "a whole number of at most 64 bits", "TEXT": "text in Unicode"}


def to_csv(results: Iterable[Result]) -> str:
    """A header and one line a result, failed ones too; what is not known is empty, NaN is `nan`.

    History and manifest are JSON text in the last two columns.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flatten(result) for result in results)
    return text.getvalue()


def to_json(results: Iterable[Result]) -> str:
    """A list of objects, one a line, with the columns of the CSV but history and manifest as they are; failed ones too.

    JSON has no word for the numbers that are not finite: they are "NaN", "Infinity" and "-Infinity".
    """
    lines = []
    for result in results:
        *flat, history, manifest = flatten(result).items()
        parts = [f"{json.dumps(name)}: {dumps(value, name)}" for name, value in flat]
        parts += [f"{json.dumps(name)}: {text}" for name, text in (history, manifest)]  # JSON already
        lines.append("{" + ", ".join(parts) + "}")
    return "[" + ",\n ".join(lines) + "]\n"


def flatten(result: Result) -> dict[str, Value]:
    """The values of `COLUMNS`, history and manifest as JSON text; what cannot be kept as it is gets a DataError."""
    if result.last is None and not result.failed:
        raise DataError(f"{result.cell}: the result has neither a last outcome nor an error, expected one of them")
    unknown = sorted(set(result.signals) - set(SIGNALS))
    if unknown:
        raise DataError(f"{result.cell}: unknown signals {', '.join(unknown)}; expected some of {', '.join(SIGNALS)}")
    values: dict[str, Any] = asdict(result.cell) | {name: result.signals.get(name) for name in SIGNALS}
    for moment in _MOMENTS:
        outcome: Outcome | None = getattr(result, moment)
        values |= {f"{moment}_{score}": None if outcome is None else getattr(outcome, score) for score in _SCORES}
    values |= {
        "status": "failed" if result.failed else "done",
        "history": dumps(result.history, "history"),
        "manifest": dumps(result.manifest, "manifest"),
    }
    return {
        name: _fitted(values[name] if name in values else getattr(result, name), name, kind)
        for name, kind in COLUMNS.items()
    }


def unflatten(row: Mapping[str, Any]) -> Result:
    """The inverse of `flatten`, except that tuples in history and manifest have become lists."""
    cell = Cell(*(row[name] for name in KEY))
    try:
        _check(row)
        history, manifest = (from_strict_json(json.loads(row[name])) for name in ("history", "manifest"))
        if not (isinstance(history, list) and isinstance(manifest, dict)):
            raise TypeError("history or manifest is of the wrong form")
        return Result(
            cell,
            origin=row["origin"],
            last=_outcome(row, "last"),
            best=_outcome(row, "best"),
            selected=_outcome(row, "selected"),
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
        raise DataError(f"the row of {cell} is damaged ({error}); delete it and run it again") from None


def _check(row: Mapping[str, Any]) -> None:
    """Refuse what only a row changed by hand can hold: a table of it would be false, or fail half way."""
    for name, kind in COLUMNS.items():
        value = row[name]
        if value is None and name not in (*REQUIRED, "seconds"):
            continue
        if not isinstance(value, _KINDS[kind]) or isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}, expected {_TYPES[kind]}")
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


def _outcome(row: Mapping[str, Any], moment: str) -> Outcome | None:
    return None if row[f"{moment}_epoch"] is None else Outcome(*(row[f"{moment}_{score}"] for score in _SCORES))


def _fitted(value: Any, name: str, kind: str) -> Value:
    """`value` as the Python type of its column, so that scalars of numpy and torch are kept as what they mean."""
    if value is None and name not in REQUIRED:
        return None
    try:
        if kind == "REAL":
            return float(value)
        if kind == "INTEGER":
            number = operator.index(value)
            if -(2**63) <= number < 2**63:
                return number
        elif isinstance(value, str):
            # Messages may quote file names that are not UTF-8.
            return value.encode("utf-8", "backslashreplace" if name == "error" else "strict").decode()
    except (TypeError, ValueError):  # also of an encoding
        pass
    raise DataError(f"{name} is {value!r}, expected {_TYPES[kind]}")


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


FORMAT = "shiftmend results"


COMPACT_VERSION = 1


DIGITS = 6


EXPECTED = "expected what `shiftmend bench export --format compact` writes"


_FLAT = tuple(name for name in COLUMNS if name not in ("history", "manifest"))


_LEFT_OUT = (
    *("benchmark", "cell", "seed", "origin"),  # columns of their own
    *("epochs", "selected_epoch", "seconds", "seconds_in_epochs", "status", "kept", "warnings"),
    *("adapted_weights", "reliability"),  # other ones for each cell, and large
)


def to_compact(results: Iterable[Result]) -> str:
    """In the order of the cells. What `from_compact` reads from it is again written as the same text."""
    flat = [flatten(result) for result in sorted(results, key=lambda result: result.cell)]
    shared: dict[str, dict[str, int]] = {}
    rows = []
    for row in flat:
        own = {}
        for name, value in _thinned(json.loads(str(row["manifest"]))).items():
            known = shared.setdefault(name, {})
            own[name] = known.setdefault(_written(_rounded(value)), len(known))
        rows.append(([_rounded(to_strict_json(row[name], name)) for name in _FLAT], own))
    lines = [f"[{_written(values)[1:-1]}, {_written([own.get(name) for name in shared])}]" for values, own in rows]
    parts = [f"  {_written(name)}: [{_below(list(values), 3)}]" for name, values in shared.items()]
    return (
        f'{{"format": {_written(FORMAT)}, "version": {COMPACT_VERSION},\n'
        f' "columns": {_written([*_FLAT, "manifest"])},\n'
        f' "shared": {{{_below(parts, 0)}}},\n'
        f' "rows": [{_below(lines, 2)}]}}\n'
    )


def from_compact(text: str) -> list[Result]:
    """The results, without what was left out; a text of another kind, or a damaged one, is a DataError."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise DataError(f"it is no JSON ({error}); {EXPECTED}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DataError(f"it holds no results; {EXPECTED}")
    if content.get("version") != COMPACT_VERSION:
        raise DataError(
            f"it has version {content.get('version')}, expected {COMPACT_VERSION}; read it with a later shiftmend"
        )
    try:
        results = [_result(content["columns"], row, content["shared"]) for row in content["rows"]]
    except DataError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"it is damaged ({type(error).__name__}: {error}); make it again") from None
    for cell, times in Counter(result.cell for result in results).items():
        if times > 1:
            raise DataError(f"it has {times} rows of {cell} of the same recipe, expected one; make it again")
    return results


def read_file(path: Path) -> list[Result]:
    """The results in a file; errors name it."""
    try:
        return from_compact(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}); name another file") from None
    except DataError as error:
        raise DataError(f"{path} cannot be used as results: {error}") from None


def _result(columns: list[str], row: list[Any], shared: Mapping[str, list[Any]]) -> Result:
    values = dict(zip(columns, row, strict=True))
    numbers = {name: from_strict_json(values[name]) for name, kind in COLUMNS.items() if kind == "REAL"}
    manifest = {
        name: shared[name][which] for name, which in zip(shared, values["manifest"], strict=True) if which is not None
    }
    return unflatten({**values, **numbers, "history": "[]", "manifest": json.dumps(manifest)})


def _thinned(manifest: dict[str, Any]) -> dict[str, Any]:
    """Without what is not kept. The divergence after adaptation is the signal `slices`, and stands there.

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


def _rounded(value: Any) -> Any:
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, list):
        return [_rounded(entry) for entry in value]
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    return value


def _written(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def _below(lines: list[str], indent: int) -> str:
    """One a line, so that a changed cell is a changed line."""
    return "".join(("," if number else "") + "\n" + " " * indent + line for number, line in enumerate(lines))
