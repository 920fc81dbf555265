"""Soft histograms: counts in bins that have a gradient, and how far a batch lies from those of the source.

A hard histogram has no gradient, since a value lies either in a bin or outside of it. A soft histogram shares every
value out among all bins: most of it goes to the bin that the value lies in, a little to the neighbours. The paper
defines the shares of a value x, scaled so that the source range of its unit is [0, 1], by a softmax (its equation (4),
appendix A). With B bins and the cuts c_1 < ... < c_{B-1} between them,

    u(x) = softmax((w x + b) / temperature),  w = (1, 2, ..., B),  b = (0, -c_1, -c_1 - c_2, ...).

Two neighbouring bins get equal shares where x is the cut between them. The lower the temperature, the more of x goes to
its own bin. The normalised count of a bin, equation (1), is the mean of its shares over the samples.

`soft_assignment` is equation (4) as it stands. `soft_histogram` computes equation (1) from a form of (4) that loses no
digits in float32; `_assign` derives it. `Histogram` stores the counts of a source, and the two trackers collect them
over batches: `RangeTracker` in a first pass, `CountTracker` in a second one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shiftmend.distributed.collectives import all_sum, is_distributed, reduce_moments, reduce_range
from shiftmend.errors import ProfileError, ShiftmendError
from shiftmend.stats.cuda import kernels
from shiftmend.stats.divergences import EPSILON, divergence
from shiftmend.stats.gaussians import MarginalGaussian
from shiftmend.stats.statistics import LIKE_HINT, Frame, read_whole_number, register
from shiftmend.utils.checks import brief, check_known, is_real, is_whole
from shiftmend.utils.devices import split_rows, sum_dtype

Layout = Literal["reference", "paper"]


MAX_INNER_BINS = 1024


SHARP_TEMPERATURE = 0.01
"""The paper's temperature. Verification slices always use it: softer bins make every divergence smaller, and a verdict
must not depend on the softness of a profile's other bins."""


SOFT_TEMPERATURE = 0.05
"""Temperature for networks without BatchNorm, whose features may be where sharp bins give no gradient. Measured by
`benchmarks/temperatures.py`."""


MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-30, 1e30
"""Range of temperatures that float32 supports: hard bins at one end, equal shares for all bins at the other."""


MIN_RELATIVE_RANGE = 1e-4
"""Ranges below this fraction of a unit's magnitude count as constant, because rounding would determine the bins."""


MIN_LOG_WEIGHT = -80.0
"""Lower bound of the logarithm of a bin's weight: exp(-80) is negligible, and denormal numbers are slow."""


_SHARES_AT_ONCE = {"cpu": 1 << 18, "other": 1 << 24}
"""Number of shares that are computed at once: per CPU thread, to fit its cache; on a GPU."""


_COUNT_TOLERANCE = 1e-3
"""Tolerated relative error of a row sum, due to float32 counts of millions of samples."""


_outside_inference_mode = torch.inference_mode(False)
"""Context for making cached tensors, since tensors made in inference mode cannot be part of a loss."""


