"""The mathematics: soft histograms of activations and divergences between them.

Pure functions over tensors; no model, no file. Equation numbers are those of the paper: (1) is the normalised
bin count, (2) the alignment loss, (3) the KL divergence and (4) the soft-binning function of its appendix A.
"""

from __future__ import annotations

import functools
import math
import numbers
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from shiftmend.checks import brief, check_known, is_whole
from shiftmend.errors import ShiftmendError

Layout = Literal["reference", "paper"]
Form = Literal["auto", "exact", "logistic"]
Divergence = Literal["psi", "symmetric-kl", "kl-source-target", "kl-target-source"]

MOST_INNER = 1024
EPSILON = 1e-8
"""Added to every probability inside a logarithm, as the public reference implementation does."""

FORM_TOLERANCE = 1e-4
"""`form="auto"` takes the logistic form only where each bin probability is this close to the exact one."""

RELATIVE_RANGE = 1e-4
"""A unit whose range is below this share of its magnitude counts as constant: rounding would shape its bins."""

_SMALL_ON_GPU = 1 << 22
_CHUNK = {"cpu": 1 << 17, "other": 1 << 26}  # elements worked on at once: a CPU core's cache, a share of a GPU


@dataclass(frozen=True)
class Bins:
    """How a range is cut: number of bins, what that number counts, and how soft the edges are.

    Both layouts have equal inner bins over the source range and one open bin at either end, which catches what
    lies outside it. `layout="paper"` counts all of them (appendix A: B bins, B - 1 cut points from 0 to 1, so
    B - 2 inner ones); `layout="reference"` counts the inner ones, so that 8 bins are 8 + 2.
    """

    count: int = 8
    layout: Layout = "reference"
    temperature: float = 0.01

    def __post_init__(self) -> None:
        check_known(self.layout, get_args(Layout), "bin layout")
        if not is_whole(self.count) or not 1 <= self.inner <= MOST_INNER:
            outer = 2 if self.layout == "paper" else 0
            raise ShiftmendError(
                f"the number of bins in the {self.layout} layout must be a whole number from {1 + outer} to "
                f"{MOST_INNER + outer}, got {brief(self.count)}"
            )
        given: Any = self.temperature
        real = isinstance(given, numbers.Real) and not isinstance(given, bool)
        if not (real and math.isfinite(given) and given > 0):
            raise ShiftmendError(f"the temperature must be a positive number, got {brief(given)}")
        object.__setattr__(self, "count", int(self.count))
        object.__setattr__(self, "temperature", float(given))

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
    """Which units varied enough on the source to have a histogram; dead and constant ones did not."""
    extent = high - low
    magnitude = torch.maximum(low.abs(), high.abs())
    return (extent > RELATIVE_RANGE * magnitude) & (extent > torch.finfo(low.dtype).tiny / EPSILON)


def scales(low: Tensor, high: Tensor) -> Tensor:
    """One over the range of a usable unit, 0 for the others."""
    usable = usable_units(low, high)
    return torch.where(usable, 1 / torch.where(usable, high - low, 1.0), 0.0)


def soft_histogram(
    values: Tensor, low: Tensor, high: Tensor, bins: Bins, *, form: Form = "auto", scale: Tensor | None = None
) -> Tensor:
    """Normalised soft bin counts `[D, B]` of `values` `[N, D]`: equations (1) and (4).

    `low` and `high` `[D]` are the source range of each unit. Computed in float32, or in float64 for float64 values,
    also under autocast and for half-precision values. Two forms give it. `exact` is the softmax of the paper.
    `logistic` uses that neighbouring bin logits differ by (x - c) / temperature at the cut c between them: where bins
    are wide against the temperature, a value shares its mass with its nearest neighbours only and the mass beyond a
    cut is the logistic function of that difference. No `N x D x B` tensor is built, forward or backward.
    `auto` chooses the second only where it is within `FORM_TOLERANCE` (and not for small batches on a GPU). On CUDA
    it takes kernels of our own instead, see `kernels.py`.
    Units that are not usable get a finite, meaningless row. `scale` is what `scales` gives, for those who have it.
    """
    if values.ndim != 2 or values.shape[0] == 0:
        raise ShiftmendError(f"a soft histogram takes values [samples, units], got {list(values.shape)}")
    if low.shape != values.shape[1:] or high.shape != low.shape:
        raise ShiftmendError(
            f"the ranges are of {low.shape[0] if low.ndim else 0} units but the values have {values.shape[1]}"
        )
    check_known(form, get_args(Form), "form")
    if form == "auto":
        from shiftmend import kernels

        if kernels.fit(values, bins):
            low, high = (given.to(values.device, torch.float32) for given in (low, high))
            scale = scales(low, high) if scale is None else scale.to(low)
            return kernels.soft_histogram(values, low, scale, bins)
        form = _choose(values, bins)
    with torch.autocast(device_type=values.device.type, enabled=False):
        work = values if values.dtype in (torch.float32, torch.float64) else values.float()
        low, high = low.to(work), high.to(work)
        scale = scales(low, high) if scale is None else scale.to(work)
        if form == "exact":
            return _exact(work, low, scale, bins)
        counts: Tensor = _Logistic.apply(work, low, scale, bins)
        return counts


