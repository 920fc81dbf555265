"""Sources of data: tensors, arrays, a `Dataset`, a `DataLoader`, a list of batches. The one place that refuses data.

Reading a source gives the same order and the same augmentation for the same seed, whatever else draws random numbers.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, TensorDataset

from shiftmend.errors import DataError
from shiftmend.inputs.images import check_range
from shiftmend.utils.checks import brief, counted, is_whole, kind
from shiftmend.utils.devices import split_rows

DEFAULT_BATCH_SIZE = 256

LABEL_NAMES = ("label", "labels", "target", "targets")
"""Keys under which a dict may hold labels; any other key may hold the inputs."""


def open_source(source: Any, batch_size: int | None, what: str) -> tuple[Any, int | None]:
    """Turn what a user has into `(inputs, labels or None)` or an iterable of batches, with the batch size it brings.

    Error messages call the data `what`, e.g. "target data".
    """
    if isinstance(source, Mapping):
        source = _pick_by_name(source)
    if isinstance(source, Tensor | np.ndarray):
        return (_as_inputs(source, what), None), None
    # A subclass of TensorDataset may give other samples than the tensors that it holds.
    if type(source) is TensorDataset:
        return (_as_inputs(source.tensors[0], what), source.tensors[1] if len(source.tensors) > 1 else None), None
    if isinstance(source, tuple) and source and isinstance(source[0], Tensor | np.ndarray):
        inputs = _as_inputs(source[0], what)
        labels = as_tensor(source[1], what) if len(source) > 1 and source[1] is not None else None
        if labels is not None and (labels.ndim == 0 or len(inputs) != len(labels)):
            raise DataError(
                f"the {what} has {counted(len(inputs), 'input')} but "
                f"{counted(len(labels) if labels.ndim else 1, 'label')}"
            )
        return (inputs, labels), None
    if isinstance(source, DataLoader):
        sampler = source.batch_sampler
        own = sampler.batch_size if type(sampler) is BatchSampler else None
        # Another size would hold only where the data fits into memory.
        if sampler is not None and batch_size not in (None, own):
            its = "with a batch_sampler of its own" if own is None else f"of batches of {own}"
            raise DataError(
                f"the {what} is a DataLoader {its}, but batch_size={batch_size} was asked for; leave one of the two out"
            )
        return source, own
    if isinstance(source, IterableDataset | Dataset):
        if not isinstance(source, IterableDataset) and not hasattr(source, "__len__"):
            raise DataError(
                f"the {what} is {kind(source)}, a Dataset without __len__; expected one that knows its size"
            )
        return DataLoader(source, batch_size=batch_size or DEFAULT_BATCH_SIZE), None
    if isinstance(source, Iterable) and not _cannot_hold_batches(source):
        # As a tuple, two batches would look like inputs and labels.
        return list(source) if isinstance(source, tuple) else source, None
    raise DataError(
        f"the {what} is {kind(source)}; expected a tensor, an array, a Dataset or a DataLoader{_suggest(source)}"
    )


def _cannot_hold_batches(source: Any) -> bool:
    """Tell whether Python can iterate over something, but not by batches, or not twice."""
    return isinstance(source, Iterator | str | bytes | Mapping | nn.Module) or hasattr(source, "to_numpy")


def _suggest(source: Any) -> str:
    """Guess what a user meant who passed something else."""
    if isinstance(source, Iterator):
        return " (a generator can be run through only once: make a list of it)"
    if isinstance(source, str | os.PathLike):
        return "; read the files first, e.g. shiftmend.image_folder(folder).images"
    if isinstance(source, Mapping):
        return "; pass the entry that holds the inputs"
    if hasattr(source, "images"):
        return "; pass its images, or (images, labels) to evaluate"
    return "; pass what its to_numpy() gives" if hasattr(source, "to_numpy") else ""


def _pick_by_name(named: Mapping[Any, Any]) -> Any:
    """Return (inputs, labels) of a dict such as {"image": ..., "label": ...}; the dict itself where there is doubt."""
    arrays = {name: value for name, value in named.items() if isinstance(value, Tensor | np.ndarray) and value.ndim}
    labels = [arrays[name] for name in LABEL_NAMES if name in arrays]
    inputs = [value for name, value in arrays.items() if name not in LABEL_NAMES and value.ndim > 1]
    return (*inputs, *labels) if len(inputs) == 1 and len(labels) < 2 else named


def as_tensor(values: Any, what: str) -> Tensor:
    """Convert inputs or labels to a tensor, without a copy where possible."""
    if np.ma.is_masked(values):
        # Torch would take the values behind the mask.
        raise DataError(f"the {what} has masked values; replace them first, e.g. by the array's filled(...)")
    if isinstance(values, np.ndarray) and any(stride < 0 for stride in values.strides):
        # Torch has no negative strides, which a flipped array has.
        values = values.copy()
    if isinstance(values, np.ndarray) and not values.dtype.isnative:
        # Many instruments write big-endian numbers.
        values = values.astype(values.dtype.newbyteorder("="))
    if isinstance(values, np.ndarray) and values.dtype == np.uint64:
        # Torch computes little with uint64, and takes large ones for negative numbers.
        check_range(values, f"number of the {what}")
        values = values.astype(np.int64)
    read_only = isinstance(values, np.ndarray) and not values.flags.writeable
    try:
        with warnings.catch_warnings() if read_only else nullcontext():
            if read_only:
                # A file may be mapped for reading only. A feed writes into copies of batches alone.
                warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return values if isinstance(values, Tensor) else torch.as_tensor(values, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        held = f"an array of {values.dtype}" if isinstance(values, np.ndarray) else kind(values)
        raise DataError(f"the {what} holds {held}, which is no tensor of numbers; convert it first") from error


def _as_inputs(values: Any, what: str) -> Tensor:
    inputs = as_tensor(values, what)
    if inputs.ndim == 0:
        raise DataError(f"the {what} is a single number; expected samples along the first axis")
    if isinstance(values, np.ndarray) and inputs.dtype == torch.float64:
        # Float64 is the default of numpy, but networks take another type.
        if torch.get_default_dtype() == torch.float32:
            check_range(values, f"number of the {what}")
        return inputs.to(torch.get_default_dtype())
    return inputs


def split_batch(batch: Any, what: str) -> tuple[Tensor, Tensor | None]:
    """Return the inputs and, if there are any, the labels of a batch; drop what else a loader gives."""
    labels = None
    if isinstance(batch, Mapping):
        batch = _pick_by_name(batch)
    if isinstance(batch, tuple | list) and batch:
        labels = batch[1] if len(batch) > 1 and isinstance(batch[1], Tensor | np.ndarray) else None
        batch = batch[0]
    if isinstance(labels, np.ndarray):
        # An array of names, for example, holds no labels to evaluate with.
        labels = as_tensor(labels, what) if labels.dtype.kind in "biuf" else None
    if labels is not None and labels.ndim == 0:
        labels = None
    if isinstance(batch, np.ndarray) and batch.ndim:
        batch = _as_inputs(batch, what)
    if not isinstance(batch, Tensor) or batch.ndim == 0:
        advice = ""
        if isinstance(batch, Mapping):
            advice = f": let the Dataset or collate_fn give one of its entries {', '.join(map(repr, batch))}"
        elif isinstance(batch, int | float | list):
            advice = ": a list is one of batches, make a tensor of numbers"
        raise DataError(
            f"the {what} gives batches of type {type(batch).__name__}; expected a tensor of inputs, or (inputs, ...)"
            f"{advice}"
        )
    return batch.detach(), labels


def check_batch_size(batch_size: Any) -> None:
    """Refuse a batch size that is no whole number of at least 1; None is the default size."""
    if batch_size is not None and not (is_whole(batch_size) and batch_size >= 1):
        raise DataError(f"the batch size must be a whole number of at least 1, got {brief(batch_size)}")


def check_not_empty(samples: int, what: str, again: bool = False) -> None:
    """Refuse a source without samples; `again` says that an earlier pass found some."""
    if not samples and again:
        raise DataError(
            f"the {what} gave nothing when it was run through again; expected batches that begin anew each time, as "
            "those of a list or a DataLoader do"
        )
    if not samples:
        raise DataError(f"the {what} is empty: expected at least one sample")


def check_finite(inputs: Tensor, what: str, before: int | None = 0) -> None:
    """Refuse NaN and infinite inputs; looks at a part at a time, since they may be a file that is mapped into memory.

    `before` is how many samples came before these, None if their order is not that of the source.
    """
    if not (inputs.is_floating_point() or inputs.is_complex()):
        return
    parts = split_rows(inputs)
    flags = torch.stack([torch.isfinite(part).all() for part in parts])
    if not bool(flags.all()):
        part = int(flags.int().argmin())
        bad = (~torch.isfinite(parts[part])).reshape(len(parts[part]), -1).any(1)
        first = sum(map(len, parts[:part])) + int(bad.int().argmax())
        place = "" if before is None else f", first in sample {before + first} (counted from 0)"
        raise DataError(f"the {what} has NaN or infinite values{place}; remove or repair such samples first")


def check_shapes(first: Tensor, other: Tensor, looks_labelled: bool, what: str) -> None:
    """Refuse batches that differ otherwise than in size, and a list of two that may be inputs and labels."""
    if looks_labelled:
        raise DataError(f"the batches of the {what} differ in shape; pass inputs with labels as a tuple, not as a list")
    if first.ndim != other.ndim:
        raise DataError(f"the batches of the {what} differ in shape; bring all to one shape")


def check_labels(labels: Tensor | None, what: str) -> Tensor:
    """Return the labels, which an evaluation needs."""
    if labels is None:
        raise DataError(
            f"the {what} has no labels: expected pairs of (inputs, labels), all alike, or dicts in which the "
            f"labels are called {' or '.join(map(repr, LABEL_NAMES))}"
        )
    return labels


def check_preprocessed(result: Any, inputs: Tensor) -> None:
    """Refuse what `preprocess` made of a batch unless it is a tensor of as many samples."""
    if not isinstance(result, Tensor) or result.shape[:1] != inputs.shape[:1]:
        gave = f"a tensor {list(result.shape)}" if isinstance(result, Tensor) else kind(result)
        raise DataError(
            f"preprocess made {gave} of inputs {list(inputs.shape)}; expected a tensor of as many samples: it gets "
            "a whole batch and must return one"
        )


def iterate_seeded(loader: Iterable[Any], seed: int, what: str = "data") -> Iterator[Any]:
    """Iterate over a loader whose order and augmentation follow a seed instead of the global generator.

    Most loaders draw from the global generator, so it has a state of its own while a batch is made, and the state of
    before while the batch is used. A generator that a loader or its sampler brings along is seeded as well, and
    restored at the end.
    """
    state = torch.Generator().manual_seed(seed).get_state()
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    own = {id(g): g for part in parts if isinstance(g := getattr(part, "generator", None), torch.Generator)}
    before = [(generator, generator.get_state()) for generator in own.values()]
    try:
        for generator, _ in before:
            generator.manual_seed(seed)
        yield from _iterate_with_state(loader, state, what)
    finally:
        for generator, previous in before:
            generator.set_state(previous)


def _iterate_with_state(loader: Iterable[Any], state: Tensor, what: str) -> Iterator[Any]:
    batches: Iterator[Any] | None = None
    for number in count():
        outside = torch.get_rng_state()
        torch.set_rng_state(state)
        try:
            batches = iter(loader) if batches is None else batches
            batch = next(batches)
        except StopIteration:
            return
        except BaseException as error:
            error.add_note(f"This was raised by the {what} itself, for batch {number} (counted from 0).")
            if isinstance(loader, DataLoader) and isinstance(error, TypeError | RuntimeError):
                error.add_note(
                    f"No batch of the {what} could be made. Expected samples that are tensors of one shape: convert "
                    "and resize them in the Dataset, or pass a DataLoader whose collate_fn pads each batch."
                )
            raise
        finally:
            state = torch.get_rng_state()
            torch.set_rng_state(outside)
        yield batch
