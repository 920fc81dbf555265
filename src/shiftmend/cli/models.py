"""Turn what stands on the command line into a model, or a method."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any, TypeGuard

import safetensors.torch
import torch
from torch import nn

from shiftmend.cli.options import whole_or_text
from shiftmend.errors import DataError, ShiftmendError
from shiftmend.methods import METHODS
from shiftmend.research.networks import MODELS, build
from shiftmend.utils.python_files import first_on_path, frames, import_file, reason


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
    return key, whole_or_text(value)


def load_method(name: str) -> Any:
    """A built-in method by name, as it is, or the class that `package.module:Class` or `file.py:Class` names."""
    if ":" not in name:
        return name
    with _found("method", name, METHODS, "Class") as found:
        return found


def _call_factory(name: str, settings: dict[str, Any]) -> nn.Module:
    with _found("model", name, MODELS, "factory") as factory:
        try:
            model = factory(**settings)
        except (Exception, SystemExit) as error:
            if isinstance(error, TypeError) and not frames(error):  # the call itself, not what it ran
                raise ShiftmendError(f"{name} could not be called with {settings or 'no options'}: {error}") from error
            raise ShiftmendError(
                f"{name} could not make the model with {settings or 'no options'}: {reason(error)}; expected it to "
                "return a torch.nn.Module: mend it there, or pass other --model-option"
            ) from error
        if not isinstance(model, nn.Module):
            raise ShiftmendError(f"{name} gave a {type(model).__name__}, expected a torch.nn.Module")
    return model


@contextmanager
def _found(what: str, name: str, known: Iterable[str], attributes: str) -> Iterator[Any]:
    """What `package.module:attribute` or `file.py:attribute` names; inside, imports find what lies beside it.

    What it prints goes to standard error: on standard output it would stand before the JSON.
    """
    where, colon, attribute = name.rpartition(":")
    if not colon or not where:
        raise ShiftmendError(
            f"{what} {name!r} is neither built in ({', '.join(known)}) nor of the form package.module:{attributes} or "
            f"file.py:{attributes}"
        )
    of_file = where.endswith(".py")
    if of_file and not Path(where).is_file():
        raise ShiftmendError(f"{what} {name!r} could not be found: there is no file {where}")
    with redirect_stdout(sys.stderr), first_on_path(Path(where).resolve().parent if of_file else Path.cwd()):
        module = _imported(f"{what} {name!r}", where, of_file, what)
        if not hasattr(module, attribute):
            raise ShiftmendError(f"{what} {name!r} could not be found: {where} has no {attribute!r}")
        yield getattr(module, attribute)


def _imported(named: str, where: str, of_file: bool, what: str) -> ModuleType:
    try:
        return import_file(Path(where)) if of_file else importlib.import_module(where)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and not of_file and f"{where}.".startswith(f"{missing}."):
            raise ShiftmendError(
                f"{named} could not be found: {error}; expected a module that is installed or in the current folder"
            ) from error
        remedy = f"install it, or put it beside the {what}" if missing else "mend it there"
        raise ShiftmendError(f"{named} could not be imported: {reason(error)}; {remedy}") from error


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
    except pickle.UnpicklingError as error:
        raise DataError(
            f"{path} could not be read as weights: it is damaged or holds more than tensors, such as a whole model; "
            "expected what torch.save(model.state_dict(), file) writes"
        ) from error
    except Exception as error:
        raise DataError(f"{path} could not be read as weights: {error}") from error
    if not _has_names(state):
        raise DataError(
            f"{path} holds a {type(state).__name__} without names of weights, expected what "
            "torch.save(model.state_dict(), file) writes"
        )
    own = model.state_dict()
    state = _unwrapped(state, own)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        lacking, strange = [name for name in own if name not in state], [name for name in state if name not in own]
        differ = [f"the file lacks {_first(lacking)}"] if lacking else []
        differ += [f"the model lacks {_first(strange)}"] if strange else []
        first = next((line.strip() for line in str(error).splitlines()[1:] if line.strip()), str(error))
        raise DataError(f"the weights in {path} do not fit the model: {' and '.join(differ) or first[:200]}") from error


def _unwrapped(state: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any]:
    """The weights of a checkpoint by the names that the model has for them.

    A training loop keeps them beside its own state, and `DataParallel`, `torch.compile` and trainers write a name of
    theirs before each of the model's.
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


def _first(names: list[str]) -> str:
    return f"{names[0]!r}" + (f" ({len(names) - 1} more)" if len(names) > 1 else "")
