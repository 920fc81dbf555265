"""What the library warns of while a cell runs: kept with its result instead of said."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collected() -> Iterator[list[str]]:
    """The library's warnings, each kind once: kept with the result, for hundreds of cells would flood the screen.

    Of several threads each collects its own.
    """
    texts: list[str] = []
    kinds: set[str] = set()
    me = threading.get_ident()

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.thread == me and str(record.msg) not in kinds:
                kinds.add(str(record.msg))
                texts.append(record.getMessage())

    handler = Collector(logging.WARNING)
    logger = logging.getLogger("shiftmend")
    with _COLLECTING:
        logger.addHandler(handler)
        try:
            yield texts
        finally:
            logger.removeHandler(handler)


class _Hushed:
    """The library says nothing to the outside while anybody is inside."""

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._before: tuple[int, bool, list[logging.Handler]] = (logging.NOTSET, True, [])

    def __enter__(self) -> None:
        logger = logging.getLogger("shiftmend")
        with self._lock:
            if self._inside == 0:
                self._before = logger.level, logger.propagate, logger.handlers
                logger.setLevel(logging.WARNING)
                logger.propagate, logger.handlers = False, []
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        logger = logging.getLogger("shiftmend")
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                logger.setLevel(self._before[0])
                logger.propagate, logger.handlers = self._before[1:]


_COLLECTING = _Hushed()
