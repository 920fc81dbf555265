"""Check arguments, so that the same mistake gets the same sentence everywhere."""

from __future__ import annotations

from collections.abc import Collection
from importlib import import_module
from numbers import Integral, Real
from types import ModuleType
from typing import Any

from shiftmend.errors import DataError, ShiftmendError, TapError

_MAX_CHARACTERS = 60


def kind(value: Any) -> str:
    """Name the type of a value as part of a sentence: "a Tensor", "None", "the class Linear"."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeio' else 'a'} {name}"


def brief(value: Any) -> str:
    """Write a value as Python does, or name its type where that would not fit into a sentence."""
    # Tensors and arrays are named by their type, single numbers are not.
    if isinstance(value, type) or getattr(value, "ndim", None):
        return kind(value)
    text = repr(value)
    return text if len(text) <= _MAX_CHARACTERS and "\n" not in text else kind(value)


def one_line(message: object) -> str:
    """Shorten a message to one line: names in a damaged file can have any length, and line breaks."""
    line = " ".join(str(message).split())
    return line if len(line) <= 300 else f"{line[:300]} ..."


def counted(number: int, one: str, many: str = "") -> str:
    """Write a number with its noun, as part of a sentence: "1 sample", "1,200 samples", "3 entries"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def is_whole(value: Any) -> bool:
    """Tell whether a value is an integer of Python or numpy; True and False are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_real(value: Any) -> bool:
    """Tell whether a value is a number of Python or numpy, perhaps infinite or NaN; True and False are not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_known(given: Any, known: Collection[str], what: str, error: type[ShiftmendError] = ShiftmendError) -> None:
    """Refuse a name that is not known."""
    if not isinstance(given, str) or given not in known:
        raise error(f"Expected the {what} to be one of {', '.join(known)}, got {brief(given)}.")


def check_seed(seed: Any) -> None:
    """Refuse a seed that generators of torch do not take."""
    if not is_whole(seed) or not -(2**63) <= seed < 2**64:
        raise DataError(f"Expected a seed that is a whole number of at most 64 bits, got {brief(seed)}.")


def check_classes(named: int, known: int) -> None:
    """Refuse data with more or fewer classes than the model: labels number the names, or the folders."""
    if named != known:
        raise DataError(
            f"Expected the {known} classes that the model knows, got {named}. Try one name or folder for each class, "
            "or an .npz file with labels."
        )


def check_function(given: Any, what: str, takes: str) -> None:
    """Refuse a callback that is not callable; `takes` names its arguments for the message."""
    if given is not None and not callable(given):
        raise DataError(f"Expected {what} to be a function {what}({takes}), got {brief(given)}.")


def check_axis(axis: Any, what: str) -> None:
    """Refuse an axis that cannot be that of the units; images `[N, C, H, W]` have their units on axis 1."""
    if not is_whole(axis):
        raise TapError(f"Expected {what} to count units on axis 1, or -1 for the last, got axis {brief(axis)}.")
    if axis == 0:
        raise TapError(
            f"Expected {what} to count units on axis 1, or -1 for the last, got axis 0, which holds the samples."
        )


def require(module: str, extra: str) -> ModuleType:
    """Import a package that only an extra of shiftmend brings.

    Args:
        module: The package or module to import, e.g. "scipy.special".
        extra: The extra to install, e.g. "research".

    Raises:
        ShiftmendError: If the package is not installed.
    """
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ShiftmendError(
            f"Expected the package {package}, which is not installed. Try pip install 'shiftmend[{extra}]'."
        ) from error
