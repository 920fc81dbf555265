"""Share one GPU between the threads of a process: only one thread at a time launches work.

A CUDA graph can be captured only while no other thread launches work. So a thread holds a lock while it launches,
captures and frees, and releases the lock only while it replays a graph or waits for the GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_own = threading.local()


@contextmanager
def share_gpu(lock: threading.Lock) -> Iterator[None]:
    """Run the block while this thread holds `lock`, which `release_gpu` releases temporarily."""
    with lock:
        _own.lock = lock
        try:
            yield
        finally:
            del _own.lock


def is_sharing_gpu() -> bool:
    """Tell whether this thread is inside `share_gpu`."""
    return hasattr(_own, "lock")


@contextmanager
def release_gpu() -> Iterator[None]:
    """Let other threads launch work inside the block, in which this thread may only replay graphs and wait."""
    lock: threading.Lock | None = getattr(_own, "lock", None)
    if lock is None:
        yield
        return
    lock.release()
    try:
        yield
    finally:
        lock.acquire()
