"""Checkpoint files of a run: save, load, lock. The trainer resumes from them."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor, nn, optim

from shiftmend.engine.history import Epoch, read_history
from shiftmend.errors import AdaptationError
from shiftmend.introspection.model_state import check_types, named_tensors, save_tensors
from shiftmend.stats.statistics import read_whole_number
from shiftmend.utils import sealing
from shiftmend.utils.checks import is_real, one_line
from shiftmend.utils.files import alone_with, is_special, replacing, sweep
from shiftmend.utils.json import loads


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after a complete epoch.

    Attributes:
        stage: Index of the stage.
        epoch: Number of finished epochs of that stage.
        history: Rows of the history so far.
        model: Weights and buffers by name.
        optimiser: State of the optimiser by parameter name, then by entry.
        selected: State of the selected epoch, if it should be kept.
        search: Search for the learning rate, if there was one.
    """

    stage: int
    epoch: int
    history: list[Epoch]
    model: dict[str, Tensor]
    optimiser: dict[str, dict[str, Any]]
    selected: dict[str, Tensor]
    search: dict[str, Any] | None = None


def check_place(path: Path) -> None:
    """Raise if a checkpoint cannot be written to this path, before training begins."""
    target = _resolve(path)
    try:
        if path.is_dir():
            raise AdaptationError(f"Expected the checkpoint to be a file, got the folder {path}. Name a file in it.")
        if is_special(path):
            raise AdaptationError(
                f"Expected the checkpoint to be a file, got {path}, a device or a pipe. Name another file."
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(target.parent, os.W_OK):
            raise PermissionError(13, "no permission to write there")
    except OSError as error:
        raise AdaptationError(f"Checkpoint {path} cannot be written ({error.strerror}). Name another file.") from error


@contextmanager
def lock(path: Path) -> Iterator[bool]:
    """Try to lock a checkpoint inside the block, without waiting.

    Partly written files that killed processes left beside the checkpoint are deleted, even without the lock.

    Yields: True if this process holds the lock, or if the system has no locks. False if another process holds the lock.

    Raises:
        AdaptationError: If a checkpoint cannot be written to this path.
        DataError: If the lock file cannot be opened.
    """
    check_place(path)
    target = _resolve(path)
    with alone_with(target) as alone:
        sweep(target)
        yield alone


def _resolve(path: Path) -> Path:
    return Path(os.path.realpath(path))  # A link stays a link, as with `replacing`.


def check_model(model: nn.Module) -> None:
    """Raise if the model has tensors that a checkpoint cannot store; complex tensors are stored as pairs."""
    check_types({name: value for name, value in named_tensors(model).items() if not value.is_complex()})


def identify(facts: dict[str, Any]) -> str:
    """Hash everything that determines a run."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def save(
    path: Path,
    run: str,
    stage: int,
    epoch: int,
    history: list[Epoch],
    model: nn.Module,
    optimiser: optim.Optimizer | None,
    selected: dict[str, Tensor] | None = None,
    fits: bool | None = None,
    batch_size: int | None = None,
    search: dict[str, Any] | None = None,
) -> None:
    """Write the state of a run atomically; `data_fits` reads `fits`, and `stored_batch_size` reads `batch_size`."""
    tensors = {f"model.{name}": value.cpu() for name, value in named_tensors(model).items()}
    tensors |= {f"selected.{name}": value.cpu() for name, value in (selected or {}).items()}
    numbers: dict[str, dict[str, Any]] = {}
    if optimiser is not None:
        names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        for parameter, state in optimiser.state.items():
            for entry, value in state.items():
                if isinstance(value, Tensor):
                    tensors[f"optimiser.{entry}.{names[parameter]}"] = value.cpu()
                else:
                    numbers.setdefault(names[parameter], {})[entry] = value
    pairs = [name for name, value in tensors.items() if value.is_complex()]  # Files hold complex64 only.
    tensors |= {name: torch.view_as_real(tensors[name].resolve_conj()) for name in pairs}
    facts = {"run": run, "stage": stage, "epoch": epoch, "history": [row.to_json() for row in history]}
    facts |= {"pairs": pairs, "fits": fits, "batch_size": batch_size, "optimiser": numbers, "search": search}
    metadata = {"format": "shiftmend checkpoint", "facts": json.dumps(facts), **sealing.blank_entries()}
    with replacing(path) as (place,):
        save_tensors(place, tensors, metadata)
        with place.open("rb+") as file:
            sealing.seal(file)


def data_fits(*paths: str | os.PathLike[str] | None) -> bool | None:
    """Return whether the data of runs with these checkpoints fitted into memory; None if unknown."""
    fits = _read_fact("fits", paths)
    return None if fits is None else bool(fits)


def stored_batch_size(*paths: str | os.PathLike[str] | None) -> int | None:
    """Return the batch size that the runs of these checkpoints used; None if no checkpoint exists yet."""
    size = _read_fact("batch_size", paths)
    return size if type(size) is int and size > 0 else None


def _read_fact(name: str, paths: Sequence[str | os.PathLike[str] | None]) -> Any:
    """Return a fact from the first checkpoint that states it; None if none does."""
    for path in paths:
        with suppress(OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError):  # `load` reports damage.
            if path is None or not Path(path).is_file():
                continue
            with safetensors.safe_open(path, framework="pt") as file:
                found = loads(file.metadata()["facts"])[name]
            if found is not None:
                return found
    return None


def load(path: Path, run: str) -> Checkpoint | None:
    """Read the state of the run called `run`.

    Returns:
        The checkpoint, or None if there is no file yet.

    Raises:
        AdaptationError: If the file is damaged, or belongs to another run.
    """
    if not path.exists():
        return None
    try:
        with path.open("rb") as content:
            sealing.check(content)
        with safetensors.safe_open(path, framework="pt") as file:
            facts = loads(file.metadata()["facts"])
            # Tensors are copied, because the file stays mapped otherwise, and Windows cannot replace a mapped file.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (no mapping)
        found = str(facts["run"])
        history = read_history(facts["history"])
        position = read_whole_number(facts["stage"], "the stage", 0), read_whole_number(facts["epoch"], "the epoch")
        tensors |= {name: torch.view_as_complex(tensors[name]) for name in facts.get("pairs", ())}
        state = {name: dict(entries) for name, entries in facts["optimiser"].items()}
        search = facts.get("search")
        if search is not None and not (is_real(search["rate"]) and 0 < search["rate"] < math.inf):
            raise ValueError("the learning rate that was found is none")
    except (
        *(OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError),
        safetensors.SafetensorError,
    ) as error:
        raise _refuse(path, error) from error
    if found != run:
        raise AdaptationError(
            f"Checkpoint {path} belongs to another run: model, data, profile, options or free memory differ. "
            "Delete it to start over, or name another file."
        )
    for name, value in _take(tensors, "optimiser.").items():
        entry, _, parameter = name.partition(".")
        state.setdefault(parameter, {})[entry] = value
    return Checkpoint(*position, history, _take(tensors, "model."), state, _take(tensors, "selected."), search)


def _refuse(path: Path, reason: object) -> AdaptationError:
    return AdaptationError(
        f"{path} is no readable shiftmend checkpoint ({one_line(reason)}); delete it to start over, or name another "
        "file"
    )


def check_fits(found: Checkpoint, path: Path, model: nn.Module, stages: Sequence[str]) -> None:
    """Refuse a checkpoint that does not fit the model and its stages, before anything is restored.

    Raises:
        AdaptationError: If names, shapes or types of tensors differ, or the history does not fit the position.
    """
    own = named_tensors(model)
    if found.model.keys() != own.keys():
        raise _refuse(path, f"tensor {min(found.model.keys() ^ own.keys())!r} is missing or unexpected")
    parameters = dict(model.named_parameters())
    for group in (found.model, found.selected):
        for name, value in group.items():
            # Some layers replace a buffer by one of another size.
            same = name in own and (value.shape == own[name].shape or name not in parameters)
            if not same or value.dtype != own[name].dtype:
                raise _refuse(path, f"tensor {name!r} is not of this model")
    for name, entries in found.optimiser.items():
        for entry, value in entries.items():
            # Some optimisers store a row or a column instead of a matrix.
            if name not in parameters or (isinstance(value, Tensor) and not _spreads_over(value, parameters[name])):
                raise _refuse(path, f"the optimiser's {entry!r} of {name!r} is not of this model")
    blocks = [row.block for row in found.history[1:]]
    own_blocks = [stages[found.stage]] * found.epoch if found.stage < len(stages) else [""]
    if not set(blocks) <= set(stages) or blocks[-found.epoch :] != own_blocks:
        raise _refuse(path, "its history does not lead to its position")


def _spreads_over(value: Tensor, parameter: Tensor) -> bool:
    """Tell whether a tensor has the shape of a parameter, or can be broadcast to it."""
    sides = zip(reversed(value.shape), reversed(parameter.shape), strict=False)
    return value.ndim <= parameter.ndim and all(side in (1, whole) for side, whole in sides)


def restore_optimiser(optimiser: optim.Optimizer, model: nn.Module, state: dict[str, dict[str, Any]]) -> None:
    """Restore the state of an optimiser from a checkpoint of this model."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    stored = {index: state[names[p]] for index, p in enumerate(parameters) if names[p] in state}
    optimiser.load_state_dict(optimiser.state_dict() | {"state": stored})
    for parameter, entries in optimiser.state.items():
        for name, value in entries.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim:
                # The same memory layout as the parameter makes a resumed run use the same kernels.
                entries[name] = torch.empty_like(parameter, requires_grad=False, dtype=value.dtype).copy_(value)


def _take(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
