"""Several runs in threads on one GPU: they take turns in everything but waiting for it.

A CUDA graph can only be captured while no other thread of the process starts work of its own. So a thread holds its
turn while it launches, captures and frees, and gives it up only where it does nothing but replay and wait.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_turns = threading.local()


@contextmanager
def taking_turns(lock: threading.Lock) -> Iterator[None]:
    """For the length of the block this thread runs only while it holds `lock`, which it may give up in between."""
    with lock:
        _turns.lock = lock
        try:
            yield
        finally:
            del _turns.lock


def has_turns() -> bool:
    """Whether this thread shares the device with others."""
    return hasattr(_turns, "lock")


@contextmanager
def others_may_go() -> Iterator[None]:
    """Inside, other threads may have their turn; on the device nothing but replaying and waiting may be done."""
    lock: threading.Lock | None = getattr(_turns, "lock", None)
    if lock is None:
        yield
        return
    lock.release()
    try:
        yield
    finally:
        lock.acquire()
