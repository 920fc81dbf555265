"""Checkpoints: a run that was killed goes on where it was, and ends as if nothing had happened."""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor, nn, optim

from shiftmend.engine.history import Epoch
from shiftmend.errors import AdaptationError
from shiftmend.introspection.model_state import check_types, held, save_tensors
from shiftmend.utils.files import alone_with, is_special, replacing
from shiftmend.utils.sealing import UNSEALED, is_intact, seal


@dataclass(frozen=True)
class Checkpoint:
    """The state after some whole epoch: position, weights, momentum, history."""

    stage: int
    epoch: int
    """Epochs of that stage that are done."""
    history: list[Epoch]
    state: dict[str, Tensor]
    momentum: dict[str, Tensor]
    selected: dict[str, Tensor]
    """The state of the epoch that would be kept, where that is wanted."""


def check_place(path: Path) -> None:
    """Refuse a path that cannot be written to before an epoch is spent."""
    target = _target(path)
    try:
        if path.is_dir():
            raise AdaptationError(f"checkpoint {path} is a folder, expected the name of a file in it")
        if is_special(path):
            raise AdaptationError(f"checkpoint {path} is a device or a pipe, expected the name of a file")
        target.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(target.parent, os.W_OK):
            raise PermissionError(13, "no permission to write there")
    except OSError as error:
        raise AdaptationError(f"checkpoint {path} cannot be written ({error.strerror}); name another file") from error


@contextmanager
def alone_at(path: Path) -> Iterator[bool]:
    """Whether no other run has this checkpoint; if so, what a killed process left half written beside it is deleted."""
    check_place(path)
    target = _target(path)
    with alone_with(target) as alone:
        if alone:
            for left in target.parent.glob(f".{glob.escape(target.name)}.{'?' * 8}.partial"):  # see `replacing`
                with suppress(OSError):  # another user's, in a folder where each deletes only what is theirs
                    left.unlink()
        yield alone


def _target(path: Path) -> Path:
    return Path(os.path.realpath(path))  # as `replacing` does: a link stays one


def check_model(model: nn.Module) -> None:
    """Refuse a model with numbers that a checkpoint cannot hold; complex ones are written as pairs."""
    check_types({name: value for name, value in held(model).items() if not value.is_complex()})


def identify(facts: dict[str, Any]) -> str:
    """A short name for everything that decides how a run goes."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def save(
    path: Path,
    run: str,
    stage: int,
    epoch: int,
    history: list[Epoch],
    model: nn.Module,
    optimiser: optim.SGD | None,
    selected: dict[str, Tensor] | None = None,
    fits: bool | None = None,
) -> None:
    """Write the state of a run, atomically; `fits` is for `data_fits`."""
    tensors = {f"model.{name}": value.cpu() for name, value in held(model).items()}
    tensors |= {f"selected.{name}": value.cpu() for name, value in (selected or {}).items()}
    if optimiser is not None:
        names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        for parameter, state in optimiser.state.items():
            tensors[f"momentum.{names[parameter]}"] = state["momentum_buffer"].cpu()
    pairs = [name for name, value in tensors.items() if value.is_complex()]  # a file holds complex64 alone
    tensors |= {name: torch.view_as_real(tensors[name].resolve_conj()) for name in pairs}
    position = {"run": run, "stage": stage, "epoch": epoch}
    facts = position | {"history": [asdict(row) for row in history], "pairs": pairs, "fits": fits}
    metadata = {"format": "shiftmend checkpoint", "facts": json.dumps(facts), **UNSEALED}
    with replacing(path) as (place,):
        save_tensors(place, tensors, metadata)
        with place.open("rb+") as file:
            seal(file)


def data_fits(*paths: str | os.PathLike[str] | None) -> bool | None:
    """Whether the data of runs with these checkpoints fitted into memory; None where that was no question so far."""
    for path in paths:
        with suppress(Exception):  # what is wrong with a file is for `load` to say
            if path is None or not Path(path).is_file():
                continue
            with safetensors.safe_open(path, framework="pt") as file:
                fits = json.loads(file.metadata()["facts"])["fits"]
            if fits is not None:
                return bool(fits)
    return None


def load(path: Path, run: str) -> Checkpoint | None:
    """Read the state of the run called `run`; None if there is no file yet."""
    if not path.exists():
        return None
    try:
        with path.open("rb") as content:
            if not is_intact(content):
                raise ValueError("its content does not match its SHA-256")
        with safetensors.safe_open(path, framework="pt") as file:
            facts = json.loads(file.metadata()["facts"])
            # copies: the file stays mapped with what it gives, and Windows replaces no such file
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (no mapping)
        found = str(facts["run"])
        history = [Epoch(**row) for row in facts["history"]]
        position = int(facts["stage"]), int(facts["epoch"])
        tensors |= {name: torch.view_as_complex(tensors[name]) for name in facts.get("pairs", ())}
    except Exception as error:
        raise AdaptationError(
            f"{path} is no readable shiftmend checkpoint; delete it to start over, or name another file"
        ) from error
    if found != run:
        raise AdaptationError(
            f"checkpoint {path} belongs to another run (other model, data, profile, method or options, or data that no "
            "longer fits into memory); delete it to start over, or name another file"
        )
    parts = (_under(tensors, prefix) for prefix in ("model.", "momentum.", "selected."))
    return Checkpoint(*position, history, *parts)


def restore_momentum(optimiser: optim.SGD, model: nn.Module, momentum: dict[str, Tensor]) -> None:
    """Give an optimiser back what a checkpoint of this model holds of it."""
    for name, parameter in model.named_parameters():
        if name in momentum:
            kept = torch.empty_like(parameter, requires_grad=False).copy_(momentum[name])  # in its memory format
            optimiser.state[parameter]["momentum_buffer"] = kept


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
