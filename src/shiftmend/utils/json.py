"""Strict JSON: non-finite numbers, which JSON lacks, are stored as strings."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from shiftmend.errors import DataError
from shiftmend.utils.checks import kind

MAX_DEPTH = 100
"""Deepest nesting of lists and dicts that is read; results have fewer than ten levels."""


def loads(text: str | bytes) -> Any:
    """Parse JSON that is nested at most `MAX_DEPTH` levels deep, so that recursive functions can process it.

    Raises:
        ValueError: If the text is not JSON, or nested deeper.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, (list, dict))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return value
    raise ValueError("it is nested too deep")


def dumps(value: Any, name: str = "result", *, indent: int | None = None) -> str:
    """Write strict JSON, in which non-finite numbers are "NaN", "Infinity" or "-Infinity"."""
    return json.dumps(to_strict_json(value, name), indent=indent, allow_nan=False)


def to_strict_json(value: Any, name: str) -> Any:
    """Convert a value to strict JSON, tuples to lists; errors call the value `name`."""
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, (list, tuple)):
        return [to_strict_json(entry, f"{name}[{position}]") for position, entry in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: to_strict_json(entry, f"{name}.{key}") for key, entry in value.items()}
    raise DataError(
        f"Expected {name} to be numbers, strings, lists or dictionaries with strings as keys, got {kind(value)}, which "
        "JSON cannot hold."
    )


def from_strict_json(value: Any) -> Any:
    """Undo `to_strict_json`, except for tuples; the three strings become numbers."""
    if isinstance(value, list):
        return [from_strict_json(entry) for entry in value]
    if isinstance(value, dict):
        return {key: from_strict_json(entry) for key, entry in value.items()}
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value
