"""`verify`: are a model's features on the target distributed as at home?"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from shiftmend.inputs.feed import Feed, Preprocess
from shiftmend.introspection.validate import check_takes_each, unwrap
from shiftmend.passes.evaluation_pass import run_pass, without_labels
from shiftmend.profiles.fingerprints import InputSummary
from shiftmend.profiles.profile import Profile, as_profile
from shiftmend.utils.devices import placed, resolve_device
from shiftmend.utils.progress import Progress, progress_bar
from shiftmend.utils.rng import rolled
from shiftmend.verification.signals import VERIFIED, Tally
from shiftmend.verification.verdict import Verification


def verify(
    model: nn.Module,
    target: Any,
    profile: Profile | str | os.PathLike[str],
    *,
    batch_size: int | None = None,
    preprocess: Preprocess | None = None,
    device: str | torch.device = "auto",
    progress: Progress = None,
) -> Verification:
    """Judge without labels whether the features of a model, adapted or not, are distributed as at home.

    Inputs that seem to be preprocessed otherwise than at the source are warned of, as in `adapt`. Other weights are
    not, because a mended model rightly has them.

    Args:
        model: The model to judge. It runs in eval mode and gets its own modes back.
        target: A tensor, an array, a `Dataset` or a `DataLoader`, of inputs or of (inputs, anything).
        profile: The source's profile, or the name of its file.
        batch_size: Samples in a batch.
        preprocess: Called with each batch on the device, before the model.
        device: Where to compute.
        progress: True shows a progress bar, False does not, None does so on a terminal.

    Returns:
        The divergences and the verdict that follows from them.

    Raises:
        ShiftmendError: If the model, the data or the profile cannot be used together.

    Example:
        >>> import torch, shiftmend
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
        >>> profile = shiftmend.profile(model, torch.randn(2000, 4))
        >>> shiftmend.verify(model, torch.randn(2000, 4) + 2, profile).verdict
        'not restored'
    """
    model = unwrap(model)
    profile = as_profile(profile)
    profile.check_architecture(model)
    place = resolve_device(device, model)
    feed = Feed(target, batch_size=batch_size, device=place, preprocess=preprocess, what="target data")
    with (
        placed(model, place),
        rolled(place, lambda: check_takes_each(model, feed.kinds(2))),
        progress_bar(progress, "verify", feed.known) as bar,
    ):
        profile.check_inputs(InputSummary.of(feed.batches()))
        feed.heard = bar.advance
        tally = Tally(profile.to(place))
        taps = {name: profile.specs[name] for name in VERIFIED}
        run_pass(
            model,
            without_labels(feed.batches()),
            lambda seen: tally.update(seen.activations, len(seen.inputs)),
            taps=taps,
        )
        with torch.no_grad():
            return tally.verification()
