"""Batches on their way from the host's memory to a GPU, while the GPU still computes on the one before.

A batch is put together in pinned memory, from where the GPU fetches it by itself, on a stream of its own; the stream
that computes waits for the copy, the host for neither. What lies in memory as a whole is gathered by a thread in the
background; what a loader gives is read where it always was, by the thread that asks for it, because a loader may draw
from generators which that thread draws from, too.
"""

from __future__ import annotations

import functools
import math
import threading
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

DEPTH = 3
"""Batches in pinned memory, and on the device beside those that the consumer keeps: one in use, the others ahead."""


THREAD = "shiftmend-prefetch"


class Rows(NamedTuple):
    """Some samples of all those in memory: in the order of an index, or from one to another."""

    whole: Tensor
    where: Tensor | slice

    def read(self) -> Tensor:
        """A copy, always: work in place must not change the data, least of all the caller's."""
        rows = self.whole[self.where]
        return rows.clone() if isinstance(self.where, slice) else rows


Batch: TypeAlias = "tuple[Tensor | Rows, Tensor | None]"
"""Inputs, and what belongs to them: labels, or which samples they are."""


Arrived: TypeAlias = "tuple[Tensor, Tensor | None]"


def read(batch: Batch) -> Arrived:
    """A batch where it lies, without a copier."""
    inputs, beside = batch
    return inputs.read() if isinstance(inputs, Rows) else inputs, beside


class Mark(Protocol):
    """A point in the work of a device, which the host can wait for."""

    def synchronize(self) -> None: ...


class Copier(Protocol):
    """What a device has to offer for prefetching. Tests have one without a device."""

    def memory(self, size: int) -> Tensor:
        """So many bytes on the host, which the device can read by itself."""

    def send(self, staged: list[Tensor]) -> tuple[list[Tensor], Mark]:
        """Begin to copy; the result may be used after `receive`, what was staged is free again from the mark on."""

    def receive(self, sent: list[Tensor], copied: Mark) -> None:
        """What the calling thread launches from here on finds the copies complete."""

    def now(self) -> Mark:
        """When the device has done what the calling thread has launched so far."""


