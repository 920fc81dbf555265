"""Batches of inputs from a tensor, an array, a `Dataset` or a `DataLoader`.

A feed yields inputs only. Labels are kept apart for evaluation, and never reach a method.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from shiftmend.distributed.collectives import local_part, local_parts
from shiftmend.inputs import batching
from shiftmend.inputs.prefetch import Batch, Rows, make_copier, prefetch, read_batch
from shiftmend.inputs.sources import (
    DEFAULT_BATCH_SIZE,
    check_batch_size,
    check_finite,
    check_labels,
    check_not_empty,
    check_preprocessed,
    check_shapes,
    find_table,
    iterate_seeded,
    open_source,
    split_batch,
)
from shiftmend.utils.checks import check_function
from shiftmend.utils.devices import max_resident_bytes, narrow_float64, send
from shiftmend.utils.gpu_sharing import is_sharing_gpu
from shiftmend.utils.tensor_tree import Inputs, list_leaves, unwrap_inputs

logger = logging.getLogger(__name__)

Preprocess = Callable[[Any], Any]
"""Function from a batch of inputs (a tensor, dict or tuple) to a batch."""

MAX_INFERENCE_VALUES = 1 << 23
"""Largest number of input values in a batch for inference on a GPU."""

REMEMBERED_SAMPLES = 64
"""Number of samples of a stream that are cached, because each new iterator of a loader starts its workers."""


SECONDS_TO_WARN = 60.0
"""Seconds after which the first pass over data of unknown length logs a message, since the data may be endless."""


class Feed:
    """A source of batches for any number of passes; in a process group, each process gets its part of each batch.

    Data that fit into memory are read once and kept on the device in their own dtype, so that 8-bit images stay 8-bit.
    An epoch is then a permutation and a few gathers. The loader is read again in every epoch with `resident=False`,
    with more than `limit` bytes, or if batches differ in size. A tensor that does not fit is copied to the device batch
    by batch (see `prefetch.py`). Random augmentation inside a loader needs `resident=False`. Tables are reordered to
    `columns`. Error messages call the data `what`.
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
        columns: Sequence[str] = (),
        what: str = "data",
    ) -> None:
        self.device = device or torch.device("cpu")
        self.preprocess = preprocess
        self.what = what
        check_function(preprocess, "preprocess", "inputs")
        check_batch_size(batch_size)
        batch_size = None if batch_size is None else int(batch_size)
        source, self.columns = find_table(source, columns, what)
        """Names of the columns; empty if the data are not a table."""
        self._loader, own = open_source(source, batch_size, what)
        self.batch_size = batch_size or own or DEFAULT_BATCH_SIZE
        self.reduced_from: int | None = None
        """Batch size before `resize`."""
        self._inputs: Inputs | None = None
        self._labels: Tensor | None = None
        self._samples: int | None = None
        self._size: int | None = None
        self._checked = False
        self._first: Inputs | None = None
        self._other: Inputs | None = None
        self.on_batch: Callable[[int], None] = lambda samples: None
        """Function that is called with the number of samples of each batch, to show progress."""
        limit = 0 if not resident else max_resident_bytes(self.device) if limit is None else limit
        if isinstance(self._loader, tuple):
            self._keep(self._loader[0], self._loader[1], limit)
        elif resident:
            self._read(limit)
        self.fits = None if isinstance(self._loader, tuple) or not resident else self.resident
        """Whether the data of a loader fit into memory; None if that was not tested."""
        self._shuffled = self._loader
        self._dataset = source if isinstance(source, Dataset) and not isinstance(source, IterableDataset) else None
        if self._inputs is None and self._dataset is not None:
            self._shuffled = DataLoader(self._dataset, batch_size=self.batch_size, shuffle=True)
        self.may_resize = batch_size is None and own is None and (self.resident or self._dataset is not None)
        """Whether `resize` may be called, because neither the caller nor a loader fixed the batch size."""

    @property
    def resident(self) -> bool:
        """True if all data are in memory, on the device or on the host."""
        return self._inputs is not None

    @property
    def inputs(self) -> Inputs | None:
        """All inputs before preprocessing, if resident."""
        return self._inputs

    @property
    def labels(self) -> Tensor | None:
        """All labels, if the data are resident; for evaluation and rehearsal only."""
        return self._labels

    @property
    def samples(self) -> int:
        """Number of samples; a stream of unknown length is counted in its first complete pass."""
        if self._samples is None:
            self._samples = self.known_samples or sum(len(inputs) for inputs, _ in self._stream(copy=False))
        return self._samples

    @property
    def known_samples(self) -> int | None:
        """Number of samples; None if a pass would have to count them."""
        return self._samples or batching.known_length(self._loader)

    @property
    def epoch_batch_size(self) -> int | None:
        """Size of the batches of an epoch; None if they differ. A stream of unknown length is counted first."""
        if self._inputs is not None or batching.known_length(self._loader):
            return min(self.batch_size, self.samples)
        return self._size if self.samples else None

    def resize(self, batch_size: int) -> None:
        """Change the batch size, before any batch is used for training."""
        assert self.may_resize
        if batch_size == self.batch_size:
            return
        if batch_size < self.batch_size:
            self.reduced_from = self.reduced_from or self.batch_size
        self.batch_size = batch_size
        if self._inputs is None:
            assert self._dataset is not None
            self._loader = DataLoader(self._dataset, batch_size=batch_size)
            self._shuffled = DataLoader(self._dataset, batch_size=batch_size, shuffle=True)

    @property
    def inference_batch_size(self) -> int:
        """Number of samples per batch for inference, where a GPU is faster with large batches.

        At most eight training batches, which need no more memory without a backward pass than one with it.
        """
        if self.device.type != "cuda" or self._inputs is None:
            return self.batch_size
        small_enough = MAX_INFERENCE_VALUES // max(1, self._inputs[0].numel())
        return max(self.batch_size, min(8 * self.batch_size, small_enough))

    @property
    def keeps_order(self) -> bool:
        """True if sample i of a pass is sample i of the source."""
        return batching.keeps_order(self._loader)

    @property
    def never_shuffles(self) -> bool:
        """True if every epoch has the fixed order of a loader, so that sorted data give biased batches."""
        return not self.resident and isinstance(self._shuffled, DataLoader) and batching.keeps_order(self._shuffled)

    def first(self, count: int) -> Inputs:
        """Return the first inputs, preprocessed and on the device."""
        if self._inputs is not None:
            return self.prepare(self._inputs[:count].clone())
        if self._first is None or count > REMEMBERED_SAMPLES:
            self._first = next(self._stream())[0][: max(count, REMEMBERED_SAMPLES)].clone()
        return self.prepare(self._first[:count].clone())

    def examples(self, count: int) -> list[Inputs]:
        """Return the first inputs and, if batches are known to differ in size, some inputs of another size."""
        return [self.first(count)] + ([] if self._other is None else [self.prepare(self._other[:count].clone())])

    def batches(self, at_least: int = 0) -> Iterator[Inputs]:
        """Yield batches that hold every sample once, in order.

        Args:
            at_least: Smallest batch size for data that is kept on the device. Streamed data keep their batches.
        """
        if self._inputs is None:
            yield from self._send_inputs(local_parts(_merge_inputs(inputs for inputs, _ in self._stream())))
            return
        whole = self._inputs
        bounds = batching.batch_bounds(len(whole), max(self.batch_size, at_least))
        # Slices avoid waiting for indices on the host.
        parts = local_parts(torch.arange(start, end, device="cpu") for start, end in bounds)
        yield from self._send_inputs(Rows(whole, slice(int(part[0]), int(part[-1]) + 1)) for part in parts)

    def labelled_batches(self, at_least: int = 0) -> Iterator[tuple[Inputs, Tensor]]:
        """Yield every sample with its label, for evaluation only; resident data in batches of at least `at_least`."""
        for inputs, labels in self._send(self._with_labels(at_least)):
            assert labels is not None
            yield inputs, labels

    def _with_labels(self, at_least: int) -> Iterator[Batch]:
        if self._inputs is None:
            stream = ((inputs, check_labels(labels, self.what)) for inputs, labels in self._stream())
            for batch in batching.merge_lone_samples(stream):
                yield batch[0], batch[1]
        else:
            labels = check_labels(self._labels, self.what)
            for start, end in batching.batch_bounds(len(self._inputs), max(self.batch_size, at_least)):
                yield Rows(self._inputs, slice(start, end)), labels[start:end]

    def subset(self, count: int, seed: int, at_least: int = 0) -> Iterator[Inputs]:
        """Yield a fixed random subset of at most `count` samples; resident data in batches of at least `at_least`."""
        if self._inputs is None:
            yield from self._send_inputs(local_parts(_merge_inputs(self._stream_beginning(count, seed))))
        elif len(self._inputs) <= count:
            yield from self.batches(at_least)
        else:
            whole = self._inputs
            parts = local_parts(self.subset_indices(count, seed, at_least))
            yield from self._send_inputs(Rows(whole, part) for part in parts)

    def subset_indices(self, count: int, seed: int, at_least: int = 0) -> list[Tensor]:
        """Return the sample indices of each batch of `subset`; resident data only."""
        assert self._inputs is not None
        chosen = batching.random_order(len(self._inputs), seed)[:count].sort().values.to(self._inputs.device)
        bounds = batching.batch_bounds(len(chosen), max(self.batch_size, at_least))
        return [chosen[start:end] for start, end in bounds]

    def _stream_beginning(self, count: int, seed: int) -> Iterator[Inputs]:
        for inputs, _ in self._stream(seed, shuffled=True):
            yield inputs[:count]
            count -= len(inputs)
            # A single last sample is left out, as in `batch_bounds`.
            if count <= 1:
                return

    @property
    def steps_per_epoch(self) -> int | None:
        """Number of batches in an epoch; None if an epoch must not be cut.

        An epoch must not be cut for a stream of fixed order, because the samples after the cut would never be used, nor
        for a stream of unknown length.
        """
        if self._inputs is not None:
            return len(self._inputs) // min(self.batch_size, len(self._inputs))
        known = self.known_samples
        return None if known is None or batching.keeps_order(self._shuffled) else max(1, known // self.batch_size)

    def epoch(self, seed: int, number: int, steps: int | None = None) -> Iterator[tuple[Inputs, Tensor | None]]:
        """Yield batches of equal size in a random order that depends only on `seed` and `number`.

        With `steps`, yield that many batches: the beginning of an epoch, or several epochs in a row. Each batch comes
        with the indices of its samples on the device; None for a stream. The remainder at the end of an epoch is too
        small for BatchNorm and histograms and is left out; the next epoch leaves out other samples. A source smaller
        than one batch forms one batch. A stream yields its own batches, except a last one of less than half the size.
        """
        if self._inputs is None:
            batches = self._stream_epochs(_mix_seed(seed, number), steps)
            yield from self._send((local_part(inputs), None) for inputs in batches)
            return
        whole = self._inputs
        size = min(self.batch_size, len(whole))
        order = self.epoch_order(seed, number, steps)
        indices = (local_part(order[start : start + size]) for start in range(0, len(order) - size + 1, size))
        yield from self._send((Rows(whole, index), index) for index in indices)

    def _stream_epochs(self, seed: int, steps: int | None) -> Iterator[Inputs]:
        """Yield the batches of one pass over a stream, or `steps` batches over as many passes as needed."""
        taken = again = 0
        while True:
            stream = self._stream(_mix_seed(seed, again) if again else seed, shuffled=True)
            for inputs in batching.drop_small_batches(stream, self.epoch_batch_size):
                yield inputs
                taken += 1
                if taken == steps:
                    return
            again += 1
            if steps is None or not taken:
                return

    def epoch_order(self, seed: int, number: int, steps: int | None = None) -> Tensor:
        """Return the order of all samples in an epoch, or of `steps` batches; resident data only.

        The indices are on the device of the samples.
        """
        whole = self._inputs
        assert whole is not None
        mixed = _mix_seed(seed, number)
        order = batching.random_order(len(whole), mixed)
        if steps is not None:
            each = len(whole) - len(whole) % min(self.batch_size, len(whole))
            wanted = steps * min(self.batch_size, len(whole))
            more = range(1, -(-wanted // each))
            parts = [order, *(batching.random_order(len(whole), _mix_seed(mixed, again)) for again in more)]
            order = torch.cat([part[:each] for part in parts])[:wanted]
        return send(order, whole.device)

    def prepare(self, inputs: Inputs) -> Inputs:
        """Move inputs to the device and preprocess them there."""
        inputs = send(inputs, self.device)
        if self.preprocess is None:
            return inputs
        return check_preprocessed(self.preprocess(unwrap_inputs(inputs)), inputs)

    def _send(self, batches: Iterable[Batch]) -> Iterator[tuple[Inputs, Tensor | None]]:
        """Move batches to the device, prefetching those on the host, and preprocess them there."""
        on_host = self._inputs is None or self._inputs.device.type == "cpu"
        copier = make_copier(self.device) if on_host else None
        if copier is None:
            arriving = (read_batch(batch) for batch in batches)
        else:
            # A background thread gathers resident data, unless threads share the GPU.
            arriving = prefetch(batches, copier, background=self._inputs is not None and not is_sharing_gpu())
        with closing(arriving):
            for inputs, beside in arriving:
                self.on_batch(len(inputs))
                yield self.prepare(inputs), None if beside is None else send(beside, self.device)

    def _send_inputs(self, batches: Iterable[Inputs | Rows]) -> Iterator[Inputs]:
        for inputs, _ in self._send((batch, None) for batch in batches):
            yield inputs

    def _stream(
        self, seed: int = 0, copy: bool = True, shuffled: bool = False
    ) -> Iterator[tuple[Inputs, Tensor | None]]:
        """Yield the batches of the loader; a loader that shuffles uses the seed."""
        assert not isinstance(self._loader, tuple)
        # Copies are needed, because a list returns its own batches, and a loader without collation may reuse memory.
        copy = copy and getattr(self._loader, "collate_fn", None) is not default_collate
        samples, sizes, started = 0, [], time.monotonic()
        for batch in iterate_seeded(self._shuffled if shuffled else self._loader, seed, self.what):
            inputs, labels = split_batch(batch, self.what)
            if len(inputs) == 0:
                continue
            if not self._checked:
                check_finite(inputs, self.what, samples if self.keeps_order and not shuffled else None)
            samples += len(inputs)
            sizes.append(len(inputs))
            if not self._checked and self.known_samples is None and time.monotonic() - started > SECONDS_TO_WARN:
                logger.warning(
                    "the %s has given %d samples and has no known length; a pass ends only with the data",
                    self.what,
                    samples,
                )
                started = math.inf
            yield (inputs.clone(), labels if labels is None else labels.clone()) if copy else (inputs, labels)
        check_not_empty(samples, self.what, again=self._checked)
        if not self._checked:
            self._size = batching.common_size(sizes)
        self._checked, self._samples = True, self._samples or samples

    def _read(self, limit: int) -> None:
        """Keep all data if they have one shape and fit below the limit; otherwise stream them."""
        collector, samples = batching.BatchCollector(), self.known_samples or 0
        listed = isinstance(self._loader, list)
        for batch, label in self._stream(copy=not listed):
            collector.add(batch, label)
            if max(collector.bytes, batch.nbytes // len(batch) * samples) > limit:
                self._other = collector.other
                return
        self._other = collector.other
        if self._other is None:
            self._keep(*collector.concatenate(), limit)
        else:
            looks_labelled = listed and len(collector.sizes) == 2 and len(set(collector.sizes)) == 1
            check_shapes(collector.inputs[0], self._other, looks_labelled, self.what)

    def _keep(self, inputs: Inputs, labels: Tensor | None, limit: int) -> None:
        check_not_empty(len(inputs), self.what)
        if not self._checked:
            check_finite(inputs, self.what)
        self._samples = len(inputs)
        if any(leaf.is_inference() for _, leaf in list_leaves(inputs)) and not torch.is_inference_mode_enabled():
            # Tensors made in inference mode cannot be used for training.
            inputs = inputs.clone()
        fits = inputs.nbytes <= limit
        self._inputs = narrow_float64(inputs.detach(), self.device).to(self.device) if fits else inputs.detach()
        self._labels = None if labels is None else narrow_float64(labels, self.device).to(self.device)


def _merge_inputs(stream: Iterable[Inputs]) -> Iterator[Inputs]:
    return (inputs for (inputs,) in batching.merge_lone_samples((inputs,) for inputs in stream))


def _mix_seed(seed: int, number: int) -> int:
    return (seed * 1_000_003 + number) % (1 << 63)
