"""The steps of a stage: one batch after the other as PyTorch runs them, or captured once as a CUDA graph and replayed.

A step of a small network is over before Python has launched the next kernel; a replayed graph needs one launch for all
of them. Both do the same arithmetic. What cannot be captured (data that streams, control flow that looks at values,
operations that wait for the device) is run eagerly, and the reason is logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn, optim

from shiftmend.distributed import active, backward, synchronised, together
from shiftmend.errors import AdaptationError, ShiftmendError
from shiftmend.feeds import Feed
from shiftmend.methods import Objective
from shiftmend.taps import Recorder, Tap, tapped
from shiftmend.turns import has_turns, others_may_go

logger = logging.getLogger(__name__)

WARM_UP = 3
"""Steps before a capture: libraries choose their algorithms and allocate their workspaces in them."""
Precision = Callable[[], AbstractContextManager[Any]]
Sums = dict[str, Tensor]


class Steps:
    """All steps of one stage. Without an optimiser, batches only run forward, for BatchNorm to see them."""

    def __init__(
        self,
        model: nn.Module,
        feed: Feed,
        taps: Mapping[str, Tap],
        objective: Objective | None,
        optimiser: optim.SGD | None,
        *,
        precision: Precision = nullcontext,
        dropout: bool = False,
        capture: bool = True,
        what: str = "",
    ) -> None:
        self.model, self.feed, self.taps = model, feed, taps
        self.objective, self.optimiser = objective, optimiser
        self.precision, self.dropout, self.what = precision, dropout, what
        self._captured: _Captured | None = None
        self._may_capture = capture and self._can_be_captured()

    @property
    def captured(self) -> bool:
        return self._captured is not None

    def _can_be_captured(self) -> bool:
        inputs = self.feed.inputs
        trains = self.objective is not None and self.optimiser is not None
        return trains and inputs is not None and inputs.is_cuda

    def epoch(self, seed: int, number: int, targets: Tensor | None = None) -> tuple[Sums, int]:
        """Run an epoch; returns the sums of the loss's terms over its steps, and how many steps there were."""
        trains = self.objective is not None and self.optimiser is not None
        with (
            together(),
            synchronised(self.model),
            torch.inference_mode(False),
            torch.set_grad_enabled(trains),
            _own_dice(self.feed.device, seed, number) if self.dropout else nullcontext(),
        ):
            if self._may_capture and self._captured is None and not active():
                self._try_to_capture(targets)
            if self._captured is not None:
                return self._captured.epoch(self.feed.order(seed, number), targets)
            return self._eagerly(seed, number, targets)

    def _eagerly(self, seed: int, number: int, targets: Tensor | None) -> tuple[Sums, int]:
        sums: Sums = {}
        steps = 0
        with tapped(self.model, self.taps) as recorder:
            for batch, index in self.feed.indexed(seed, number):
                own = targets[index] if targets is not None and index is not None else None
                for name, term in self.step(recorder, batch, own).items():
                    sums[name] = sums[name] + term if name in sums else term
                steps += 1
        return sums, steps

    def step(self, recorder: Recorder, batch: Tensor, targets: Tensor | None) -> Sums:
        """Forward, loss, backward and update on one batch; returns the terms of the loss."""
        with self.precision():
            self.model(batch)
        activations = recorder.read()
        if self.optimiser is None or self.objective is None:
            return {}
        if targets is not None:
            activations["targets"] = targets
        terms = self.objective(activations)
        total = torch.stack(list(terms.values())).sum()
        if not total.requires_grad:
            raise AdaptationError(
                f"what the loss reads does not depend on the parameters of {self.what!r}: the model cuts the gradient "
                "off (no_grad or detach in its forward?)"
            )
        self.optimiser.zero_grad(set_to_none=True)
        backward(total, self.model.parameters())
        self.optimiser.step()
        return {name: term.detach() for name, term in terms.items()}

    def _try_to_capture(self, targets: Tensor | None) -> None:
        try:
            with tapped(self.model, self.taps) as recorder:
                self._captured = _Captured(self, recorder, targets)
        except ShiftmendError:
            raise
        except Exception as error:  # whatever a model can do that a graph cannot hold
            self._may_capture = False
            _end_capture(self.feed.device)
            first = str(error).strip().splitlines()[0] if str(error).strip() else ""
            logger.info("steps are not captured as a CUDA graph (%s: %s)", type(error).__name__, first)


class _Captured:
    """A step as a CUDA graph: it finds its batch by itself, from the order of the epoch and a counter on the device."""

    def __init__(self, steps: Steps, recorder: Recorder, targets: Tensor | None) -> None:
        assert steps.feed.inputs is not None
        assert steps.optimiser is not None
        # no reference back to `steps`: a graph has to go when its stage ends, not when garbage is collected
        self.inputs = steps.feed.inputs
        size = min(steps.feed.batch_size, len(self.inputs))
        device = self.inputs.device
        # any valid order will do while warming up: what it does to the model is undone
        everything = torch.arange(len(self.inputs) // size * size, device=device)
        self.order = everything.view(-1, size).clone()
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self.targets = None if targets is None else targets.clone()
        self.sums: Sums = {}
        self.graph = torch.cuda.CUDAGraph()
        with _undone(steps.model, steps.optimiser):
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    self._once(steps, recorder)
            torch.cuda.current_stream(device).wait_stream(stream)
            # thread_local: other threads may go on using the device meanwhile
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                self._once(steps, recorder)

    def _once(self, steps: Steps, recorder: Recorder) -> None:
        index = self.order.index_select(0, self.cursor).squeeze(0)
        batch = steps.feed.ready(self.inputs.index_select(0, index))
        own = None if self.targets is None else self.targets.index_select(0, index)
        for name, term in steps.step(recorder, batch, own).items():
            if name not in self.sums:
                self.sums[name] = torch.zeros_like(term)
            self.sums[name] += term
        self.cursor += 1
        self.cursor.remainder_(len(self.order))

    def epoch(self, order: Tensor, targets: Tensor | None) -> tuple[Sums, int]:
        self.order.copy_(order[: self.order.numel()].view_as(self.order))
        self.cursor.zero_()
        if self.targets is not None and targets is not None:
            self.targets.copy_(targets)
        for total in self.sums.values():
            total.zero_()
        with others_may_go():
            for _ in range(len(self.order)):
                self.graph.replay()
            if has_turns():
                torch.cuda.current_stream(self.inputs.device).synchronize()
        return dict(self.sums), len(self.order)


def _end_capture(device: torch.device) -> None:
    """After a capture that failed, torch's random generator believes that it goes on; an empty one ends it."""
    nothing = torch.zeros(1, device=device)
    torch.cuda.synchronize(device)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        nothing.add_(1)


@contextmanager
def _undone(model: nn.Module, optimiser: optim.SGD) -> Iterator[None]:
    """Afterwards weights, statistics and momentum are what they were, in the same memory.

    Momentum that had not begun is zero afterwards, from which the first step is the same.
    """
    tensors = [*model.parameters(), *model.buffers()]
    before = [tensor.detach().clone() for tensor in tensors]
    momentum = {parameter: state["momentum_buffer"].clone() for parameter, state in optimiser.state.items()}
    finished = False
    try:
        yield
        finished = True
    finally:
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


@contextmanager
def _own_dice(device: torch.device, seed: int, number: int) -> Iterator[None]:
    """Dropout draws from the seed of the run and the number of the epoch; the global generators stay as they are."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed((seed * 1_000_003 + number) % (1 << 63))
        yield
