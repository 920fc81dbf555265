"""The mathematics: soft histograms of activations and divergences between them.

Pure functions over tensors; no model, no file. Equation numbers are those of the paper: (1) is the normalised
bin count, (2) the alignment loss, (3) the KL divergence and (4) the soft-binning function of its appendix A.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shiftmend.errors import ShiftmendError
from shiftmend.utils.checks import brief, check_known, is_real, is_whole

Layout = Literal["reference", "paper"]


Divergence = Literal["psi", "symmetric-kl", "kl-source-target", "kl-target-source"]


MOST_INNER = 1024


SHARP = 0.01
"""The paper's temperature. The slices that verify have it, however soft the bins of a profile are otherwise: a softer
one makes every divergence smaller, and a verdict must not depend on it."""


SOFT = 0.05
"""For networks without BatchNorm, whose features may lie where sharp bins give no gradient; measured by
`benchmarks/temperatures.py`."""


COLDEST, HOTTEST = 1e-30, 1e30
"""Temperatures that float32 can reckon with; these are as good as hard bins and as no bins at all."""


EPSILON = 1e-8
"""Added to every probability inside a logarithm, as the public reference implementation does."""


RELATIVE_RANGE = 1e-4
"""A unit whose range is below this share of its magnitude counts as constant: rounding would shape its bins."""


_FAR = 80.0
"""Weights below exp(-80), 1e-35, are taken for that: none would count, and denormal numbers are slow."""


_CHUNK = {"cpu": 1 << 18, "other": 1 << 24}
"""Shares worked on at once: by each thread, in the cache of its core; by a GPU."""


@dataclass(frozen=True)
class Bins:
    """How a range is cut: number of bins, what that number counts, and how soft the edges are.

    Both layouts have equal inner bins over the source range and one open bin at either end, which catches what
    lies outside it. `layout="paper"` counts all of them (appendix A: B bins, B - 1 cut points from 0 to 1, so
    B - 2 inner ones); `layout="reference"` counts the inner ones, so that 8 bins are 8 + 2. The temperature is the
    paper's unless it is named, for a network without BatchNorm too.
    """

    count: int = 8
    layout: Layout = "reference"
    temperature: float = SHARP

    def __post_init__(self) -> None:
        check_known(self.layout, get_args(Layout), "bin layout")
        if not is_whole(self.count) or not 1 <= self.inner <= MOST_INNER:
            outer = 2 if self.layout == "paper" else 0
            raise ShiftmendError(
                f"the number of bins in the {self.layout} layout must be a whole number from {1 + outer} to "
                f"{MOST_INNER + outer}, got {brief(self.count)}"
            )
        given: Any = self.temperature
        if not (is_real(given) and COLDEST <= given <= HOTTEST):
            raise ShiftmendError(
                f"the temperature must be a number from {COLDEST:g} to {HOTTEST:g}, got {brief(given)}"
            )
        object.__setattr__(self, "count", int(self.count))
        object.__setattr__(self, "temperature", float(given))

    def at(self, temperature: float) -> Bins:
        """The same cuts, softer or sharper."""
        return replace(self, temperature=temperature)

    @property
    def total(self) -> int:
        """B: all bins, the two outer ones included."""
        return self.count if self.layout == "paper" else self.count + 2

    @property
    def inner(self) -> int:
        """Equal bins between the lowest and the highest source value."""
        return self.total - 2


def as_bins(given: Any, default: Bins) -> Bins:
    """Bins as a caller gave them, or the default; a number alone is refused, since it does not say what it counts."""
    if given is None:
        return default
    if not isinstance(given, Bins):
        example = f"Bins({given})" if is_whole(given) else "Bins(8)"
        raise ShiftmendError(f"bins is {brief(given)}, expected shiftmend.Bins, e.g. bins={example}")
    return given


def as_samples(activations: Tensor, channel_axis: int = 1) -> Tensor:
    """View activations as `[samples, units]`: each position of a feature map is a sample of its channel.

    >>> as_samples(torch.zeros(4, 16, 8, 8)).shape
    torch.Size([256, 16])
    """
    if activations.ndim == 1:
        return activations.unsqueeze(1)
    if activations.ndim == 2 and channel_axis in (1, -1):
        return activations
    return activations.movedim(channel_axis, -1).flatten(0, -2)


def usable_units(low: Tensor, high: Tensor) -> Tensor:
    """Which units varied enough on the source to have a histogram; constant ones, and infinite ranges, did not."""
    extent = high - low
    magnitude = torch.maximum(low.abs(), high.abs())
    return (extent > RELATIVE_RANGE * magnitude) & (extent > torch.finfo(low.dtype).tiny / EPSILON) & extent.isfinite()


def scales(low: Tensor, high: Tensor) -> Tensor:
    """One over the range of a usable unit, 0 for the others."""
    usable = usable_units(low, high)
    return torch.where(usable, 1 / torch.where(usable, high - low, 1.0), 0.0)


def soft_histogram(values: Tensor, low: Tensor, high: Tensor, bins: Bins, *, scale: Tensor | None = None) -> Tensor:
    """Normalised soft bin counts `[D, B]` of `values` `[N, D]`: equations (1) and (4).

    `low` and `high` `[D]` are the source range of each unit. Computed in float32, or in float64 for float64 values,
    also under autocast and for half-precision values. Of the shares `N x D x B` only some rows exist at a time, forward
    and backward; on CUDA none do, see `kernels.py`.
    Units that are not usable get a finite, meaningless row. `scale` is what `scales` gives, for those who have it.
    """
    if values.ndim != 2 or values.shape[0] == 0:
        raise ShiftmendError(f"a soft histogram takes values [samples, units], got {list(values.shape)}")
    if low.shape != values.shape[1:] or high.shape != low.shape:
        raise ShiftmendError(
            f"the ranges are of {low.shape[0] if low.ndim else 0} units but the values have {values.shape[1]}"
        )
    from shiftmend.stats.cuda import kernels

    if kernels.fit(values, bins):
        low, high = (given.to(values.device, torch.float32) for given in (low, high))
        scale = scales(low, high) if scale is None else scale.to(low)
        return kernels.soft_histogram(values, low, scale, bins)
    with torch.autocast(device_type=values.device.type, enabled=False):
        work = values if values.dtype in (torch.float32, torch.float64) else values.float()
        low, high = low.to(work), high.to(work)
        scale = scales(low, high) if scale is None else scale.to(work)
        counts: Tensor = _Counts.apply(work, low, scale, bins)
        return counts


def soft_assignment(unit_values: Tensor, bins: Bins) -> Tensor:
    """u(x) of equation (4) as the paper has it, for values scaled to [0, 1]: a new last axis of B bin probabilities."""
    cuts = torch.arange(bins.inner + 1, dtype=unit_values.dtype, device=unit_values.device) / bins.inner
    weights = torch.arange(1, bins.total + 1, dtype=unit_values.dtype, device=unit_values.device)
    offsets = torch.cat([cuts.new_zeros(1), -cuts.cumsum(0)])
    return torch.softmax((unit_values.unsqueeze(-1) * weights + offsets) / bins.temperature, dim=-1)


class _Counts(torch.autograd.Function):
    """The sum of all shares; keeps only its input for the backward pass."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, low: Tensor, scale: Tensor, bins: Bins) -> Tensor:
        counts = values.new_zeros(bins.total, values.shape[1])
        parts = values.split(_rows_at_once(values, bins))
        room = _room(parts[0], bins)
        for rows in parts:
            counts += _shares(rows, low, scale, bins, room)[0].sum(1)
        ctx.save_for_backward(values, low, scale)
        ctx.bins = bins
        return counts.div_(values.shape[0]).T.contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        values, low, scale = ctx.saved_tensors
        bins: Bins = ctx.bins
        gradient = gradients[0].T.unsqueeze(1)
        result = torch.empty_like(values)
        size = _rows_at_once(values, bins)
        parts = values.split(size)
        room = _room(parts[0], bins)
        product = torch.empty_like(room[0])
        for rows, out in zip(parts, result.split(size), strict=True):
            # Raising a value by dx raises the share of a bin by share x (bin - mean bin) dx / temperature.
            shares, steps = _shares(rows, low, scale, bins, room)
            mean = torch.mul(shares, steps, out=product[:, : len(rows)]).sum(0)
            shares.mul_(gradient)
            torch.addcmul(steps.mul_(shares).sum(0), mean, shares.sum(0), value=-1, out=out)
        return result.mul_(scale / (bins.temperature * values.shape[0])), None, None, None


