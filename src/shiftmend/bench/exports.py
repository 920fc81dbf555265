"""Results as flat rows: what the store keeps, and as CSV and JSON for other programs."""

from __future__ import annotations

import csv
import io
import json
import operator
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any, get_args

from shiftmend.bench.cells import SIGNALS, Cell, Origin, Outcome, Result
from shiftmend.errors import DataError
from shiftmend.strict_json import dumps, revived

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
        history, manifest = (revived(json.loads(row[name])) for name in ("history", "manifest"))
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
