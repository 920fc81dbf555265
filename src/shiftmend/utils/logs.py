"""Suppression of log messages that would not help the user."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hide_warnings() -> Iterator[None]:
    """Hide the library's warnings inside the block, e.g. while many runs are compared."""
    logger = logging.getLogger("shiftmend")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
