"""Conversion of command-line arguments to a model, a method, data, and the normalisation of images."""

from __future__ import annotations

import importlib
import logging
import math
import pickle
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import safetensors.torch
import torch
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional

from shiftmend.cli.options import whole_or_text
from shiftmend.errors import DataError, ShiftmendError
from shiftmend.evaluation.evaluate import metrics_for
from shiftmend.inputs.arrays import holds_objects, map_npy, npz_file, open_npz, read_member
from shiftmend.inputs.folders import image_folder
from shiftmend.inputs.images import as_labels, check_range, per_channel
from shiftmend.inputs.tables import SUFFIXES, Table, read_table
from shiftmend.introspection.input_map import load_adapted_state
from shiftmend.methods import METHODS
from shiftmend.utils.checks import counted, kind
from shiftmend.utils.python_files import describe_error, first_on_path, frames, import_file, user_code

logger = logging.getLogger(__name__)


def load_model(name: str, weights: Path | None, options: list[str], allow_pickle: bool = False) -> nn.Module:
    """Build a built-in network, or call `package.module:factory` or `file.py:factory`; then load its weights.

    Built-in networks belong to `research`, which the command line must not import statically.
    """
    networks = importlib.import_module("shiftmend.research.networks")
    settings = dict(_parse_option(text) for text in options)
    model: nn.Module
    if name in networks.MODELS:
        model = networks.build(name, **settings)
    else:
        model = _call_factory(name, settings, networks.MODELS)
    if weights is not None:
        _load_weights(model, weights, allow_pickle)
    return model.eval()


def load_method(name: str) -> Any:
    """Return the name of a built-in method unchanged, or import the class `module:Class` or `file.py:Class`."""
    if ":" not in name:
        return name
    with _import_named("method", name, METHODS, "Class") as found:
        return found


def load_candidates(text: str | None) -> list[Any] | None:
    """Read `--candidates adabn,file.py:Class`."""
    return None if text is None else [load_method(name.strip()) for name in text.split(",") if name.strip()]


def load_battery(name: str) -> Any:
    """Import the simulated devices `module:NAME` or `file.py:NAME`: functions by name, or a list of them."""
    with _import_named("battery", name, (), "NAME") as found:
        if not isinstance(found, Mapping | list | tuple):
            raise ShiftmendError(f"Expected {name} to be a dict or list of functions, got {kind(found)}.")
        return found


