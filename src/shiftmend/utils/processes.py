"""The process group that this process belongs to, if there is one; see `shiftmend.distributed`."""

from __future__ import annotations

import logging

import torch.distributed as dist


def world_size() -> int:
    """Return the number of processes that work together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the rank of this process, from 0; only rank 0 writes files and prints."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def of_first_process(record: logging.LogRecord) -> bool:
    """Filter log records to those of the first process, so that each message appears once."""
    return rank() == 0
