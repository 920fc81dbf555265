"""The one evaluation loop: a model in eval mode over batches of data, seen by observers.

Everything that examines a model without training it uses `run_pass`: profiles, verdicts, scores, signals, reports and
figures. An observer names the taps that it needs, and keeps what it needs of each batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from shiftmend.accelerate.cuda_graphs import capture_call
from shiftmend.accelerate.precision import Precision
from shiftmend.distributed.batch_norm import synchronised
from shiftmend.distributed.collectives import all_processes, is_distributed
from shiftmend.inputs.feed import Feed
from shiftmend.introspection.call import call_model
from shiftmend.introspection.modes import enter_eval, preserve_modes
from shiftmend.introspection.taps import Tap, attach_taps
from shiftmend.utils.rng import reseed
from shiftmend.utils.tensor_tree import Inputs, describe_samples

MAX_CAPTURED_VALUES = 1 << 14
"""Largest number of values per sample at which a pass is captured; a graph holds memory."""

T = TypeVar("T")
R = TypeVar("R", covariant=True)


@dataclass(frozen=True)
class Observation:
    """One batch as observers see it.

    Attributes:
        inputs: The batch, preprocessed and on the device.
        output: Output of the model for the batch.
        activations: Activations `[samples, units]` by tap.
        labels: Labels of the batch, if the pass is over labelled data.
    """

    inputs: Inputs
    output: Any
    activations: dict[str, Tensor] = field(default_factory=dict)
    labels: Tensor | None = None


class Observer(Protocol[R]):
    """Interface of objects that collect information from each batch, and summarise it after the pass."""

    def update(self, seen: Observation) -> None: ...

    def result(self) -> R: ...


@contextmanager
def say_in_batch(number: int, inputs: Inputs) -> Iterator[None]:
    """Add the number of the batch to an error that is raised inside the block."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"This was raised in batch {number} (counted from 0) with inputs of {describe_samples(inputs)}.")
        raise


def run_pass(
    model: nn.Module,
    batches: Iterable[tuple[Inputs, Tensor | None]],
    update: Callable[[Observation], None],
    *,
    taps: Mapping[str, Tap] | None = None,
    precision: Precision = nullcontext,
    enter_modes: Callable[[nn.Module], None] = enter_eval,
) -> None:
    """Run a model over batches in eval mode, without gradients, and show each batch to an observer.

    Args:
        model: The model. Its train and eval modes are restored afterwards.
        batches: Pairs of inputs and labels (or None).
        update: Function that is called with an `Observation` after each batch.
        taps: Taps whose activations the observer needs.
        precision: A context manager for the forward pass, such as autocast.
        enter_modes: Function that sets the train and eval modes of the model; eval mode by default.
    """
    reseed(0)
    with torch.no_grad(), preserve_modes(model), ExitStack() as stack:
        recorder = stack.enter_context(attach_taps(model, taps)) if taps else None
        enter_modes(model)
        for number, (inputs, labels) in enumerate(batches):
            with precision(), say_in_batch(number, inputs):
                output = call_model(model, inputs)
            update(Observation(inputs, output, recorder.read() if recorder else {}, labels))


def without_labels(batches: Iterable[Inputs]) -> Iterator[tuple[Inputs, None]]:
    """Pair each batch of inputs with None, as `run_pass` takes them."""
    return ((inputs, None) for inputs in batches)


def worth_capturing(inputs: Inputs) -> bool:
    """Return whether a pass over these inputs consists of small kernels on a GPU."""
    return inputs.is_cuda and inputs[0].numel() <= MAX_CAPTURED_VALUES


