"""Stale BatchNorm: detect running statistics that differ from the source data, and estimate them anew."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shiftmend.distributed.batch_norm import synchronised
from shiftmend.distributed.collectives import all_processes, check_same, warn_without_process_group
from shiftmend.errors import ProfileError
from shiftmend.inputs.feed import Feed, Preprocess
from shiftmend.introspection.model_state import is_writable
from shiftmend.introspection.modes import enter_eval, find_batch_norms, force_eager
from shiftmend.introspection.validate import check_model, copy_model, unwrap
from shiftmend.passes.evaluation_pass import Observation, run_pass, without_labels
from shiftmend.profiles import fingerprints
from shiftmend.profiles.profile import Profile
from shiftmend.utils.devices import device_of, resolve_device
from shiftmend.utils.processes import of_first_process
from shiftmend.utils.progress import PassProgress, Progress, progress_bar
from shiftmend.utils.rng import isolate_rng
from shiftmend.utils.tensor_tree import Inputs

logger = logging.getLogger(__name__)
logger.addFilter(of_first_process)

MAX_COMPARED = 2048
"""Largest number of samples for the test whether running statistics match the source."""

MIN_COMPARED_BATCH = 32
"""Smallest batch for that test, because the statistics of fewer samples are too noisy."""

STALE_DIVERGENCE, STALE_PER_SAMPLE = 0.07, 14.0
"""Running statistics are stale if the divergences of slices and marginals both exceed 0.07 + 14 / samples. For small
networks on MNIST, models that gained less than 4 points of accuracy by refreshing stayed below: 0.07 with 2,000
samples, 0.2 with 100, 0.43 with 32. Models trained with a large rate up to the end, or with a momentum of 0.01,
exceeded the limit and gained 8 points or more.
"""


def find_tracking(model: nn.Module) -> list[_BatchNorm]:
    """List the BatchNorm layers that keep running statistics."""
    return [norm for norm in find_batch_norms(model) if norm.running_mean is not None]


@contextmanager
def average_from_scratch(model: nn.Module) -> Iterator[None]:
    """Reset BatchNorm's running statistics, and average them over all batches of the `with` block with equal weights.

    Afterwards, the layers keep the new statistics and get back their momentum. The running variance is the mean of the
    batch variances, without the variance between batch means.
    """
    tracking = find_tracking(model)
    before = [norm.momentum for norm in tracking]
    try:
        for norm in tracking:
            norm.reset_running_stats()
            norm.momentum = None  # None makes torch use a cumulative average instead of an exponential one.
        yield
    finally:
        for norm, momentum in zip(tracking, before, strict=True):
            norm.momentum = momentum


def estimate_statistics(model: nn.Module, batches: Iterable[Inputs]) -> None:
    """Replace the running statistics of a model by those of batches, in place and without dropout."""
    with force_eager(model), average_from_scratch(model):
        run_pass(model, without_labels(batches), lambda seen: None, enter_modes=_enter_tracking)


def _enter_tracking(model: nn.Module) -> None:
    """Put BatchNorm layers into train mode and everything else into eval mode."""
    enter_eval(model)
    for norm in find_tracking(model):
        norm.train()


@torch.inference_mode(False)
def refresh_batchnorm(
    model: nn.Module,
    source: Any,
    *,
    batch_size: int | None = None,
    preprocess: Preprocess | None = None,
    device: str | torch.device = "auto",
    progress: Progress = None,
) -> nn.Module:
    """Return a copy of a model with BatchNorm statistics estimated anew on the source data.

    Running statistics can be stale, e.g. if the learning rate, the data or the batch size changed at the end of
    training. The features of such a model in eval mode differ from those that BatchNorm produces at a site while
    adapting. So refresh the model before it is profiled, and use the refreshed model from then on.

    In a process group, every process calls this function with the same model and data, and gets the same result.

    Args:
        model: Any `nn.Module`. It is not changed.
        source: A tensor, an array, a `Dataset` or a `DataLoader`, of inputs or (inputs, ...).
        batch_size: Number of samples per batch; at least 2.
        preprocess: Function applied to each batch of inputs on the device, before the model.
        device: Device to compute on.
        progress: Whether to show a progress bar; None shows one on a terminal only.

    Returns:
        The copy, on the device and in the train and eval modes of the given model.

    Raises:
        ProfileError: If the model has no BatchNorm with running statistics, or if batches are single samples.
        ShiftmendError: If the model or the data cannot be used.

    Example:
        >>> import torch, shiftmend
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)).eval()
        >>> refreshed = shiftmend.refresh_batchnorm(model, torch.randn(256, 2) + 5)
        >>> refreshed[0].running_mean.round(), model[0].running_mean
        (tensor([5., 5.]), tensor([0., 0.]))
    """
    warn_without_process_group()
    model = unwrap(model)
    if not find_tracking(model):
        raise ProfileError("Expected a model with running statistics of BatchNorm, got one without. Use it as it is.")
    place, home = resolve_device(device, model), device_of(model)
    feed = Feed(source, batch_size=batch_size, device=place, preprocess=preprocess, what="source data")
    if (feed.epoch_batch_size or 2) < 2:
        raise ProfileError("Expected batches of at least 2 samples for BatchNorm, got 1. Use larger batches.")
    if feed.never_shuffles:
        logger.warning("The source data comes in a fixed order. If it is sorted, batches are biased. Try shuffle=True.")
    refreshed = copy_model(model).to(place)
    with (
        isolate_rng(place, lambda: check_model(refreshed, feed.examples(2), original=model)),
        progress_bar(progress, "refreshing BatchNorm", None) as bar,
    ):
        check_same(fingerprints.weights(model), "model", place)
        check_same(f"{fingerprints.digest(feed.first(64))} {feed.samples}", "source data", place)
        feed.on_batch = PassProgress(bar, "statistics", feed.known_samples)
        with all_processes(), synchronised(refreshed):
            estimate_statistics(refreshed, (batch for batch, _ in feed.epoch(0, 1)))
    return refreshed.to(home)


def warn_if_stale(model: nn.Module, feed: Feed, profile: Profile) -> None:
    """Log a warning if running statistics clearly differ from the source data; see `measure_staleness`."""
    try:
        found = measure_staleness(model, feed, profile)
    except (RuntimeError, ValueError) as error:
        # Some models run in eval mode but not with batch statistics, e.g. `SyncBatchNorm` on a CPU.
        logger.info("running statistics of BatchNorm could not be compared with those of the data (%s)", error)
        return
    if found is None:
        return
    limit = STALE_DIVERGENCE + STALE_PER_SAMPLE / found["samples"]
    if min(found["slices"], found["marginals"]) > limit:
        logger.warning(
            "The running statistics of BatchNorm are stale: they do not match the source data (divergence of slices "
            "%.3f, expected at most %.3f). Try model = shiftmend.refresh_batchnorm(model, source) before profiling.",
            found["slices"],
            limit,
        )


def measure_staleness(model: nn.Module, feed: Feed, profile: Profile) -> dict[str, float] | None:
    """Measure how far features and logits move if running statistics are replaced by those of the source data.

    The model is changed: it keeps the statistics of at most `MAX_COMPARED` samples.

    Args:
        model: The model that was profiled, on the device of the feed.
        feed: The source data.
        profile: The profile of the model with its own running statistics.

    Returns:
        The divergences `slices` and `marginals` from the profile, and the number of `samples` of the statistics. None
        if batches cannot show them: without running statistics, with small batches, or with data that may be sorted.
    """
    tracking, size = find_tracking(model), feed.epoch_batch_size or 0
    writable = all(norm.running_mean is not None and is_writable(norm.running_mean) for norm in tracking)
    if not tracking or not writable or feed.never_shuffles or size < MIN_COMPARED_BATCH:
        return None
    steps = min(max(1, feed.samples // size), max(1, MAX_COMPARED // size))
    home = profile.to(feed.device)
    slices = home.slices["verification"]
    counter = slices.histogram.new_tracker()
    taps = {name: home.taps[name].new_tracker() for name in ("features", "logits")}

    def count(seen: Observation) -> None:
        for part in slices.projector.project_in_parts(seen.activations["features"]):
            counter.update(part)
        for name, own in taps.items():
            own.update(seen.activations[name])

    with all_processes(), synchronised(model):
        estimate_statistics(model, (batch for batch, _ in feed.epoch(0, 1, steps)))
        batches = without_labels(feed.subset(MAX_COMPARED, 0))
        run_pass(model, batches, count, taps={name: profile.specs[name] for name in taps})
        sliced = counter.reduce_over_processes().divergence(slices.histogram)
        parts = [own.reduce_over_processes().divergence(home.taps[name]) for name, own in taps.items()]
    return {"slices": float(sliced), "marginals": float(sum(parts)), "samples": steps * size}
