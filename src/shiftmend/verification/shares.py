"""`shares`: estimate how frequent the classes are at a site."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shiftmend.errors import DataError
from shiftmend.inputs.feed import Feed, Preprocess
from shiftmend.introspection.model_state import on_device
from shiftmend.introspection.validate import check_model, unwrap
from shiftmend.profiles.profile import Profile, as_profile
from shiftmend.utils.devices import resolve_device
from shiftmend.utils.progress import Progress, progress_bar
from shiftmend.utils.rng import isolate_rng
from shiftmend.verification.class_shares import Shares, estimate_shares
from shiftmend.verification.reading import read, shares_explain
from shiftmend.verification.verify import find_adaptation

OTHER_SHARES_DISTANCE = 0.1
"""Total variation from home above which the shares must explain why features differ from home."""
NOT_EXPLAINED = "these shares do not explain how features differ from home, as behind another device"


def shares(
    model: nn.Module,
    target: Any,
    profile: Profile | str | os.PathLike[str],
    *,
    adaptation: Any = None,
    batch_size: int | None = None,
    preprocess: Preprocess | None = None,
    device: str | torch.device = "auto",
    seed: int = 0,
    progress: Progress = None,
) -> Shares:
    """Estimate how frequent the classes are at a site, without labels.

    The model must make about the same mistakes at the site as at home. If the device changed, pass the adapted model.

    Args:
        model: The model, untouched or adapted.
        target: A tensor, an array, a data frame, a `Dataset` or a `DataLoader`, of inputs or (inputs, ...).
        profile: The profile of the source, rehearsed with labels, or the path of its file.
        adaptation: How the model was adapted, as for `verify`.
        batch_size: Number of samples per batch.
        preprocess: Function applied to each batch of inputs on the device, before the model.
        device: Device to compute on.
        seed: Seed of the bootstrap draws for the intervals.
        progress: Whether to show a progress bar; None shows one on a terminal only.

    Returns:
        The share of each class with a 90 % interval, and reasons if the shares are not reliable.

    Raises:
        ShiftmendError: If the model, the data or the profile cannot be used together.

    Example:
        >>> import torch, shiftmend
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2)).eval()
        >>> with torch.no_grad():
        ...     _ = model[0].weight.copy_(4 * torch.eye(2))
        >>> home, labels = torch.randn(400, 2), torch.arange(400) % 2
        >>> home[torch.arange(400), labels] += 3
        >>> profile = shiftmend.profile(model, home)
        >>> profile = shiftmend.rehearse(model, (home, labels), profile, candidates=["match-mean"], quick=True)
        >>> found = shiftmend.shares(model, home[labels == 0], profile)
        >>> found.values[0] > 0.9
        True
    """
    model, profile = unwrap(model), as_profile(profile)
    profile.check_architecture(model)
    record = profile.rehearsal
    if record is None or not record.confusion.numel():
        raise DataError(
            "Expected a profile that knows the mistakes at home, got one without. Try shiftmend.rehearse with labels."
        )
    place = resolve_device(device, model)
    columns = profile.inputs.columns
    feed = Feed(target, batch_size=batch_size, device=place, preprocess=preprocess, columns=columns, what="target data")

    def probe() -> None:
        check_model(model, feed.examples(2))
        profile.check_taps(model, feed.first(2))

    with (
        on_device(model, place),
        isolate_rng(place, probe),
        progress_bar(progress, "shares", feed.known_samples) as bar,
    ):
        feed.on_batch = bar.advance
        how = find_adaptation(model, profile, adaptation)
        reading = read(model, feed, profile, record, how.temperature)
        free = read(model, feed, profile, record, how.temperature, free_shares=True)
    found = estimate_shares(reading.outputs, record, seed)
    if found.distance > OTHER_SHARES_DISTANCE and not (
        record.by_class and shares_explain(reading, free, record, profile.bins)
    ):
        return replace(found, reasons=(*found.reasons, NOT_EXPLAINED))
    return found