class RepeatedPass(Generic[T]):
    """The same pass over one feed, repeated; on CUDA with small samples, captured as a graph.

    A captured pass uses weights that are changed in place, as training does. Each call overwrites the tensors that the
    previous call returned.

    Args:
        model: The model to look at.
        feed: The data.
        make_observer: Function that returns a new observer for each pass. For a captured pass, its result must hold
            tensors instead of numbers.
        taps: Taps whose activations the observer needs.
        limit: Largest number of samples, the same ones in each pass; None for all.
        labelled: Whether the observer needs labels.
        shared: Whether the processes of a group share the batches of a pass.
        capture: Whether the pass may be captured.
        precision: A context manager for the forward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        feed: Feed,
        make_observer: Callable[[], Observer[T]],
        *,
        taps: Mapping[str, Tap] | None = None,
        limit: int | None = None,
        labelled: bool = False,
        shared: bool = False,
        capture: bool = False,
        precision: Precision = nullcontext,
    ) -> None:
        self.model, self.feed, self.taps, self.precision = model, feed, taps, precision
        self.make_observer, self.limit, self.labelled, self.shared = make_observer, limit, labelled, shared
        self._may_capture = capture and feed.inputs is not None and worth_capturing(feed.inputs)
        self._replay: Callable[[], T] | None = None
        self._parts: list[Tensor] = []  # The graph reads these indices, so they live as long as the graph.

    def __call__(self) -> T:
        with ExitStack() as stack:
            if self.shared:
                stack.enter_context(all_processes())
                stack.enter_context(synchronised(self.model))
            if self._may_capture and self._replay is None and not (self.shared and is_distributed()):
                self._replay = capture_call(lambda: self._run(self._captured_batches()), self.model, self.feed.device)
                self._may_capture = self._replay is not None
            if self._replay is None:
                return self._run(self._batches())
            reseed(0)
            return self._replay()

    def forget(self) -> None:
        """Drop the captured graph, because more than the values of the model's tensors has changed."""
        self._replay = None

    def _run(self, batches: Iterable[tuple[Inputs, Tensor | None]]) -> T:
        observer = self.make_observer()
        run_pass(self.model, batches, observer.update, taps=self.taps, precision=self.precision)
        with torch.no_grad():
            return observer.result()

    def _batches(self) -> Iterable[tuple[Inputs, Tensor | None]]:
        if self.labelled:
            return self.feed.labelled_batches(self.feed.inference_batch_size)
        if self.limit is None:
            return without_labels(self.feed.batches(self.feed.inference_batch_size))
        return without_labels(self.feed.subset(self.limit, 0, self.feed.inference_batch_size))

    def _captured_batches(self) -> Iterable[tuple[Inputs, Tensor | None]]:
        """Return the batches that a graph can read again; indices of a limited pass stay in place."""
        feed, inputs = self.feed, self.feed.inputs
        if self.labelled or self.limit is None or inputs is None:
            return self._batches()
        self._parts = self._parts or feed.subset_indices(self.limit, 0, feed.inference_batch_size)
        return without_labels(feed.prepare(inputs.index_select(0, part)) for part in self._parts)


class Activations:
    """An observer that keeps the activations of all samples, in order."""

    def __init__(self, taps: Mapping[str, Tap]) -> None:
        self._seen: dict[str, list[Tensor]] = {name: [] for name in taps}

    def update(self, seen: Observation) -> None:
        for name, values in seen.activations.items():
            self._seen[name].append(values)

    def result(self) -> dict[str, Tensor]:
        return {name: torch.cat(parts) for name, parts in self._seen.items()}


class ActivationReader:
    """A reader of activations. It keeps the pass of the last taps, so that the pass can be captured."""

    def __init__(self, model: nn.Module, feed: Feed, precision: Precision = nullcontext, capture: bool = False) -> None:
        self.model, self.feed, self.precision, self.capture = model, feed, precision, capture
        self._pass: RepeatedPass[dict[str, Tensor]] | None = None

    def __call__(self, taps: Mapping[str, Tap]) -> dict[str, Tensor]:
        """Return activations `[samples, units]` by tap. The next call may write into the same tensors."""
        if self._pass is None or self._pass.taps != taps:
            self._pass = RepeatedPass(
                self.model,
                self.feed,
                lambda taps=dict(taps): Activations(taps),  # type: ignore[misc]
                taps=dict(taps),
                capture=self.capture,
                precision=self.precision,
            )
        return self._pass()
