"""Turn what stands on the command line into a model, or a method."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import safetensors.torch
import torch
from torch import nn

from shiftmend.errors import DataError, ShiftmendError
from shiftmend.methods import METHODS
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
def _found(what: str, name: str, known: Iterable[str], attributes: str) -> Iterator[Any]:
    """What `package.module:attribute` or `file.py:attribute` names; inside, imports find what lies beside it."""
    where, colon, attribute = name.rpartition(":")
    if not colon or not where:
        raise ShiftmendError(
            f"{what} {name!r} is neither built in ({', '.join(known)}) nor of the form package.module:{attributes} or "
            f"file.py:{attributes}"
        )
    of_file = where.endswith(".py")
    if of_file and not Path(where).is_file():
        raise ShiftmendError(f"{what} {name!r} could not be found: there is no file {where}")
    with _first_on_path(Path(where).resolve().parent if of_file else Path.cwd()):
        module = _imported(f"{what} {name!r}", where, of_file, what)
        if not hasattr(module, attribute):
            raise ShiftmendError(f"{what} {name!r} could not be found: {where} has no {attribute!r}")
        yield getattr(module, attribute)


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


def _imported(named: str, where: str, of_file: bool, what: str) -> ModuleType:
    try:
        return _import_file(Path(where)) if of_file else importlib.import_module(where)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and not of_file and f"{where}.".startswith(f"{missing}."):
            raise ShiftmendError(
                f"{named} could not be found: {error}; expected a module that is installed or in the current folder"
            ) from error
        remedy = f"install it, or put it beside the {what}" if missing else "mend it there"
        raise ShiftmendError(f"{named} could not be imported: {_reason(error)}; {remedy}") from error


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
