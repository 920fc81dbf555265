"""Whether two profiles have counted the same."""

from __future__ import annotations

import torch

from shiftmend.profiles.profile import Profile


def same(a: Profile, b: Profile) -> bool:
    return all(
        torch.equal(getattr(x, part), getattr(y, part)) and x.samples == y.samples
        for x, y in [
            *((a.taps[n], b.taps[n]) for n in a.taps),
            *((a.slices[n].histogram, b.slices[n].histogram) for n in a.slices),
        ]
        for part in ("counts", "low", "high")
    ) and torch.equal(a.mean, b.mean)
