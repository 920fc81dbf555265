"""How much memory of the machine is left to this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shiftmend.errors import ShiftmendError
from shiftmend.utils.checks import brief
from shiftmend.utils.processes import world_size

WITHOUT_FLOAT64 = {"mps"}


AT_ONCE = {"cpu": 1 << 20, "other": 1 << 24}
"""Numbers that are worked on together: near the caches of a core; enough for a GPU."""


def device_of(model: nn.Module) -> torch.device:
    """Where the model lies (the CPU if it has no parameters)."""
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def resolve_device(device: str | torch.device | None, model: nn.Module | None = None) -> torch.device:
    """A device by name; `auto`, or None, is the accelerator the model lies on, else CUDA if there is one, else the CPU.

    Of several processes that work together, each takes a GPU of its own, if there are as many.
    """
    if device is None or (isinstance(device, str) and device == "auto"):
        if model is not None and device_of(model).type != "cpu":
            return device_of(model)
        return torch.device("cuda", _own_gpu()) if torch.cuda.is_available() else torch.device("cpu")
    unknown = f"device {brief(str(device) if isinstance(device, torch.device) else device)} is not available here; "
    try:
        place = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        raise ShiftmendError(f"{unknown}use 'auto' or 'cpu'") from error
    if place.type == "meta":
        raise ShiftmendError(f"{unknown}nothing can be computed on 'meta': use 'auto' or 'cpu'")
    return place


def _own_gpu() -> int:
    local = os.environ.get("LOCAL_RANK", "")
    own = world_size() > 1 and local.isdigit() and int(local) < torch.cuda.device_count()
    return int(local) if own else torch.cuda.current_device()


def sum_dtype(device: torch.device) -> torch.dtype:
    """In which long sums stay exact; some devices have no float64."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def in_background(device: torch.device) -> bool:
    """Whether a copy from the host may go on by itself: on `mps` it would read memory that may be freed by then."""
    return device.type == "cuda"


def narrowed(values: Tensor, device: torch.device) -> Tensor:
    """Float64, which is numpy's usual, as float32 where the device has none."""
    return values.to(sum_dtype(device)) if values.dtype == torch.float64 else values


def sent(values: Tensor, device: torch.device) -> Tensor:
    """A batch, brought to the device."""
    return narrowed(values, device).to(device, non_blocking=in_background(device))


def layout_on(device: torch.device) -> torch.memory_format:
    """Where the channels of maps lie best. With channels innermost, gradients of BatchNorm are wrong on `mps`."""
    return torch.contiguous_format if device.type == "mps" else torch.channels_last


def in_parts(values: Tensor, width: int | None = None) -> tuple[Tensor, ...]:
    """Some rows at a time, for work that writes down `width` numbers for each, or as many as a row has.

    Done to all of them at once, it would need several times the memory of what it looks at: a file mapped into memory,
    or the maps of a dense output.
    """
    numbers = AT_ONCE["cpu" if values.device.type == "cpu" else "other"]
    parts: tuple[Tensor, ...] = values.split(max(1, numbers // max(1, width or values[:1].numel())))
    return parts


def room_on(device: torch.device) -> int:
    """How much data may stay on the device: part of what is free there, shared by the processes of a machine."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * 0.4)
    left = available() if device.type in ("cpu", "mps") else None  # one memory, on a Mac
    return 4 << 30 if left is None else int(left * 0.4) // _processes_here()


def _processes_here() -> int:
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return min(int(local), world_size()) if local.isdigit() and int(local) > 0 else world_size()


@contextmanager
def placed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Move a model to a device for the length of the block; buffers that its forward changes are as before, too."""
    home = device_of(model)
    owned = [(module._buffers, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()]
    kept = [buffer.detach().clone() if buffer is not None and is_writable(buffer) else None for _, _, buffer in owned]
    try:
        if home != device:
            model.to(device)
        yield
    finally:
        if home != device:
            model.to(home)
        with torch.no_grad():
            for (buffers, name, buffer), before in zip(owned, kept, strict=True):
                buffers[name] = buffer
                if buffer is not None and before is not None and not torch.equal(buffer, before):
                    buffer.copy_(before)


class _Groups(NamedTuple):
    """Where a version of Linux control groups keeps what it says of memory; what it calls cache that can go."""

    mount: str
    limit: str
    usage: str
    cache: str


_V1 = _Groups("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


_V2 = _Groups("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def available(root: Path = Path("/")) -> int | None:
    """Bytes that are free, or can be made so, here and in all control groups around; None where nobody can tell."""
    found = [_of_machine(root), *_of_groups(root)]
    return min((max(0, free) for free in found if free is not None), default=None)


def _of_machine(root: Path) -> int | None:
    free = _fields(root / "proc/meminfo").get("MemAvailable:")
    if free is not None:
        return 1024 * free
    try:  # macOS tells how much there is, not how much of it is free: half, for want of better
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, OSError, ValueError):  # nor that on Windows
        return None


def _of_groups(root: Path) -> Iterator[int]:
    """What each group that this process is in, and each around it, leaves of its limit, if it has one."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, kinds, path = (*line.split(":", 2), "", "")[:3]
        if number != "0" and "memory" not in kinds.split(","):
            continue
        groups = _V2 if number == "0" else _V1
        names = [name for name in path.split("/") if name]
        for depth in range(len(names) + 1):  # in a container, the outermost that is seen may be its own
            folder = root.joinpath(groups.mount, *names[:depth])
            limit, usage = (_text(folder / name).strip() for name in (groups.limit, groups.usage))
            if limit.isdigit() and usage.isdigit():  # no limit is "max", or a number beyond all memory
                yield int(limit) - int(usage) + _fields(folder / "memory.stat").get(groups.cache, 0)


def _fields(path: Path) -> dict[str, int]:
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")  # groups may have any name
    except OSError:
        return ""


def is_writable(tensor: Tensor) -> bool:
    """With values of its own, neither sparse nor one seen as many, as `expand` gives, nor made in inference mode."""
    whole = tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_inference()
    return whole and all(stride > 0 or size < 2 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
