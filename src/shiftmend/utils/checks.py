"""Checks of what a caller passed, shared so that the same mistake gets the same sentence everywhere."""

from __future__ import annotations

import importlib
from collections.abc import Collection
from numbers import Integral, Real
from types import ModuleType
from typing import Any

from shiftmend.errors import DataError, ShiftmendError, TapError

_SHORT = 60


def require(module: str, extra: str) -> ModuleType:
    """Import a module of an optional package; without the package, name the extra that brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ShiftmendError(f"Expected the package {package}. Try: pip install 'shiftmend[{extra}]'") from error


def kind(value: Any) -> str:
    """What sort of thing a value is, as part of a sentence: "a Tensor", "None", "the class Linear"."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeio' else 'a'} {name}"


def brief(value: Any) -> str:
    """A value as Python writes it, or what kind it is where that would not fit into a sentence."""
    if isinstance(value, type) or getattr(value, "ndim", None):  # a tensor or an array, and no single number
        return kind(value)
    text = repr(value)
    return text if len(text) <= _SHORT and "\n" not in text else kind(value)


def counted(number: int, one: str, many: str = "") -> str:
    """So many of something, as part of a sentence: "1 sample", "1,200 samples", "3 entries"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def is_whole(value: Any) -> bool:
    """A whole number of Python or numpy; Python would take True for one, too."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_real(value: Any) -> bool:
    """A number of Python or numpy, and no bool; it may be infinite or NaN."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_known(given: Any, known: Collection[str], what: str, error: type[ShiftmendError] = ShiftmendError) -> None:
    """Refuse what is not one of the known names."""
    if not isinstance(given, str) or given not in known:
        raise error(f"unknown {what} {brief(given)}, expected one of {', '.join(known)}")


def check_seed(seed: Any) -> None:
    """Refuse what a generator of torch takes no seed from."""
    if not is_whole(seed) or not -(2**63) <= seed < 2**64:
        raise DataError(f"a seed is a whole number of at most 64 bits, got {brief(seed)}")


def check_classes(named: int, known: int) -> None:
    """Refuse data with more or fewer classes than the model: a label is a place among the folders, or the names."""
    if named != known:
        raise DataError(
            f"the data names {named} classes, and the model knows {known}; expected one name, or one folder, for each, "
            "since labels count them: data that lacks a class goes into an .npz with its labels, or into one folder "
            "without"
        )


def check_function(given: Any, what: str, takes: str) -> None:
    """Refuse what cannot be called, before anything is done with it; `takes`: how it will be called."""
    if given is not None and not callable(given):
        raise DataError(f"{what} is {brief(given)}, expected a function: {what}({takes})")


def check_axis(axis: Any, what: str) -> None:
    """Refuse what cannot be the axis of the units; a sample `[C, H, W]` has them on axis 1 of its batch."""
    if not is_whole(axis):
        raise TapError(f"{what} counts units on axis {brief(axis)}, expected a whole number: 1, or -1 for the last")
    if axis == 0:
        raise TapError(f"{what} counts units on axis 0, which is that of the samples; expected 1, or -1 for the last")