Room = tuple[Tensor, Tensor]


def _room(values: Tensor, bins: Bins) -> Room:
    """Memory for the shares of so many values, used again by all parts: to get it anew can take longer than the work.

    An allocator that gives large blocks back to the system gets them as pages that are yet to be filled with zeros.
    """
    shares = values.new_empty(bins.total, *values.shape)
    return shares, torch.empty_like(shares)


def _shares(values: Tensor, low: Tensor, scale: Tensor, bins: Bins, room: Room) -> Room:
    """u(x) of equation (4) `[B, N, D]`, and how many places above the bin that its value lies in each bin is.

    The weight of the bin i places above is exp(i t - i i s / 2) times that of the value's own, with t the distance of
    the value from the middle of its bin and s the width of a bin, both in temperatures. Unlike the logits of a softmax
    these numbers are small where they count, and lose no digits; nor do means over such places, unlike over the bins'
    own numbers: far outside the range the gradient is as small as it should be.
    """
    width = 1 / (bins.inner * bins.temperature)
    far = 1 + _FAR / width
    position = ((values.contiguous() - low) * (scale * bins.inner)).clamp_(-far, bins.inner + far)
    own = position.ceil().clamp_(0, bins.inner + 1)
    away = position.sub_(own).add_(0.5).mul_(width)
    shares, steps = (part[:, : len(values)] for part in room)
    torch.sub(torch.arange(bins.total, dtype=values.dtype, device=values.device).view(-1, 1, 1), own, out=steps)
    torch.add(away, steps, alpha=-width / 2, out=shares).mul_(steps).clamp_(min=-_FAR).exp_()
    return shares.mul_(shares.sum(0).reciprocal_()), steps


