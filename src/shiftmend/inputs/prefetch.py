"""Prefetching of batches from host memory to a GPU while the GPU computes on the previous batch.

A batch is assembled in pinned memory, from which the GPU copies it on a separate stream. The computing stream waits for
the copy; the host waits for neither. Resident data are gathered by a background thread. Batches of a loader are read by
the consuming thread, because a loader may draw from that thread's random number generators.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from shiftmend.utils.tensor_tree import Inputs, TensorTree

DEPTH = 3
"""Number of batches in pinned memory, and on the device: one in use, the others ahead."""

THREAD_NAME = "shiftmend-prefetch"


class Rows(NamedTuple):
    """Some samples of resident inputs, selected by an index or a slice."""

    whole: Inputs
    where: Tensor | slice

    def read(self) -> Inputs:
        """Copy the samples, so that in-place operations never change the caller's data."""
        rows = self.whole[self.where]
        return rows.clone() if isinstance(self.where, slice) else rows


Batch: TypeAlias = "tuple[Inputs | Rows, Tensor | None]"
"""Inputs with their labels, or with the indices of their samples."""

Arrived: TypeAlias = "tuple[Inputs, Tensor | None]"

Part: TypeAlias = "Tensor | Rows | None"
"""One tensor of a batch, or some samples of one tensor."""


def read_batch(batch: Batch) -> Arrived:
    """Read a batch without copying it to a device."""
    inputs, beside = batch
    return inputs.read() if isinstance(inputs, Rows) else inputs, beside


class Event(Protocol):
    """A point in the work of a device, as `torch.cuda.Event`."""

    def synchronize(self) -> None:
        """Wait until the device has reached this point."""


class Copier(Protocol):
    """The operations of a device that prefetching needs. Tests use copiers without a device."""

    def allocate(self, size: int) -> Tensor:
        """Allocate pinned memory on the host."""

    def send(self, staged: list[Tensor]) -> tuple[list[Tensor], Event]:
        """Start to copy. The copies may be used after `receive`; the staged tensors are free after the event."""

    def receive(self, sent: list[Tensor], copied: Event) -> None:
        """Make all later work of the calling thread wait for the copies."""

    def record(self) -> Event:
        """Return an event after all work that the calling thread has launched so far."""


