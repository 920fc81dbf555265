"""Where to compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from shiftmend.errors import ShiftmendError


def device_of(model: nn.Module) -> torch.device:
    """Where the model lies (the CPU if it has no parameters)."""
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def resolve_device(device: str | torch.device, model: nn.Module | None = None) -> torch.device:
    """A device by name; `auto` is the accelerator the model lies on, else CUDA if there is one, else the CPU."""
    if str(device) == "auto":
        if model is not None and device_of(model).type != "cpu":
            return device_of(model)
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ShiftmendError(f"device {str(device)!r} is not available here; use 'auto' or 'cpu'") from error


@contextmanager
def placed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Move a model to a device for the length of the block."""
    home = device_of(model)
    try:
        if home != device:
            model.to(device)
        yield
    finally:
        if home != device:
            model.to(home)
