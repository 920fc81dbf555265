"""TODO."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from shiftmend.inputs.feed import Feed, Preprocess
from shiftmend.introspection.modes import modes
from shiftmend.introspection.taps import tapped
from shiftmend.introspection.validate import check_takes_each, unwrap
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
    """Ask of any model, adapted or not, whether its features on the target are distributed as at home.

    `profile` may be the name of its file. Inputs that seem to be preprocessed otherwise than at the source are warned
    of, as in `adapt`; other weights are not, because a mended model rightly has them. `progress` is that of `adapt`.
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
        profile.check_inputs(InputSummary.from_batches(feed.batches()))
        feed.heard = bar.advance
        taps = {name: profile.specs[name] for name in VERIFIED}
        with modes(model), torch.no_grad(), tapped(model, taps) as recorder:
            model.eval()
            tally = Tally(profile.to(place))
            for batch in feed.batches():
                model(batch)
                tally.update(recorder.read(), len(batch))
            return tally.verification()
