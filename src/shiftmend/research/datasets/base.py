"""TODO."""

from __future__ import annotations

import bz2
import gzip
import os
import zlib
from collections.abc import Iterable
from pathlib import Path

from shiftmend.errors import DataError
from shiftmend.inputs.images import PathLike

ROOT_VARIABLE = "SHIFTMEND_DATA"


def data_root(argument: PathLike | None = None) -> Path:
    """The folder that holds all datasets: the argument, else the environment variable SHIFTMEND_DATA."""
    chosen = os.fspath(argument) if argument is not None else os.environ.get(ROOT_VARIABLE, "")
    if not chosen:
        raise DataError(
            "no data folder is known: expected the folder that holds the datasets; pass it as `root` (--data-root), or "
            f"name it once with `export {ROOT_VARIABLE}=/path/to/data`"
        )
    return Path(chosen).expanduser()


def first_existing(candidates: Iterable[Path], expected: str, remedy: str) -> Path:
    """The first of several places that exists; if none does, the error names the first of them."""
    places = list(candidates)
    for place in places:
        if place.exists():
            return place
    raise DataError(f"{places[0]} is missing: expected {expected} there; {remedy}")


def read_whole(path: Path, expected: str, remedy: str) -> bytes:
    """The content of a file, decompressed if its name says that it is compressed."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as handle:
                return handle.read()
        return bz2.decompress(path.read_bytes()) if path.suffix == ".bz2" else path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path} is missing: expected {expected} there; {remedy}") from None
    except (EOFError, zlib.error, ValueError, OSError) as error:
        raise DataError(
            f"{path} cannot be read whole ({error}): expected {expected}; delete it and {remedy}"
        ) from error


def fetch_hint(dataset: str) -> str:
    """What to do about a missing or damaged file of a set in the catalogue."""
    return f'fetch it with shiftmend.research.datasets.fetch("{dataset}"), or put it there by hand'


def check_split(split: str, known: Iterable[str], dataset: str) -> None:
    names = tuple(known)
    if split not in names:
        raise DataError(f"{dataset} has no split called {split!r}; expected one of {', '.join(names)}")
