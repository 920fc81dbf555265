"""Finding tensors in the output of a model or module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from shiftmend.errors import TapError
from shiftmend.utils.checks import counted, kind

Entry = int | str | None
"""Selects one tensor of a tuple, a dict or a dataclass: an index, a key, or the name of a field."""


def pick(value: Any, entry: Entry, what: str, example: str = "output={!r}") -> Tensor:
    """Return the selected tensor of a module's output.

    A tuple, a dict or a dataclass needs an entry, unless it holds one tensor only, or one called `logits`. Error
    messages call the module `what`, and suggest an entry in the form of `example`.

    Example:
        >>> import torch
        >>> pick({"loss": torch.tensor(0.5), "logits": torch.zeros(3)}, None, "the model")
        tensor([0., 0., 0.])
    """
    if entry is None:
        if isinstance(value, Tensor):
            return value
        tensors = {key: part for key, part in _list_entries(value) if isinstance(part, Tensor)}
        if "logits" in tensors or len(tensors) == 1:
            return tensors["logits"] if "logits" in tensors else next(iter(tensors.values()))
        first = next((key for key in tensors if isinstance(key, int | str)), None)
        advice = "" if first is None else f". Name the entry that is meant, e.g. {example.format(first)}"
        raise TapError(f"Expected {what} to return a tensor, got {_describe(value)}{advice}.")
    if isinstance(value, Tensor):
        # Indexing a tensor would silently take one sample for the whole output.
        raise TapError(
            f"Expected {what} to return several tensors, with one under {entry!r}, got a single tensor. Leave the "
            "entry out."
        )
    try:
        picked = getattr(value, entry) if isinstance(entry, str) and _field_names(value) else value[entry]
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise TapError(
            f"Expected {what} to return a tensor under {entry!r}, got {_describe(value)}. Name another entry."
        ) from error
    if not isinstance(picked, Tensor):
        raise TapError(
            f"Expected a tensor under {entry!r} of what {what} returned, got {_describe(picked)}. Name another entry."
        )
    return picked


def find_tensors(value: Any) -> list[Tensor]:
    """List all tensors in a value, including those in nested lists, dicts, named tuples and dataclasses."""
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


def _list_entries(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the entries of a module's output, with keys in the form that `pick` takes."""
    if isinstance(value, Mapping):
        return value.items()
    if names := _field_names(value):
        return ((name, getattr(value, name, None)) for name in names)
    return enumerate(value) if isinstance(value, tuple | list) else ()


def _field_names(value: Any) -> tuple[str, ...]:
    """Return the field names of a named tuple or a dataclass; a dict of any class has keys instead."""
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
