"""Turn what stands on the command line into a model and into data."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.lib.npyio import NpzFile
from torch import Tensor, nn
from torch.nn import functional

from shiftmend.data.arrays import npz_file, open_npz, read_member
from shiftmend.data.base import as_labels
from shiftmend.data.preprocessing import per_channel
from shiftmend.errors import DataError, ShiftmendError
from shiftmend.models import MODELS, build

logger = logging.getLogger(__name__)


def load_model(name: str, weights: Path | None, options: list[str], allow_pickle: bool = False) -> nn.Module:
    """A built-in network by name, or `package.module:factory` or `file.py:factory`, with its weights."""
    settings = dict(_option(text) for text in options)
    model = build(name, **settings) if name in MODELS else _call_factory(name, settings)
    if weights is not None:
        _load_weights(model, weights, allow_pickle)
    return model.eval()


def _option(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ShiftmendError(f"model option {text!r} should read name=value, e.g. classes=10")
    return key, int(value) if value.lstrip("-").isdigit() else value


def _call_factory(name: str, settings: dict[str, Any]) -> nn.Module:
    where, colon, attribute = name.rpartition(":")
    if not colon or not where:
        raise ShiftmendError(
            f"model {name!r} is neither built in ({', '.join(MODELS)}) nor of the form package.module:factory or "
            "file.py:factory"
        )
    of_file = where.endswith(".py")
    if of_file and not Path(where).is_file():
        raise ShiftmendError(f"model {name!r} could not be found: there is no file {where}")
    with _first_on_path(Path(where).resolve().parent if of_file else Path.cwd()):
        module = _imported(name, where, of_file)
        if not hasattr(module, attribute):
            raise ShiftmendError(f"model {name!r} could not be found: {where} has no {attribute!r}")
        try:
            model = getattr(module, attribute)(**settings)
        except (Exception, SystemExit) as error:
            if isinstance(error, TypeError) and not _frames(error):  # the call itself, not what it ran
                raise ShiftmendError(f"{name} could not be called with {settings or 'no options'}: {error}") from error
            raise ShiftmendError(
                f"{name} could not make the model with {settings or 'no options'}: {_reason(error)}; expected it to "
                "return a torch.nn.Module: mend it there, or pass other --model-option"
            ) from error
        if not isinstance(model, nn.Module):
            raise ShiftmendError(f"{name} gave a {type(model).__name__}, expected a torch.nn.Module")
    return model


@contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    """Import from a folder before all others, as Python does for a script that lies there.

    The folder stays, because a model may import more when it is called; an error takes it away again.
    """
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    except BaseException:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))
        raise


def _imported(name: str, where: str, of_file: bool) -> ModuleType:
    try:
        return _import_file(Path(where)) if of_file else importlib.import_module(where)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and not of_file and f"{where}.".startswith(f"{missing}."):
            raise ShiftmendError(
                f"model {name!r} could not be found: {error}; expected a module that is installed or in the current "
                "folder"
            ) from error
        remedy = "install it, or put it beside the model" if missing else "mend it there"
        raise ShiftmendError(f"model {name!r} could not be imported: {_reason(error)}; {remedy}") from error


def _import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # noqa: PT018 (true of every .py file)
    module = importlib.util.module_from_spec(spec)
    kept = sys.modules.setdefault(path.stem, module)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if kept is module:
            sys.modules.pop(path.stem, None)
        raise
    return module


def _reason(error: BaseException) -> str:
    """What went wrong in somebody's code, and in which line of it, as one line."""
    if isinstance(error, SyntaxError):
        text, place = error.msg, (error.filename, error.lineno)
    else:
        text, frames = str(error), _frames(error)
        folder = Path(frames[0].filename).parent if frames else None
        own = [frame for frame in frames if folder in Path(frame.filename).parents]
        place = (own[-1].filename, own[-1].lineno) if own else (None, None)
    said = f"{type(error).__name__}: {' '.join(text.split())[:300]}" if text.strip() else type(error).__name__
    where = ", ".join([*([place[0]] if place[0] else []), *([f"line {place[1]}"] if place[1] else [])])
    return f"{said} ({where})" if where else said


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Where an error passed through, without this module and the import system."""
    frames = traceback.extract_tb(error.__traceback__)
    passed = (__file__, importlib.__file__)
    return [frame for frame in frames if frame.filename not in passed and not frame.filename.startswith("<frozen")]


def _load_weights(model: nn.Module, path: Path, allow_pickle: bool) -> None:
    if not path.is_file():
        raise DataError(f"there is no weights file {path}; expected a safetensors file")
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt") and not allow_pickle:
        raise DataError(
            f"{path} is a pickle, which can run code when read; convert it to safetensors, or pass --allow-pickle if "
            "you trust where it comes from"
        )
    try:
        if allow_pickle and path.suffix != ".safetensors":
            state = torch.load(path, map_location="cpu", weights_only=True)
        else:
            state = safetensors.torch.load_file(path)
        state = state.get("state_dict", state)
    except Exception as error:
        raise DataError(f"{path} could not be read as weights: {error}") from error
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        first = next((line.strip() for line in str(error).splitlines()[1:] if line.strip()), str(error))
        raise DataError(f"the weights in {path} do not fit the model: {first[:200]}") from error


@dataclass(frozen=True)
class Normalisation:
    """8-bit images to what the model was trained on: x / 255, less the mean, over the deviation, per channel."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    channels: int | None = None

    def __call__(self, images: Tensor) -> Tensor:
        if self.channels is not None:
            images = _with_channels(images, self.channels)
        if images.dtype != torch.uint8:
            return images
        values = images.float().div_(255)
        return (values - per_channel(self.mean, values)) / per_channel(self.deviation, values)


