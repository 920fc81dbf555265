"""Choose batches that fit into the memory of a GPU, once and before the first step.

A run should not fail because of the default batch size. So one training step is tried, and batches are halved until
that step fits. The decision is final: a checkpoint stores the size, and a resumed run uses the stored size, whatever
memory is free then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from shiftmend.accelerate.precision import Precision
from shiftmend.engine.method import Method, Stage, compute_loss
from shiftmend.engine.modes import enter_adapting_modes, hold_layer_options, unfreeze
from shiftmend.errors import AdaptationError
from shiftmend.inputs.feed import Feed
from shiftmend.introspection.call import call_model
from shiftmend.introspection.model_state import restore, snapshot
from shiftmend.introspection.modes import preserve_modes
from shiftmend.introspection.taps import Tap, attach_taps
from shiftmend.profiles.profile import Profile
from shiftmend.utils.processes import of_first_process, world_size
from shiftmend.utils.tensor_tree import Inputs

logger = logging.getLogger(__name__)
logger.addFilter(of_first_process)

Step = Callable[[Inputs], None]
"""A training step on one batch that leaves the model unchanged."""

MAX_RESERVED_SHARE = 0.25
"""Largest share of torch's GPU memory that a trial step may leave reserved. More is released, because a CUDA graph
cannot use memory of another stream, and a large block with a small tensor in it cannot be reused."""


def can_run_out(device: torch.device) -> bool:
    """Tell whether a step on a device may run out of memory without ending the process, as on CUDA."""
    return device.type == "cuda"


def fit_batch_size(feed: Feed, step: Step, smallest: int = 1) -> int:
    """Halve the batches of a feed until a training step fits into memory, unless a batch size was given.

    A warning is logged if batches are halved. In a process group the size is kept, because each process knows only its
    own memory.

    Args:
        feed: The target data. Its batch size is changed.
        step: One training step, from `make_trial_step`.
        smallest: Smallest number of samples in a batch.

    Returns:
        The batch size of the feed.

    Raises:
        AdaptationError: If not even a step on `smallest` samples fits.
    """
    if not feed.may_resize or not can_run_out(feed.device) or world_size() > 1:
        return feed.batch_size
    wanted = size = min(feed.batch_size, feed.samples)
    while not _fits(step, feed, size):
        if size // 2 < max(1, smallest):
            raise AdaptationError(
                f"Expected enough memory on {feed.device} for a training step, got too little for a batch of {size}. "
                "Try autocast=True, smaller inputs, or device='cpu'."
            )
        size //= 2
    if size < wanted:
        feed.resize(size)
        logger.warning(
            "a training step on %d samples does not fit into the memory of %s; going on with batches of %d",
            wanted,
            feed.device,
            size,
        )
    return feed.batch_size


def make_trial_step(
    model: nn.Module,
    profile: Profile | None,
    method: Method,
    stages: list[Stage],
    taps: Mapping[str, Tap],
    precision: Precision,
) -> Step:
    """Make a step that needs as much memory as the largest step of a run, and changes nothing.

    Args:
        model: The model to adapt.
        profile: The source's profile, on the device.
        method: The method.
        stages: The stages of the method; the step uses the stage with the most trained values.
        taps: Taps whose activations the objective reads.
        precision: A context manager for the forward pass.
    """
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters(remove_duplicate=False)}
    largest = max(stages, key=lambda stage: sum(sizes[name] for name in stage.parameters))

    def step(batch: Inputs) -> None:
        trains = bool(largest.parameters)
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(trains),
            _undo(model, batch.device),
            hold_layer_options(model, method.dropout),
            attach_taps(model, taps) as recorder,
        ):
            trained = unfreeze(model, largest)
            enter_adapting_modes(model, method.dropout)
            with precision():
                call_model(model, batch)
            activations = recorder.read()
            if not trains:
                return
            # The optimiser's state per parameter, such as momentum.
            state = [torch.empty_like(parameter) for parameter in trained]
            if method.by_sample:
                # The real targets are computed later, by a pass over all samples.
                total = torch.stack([values.float().sum() for values in activations.values()]).sum()
            else:
                objective = method.objective(profile, batch.device)
                if objective is None:
                    return
                _, total = compute_loss(objective, activations, largest.name)
            total.backward()
            del state

    return step


def _fits(step: Step, feed: Feed, size: int) -> bool:
    try:
        step(feed.first(size))
    except torch.OutOfMemoryError:
        fits = False
    else:
        fits = True
    # Outside of `except`, because the exception refers to the tensors of the step.
    if feed.device.type == "cuda":
        _, total = torch.cuda.mem_get_info(feed.device)
        allowed = torch.cuda.get_per_process_memory_fraction(feed.device) * total
        if not fits or torch.cuda.memory_reserved(feed.device) > MAX_RESERVED_SHARE * allowed:
            torch.cuda.empty_cache()
    return fits


@contextmanager
def _undo(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore values, modes, gradients and flags of a model afterwards, and all random number generators."""
    flags = [(parameter, parameter.requires_grad, parameter.grad) for parameter in model.parameters()]
    before = snapshot(model)
    devices = [device] if device.type == "cuda" else []
    try:
        with preserve_modes(model), torch.random.fork_rng(devices=devices):
            yield
    finally:
        for parameter, flag, gradient in flags:
            parameter.requires_grad_(flag)
            parameter.grad = gradient
        restore(model, before)
