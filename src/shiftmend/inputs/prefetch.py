"""Prefetch batches from the host's memory to a GPU while the GPU computes on the batch before.

A batch is put together in pinned memory, from where the GPU fetches it on a stream of its own. The stream that computes
waits for the copy; the host waits for neither. A thread in the background gathers what lies in memory as a whole. The
batches of a loader are read by the thread that asks for them, because a loader may draw from that thread's generators.
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
"""Batches in pinned memory, and on the device beside those that the consumer keeps: one in use, the others ahead."""

THREAD_NAME = "shiftmend-prefetch"


class Rows(NamedTuple):
    """Some samples of inputs in memory: those of an index, in its order, or those of a slice."""

    whole: Inputs
    where: Tensor | slice

    def read(self) -> Inputs:
        """Copy the samples, so that work in place never changes the caller's data."""
        rows = self.whole[self.where]
        return rows.clone() if isinstance(self.where, slice) else rows


Batch: TypeAlias = "tuple[Inputs | Rows, Tensor | None]"
"""Inputs, and what belongs to them: labels, or the index of the samples."""

Arrived: TypeAlias = "tuple[Inputs, Tensor | None]"

Part: TypeAlias = "Tensor | Rows | None"
"""One tensor of a batch, or some samples of one tensor."""


def read_batch(batch: Batch) -> Arrived:
    """Read a batch where it lies, without a copier."""
    inputs, beside = batch
    return inputs.read() if isinstance(inputs, Rows) else inputs, beside


class Event(Protocol):
    """A point in the work of a device, as `torch.cuda.Event`."""

    def synchronize(self) -> None:
        """Wait until the device has come there."""


class Copier(Protocol):
    """The operations of a device that prefetching needs. Tests have copiers without a device."""

    def allocate(self, size: int) -> Tensor:
        """Allocate bytes on the host that the device can read by itself."""

    def send(self, staged: list[Tensor]) -> tuple[list[Tensor], Event]:
        """Begin to copy. The copies may be used after `receive`; the staged tensors are free after the event."""

    def receive(self, sent: list[Tensor], copied: Event) -> None:
        """Let what the calling thread launches from here on wait for the copies."""

    def record(self) -> Event:
        """Return the point where the device has done what the calling thread has launched so far."""


class CudaCopier:
    """A copier with a stream of its own, made by the thread that computes: each thread has its own current GPU."""

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
            # The memory belongs to the copying stream, which must not reuse it before this stream is done with it.
            tensor.record_stream(stream)

    def record(self) -> Event:
        return _record(torch.cuda.current_stream(self.device))


@functools.cache
def _copy_stream(index: int) -> torch.cuda.Stream:
    """Return the one copying stream of a GPU: memory freed on a stream is given out again on that stream only."""
    return torch.cuda.Stream(index)


def _record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    # With `blocking`, a thread that waits sleeps: the cores have batches to make.
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event


def make_copier(device: torch.device) -> Copier | None:
    """Make a copier for a GPU; None for other devices, where nothing is gained."""
    return CudaCopier(device) if device.type == "cuda" else None


def prefetch(
    batches: Iterable[Batch], copier: Copier, background: bool, depth: int = DEPTH
) -> Generator[Arrived, None, None]:
    """Yield all batches in their order, on the device; at most `depth` of them are in use or on their way.

    The calling thread iterates over `batches`. In the background, `depth - 1` batches are made ahead of the one in
    use; otherwise each is made when it is asked for, and only its copy overlaps. The background ends with the iterator,
    also half-way. An error in the background is raised where its batch would have been.
    """
    return _prefetch_in_background(batches, copier, depth) if background else _prefetch_in_turn(batches, copier, depth)


def _prefetch_in_background(batches: Iterable[Batch], copier: Copier, depth: int) -> Generator[Arrived, None, None]:
    slots = [_Slot(copier) for _ in range(depth)]
    under_way: deque[Future[_Transfer]] = deque()
    # The worker is handed single batches and never waits for the consumer, so it ends when it is given up.
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
        # Any thread may collect an iterator in a reference cycle, but no thread can wait for itself.
        own = threading.current_thread().name.startswith(THREAD_NAME)
        # An iterator that is left half way may be collected when the interpreter ends, which has joined all workers.
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
    """A batch on its way."""

    inputs: Inputs
    beside: Tensor | None
    moved: list[Tensor]
    copied: Event

    def receive(self, copier: Copier) -> Arrived:
        copier.receive(self.moved, self.copied)
        return self.inputs, self.beside


class _Slot:
    """Host memory for one batch, which is used again and again and grows as needed."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._memory: list[Tensor] = []
        # Tensors that a loader has pinned must live until they have been copied, too.
        self._staged: list[Tensor] = []
        self._copied: Event | None = None

    def send(self, batch: Batch, room: Event | None) -> _Transfer:
        """Begin to copy a batch, once this memory is free and the device has come to the event `room`."""
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
        """Put a part of a batch into memory that the device reads, with the strides of a plain copy."""
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
        # Several times faster than whole[index].
        return torch.index_select(values.whole, 0, values.where, out=staged)

    def _reserve(self, place: int, like: Tensor, samples: int) -> Tensor:
        """Return a part of the memory with the type and strides of `like`, but for so many samples."""
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
    """Put what has arrived into the form of the inputs."""
    there = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    assert len(there) == len(leaves)
    like = inputs.whole if isinstance(inputs, Rows) else inputs
    return like.with_leaves(there) if isinstance(like, TensorTree) else there[0]


def _is_on_host(part: Part) -> bool:
    """Tell whether a part of a batch has to be copied; a tensor on a device stays as it is."""
    tensor = part.whole if isinstance(part, Rows) else part
    return isinstance(tensor, Tensor) and tensor.device.type == "cpu" and tensor.layout == torch.strided
