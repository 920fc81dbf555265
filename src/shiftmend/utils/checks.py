"""Checks of arguments, with the same message for the same mistake everywhere."""

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
    """Return the repr of a value, or the name of its type if the repr is too long for a sentence."""
    # Arrays are named by their type, single numbers by their value.
    if isinstance(value, type) or getattr(value, "ndim", None):
        return kind(value)
    text = repr(value)
    return text if len(text) <= _MAX_CHARACTERS and "\n" not in text else kind(value)


def one_line(message: object) -> str:
    """Shorten a message to one line; names in a damaged file can have any length, and line breaks."""
    line = " ".join(str(message).split())
    return line if len(line) <= 300 else f"{line[:300]} ..."


def counted(number: int, one: str, many: str = "") -> str:
    """Format a number with its noun, as part of a sentence: "1 sample", "1,200 samples", "3 entries"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def is_whole(value: Any) -> bool:
    """Tell whether a value is an integer of Python or NumPy; bool does not count."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_real(value: Any) -> bool:
    """Tell whether a value is a number of Python or NumPy, including infinity and NaN; bool does not count."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_known(given: Any, known: Collection[str], what: str, error: type[ShiftmendError] = ShiftmendError) -> None:
    """Refuse an unknown name."""
    if not isinstance(given, str) or given not in known:
        raise error(f"Expected the {what} to be one of {', '.join(known)}, got {brief(given)}.")


def check_seed(seed: Any) -> None:
    """Refuse a seed that torch's generators do not accept."""
    if not is_whole(seed) or not -(2**63) <= seed < 2**64:
        raise DataError(f"Expected a seed that is a whole number of at most 64 bits, got {brief(seed)}.")


def check_classes(named: int, known: int) -> None:
    """Refuse data with another number of classes than the model's, since labels are numbered by class."""
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
    """Refuse an invalid axis of units; images `[N, C, H, W]` have their units on axis 1."""
    if not is_whole(axis):
        raise TapError(f"Expected {what} to count units on axis 1, or -1 for the last, got axis {brief(axis)}.")
    if axis == 0:
        raise TapError(
            f"Expected {what} to count units on axis 1, or -1 for the last, got axis 0, which holds the samples."
        )


def require(module: str, extra: str) -> ModuleType:
    """Import a package that belongs to an optional extra of shiftmend.

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
