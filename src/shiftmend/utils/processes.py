"""The process group that this process belongs to, if there is one; see `shiftmend.distributed`."""

from __future__ import annotations

import logging

import torch.distributed as dist


def world_size() -> int:
    """Return the number of processes that work together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this process, from 0; the first process writes files and talks to the user."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def of_first_process(record: logging.LogRecord) -> bool:
    """Let a logger pass the records of the first process alone: what all processes would say is said once."""
    return rank() == 0