@dataclass(frozen=True)
class Bins:
    """Number, layout and softness of the bins of a soft histogram.

    Both layouts have equal inner bins over the source range of a unit, and one open bin at either end for values
    outside this range. They differ in what `count` means. In `"paper"` it is the number of all bins (appendix A: B bins
    with B - 1 cuts from 0 to 1, so B - 2 inner bins). In `"reference"` it is the number of inner bins: 8 means 8 + 2.

    Args:
        count: The number of bins. A layout must have from 1 to 1,024 inner bins.
        layout: `"reference"` or `"paper"`.
        temperature: The temperature of the softmax, in units of the source range. 0.01 is the paper's.

    Raises:
        ShiftmendError: If the layout is unknown, or a number is out of its range.

    Example:
        >>> Bins(8).total, Bins(8, "paper").total
        (10, 8)
    """

    count: int = 8
    layout: Layout = "reference"
    temperature: float = SHARP_TEMPERATURE

    def __post_init__(self) -> None:
        check_known(self.layout, get_args(Layout), "bin layout")
        if not is_whole(self.count) or not 1 <= self.inner <= MAX_INNER_BINS:
            outer = 2 if self.layout == "paper" else 0
            raise ShiftmendError(
                f"Expected the number of bins in the {self.layout} layout to be whole, from {1 + outer} to "
                f"{MAX_INNER_BINS + outer}, got {brief(self.count)}."
            )
        given: Any = self.temperature
        if not (is_real(given) and MIN_TEMPERATURE <= given <= MAX_TEMPERATURE):
            raise ShiftmendError(
                f"Expected the temperature to be a number from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}, got "
                f"{brief(given)}."
            )
        object.__setattr__(self, "count", int(self.count))
        object.__setattr__(self, "temperature", float(given))

    def with_temperature(self, temperature: float) -> Bins:
        """Return the same bins with softer or sharper edges.

        Args:
            temperature: The new temperature, in units of the source range.

        Returns:
            New bins.

        Raises:
            ShiftmendError: If the temperature is out of range.

        Example:
            >>> Bins(8).with_temperature(0.05)
            Bins(count=8, layout='reference', temperature=0.05)
        """
        return replace(self, temperature=temperature)

    @property
    def total(self) -> int:
        """B: the number of all bins, the two outer ones included."""
        return self.count if self.layout == "paper" else self.count + 2

    @property
    def inner(self) -> int:
        """The number of equal bins between the lowest and the highest source value."""
        return self.total - 2


def check_bins(given: Any, default: Bins) -> Bins:
    """Return the given bins, or the default if None is given.

    Raises:
        ShiftmendError: If `given` is not `Bins`. The same plain number of bins could mean either layout.
    """
    if given is None:
        return default
    if not isinstance(given, Bins):
        example = f"Bins({given})" if is_whole(given) else "Bins(8)"
        raise ShiftmendError(f"Expected bins to be shiftmend.Bins, e.g. {example}, got {brief(given)}.")
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
    """Find the units `[D]` that varied on the source enough for a histogram: neither constant nor infinite."""
    extent = high - low
    magnitude = torch.maximum(low.abs(), high.abs())
    varies = (extent > MIN_RELATIVE_RANGE * magnitude) & (extent > torch.finfo(low.dtype).tiny / EPSILON)
    return varies & extent.isfinite()


def inverse_range(low: Tensor, high: Tensor) -> Tensor:
    """Compute the reciprocal range of each usable unit `[D]`, and 0 for the others."""
    usable = usable_units(low, high)
    return torch.where(usable, 1 / torch.where(usable, high - low, 1.0), 0.0)


def soft_histogram(values: Tensor, low: Tensor, high: Tensor, bins: Bins, *, scale: Tensor | None = None) -> Tensor:
    """Compute the normalised soft counts of equation (1).

    The arithmetic is float32, or float64 for float64 values, also under autocast and for half-precision values. The
    shares `[N, D, B]` never exist as a whole: some rows at a time on the CPU, none on CUDA (see `cuda/kernels.py`).

    Args:
        values: Activations `[N, D]`.
        low: The lowest source value `[D]` of each unit.
        high: The highest source value `[D]` of each unit.
        bins: The B bins.
        scale: `inverse_range(low, high)`, if the caller has already computed it.

    Returns:
        Probabilities `[D, B]`. The row of a unit that is not usable is finite but meaningless.

    Raises:
        ShiftmendError: If the shapes do not fit together.

    Example:
        >>> values = torch.tensor([[0.1], [0.2], [0.9], [7.0]])
        >>> soft_histogram(values, torch.zeros(1), torch.ones(1), Bins(2)).round(decimals=3).abs()
        tensor([[0.0000, 0.5000, 0.2500, 0.2500]])
    """
    if values.ndim != 2 or values.shape[0] == 0:
        raise ShiftmendError(f"Expected values [samples, units] for a soft histogram, got {list(values.shape)}.")
    if low.shape != values.shape[1:] or high.shape != low.shape:
        raise ShiftmendError(
            f"Expected ranges for {values.shape[1]} units, as the values have, got {low.shape[0] if low.ndim else 0}."
        )
    if kernels.supports(values, bins):
        low, high = (given.to(values.device, torch.float32) for given in (low, high))
        scale = inverse_range(low, high) if scale is None else scale.to(low)
        return kernels.soft_histogram(values, low, scale, bins)
    with torch.autocast(device_type=values.device.type, enabled=False):
        work = values if values.dtype in (torch.float32, torch.float64) else values.float()
        low, high = low.to(work), high.to(work)
        scale = inverse_range(low, high) if scale is None else scale.to(work)
        counts: Tensor = _SoftHistogram.apply(work, low, scale, bins)
        return counts


