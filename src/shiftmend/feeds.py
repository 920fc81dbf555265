"""Batches of inputs from whatever the user has: a tensor, an array, a `Dataset` or a `DataLoader`.

Only inputs leave a feed. Labels that came along are kept apart for the evaluator and never reach a method.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

from shiftmend.distributed import active, of_first_process, share, world_size
from shiftmend.errors import DataError

logger = logging.getLogger(__name__)
logger.addFilter(of_first_process)

Preprocess = Callable[[Tensor], Tensor]
DEFAULT_BATCH = 256


class Feed:
    """A source of batches that can be run through again and again, by several processes in shares of each batch.

    Data that fits is read once and kept on the device as it came (8-bit images stay 8-bit), so that an epoch is a
    permutation and a few gathers with nothing to wait for; `resident=False`, or more than `limit` bytes, streams from
    the loader in every epoch (a tensor stays where it is and goes to the device by batches). Augmentation that a loader
    draws anew in each epoch needs `resident=False`.
    """

    def __init__(
        self,
        source: Any,
        *,
        batch_size: int | None = None,
        device: torch.device | None = None,
        preprocess: Preprocess | None = None,
        resident: bool = True,
        limit: int | None = None,
        what: str = "data",
    ) -> None:
        self.device = device or torch.device("cpu")
        self.preprocess = preprocess
        self.what = what
        if batch_size is not None and (isinstance(batch_size, bool) or batch_size < 1):
            raise DataError(f"the batch size must be at least 1, got {batch_size!r}")
        self._loader, own = _as_loader(source, batch_size, what)
        self.batch_size = batch_size or own or DEFAULT_BATCH
        self._inputs: Tensor | None = None
        self._labels: Tensor | None = None
        self._samples: int | None = None
        self._clean = False
        limit = 0 if not resident else _room(self.device) if limit is None else limit
        if isinstance(self._loader, tuple):
            whole, labels = self._loader
            self._keep(whole, labels, limit)
        elif resident:
            self._read(limit)
        self._shuffled = self._loader
        if self._inputs is None and isinstance(self._loader, DataLoader):
            if isinstance(source, Dataset) and not isinstance(source, IterableDataset):
                self._shuffled = DataLoader(source, batch_size=self.batch_size, shuffle=True)
            elif isinstance(self._loader.sampler, SequentialSampler):
                logger.warning(
                    "the %s streams in a fixed order: if it is sorted, batches are one-sided; use shuffle=True", what
                )

    @property
    def resident(self) -> bool:
        return self._inputs is not None

    @property
    def inputs(self) -> Tensor | None:
        """Everything at once, as it came, if it is resident."""
        return self._inputs

    @property
    def samples(self) -> int:
        """Number of samples; a streamed source is counted on its first whole pass."""
        if self._samples is None:
            self._samples = sum(len(inputs) for inputs, _ in self._stream(copy=False))
        return self._samples

    def first(self, count: int) -> Tensor:
        """The first few inputs, preprocessed and on the device."""
        if self._inputs is not None:
            return self.ready(self._inputs[:count].clone())
        inputs, _ = next(self._stream())
        return self.ready(inputs[:count])

    def batches(self, at_once: int = 0) -> Iterator[Tensor]:
        """Every sample once, in the order given; at least `at_once` of them together where they are resident."""
        yield from self._shared(inputs for inputs, _ in self._in_order(at_once))

    def labelled(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Every sample with its label, for evaluation only."""
        for inputs, labels in self._in_order():
            if labels is None:
                raise DataError(f"the {self.what} has no labels: expected pairs of (inputs, labels)")
            yield self.ready(inputs), labels.to(self.device, non_blocking=True)

    def subset(self, count: int, seed: int, at_once: int = 0) -> Iterator[Tensor]:
        """At most `count` samples, the same ones each time."""
        if self._inputs is not None and len(self._inputs) <= count:
            yield from self.batches(at_once)
        else:
            yield from self._shared(self._some(count, seed, at_once))

    def _some(self, count: int, seed: int, at_once: int) -> Iterator[Tensor]:
        if self._inputs is None:
            for inputs, _ in self._stream(seed, shuffled=True):
                yield inputs[:count]
                count -= len(inputs)
                if count <= 0:
                    return
        else:
            chosen = torch.randperm(len(self._inputs), generator=torch.Generator().manual_seed(seed))[:count]
            for index in chosen.sort().values.to(self._inputs.device).split(max(self.batch_size, at_once)):
                yield self._inputs[index]

    def epoch(self, seed: int, number: int) -> Iterator[Tensor]:
        """Batches of equal size in a random order that depends on nothing but `seed` and `number`.

        What is left over at the end of an epoch is too small a sample for BatchNorm and for a histogram, and is left
        out; the next epoch leaves others out. A source smaller than one batch is one batch. A streamed source gives
        its own batches, and only a last one of less than half the size is left out.
        """
        for inputs, _ in self.indexed(seed, number):
            yield inputs

    def indexed(self, seed: int, number: int) -> Iterator[tuple[Tensor, Tensor | None]]:
        """`epoch`, and with each batch which samples they are; a streamed source does not know."""
        if self._inputs is None:
            for inputs in self._full(self._stream(_order_seed(seed, number), shuffled=True)):
                yield inputs, None
            return
        size = min(self.batch_size, len(self._inputs))
        order = self.order(seed, number)
        for start in range(0, len(self._inputs) - size + 1, size):
            index = share(order[start : start + size])
            yield self.ready(self._inputs[index]), index

    def order(self, seed: int, number: int) -> Tensor:
        """The order of all samples in an epoch, where they lie; a streamed source has none."""
        assert self._inputs is not None
        generator = torch.Generator().manual_seed(_order_seed(seed, number))
        return torch.randperm(len(self._inputs), generator=generator).to(self._inputs.device, non_blocking=True)

    @property
    def ordered(self) -> bool:
        """Whether sample i of a pass is sample i of the source: not so behind a loader that shuffles."""
        loader = self._loader
        if not isinstance(loader, DataLoader):
            return True
        return isinstance(loader.sampler, SequentialSampler) and type(loader.batch_sampler) in (BatchSampler, NoneType)

    def _full(self, stream: Iterable[tuple[Tensor, Any]]) -> Iterator[Tensor]:
        """Leave out a last batch of less than half the size, unless it is the only one.

        The first batch says what the size is: a list of batches need not have been cut to `batch_size`.
        """
        size = 0
        for inputs, _ in stream:
            size = size or len(inputs)
            if len(inputs) * 2 >= size and (len(inputs) > 1 or size == 1):
                yield self.ready(share(inputs))

    def _in_order(self, at_once: int = 0) -> Iterator[tuple[Tensor, Tensor | None]]:
        if self._inputs is None:
            yield from self._stream()
            return
        samples, size = len(self._inputs), max(self.batch_size, at_once)
        # a lone last sample joins the batch before it: some normalisation takes its statistics from the batch
        ends = [end for end in range(size, samples, size) if end != samples - 1 or size == 1] + [samples]
        for start, end in zip([0, *ends], ends, strict=False):
            part = slice(start, end)
            # a copy: a model or a preprocessing that works in place must not change the data, least of all the caller's
            yield self._inputs[part].clone(), None if self._labels is None else self._labels[part]

    def _shared(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """This process's part of each batch; a last one too small to be shared joins the one before it."""
        if not active():
            yield from map(self.ready, batches)
            return
        held: Tensor | None = None
        for inputs in batches:
            small = held is not None and len(inputs) < world_size()
            if held is not None:
                yield self.ready(share(torch.cat([held, inputs]) if small else held))
            held = None if small else inputs
        if held is not None:
            yield self.ready(share(held))

    def ready(self, inputs: Tensor) -> Tensor:
        """Inputs as they are stored, brought to the device and preprocessed."""
        inputs = inputs.to(self.device, non_blocking=True)
        return self.preprocess(inputs) if self.preprocess is not None else inputs

    def _stream(
        self, seed: int = 0, copy: bool = True, shuffled: bool = False
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Batches as the loader gives them; a loader that shuffles gives the order of the seed."""
        assert not isinstance(self._loader, tuple)
        copy = copy and not isinstance(self._loader, DataLoader)  # which makes its batches anew; a list gives its own
        empty = True
        for batch in _drawn(self._shuffled if shuffled else self._loader, seed):
            inputs, labels = _split(batch, self.what)
            if len(inputs) == 0:
                continue
            empty = False
            if not self._clean:
                _refuse_non_finite(inputs, self.what)
            yield inputs.clone() if copy else inputs, labels
        if empty:
            raise DataError(f"the {self.what} is empty: expected at least one sample")
        self._clean = True

    def _read(self, limit: int) -> None:
        """Keep everything if it stays below the limit; if not, forget it and stream."""
        inputs: list[Tensor] = []
        labels: list[Tensor] = []
        size = 0
        for batch, label in self._stream(copy=False):
            size += batch.numel() * batch.element_size()
            if size > limit:
                return
            inputs.append(batch)
            if label is not None:
                labels.append(label)
        if len({tuple(part.shape[1:]) for part in inputs}) > 1:
            raise DataError(f"the batches of the {self.what} differ in shape; bring all samples to one size first")
        whole = torch.cat(labels) if labels and sum(map(len, labels)) == sum(map(len, inputs)) else None
        self._keep(torch.cat(inputs), whole, limit)

    def _keep(self, inputs: Tensor, labels: Tensor | None, limit: int) -> None:
        if len(inputs) == 0:
            raise DataError(f"the {self.what} is empty: expected at least one sample")
        if not self._clean:
            _refuse_non_finite(inputs, self.what)
        self._samples = len(inputs)
        fits = inputs.numel() * inputs.element_size() <= limit
        self._inputs = inputs.detach().to(self.device) if fits else inputs.detach()
        self._labels = None if labels is None else labels.to(self.device)


def _order_seed(seed: int, number: int) -> int:
    return (seed * 1_000_003 + number) % (1 << 63)


def _drawn(loader: Iterable[Any], seed: int) -> Iterator[Any]:
    """Run through a loader whose order and augmentation are drawn from a seed instead of the global generator.

    Most loaders know no generator but the global one, so it is set while a batch is made, and put back before it is
    used. A generator that a loader or its sampler brings along is set to the seed, too, and put back at the end.
    """
    own = torch.Generator().manual_seed(seed).get_state()
    parts = (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
    brought = {id(g): g for part in parts if isinstance(g := getattr(part, "generator", None), torch.Generator)}
    states = [(generator, generator.get_state()) for generator in brought.values()]
    try:
        for generator, _ in states:
            generator.manual_seed(seed)
        yield from _with_global_state(loader, own)
    finally:
        for generator, state in states:
            generator.set_state(state)


def _with_global_state(loader: Iterable[Any], own: Tensor) -> Iterator[Any]:
    batches: Iterator[Any] | None = None
    while True:
        outside = torch.get_rng_state()
        torch.set_rng_state(own)
        try:
            batches = iter(loader) if batches is None else batches
            batch = next(batches)
        except StopIteration:
            return
        finally:
            own = torch.get_rng_state()
            torch.set_rng_state(outside)
        yield batch


def _as_loader(source: Any, batch_size: int | None, what: str) -> tuple[Any, int | None]:
    """A pair of whole tensors, or something to iterate over, with the batch size it brings along."""
    if isinstance(source, Feed):
        raise DataError(f"the {what} is a Feed already; pass what it was made from")
    if isinstance(source, Tensor | np.ndarray):
        return (_as_inputs(source, what), None), None
    if isinstance(source, TensorDataset):
        return (source.tensors[0], source.tensors[1] if len(source.tensors) > 1 else None), None
    if isinstance(source, tuple) and source and isinstance(source[0], Tensor | np.ndarray):
        inputs = _as_inputs(source[0], what)
        labels = _as_tensor(source[1], what) if len(source) > 1 and source[1] is not None else None
        if labels is not None and (labels.ndim == 0 or len(inputs) != len(labels)):
            raise DataError(f"the {what} has {len(inputs)} inputs but {len(labels) if labels.ndim else 1} labels")
        return (inputs, labels), None
    if isinstance(source, DataLoader):
        if batch_size is not None and source.batch_size is not None and batch_size != source.batch_size:
            raise DataError(
                f"the {what} is a DataLoader of batches of {source.batch_size}, but batch_size={batch_size} was asked "
                "for; leave one of the two out"
            )
        return source, source.batch_size
    if isinstance(source, IterableDataset | Dataset):
        return DataLoader(source, batch_size=batch_size or DEFAULT_BATCH), None
    if isinstance(source, Iterable) and not isinstance(source, Iterator | str | bytes | dict):
        return source, None
    raise DataError(
        f"the {what} is a {type(source).__name__}; expected a tensor, an array, a Dataset or a DataLoader "
        "(a generator can be run through only once: make a list of it)"
    )


def _as_tensor(values: Any, what: str) -> Tensor:
    if isinstance(values, np.ndarray) and any(stride < 0 for stride in values.strides):
        values = values.copy()  # a flipped array: torch knows no negative strides
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = f"an array of {values.dtype}" if isinstance(values, np.ndarray) else f"a {type(values).__name__}"
        raise DataError(f"the {what} holds {kind}, which is no tensor of numbers; convert it first") from error


def _as_inputs(values: Any, what: str) -> Tensor:
    inputs = _as_tensor(values, what)
    if inputs.ndim == 0:
        raise DataError(f"the {what} is a single number; expected samples along the first axis")
    if isinstance(values, np.ndarray) and inputs.dtype == torch.float64:
        return inputs.to(torch.get_default_dtype())  # numpy's default is not what networks take
    return inputs


def _split(batch: Any, what: str) -> tuple[Tensor, Tensor | None]:
    """Inputs and, if there are any, labels; whatever else the loader gives is dropped here."""
    labels = None
    if isinstance(batch, tuple | list) and batch:
        labels = batch[1] if len(batch) > 1 and isinstance(batch[1], Tensor | np.ndarray) else None
        batch = batch[0]
    if isinstance(labels, np.ndarray):  # what torch does not know, such as names, is no label to evaluate with
        labels = _as_tensor(labels, what) if labels.dtype.kind in "biuf" else None
    if labels is not None and labels.ndim == 0:
        labels = None
    if isinstance(batch, np.ndarray):
        batch = _as_tensor(batch, what)
    if not isinstance(batch, Tensor) or batch.ndim == 0:
        raise DataError(
            f"the {what} gives batches of type {type(batch).__name__}; expected a tensor of inputs, or (inputs, ...)"
        )
    return batch, labels


def _refuse_non_finite(inputs: Tensor, what: str) -> None:
    if inputs.is_floating_point() and not bool(torch.isfinite(inputs).all()):
        bad = int((~torch.isfinite(inputs)).flatten(1).any(1).sum()) if inputs.ndim > 1 else "some"
        raise DataError(f"the {what} has NaN or infinite values in {bad} samples; remove or repair them first")


def _room(device: torch.device) -> int:
    """How much data may stay on the device: part of what is free there."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * 0.4)
    return 4 << 30
