"""Compare profiles by all that their files hold."""

from __future__ import annotations

import torch

from shiftmend.profiles.profile import Profile


def same(a: Profile, b: Profile) -> bool:
    """Say if two profiles hold the same statistics, to the last bit, of the same taps."""
    return (
        list(a.statistics) == list(b.statistics)
        and all(
            (one.kind, one.facts()) == (other.kind, other.facts())
            and all(torch.equal(tensor, other.tensors()[part]) for part, tensor in one.tensors().items())
            for one, other in zip(a.statistics.values(), b.statistics.values(), strict=True)
        )
        and all(torch.equal(a.slices[name].projector.weight, b.slices[name].projector.weight) for name in a.slices)
        and all(torch.equal(a.slices[name].projector.offset, b.slices[name].projector.offset) for name in a.slices)
        and [one.histogram.bins for one in a.slices.values()] == [one.histogram.bins for one in b.slices.values()]
        and torch.equal(a.mean, b.mean)
        and torch.equal(a.deviation, b.deviation)
        and (a.specs, a.preset, a.bins, a.architecture) == (b.specs, b.preset, b.bins, b.architecture)
        and (a.weights, a.library) == (b.weights, b.library)
    )
