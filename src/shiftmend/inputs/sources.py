"""What data may come as: a tensor, an array, a `Dataset`, a `DataLoader`, a list of batches. Anything else is refused.

Reading a source gives the same order and the same augmentation for the same seed, whatever else draws random numbers.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, TensorDataset

from shiftmend.errors import DataError
from shiftmend.utils.checks import counted, kind
from shiftmend.utils.devices import in_parts

DEFAULT_BATCH = 256


LABEL_NAMES = ("label", "labels", "target", "targets")
"""Of data by names: what is not taken for the inputs."""


def as_loader(source: Any, batch_size: int | None, what: str) -> tuple[Any, int | None]:
    """A pair of whole tensors, or something to iterate over, with the batch size it brings along."""
    if isinstance(source, Mapping):
        source = _by_names(source)
    if isinstance(source, Tensor | np.ndarray):
        return (_as_inputs(source, what), None), None
    if type(source) is TensorDataset:  # a subclass may give something else than it holds
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
        batches = source.batch_sampler
        own = batches.batch_size if type(batches) is BatchSampler else None
        if batches is not None and batch_size not in (None, own):  # it would hold only if the data fitted into memory
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
        return DataLoader(source, batch_size=batch_size or DEFAULT_BATCH), None
    if isinstance(source, Iterable) and not _is_no_list_of_batches(source):
        return list(source) if isinstance(source, tuple) else source, None  # a tuple would be (inputs, labels)
    raise DataError(
        f"the {what} is {kind(source)}; expected a tensor, an array, a Dataset or a DataLoader{_instead(source)}"
    )


def _is_no_list_of_batches(source: Any) -> bool:
    """Things that Python can go through, but not by batches, or not twice."""
    return isinstance(source, Iterator | str | bytes | Mapping | nn.Module) or hasattr(source, "to_numpy")


def _instead(source: Any) -> str:
    """What whoever passed such a thing may have meant."""
    if isinstance(source, Iterator):
        return " (a generator can be run through only once: make a list of it)"
    if isinstance(source, str | os.PathLike):
        return "; read the files first, e.g. shiftmend.image_folder(folder).images"
    if isinstance(source, Mapping):
        return "; pass the entry that holds the inputs"
    if hasattr(source, "images"):
        return "; pass its images, or (images, labels) to evaluate"
    return "; pass what its to_numpy() gives" if hasattr(source, "to_numpy") else ""


def as_tensor(values: Any, what: str) -> Tensor:
    """Inputs or labels, however they are stored, as a tensor."""
    if np.ma.is_masked(values):  # torch would take what lies behind the mask
        raise DataError(f"the {what} has masked values; replace them first, e.g. by the array's filled(...)")
    if isinstance(values, np.ndarray) and any(stride < 0 for stride in values.strides):
        values = values.copy()  # a flipped array: torch knows no negative strides
    if isinstance(values, np.ndarray) and not values.dtype.isnative:
        values = values.astype(values.dtype.newbyteorder("="))  # as many instruments write them
    read_only = isinstance(values, np.ndarray) and not values.flags.writeable
    try:
        with warnings.catch_warnings() if read_only else nullcontext():
            if read_only:  # a file mapped for reading: whatever is done to inputs is done to copies of a batch
                warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return values if isinstance(values, Tensor) else torch.as_tensor(values, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        held = f"an array of {values.dtype}" if isinstance(values, np.ndarray) else kind(values)
        raise DataError(f"the {what} holds {held}, which is no tensor of numbers; convert it first") from error


def _as_inputs(values: Any, what: str) -> Tensor:
    inputs = _plain(as_tensor(values, what), what)
    if inputs.ndim == 0:
        raise DataError(f"the {what} is a single number; expected samples along the first axis")
    if isinstance(values, np.ndarray) and inputs.dtype == torch.float64:
        return inputs.to(torch.get_default_dtype())  # numpy's default is not what networks take
    return inputs


def _plain(inputs: Tensor, what: str) -> Tensor:
    if inputs.is_meta:
        raise DataError(f"the {what} is a tensor on the device 'meta', without values; expected one that holds them")
    if inputs.layout != torch.strided or inputs.is_nested:
        advice = "inputs.to_padded_tensor(0)" if inputs.is_nested else "inputs.to_dense()"
        raise DataError(f"the {what} is a sparse or nested tensor; expected an ordinary one, e.g. {advice}")
    return inputs


def split_batch(batch: Any, what: str) -> tuple[Tensor, Tensor | None]:
    """Inputs and, if there are any, labels; whatever else the loader gives is dropped here."""
    labels = None
    if isinstance(batch, Mapping):
        batch = _by_names(batch)
    if isinstance(batch, tuple | list) and batch:
        labels = batch[1] if len(batch) > 1 and isinstance(batch[1], Tensor | np.ndarray) else None
        batch = batch[0]
    if isinstance(labels, np.ndarray):  # what torch does not know, such as names, is no label to evaluate with
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
    return _plain(batch, what).detach(), labels


def _by_names(named: Mapping[Any, Any]) -> Any:
    """Inputs and labels of what goes by names, such as "image" and "label", where there is no doubt which they are."""
    arrays = {name: value for name, value in named.items() if isinstance(value, Tensor | np.ndarray) and value.ndim}
    labels = [arrays[name] for name in LABEL_NAMES if name in arrays]
    inputs = [value for name, value in arrays.items() if name not in LABEL_NAMES and value.ndim > 1]
    return (*inputs, *labels) if len(inputs) == 1 and len(labels) < 2 else named


def refuse_empty(samples: int, what: str, again: bool = False) -> None:
    """`again`: it was not empty before, as what can be run through only once."""
    if not samples and again:
        raise DataError(
            f"the {what} gave nothing when it was run through again; expected batches that begin anew each time, as "
            "those of a list or a DataLoader do"
        )
    if not samples:
        raise DataError(f"the {what} is empty: expected at least one sample")


def refuse_non_finite(inputs: Tensor, what: str, before: int | None = 0) -> None:
    """A part at a time: what the check writes down is as large as what it looks at, which may be a mapped file.

    `before` is how many samples came before these, None where their order is not that of the source.
    """
    if not (inputs.is_floating_point() or inputs.is_complex()):
        return
    parts = in_parts(inputs)
    flags = torch.stack([torch.isfinite(part).all() for part in parts])
    if not bool(flags.all()):
        part = int(flags.int().argmin())
        bad = (~torch.isfinite(parts[part])).reshape(len(parts[part]), -1).any(1)
        first = sum(map(len, parts[:part])) + int(bad.int().argmax())
        place = "" if before is None else f", first in sample {before + first} (counted from 0)"
        raise DataError(f"the {what} has NaN or infinite values{place}; remove or repair such samples first")


def drawn(loader: Iterable[Any], seed: int, what: str = "data") -> Iterator[Any]:
    """Run through a loader whose order and augmentation are drawn from a seed instead of the global generator.

    Most loaders know no generator but the global one, so it is set while a batch is made, and put back before it is
    used. A generator that a loader or its sampler brings along is set to the seed, too, and put back at the end.
    """
    own = torch.Generator().manual_seed(seed).get_state()
    batches = getattr(loader, "batch_sampler", None)
    parts = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    brought = {id(g): g for part in parts if isinstance(g := getattr(part, "generator", None), torch.Generator)}
    states = [(generator, generator.get_state()) for generator in brought.values()]
    try:
        for generator, _ in states:
            generator.manual_seed(seed)
        yield from _with_global_state(loader, own, what)
    finally:
        for generator, state in states:
            generator.set_state(state)


def _refuse_uncollated(error: Exception, what: str) -> None:
    """Say in a sentence that samples make no batch; workers pass torch's complaint on with their whole traceback."""
    if "stack expects each tensor to be equal size" in str(error):
        raise DataError(
            f"the samples of the {what} differ in shape; bring them to one size, or pass a DataLoader whose "
            "collate_fn pads each batch"
        ) from error
    if found := re.search(r"default_collate: .* found <class '([^']+)'>", str(error)):
        raise DataError(
            f"the {what} gives samples that are or hold a {found[1]}, of which torch makes no batch; let the Dataset "
            "give tensors, e.g. by a transform, or use a DataLoader with a collate_fn"
        ) from error


def _with_global_state(loader: Iterable[Any], own: Tensor, what: str) -> Iterator[Any]:
    batches: Iterator[Any] | None = None
    while True:
        outside = torch.get_rng_state()
        torch.set_rng_state(own)
        try:
            batches = iter(loader) if batches is None else batches
            batch = next(batches)
        except StopIteration:
            return
        except (TypeError, RuntimeError) as error:
            _refuse_uncollated(error, what)
            raise
        finally:
            own = torch.get_rng_state()
            torch.set_rng_state(outside)
        yield batch
