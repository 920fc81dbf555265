"""Collectives: under `torchrun`, several processes adapt like a single one on the whole batches.

Every process holds the same model and data, and runs its part of each batch. Everything computed from a batch
(BatchNorm statistics, histograms) is reduced over processes before use, and gradients are summed before a step, so that
parameters and buffers stay equal. This happens inside `all_processes()`, which every process enters. Outside of it,
without a process group, or in a group of one, every function here returns its input.

All gradients follow one rule: the quantity that is differentiated is the sum of the losses of all processes. A loss
that was computed from reduced numbers is equal everywhere, and so is divided by `world_size()`: see `backward`.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor

from shiftmend.errors import AdaptationError
from shiftmend.utils.processes import rank, world_size
from shiftmend.utils.tensor_tree import Inputs, concatenate, sample_shape

if dist.is_available():
    # Optimisers import this module, whose default arguments capture the current process group. Imported here, before
    # there is a group, they capture none. Otherwise the group, with its threads, would survive `destroy_process_group`,
    # and a thread that needs Python at exit would abort the process.
    import torch.distributed.nn


logger = logging.getLogger(__name__)


_depth = 0
"""Number of open `all_processes()` blocks, in all threads."""


@contextmanager
def all_processes() -> Iterator[None]:
    """Turn on the collectives of this module inside the block, so that all processes adapt as one.

    Every process must enter the block, or the others hang in their first collective. Entering does not synchronise.
    Blocks may be nested. Outside, collectives return their inputs, so a process may evaluate a model alone.

    The depth of nesting is a global, not a context variable, because CUDA's backward pass runs in other threads.
    """
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def is_distributed() -> bool:
    """Tell whether this process currently works together with others."""
    return _depth > 0 and world_size() > 1


@contextmanager
def torchrun_process_group() -> Iterator[None]:
    """Join the process group of `torchrun` inside the block; do nothing without `torchrun`.

    Finished processes wait for the others: if one exits early, `torchrun` may kill the others before their files are
    written.
    """
    if not _lacks_process_group():
        yield
        return
    cuda = dist.is_nccl_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def warn_without_process_group() -> None:
    """Warn if `torchrun` started several processes without a process group."""
    if _lacks_process_group():
        logger.warning(
            "WORLD_SIZE is %s, but there is no process group, so each process does all the work. Call "
            "torch.distributed.init_process_group() first.",
            os.environ["WORLD_SIZE"],
        )


def _lacks_process_group() -> bool:
    several = os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")
    return several and dist.is_available() and not dist.is_initialized()


@overload
def local_part(batch: Tensor) -> Tensor: ...
@overload
def local_part(batch: Inputs) -> Inputs: ...
def local_part(batch: Inputs) -> Inputs:
    """Return this process's contiguous part of a batch or of its indices. The first parts may be larger by one."""
    if not is_distributed():
        return batch
    if len(batch) < world_size():
        raise AdaptationError(
            f"Expected at least one sample for each of {world_size()} processes, got a batch of {len(batch)}. Use "
            "larger batches or fewer processes."
        )
    return batch.tensor_split(world_size())[rank()]


@overload
def local_parts(batches: Iterable[Tensor]) -> Iterator[Tensor]: ...
@overload
def local_parts(batches: Iterable[Inputs]) -> Iterator[Inputs]: ...
def local_parts(batches: Iterable[Inputs]) -> Iterator[Inputs]:
    """Yield this process's part of each batch or of its indices. A batch that is too small joins the previous one."""
    if not is_distributed():
        yield from batches
        return
    previous: Inputs | None = None
    for batch in batches:
        small = previous is not None and len(batch) < world_size() and sample_shape(previous) == sample_shape(batch)
        if previous is not None:
            yield local_part(concatenate([previous, batch]) if small else previous)
        previous = None if small else batch
    if previous is not None:
        yield local_part(previous)


class _AllSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return all_sum(gradients[0])


def all_sum(values: Tensor) -> Tensor:
    """Sum values over processes. The gradient of a value is the sum of its gradients in all processes."""
    if not is_distributed():
        return values
    total: Tensor = _AllSum.apply(values)
    return total


