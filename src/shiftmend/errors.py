"""The errors shiftmend raises on purpose.

Each message is one sentence that says what was wrong, what was expected and what to do. They are all
`ValueError`s, so `except ValueError` around a call is enough; the command line prints the message alone.
"""

from __future__ import annotations

from typing import Any


class ShiftmendError(ValueError):
    """Base of every error that is the input's fault rather than the library's."""


class TapError(ShiftmendError):
    """A tap could not be found, never fired, fired twice or gave something that is no activation."""


class ProfileError(ShiftmendError):
    """A profile is damaged, of another version, or does not fit the model it is used with."""


class AdaptationError(ShiftmendError):
    """An adaptation could not start or had to stop."""


class DataError(ShiftmendError):
    """Data is missing, damaged, empty or of the wrong form."""


class DivergedError(AdaptationError):
    """The loss became NaN or infinite. `adaptation` holds what had been reached after the last good epoch."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.adaptation: Any = None
