"""What an adaptation is given: a model, its profile and data, read and checked once, however many runs follow."""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shiftmend.devices import resolve_device, room_on
from shiftmend.distributed import of_first_process, warn_if_apart, world_size
from shiftmend.errors import AdaptationError
from shiftmend.feeds import Feed
from shiftmend.fingerprints import InputSummary
from shiftmend.methods import METHODS, Method
from shiftmend.methods.contract import facts_of, taps_of
from shiftmend.profiles import Profile, as_profile
from shiftmend.settings import Settings
from shiftmend.taps import unwrap
from shiftmend.tracing import trainable

logger = logging.getLogger(__name__)
logger.addFilter(of_first_process)


@dataclass(frozen=True)
class Given:
    model: nn.Module
    profile: Profile | None
    feed: Feed

    @staticmethod
    def of(
        model: nn.Module,
        target: Any,
        profile: Profile | str | os.PathLike[str] | None,
        method: Method,
        settings: Settings,
        fits: bool | None = None,
    ) -> Given:
        """Nothing is read for a method that cannot be run.

        `fits`: whether an earlier process, of which this one takes up a run, found room for what a loader gives. Kept
        data is stepped through in another order than a stream, so that is no longer a matter of what is free now.
        """
        warn_if_apart()
        facts_of(method)  # refuses what is no method
        if world_size() > 1 and not method.several_processes:
            able = ", ".join(name for name, kind in METHODS.items() if kind.several_processes)
            raise AdaptationError(
                f"{method.name} works in one process only, and these are {world_size()}: its loss needs the whole of a "
                f"batch; use one process, or one of {able}"
            )
        model = unwrap(model)
        profile = fitting_profile(profile, model, method)
        refuse_broken(model)
        place = resolve_device(settings.device, model)
        limit = None if fits is None else 2 * room_on(place) if fits else 0  # room is less than half of what is free
        feed = Feed(
            target,
            batch_size=settings.batch_size,
            device=place,
            preprocess=settings.preprocess,
            resident=settings.resident,
            limit=limit,
            what="target data",
        )
        if feed.one_sided:
            logger.warning(
                "the target data streams in a fixed order: if it is sorted, batches are one-sided; use shuffle=True"
            )
        return Given(model, profile, feed)

    @functools.cached_property
    def summary(self) -> InputSummary:
        """Of the target's inputs; when it is first asked for, what the source's inputs were not like is warned of."""
        found = InputSummary.of(self.feed.batches())
        if self.profile is not None:
            self.profile.check_inputs(found)
        return found


def fitting_profile(
    profile: Profile | str | os.PathLike[str] | None, model: nn.Module, method: Method
) -> Profile | None:
    """The profile, read if a file is named, and checked: it fits the model, and is there if the method needs one."""
    profile = None if profile is None else as_profile(profile)
    if profile is None and method.needs_profile:
        raise AdaptationError(f"method {method.name!r} needs a profile of the source: make one with shiftmend.profile")
    if profile is not None:
        missing = [name for name in taps_of(method, profile) if name not in profile.taps]
        if missing:
            raise AdaptationError(f"the profile has no tap {missing[0]!r}; it has {', '.join(profile.taps)}")
        profile.check_architecture(model)
        profile.check_weights(model)
    return profile


def refuse_broken(model: nn.Module) -> None:
    """Refuse weights that make every loss NaN, for which the learning rate would be blamed later."""
    for name, parameter in model.named_parameters():
        if not trainable(parameter):
            continue
        value = parameter.detach()
        # a mask that is kept among the parameters may hold infinities
        bad = ~torch.isfinite(value) if parameter.requires_grad else torch.isnan(value)
        if bool(bad.any()):
            raise AdaptationError(
                f"the model's weights are NaN or infinite in {name!r} before anything is adapted; load those of a "
                "model that works"
            )
