"""Sources of data: tensors, arrays, tables, a `Dataset`, a `DataLoader`, batches. The one place that refuses data.

Inputs are a tensor, or several in a dict or a tuple. A tuple at the top level is (inputs, labels). With the same seed,
reading a source gives the same order and augmentation, whatever else draws random numbers.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, TensorDataset

from shiftmend.errors import DataError
from shiftmend.inputs.images import check_range
from shiftmend.inputs.tables import Table, from_frame, is_frame
from shiftmend.utils.checks import brief, counted, is_whole, kind
from shiftmend.utils.devices import split_rows
from shiftmend.utils.tensor_tree import Inputs, TensorTree, list_leaves

DEFAULT_BATCH_SIZE = 256

LABEL_NAMES = ("label", "labels", "target", "targets")
"""Keys of labels in a dict; all other keys may be inputs."""


def find_table(source: Any, columns: Sequence[str], what: str) -> tuple[Any, tuple[str, ...]]:
    """Reorder the columns of a table or data frame to `columns`; return the table and its column names.

    Data without column names are returned unchanged. Error messages call the data `what`.
    """
    inputs, *others = source if isinstance(source, tuple) and source else (source,)
    if is_frame(inputs):
        inputs = from_frame(inputs, columns, what)
    if not isinstance(inputs, Table):
        return source, ()
    table = inputs.ordered(columns, f"the {what}")
    labels: Any = others[0] if others else table.labels
    labels = labels.to_numpy() if hasattr(labels, "to_numpy") else labels
    return (table.inputs, labels), table.columns


def open_source(source: Any, batch_size: int | None, what: str) -> tuple[Any, int | None]:
    """Convert a user's data to tensors or to an iterable of batches.

    Args:
        source: A tensor, an array, a tuple (inputs, labels), a dict, a `Dataset`, a `DataLoader` or batches.
        batch_size: Batch size for a `Dataset`; None for the default. A `DataLoader` must not contradict a number.
        what: Name of the data in error messages, e.g. "target data".

    Returns:
        A pair of the data and a batch size. The data are a pair `(inputs, labels or None)` or an iterable of batches.
        The batch size is that of a given `DataLoader`; None for other data and for a custom batch sampler.

    Raises:
        DataError: If the data have another form, or a `DataLoader` has another batch size than requested.
    """
    if isinstance(source, Mapping):
        source = _split_by_name(source, what)
    if isinstance(source, Tensor | np.ndarray | TensorTree):
        return (_as_inputs(source, what), None), None
    # A subclass of TensorDataset may return other samples than its tensors.
    if type(source) is TensorDataset:
        return (_as_inputs(source.tensors[0], what), source.tensors[1] if len(source.tensors) > 1 else None), None
    if isinstance(source, tuple) and is_inputs_and_labels(source):
        inputs = _as_inputs(source[0], what)
        labels = as_tensor(source[1], what) if len(source) > 1 and source[1] is not None else None
        if labels is not None and (labels.ndim == 0 or len(inputs) != len(labels)):
            raise DataError(
                f"Expected one label for each input of the {what}, got {counted(len(inputs), 'input')} and "
                f"{counted(len(labels) if labels.ndim else 1, 'label')}."
            )
        return (inputs, labels), None
    if isinstance(source, DataLoader):
        sampler = source.batch_sampler
        own = sampler.batch_size if type(sampler) is BatchSampler else None
        # Another batch size could be used only if the data fit into memory.
        if sampler is not None and batch_size not in (None, own):
            its = "with a batch_sampler of its own" if own is None else f"of batches of {own}"
            raise DataError(
                f"Expected one batch size for the {what}, got batch_size={batch_size} and a DataLoader {its}. Leave "
                "one of the two out."
            )
        return source, own
    if isinstance(source, IterableDataset | Dataset):
        if not isinstance(source, IterableDataset) and not hasattr(source, "__len__"):
            raise DataError(
                f"Expected the {what} to be a Dataset with __len__, got {kind(source)} without. Try an IterableDataset."
            )
        return DataLoader(source, batch_size=batch_size or DEFAULT_BATCH_SIZE), None
    if isinstance(source, Iterable) and not _cannot_hold_batches(source):
        # Two batches in a tuple would look like inputs and labels.
        return list(source) if isinstance(source, tuple) else source, None
    raise DataError(
        f"Expected the {what} to be a tensor, an array, a Dataset or a DataLoader, got "
        f"{kind(source)}.{_suggest(source)}"
    )


def is_inputs_and_labels(source: Sequence[Any]) -> bool:
    """Tell (inputs, labels or None) from a tuple of batches, each of which may be a pair itself."""
    if not source or isinstance(source[0], Tensor | np.ndarray | TensorTree):
        return bool(source)
    several = isinstance(source[0], Mapping | tuple | list)
    return several and len(source) == 2 and isinstance(source[1], Tensor | np.ndarray | None)


def _cannot_hold_batches(source: Any) -> bool:
    """Tell whether an iterable does not hold batches, or can be iterated only once."""
    if isinstance(source, Iterator | str | bytes | Mapping | nn.Module) or hasattr(source, "to_numpy"):
        return True
    return _is_hugging_face(source)


def _is_hugging_face(source: Any) -> bool:
    """Recognise a `datasets.Dataset`, which yields rows, without importing the package."""
    return hasattr(source, "column_names") and hasattr(source, "with_format")


def _suggest(source: Any) -> str:
    """Suggest what to pass instead of an unsupported object."""
    if isinstance(source, Iterator):
        return " A generator can be run through only once: make a list of it."
    if isinstance(source, str | os.PathLike):
        return " Read the files first, e.g. shiftmend.image_folder(folder).images."
    if _is_hugging_face(source):
        return " Try shiftmend.integrations.huggingface.as_dataset(rows, columns)."
    if hasattr(source, "images"):
        return " Pass its images, or (images, labels) to evaluate."
    return " Pass what its to_numpy() returns." if hasattr(source, "to_numpy") else ""


def _split_by_name(named: Mapping[Any, Any], what: str) -> tuple[Any, Any]:
    """Return inputs and labels (or None) of a dict such as {"image": ..., "label": ...}.

    If one entry has more than one axis, it is the input, and columns of numbers beside it, such as an index, are left
    out. Otherwise all entries with numbers are inputs.
    """
    found = [name for name in LABEL_NAMES if _is_array(named.get(name))]
    if len(found) > 1:
        raise DataError(
            f"Expected labels of the {what} under one name, got {' and '.join(map(repr, found))}. Leave one of them "
            "out."
        )
    others = {name: value for name, value in named.items() if name not in LABEL_NAMES}
    inputs = {name: value for name, value in others.items() if _holds_numbers(value, f"entry {name!r}", what)}
    if not inputs:
        raise DataError(
            f"Expected the {what} to be a dict of inputs, tensors or arrays by name, got "
            f"{', '.join(map(repr, named)) or 'nothing'}."
        )
    large = [value for value in inputs.values() if not _is_array(value) or value.ndim > 1]
    alone = large if len(large) == 1 and _is_array(large[0]) else [*inputs.values()] if len(inputs) == 1 else []
    return alone[0] if alone else inputs, named[found[0]] if found else None


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray) and value.ndim > 0


def _holds_numbers(value: Any, where: str, what: str) -> bool:
    """Tell inputs from names, files and other entries; refuse a list of tensors or numbers."""
    if isinstance(value, Mapping):
        return any(_holds_numbers(part, f"{where}[{name!r}]", what) for name, part in value.items())
    if isinstance(value, tuple):
        return bool(value) and all(_holds_numbers(part, where, what) for part in value)
    if isinstance(value, list) and value and not isinstance(value[0], str | bytes | None):
        raise DataError(
            f"Expected {where} of the {what} to be one tensor, got a list of "
            f"{counted(len(value), _name_of_part(value[0]))}. Pad and stack them first."
        )
    return _is_array(value) and (isinstance(value, Tensor) or value.dtype.kind in "biufc")


def _name_of_part(part: Any) -> str:
    return "tensor" if isinstance(part, Tensor | np.ndarray) else type(part).__name__


def as_tensor(values: Any, what: str) -> Tensor:
    """Convert inputs or labels to a tensor, without a copy if possible.

    Args:
        values: A tensor, a NumPy array, or anything else that `torch.as_tensor` accepts.
        what: Name of the data in error messages, such as `"list of labels"`.

    Returns:
        A given tensor itself, or a tensor on the CPU. The dtype is kept, but uint64 becomes int64.

    Raises:
        DataError: If values are masked, are too large for int64, or are no numbers.

    Example:
        >>> import numpy as np
        >>> as_tensor(np.array([1.0, 2.0]), "list of labels")
        tensor([1., 2.], dtype=torch.float64)
    """
    if np.ma.is_masked(values):
        # Torch would use the masked values.
        raise DataError(
            f"Expected the {what} without masked values, got some. Replace them first, e.g. by the array's filled(...)."
        )
    if isinstance(values, np.ndarray) and any(stride < 0 for stride in values.strides):
        # Torch has no negative strides, which a flipped array has.
        values = values.copy()
    if isinstance(values, np.ndarray) and not values.dtype.isnative:
        # Many instruments write big-endian numbers.
        values = values.astype(values.dtype.newbyteorder("="))
    if isinstance(values, np.ndarray) and values.dtype == np.uint64:
        # Torch supports few operations on uint64, and reads large values as negative.
        check_range(values, f"number of the {what}")
        values = values.astype(np.int64)
    read_only = isinstance(values, np.ndarray) and not values.flags.writeable
    try:
        with warnings.catch_warnings() if read_only else nullcontext():
            if read_only:
                # A file may be mapped read-only. A feed writes into copies of batches only.
                warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return values if isinstance(values, Tensor) else torch.as_tensor(values, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        held = f"an array of {values.dtype}" if isinstance(values, np.ndarray) else kind(values)
        raise DataError(
            f"Expected numbers in the {what}, got {held}, which no tensor can hold. Convert it first."
        ) from error


def _as_inputs(values: Any, what: str) -> Inputs:
    if isinstance(values, Mapping | tuple | list):
        return _as_tree(values, what)
    if isinstance(values, TensorTree):
        return values
    inputs = as_tensor(values, what)
    if inputs.ndim == 0:
        raise DataError(f"Expected the {what} to have samples along its first axis, got a single number.")
    if isinstance(values, np.ndarray) and inputs.dtype == torch.float64:
        # float64 is the default of numpy, but networks use another type.
        if torch.get_default_dtype() == torch.float32:
            check_range(values, f"number of the {what}")
        return inputs.to(torch.get_default_dtype())
    return inputs


def _as_tree(values: Any, what: str) -> Inputs:
    """Convert a dict or tuple of inputs to one object, and check that all have the same number of samples."""
    if isinstance(values, Mapping):
        values = _split_by_name(values, what)[0]
    if _is_array(values):
        return _as_inputs(values, what)
    tree = TensorTree(_convert(values, what))
    if len(tree.leaves) == 1 and not isinstance(tree.value, Mapping):
        return tree.leaves[0]
    sizes = {name: len(leaf) for name, leaf in tree.named_leaves}
    if len(set(sizes.values())) > 1:
        found = ", ".join(f"{size} in {name!r}" for name, size in sizes.items())
        raise DataError(f"Expected all inputs of the {what} to have one row a sample, got different numbers: {found}.")
    return tree


def _convert(value: Any, what: str) -> Any:
    if isinstance(value, Mapping):
        return {name: _convert(part, what) for name, part in value.items() if _holds_numbers(part, repr(name), what)}
    if isinstance(value, tuple | list):
        return tuple(_convert(part, what) for part in value)
    if not _is_array(value):
        raise DataError(f"Expected inputs of the {what} to be tensors with one row a sample, got {kind(value)}.")
    return _as_inputs(value, what)


def split_batch(batch: Any, what: str) -> tuple[Inputs, Tensor | None]:
    """Return the inputs and labels (or None) of a batch; drop everything else that a loader returns."""
    labels = None
    if isinstance(batch, Mapping):
        batch = _split_by_name(batch, what)
    if isinstance(batch, tuple | list) and batch:
        labels = batch[1] if len(batch) > 1 and isinstance(batch[1], Tensor | np.ndarray) else None
        batch = batch[0]
    if isinstance(labels, np.ndarray):
        # An array of strings, for example, holds no labels for an evaluation.
        labels = as_tensor(labels, what) if labels.dtype.kind in "biuf" else None
    if labels is not None and labels.ndim == 0:
        labels = None
    if isinstance(batch, np.ndarray) and batch.ndim:
        batch = _as_inputs(batch, what)
    if _is_nested(batch):
        batch = _as_tree(batch, what)
        if labels is not None and len(labels) != len(batch):
            raise DataError(
                f"Expected as many labels as samples in a batch of the {what}, got {counted(len(labels), 'label')} for "
                f"{counted(len(batch), 'sample')}. Pad and stack samples, e.g. in collate_fn."
            )
    if not isinstance(batch, Tensor | TensorTree) or (isinstance(batch, Tensor) and batch.ndim == 0):
        advice = " A list holds batches: make a tensor of numbers." if isinstance(batch, int | float | list) else ""
        raise DataError(
            f"Expected batches of the {what} to be a tensor of inputs, or (inputs, ...), got "
            f"{type(batch).__name__}.{advice}"
        )
    return batch.detach(), labels


def _is_nested(batch: Any) -> bool:
    """Tell whether a batch holds several inputs; a loader turns tuples into lists."""
    if isinstance(batch, tuple | list):
        return bool(batch) and isinstance(batch[0], Tensor | np.ndarray | Mapping | tuple)
    return isinstance(batch, Mapping)


def check_batch_size(batch_size: Any) -> None:
    """Refuse a batch size that is no whole number of at least 1; None is the default size."""
    if batch_size is not None and not (is_whole(batch_size) and batch_size >= 1):
        raise DataError(f"Expected the batch size to be a whole number of at least 1, got {brief(batch_size)}.")


def check_not_empty(samples: int, what: str, again: bool = False) -> None:
    """Refuse a source without samples; `again` says that an earlier pass had some."""
    if not samples and again:
        raise DataError(
            f"Expected the {what} to give batches each time, got nothing in a later pass. Try a list or a DataLoader, "
            "which begin anew."
        )
    if not samples:
        raise DataError(f"Expected at least one sample in the {what}, got none: it is empty.")


def check_finite(inputs: Inputs, what: str, before: int | None = 0) -> None:
    """Refuse NaN and infinite inputs; the check works in parts, because inputs may be a memory-mapped file.

    `before` is the number of earlier samples; None if the order is not that of the source.
    """
    for name, leaf in list_leaves(inputs):
        _check_finite(leaf, f"{what}, in {name!r}," if name else what, before)


def _check_finite(inputs: Tensor, what: str, before: int | None) -> None:
    if not (inputs.is_floating_point() or inputs.is_complex()):
        return
    parts = split_rows(inputs)
    flags = torch.stack([torch.isfinite(part).all() for part in parts])
    if not bool(flags.all()):
        part = int(flags.int().argmin())
        bad = (~torch.isfinite(parts[part])).reshape(len(parts[part]), -1).any(1)
        first = sum(map(len, parts[:part])) + int(bad.int().argmax())
        place = "" if before is None else f", first in sample {before + first} (counted from 0)"
        raise DataError(
            f"Expected finite values in the {what}, got NaN or infinity{place}. Remove or repair such samples first."
        )


def check_shapes(first: Inputs, other: Inputs, looks_labelled: bool, what: str) -> None:
    """Refuse batches whose shapes differ beyond their sizes, and a list of two that may be inputs and labels."""
    if looks_labelled:
        raise DataError(
            f"Expected batches of one shape in the {what}, got different shapes. Pass inputs with labels as a tuple, "
            "not as a list."
        )
    if _list_axes(first) != _list_axes(other):
        raise DataError(f"Expected batches of one shape in the {what}, got different shapes. Bring all to one shape.")


def _list_axes(inputs: Inputs) -> list[tuple[str, int]]:
    return [(name, leaf.ndim) for name, leaf in list_leaves(inputs)]


def check_labels(labels: Tensor | None, what: str) -> Tensor:
    """Return the labels that an evaluation needs.

    Args:
        labels: Labels of a batch or a source, or None.
        what: Name of the data in the error message.

    Raises:
        DataError: If there are no labels.
    """
    if labels is None:
        raise DataError(
            f"Expected labels in the {what}, got none. Pass (inputs, labels), or dicts with labels under "
            f"{' or '.join(map(repr, LABEL_NAMES))}."
        )
    return labels


def check_preprocessed(result: Any, inputs: Inputs) -> Inputs:
    """Check the result of a user's `preprocess` for a batch, and return it as inputs.

    Args:
        result: What `preprocess` returned.
        inputs: The batch that `preprocess` received.

    Raises:
        DataError: If the result is no tensor, dict or tuple of inputs, or has another number of samples.
    """
    if isinstance(result, Tensor) and result.shape[:1] == (len(inputs),):
        return result
    if isinstance(result, Mapping | tuple):
        made = _as_tree(result, "result of preprocess")
        if len(made) == len(inputs):
            return made
    gave = f"a tensor {list(result.shape)}" if isinstance(result, Tensor) else kind(result)
    given = f"{list(inputs.shape)}" if isinstance(inputs, Tensor) else f"of {counted(len(inputs), 'sample')}"
    raise DataError(
        f"Expected preprocess to return as many samples as it is given, got {gave} for inputs {given}. Let it treat a "
        "whole batch."
    )


def iterate_seeded(loader: Iterable[Any], seed: int, what: str = "data") -> Iterator[Any]:
    """Iterate over a loader whose order and augmentation follow a seed instead of the global generator.

    Most loaders draw from the global generator. So this generator has a state of its own while a batch is made, and its
    former state while the batch is used. A generator of the loader or its sampler is seeded as well, and restored at
    the end.
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
