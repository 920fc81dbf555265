"""Devices that are none, to prefetch to: one that copies at once, and one that works as late as it may."""

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
    """Copies when it is asked to."""

    def allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def send(self, staged: list[Tensor]) -> tuple[list[Tensor], Past]:
        return [tensor.clone() for tensor in staged], Past()

    def receive(self, sent: list[Tensor], copied: Past) -> None:
        pass

    def record(self) -> Past:
        return Past()


class Reached:
    def __init__(self, act: Callable[[], None]) -> None:
        self.synchronize = act


class AsLateAsPossible:
    """Copies only when somebody waits for the copy: memory that was overwritten too early is what arrives then.

    As on a GPU, a batch that was received is not yet there; `finish` ends all work, and what arrived can be looked at.
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
    """Nobody waits for its copies."""

    def send(self, staged: list[Tensor]) -> tuple[list[Tensor], Reached]:
        return super().send(staged)[0], Reached(lambda: None)