def soft_assignment(unit_values: Tensor, bins: Bins) -> Tensor:
    """Compute the soft bin assignment u(x) of equation (4), exactly as the paper writes it.

    Args:
        unit_values: Values scaled to [0, 1] by the range at the source, of any shape.
        bins: Number, layout and softness of the bins.

    Returns:
        Shares of each value in the B bins, on a new last axis. They sum to 1.
    """
    cuts = torch.arange(bins.inner + 1, dtype=unit_values.dtype, device=unit_values.device) / bins.inner
    weights = torch.arange(1, bins.total + 1, dtype=unit_values.dtype, device=unit_values.device)
    offsets = torch.cat([cuts.new_zeros(1), -cuts.cumsum(0)])
    return torch.softmax((unit_values.unsqueeze(-1) * weights + offsets) / bins.temperature, dim=-1)


def share_out(values: Tensor, low: Tensor, high: Tensor, bins: Bins) -> Iterator[Tensor]:
    """Yield the shares `[B, rows, D]` of some rows of the values `[N, D]` at a time; each is valid until the next."""
    work = values.float()
    low, high = low.to(work), high.to(work)
    scale = inverse_range(low, high)
    parts = work.split(_rows_at_once(work, bins))
    buffers = _allocate_buffers(parts[0], bins)
    for rows in parts:
        yield _assign(rows, low, scale, bins, buffers)[0]


