"""Capturing training steps and whole evaluation passes as CUDA graphs.

The kernels of a small network finish before Python has launched the next ones. A replayed graph needs one launch for
all kernels and does the same arithmetic. Code that a graph cannot hold (control flow that depends on values, operations
that synchronise, random numbers drawn on the host) runs eagerly instead, and the reason is logged once.

A graph reads and writes the memory that existed when it was captured, whatever the model refers to later. The second
half of this module keeps that memory alive and in place, and undoes the changes of warm-up steps.
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

WARM_UP_STEPS = 3
"""Steps before a capture, in which libraries choose their algorithms and allocate their workspaces."""

STARTS_FROM_ZERO = (optim.SGD, optim.Adam, optim.RMSprop)
"""Optimisers (AdamW is an Adam) whose state before the first step may be all zeros."""

Sums = dict[str, Tensor]
"""Terms of a loss by name, summed over steps."""
Step = Callable[[Tensor], Sums]
"""Function that does one training step on the samples with these indices."""
T = TypeVar("T")


def capture_epoch(
    step: Step,
    model: nn.Module,
    optimiser: optim.Optimizer,
    device: torch.device,
    samples: int,
    size: int,
    *,
    steps: int | None = None,
    compiled: bool = False,
) -> CapturedEpoch | None:
    """Capture a training step, to be replayed for whole epochs.

    Weights, statistics and the optimiser's state are unchanged afterwards. `step` may be called a few times.

    Args:
        step: Function that trains on the samples with the given indices and returns the terms of the loss.
        model: The model that the step trains.
        optimiser: Its optimiser.
        device: The GPU.
        samples: Number of samples in the data.
        size: Number of samples in a batch.
        steps: Number of steps per run; None for a whole epoch.
        compiled: Whether the step is compiled; used for the log only.

    Returns:
        The captured epoch, or None if the step cannot be captured. The reason is logged.
    """
    what = "compiled steps" if compiled else "steps"
    steps = steps or samples // size
    return _try_to_capture(lambda: CapturedEpoch(step, model, optimiser, device, samples, size, steps), what, device)


def capture_call(run: Callable[[], T], model: nn.Module, device: torch.device) -> Callable[[], T] | None:
    """Capture a function without side effects, such as an evaluation pass.

    `run` itself is not kept, because a graph must be freed with its owner rather than by a later garbage collection.
    The owner must therefore keep alive what `run` reads beside the model.

    Returns:
        A function that replays `run` and returns the refilled tensors of the capture. None if that is impossible.
    """
    return _try_to_capture(lambda: _capture(run, model, device), "passes", device)


def _try_to_capture(capture: Callable[[], T], what: str, device: torch.device) -> T | None:
    try:
        return capture()
    except ShiftmendError:
        raise
    except Exception as error:  # A model may do anything in its forward pass, and fail in any way during capture.
        _end_capture(device)
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        level = logging.INFO if what == "passes" else logging.WARNING  # Steps take most of the time.
        logger.log(level, "%s are not captured as a CUDA graph (%s: %s)", what, type(error).__name__, first)
        return None


def _capture(run: Callable[[], T], model: nn.Module, device: torch.device) -> _Replayed[T]:
    read: list[Tensor] = []

    def run_once() -> T:
        read[:] = list_tensors(model)
        return run()

    with restore_attributes_on_failure(model):
        graph, result = _record(run_once, device, 1)
    return _Replayed(graph, result, read, device)


@dataclass(frozen=True)
class _Replayed(Generic[T]):
    graph: torch.cuda.CUDAGraph
    result: T
    read: list[Tensor]
    """Tensors of the model that the graph reads."""
    device: torch.device

    def __call__(self) -> T:
        with release_gpu():
            self.graph.replay()
            if is_sharing_gpu():
                torch.cuda.current_stream(self.device).synchronize()
        return self.result


def _record(run: Callable[[], T], device: torch.device, warm_up: int) -> tuple[torch.cuda.CUDAGraph, T]:
    """Capture a call; return the graph and the tensors that the call returned, which each replay refills.

    `torch.cuda.graph` is not used, because it synchronises the whole device, including the work of other threads.
    """
    graph, now = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
    # A thread with its own stream stays on it: torch has 32 streams, and a new one may belong to another thread.
    stream = torch.cuda.Stream(device) if now == torch.cuda.default_stream(device) else now
    stream.wait_stream(now)
    try:
        with torch.cuda.stream(stream):
            for _ in range(warm_up):
                run()
            with pause_garbage_collection():
                # "thread_local" allows other threads to use the device.
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    with refuse_host_randomness():
                        result = run()
                except BaseException:
                    with suppress(RuntimeError):  # The first error says more than one of ending the capture.
                        graph.capture_end()
                    raise
                graph.capture_end()
    finally:  # This also happens after a failure, because the caller's repairs must not overtake a warm-up step.
        now.wait_stream(stream)
    return graph, result


@contextmanager
def refuse_host_randomness() -> Iterator[None]:
    """Raise if random numbers are drawn on the host, e.g. by augmentation, because a graph would repeat them."""
    before = _host_rng_states()
    yield
    if _host_rng_states() != before:
        raise RuntimeError("random numbers are drawn on the host, and a graph would repeat them")


def _host_rng_states() -> tuple[Any, ...]:
    numpy_state = repr(np.random.get_state(legacy=False))  # noqa: NPY002
    return random.getstate(), numpy_state, torch.default_generator.get_state().tolist()


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Suspend garbage collection during a capture, because garbage may include other graphs."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class CapturedEpoch:
    """A captured epoch, or a captured number of steps. A counter on the device selects the next batch.

    Only tensors are kept, because a graph must be freed when its stage ends, not by a later garbage collection.
    """

    def __init__(
        self,
        step: Step,
        model: nn.Module,
        optimiser: optim.Optimizer,
        device: torch.device,
        samples: int,
        size: int,
        steps: int,
    ) -> None:
        self.steps = steps
        # Any valid order will do for the warm-up, whose effect on the model is undone.
        rows = max(self.steps, WARM_UP_STEPS + 1)
        self.order = torch.arange(rows * size, device=device).remainder_(samples).view(-1, size)
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self.sums: Sums = {}
        self.read: list[Tensor] = []
        with restore_attributes_on_failure(model), undo_steps(model, optimiser):
            self.graph, _ = _record(lambda: self._step(step, model), device, WARM_UP_STEPS)

    def _step(self, step: Step, model: nn.Module) -> None:
        index = self.order.index_select(0, self.cursor).squeeze(0)
        self.read = list_tensors(model)
        terms = step(index)
        if not self.sums:
            self.sums = {name: torch.zeros_like(term) for name, term in terms.items()}
        torch._foreach_add_([self.sums[name] for name in terms], list(terms.values()))
        self.cursor += 1

    def run(self, order: Tensor) -> tuple[Sums, int]:
        """Run all steps in this order of the samples.

        Returns:
            The sums of the loss terms over the steps, and the number of steps.
        """
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
    """Reset torch's random generator after a failed capture, which leaves the generator in capture mode.

    A successful capture resets the generator. So this function captures a trivial graph and discards it.
    """
    nothing = torch.zeros(1, device=device)
    torch.cuda.synchronize(device)
    _record(lambda: nothing.add_(1), device, 0)


def keep_buffers_in_place(model: nn.Module) -> Callable[[], None]:
    """Return a function that copies the current buffer values into the original tensors.

    Some layers replace a buffer by a new tensor in each step, which a graph would not notice.
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
                moved.append((buffers, name, tensor, new.detach().clone()))  # `new` may be another buffer's tensor.
        for buffers, name, tensor, value in moved:
            buffers[name] = tensor.copy_(value)

    return bring_back


