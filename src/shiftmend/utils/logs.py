"""Quiet stretches of work whose remarks would mean nothing to the user."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hide_warnings() -> Iterator[None]:
    """Hide the library's warnings for the length of the block, as where many runs are made to be compared."""
    logger = logging.getLogger("shiftmend")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