class CudaCopier:
    """Copies on a stream of their own. Made by the thread that computes: which GPU is current is up to a thread."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.stream = _copying_stream(index)

    def memory(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def send(self, staged: list[Tensor]) -> tuple[list[Tensor], Mark]:
        with torch.cuda.stream(self.stream):
            sent = [tensor.to(self.device, non_blocking=True) for tensor in staged]
            return sent, _mark(self.stream)

    def receive(self, sent: list[Tensor], copied: Mark) -> None:
        stream = torch.cuda.current_stream(self.device)
        assert isinstance(copied, torch.cuda.Event)
        stream.wait_event(copied)
        for tensor in sent:  # it belongs to the copying stream, which must not reuse it before this one is done with it
            tensor.record_stream(stream)

    def now(self) -> Mark:
        return _mark(torch.cuda.current_stream(self.device))


@functools.cache
def _copying_stream(index: int) -> torch.cuda.Stream:
    """One for each GPU: memory freed on a stream is given out again on that stream only."""
    return torch.cuda.Stream(index)


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(blocking=True)  # who waits for it sleeps: the cores have batches to make
    event.record(stream)
    return event


def copier_to(device: torch.device) -> Copier | None:
    """None where there is nothing to gain: on a CPU, data is where it is needed."""
    return CudaCopier(device) if device.type == "cuda" else None


def prefetched(
    batches: Iterable[Batch], copier: Copier, background: bool, depth: int = DEPTH
) -> Generator[Arrived, None, None]:
    """All batches in their order, on the device; at most `depth` are there that the consumer has not done with.

    `batches` is always run through by the calling thread. In the background, `depth - 1` batches are made ahead of the
    one in use; else each is made when it is asked for, and only its copy overlaps. The background ends with the
    iterator, also where that is given up half-way; an error in it is raised where its batch would have been.
    """
    return _ahead(batches, copier, depth) if background else _in_turn(batches, copier, depth)


def _ahead(batches: Iterable[Batch], copier: Copier, depth: int) -> Generator[Arrived, None, None]:
    slots = [_Slot(copier) for _ in range(depth)]
    under_way: deque[Future[_Sent]] = deque()
    # it is handed single batches and never waits for the consumer: given up, it has nothing left to wait for
    worker = ThreadPoolExecutor(1, THREAD)
    try:
        done_with: Mark | None = None
        for number, batch in enumerate(batches):
            if len(under_way) == depth:
                yield under_way.popleft().result().received(copier)
                done_with = copier.now()
            under_way.append(worker.submit(slots[number % depth].send, batch, done_with))
        while under_way:
            yield under_way.popleft().result().received(copier)
    finally:
        # an iterator in a reference cycle may be collected by any thread, and none can wait for itself
        own = threading.current_thread().name.startswith(THREAD)
        worker.shutdown(wait=not own, cancel_futures=True)


def _in_turn(batches: Iterable[Batch], copier: Copier, depth: int) -> Generator[Arrived, None, None]:
    slots = [_Slot(copier) for _ in range(depth)]
    done_with: deque[Mark] = deque()
    for number, batch in enumerate(batches):
        if number > 0:
            done_with.append(copier.now())
        room = done_with.popleft() if number >= depth else None
        yield slots[number % depth].send(batch, room).received(copier)


class _Sent(NamedTuple):
    inputs: Tensor
    beside: Tensor | None
    moved: list[Tensor]
    copied: Mark

    def received(self, copier: Copier) -> Arrived:
        copier.receive(self.moved, self.copied)
        return self.inputs, self.beside


class _Slot:
    """Host memory for one batch, used again and again; it grows to what is needed."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._memory: list[Tensor] = [torch.empty(0, dtype=torch.uint8, device="cpu")] * 2
        self._lent: list[Tensor] = []  # pinned memory of others, too, has to live until it has been copied
        self._copied: Mark | None = None

    def send(self, batch: Batch, room: Mark | None) -> _Sent:
        """Begin to copy a batch, as soon as the copy before it has left this memory and the device has room."""
        if self._copied is not None:
            self._copied.synchronize()
        with torch.inference_mode(False), torch.no_grad():
            self._lent = [self._staged(place, part) for place, part in enumerate(batch) if _moves(part)]
            if room is not None:
                room.synchronize()
            moved, self._copied = self._copier.send(self._lent)
        arrived = iter(moved)
        inputs, beside = (next(arrived) if _moves(part) else part for part in batch)
        assert isinstance(inputs, Tensor)
        assert isinstance(beside, Tensor | None)
        return _Sent(inputs, beside, moved, self._copied)

    def _staged(self, place: int, part: Tensor | Rows | None) -> Tensor:
        """A part of a batch in memory that the device reads, laid out as `Rows.read` or a plain copy would lay it."""
        assert part is not None
        if isinstance(part, Tensor) and part.is_pinned() and part.is_contiguous():
            return part  # as a loader with pin_memory=True made it
        values = part.whole[part.where] if isinstance(part, Rows) and isinstance(part.where, slice) else part
        if isinstance(values, Tensor):
            return self._laid_out(place, torch.empty_like(values, device="meta"), len(values)).copy_(values)
        assert isinstance(values.where, Tensor)
        staged = self._laid_out(place, values.whole[values.where[:1]], len(values.where))
        return torch.index_select(values.whole, 0, values.where, out=staged)  # several times faster than whole[index]

    def _laid_out(self, place: int, like: Tensor, samples: int) -> Tensor:
        """Part of the memory, with the type and strides of `like` but so many samples."""
        shape = (samples, *like.shape[1:])
        size = math.prod(shape) * like.element_size()
        if len(self._memory[place]) < size:
            self._memory[place] = self._copier.memory(size)
        return self._memory[place][:size].view(like.dtype).as_strided(shape, like.stride())


def _moves(part: Tensor | Rows | None) -> bool:
    """Whether it lies on the host; what is on a device already stays as it is."""
    tensor = part.whole if isinstance(part, Rows) else part
    return tensor is not None and tensor.device.type == "cpu" and tensor.layout == torch.strided