def _parse_option(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ShiftmendError(f"Expected --model-option to read name=value, e.g. classes=10, got {text!r}.")
    return key, whole_or_text(value)


def _call_factory(name: str, settings: dict[str, Any], known: Iterable[str]) -> nn.Module:
    def refuse(error: BaseException) -> ShiftmendError:
        given = settings or "no options"
        # Without a frame inside the factory, the call itself failed, not the code of the factory.
        if isinstance(error, TypeError) and not frames(error):
            return ShiftmendError(f"Expected options that {name} takes, got {given}: {error}.")
        return ShiftmendError(
            f"Expected {name} to return a model with {given}, got {describe_error(error)}. Mend it there, or pass "
            "other --model-option."
        )

    with _import_named("model", name, known, "factory") as factory:
        with user_code(refuse):
            model = factory(**settings)
        if not isinstance(model, nn.Module):
            raise ShiftmendError(f"Expected {name} to return a torch.nn.Module, got {kind(model)}.")
    return model


@contextmanager
def _import_named(what: str, name: str, known: Iterable[str], attributes: str) -> Iterator[Any]:
    """Import the object `package.module:attribute` or `file.py:attribute` for the duration of the block.

    Inside the block, modules beside the file can be imported as well.

    The output of the code goes to standard error, so that it does not mix with JSON on standard output.
    """
    where, colon, attribute = name.rpartition(":")
    if not colon or not where:
        listed = f"built in ({', '.join(known)}), or " if known else ""
        raise ShiftmendError(
            f"Expected the {what} to be {listed}package.module:{attributes} or file.py:{attributes}, got {name!r}."
        )
    is_file = where.endswith(".py")
    if is_file and not Path(where).is_file():
        raise ShiftmendError(f"Expected the file {where} for the {what} {name!r}, got none. Check its name.")
    with redirect_stdout(sys.stderr), first_on_path(Path(where).resolve().parent if is_file else Path.cwd()):
        module = _import(f"{what} {name!r}", where, is_file, what)
        if not hasattr(module, attribute):
            raise ShiftmendError(
                f"Expected {attribute!r} in {where} for the {what} {name!r}, got none. Check its name."
            )
        yield getattr(module, attribute)


def _import(named: str, where: str, is_file: bool, what: str) -> ModuleType:
    def refuse(error: BaseException) -> ShiftmendError:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and not is_file and f"{where}.".startswith(f"{missing}."):
            return ShiftmendError(
                f"Expected the module of {named} to be installed or in the current folder, but it could not be found: "
                f"{error}."
            )
        remedy = f"Install it, or put it beside the {what}" if missing else "Mend it there"
        return ShiftmendError(f"Expected {named} to be imported, got {describe_error(error)}. {remedy}.")

    with user_code(refuse):
        return import_file(Path(where)) if is_file else importlib.import_module(where)


def _load_weights(model: nn.Module, path: Path, allow_pickle: bool) -> None:
    own, state = model.state_dict(), _read_weights(path, allow_pickle)
    state = _unwrap(state, own)
    try:
        load_adapted_state(model, state)
    except RuntimeError as error:
        lacking, strange = [name for name in own if name not in state], [name for name in state if name not in own]
        differ = [f"the file lacks {_summarise(lacking)}"] if lacking else []
        differ += [f"the model lacks {_summarise(strange)}"] if strange else []
        first = next((line.strip() for line in str(error).splitlines()[1:] if line.strip()), str(error))
        raise DataError(
            f"Expected weights of the model, got others in {path}: {' and '.join(differ) or first[:200]}. Check "
            "--model and --model-option."
        ) from error


def _read_weights(path: Path, allow_pickle: bool) -> Mapping[str, Any]:
    if not path.is_file():
        raise DataError(f"Expected a safetensors file of weights, got {path}, which does not exist.")
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt") and not allow_pickle:
        raise DataError(
            f"Expected safetensors, got {path}, a pickle, which can run code when read. Convert it, or pass "
            "--allow-pickle if you trust its origin."
        )
    try:
        if allow_pickle and path.suffix != ".safetensors":
            state = torch.load(path, map_location="cpu", weights_only=True)
        else:
            state = safetensors.torch.load_file(path)
    except pickle.UnpicklingError as error:
        raise DataError(
            f"Expected what torch.save(model.state_dict(), file) writes, got {path}, which could not be read: it is "
            "damaged or holds more than tensors."
        ) from error
    except (
        SafetensorError,
        AttributeError,
        EOFError,
        LookupError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise DataError(f"Weights in {path} could not be read: {error}.") from error
    if not _has_names(state):
        raise DataError(
            f"Expected what torch.save(model.state_dict(), file) writes, got {path} with {kind(state)} without names "
            "of weights."
        )
    return state


def _unwrap(state: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any]:
    """Find the weights in a checkpoint by the names of the model's parameters.

    A training loop stores weights beside its own state, and `DataParallel`, `torch.compile` and trainers add a prefix
    to each name.
    """
    kept = (state.get(key) for key in ("state_dict", "model_state_dict", "model"))
    state = next((found for found in kept if _has_names(found)), state)
    first = next(iter(own), "")
    for prefix in {name.removesuffix(first) for name in state if name.endswith(f".{first}")}:
        if {f"{prefix}{name}" for name in own} == set(state):
            return {name: state[f"{prefix}{name}"] for name in own}
    return state


def _has_names(found: Any) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(found, Mapping) and all(isinstance(name, str) for name in found)


def _summarise(names: list[str]) -> str:
    return f"{names[0]!r}" + (f" ({len(names) - 1} more)" if len(names) > 1 else "")


@dataclass(frozen=True)
class Normalisation:
    """Preprocessing of 8-bit images per channel: (x / 255 - mean) / deviation."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    channels: int | None = None

    def __call__(self, images: Tensor) -> Tensor:
        if self.channels is not None:
            images = _set_channels(images, self.channels)
        if images.dtype != torch.uint8:
            return images
        present, means, deviations = images.shape[1], len(self.mean), len(self.deviation)
        if len({present, means, deviations} - {1}) > 1:
            raise DataError(
                f"Expected one number, or one per channel, for {counted(present, 'channel')}, got "
                f"{counted(means, 'number')} in --mean and {deviations} in --std."
            )
        values = images.float().div_(255)
        return (values - per_channel(self.mean, values)) / per_channel(self.deviation, values)


def _set_channels(images: Tensor, channels: int) -> Tensor:
    if images.dtype != torch.uint8 or images.ndim != 4:
        kind = str(images.dtype).removeprefix("torch.")
        raise DataError(
            f"Expected 8-bit images for --channels {channels}, got inputs {kind} {list(images.shape[1:])}. Leave it "
            "out."
        )
    present = images.shape[1]
    if present == channels:
        return images
    if present == 1:
        return images.expand(-1, channels, -1, -1)
    if (present, channels) == (3, 1):
        # Grey levels are rounded as Pillow does, like image_folder(channels=1).
        red, green, blue = images.int().unbind(1)
        return ((19595 * red + 38470 * green + 7471 * blue + 32768) >> 16).to(torch.uint8).unsqueeze(1)
    raise DataError(
        f"Expected grey images for --channels {channels}, or colour for --channels 1, got {present} channels. Leave it "
        "out."
    )


def parse_normalisation(mean: str, deviation: str, channels: int | None) -> Normalisation:
    """Parse the text of the options, e.g. `0.485,0.456,0.406`."""

    def numbers(text: str, what: str) -> tuple[float, ...]:
        try:
            values = tuple(float(part) for part in text.split(","))
        except ValueError as error:
            raise ShiftmendError(
                f"Expected --{what} to be one number, or one per channel with commas, got {text!r}."
            ) from error
        if not all(map(math.isfinite, values)):
            raise ShiftmendError(f"Expected --{what} to be finite, got {text!r}.")
        if what == "std" and any(value <= 0 for value in values):
            raise ShiftmendError(f"Expected --std to be positive, got {text!r}.")
        return values

    if channels is not None and channels < 1:
        raise ShiftmendError(f"Expected --channels to be at least 1, got {channels}.")
    return Normalisation(numbers(mean, "mean"), numbers(deviation, "std"), channels)


class Data(NamedTuple):
    """Inputs of a model and, optionally, their labels."""

    inputs: Tensor
    labels: Tensor | None
    classes: tuple[str, ...] | None = None
    """Names of the classes, if there is one folder for each."""
    columns: tuple[str, ...] = ()
    """Names of the columns, if the inputs are a table."""
    groups: tuple[str, ...] = ()
    """Name of each row's group, if the inputs are a table with a column of groups."""

    def as_table(self) -> Table | Tensor:
        """Return the inputs as a table if they have column names."""
        return Table(self.inputs, self.columns) if self.columns else self.inputs


def load_data(path: Path, size: int | None, choice: Mapping[str, Any] | None = None) -> Data:
    """Load a folder of images, an array or `.npz` archive of images or other inputs, or a table.

    `choice` holds the roles of the columns of a table, as arguments of `read_table`.
    """
    if size is not None and size < 1:
        raise DataError(f"Expected --size to be at least 1 pixel, got {size}.")
    choice = choice or {}
    if path.suffix.lower() in SUFFIXES and not path.is_dir():
        if size is not None:
            raise DataError(f"Expected images for --size {size}, got the table {path}. Leave it out.")
        table = read_table(path, **choice)
        return Data(table.inputs, table.labels, table.classes or None, table.columns, table.groups)
    for name in choice.keys() - {"columns"}:
        option = {"quantities": "quantity"}.get(name, name)
        raise DataError(f"Expected a table for --{option}, got {path}, which is none. Leave it out.")
    if path.is_dir():
        folder = image_folder(path, size=size)
        return Data(folder.images, folder.labels, folder.classes or None)
    if path.suffix == ".npy" and path.is_file():
        array = map_npy(path, "inputs [N, ...]", "replace the file")
        return Data(_as_other_inputs(np.asarray(array), str(path), size), None)
    check_npz(path, f"an .npy file or a table ({', '.join(SUFFIXES)})")
    with open_npz(path) as archive:
        if "inputs" in archive.files:
            inputs = _read_other_inputs(archive, path, size)
        elif "images" in archive.files:
            inputs = _read_images(archive, path, size)
        else:
            raise DataError(
                f"Expected an array 'images' (uint8) in {path}, or 'inputs' for anything else, got "
                f"{', '.join(archive.files) or 'nothing'}."
            )
        return Data(inputs, _read_labels(archive, path, len(inputs)))


def check_npz(path: Path, others: str = "") -> None:
    """Refuse a path that is neither a folder nor an .npz file; `others` names further supported files."""
    if not path.exists():
        raise DataError(
            f"Expected a folder of images or an .npz file{others and f', or {others}'}, got {path}, which does not "
            "exist."
        )
    if path.suffix != ".npz":
        raise DataError(f"Expected a folder of images or an .npz file{others and f', or {others}'}, got {path}.")


def _read_images(archive: NpzFile, path: Path, size: int | None) -> Tensor:
    try:
        # Labels are read separately, because not every command needs them.
        images = npz_file(path, labels="").images
    except DataError as error:
        if read_member(archive, path, "images").dtype == np.uint8:
            raise
        raise DataError(f"{error} Name the array 'inputs' if the model takes these numbers as they are.") from error
    return scale_images(images, size)


def scale_images(images: Tensor, size: int | None) -> Tensor:
    """Scale 8-bit images `[N, C, H, W]` to a side length, as Pillow does for images of a folder."""
    if size is None or images.shape[2:] == (size, size):
        return images
    return functional.interpolate(images, (size, size), mode="bilinear", antialias=True)


def _read_other_inputs(archive: NpzFile, path: Path, size: int | None) -> Tensor:
    """Read tables, signals or tokens from the array `inputs`."""
    return _as_other_inputs(np.asarray(read_member(archive, path, "inputs")), f"array 'inputs' of {path}", size)


def _as_other_inputs(inputs: NDArray[Any], name: str, size: int | None) -> Tensor:
    """Convert inputs that are not images; integers stay integers, because they may be tokens."""
    if size is not None:
        raise DataError(f"Expected images for --size {size}, got {name}, which is not scaled. Leave it out.")
    whole, real = np.issubdtype(inputs.dtype, np.integer), np.issubdtype(inputs.dtype, np.floating)
    if inputs.ndim < 2 or 0 in inputs.shape or not (whole or real):
        raise DataError(f"Expected numbers [N, ...] in {name}, got {inputs.dtype} {list(inputs.shape)}.")
    if inputs.dtype == np.uint8 and inputs.ndim != 4:
        raise DataError(
            f"Expected 8-bit inputs to be images [N, C, H, W], got {list(inputs.shape)} in {name}. Store tokens as "
            "int64 and measurements as float32."
        )
    check_range(inputs, "input")
    kind = np.uint8 if inputs.dtype == np.uint8 else np.int64 if whole else np.float32
    return torch.from_numpy(np.array(inputs, dtype=kind, order="C"))


def _read_labels(archive: NpzFile, path: Path, count: int) -> Tensor | None:
    """Read class numbers or floating-point labels; warn and return None if they are text or objects."""
    if "labels" not in archive.files:
        return None
    objects = holds_objects(archive, "labels")
    labels = np.empty(count, dtype=object) if objects else np.asarray(read_member(archive, path, "labels"))
    fractions = np.issubdtype(labels.dtype, np.floating)
    if not (fractions or np.issubdtype(labels.dtype, np.integer)):
        logger.warning(
            "the labels in %s are %s and are not used; expected class numbers from 0, or fractions for a model that "
            "predicts a quantity",
            path,
            labels.dtype,
        )
        return None
    if labels.shape[:1] != (count,) or 0 in labels.shape:
        raise DataError(
            f"Expected one label for each of {count} inputs, or for each position of an output, got labels "
            f"{list(labels.shape)} in {path}."
        )
    labels = labels.reshape(count) if labels.size == count else labels
    # Class numbers are not checked here, because an invalid one may be the --ignore-label.
    check_range(labels, "label")
    return torch.from_numpy(labels.astype(np.float32)) if fractions else as_labels(labels)


def pick_telling_rows(labels: Tensor, ignore_label: int | None) -> list[int]:
    """Pick the inputs with the lowest and the highest label, and with the most labels other than 0 and 1.

    Scoring these few inputs reveals problems with the labels before the work begins.
    """
    # Raises if the labels have an invalid type.
    metrics_for(labels, ignore_label=ignore_label)
    rows = labels.reshape(len(labels), -1)
    left_out = torch.zeros_like(rows, dtype=torch.bool) if ignore_label is None else rows == ignore_label
    low, high = rows.masked_fill(left_out, rows.max()), rows.masked_fill(left_out, rows.min())
    others = ((rows != 0) & (rows != 1)).sum(1)
    return [int(low.amin(1).argmin()), int(high.amax(1).argmax()), int(others.argmax())]
