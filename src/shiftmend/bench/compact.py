"""Results in one small JSON file, to be kept with the source code and read back wherever a store is.

    {"format": "shiftmend results", "version": 1, "columns": [...], "shared": {...}, "rows": [[...], ...]}

A row is a cell. What many manifests have in common stands once under `shared`: for each entry of a manifest the values
that occur, and in the last place of a row which of them are its own. Left out are histories, reliability bins, and what
a manifest says a second time. Numbers are rounded to six digits, which no table shows.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shiftmend.bench.cells import Result
from shiftmend.bench.exports import COLUMNS, flatten, unflatten
from shiftmend.errors import DataError
from shiftmend.strict_json import plain, revived

FORMAT = "shiftmend results"
VERSION = 1
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
        rows.append(([_rounded(plain(row[name], name)) for name in _FLAT], own))
    lines = [f"[{_written(values)[1:-1]}, {_written([own.get(name) for name in shared])}]" for values, own in rows]
    parts = [f"  {_written(name)}: [{_below(list(values), 3)}]" for name, values in shared.items()]
    return (
        f'{{"format": {_written(FORMAT)}, "version": {VERSION},\n'
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
    if content.get("version") != VERSION:
        raise DataError(f"it has version {content.get('version')}, expected {VERSION}; read it with a later shiftmend")
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
    numbers = {name: revived(values[name]) for name, kind in COLUMNS.items() if kind == "REAL"}
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