def reduce_mean(mean: Tensor, count: int) -> Tensor:
    """Compute the mean over the samples of all processes, from this process's `mean` over `count` samples."""
    if not is_distributed():
        return mean
    total = all_sum(torch.cat([(mean * count).reshape(-1), mean.new_full((1,), count)]))
    return (total[:-1] / total[-1].detach()).view(mean.shape)


def all_gather(values: Tensor) -> Tensor:
    """Stack the values of all processes along a new first axis, in the order of their ranks, without a gradient."""
    values = values.detach().contiguous()
    if not is_distributed():
        return values.unsqueeze(0)
    rows = [torch.empty_like(values) for _ in range(world_size())]
    dist.all_gather(rows, values)
    return torch.stack(rows)


def reduce_range(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Find the lowest and highest value `[D]` over processes. NaN is preserved, unlike with `all_reduce`."""
    every = all_gather(torch.stack([low, high]))
    return every[:, 0].amin(0), every[:, 1].amax(0)


def reduce_moments(count: int, mean: Tensor, squares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the count, the mean and the sum of squared deviations of all processes, each of which must call this.

    Moments are merged in the order of ranks, so all processes get bitwise equal results. Deviations are merged instead
    of sums of squares, which lose digits if the mean is large. There is no gradient.

    Args:
        count: Number of samples in this process.
        mean: Their mean, `[D]`.
        squares: Sum of their squared deviations from `mean`, `[D]`.

    Returns:
        Count (a scalar tensor), mean and sum of squared deviations over all processes, in float64.
    """
    units = len(mean)
    wide = torch.float64
    every = all_gather(torch.cat([mean.to(wide), squares.to(wide), mean.new_full((1,), count, dtype=wide)]))
    means, spreads, counts = every[:, :units], every[:, units:-1], every[:, -1:]
    total = counts.sum()
    overall = (means * (counts / total)).sum(0)
    return total, overall, (spreads + counts * (means - overall).square()).sum(0)


def all_true(condition: bool, device: torch.device) -> bool:
    """Tell whether a condition holds in every process."""
    if not is_distributed():
        return condition
    return bool(all_gather(torch.tensor(condition, dtype=torch.uint8, device=device)).all())


def backward(loss: Tensor, parameters: Iterable[Tensor]) -> None:
    """Call `loss.backward()` for a loss computed from reduced numbers, and sum the gradients over processes."""
    if not is_distributed():
        loss.backward()
        return
    (loss / world_size()).backward()
    sum_gradients(parameters)


def sum_gradients(parameters: Iterable[Tensor]) -> None:
    """Sum gradients over processes in place, with one exchange per dtype and device.

    Parameters without a gradient are skipped. They have none in the other processes either, which run the same
    operations.
    """
    if not is_distributed():
        return
    buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            buckets.setdefault((parameter.grad.dtype, parameter.grad.device), []).append(parameter.grad)
    with torch.no_grad():
        for gradients in buckets.values():
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(flat)
            parts = flat.split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view(gradient.shape))


def check_same(digest: str, what: str, device: torch.device | None = None) -> None:
    """Raise in all processes if `digest` differs between them, because their results would be mixed silently.

    `device` is the device of the work, on which the process group must be able to exchange tensors.
    """
    with all_processes():
        if not is_distributed():
            return
        own = torch.tensor(list(hashlib.sha256(digest.encode()).digest()), dtype=torch.uint8, device=device)
        _check_backend(own.device.type)
        every = all_gather(own)
    others = [index for index, same in enumerate((every == every[0]).all(1).tolist()) if not same]
    if others:
        raise AdaptationError(
            f"Expected the same {what} in every process, got another in process {', '.join(map(str, others))}. Pass "
            "every process the same data in the same order."
        )


def _check_backend(device_type: str) -> None:
    """Refuse a process group that has no backend for a type of device."""
    backends = dict(entry.split(":", 1) for entry in dist.get_backend_config().split(","))
    if device_type not in backends:
        raise AdaptationError(
            f"Expected a process group that exchanges tensors on {device_type}, got {dist.get_backend()}. Use 'gloo' "
            "for the CPU and 'nccl' for CUDA."
        )