def _with_channels(images: Tensor, channels: int) -> Tensor:
    if images.dtype != torch.uint8 or images.ndim != 4:
        kind = str(images.dtype).removeprefix("torch.")
        raise DataError(
            f"--channels {channels} is for 8-bit images, and the inputs are {kind} {list(images.shape[1:])}: "
            "leave it out"
        )
    present = images.shape[1]
    if present == channels:
        return images
    if present == 1:
        return images.expand(-1, channels, -1, -1)
    if (present, channels) == (3, 1):  # grey as Pillow rounds it, so that it is what image_folder(channels=1) reads
        red, green, blue = images.int().unbind(1)
        return ((19595 * red + 38470 * green + 7471 * blue + 32768) >> 16).to(torch.uint8).unsqueeze(1)
    raise DataError(
        f"the images have {present} channels, which --channels {channels} cannot make of them; expected grey images to "
        "repeat, or colour and --channels 1"
    )


def normalisation(mean: str, deviation: str, channels: int | None) -> Normalisation:
    """From the text of the options, e.g. `0.485,0.456,0.406`."""

    def numbers(text: str, what: str) -> tuple[float, ...]:
        try:
            values = tuple(float(part) for part in text.split(","))
        except ValueError as error:
            raise ShiftmendError(f"--{what} {text!r} should be one number, or one per channel with commas") from error
        if what == "std" and any(value <= 0 for value in values):
            raise ShiftmendError(f"--std {text!r} should be positive")
        return values

    if channels is not None and channels < 1:
        raise ShiftmendError(f"--channels {channels} should be at least 1")
    return Normalisation(numbers(mean, "mean"), numbers(deviation, "std"), channels)


def load_data(path: Path, size: int | None) -> tuple[Tensor, Tensor | None]:
    """Inputs and, if there are any, labels: a folder of images, or an `.npz` of images or of any other inputs."""
    from shiftmend.data import image_folder

    if size is not None and size < 1:
        raise DataError(f"--size {size} should be at least 1 pixel")
    if path.is_dir():
        folder = image_folder(path, size=size)
        return folder.images, folder.labels
    if not path.exists():
        raise DataError(f"there is no {path}; expected a folder of images or an .npz file")
    if path.suffix != ".npz":
        raise DataError(f"{path} is neither a folder of images nor an .npz file")
    with open_npz(path) as archive:
        if "inputs" in archive.files:
            inputs = _other_inputs(archive, path, size)
        elif "images" in archive.files:
            inputs = _images(archive, path, size)
        else:
            raise DataError(
                f"{path} holds {', '.join(archive.files) or 'nothing'}; expected an array 'images' (uint8), or "
                "'inputs' for anything else"
            )
        return inputs, _labels(archive, path, len(inputs))


def _images(archive: NpzFile, path: Path, size: int | None) -> Tensor:
    try:
        images = npz_file(path, labels="").images  # labels are read apart: not every command needs them
    except DataError as error:
        if read_member(archive, path, "images").dtype == np.uint8:
            raise
        raise DataError(f"{error}, or name the array 'inputs' if the model takes these numbers as they are") from error
    if size is None or images.shape[2:] == (size, size):
        return images
    return functional.interpolate(images, (size, size), mode="bilinear", antialias=True)  # as Pillow scales a folder's


def _other_inputs(archive: NpzFile, path: Path, size: int | None) -> Tensor:
    """Tables, signals or tokens: an array `inputs`; whole numbers stay whole, since they may be tokens."""
    if size is not None:
        raise DataError(f"--size {size} is for images, and {path} holds 'inputs', which are not scaled: leave it out")
    inputs = np.asarray(read_member(archive, path, "inputs"))
    whole, real = np.issubdtype(inputs.dtype, np.integer), np.issubdtype(inputs.dtype, np.floating)
    if inputs.ndim < 2 or 0 in inputs.shape or not (whole or real):
        raise DataError(f"{path} holds {inputs.dtype} {list(inputs.shape)} under 'inputs'; expected numbers [N, ...]")
    if inputs.dtype == np.uint8 and inputs.ndim != 4:
        raise DataError(
            f"{path} holds uint8 {list(inputs.shape)} under 'inputs', but 8-bit inputs are images [N, C, H, W]; store "
            "tokens as int64 and measurements as float32"
        )
    kind = np.uint8 if inputs.dtype == np.uint8 else np.int64 if whole else np.float32
    return torch.from_numpy(np.array(inputs, dtype=kind, order="C"))


def _labels(archive: NpzFile, path: Path, count: int) -> Tensor | None:
    """Class numbers, or fractions to be predicted; with a warning, none where they are text or objects."""
    if "labels" not in archive.files:
        return None
    try:
        labels = np.asarray(read_member(archive, path, "labels"))
    except DataError as error:
        if "pickle" not in str(error.__cause__):
            raise
        labels = np.empty(count, dtype=object)  # what NumPy would have to unpickle are objects
    fractions = np.issubdtype(labels.dtype, np.floating)
    if not (fractions or np.issubdtype(labels.dtype, np.integer)):
        logger.warning(
            "the labels in %s are %s and are not used; expected class numbers from 0, or fractions for a model that "
            "predicts a quantity",
            path,
            labels.dtype,
        )
        return None
    if labels.shape != (count,):
        raise DataError(f"{path} has {count} inputs but labels {list(labels.shape)}; expected one label an input [N]")
    if fractions:
        return torch.from_numpy(labels.astype(np.float32))
    if labels.min() < 0:
        raise DataError(
            f"{path} has labels from {labels.min()} to {labels.max()}; expected class numbers from 0: leave out "
            "samples without a class, or leave out 'labels'"
        )
    return as_labels(labels)
