"""What the batches of a loader are together: how many samples, in which order, and all of them as one tensor."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
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


def known_length(loader: Any) -> int | None:
    """Samples that a loader gives in a pass, where that is certain without one."""
    if not isinstance(loader, DataLoader) or loader.collate_fn is not default_collate:
        return None
    sampler: Any = loader.sampler
    known = type(sampler) in (SequentialSampler, RandomSampler, SubsetRandomSampler)
    if not known or type(loader.batch_sampler) is not BatchSampler:
        return None
    samples = len(sampler)
    return samples - samples % (loader.batch_size or 1) if loader.drop_last else samples


def keeps_order(loader: Any) -> bool:
    """Whether sample i of a pass is sample i of the source: not so behind a loader that shuffles."""
    if not isinstance(loader, DataLoader):
        return True
    return isinstance(loader.sampler, SequentialSampler) and type(loader.batch_sampler) in (BatchSampler, NoneType)


def full(stream: Iterable[tuple[Tensor, Any]]) -> Iterator[Tensor]:
    """Leave out a last batch of less than half the size, unless it is the only one.

    The first batch says what the size is: a list of batches need not have been cut to `batch_size`.
    """
    size = 0
    for inputs, _ in stream:
        size = size or len(inputs)
        if len(inputs) * 2 >= size and (len(inputs) > 1 or size == 1):
            yield inputs


def joined(stream: Iterable[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
    """A lone sample, as the last one may be, joins the batch before it if they are alike, as in `Feed._spans`."""
    held: tuple[Tensor, ...] | None = None
    for batch in stream:
        pairs = [] if held is None else list(zip(held, batch, strict=True))
        lone = held is not None and len(batch[0]) == 1 < len(held[0]) and all(map(_alike, pairs))
        if held is not None:
            yield tuple(map(torch.cat, pairs)) if lone else held
        held = None if lone else batch
    if held is not None:
        yield held


def together(inputs: list[Tensor], labels: list[Tensor], what: str, listed: bool) -> tuple[Tensor, Tensor | None]:
    """Batches as one, without labels where there is not one for each sample: beside inputs there may be anything."""
    if not _alike(inputs):
        pair = listed and len(inputs) == 2 and len(inputs[0]) == len(inputs[1])
        advice = ", and pass inputs with labels as a tuple, not as a list of batches" if pair else ""
        raise DataError(f"the batches of the {what} differ in shape; bring all samples to one size first{advice}")
    one_each = [len(part) for part in labels] == [len(part) for part in inputs] and _alike(labels)
    return _given_up(inputs), torch.cat(labels) if one_each else None


def _given_up(parts: list[Tensor]) -> Tensor:
    """One tensor of many, which the list loses one by one: `torch.cat` would have everything in memory twice."""
    dtype = functools.reduce(torch.promote_types, (part.dtype for part in parts))
    end = sum(map(len, parts))
    whole = parts[0].new_empty(end, *parts[0].shape[1:], dtype=dtype)
    while parts:
        part = parts.pop()
        whole[end - len(part) : end] = part
        end -= len(part)
    return whole


def _alike(batches: Iterable[Tensor]) -> bool:
    return len({batch.shape[1:] for batch in batches}) == 1