def _choose(values: Tensor, bins: Bins) -> Form:
    """The logistic form where it is close enough, except for small batches on a GPU, where launches are what costs."""
    few_launches = values.device.type == "cuda" and values.numel() * bins.total <= _SMALL_ON_GPU
    return "exact" if few_launches or logistic_error(bins) > FORM_TOLERANCE else "logistic"


def soft_assignment(unit_values: Tensor, bins: Bins) -> Tensor:
    """u(x) of equation (4) for values already scaled to [0, 1]: a new last axis of B bin probabilities."""
    cuts = _cuts(bins, unit_values)
    weights = torch.arange(1, bins.total + 1, dtype=unit_values.dtype, device=unit_values.device)
    offsets = torch.cat([cuts.new_zeros(1), -cuts.cumsum(0)])
    return torch.softmax((unit_values.unsqueeze(-1) * weights + offsets) / bins.temperature, dim=-1)


def _cuts(bins: Bins, like: Tensor) -> Tensor:
    return torch.arange(bins.inner + 1, dtype=like.dtype, device=like.device) / bins.inner


def _unit(values: Tensor, low: Tensor, scale: Tensor) -> Tensor:
    """Scale to the source range; far outside it all mass is in an outer bin, so the clamp changes nothing."""
    return ((values - low) * scale).clamp(-1e3, 1e3)


def _rows_at_once(values: Tensor, width: int) -> int:
    return max(1, _CHUNK["cpu" if values.device.type == "cpu" else "other"] // max(1, width))


def _exact(values: Tensor, low: Tensor, scale: Tensor, bins: Bins) -> Tensor:
    total = values.new_zeros(values.shape[1], bins.total)
    for rows in values.split(_rows_at_once(values, values.shape[1] * bins.total)):
        total = total + soft_assignment(_unit(rows, low, scale), bins).sum(0)
    return total / values.shape[0]


class _Logistic(torch.autograd.Function):
    """Bin masses as products of logistic functions; keeps only its input for the backward pass.

    With s(c) the logistic function of (x - c) / temperature, the mass between neighbouring cuts a < b is
    s(a) - s(b) = s(a) (1 - s(b)) (1 - exp(-(b - a) / temperature)). The product is what is computed: the difference
    would lose the small masses, inside the logarithm of a divergence, to cancellation.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, low: Tensor, scale: Tensor, bins: Bins) -> Tensor:
        masses = values.new_zeros(bins.total, values.shape[1])
        between = -math.expm1(-1 / (bins.inner * bins.temperature))
        for rows in values.split(_rows_at_once(values, values.shape[1])):
            logits = _unit(rows, low, scale).div_(bins.temperature)
            above = torch.ones((), dtype=values.dtype, device=values.device)  # everything lies above minus infinity
            for cut, position in enumerate(_positions(bins)):
                beyond = torch.sigmoid(logits - position)
                masses[cut] += torch.addcmul(above, above, beyond, value=-1).sum(0)
                above = beyond
            masses[-1] += above.sum(0)
        masses[1:-1] *= between
        ctx.save_for_backward(values, low, scale)
        ctx.bins = bins
        return masses.div_(values.shape[0]).T.contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        values, low, scale = ctx.saved_tensors
        bins: Bins = ctx.bins
        (gradient,) = gradients
        # Raising a value by dx moves mass sigmoid'(.) dx / temperature across each cut, from the bin below it.
        steps = (gradient[:, 1:] - gradient[:, :-1]).T * (scale / (bins.temperature * values.shape[0]))
        result = torch.zeros_like(values)
        size = _rows_at_once(values, values.shape[1])
        for rows, out in zip(values.split(size), result.split(size), strict=True):
            logits = _unit(rows, low, scale).div_(bins.temperature)
            for cut, position in enumerate(_positions(bins)):
                mass = torch.sigmoid(logits - position)
                out.addcmul_(mass.sub_(mass * mass), steps[cut])
        return result, None, None, None


@functools.cache
def _positions(bins: Bins) -> tuple[float, ...]:
    return tuple(cut / bins.inner / bins.temperature for cut in range(bins.inner + 1))


@functools.cache
def logistic_error(bins: Bins) -> float:
    """Largest error of a bin probability in the logistic form, over a fine grid of values, in float64."""
    grid = torch.linspace(-0.5, 1.5, 64 * bins.inner + 1, dtype=torch.float64)
    above = torch.sigmoid((grid.unsqueeze(1) - _cuts(bins, grid)) / bins.temperature)
    edges = torch.cat([torch.ones_like(above[:, :1]), above, torch.zeros_like(above[:, :1])], dim=1)
    return float((edges[:, :-1] - edges[:, 1:] - soft_assignment(grid, bins)).abs().max())


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
    less: 0.65 to 0.8 of it was measured, so that up to a third of a floor goes unnoticed.
    """
    return (bins.total - 1) * (1 / source_samples + 1 / target_samples) / math.log(bins.total)
