"""Find tensors in what a model or a module returned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from shiftmend.errors import TapError
from shiftmend.utils.checks import counted, kind

Entry = int | str | None
"""Names one tensor of a tuple, a dict or a dataclass: an index, a key, or the name of a field."""


def pick(value: Any, entry: Entry, what: str, example: str = "output={!r}") -> Tensor:
    """Return the tensor that is meant in what a module returned; a tuple, a dict or a dataclass needs an entry.

    Error messages call the module `what`, and suggest an entry in the form of `example`.
    """
    if entry is None:
        if isinstance(value, Tensor):
            return value
        first = _first_entry(value)
        advice = "expected a tensor" if first is None else f"say which entry is meant, e.g. {example.format(first)}"
        raise TapError(f"{what} returned {_describe(value)}; {advice}")
    if isinstance(value, Tensor):
        # An index would quietly take one sample for the output of all.
        raise TapError(f"{what} returned a single tensor, which has no entry {entry!r}; leave the entry out")
    try:
        picked = getattr(value, entry) if isinstance(entry, str) and _field_names(value) else value[entry]
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise TapError(f"{what} returned {_describe(value)}, which has no entry {entry!r}") from error
    if not isinstance(picked, Tensor):
        raise TapError(f"entry {entry!r} of what {what} returned is {_describe(picked)}; expected a tensor")
    return picked


def find_tensors(value: Any) -> list[Tensor]:
    """List all tensors in a value, also in lists, dicts, named tuples and dataclasses, which may hold each other."""
    found, waiting, seen = [], [value], set()
    while waiting:
        part = waiting.pop()
        if isinstance(part, Tensor):
            found.append(part)
        elif id(part) in seen:
            continue
        elif isinstance(part, Mapping):
            waiting += part.values()
        elif isinstance(part, list | tuple):
            waiting += part
        else:
            waiting += (getattr(part, name, None) for name in _field_names(part))
        seen.add(id(part))
    return found


def _first_entry(value: Any) -> int | str | None:
    """Return the first entry that is a tensor, in the form that `pick` takes."""
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        entries = value.items()
    elif names := _field_names(value):
        entries = ((name, getattr(value, name, None)) for name in names)
    elif isinstance(value, tuple | list):
        entries = enumerate(value)
    return next((key for key, part in entries if isinstance(part, Tensor) and isinstance(key, int | str)), None)


def _field_names(value: Any) -> tuple[str, ...]:
    """Return the names of the fields of a named tuple or a dataclass; a dict of any class has keys instead."""
    if isinstance(value, Mapping):
        return ()
    if is_dataclass(value) and not isinstance(value, type):
        return tuple(part.name for part in fields(value))
    return tuple(getattr(value, "_fields", ())) if isinstance(value, tuple) else ()


def _describe(value: Any) -> str:
    if names := _field_names(value):
        return f"{kind(value)} with entries {', '.join(map(repr, names))}"
    if isinstance(value, Mapping):
        return f"a dict with entries {', '.join(map(repr, value))}" if value else "an empty dict"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {counted(len(value), 'entry', 'entries')}"
    return kind(value)
