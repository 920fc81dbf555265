"""Batches of inputs from whatever the user has: a tensor, an array, a `Dataset` or a `DataLoader`.

Only inputs leave a feed. Labels that came along are kept apart for the evaluator and never reach a method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from shiftmend.distributed.collectives import local_part, local_parts
from shiftmend.errors import DataError
from shiftmend.inputs import batching
from shiftmend.inputs.prefetch import Batch, Rows, copier_to, prefetched, read
from shiftmend.inputs.sources import (
    DEFAULT_BATCH,
    LABEL_NAMES,
    as_loader,
    drawn,
    refuse_empty,
    refuse_non_finite,
    split_batch,
)
from shiftmend.utils.checks import brief, check_function, is_whole, kind
from shiftmend.utils.devices import narrowed, room_on, sent
from shiftmend.utils.gpu_sharing import has_turns

Preprocess = Callable[[Tensor], Tensor]


VALUES_AT_ONCE = 1 << 23


FIRST = 64


class Feed:
    """A source of batches that can be run through again and again, by several processes in shares of each batch.

    Data that fits is read once and kept on the device as it came (8-bit images stay 8-bit), so that an epoch is a
    permutation and a few gathers with nothing to wait for. With `resident=False`, with more than `limit` bytes or where
    batches differ in size, the loader is read in every epoch (a tensor stays where it is and goes to the device by
    batches: see `prefetch.py`). Augmentation that a loader draws anew in each epoch needs `resident=False`.
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
        check_function(preprocess, "preprocess", "inputs")
        if batch_size is not None and not (is_whole(batch_size) and batch_size >= 1):
            raise DataError(f"the batch size must be a whole number of at least 1, got {brief(batch_size)}")
        batch_size = None if batch_size is None else int(batch_size)
        if isinstance(source, Feed):
            raise DataError(f"the {what} is a Feed already; pass what it was made from")
        self._loader, own = as_loader(source, batch_size, what)
        self.batch_size = batch_size or own or DEFAULT_BATCH
        self._inputs: Tensor | None = None
        self._labels: Tensor | None = None
        self._samples: int | None = None
        self._size: int | None = None
        self._clean = False
        self._first: Tensor | None = None
        self._other: Tensor | None = None
        self.heard: Callable[[int], None] = lambda samples: None  # whoever shows how far a pass has come
        limit = 0 if not resident else room_on(self.device) if limit is None else limit
        if isinstance(self._loader, tuple):
            self._keep(self._loader[0], self._loader[1], limit)
        elif resident:
            self._read(limit)
        self.fits = None if isinstance(self._loader, tuple) or not resident else self.resident  # what `limit` decided
        self._shuffled = self._loader
        if self._inputs is None and isinstance(source, Dataset) and not isinstance(source, IterableDataset):
            self._shuffled = DataLoader(source, batch_size=self.batch_size, shuffle=True)

    @property
    def resident(self) -> bool:
        return self._inputs is not None

    @property
    def inputs(self) -> Tensor | None:
        """Everything at once, as it came, if it is resident."""
        return self._inputs

    @property
    def samples(self) -> int:
        """Number of samples; a streamed source that does not know it is counted on its first whole pass."""
        if self._samples is None:
            self._samples = self.known or sum(len(inputs) for inputs, _ in self._stream(copy=False))
        return self._samples

    @property
    def size(self) -> int | None:
        """That of the batches of an epoch, None where they differ; known once the samples are counted."""
        if self._inputs is not None or batching.known_length(self._loader):
            return min(self.batch_size, self.samples)
        return self._size if self.samples else None

    @property
    def known(self) -> int | None:
        """Number of samples, where it is known without counting them."""
        return self._samples or batching.known_length(self._loader)

    def first(self, count: int) -> Tensor:
        """The first few inputs, preprocessed and on the device."""
        if self._inputs is not None:
            return self.ready(self._inputs[:count].clone())
        if self._first is None or count > FIRST:  # remembered: each look at a loader starts its workers
            self._first = next(self._stream())[0][: max(count, FIRST)].clone()
        return self.ready(self._first[:count].clone())

    def kinds(self, count: int) -> list[Tensor]:
        """The first few inputs, and where batches are known to differ in size as many of another one."""
        return [self.first(count)] + ([] if self._other is None else [self.ready(self._other[:count].clone())])

    def batches(self, at_once: int = 0) -> Iterator[Tensor]:
        """Every sample once, in the order given; at least `at_once` of them together where they are resident."""
        if self._inputs is None:
            yield from self._sent_inputs(local_parts(batching.joined_inputs(inputs for inputs, _ in self._stream())))
            return
        whole = self._inputs
        spans = batching.spans(len(whole), max(self.batch_size, at_once))
        # indices of the host, which nobody has to wait for
        parts = local_parts(torch.arange(start, end, device="cpu") for start, end in spans)
        yield from self._sent_inputs(Rows(whole, slice(int(part[0]), int(part[-1]) + 1)) for part in parts)

    @property
    def at_once(self) -> int:
        """Samples to send through a network together where nothing is trained: a GPU wants many small ones.

        Of those that are adapted to, eight batches: without a backward pass they need no more memory than one with it.
        """
        if self.device.type != "cuda" or self._inputs is None:
            return self.batch_size
        small_enough = VALUES_AT_ONCE // max(1, self._inputs[0].numel())
        return max(self.batch_size, min(8 * self.batch_size, small_enough))

    def labelled(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Every sample with its label, for evaluation only."""
        for inputs, labels in self._sent(self._in_order()):
            assert labels is not None
            yield inputs, labels

    def _in_order(self) -> Iterator[Batch]:
        if self._inputs is None:
            for batch in batching.joined((inputs, self._known(labels)) for inputs, labels in self._stream()):
                yield batch[0], batch[1]
        else:
            for start, end in batching.spans(len(self._inputs), self.batch_size):
                yield Rows(self._inputs, slice(start, end)), self._known(self._labels)[start:end]

    def _known(self, labels: Tensor | None) -> Tensor:
        if labels is None:
            raise DataError(
                f"the {self.what} has no labels: expected pairs of (inputs, labels), all alike, or dicts in which the "
                f"labels are called {' or '.join(map(repr, LABEL_NAMES))}"
            )
        return labels

    def subset(self, count: int, seed: int, at_once: int = 0) -> Iterator[Tensor]:
        """At most `count` samples, the same ones each time."""
        if self._inputs is None:
            yield from self._sent_inputs(local_parts(batching.joined_inputs(self._beginning(count, seed))))
        elif len(self._inputs) <= count:
            yield from self.batches(at_once)
        else:
            whole = self._inputs
            yield from self._sent_inputs(Rows(whole, part) for part in local_parts(self.some(count, seed, at_once)))

    def some(self, count: int, seed: int, at_once: int = 0) -> list[Tensor]:
        """Which samples each batch of `subset` takes, where they lie; a streamed source cannot say."""
        assert self._inputs is not None
        chosen = batching.permuted(len(self._inputs), seed)[:count].sort().values.to(self._inputs.device)
        return [chosen[start:end] for start, end in batching.spans(len(chosen), max(self.batch_size, at_once))]

    def _beginning(self, count: int, seed: int) -> Iterator[Tensor]:
        for inputs, _ in self._stream(seed, shuffled=True):
            yield inputs[:count]
            count -= len(inputs)
            if count <= 1:  # a lone one is left out, see `spans`
                return

    def epoch(self, seed: int, number: int) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Batches of equal size in a random order that depends on nothing but `seed` and `number`.

        With each comes, on the device, which samples they are; a streamed source does not know. What is left over at
        the end of an epoch is too small a sample for BatchNorm and for a histogram, and is left out; the next epoch
        leaves others out. A source smaller than one batch is one batch. A streamed source gives its own batches, and
        only a last one of less than half the size is left out.
        """
        if self._inputs is None:
            stream = self._stream(_order_seed(seed, number), shuffled=True)
            yield from self._sent((local_part(inputs), None) for inputs in batching.full(stream, self.size))
            return
        whole = self._inputs
        size = min(self.batch_size, len(whole))
        order = self.order(seed, number)
        indices = (local_part(order[start : start + size]) for start in range(0, len(whole) - size + 1, size))
        yield from self._sent((Rows(whole, index), index) for index in indices)

    def order(self, seed: int, number: int) -> Tensor:
        """The order of all samples in an epoch, where they lie; a streamed source has none."""
        assert self._inputs is not None
        return sent(batching.permuted(len(self._inputs), _order_seed(seed, number)), self._inputs.device)

    @property
    def ordered(self) -> bool:
        """Whether sample i of a pass is sample i of the source."""
        return batching.keeps_order(self._loader)

    @property
    def one_sided(self) -> bool:
        """Whether every epoch has the order of a loader, so that batches of sorted data are of one kind each."""
        return not self.resident and isinstance(self._shuffled, DataLoader) and batching.keeps_order(self._shuffled)

    def _sent(self, batches: Iterable[Batch]) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Batches brought to the device, ahead of time where they come from the host, and preprocessed there."""
        on_host = self._inputs is None or self._inputs.device.type == "cpu"
        copier = copier_to(self.device) if on_host else None
        if copier is None:
            arriving = (read(batch) for batch in batches)
        else:
            # what lies in memory can be gathered aside, but not by threads that take turns on the device
            arriving = prefetched(batches, copier, background=self._inputs is not None and not has_turns())
        with closing(arriving):
            for inputs, beside in arriving:
                self.heard(len(inputs))
                yield self.ready(inputs), None if beside is None else sent(beside, self.device)

    def _sent_inputs(self, batches: Iterable[Tensor | Rows]) -> Iterator[Tensor]:
        for inputs, _ in self._sent((batch, None) for batch in batches):
            yield inputs

    def ready(self, inputs: Tensor) -> Tensor:
        """Inputs as they are stored, brought to the device and preprocessed."""
        inputs = sent(inputs, self.device)
        if self.preprocess is None:
            return inputs
        ready = self.preprocess(inputs)
        if not isinstance(ready, Tensor) or ready.shape[:1] != inputs.shape[:1]:
            gave = f"a tensor {list(ready.shape)}" if isinstance(ready, Tensor) else kind(ready)
            raise DataError(
                f"preprocess made {gave} of inputs {list(inputs.shape)}; expected a tensor of as many samples: it gets "
                "a whole batch and must return one"
            )
        return ready

    def _stream(
        self, seed: int = 0, copy: bool = True, shuffled: bool = False
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Batches as the loader gives them; a loader that shuffles gives the order of the seed."""
        assert not isinstance(self._loader, tuple)
        # a list gives its own batches, and a loader that does not put them together itself may give its memory again
        copy = copy and getattr(self._loader, "collate_fn", None) is not default_collate
        samples, sizes = 0, []
        for batch in drawn(self._shuffled if shuffled else self._loader, seed, self.what):
            inputs, labels = split_batch(batch, self.what)
            if len(inputs) == 0:
                continue
            if not self._clean:
                refuse_non_finite(inputs, self.what, samples if self.ordered and not shuffled else None)
            samples += len(inputs)
            sizes.append(len(inputs))
            yield (inputs.clone(), labels if labels is None else labels.clone()) if copy else (inputs, labels)
        refuse_empty(samples, self.what, again=self._clean)
        if not self._clean:
            self._size = batching.common_size(sizes)
        self._clean, self._samples = True, self._samples or samples

    def _read(self, limit: int) -> None:
        """Keep everything if it is of one size and stays below the limit; if not, forget it and stream."""
        gathered, samples = batching.Gathered(), self.known or 0
        for batch, label in self._stream(copy=not isinstance(self._loader, list)):
            gathered.add(batch, label)
            if max(gathered.bytes, batch.nbytes // len(batch) * samples) > limit:
                self._other = gathered.other
                return
        gathered.check(self.what, isinstance(self._loader, list))
        self._other = gathered.other
        if self._other is None:
            self._keep(*gathered.together(), limit)

    def _keep(self, inputs: Tensor, labels: Tensor | None, limit: int) -> None:
        refuse_empty(len(inputs), self.what)
        if not self._clean:
            refuse_non_finite(inputs, self.what)
        self._samples = len(inputs)
        if inputs.is_inference() and not torch.is_inference_mode_enabled():
            inputs = inputs.clone()  # nothing could be trained on what was made in inference mode
        fits = inputs.numel() * inputs.element_size() <= limit
        self._inputs = narrowed(inputs.detach(), self.device).to(self.device) if fits else inputs.detach()
        self._labels = None if labels is None else narrowed(labels, self.device).to(self.device)


def _order_seed(seed: int, number: int) -> int:
    return (seed * 1_000_003 + number) % (1 << 63)
