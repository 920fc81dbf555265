"""Reads the pickled arrays of old dataset releases without running any of the code a pickle can name.

A pickle is a program for a small stack machine, and two of its instructions call whatever function it names.
This reader runs the instructions that build dictionaries, lists, tuples, numbers and text; of functions it
knows only the three with which NumPy describes an array, and for these it keeps notes instead of calling
them. The array is made here, from its shape, its type and its bytes. Everything else is refused by name.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shiftmend.errors import DataError

ARRAY, ARRAY_TYPE, NUMBER_TYPE = "array", "array type", "number type"


KNOWN_NAMES = {
    "numpy.core.multiarray _reconstruct": ARRAY,
    "numpy._core.multiarray _reconstruct": ARRAY,
    "numpy ndarray": ARRAY_TYPE,
    "numpy dtype": NUMBER_TYPE,
}


NUMBER_TYPES = ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8")


class _Refused(Exception):
    """The stream asks for something that array data never needs."""


class _Mark:
    """Where the items of a list, tuple or dictionary under construction begin."""


@dataclass(frozen=True)
class _Name:
    role: str


@dataclass
class _NumberType:
    code: str
    order: str = "|"


@dataclass
class _Array:
    content: NDArray[Any] | None = None


def read_pickled_arrays(content: bytes, path: Path) -> dict[str, Any]:
    """The dictionary of arrays, lists, numbers and text in a pickle; `path` is for error messages only."""
    try:
        entries = {_text(key): value for key, value in _expect(_run(content), dict).items()}
    except _Refused as refusal:
        raise DataError(
            f"{path} was not read: {refusal}, which a file of images never needs; expected the published "
            "file: delete this one and fetch it again"
        ) from None
    except Exception as error:  # an ill-formed stream can break any of the steps below
        raise DataError(
            f"{path} is truncated or damaged ({error or type(error).__name__}): expected a pickle of arrays; "
            "delete it and fetch it again"
        ) from error
    return {key: value.content if isinstance(value, _Array) else value for key, value in entries.items()}


def _run(content: bytes) -> Any:
    stack: list[Any] = []
    memory: dict[int, Any] = {}
    argument: Any
    for opcode, argument, _ in pickletools.genops(content):
        name = opcode.name
        if name == "STOP":
            return stack.pop()
        if name in _LITERALS:
            stack.append(_LITERALS[name](argument))
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            memory[argument] = stack[-1]
        elif name == "MEMOIZE":
            memory[len(memory)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memory[argument])
        elif name in _ACTIONS:
            _ACTIONS[name](stack)
        elif name not in ("PROTO", "FRAME"):
            raise _Refused(f"it uses the instruction {name}")
    raise ValueError("it has no end")


def _known_name(qualified: str) -> _Name:
    if qualified not in KNOWN_NAMES:
        raise _Refused(f"it asks to run {qualified.replace(' ', '.')}")
    return _Name(KNOWN_NAMES[qualified])


def _from_mark(stack: list[Any]) -> list[Any]:
    items: list[Any] = []
    while not isinstance(item := stack.pop(), _Mark):
        items.append(item)
    return items[::-1]


def _make_tuple(length: int) -> Callable[[list[Any]], None]:
    def action(stack: list[Any]) -> None:
        if len(stack) < length:
            raise ValueError("a tuple lacks items")
        items = tuple(stack[-length:])
        del stack[-length:]
        stack.append(items)

    return action


def _make_marked_tuple(stack: list[Any]) -> None:
    stack.append(tuple(_from_mark(stack)))


def _make_marked_dict(stack: list[Any]) -> None:
    items = _from_mark(stack)
    stack.append(dict(zip(items[::2], items[1::2], strict=True)))


def _append(stack: list[Any]) -> None:
    item = stack.pop()
    _expect(stack[-1], list).append(item)


def _append_all(stack: list[Any]) -> None:
    items = _from_mark(stack)
    _expect(stack[-1], list).extend(items)


def _set_item(stack: list[Any]) -> None:
    value, key = stack.pop(), stack.pop()
    _expect(stack[-1], dict)[key] = value


def _set_items(stack: list[Any]) -> None:
    items = _from_mark(stack)
    _expect(stack[-1], dict).update(zip(items[::2], items[1::2], strict=True))


def _name_from_stack(stack: list[Any]) -> None:
    name, module = stack.pop(), stack.pop()
    stack.append(_known_name(f"{module} {name}"))


def _call(stack: list[Any]) -> None:
    """Not a call: an empty note in place of what the call would have made."""
    arguments, function = stack.pop(), stack.pop()
    if function == _Name(ARRAY):
        stack.append(_Array())
    elif function == _Name(NUMBER_TYPE):
        stack.append(_NumberType(_text(arguments[0])))
    else:
        raise _Refused("it asks to call something that is no function of NumPy's arrays")


def _fill(stack: list[Any]) -> None:
    """What NumPy wrote about the object on the stack, filled into its note."""
    state, target = stack.pop(), stack[-1]
    if isinstance(target, _NumberType):
        target.order = _text(state[1])
    elif isinstance(target, _Array):
        _, shape, kind, column_major, data = state
        target.content = _build_array(shape, _expect(kind, _NumberType), bool(column_major), data)
    else:
        raise _Refused(f"it asks to alter a {type(target).__name__}")


def _build_array(shape: Any, kind: _NumberType, column_major: bool, data: Any) -> NDArray[Any]:
    if kind.code not in NUMBER_TYPES or kind.order not in ("|", "<", ">"):
        raise _Refused(f"it holds an array of type {kind.order}{kind.code}")
    dtype: np.dtype[Any] = np.dtype(f"{kind.order}{kind.code}")
    raw = data.encode("latin-1") if isinstance(data, str) else _expect(data, bytes)
    sizes = tuple(int(size) for size in shape)
    if min(sizes, default=0) < 0 or len(raw) != math.prod(sizes) * dtype.itemsize:
        raise ValueError(f"{len(raw)} bytes for an array of {list(sizes)}")
    return np.frombuffer(raw, dtype).reshape(sizes, order="F" if column_major else "C")


def _expect(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"a {type(value).__name__} where a {kind.__name__} belongs")
    return value


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(_expect(value, str))


def _as_is(value: Any) -> Any:
    return value


_LITERALS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"), _as_is),
    **dict.fromkeys(("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"), _as_is),
    **dict.fromkeys(("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"), _as_is),
    "NONE": lambda _: None,
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
    "EMPTY_DICT": lambda _: {},
    "EMPTY_LIST": lambda _: [],
    "EMPTY_TUPLE": lambda _: (),
    "MARK": lambda _: _Mark(),
    "GLOBAL": _known_name,
}


_ACTIONS: dict[str, Callable[[list[Any]], None]] = {
    "TUPLE": _make_marked_tuple,
    "TUPLE1": _make_tuple(1),
    "TUPLE2": _make_tuple(2),
    "TUPLE3": _make_tuple(3),
    "LIST": lambda stack: stack.append(_from_mark(stack)),
    "DICT": _make_marked_dict,
    "APPEND": _append,
    "APPENDS": _append_all,
    "SETITEM": _set_item,
    "SETITEMS": _set_items,
    "STACK_GLOBAL": _name_from_stack,
    "REDUCE": _call,
    "BUILD": _fill,
}
