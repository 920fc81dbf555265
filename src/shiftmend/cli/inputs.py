"""Turn what stands on the command line into a model and into data."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from shiftmend.data.preprocessing import per_channel
from shiftmend.errors import DataError, ShiftmendError
from shiftmend.models import MODELS, build


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
    try:
        module = _import_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
        factory = getattr(module, attribute)
    except (ImportError, FileNotFoundError, AttributeError) as error:
        raise ShiftmendError(f"model {name!r} could not be found: {error}") from error
    try:
        model = factory(**settings)
    except TypeError as error:
        raise ShiftmendError(f"{name} could not be called with {settings or 'no options'}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ShiftmendError(f"{name} gave a {type(model).__name__}, expected a torch.nn.Module")
    return model


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # noqa: PT018 (true of every .py file)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


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
        if images.dtype != torch.uint8:
            return images
        values = images.float().div_(255)
        if self.channels is not None and values.shape[1] == 1:
            values = values.expand(-1, self.channels, -1, -1)
        return (values - per_channel(self.mean, values)) / per_channel(self.deviation, values)


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

    return Normalisation(numbers(mean, "mean"), numbers(deviation, "std"), channels)


def load_data(path: Path, size: int | None) -> tuple[Tensor, Tensor | None]:
    """Inputs and, if there are any, labels: a folder of images, or an `.npz` of images or of any other inputs."""
    from shiftmend.data import image_folder, npz_file

    if path.is_dir():
        folder = image_folder(path, size=size)
        return folder.images, folder.labels
    if not path.exists():
        raise DataError(f"there is no {path}; expected a folder of images or an .npz file")
    if path.suffix != ".npz":
        raise DataError(f"{path} is neither a folder of images nor an .npz file")
    other = _other_inputs(path)
    if other is not None:
        return other
    split = npz_file(path)
    return split.images, split.labels


def _other_inputs(path: Path) -> tuple[Tensor, Tensor | None] | None:
    """Signals or tables: an array `inputs` of numbers that are no 8-bit images."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            if "inputs" not in archive.files:
                return None
            inputs = archive["inputs"]
            labels = archive["labels"] if "labels" in archive.files else None
    except (OSError, ValueError, EOFError, KeyError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} could not be read as an .npz of plain arrays: {error}") from error
    if inputs.ndim < 2 or not np.issubdtype(inputs.dtype, np.number):
        raise DataError(f"{path} holds {inputs.dtype} {list(inputs.shape)} under 'inputs'; expected numbers [N, ...]")
    values = torch.from_numpy(inputs)
    return values if values.dtype == torch.uint8 else values.float(), None if labels is None else torch.from_numpy(
        labels
    )
