"""What a capture must not change for a model, or take away from under it.

A graph reads and writes the memory that was there when it was captured, whatever the model holds by then.
"""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn, optim

from shiftmend.errors import ShiftmendError
from shiftmend.introspection.model_state import is_writable
from shiftmend.introspection.outputs import find_tensors
from shiftmend.utils.gpu_sharing import is_sharing_gpu, release_gpu

logger = logging.getLogger(__name__)


WARM_UP = 3
"""Steps before a capture: libraries choose their algorithms and allocate their workspaces in them."""


LARGEST_SAMPLE = 1 << 14
"""Values of a sample at most, for passes to be captured: a graph keeps its memory, and large samples gain little."""


Sums = dict[str, Tensor]
"""Terms of a loss, summed over steps."""


Once = Callable[[Tensor], Sums]
"""One step on the samples with these indices."""


T = TypeVar("T")


def captured_epoch(
    once: Once,
    model: nn.Module,
    optimiser: optim.SGD,
    device: torch.device,
    samples: int,
    size: int,
    *,
    compiled: bool = False,
) -> CapturedEpoch | None:
    """An epoch of steps of `size` samples each; None if a step cannot be captured, which is logged.

    Weights, statistics and momentum are afterwards what they were before. `once` may be called a few times. Whether
    its steps are `compiled` is for the log alone.
    """
    what = "compiled steps" if compiled else "steps"
    return _or_none(lambda: CapturedEpoch(once, model, optimiser, device, samples, size), what, device)


def worth_capturing(inputs: Tensor) -> bool:
    """Whether a pass over these inputs is one of small kernels on a GPU."""
    return inputs.is_cuda and inputs[0].numel() <= LARGEST_SAMPLE


def captured_call(run: Callable[[], T], model: nn.Module, device: torch.device) -> Callable[[], T] | None:
    """What does the same as `run`, which must not change anything; None if it cannot be captured.

    Each call writes into the tensors that the one before has returned. `run` itself is not kept: a graph has to go when
    its owner goes, not when garbage is collected. So what it reads beside the model must be kept by that owner.
    """
    return _or_none(lambda: _replayed(run, model, device), "passes", device)


def _or_none(capture: Callable[[], T], what: str, device: torch.device) -> T | None:
    try:
        return capture()
    except ShiftmendError:
        raise
    except Exception as error:  # whatever a model can do that a graph cannot hold
        _end_capture(device)
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        level = logging.INFO if what == "passes" else logging.WARNING  # steps take most of the time
        logger.log(level, "%s are not captured as a CUDA graph (%s: %s)", what, type(error).__name__, first)
        return None


def _replayed(run: Callable[[], T], model: nn.Module, device: torch.device) -> _Replayed[T]:
    read: list[Tensor] = []

    def once() -> T:
        read[:] = held_by(model)
        return run()

    with as_before_if_it_fails(model):
        graph, result = _recorded(once, device, 1)
    return _Replayed(graph, result, read, device)


@dataclass(frozen=True)
class _Replayed(Generic[T]):
    graph: torch.cuda.CUDAGraph
    result: T
    read: list[Tensor]
    """Of the model: the graph reads it."""
    device: torch.device

    def __call__(self) -> T:
        with release_gpu():
            self.graph.replay()
            if is_sharing_gpu():
                torch.cuda.current_stream(self.device).synchronize()
        return self.result


def _recorded(run: Callable[[], T], device: torch.device, warm_up: int) -> tuple[torch.cuda.CUDAGraph, T]:
    """The graph of a call, and what the call returned: tensors that a replay fills.

    `torch.cuda.graph` would first wait for the whole device, and so for everything that other threads have queued.
    """
    graph, now = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
    # A thread with a stream of its own stays on it: torch has no more than 32, and another may be a lane's.
    stream = torch.cuda.Stream(device) if now == torch.cuda.default_stream(device) else now
    stream.wait_stream(now)
    try:
        with torch.cuda.stream(stream):
            for _ in range(warm_up):
                run()
            with no_collection():
                # thread_local: other threads may go on using the device meanwhile
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    with nothing_drawn():
                        result = run()
                except BaseException:
                    with suppress(RuntimeError):  # what went wrong first says more
                        graph.capture_end()
                    raise
                graph.capture_end()
    finally:  # also after a failure: what the caller puts right must not be overtaken by a warm-up
        now.wait_stream(stream)
    return graph, result


@contextmanager
def nothing_drawn() -> Iterator[None]:
    """Refuse random numbers of the host, such as those of an augmentation: a graph would repeat the same for ever."""
    before = _draws()
    yield
    if _draws() != before:
        raise RuntimeError("random numbers are drawn on the host, and a graph would repeat them")


def _draws() -> tuple[Any, ...]:
    """Where the generators of the host are."""
    of_numpy = repr(np.random.get_state(legacy=False))  # noqa: NPY002
    return random.getstate(), of_numpy, torch.default_generator.get_state().tolist()


