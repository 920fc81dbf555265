"""What the batches of a loader are together: how many samples, in which order, and all of them as one tensor."""

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

from shiftmend.errors import DataError

BLOCK = 1 << 26
"""Bytes: what is smaller than 32 MiB may stay with the process when it is freed."""


def known_length(loader: Any) -> int | None:
    """Samples that a loader gives in a pass, where that is certain without one."""
    if not isinstance(loader, DataLoader) or loader.collate_fn is not default_collate:
        return None
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler:
        return None
    sampler: Any = batches.sampler  # the loader's own is another one where it was given a batch_sampler
    if type(sampler) not in (SequentialSampler, RandomSampler, SubsetRandomSampler):
        return None
    samples = len(sampler)
    return samples - samples % batches.batch_size if batches.drop_last else samples


def keeps_order(loader: Any) -> bool:
    """Whether sample i of a pass is sample i of the source: not so behind a loader that shuffles."""
    if not isinstance(loader, DataLoader):
        return True
    batches: Any = loader.batch_sampler
    if type(batches) not in (BatchSampler, NoneType):
        return False
    return isinstance(loader.sampler if batches is None else batches.sampler, SequentialSampler)


def permuted(count: int, seed: int) -> Tensor:
    """The same on every machine: drawn on the host, whatever torch's default device is."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed), device="cpu")


def common_size(sizes: Sequence[int]) -> int | None:
    """Of all batches but a last one, which may be smaller; None where they differ."""
    first = sizes[0]
    return first if all(size == first for size in sizes[:-1]) and sizes[-1] <= first else None


def spans(samples: int, size: int) -> list[tuple[int, int]]:
    """First and one past the last of each batch of so many samples."""
    # a lone last sample joins the batch before it: some normalisation takes its statistics from the batch
    ends = [end for end in range(size, samples, size) if end != samples - 1 or size == 1] + [samples]
    return list(zip([0, *ends], ends, strict=False))


def full(stream: Iterable[tuple[Tensor, Any]], size: int | None) -> Iterator[Tensor]:
    """Leave out a last batch of less than half the first one's size, and lone samples unless the `size` of all is 1.

    Only the last one is a rest: a sampler that fills batches up to a number of tokens has small ones of long samples
    anywhere, also at the beginning.
    """
    first, held = 0, None
    for inputs, _ in stream:
        if held is not None and (len(held) > 1 or size == 1):
            yield held
        first, held = first or len(inputs), inputs
    if held is not None and len(held) * 2 >= first and (len(held) > 1 or size == 1):
        yield held


def joined(stream: Iterable[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
    """A lone sample, as the last one may be, joins the batch before it if they are alike, as in `spans`."""
    held: tuple[Tensor, ...] | None = None
    for batch in stream:
        pairs = [] if held is None else list(zip(held, batch, strict=True))
        lone = held is not None and len(batch[0]) == 1 < len(held[0]) and all(map(_alike, pairs))
        if held is not None:
            yield tuple(map(torch.cat, pairs)) if lone else held
        held = None if lone else batch
    if held is not None:
        yield held


def joined_inputs(stream: Iterable[Tensor]) -> Iterator[Tensor]:
    return (inputs for (inputs,) in joined((inputs,) for inputs in stream))


class Gathered:
    """Batches that become one tensor, without being in memory beside it.

    They are put together in blocks so large that the memory of each goes back to the system once it is copied. Batches
    that differ in size, as those padded each to its own longest sample, cannot, and are let go.
    """

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []
        self.labels: list[Tensor] = []
        self.sizes: list[int] = []
        self.bytes = 0
        self.other: Tensor | None = None
        """The beginning of one of another size than the first."""
        self._blocks = self._loose = 0

    def add(self, inputs: Tensor, labels: Tensor | None) -> None:
        self.sizes.append(len(inputs))
        self.bytes += inputs.nbytes
        if self.other is None and self.inputs and not _alike([inputs, self.inputs[0]]):
            self.other = inputs[:2].clone()
            self.inputs, self.labels = [self.inputs[0][:1].clone()], []
        if self.other is not None:
            return
        self.inputs.append(inputs)
        if labels is not None:
            self.labels.append(labels)
        self._loose += inputs.nbytes
        if self._loose >= BLOCK:
            self.inputs[self._blocks :] = [torch.cat(self.inputs[self._blocks :])]
            self._blocks, self._loose = len(self.inputs), 0

    def check(self, what: str, listed: bool) -> None:
        """Refuse what differs otherwise than in size, or may be inputs and labels."""
        pair = listed and len(self.sizes) == 2 and self.sizes[0] == self.sizes[1]
        if self.other is not None and (pair or self.other.ndim != self.inputs[0].ndim):
            advice = (
                "pass inputs with labels as a tuple, not as a list of batches" if pair else "bring all to one shape"
            )
            raise DataError(f"the batches of the {what} differ in shape; {advice}")

    def together(self) -> tuple[Tensor, Tensor | None]:
        """All of them, without labels where there is not one for each sample: beside inputs there may be anything."""
        one_each = [len(part) for part in self.labels] == self.sizes and _alike(self.labels)
        return self._given_up(), torch.cat(self.labels) if one_each else None

    def _given_up(self) -> Tensor:
        """One tensor of the parts, in the memory format of the first; they are let go one by one."""
        parts = self.inputs
        end = sum(self.sizes)
        dtype = functools.reduce(torch.promote_types, (part.dtype for part in parts))
        sample = torch.empty_like(parts[0][:1])
        strides = (sample.numel(), *sample.stride()[1:])
        whole = parts[0].new_empty_strided((end, *sample.shape[1:]), strides, dtype=dtype)
        while parts:
            part = parts.pop()
            whole[end - len(part) : end] = part
            end -= len(part)
        return whole


def _alike(batches: Iterable[Tensor]) -> bool:
    return len({batch.shape[1:] for batch in batches}) == 1
