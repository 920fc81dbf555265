"""Errors that shiftmend raises on purpose.

Each message says what was expected, what was found, and what to try. All errors are `ValueError`s, so `except
ValueError` around a call catches them. The command line prints the message without a traceback.
"""

from __future__ import annotations

from typing import Any


class ShiftmendError(ValueError):
    """Base class of all errors that shiftmend raises for wrong input.

    Example:
        >>> import shiftmend
        >>> try:
        ...     shiftmend.shifts.find("emnist-da/smog")
        ... except shiftmend.ShiftmendError as error:
        ...     print(type(error).__name__)
        DataError
    """


class TapError(ShiftmendError):
    """Error of a tap that cannot be found, never runs, runs twice, or gives something other than activations."""


class ProfileError(ShiftmendError):
    """Error of a profile that is damaged, of another version, or made for another model."""


class AdaptationError(ShiftmendError):
    """Error of an adaptation that cannot start or has to stop."""


class DataError(ShiftmendError):
    """Error of data that is missing, damaged, empty or of the wrong form."""


class DivergedError(AdaptationError):
    """Error of an adaptation whose loss became NaN or infinite.

    `adaptation` holds the result as of the last good epoch, or None if there is none.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.adaptation: Any = None