class _SoftHistogram(torch.autograd.Function):
    """Autograd function of the mean of all shares. Its backward pass recomputes the shares instead of storing them."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, low: Tensor, scale: Tensor, bins: Bins) -> Tensor:
        counts = values.new_zeros(bins.total, values.shape[1])
        parts = values.split(_rows_at_once(values, bins))
        buffers = _allocate_buffers(parts[0], bins)
        for rows in parts:
            counts += _assign(rows, low, scale, bins, buffers)[0].sum(1)
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
        buffers = _allocate_buffers(parts[0], bins)
        product = torch.empty_like(buffers[0])
        for rows, out in zip(parts, result.split(size), strict=True):
            # The derivative of a softmax: d share / dx = share x (bin - mean bin) / temperature.
            shares, steps = _assign(rows, low, scale, bins, buffers)
            mean = torch.mul(shares, steps, out=product[:, : len(rows)]).sum(0)
            shares.mul_(gradient)
            torch.addcmul(steps.mul_(shares).sum(0), mean, shares.sum(0), value=-1, out=out)
        return result.mul_(scale / (bins.temperature * values.shape[0])), None, None, None


Buffers = tuple[Tensor, Tensor]
"""Memory for shares and steps, `[B, N, D]` each."""


def _allocate_buffers(values: Tensor, bins: Bins) -> Buffers:
    """Allocate the buffers for the shares and steps of a chunk of values, to be reused for all chunks.

    Allocating for each chunk can take as long as the computation. The allocator may return large blocks to the
    operating system, which fills their pages with zeros at the next allocation.

    Args:
        values: The first chunk `[N, D]`. No other chunk is larger.
        bins: The B bins.

    Returns:
        Uninitialised memory for shares and for steps, `[B, N, D]` each.
    """
    shares = values.new_empty(bins.total, *values.shape)
    return shares, torch.empty_like(shares)


def _assign(values: Tensor, low: Tensor, scale: Tensor, bins: Bins, buffers: Buffers) -> Buffers:
    """Compute the shares u(x) of equation (4), and each bin's signed distance from the bin that contains the value.

    Let s be the width of a bin, and t the distance of the value from the middle of its bin, both divided by the
    temperature. The cuts are equally spaced, so the logits of (4) grow by t - s/2, t - 3s/2, ... from this bin upwards,
    and by -t - s/2, ... downwards. The bin i places above therefore has exp(i t - i^2 s / 2) times its weight. Unlike
    the logits of (4), these exponents are small wherever a share counts, so float32 loses no digits. Nor do means over
    distances: far outside the range the gradient is as small as it should be.
    """
    width = 1 / (bins.inner * bins.temperature)
    far = 1 - MIN_LOG_WEIGHT / width
    position = ((values.contiguous() - low) * (scale * bins.inner)).clamp_(-far, bins.inner + far)
    own = position.ceil().clamp_(0, bins.inner + 1)
    distance = position.sub_(own).add_(0.5).mul_(width)
    shares, steps = (part[:, : len(values)] for part in buffers)
    torch.sub(torch.arange(bins.total, dtype=values.dtype, device=values.device).view(-1, 1, 1), own, out=steps)
    torch.add(distance, steps, alpha=-width / 2, out=shares).mul_(steps).clamp_(min=MIN_LOG_WEIGHT).exp_()
    return shares.mul_(shares.sum(0).reciprocal_()), steps


def _rows_at_once(values: Tensor, bins: Bins) -> int:
    on_cpu = values.device.type == "cpu"
    shares = _SHARES_AT_ONCE["cpu"] * torch.get_num_threads() if on_cpu else _SHARES_AT_ONCE["other"]
    return max(1, shares // max(1, values.shape[1] * bins.total))


@register
@dataclass(frozen=True, eq=False)
class Histogram:
    """Soft counts `[D, B]`, each row of which sums to `samples`, over the range `low` to `high` `[D]` of each unit."""

    kind: ClassVar[str] = "soft-histogram"
    tensor_dims: ClassVar[Mapping[str, int]] = {"counts": 2, "low": 1, "high": 1}
    counts: Tensor
    low: Tensor
    high: Tensor
    samples: int
    bins: Bins

    @cached_property
    @_outside_inference_mode
    def usable(self) -> Tensor:
        """The units `[D]` that varied on the source; the others are left out of every divergence."""
        return usable_units(self.low, self.high)

    @cached_property
    def usable_count(self) -> int:
        """The number of usable units."""
        return int(self.usable.sum())

    @cached_property
    @_outside_inference_mode
    def probabilities(self) -> Tensor:
        """Normalised counts `[D, B]`: pi^s of equation (1)."""
        return self.counts / self.samples

    @cached_property
    @_outside_inference_mode
    def scale(self) -> Tensor:
        """Scale `[D]` of each unit: 1 / (high - low), or 0 if the unit has no range and is left out."""
        return inverse_range(self.low, self.high)

    @property
    def units(self) -> int:
        """D: the number of units."""
        return self.counts.shape[0]

    def to(self, device: torch.device) -> Histogram:
        """Return the same histogram on a device."""
        if self.counts.device == device:
            return self
        moved = Histogram(self.counts.to(device), self.low.to(device), self.high.to(device), self.samples, self.bins)
        # The number is known; computing it on the device would synchronise.
        moved.__dict__["usable_count"] = self.usable_count
        return moved

    def count(self, values: Tensor) -> Tensor:
        """Compute the normalised counts `[D, B]` of other values `[N, D]` in the bins of this histogram."""
        return soft_histogram(values, self.low, self.high, self.bins, scale=self.scale)

    def divergence_per_unit(self, target: Tensor, kind: str = "psi") -> Tensor:
        """Compute the divergence `[D]` to normalised counts `target` `[D, B]`; 0 without a gradient where unusable."""
        per_unit = divergence(self.probabilities.to(target.dtype), target, kind)
        return torch.where(self.usable, per_unit, torch.zeros((), dtype=per_unit.dtype, device=per_unit.device))

    def mean_divergence(self, target: Tensor, kind: str = "psi") -> Tensor:
        """Average the divergence to normalised counts `target` `[D, B]` over usable units; 0 if there is none."""
        return self.divergence_per_unit(target, kind).sum() / max(1, self.usable_count)

    def divergence(self, values: Tensor, kind: str = "psi") -> Tensor:
        """Compute the mean divergence over usable units of values `[N, D]` of the tap."""
        if kernels.supports(values, self.bins, kind):
            given = (self.low.float(), self.scale.float(), self.probabilities.float())
            return kernels.divergence(values, *given, self.bins, kind, 1 / max(1, self.usable_count)).sum()
        return self.mean_divergence(self.count(values), kind)

    def new_tracker(self) -> CountTracker:
        """Make a tracker that counts other values over the same ranges and bins."""
        return CountTracker(self.low, self.high, self.bins, self.scale)

    @classmethod
    def mix(cls, parts: Sequence[Histogram], times: Sequence[float]) -> Histogram:
        """Add histograms with the same ranges and bins, weighting each sample of `parts[i]` by `times[i]`."""
        first = parts[0]
        for other in parts[1:]:
            same_ranges = torch.equal(first.low, other.low) and torch.equal(first.high, other.high)
            if not same_ranges or first.bins != other.bins:
                raise ProfileError(f"Expected histograms of the same ranges and bins, got different ones. {LIKE_HINT}.")
        counts = sum(part.counts.double() * number for part, number in zip(parts, times, strict=True))
        samples = round(sum(part.samples * number for part, number in zip(parts, times, strict=True)))
        assert isinstance(counts, Tensor)
        return Histogram(counts.to(first.counts.dtype), first.low, first.high, samples, first.bins)

    def tensors(self) -> dict[str, Tensor]:
        """Return counts and ranges."""
        return {"counts": self.counts, "low": self.low, "high": self.high}

    def facts(self) -> dict[str, Any]:
        """Return the number of samples; the profile stores the bins once for all histograms."""
        return {"samples": self.samples}

    @classmethod
    def from_file(cls, name: str, facts: Mapping[str, Any], tensors: Mapping[str, Tensor], frame: Frame) -> Histogram:
        """Build the histogram from the content of a file."""
        samples = read_whole_number(facts["samples"], f"the number of samples of {name}")
        return Histogram(tensors["counts"], tensors["low"], tensors["high"], samples, frame.bins)

    def problems(self) -> list[str]:
        """List the problems of the counts, one sentence each."""
        counts, low, high = self.counts, self.low, self.high
        if counts.shape != (low.shape[0], self.bins.total) or low.shape != high.shape or low.shape[0] == 0:
            return [f"counts {list(counts.shape)} and ranges {list(low.shape)} do not fit {self.bins.total} bins"]
        if not all(bool(torch.isfinite(part).all()) for part in (counts, low, high)):
            return ["counts or ranges are not finite"]
        if bool((counts < 0).any()):
            return ["counts are negative"]
        if bool((low > high).any()):
            return ["the lowest value of a unit lies above its highest"]
        error = (counts.double().sum(1) - self.samples).abs().max().item()
        if error > _COUNT_TOLERANCE * self.samples:
            return [f"the counts of a unit do not add up to the {self.samples} samples"]
        return []


class RangeTracker:
    """Tracker of the range, mean and variance of each unit, in float64 and independent of the order of batches."""

    def __init__(self) -> None:
        self.samples = 0
        self.low: Tensor
        self.high: Tensor
        self.mean: Tensor
        self.squares: Tensor
        """Sums of squared deviations from the mean `[D]`."""

    def update(self, values: Tensor) -> None:
        """Add a batch of values `[N, D]`."""
        for part in split_rows(values.detach()):
            self._update(part)

    def _update(self, values: Tensor) -> None:
        low, high = values.amin(0).float(), values.amax(0).float()
        work = values.to(sum_dtype(values.device))
        count, mean = len(values), work.mean(0)
        squares = (work - mean).square().sum(0)
        if self.samples == 0:
            self.low, self.high, self.mean, self.squares = low, high, mean, squares
        else:
            total, delta = self.samples + count, mean - self.mean
            self.low, self.high = torch.minimum(self.low, low), torch.maximum(self.high, high)
            self.squares = self.squares + squares + delta.square() * (self.samples * count / total)
            self.mean = self.mean + delta * (count / total)
        self.samples += count

    def reduce_over_processes(self) -> RangeTracker:
        """Return a tracker merged over all processes, each of which must call this; without other processes, `self`."""
        if not is_distributed():
            return self
        reduced = RangeTracker()
        reduced.low, reduced.high = reduce_range(self.low, self.high)
        samples, reduced.mean, reduced.squares = reduce_moments(self.samples, self.mean, self.squares)
        reduced.samples = int(samples)
        return reduced

    @property
    def deviation(self) -> Tensor:
        """The standard deviation `[D]` of the sample, with N in the denominator."""
        return (self.squares / max(1, self.samples)).sqrt()

    def gaussian(self) -> MarginalGaussian:
        """Return mean and unbiased variance of each unit, as a profile stores them: in float32 and on the CPU."""
        variance = self.squares / max(1, self.samples - 1)
        return MarginalGaussian(self.mean.float().cpu(), variance.float().cpu(), self.samples)


class CountTracker:
    """Tracker of soft counts over known ranges, from a `RangeTracker` or a stored histogram."""

    def __init__(self, low: Tensor, high: Tensor, bins: Bins, scale: Tensor | None = None) -> None:
        self.low, self.high, self.bins = low, high, bins
        self.scale = inverse_range(low, high) if scale is None else scale
        self.counts = torch.zeros(low.shape[0], bins.total, dtype=sum_dtype(low.device), device=low.device)
        self.samples: float = 0

    def update(self, values: Tensor, times: float = 1) -> None:
        """Count values `[N, D]` with the weight `times`, because a randomly drawn value stands for several."""
        values = values.detach()
        probabilities = soft_histogram(values, self.low, self.high, self.bins, scale=self.scale)
        number = values.shape[0] * times
        self.counts += probabilities.to(self.counts.dtype) * number
        self.samples += number

    def reduce_over_processes(self) -> CountTracker:
        """Return the tracker of the samples of all processes; in a single process, this tracker."""
        if not is_distributed():
            return self
        reduced = CountTracker(self.low, self.high, self.bins)
        samples = torch.tensor(self.samples, dtype=self.counts.dtype, device=self.counts.device)
        reduced.counts, reduced.samples = all_sum(self.counts), all_sum(samples).item()
        return reduced

    def divergence(self, home: Histogram) -> Tensor:
        """Compute the divergence (PSI) between the tracked counts and a histogram, averaged over its usable units.

        Args:
            home: A histogram with the tracker's ranges and bins, on the tracker's device.

        Returns:
            The mean divergence, a scalar.
        """
        return home.mean_divergence((self.counts / self.samples).to(home.counts.dtype))

    def histogram(self) -> Histogram:
        """Return counts and ranges as a profile stores them: in float32 and on the CPU."""
        counts, low, high = (part.float().cpu() for part in (self.counts, self.low, self.high))
        return Histogram(counts, low, high, round(self.samples), self.bins)
