"""Copiers without a device, for tests of prefetching: one copies at once, one as late as it may."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor


class Past:
    """An event that has happened."""

    def synchronize(self) -> None:
        pass


class AtOnce:
    """A copier that copies when it is asked to."""

    def allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def send(self, staged: list[Tensor]) -> tuple[list[Tensor], Past]:
        return [tensor.clone() for tensor in staged], Past()

    def receive(self, sent: list[Tensor], copied: Past) -> None:
        pass

    def record(self) -> Past:
        return Past()


class Reached:
    """An event that acts when somebody waits for it."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.synchronize = act


class AsLateAsPossible:
    """A copier that copies only when somebody waits, so that memory which is overwritten too early arrives wrong.

    As on a GPU, a received batch is not yet complete; `finish` ends all work.
    """

    def __init__(self) -> None:
        self.allocations = self.sent = self.received = self.finished = self.most = 0
        self.threads: set[str] = set()
        self._copies: list[Callable[[], object]] = []
        self._done = 0
        self._lock = threading.Lock()

    def allocate(self, size: int) -> Tensor:
        self.allocations += 1
        return torch.empty(size, dtype=torch.uint8)

    def send(self, staged: list[Tensor]) -> tuple[list[Tensor], Reached]:
        self.threads.add(threading.current_thread().name)
        there = [torch.full_like(tensor, 77) for tensor in staged]
        with self._lock:
            for tensor, here in zip(there, staged, strict=True):
                self._copies.append(partial(tensor.copy_, here))
            self.sent += 1
            self.most = max(self.most, self.sent - self.finished)
            return there, Reached(partial(self._work, len(self._copies)))

    def receive(self, sent: list[Tensor], copied: Reached) -> None:
        self.received += 1

    def record(self) -> Reached:
        with self._lock:
            return Reached(partial(self._finish, self.received))

    def finish(self) -> None:
        self._work(len(self._copies))

    def _finish(self, batches: int) -> None:
        self.finished = max(self.finished, batches)

    def _work(self, up_to: int) -> None:
        with self._lock:
            while self._done < up_to:
                self._copies[self._done]()
                self._done += 1


class Careless(AsLateAsPossible):
    """A copier whose copies nobody waits for."""

    def send(self, staged: list[Tensor]) -> tuple[list[Tensor], Reached]:
        return super().send(staged)[0], Reached(lambda: None)
