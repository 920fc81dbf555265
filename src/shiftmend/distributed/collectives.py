"""Several processes that work as one: what `torchrun` starts adapts as a single process would on the joined batches.

Every process holds the same model and the same data and runs its share of each batch. What is computed from a batch
(the statistics of BatchNorm, a histogram) is joined before it is used, and gradients are summed before a step, so that
parameters and buffers stay the same everywhere. All of that happens in blocks of `together()`, which every process
enters; outside them, without a process group, or in one of a single process, every function here leaves its input as
it is.

The rule behind all gradients: what is differentiated is the sum of the losses of all processes. A loss that was
computed from joined numbers, and is thus the same everywhere, is divided by `world_size()`: see `backward`.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shiftmend.errors import AdaptationError
from shiftmend.utils.processes import rank, world_size

if dist.is_available():
    # Optimisers import it, and its functions have the group of that moment for a default: imported while there is one,
    # they keep it and its threads beyond `destroy_process_group`, and one that needs Python at exit aborts the process.
    import torch.distributed.nn


logger = logging.getLogger(__name__)


_together = 0
"""How many blocks of `together()` are open, in whichever threads."""


@contextmanager
def together() -> Iterator[None]:
    """In the block the processes work as one, and all of them must be in it; outside, each is by itself.

    So the first process alone may evaluate a model in between. A plain global rather than a context variable: the
    backward pass on CUDA runs in threads of its own.
    """
    global _together
    _together += 1
    try:
        yield
    finally:
        _together -= 1


def active() -> bool:
    """Whether this process works together with others just now."""
    return _together > 0 and world_size() > 1


@contextmanager
def started_by_torchrun() -> Iterator[None]:
    """The process group that `torchrun` has prepared, if it started this process, for the length of the block.

    Processes that are done wait for each other: one that leaves while another still works may abort, and `torchrun`
    would then kill the other before its files are written.
    """
    if not _apart():
        yield
        return
    cuda = dist.is_nccl_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def warn_if_apart() -> None:
    """Say so where `torchrun` has started several processes that do not know of each other."""
    if _apart():
        logger.warning(
            "WORLD_SIZE is %s, but there is no process group, so that each process does the whole work by itself; call "
            "torch.distributed.init_process_group() first",
            os.environ["WORLD_SIZE"],
        )


def _apart() -> bool:
    several = os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")
    return several and dist.is_available() and not dist.is_initialized()


def share(batch: Tensor) -> Tensor:
    """This process's contiguous part of a batch, or of the indices of one; the first parts may be larger by one."""
    if not active():
        return batch
    if len(batch) < world_size():
        raise AdaptationError(
            f"a batch of {len(batch)} cannot be shared by {world_size()} processes, each of which needs at least one "
            "sample; use larger batches or fewer processes"
        )
    return batch.tensor_split(world_size())[rank()]


def shares(batches: Iterable[Tensor]) -> Iterator[Tensor]:
    """This process's part of each batch, or of the indices of one; one too small joins the one before if it can."""
    if not active():
        yield from batches
        return
    held: Tensor | None = None
    for batch in batches:
        small = held is not None and len(batch) < world_size() and held.shape[1:] == batch.shape[1:]
        if held is not None:
            yield share(torch.cat([held, batch]) if small else held)
        held = None if small else batch
    if held is not None:
        yield share(held)


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
    """The sum over processes, which gradients flow through: that of a value is the sum of what all processes ask."""
    if not active():
        return values
    total: Tensor = _AllSum.apply(values)
    return total


def joined_mean(mean: Tensor, count: int) -> Tensor:
    """The mean over the samples of all processes, from this one's `mean` over `count` of them."""
    if not active():
        return mean
    total = all_sum(torch.cat([(mean * count).reshape(-1), mean.new_full((1,), count)]))
    return (total[:-1] / total[-1].detach()).view(mean.shape)


def gathered(values: Tensor) -> Tensor:
    """What each process has, in the order of their ranks along a new first axis; no gradient flows through it."""
    values = values.detach().contiguous()
    if not active():
        return values.unsqueeze(0)
    rows = [torch.empty_like(values) for _ in range(world_size())]
    dist.all_gather(rows, values)
    return torch.stack(rows)


def joined_range(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest and the highest value `[D]` over all processes. NaN stays NaN, which a reduction would not promise."""
    every = gathered(torch.stack([low, high]))
    return every[:, 0].amin(0), every[:, 1].amax(0)


def joined_moments(count: int, mean: Tensor, squares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean `[D]` and sum of squared deviations from it over all processes, in float64.

    From those of each process, merged in the order of their ranks: all of them get the same bits, and nothing cancels
    where the mean is large.
    """
    units = len(mean)
    wide = torch.float64
    every = gathered(torch.cat([mean.to(wide), squares.to(wide), mean.new_full((1,), count, dtype=wide)]))
    means, spreads, counts = every[:, :units], every[:, units:-1], every[:, -1:]
    total = counts.sum()
    middle = (means * (counts / total)).sum(0)
    return total, middle, (spreads + counts * (means - middle).square()).sum(0)


def everywhere(true_here: bool, device: torch.device) -> bool:
    """Whether something holds on every process."""
    if not active():
        return true_here
    return bool(gathered(torch.tensor(true_here, dtype=torch.uint8, device=device)).all())


def backward(loss: Tensor, parameters: Iterable[Tensor]) -> None:
    """`loss.backward()`, where the loss was computed from joined numbers; gradients become those of all processes."""
    if not active():
        loss.backward()
        return
    (loss / world_size()).backward()
    sum_gradients(parameters)


def sum_gradients(parameters: Iterable[Tensor]) -> None:
    """Sum gradients over processes in place, all of one type and device at once.

    A parameter without a gradient is left out; it has none on the other processes, either, since they run the same.
    """
    if not active():
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


def same_everywhere(digest: str, what: str, device: torch.device | None = None) -> None:
    """Refuse, on every process at once, to work on things that differ: without this they would mix silently.

    `device` is where the work will be: the process group must be able to talk there.
    """
    with together():
        if not active():
            return
        own = torch.tensor(list(hashlib.sha256(digest.encode()).digest()), dtype=torch.uint8, device=device)
        try:
            every = gathered(own)
        except RuntimeError as error:
            if "No backend type associated" not in str(error):
                raise
            raise AdaptationError(
                f"the process group ({dist.get_backend()}) cannot exchange tensors on {own.device.type}; initialise it "
                "with 'gloo' to work on the CPU and with 'nccl' to work on CUDA"
            ) from error
    others = [index for index, same in enumerate((every == every[0]).all(1).tolist()) if not same]
    if others:
        raise AdaptationError(
            f"the {what} of process {', '.join(map(str, others))} differs from that of process 0; give every process "
            "the same model and the same data, in the same order"
        )
