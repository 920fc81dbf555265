"""Inputs of a stream, matched to home: a second opinion on the classes behind another device."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from shiftmend.profiles.profile import Profile
from shiftmend.stats.moments import Moments, MomentTracker, find_scale, unit_shape
from shiftmend.utils.tensor_tree import Inputs


class InputMatcher:
    """A linear map that gives the latest inputs of a stream the mean and the deviation of home.

    It is the map of the method `match-moments`, computed over a window of batches.

    Args:
        profile: The source's profile.
        window: Number of latest batches whose moments are matched.
    """

    def __init__(self, profile: Profile, window: int) -> None:
        found = profile.statistics.get("inputs")
        self._home = found if isinstance(found, Moments) else None
        self._window = window
        self._seen: deque[Moments] = deque(maxlen=window)

    def read(self, inputs: Inputs) -> Moments | None:
        """Return the moments of a batch; None if its inputs are not numbers as at home."""
        if self._home is None or not isinstance(inputs, Tensor) or not inputs.is_floating_point():
            return None
        tracker = MomentTracker()
        tracker.update(inputs)
        found = tracker.moments()
        return found if found is not None and len(found.mean) == len(self._home.mean) else None

    def match(self, inputs: Tensor, moments: Moments) -> Tensor:
        """Return the inputs of a batch, matched by its moments and those of the window."""
        assert self._home is not None
        latest = [*self._seen, moments][-self._window :]
        own = Moments.mix(latest, [1.0] * len(latest))
        scale = find_scale(own.variance, self._home.variance.to(own.variance))
        offset = self._home.mean.to(own.mean) - scale * own.mean
        dtype = torch.promote_types(inputs.dtype, torch.float32)
        factor, shift = (part.to(inputs.device, dtype).view(unit_shape(inputs)) for part in (scale, offset))
        return (inputs * factor + shift).to(inputs.dtype)

    def add(self, moments: Moments) -> None:
        """Add the moments of a batch to the window."""
        self._seen.append(moments)


def keeps_classes(inputs: Tensor) -> bool:
    """Return whether matched inputs keep their classes if there are few of them.

    The moments of a channel come from many positions and hardly depend on the classes. Those of a table's columns do.

    Example:
        >>> keeps_classes(torch.zeros(8, 3, 32, 32)), keeps_classes(torch.zeros(8, 20))
        (True, False)
    """
    return inputs.ndim > 2
