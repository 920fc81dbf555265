"""Batches of a loader: their sizes and order, where to cut them, and how to join them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    default_collate,
)

from shiftmend.utils.tensor_tree import Inputs, TensorTree, concatenate, sample_shape

BLOCK_BYTES = 1 << 26
"""Size of joined batches, since the process may not return freed blocks of less than 32 MiB to the system."""


def known_length(loader: Any) -> int | None:
    """Return the number of samples in a pass over a loader; None if only a pass can tell."""
    if not isinstance(loader, DataLoader) or loader.collate_fn is not default_collate:
        return None
    batch_sampler = loader.batch_sampler
    if type(batch_sampler) is not BatchSampler:
        return None
    # A loader with a batch_sampler has an unrelated default sampler.
    sampler: Any = batch_sampler.sampler
    if type(sampler) not in (SequentialSampler, RandomSampler, SubsetRandomSampler):
        return None
    samples = len(sampler)
    return samples - samples % batch_sampler.batch_size if batch_sampler.drop_last else samples


def keeps_order(loader: Any) -> bool:
    """Tell whether sample i of a pass is sample i of the source; False for a loader that shuffles."""
    if not isinstance(loader, DataLoader):
        return True
    batch_sampler: Any = loader.batch_sampler
    if type(batch_sampler) not in (BatchSampler, NoneType):
        return False
    return isinstance(loader.sampler if batch_sampler is None else batch_sampler.sampler, SequentialSampler)


def random_order(count: int, seed: int) -> Tensor:
    """Draw a permutation on the host, equal on every machine."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed), device="cpu")


def common_size(sizes: Sequence[int]) -> int | None:
    """Return the common size of all batches, of which the last may be smaller; None if they differ."""
    first = sizes[0]
    return first if all(size == first for size in sizes[:-1]) and sizes[-1] <= first else None


def batch_bounds(samples: int, size: int) -> list[tuple[int, int]]:
    """Return the start and end of each batch of `size` samples.

    A single last sample joins the batch before it, because some normalisation needs batch statistics.
    """
    ends = [end for end in range(size, samples, size) if end != samples - 1 or size == 1] + [samples]
    return list(zip([0, *ends], ends, strict=False))


def merge_lone_samples(stream: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Join a single sample to the batch before it, if their shapes allow it."""
    held: tuple[Inputs, ...] | None = None
    for batch in stream:
        pairs = [] if held is None else list(zip(held, batch, strict=True))
        lone = held is not None and len(batch[0]) == 1 < len(held[0]) and all(map(_have_same_shape, pairs))
        if held is not None:
            yield tuple(map(concatenate, pairs)) if lone else held
        held = None if lone else batch
    if held is not None:
        yield held


def drop_small_batches(stream: Iterable[tuple[Inputs, Any]], size: int | None) -> Iterator[Inputs]:
    """Drop a last batch of less than half the first one's size, and single samples unless all batches are single.

    Only the last batch can be a remainder. A sampler that limits the number of tokens makes small batches of long
    samples anywhere, even at the beginning.
    """
    first, held = 0, None
    for inputs, _ in stream:
        if held is not None and (len(held) > 1 or size == 1):
            yield held
        first, held = first or len(inputs), inputs
    if held is not None and len(held) * 2 >= first and (len(held) > 1 or size == 1):
        yield held


class BatchCollector:
    """Collector that joins batches into one tensor without holding both in memory.

    Batches are joined to blocks that are large enough for their memory to return to the system once copied. Batches of
    different shapes, e.g. each padded to its own longest sample, cannot be joined and are dropped.
    """

    def __init__(self) -> None:
        self.inputs: list[Inputs] = []
        self.labels: list[Tensor] = []
        self.sizes: list[int] = []
        self.bytes = 0
        self.other: Inputs | None = None
        """Some samples of a batch with another shape than the first."""
        self._blocks = self._loose_bytes = 0

    def add(self, inputs: Inputs, labels: Tensor | None) -> None:
        """Append a batch."""
        self.sizes.append(len(inputs))
        self.bytes += inputs.nbytes
        if self.other is None and self.inputs and not _have_same_shape([inputs, self.inputs[0]]):
            self.other = inputs[:2].clone()
            self.inputs, self.labels = [self.inputs[0][:1].clone()], []
        if self.other is not None:
            return
        self.inputs.append(inputs)
        if labels is not None:
            self.labels.append(labels)
        self._loose_bytes += inputs.nbytes
        if self._loose_bytes >= BLOCK_BYTES:
            self.inputs[self._blocks :] = [concatenate(self.inputs[self._blocks :])]
            self._blocks, self._loose_bytes = len(self.inputs), 0

    def concatenate(self) -> tuple[Inputs, Tensor | None]:
        """Return all inputs and, if every sample has one, all labels; the collector is emptied."""
        one_each = [len(part) for part in self.labels] == self.sizes and _have_same_shape(self.labels)
        labels = torch.cat(self.labels) if one_each else None
        first = self.inputs[0]
        if not isinstance(first, TensorTree):
            return _join(self.inputs, sum(self.sizes)), labels
        columns = [list(column) for column in zip(*(part.leaves for part in self._take_trees()), strict=True)]
        return first.with_leaves(_join(column, sum(self.sizes)) for column in columns), labels

    def _take_trees(self) -> Iterator[TensorTree]:
        while self.inputs:
            part = self.inputs.pop(0)
            assert isinstance(part, TensorTree)
            yield part


def _join(parts: list[Any], end: int) -> Tensor:
    """Copy the blocks into one tensor in the memory format of the first, freeing each after its copy."""
    dtype = functools.reduce(torch.promote_types, (part.dtype for part in parts))
    sample = torch.empty_like(parts[0][:1])
    strides = (sample.numel(), *sample.stride()[1:])
    whole: Tensor = parts[0].new_empty_strided((end, *sample.shape[1:]), strides, dtype=dtype)
    while parts:
        part = parts.pop()
        whole[end - len(part) : end] = part
        end -= len(part)
    return whole


def _have_same_shape(batches: Iterable[Inputs]) -> bool:
    return len({sample_shape(batch) for batch in batches}) == 1
