"""How much memory a cell needed at most, and giving back what past cells left."""

from __future__ import annotations

import platform
from contextlib import suppress
from pathlib import Path

import torch

UNUSED = 16 << 30
"""Bytes of a GPU's memory that a run may keep without using them; to give back each cell's at once would cost time."""


def give_back(device: torch.device) -> None:
    """Memory of a GPU that nothing uses any more, if that has become much.

    What a captured graph was given is not used for the next one: without this a long run ends up with the whole GPU,
    and other programs on it with nothing. No graph may be captured meanwhile.
    """
    if device.type == "cuda" and torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) > UNUSED:
        torch.cuda.empty_cache()


def forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):  # where that is not possible, the peak is that of the whole process
            Path("/proc/self/clear_refs").write_text("5")  # Linux: the high-water mark starts anew


def peak(device: torch.device) -> int | None:
    """None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    with suppress(ImportError):
        import resource  # no such thing on Windows

        unit = 1 if platform.system() == "Darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return None
