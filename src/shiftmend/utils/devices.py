"""Devices: choose one, query its features, and how much of its memory is free."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import overload

import torch
from torch import Tensor, nn

from shiftmend.errors import ShiftmendError
from shiftmend.utils.checks import brief
from shiftmend.utils.gpu_sharing import is_sharing_gpu
from shiftmend.utils.processes import world_size
from shiftmend.utils.tensor_tree import Inputs, TensorTree

WITHOUT_FLOAT64 = {"mps"}
"""Types of devices that have no float64."""

VALUES_PER_PART = {"cpu": 1 << 20, "other": 1 << 24}
"""Number of values to process at once: about the cache of a CPU core, and enough to keep a GPU busy."""

RESIDENT_FRACTION = 0.4
"""Largest fraction of the free memory for resident data; the rest is for the model and its activations."""

DEFAULT_RESIDENT_BYTES = 4 << 30
"""Largest resident data on a device whose free memory is unknown."""


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the first parameter, or the CPU for a model without parameters."""
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def resolve_device(device: str | torch.device | None, model: nn.Module | None = None) -> torch.device:
    """Resolve the name of a device.

    `"auto"` and None mean the accelerator that holds `model`, else CUDA if available, else the CPU. If several
    processes share a machine with enough GPUs, each gets another one.
    """
    if device is None or (isinstance(device, str) and device == "auto"):
        if model is not None and device_of(model).type != "cpu":
            return device_of(model)
        return torch.device("cuda", _own_gpu()) if torch.cuda.is_available() else torch.device("cpu")
    given = brief(str(device) if isinstance(device, torch.device) else device)
    try:
        place = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        raise ShiftmendError(f"Expected a device that is available here, got {given}. Use 'auto' or 'cpu'.") from error
    if place.type == "meta":
        raise ShiftmendError("Expected a device that computes, got 'meta'. Use 'auto' or 'cpu'.")
    return place


def _own_gpu() -> int:
    local = os.environ.get("LOCAL_RANK", "")
    own = world_size() > 1 and local.isdigit() and int(local) < torch.cuda.device_count()
    return int(local) if own else torch.cuda.current_device()


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the widest floating-point type of a device, for accurate long sums."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def supports_async_copies(device: torch.device) -> bool:
    """Tell whether a copy from the host may run asynchronously.

    On `mps` such a copy may read host memory that has been freed.
    """
    return device.type == "cuda"


def preferred_memory_format(device: torch.device) -> torch.memory_format:
    """Return the fastest memory format for images. `mps` computes wrong BatchNorm gradients with channels last."""
    return torch.contiguous_format if device.type == "mps" else torch.channels_last


def release_cached_memory(device: torch.device) -> None:
    """Give cached GPU memory that PyTorch does not use back to the driver.

    Nothing happens if `device` is not a CUDA device, or if this thread shares the GPU with others by `share_gpu`.

    PyTorch keeps the memory of a freed CUDA graph until its own process runs out of memory. Other processes on the GPU
    may run out earlier. Fifteen adaptations of a ResNet-18 in one process had cached 120 GB.
    """
    if device.type == "cuda" and not is_sharing_gpu():
        torch.cuda.empty_cache()


@overload
def narrow_float64(values: Tensor, device: torch.device) -> Tensor: ...
@overload
def narrow_float64(values: Inputs, device: torch.device) -> Inputs: ...
def narrow_float64(values: Inputs, device: torch.device) -> Inputs:
    """Convert float64, the default of numpy, to float32 if the device has no float64."""
    if isinstance(values, TensorTree):
        return values.map(lambda leaf: narrow_float64(leaf, device))
    return values.to(sum_dtype(device)) if values.dtype == torch.float64 else values


@overload
def send(values: Tensor, device: torch.device) -> Tensor: ...
@overload
def send(values: Inputs, device: torch.device) -> Inputs: ...
def send(values: Inputs, device: torch.device) -> Inputs:
    """Move a batch to a device, asynchronously if that is safe."""
    return narrow_float64(values, device).to(device, non_blocking=supports_async_copies(device))


def split_rows(values: Tensor, width: int | None = None) -> tuple[Tensor, ...]:
    """Split a tensor along its first axis into parts, for work that needs several times their memory.

    `width` is the number of values that the work writes per row, by default the size of a row.
    """
    numbers = VALUES_PER_PART["cpu" if values.device.type == "cpu" else "other"]
    parts: tuple[Tensor, ...] = values.split(max(1, numbers // max(1, width or values[:1].numel())))
    return parts


def max_resident_bytes(device: torch.device) -> int:
    """Return the largest number of bytes of data that may stay on a device, a fraction of its free memory.

    The processes of a machine share the memory of the host.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * RESIDENT_FRACTION)
    # CPU and GPU of a Mac share one memory.
    left = free_host_bytes() if device.type in ("cpu", "mps") else None
    return DEFAULT_RESIDENT_BYTES if left is None else int(left * RESIDENT_FRACTION) // _processes_on_this_machine()


def _processes_on_this_machine() -> int:
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return min(int(local), world_size()) if local.isdigit() and int(local) > 0 else world_size()


def free_host_bytes(root: Path = Path("/")) -> int | None:
    """Return how many bytes of host memory this process may still use; None if unknown.

    On Linux, each control group of the process may set a limit, as containers and batch systems do.
    """
    free = [_free_bytes_of_machine(root), *_free_bytes_of_cgroups(root)]
    return min((max(0, found) for found in free if found is not None), default=None)


def _free_bytes_of_machine(root: Path) -> int | None:
    free_kilobytes = _read_fields(root / "proc/meminfo").get("MemAvailable:")
    if free_kilobytes is not None:
        return 1024 * free_kilobytes
    try:
        # macOS reports its total memory only; half of it counts as free.
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, OSError, ValueError):
        # Windows reports neither.
        return None


def _free_bytes_of_cgroups(root: Path) -> Iterator[int]:
    """Yield the unused part of each memory limit: of this process's control group, and of its parents."""
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0":  # version 2
            mount, limit, usage, cache = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):  # version 1
            mount, cache = "sys/fs/cgroup/memory", "total_inactive_file"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = (root / mount).joinpath(*(name for name in path.split("/") if name))
        # Inside a container, /proc may name groups that only the host sees; the mount itself is then the container's
        # group.
        for folder in (group, *group.parents):
            most, used = _read_text(folder / limit).strip(), _read_text(folder / usage).strip()
            # Version 2 writes "max" without a limit, version 1 a number larger than any memory.
            if most.isdigit() and used.isdigit():
                yield int(most) - int(used) + _read_fields(folder / "memory.stat").get(cache, 0)


def _read_fields(path: Path) -> dict[str, int]:
    rows = (line.split() for line in _read_text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _read_text(path: Path) -> str:
    try:
        # The name of a group may contain any bytes.
        return path.read_text(errors="replace")
    except OSError:
        return ""
