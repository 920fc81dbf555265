"""Finding the published files of a dataset, and reading them: plain, compressed, or pickled."""

from __future__ import annotations

import bz2
import gzip
import io
import math
import os
import pickle
import pickletools
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shiftmend.errors import DataError
from shiftmend.inputs.images import PathLike
from shiftmend.utils.bounded import read_stream
from shiftmend.utils.checks import one_line

ROOT_VARIABLE = "SHIFTMEND_DATA"


def data_root(argument: PathLike | None = None) -> Path:
    """Return the folder that holds all datasets: `argument`, else the environment variable SHIFTMEND_DATA."""
    chosen = os.fspath(argument) if argument is not None else os.environ.get(ROOT_VARIABLE, "")
    if not chosen:
        raise DataError(
            f"Expected a data folder, got none. Pass root= (--data-root), or `export {ROOT_VARIABLE}=/path/to/data`."
        )
    return Path(chosen).expanduser()


def first_existing(candidates: Iterable[Path], expected: str, remedy: str) -> Path:
    """Return the first path that exists. If none does, raise an error that names the first candidate."""
    places = list(candidates)
    for place in places:
        if place.exists():
            return place
    raise DataError(f"Expected {expected}, got {places[0]}, which is missing; {remedy}.")


def read_whole(path: Path, expected: str, remedy: str) -> bytes:
    """Read a file, decompressed if its name ends in .gz or .bz2. Raise DataError with `remedy` if it is damaged."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as packed:
                return read_stream(packed)
        with bz2.open(path, "rb") if path.suffix == ".bz2" else path.open("rb") as file:
            return read_stream(file)
    except FileNotFoundError:
        raise DataError(f"Expected {expected}, got {path}, which is missing; {remedy}.") from None
    except (EOFError, zlib.error, ValueError, OSError) as error:
        raise DataError(
            f"Expected {expected}, got {path}, which cannot be read whole ({one_line(error)}); delete it and {remedy}."
        ) from error


def fetch_hint(dataset: str) -> str:
    """Return advice about a missing or damaged file of a set in the catalogue."""
    return f'fetch it with shiftmend.research.datasets.fetch("{dataset}"), or put it there by hand'


def check_split(split: str, known: Iterable[str], dataset: str) -> None:
    """Refuse an unknown split, e.g. "val" of MNIST."""
    names = tuple(known)
    if split not in names:
        raise DataError(f"Expected a split of {dataset} among {', '.join(names)}, got {split!r}.")


def wrong_array(path: Path, array: NDArray[Any], expected: str, dataset: str) -> DataError:
    """Describe an array of another type or shape than the release has."""
    return DataError(
        f"Expected {expected} in {path}, got {array.dtype} {list(array.shape)}; delete it and {fetch_hint(dataset)}."
    )


def read_pickled_arrays(content: bytes, path: Path) -> dict[str, Any]:
    """Read a pickled dictionary of arrays, lists, numbers and text, without running code that a pickle can name.

    Old releases (CIFAR "for Python", MNIST-M) are pickles, and a pickle may call any function. Here it is checked
    against an allow-list of instructions and an allow-list of names, and each allowed name is a substitute: NumPy is
    not called. Arrays are views of `content`, so memory is bounded by the file.

    Args:
        content: The pickle, as Python 2 or 3 wrote it.
        path: Where `content` comes from, for the error message alone.

    Raises:
        DataError: If the pickle is damaged, or asks for more than arrays need.
    """
    try:
        _check_instructions(content)
        entries = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
        if not isinstance(entries, dict):
            raise ValueError(f"it holds a {type(entries).__name__}")
        read = {_as_text(key): value for key, value in entries.items()}
    except _DAMAGE as error:
        raise DataError(
            f"Expected a pickle of arrays, got {path}, which was not read ({one_line(error) or type(error).__name__}). "
            "Delete it and fetch it again."
        ) from error
    return {key: value.content if isinstance(value, _PickledArray) else value for key, value in read.items()}


_DAMAGE = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Errors that an ill-formed pickle causes."""

_NUMBER_TYPES = ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8")
_INSTRUCTIONS_TEXT = (
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT "
    "STRING BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 UNICODE BINUNICODE SHORT_BINUNICODE "
    "BINUNICODE8 EMPTY_DICT EMPTY_LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 LIST DICT APPEND APPENDS SETITEM "
    "SETITEMS PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BUILD"
)
_INSTRUCTIONS = frozenset(_INSTRUCTIONS_TEXT.split())


def _check_instructions(content: bytes) -> None:
    """Refuse instructions that array data never need, e.g. persistent objects, before anything is built."""
    for opcode, argument, position in pickletools.genops(content):
        if opcode.name not in _INSTRUCTIONS:
            raise ValueError(f"it uses the instruction {opcode.name}")
        # Python's reader sizes a table by the largest number: 2 ** 31 in a file of ten bytes would take 32 GB.
        if opcode.name in ("PUT", "LONG_BINPUT") and (argument or 0) > (position or 0):
            raise ValueError(f"it remembers {argument} objects in {position} bytes")


class _PickledNumberType:
    """Substitute for `numpy.dtype` in a pickle."""

    def __init__(self, code: Any, *_: Any) -> None:
        self.code, self.order = _as_text(code), "|"

    def __setstate__(self, state: Any) -> None:
        self.order = _as_text(state[1])


class _PickledArray:
    """Substitute for an array in a pickle, and for the function that makes one."""

    content: NDArray[Any] | None = None

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, column_major, data = state
        if not isinstance(kind, _PickledNumberType) or not isinstance(data, bytes):
            raise ValueError(f"it holds an array of {type(data).__name__}")
        if kind.code not in _NUMBER_TYPES or kind.order not in ("|", "<", ">"):
            raise ValueError(f"it holds an array of type {kind.order}{kind.code}")
        dtype: np.dtype[Any] = np.dtype(f"{kind.order}{kind.code}")
        sizes = tuple(int(size) for size in shape)
        if min(sizes, default=0) < 0 or len(data) != math.prod(sizes) * dtype.itemsize:
            raise ValueError(f"it holds {len(data)} bytes for an array of {list(sizes)}")
        self.content = np.frombuffer(data, dtype).reshape(sizes, order="F" if column_major else "C")


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickler that knows only the names of array data."""

    names: dict[tuple[str, str], Any] = {  # noqa: RUF012
        ("numpy.core.multiarray", "_reconstruct"): _PickledArray,
        ("numpy._core.multiarray", "_reconstruct"): _PickledArray,
        ("numpy", "dtype"): _PickledNumberType,
        # Only ever an argument of `_reconstruct`: it can neither be called nor altered.
        ("numpy", "ndarray"): None,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.names:
            raise pickle.UnpicklingError(f"it asks to run {module}.{name}")
        return self.names[module, name]


def _as_text(value: Any) -> str:
    if not isinstance(value, str | bytes):
        raise ValueError(f"it holds a {type(value).__name__} in place of a name")
    return value.decode("latin-1") if isinstance(value, bytes) else value
