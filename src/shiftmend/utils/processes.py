"""TODO."""

from __future__ import annotations

import logging

import torch.distributed as dist


def world_size() -> int:
    """Number of processes that work together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Which of them this one is; the first writes files and talks to the user."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def of_first_process(record: logging.LogRecord) -> bool:
    """A filter for loggers: what every process would say is said once."""
    return rank() == 0