@contextmanager
def no_collection() -> Iterator[None]:
    """Garbage may hold other graphs, also those of other threads, which must not be freed while one is captured."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class CapturedEpoch:
    """A step finds its batch by itself, from the order of the epoch and a counter on the device.

    Nothing is kept of what was captured but tensors: a graph has to go when its stage ends, not when garbage is
    collected.
    """

    def __init__(
        self, once: Once, model: nn.Module, optimiser: optim.SGD, device: torch.device, samples: int, size: int
    ) -> None:
        self.steps = samples // size
        # any valid order will do while warming up: what it does to the model is undone
        rows = max(self.steps, WARM_UP + 1)
        self.order = torch.arange(rows * size, device=device).remainder_(samples).view(-1, size)
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self.sums: Sums = {}
        self.read: list[Tensor] = []
        with as_before_if_it_fails(model), undone(model, optimiser):
            self.graph, _ = _recorded(lambda: self._step(once, model), device, WARM_UP)

    def _step(self, once: Once, model: nn.Module) -> None:
        index = self.order.index_select(0, self.cursor).squeeze(0)
        self.read = held_by(model)
        terms = once(index)
        if not self.sums:
            self.sums = {name: torch.zeros_like(term) for name, term in terms.items()}
        torch._foreach_add_([self.sums[name] for name in terms], list(terms.values()))
        self.cursor += 1

    def run(self, order: Tensor) -> tuple[Sums, int]:
        """All steps of an epoch in this order of the samples; the sums of the terms, and how many steps there were."""
        given = self.order[: self.steps]
        given.copy_(order[: given.numel()].view_as(given))
        self.cursor.zero_()
        for total in self.sums.values():
            total.zero_()
        with release_gpu():
            for _ in range(self.steps):
                self.graph.replay()
            if is_sharing_gpu():
                torch.cuda.current_stream(self.order.device).synchronize()
        return dict(self.sums), self.steps


def _end_capture(device: torch.device) -> None:
    """After a capture that failed, torch's random generator believes that it goes on; an empty one ends it."""
    nothing = torch.zeros(1, device=device)
    torch.cuda.synchronize(device)
    _recorded(lambda: nothing.add_(1), device, 0)


def kept_in_place(model: nn.Module) -> Callable[[], None]:
    """What brings buffers back to where they lie now, with the values that they have by then.

    Some layers put a new tensor in the place of an old one in each step, of which a graph would not know.
    """
    places = [
        (module._buffers, name, tensor)
        for module in model.modules()
        for name, tensor in module._buffers.items()
        if tensor is not None and is_writable(tensor)
    ]

    def bring_back() -> None:
        moved = []
        for buffers, name, tensor in places:
            new = buffers.get(name)
            if new is not None and new is not tensor and (new.shape, new.dtype) == (tensor.shape, tensor.dtype):
                moved.append((buffers, name, tensor, new.detach().clone()))  # it may be another's old tensor
        for buffers, name, tensor, value in moved:
            buffers[name] = tensor.copy_(value)

    return bring_back


@contextmanager
def undone(model: nn.Module, optimiser: optim.SGD) -> Iterator[None]:
    """Afterwards weights, statistics and momentum are what they were, in the same memory.

    Momentum that had not begun is zero afterwards, from which the first step is the same. Steps that leave new tensors
    in the place of buffers are refused: captured, they would go on reading the old ones.
    """
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if is_writable(tensor)]
    before = [tensor.detach().clone() for tensor in tensors]
    momentum = {parameter: state["momentum_buffer"].clone() for parameter, state in optimiser.state.items()}
    finished = False
    try:
        yield
        _refuse_new(buffers)
        finished = True
    finally:
        for module, own in buffers:
            module._buffers.update(own)
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)
            if not finished:
                optimiser.state.clear()
            for parameter, kept in momentum.items():
                if finished:
                    optimiser.state[parameter]["momentum_buffer"].copy_(kept)
                else:
                    optimiser.state[parameter]["momentum_buffer"] = kept
            for parameter, state in optimiser.state.items():
                if parameter not in momentum:
                    state["momentum_buffer"].zero_()


def _refuse_new(buffers: list[tuple[nn.Module, dict[str, Tensor | None]]]) -> None:
    for module, own in buffers:
        for name, tensor in own.items():
            if module._buffers.get(name) is not tensor:
                raise RuntimeError(f"a step leaves a new tensor in the place of {name!r} of a {type(module).__name__}")


def held_by(model: nn.Module) -> list[Tensor]:
    """Every tensor that a model holds, for who keeps a graph of it, since the model may come to hold another.

    A mask or a table that it makes for the size of a batch is replaced when one of another size comes, and would be
    freed while a graph reads it.
    """
    return [tensor.detach() for module in model.modules() for tensor in find_tensors(vars(module))]


@contextmanager
def as_before_if_it_fails(model: nn.Module) -> Iterator[None]:
    """What a model comes to hold while a capture fails is taken away again: it was never computed."""
    owned = [attributes for module in model.modules() for attributes in (vars(module), module._buffers)]
    before = [dict(attributes) for attributes in owned]
    try:
        yield
    except BaseException:
        for attributes, values in zip(owned, before, strict=True):
            attributes.clear()
            attributes.update(values)
        raise