@contextmanager
def undo_steps(model: nn.Module, optimiser: optim.Optimizer) -> Iterator[None]:
    """Restore weights, statistics and the optimiser's state at the end of the block, in the same memory.

    Optimiser state that did not exist before is set to zero. An optimiser that does not start from zero is refused,
    such as Rprop, whose step size would stay zero. Steps that replace buffers by new tensors are refused as well,
    because a graph would still read the old ones.
    """
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if is_writable(tensor)]
    before = [tensor.detach().clone() for tensor in tensors]
    states = {parameter: _copy_state(state) for parameter, state in optimiser.state.items()}
    finished = False
    try:
        yield
        _refuse_new_buffers(buffers)
        if not isinstance(optimiser, STARTS_FROM_ZERO) and optimiser.state.keys() - states.keys():
            raise RuntimeError(f"the state of {type(optimiser).__name__} does not start from zero")
        finished = True
    finally:
        for module, own in buffers:
            module._buffers.update(own)
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)
            if finished:
                for parameter, state in optimiser.state.items():
                    _reset_state(state, states.get(parameter, {}))
            else:
                optimiser.state.clear()
                optimiser.state.update(states)


def _copy_state(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}


def _reset_state(state: dict[str, Any], before: dict[str, Any]) -> None:
    """Restore the earlier values of a parameter's state in place, or zeros if there were none."""
    for name, value in state.items():
        if isinstance(value, Tensor):
            value.copy_(before[name]) if name in before else value.zero_()
        else:
            state[name] = before.get(name, value)


def _refuse_new_buffers(buffers: list[tuple[nn.Module, dict[str, Tensor | None]]]) -> None:
    for module, own in buffers:
        for name, tensor in own.items():
            if module._buffers.get(name) is not tensor:
                raise RuntimeError(f"a step leaves a new tensor in the place of {name!r} of a {type(module).__name__}")


def list_tensors(model: nn.Module) -> list[Tensor]:
    """List every tensor of a model, so that the owner of a graph can keep them alive.

    A model may replace a mask or a table for a batch of another size, and thereby free memory that a graph still reads.
    """
    return [tensor.detach() for module in model.modules() for tensor in find_tensors(vars(module))]


@contextmanager
def restore_attributes_on_failure(model: nn.Module) -> Iterator[None]:
    """Remove tensors that a model stored during a failed capture, because they were never computed."""
    owned = [attributes for module in model.modules() for attributes in (vars(module), module._buffers)]
    before = [dict(attributes) for attributes in owned]
    try:
        yield
    except BaseException:
        for attributes, values in zip(owned, before, strict=True):
            attributes.clear()
            attributes.update(values)
        raise