class CudaCopier:
    """A copier with its own stream, made by the computing thread, because each thread has its own current GPU."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.stream = _copy_stream(index)

    def allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def send(self, staged: list[Tensor]) -> tuple[list[Tensor], Event]:
        with torch.cuda.stream(self.stream):
            sent = [tensor.to(self.device, non_blocking=True) for tensor in staged]
            return sent, _record(self.stream)

    def receive(self, sent: list[Tensor], copied: Event) -> None:
        stream = torch.cuda.current_stream(self.device)
        assert isinstance(copied, torch.cuda.Event)
        stream.wait_event(copied)
        for tensor in sent:
            # The memory belongs to the copying stream, which must not reuse it before this stream has finished.
            tensor.record_stream(stream)

    def record(self) -> Event:
        return _record(torch.cuda.current_stream(self.device))


@functools.cache
def _copy_stream(index: int) -> torch.cuda.Stream:
    """Return the only copying stream of a GPU; memory freed on a stream is reused on that stream only."""
    return torch.cuda.Stream(index)


def _record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    # With `blocking`, a waiting thread sleeps and leaves its core to the data workers.
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event


def make_copier(device: torch.device) -> Copier | None:
    """Make a copier for a GPU; None for other devices, which gain nothing."""
    return CudaCopier(device) if device.type == "cuda" else None


def prefetch(
    batches: Iterable[Batch], copier: Copier, background: bool, depth: int = DEPTH
) -> Generator[Arrived, None, None]:
    """Yield all batches in order on the device; at most `depth` of them are in use or being copied.

    The calling thread iterates over `batches`. With `background`, `depth - 1` batches are made ahead of the one in use;
    otherwise each is made on request, and only its copy overlaps. The background thread ends with the iterator, even if
    it is not exhausted. An error in the background is raised at the position of its batch.
    """
    return _prefetch_in_background(batches, copier, depth) if background else _prefetch_in_turn(batches, copier, depth)


def _prefetch_in_background(batches: Iterable[Batch], copier: Copier, depth: int) -> Generator[Arrived, None, None]:
    slots = [_Slot(copier) for _ in range(depth)]
    under_way: deque[Future[_Transfer]] = deque()
    # The worker gets single batches and never waits for the consumer, so it ends when the iterator is dropped.
    worker = ThreadPoolExecutor(1, THREAD_NAME)
    try:
        done_with: Event | None = None
        for number, batch in enumerate(batches):
            if len(under_way) == depth:
                yield under_way.popleft().result().receive(copier)
                done_with = copier.record()
            under_way.append(worker.submit(slots[number % depth].send, batch, done_with))
        while under_way:
            yield under_way.popleft().result().receive(copier)
    finally:
        # Any thread may garbage-collect an iterator in a reference cycle, but no thread can join itself.
        own = threading.current_thread().name.startswith(THREAD_NAME)
        # An unfinished iterator may be collected at interpreter exit, when all workers have been joined.
        if not sys.is_finalizing():
            worker.shutdown(wait=not own, cancel_futures=True)


def _prefetch_in_turn(batches: Iterable[Batch], copier: Copier, depth: int) -> Generator[Arrived, None, None]:
    slots = [_Slot(copier) for _ in range(depth)]
    done_with: deque[Event] = deque()
    for number, batch in enumerate(batches):
        if number > 0:
            done_with.append(copier.record())
        room = done_with.popleft() if number >= depth else None
        yield slots[number % depth].send(batch, room).receive(copier)


class _Transfer(NamedTuple):
    """A batch that is being copied."""

    inputs: Inputs
    beside: Tensor | None
    moved: list[Tensor]
    copied: Event

    def receive(self, copier: Copier) -> Arrived:
        copier.receive(self.moved, self.copied)
        return self.inputs, self.beside


class _Slot:
    """Reusable host memory for one batch, which grows as needed."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._memory: list[Tensor] = []
        # Tensors that a loader has pinned must also stay alive until they have been copied.
        self._staged: list[Tensor] = []
        self._copied: Event | None = None

    def send(self, batch: Batch, room: Event | None) -> _Transfer:
        """Start to copy a batch, once this memory is free and the device has reached the event `room`."""
        if self._copied is not None:
            self._copied.synchronize()
        with torch.inference_mode(False), torch.no_grad():
            parts = [*_split_inputs(batch[0]), batch[1]]
            self._staged = [self._stage(place, part) for place, part in enumerate(parts) if _is_on_host(part)]
            if room is not None:
                room.synchronize()
            moved, self._copied = self._copier.send(self._staged)
        arrived = iter(moved)
        *leaves, beside = (next(arrived) if _is_on_host(part) else part for part in parts)
        assert isinstance(beside, Tensor | None)
        return _Transfer(_join_inputs(batch[0], leaves), beside, moved, self._copied)

    def _stage(self, place: int, part: Part) -> Tensor:
        """Copy a part of a batch into pinned memory, with the strides of a plain copy."""
        assert part is not None
        if isinstance(part, Tensor) and part.is_pinned() and part.is_contiguous():
            # A loader with pin_memory=True made it.
            return part
        values = part.whole[part.where] if isinstance(part, Rows) and isinstance(part.where, slice) else part
        assert not isinstance(values, TensorTree)
        if isinstance(values, Tensor):
            return self._reserve(place, torch.empty_like(values, device="meta"), len(values)).copy_(values)
        assert isinstance(values.where, Tensor)
        assert isinstance(values.whole, Tensor)
        staged = self._reserve(place, values.whole[values.where[:1]], len(values.where))
        # This is several times faster than whole[index].
        return torch.index_select(values.whole, 0, values.where, out=staged)

    def _reserve(self, place: int, like: Tensor, samples: int) -> Tensor:
        """Return a view of the memory with the dtype and strides of `like`, for a number of samples."""
        shape = (samples, *like.shape[1:])
        size = math.prod(shape) * like.element_size()
        while len(self._memory) <= place:
            self._memory.append(torch.empty(0, dtype=torch.uint8, device="cpu"))
        if len(self._memory[place]) < size:
            self._memory[place] = self._copier.allocate(size)
        return self._memory[place][:size].view(like.dtype).as_strided(shape, like.stride())


def _split_inputs(inputs: Inputs | Rows) -> list[Tensor | Rows]:
    """List the parts of inputs: one for each tensor."""
    if isinstance(inputs, Rows) and isinstance(inputs.whole, TensorTree):
        return [Rows(leaf, inputs.where) for leaf in inputs.whole.leaves]
    return [*inputs.leaves] if isinstance(inputs, TensorTree) else [inputs]


def _join_inputs(inputs: Inputs | Rows, leaves: list[Part]) -> Inputs:
    """Assemble the copied tensors in the structure of the inputs."""
    there = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    assert len(there) == len(leaves)
    like = inputs.whole if isinstance(inputs, Rows) else inputs
    return like.with_leaves(there) if isinstance(like, TensorTree) else there[0]


def _is_on_host(part: Part) -> bool:
    """Tell whether a part of a batch must be copied; tensors on a device need no copy."""
    tensor = part.whole if isinstance(part, Rows) else part
    return isinstance(tensor, Tensor) and tensor.device.type == "cpu" and tensor.layout == torch.strided