def _rows_at_once(values: Tensor, bins: Bins) -> int:
    shares = _CHUNK["cpu"] * torch.get_num_threads() if values.device.type == "cpu" else _CHUNK["other"]
    return max(1, shares // max(1, values.shape[1] * bins.total))


def kl(p: Tensor, q: Tensor) -> Tensor:
    """D_KL(p || q) of equation (3) over the last axis, with `EPSILON` inside the logarithms."""
    return (p * (torch.log(p + EPSILON) - torch.log(q + EPSILON))).sum(-1)


def symmetric_kl(p: Tensor, q: Tensor) -> Tensor:
    """D_SKL of equation (2): half of either direction."""
    return 0.5 * ((p - q) * (torch.log(p + EPSILON) - torch.log(q + EPSILON))).sum(-1)


def psi(p: Tensor, q: Tensor) -> Tensor:
    """The reference implementation's index: both directions, no half, logarithms to the base of the bin count."""
    return symmetric_kl(p, q) * (2 / math.log(p.shape[-1]))


def divergence(source: Tensor, target: Tensor, kind: Divergence = "psi") -> Tensor:
    """Divergence of each unit `[D]` between two tables of normalised counts `[D, B]`, source first."""
    if source.shape != target.shape:
        raise ShiftmendError(f"tables of counts differ in shape: {list(source.shape)} and {list(target.shape)}")
    check_known(kind, get_args(Divergence), "divergence")
    match kind:
        case "psi":
            return psi(source, target)
        case "symmetric-kl":
            return symmetric_kl(source, target)
        case "kl-source-target":
            return kl(source, target)
        case "kl-target-source":
            return kl(target, source)


def sampling_floor(bins: Bins, source_samples: float, target_samples: float) -> float:
    """PSI that two samples of one distribution show by chance alone: about (B - 1)(1/n + 1/m) / ln B.

    The expectation of Pearson's chi-square, to which both KL directions tend together. Soft bins and empty ones show
    less, rare ones in a long tail do not: 0.7 to 1.0 of it was measured on average, so that up to a third of a floor
    goes unnoticed. A single unit varies about that as chance does, from a tenth to three times as much.
    """
    return (bins.total - 1) * (1 / source_samples + 1 / target_samples) / math.log(bins.total)
