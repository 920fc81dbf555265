"""Differentially private profiles: counts with Gaussian noise from OpenDP, and everything else computed from them.

One person is one sample: two data sets are neighbours if one sample is added to, or removed from, the other. What a
profile stores about its data comes from four releases of counts:

1. ranges: a coarse grid over magnitudes, for each unit of the taps and of the inputs whose range was not given;
2. counts in the bins of taps and inputs, and the answers;
3. ranges and then counts of slices, whose directions follow from the second release.

A sample adds at most one to each of the H histograms of a release, so that counts change by sqrt(H) in the L2 norm.
Counts are whole numbers in parts of `ONE`, so that no rounding of sums escapes this bound. Releases are composed by
zero-concentrated differential privacy, whose parameter rho adds up, also where a release depends on those before.
Ranges, moments, quantiles, shares and the number of samples are computed from released counts alone and cost nothing.

The network is not part of the promise: its weights may tell about data, and activations are taken for functions of one
sample each. Rounding may make them depend on the batch in their last digits.
"""

from __future__ import annotations

import logging
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from shiftmend.errors import ProfileError
from shiftmend.inputs.feed import Feed
from shiftmend.profiles.fingerprints import InputSummary, Summary, TreeSummary
from shiftmend.stats.answers import Answers
from shiftmend.stats.gaussians import MarginalGaussian
from shiftmend.stats.histograms import Bins, Histogram, share_out, usable_units
from shiftmend.stats.moments import Moments, as_units
from shiftmend.stats.quantiles import MAX_UNITS, Quantiles, quantile_levels
from shiftmend.stats.slices import Projector, Slices, bins_of_slices
from shiftmend.stats.statistics import Statistic
from shiftmend.utils.checks import brief, is_real, require
from shiftmend.utils.devices import split_rows
from shiftmend.utils.tensor_tree import TensorTree

logger = logging.getLogger(__name__)

ONE = 1 << 30
"""Parts of a sample that are counted: counts are whole numbers of them."""

SLACK = 1 - 2.0**-20
"""Factor of a share before it is cut to whole parts: float32 shares of a value may add up to a little more than 1."""

RANGE_BUDGET = 0.2
"""Share of the budget for ranges. The rest is for counts."""

STEPS_PER_OCTAVE, LOWEST_OCTAVE, HIGHEST_OCTAVE = 4, -12, 20
"""Grid of magnitudes for ranges: from 2^-12, below which a value counts as zero, to 2^20, by factors of 2^(1/4)."""

SIGNIFICANT = 4.0
"""A cell of the grid belongs to the range of its unit if its count is above so many deviations of the noise."""

NEAR_ZERO = 0.25
"""A range that begins nearer to zero than this share of its length begins at zero: magnitudes of many cells are there,
each of which may hold too few samples."""

INPUT_BINS = Bins(64)
"""Bins of the inputs, from which their moments and quantiles are computed. More bins cost no budget."""

MAX_NOISE = 0.02
"""Noise of a count, as a share of all samples, from which on a profile is of little use."""


@dataclass(frozen=True)
class Privacy:
    """A privacy budget, and ranges that need none of it.

    A profile made with it is (epsilon, delta)-differentially private: it tells little about whether any single sample
    was at home. One person is one sample. If people have several samples each, the budget protects a sample and not a
    person.

    Args:
        epsilon: The budget of everything that the profile stores. 1 is usual; less is more private.
        delta: The probability that the promise may fail. It should be far below one over the number of samples.
        ranges: Lowest and highest value of taps by name, or of `"inputs"`, known without looking at the data. Each is a
            number, or one number for each unit. Other ranges are found in the data, at a fifth of the budget.

    Raises:
        ProfileError: If epsilon or delta is out of range, or a range is not a pair.

    Example:
        >>> Privacy(epsilon=1.0, delta=1e-6, ranges={"inputs": (-1.0, 1.0)}).epsilon
        1.0
    """

    epsilon: float = 1.0
    delta: float = 1e-6
    ranges: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (is_real(self.epsilon) and 0.001 <= self.epsilon <= 50):
            raise ProfileError(f"Expected an epsilon from 0.001 to 50, got {brief(self.epsilon)}. Try 1.")
        if not (is_real(self.delta) and 0 < self.delta < 1):
            raise ProfileError(f"Expected a delta between 0 and 1, got {brief(self.delta)}. Try 1e-6.")
        for name, given in self.ranges.items():
            if not isinstance(given, tuple | list) or len(given) != 2:
                raise ProfileError(f"Expected the range of {name!r} as (lowest, highest), got {brief(given)}.")


@dataclass(frozen=True)
class Guarantee:
    """The promise of a private profile, as it is stored.

    Attributes:
        epsilon: The budget of all stored numbers together.
        delta: The probability that the promise may fail.
        noise: Standard deviation of the noise in each count, in samples.
        histograms: Histograms that noise was added to; a sample counts once in each.
    """

    epsilon: float
    delta: float
    noise: float
    histograms: int

    def to_json(self) -> dict[str, Any]:
        """Return the guarantee as JSON, which also says what it protects (`neighbours`) and how (`mechanism`)."""
        return asdict(self) | {"neighbours": "one sample added or removed", "mechanism": "gaussian"}

    @staticmethod
    def from_json(data: Any) -> Guarantee:
        """Rebuild a guarantee from the output of `to_json`; raise `ProfileError` if it does not have that form."""
        expected = {"neighbours": "one sample added or removed", "mechanism": "gaussian"}
        numbers = {"epsilon", "delta", "noise", "histograms"}
        fits = (
            isinstance(data, dict)
            and data.keys() == expected.keys() | numbers
            and all(data[name] == words for name, words in expected.items())
            and all(type(data[name]) in (int, float) and 0 < data[name] < math.inf for name in numbers)
            and data["delta"] < 1
            and type(data["histograms"]) is int
        )
        if not fits:
            raise ProfileError(f"its entry 'privacy' is {reprlib.repr(data)}, which is not of the expected form")
        return Guarantee(**{name: data[name] for name in ("epsilon", "delta", "noise", "histograms")})

    def __str__(self) -> str:
        return (
            f"epsilon {self.epsilon:g}, delta {self.delta:g} for one sample added or removed; noise of "
            f"{self.noise:.3g} samples in each count"
        )


def mix_guarantees(given: Sequence[Guarantee | None], times: Sequence[float]) -> Guarantee | None:
    """Return what a mixture of profiles promises. Budgets are added, since one sample may be in all parts."""
    parts = [part for part in given if part is not None]
    if len(parts) < len(given):
        return None
    noise = math.sqrt(sum((part.noise * number) ** 2 for part, number in zip(parts, times, strict=True)))
    return Guarantee(
        sum(part.epsilon for part in parts),
        min(sum(part.delta for part in parts), 1 - 1e-9),
        noise,
        sum(part.histograms for part in parts),
    )


def effective_samples(samples: int, noise: float, bins: int) -> float:
    """Return the size of a sample without noise whose counts vary as much as those of this one with it.

    A count of one bin in B varies by n / B, and noise adds its own variance. This is exact for equal bins.

    Example:
        >>> effective_samples(10_000, 0.0, 10), round(effective_samples(10_000, 100.0, 10))
        (10000.0, 826)
    """
    chance = (bins - 1) / samples + (bins * noise / samples) ** 2
    return (bins - 1) / chance


def remark(guarantee: Guarantee, samples: int) -> None:
    """Log warnings about a private profile for the person who made it."""
    if guarantee.noise > MAX_NOISE * samples:
        logger.warning(
            "The noise of %.3g in each count is large for %d samples. Try more samples, a larger epsilon, or ranges.",
            guarantee.noise,
            samples,
        )
    if guarantee.delta * samples > 0.1:
        logger.warning("Expected a delta far below 1 / %d samples, got %g. Try 1e-6.", samples, guarantee.delta)


# ---- noise


class Budget:
    """A privacy budget that releases of counts are paid from, by OpenDP."""

    def __init__(self, privacy: Privacy) -> None:
        self.rho = find_rho(privacy.epsilon, privacy.delta)
        self.spent = 0.0

    def noise_for(self, share: float, histograms: int) -> float:
        """Return the noise, in samples, with which so many histograms cost a share of the budget."""
        return math.sqrt(histograms / (2 * share * self.rho))

    def release(self, counts: Mapping[str, Tensor], noise: float) -> dict[str, Tensor]:
        """Add noise to counts in parts of `ONE`, and pay for it.

        Args:
            counts: Whole numbers `[units, cells]` by name. A sample adds at most `ONE` to each row, nothing negative.
            noise: Standard deviation of the noise, in samples.

        Returns:
            Noisy counts in samples.
        """
        if not counts:
            return {}
        sensitivity = ONE * math.sqrt(sum(map(len, counts.values())))
        values = torch.cat([one.reshape(-1) for one in counts.values()])
        noisy, spent = add_noise(values, sensitivity, ONE * noise)
        self.spent += spent
        if self.spent > self.rho * (1 + 1e-9):
            raise ProfileError(f"Expected to spend a rho of at most {self.rho:g}, got {self.spent:g}.")
        parts = noisy.double().div(ONE).split([one.numel() for one in counts.values()])
        return {name: part.view(one.shape) for part, (name, one) in zip(parts, counts.items(), strict=True)}


def add_noise(values: Tensor, sensitivity: float, scale: float) -> tuple[Tensor, float]:
    """Add discrete Gaussian noise to whole numbers by OpenDP; return them with the rho that is spent."""
    measurement = _make_gaussian(_load_opendp(), scale)
    return torch.tensor(measurement(values.tolist()), dtype=torch.int64, device="cpu"), measurement.map(sensitivity)


def find_rho(epsilon: float, delta: float) -> float:
    """Find the largest rho of zero-concentrated differential privacy that keeps (epsilon, delta), by OpenDP."""
    dp = _load_opendp()

    def keeps(scale: float) -> bool:
        converted = dp.c.make_zCDP_to_approxDP(_make_gaussian(dp, scale))
        return bool(converted.map(1.0).epsilon(delta) <= epsilon)

    scale = dp.binary_search(keeps, bounds=(0.1, 1e5))
    rho: float = _make_gaussian(dp, scale).map(1.0)
    return rho


def _load_opendp() -> Any:
    dp = require("opendp.prelude", "private")
    dp.enable_features("contrib")
    return dp


def _make_gaussian(dp: Any, scale: float) -> Any:
    space = dp.vector_domain(dp.atom_domain(T="i64")), dp.l2_distance(T="f64")
    return dp.m.make_gaussian(*space, scale=scale)


# ---- counting


def grid_edges() -> Tensor:
    """Return the upper ends of the cells of magnitudes, from below which a value counts as zero."""
    steps = STEPS_PER_OCTAVE * (HIGHEST_OCTAVE - LOWEST_OCTAVE) + 1
    return 2.0 ** (torch.arange(steps, dtype=torch.float32, device="cpu") / STEPS_PER_OCTAVE + LOWEST_OCTAVE)


class GridCounter:
    """Counts of each unit by sign and magnitude, `[units, 2 * cells + 1]` with zero in the middle."""

    def __init__(self) -> None:
        self.edges = grid_edges()
        self.counts = torch.zeros(0, 0, dtype=torch.int64, device="cpu")

    def update(self, values: Tensor, positions: int) -> None:
        """Count values `[N, D]`, of which each sample has so many rows."""
        self.edges = self.edges.to(values.device)
        most = len(self.edges)
        for part in split_rows(values.detach().float()):
            magnitude = torch.bucketize(part.abs(), self.edges).clamp_max(most)
            cells = torch.where(part < 0, -magnitude, magnitude) + most
            self.counts = _add_cells(self.counts, cells, 2 * most + 1, positions)


class EvenCounter:
    """Counts of each unit in equal bins between two values, with one bin below and one above, `[units, bins]`."""

    def __init__(self, low: Tensor, high: Tensor, bins: Bins) -> None:
        self.low, self.high, self.bins = low, high, bins
        self.counts = torch.zeros(0, 0, dtype=torch.int64, device="cpu")

    def update(self, values: Tensor, positions: int) -> None:
        """Count values `[N, D]`, of which each sample has so many rows."""
        low, high = self.low.to(values.device), self.high.to(values.device)
        inner = self.bins.inner
        for part in split_rows(values.detach().float()):
            # Both ends belong to the inner bins.
            cells = ((part - low) * (inner / (high - low).clamp_min(1e-30))).floor().clamp(0, inner - 1).long() + 1
            cells = torch.where(part < low, 0, torch.where(part > high, inner + 1, cells))
            self.counts = _add_cells(self.counts, cells, self.bins.total, positions)


class SoftCounter:
    """Soft counts of each unit, as `Histogram` has them, in whole parts of a sample."""

    def __init__(self, low: Tensor, high: Tensor, bins: Bins) -> None:
        self.low, self.high, self.bins = low, high, bins
        self.counts = torch.zeros(len(low), bins.total, dtype=torch.int64, device="cpu")

    def update(self, values: Tensor, positions: int) -> None:
        """Count values `[N, D]`, of which each sample has so many rows."""
        for shares in share_out(values.detach(), self.low, self.high, self.bins):
            parts = (shares * (SLACK * ONE / positions)).floor().long()
            self.counts += parts.sum(1).T.cpu()


def _add_cells(counts: Tensor, cells: Tensor, number: int, positions: int) -> Tensor:
    """Count cells `[N, D]` of each unit, each in an equal part of a sample."""
    units = cells.shape[1]
    flat = (cells + torch.arange(units, device=cells.device) * number).reshape(-1)
    found = torch.bincount(flat, minlength=units * number).view(units, number).cpu() * (ONE // positions)
    return counts + found if len(counts) else found


# ---- what follows from released counts


def find_ranges(counts: Tensor, noise: float) -> tuple[Tensor, Tensor]:
    """Find the range of each unit from noisy counts on the grid: from its lowest to its highest significant cell.

    Args:
        counts: Noisy counts `[units, 2 * cells + 1]`.
        noise: Their standard deviation.

    Returns:
        Lowest and highest value `[units]`. Units without a significant cell but zero have equal ones.
    """
    edges = grid_edges().double()
    most = len(edges)
    # Cell m of a sign lies between edges m - 1 and m; the last one is open, and its end is taken for the last edge.
    upper = torch.cat([-edges.flip(0), edges.new_zeros(1), edges[1:], edges[-1:]])
    lower = -upper.flip(0)
    found = counts > SIGNIFICANT * noise
    places = torch.arange(2 * most + 1, device="cpu")
    first = torch.where(found, places, 2 * most + 1).amin(1)
    last = torch.where(found, places, -1).amax(1)
    nothing = last < 0
    low, high = lower[first.clamp_max(2 * most)], upper[last.clamp_min(0)]
    low = torch.where((low > 0) & (low < NEAR_ZERO * high), 0.0, low)
    high = torch.where((high < 0) & (high > NEAR_ZERO * low), 0.0, high)
    low, high = (torch.where(nothing | (one == 0), 0.0, one).float() for one in (low, high))
    return low, high


def denoise(counts: Tensor, noise: float) -> Tensor:
    """Return valid histograms: no share is negative, and those of each row add up to 1.

    A noisy count is replaced by the mean of all counts from 0 that it may have been, so that no bin is empty: a
    logarithm of an empty bin would weigh more than the noise.
    """
    ratio = counts / noise
    # Far below zero, the density over the distribution function tends to -ratio - 1 / ratio.
    hazard = torch.exp(-0.5 * ratio.square() - 0.5 * math.log(2 * math.pi) - torch.special.log_ndtr(ratio))
    likely = (noise * (ratio + hazard)).clamp_min(1e-6 * noise)
    return likely / likely.sum(1, keepdim=True)


def moments_of(probabilities: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Compute mean and variance `[units]` from histograms `[units, bins]`; the outer bins lie at the ends."""
    inner = probabilities.shape[1] - 2
    steps = (torch.arange(inner, dtype=torch.float64, device="cpu") + 0.5) / inner
    places = torch.cat([steps.new_zeros(1), steps, steps.new_ones(1)])
    mean = probabilities @ places
    within = probabilities[:, 1:-1].sum(1) / (12 * inner**2)
    variance = probabilities @ places.square() - mean.square() + within
    extent = (high - low).double()
    return low.double() + mean * extent, variance.clamp_min(1e-4) * extent.square()


def quantiles_of(probabilities: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Compute quantiles `[units, LEVELS]` from histograms `[units, bins]`, evenly spread within bins."""
    inner = probabilities.shape[1] - 2
    levels = quantile_levels().expand(len(low), -1).contiguous()
    reached = probabilities[:, :-1].cumsum(1).contiguous()
    after = torch.searchsorted(reached, levels).clamp(0, inner)
    before = (after - 1).clamp_min(0)
    start, end = reached.gather(1, before), reached.gather(1, after)
    share = ((levels - start) / (end - start).clamp_min(1e-30)).clamp(0, 1)
    places = torch.where(after == 0, 0.0, (before + share) / inner)
    values = low.double().unsqueeze(1) + places * (high - low).double().unsqueeze(1)
    return values.float().cummax(1).values


# ---- collecting


Values = Mapping[str, Tensor]
"""Values `[N, D]` by tap."""

Ends = tuple[Tensor, Tensor]
"""Lowest and highest value `[D]` of each unit."""


@dataclass(frozen=True)
class Plan:
    """Histograms that a private profile counts.

    Attributes:
        run: Calls a function with the values at the taps of every batch.
        feed: The source data.
        positions: Values that each sample has at a tap.
        bins: Bins of the taps.
        slices: Number of directions of each set of slices.
        seeds: Seeds of these directions.
        like: Statistics of another private profile, whose ranges are used, by name.
        frame: Mean and deviation of the features of that profile.
    """

    run: Callable[[Callable[[Values], None]], None]
    feed: Feed
    positions: Mapping[str, int]
    bins: Bins
    slices: Mapping[str, int]
    seeds: Mapping[str, int]
    like: Mapping[str, Statistic] = field(default_factory=dict)
    frame: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class Collected:
    """Everything of a profile that comes from data."""

    statistics: dict[str, Statistic]
    mean: Tensor
    deviation: Tensor
    inputs: Summary
    inputs_seen: int
    guarantee: Guarantee | None = None


@dataclass(frozen=True)
class _Part:
    """Released histograms of a tap, or of inputs: shares `[D, B]` over a range, and moments that follow from them."""

    shares: Tensor
    ends: Ends
    mean: Tensor
    variance: Tensor


def collect(plan: Plan, privacy: Privacy) -> Collected:
    """Collect everything that a private profile stores, within one budget."""
    budget = Budget(privacy)
    inputs = _Inputs(plan.feed)
    grids = _count_magnitudes(plan, inputs)
    ranges = _find_known_ranges(plan, privacy, {name: len(grid) for name, grid in grids.items()})
    sought = {name: grid for name, grid in grids.items() if name not in ranges}
    sliced = sum(plan.slices.values())
    ranged = sum(map(len, sought.values())) + (0 if plan.like else sliced)
    range_noise = budget.noise_for(RANGE_BUDGET, ranged) if ranged else 0.0
    ranges |= {name: find_ranges(grid, range_noise) for name, grid in budget.release(sought, range_noise).items()}
    usable = usable_units(*ranges["features"])
    if not bool(usable.any()):
        raise ProfileError("Expected features that stand out from the noise, got none. Try more samples, or ranges.")

    counts = _count(plan, inputs, ranges)
    histograms = sum(map(len, counts.values())) + sliced
    noise = budget.noise_for(1 - RANGE_BUDGET if ranged else 1.0, histograms)
    released = budget.release(counts, noise)
    samples = max(1, round(float(torch.cat([released[name].sum(1) for name in plan.positions]).mean())))
    parts = {}
    for name in grids:
        shares = denoise(released[name], noise)
        parts[name] = _Part(shares, ranges[name], *moments_of(shares, *ranges[name]))
    statistics = _describe_taps(plan, parts, samples)
    features = parts["features"]
    frame = plan.frame or (features.mean.float(), features.variance.sqrt().float())
    for name, count in plan.slices.items():
        projector = Projector.build(*frame, usable, count, plan.seeds[name])
        histogram = _slice(plan, name, projector, samples, budget, (range_noise, noise))
        statistics[f"slices.{name}"] = Slices(histogram, plan.seeds[name], projector)
    statistics |= inputs.describe(parts, samples)
    if "answers" in released:
        certain = (released["answers"][1, :1] / samples).clamp(0, 1)
        answered = denoise(released["answers"][:1], noise)[0]
        statistics["answers"] = Answers(answered.float(), certain.float(), samples * plan.positions["logits"])
    guarantee = Guarantee(privacy.epsilon, privacy.delta, noise, histograms)
    return Collected(statistics, *frame, inputs.summarise(parts), samples, guarantee)


def _count_magnitudes(plan: Plan, inputs: _Inputs) -> dict[str, Tensor]:
    """Count taps and inputs on the grid of magnitudes."""
    grids: dict[str, GridCounter] = {name: GridCounter() for name in plan.positions}

    def count(values: Values) -> None:
        for name, positions in plan.positions.items():
            grids[name].update(values[name], positions)

    plan.run(count)
    inputs.run(lambda name, values, positions: grids.setdefault(name, GridCounter()).update(values, positions))
    return {name: grid.counts for name, grid in grids.items()}


def _find_known_ranges(plan: Plan, privacy: Privacy, units: Mapping[str, int]) -> dict[str, Ends]:
    """Return the ranges of taps and inputs that are known without the data, and so use no privacy budget.

    Known ranges are those of another private profile (`plan.like`), and for other names those in `privacy.ranges`.

    Args:
        plan: The histograms that the profile counts.
        privacy: The budget, with the ranges that the user knows.
        units: Number of units of each tap and input, by name.

    Returns:
        Lowest and highest values `[D]`, by name.

    Raises:
        ProfileError: If a given range has an unknown name, another number of units, or bounds that are not finite and
            ascending.
    """
    unknown = [name for name in privacy.ranges if name not in units]
    if unknown:
        raise ProfileError(f"Expected ranges of {', '.join(units)}, got one of {unknown[0]!r}. Try one of these names.")
    known = {name: _read_range(name, given, units[name]) for name, given in privacy.ranges.items()}
    for name in plan.positions:
        other = plan.like.get(f"tap.{name}")
        if isinstance(other, Histogram):
            known[name] = other.low, other.high
    return known


def _read_range(name: str, given: tuple[Any, Any], units: int) -> Ends:
    try:
        low, high = (torch.as_tensor(end, dtype=torch.float32, device="cpu").expand(units).clone() for end in given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ProfileError(
            f"Expected the range of {name!r} as two numbers, or two for each of {units} units, got {brief(given)}."
        ) from error
    if not bool((low.isfinite() & high.isfinite() & (low < high)).all()):
        raise ProfileError(f"Expected a finite range of {name!r}, lowest value first, got {brief(given)}.")
    return low, high


def _count(plan: Plan, inputs: _Inputs, ranges: Mapping[str, Ends]) -> dict[str, Tensor]:
    """Count taps and inputs in their bins, and the answers."""
    taps = {name: SoftCounter(*ranges[name], plan.bins) for name in plan.positions}
    parts = {name: EvenCounter(*ranges[name], INPUT_BINS) for name in inputs.positions}
    answers: list[Tensor] = []

    def count(values: Values) -> None:
        for name, tap in taps.items():
            tap.update(values[name], plan.positions[name])
        if values["logits"].shape[1] > 1:
            answers.append(_count_answers(values["logits"], plan.positions["logits"]))

    plan.run(count)
    inputs.run(lambda name, values, positions: parts[name].update(values, positions))
    counts = {name: tap.counts for name, tap in taps.items()} | {name: part.counts for name, part in parts.items()}
    return counts | ({"answers": torch.stack(answers).sum(0)} if answers else {})


def _count_answers(logits: Tensor, positions: int) -> Tensor:
    """Return counts of the predicted classes, and below them the sum of their probabilities, `[2, classes]`."""
    part = ONE // positions
    counts = logits.argmax(1).bincount(minlength=logits.shape[1]) * part
    certain = (logits.detach().float().softmax(1).amax(1) * (SLACK * part)).floor().long().sum()
    return torch.stack([counts, torch.nn.functional.pad(certain.view(1), (0, len(counts) - 1))]).cpu()


def _describe_taps(plan: Plan, parts: Mapping[str, _Part], samples: int) -> dict[str, Statistic]:
    """Return the histograms of the taps, and the Gaussian of the features."""
    features = parts["features"]
    taps = {
        f"tap.{name}": _make_histogram(parts[name].shares, parts[name].ends, samples * positions, plan.bins)
        for name, positions in plan.positions.items()
    }
    number = samples * plan.positions["features"]
    return taps | {"gaussian": MarginalGaussian(features.mean.float(), features.variance.float(), number)}


def _slice(
    plan: Plan, name: str, projector: Projector, samples: int, budget: Budget, noises: tuple[float, float]
) -> Histogram:
    """Count the features in fixed directions, with the noise for ranges and that for counts."""
    there, positions = projector.to(plan.feed.device), plan.positions["features"]

    def count(counter: GridCounter | SoftCounter) -> Tensor:
        def update(values: Values) -> None:
            for part in there.project_in_parts(values["features"]):
                counter.update(part, positions)

        plan.run(update)
        return counter.counts

    home = plan.like.get(f"slices.{name}")
    if isinstance(home, Slices):
        ends = home.histogram.low, home.histogram.high
    else:
        ends = find_ranges(budget.release({name: count(GridCounter())}, noises[0])[name], noises[0])
    bins = bins_of_slices(name, plan.bins)
    counts = budget.release({name: count(SoftCounter(*ends, bins))}, noises[1])[name]
    return _make_histogram(denoise(counts, noises[1]), ends, samples * positions, bins)


def _make_histogram(shares: Tensor, ends: Ends, samples: int, bins: Bins) -> Histogram:
    return Histogram((shares * samples).float(), *ends, samples, bins)


class _Inputs:
    """The inputs as values `[N, D]` of named parts, as many of each sample."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self.positions: dict[str, int] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self.has_moments = True
        """Whether moments and quantiles are stored, as those of one tensor of real numbers are."""

    def run(self, update: Callable[[str, Tensor, int], None]) -> None:
        """Call a function with the name, the values and the positions of each part of every batch."""
        for batch in self.feed.batches():
            if isinstance(batch, TensorTree):
                for name, part in batch.named_leaves:
                    self._see(f"inputs.{name}", part, update)
            else:
                self._see("inputs", batch, update)

    def _see(self, name: str, part: Tensor, update: Callable[[str, Tensor, int], None]) -> None:
        values = as_units(part)
        self.has_moments &= name == "inputs" and values is not None
        if values is None:
            values = (torch.view_as_real(part) if part.is_complex() else part).reshape(-1, 1)
        shape = tuple(part.shape[1:])
        if self.shapes.setdefault(name, shape) != shape:
            raise ProfileError(
                f"Expected inputs of one shape for a private profile, got {list(shape)} and "
                f"{list(self.shapes[name])}. Try padding them."
            )
        self.positions[name] = len(values) // len(part)
        self.dtypes[name] = str(part.dtype).removeprefix("torch.")
        update(name, values, self.positions[name])

    def describe(self, parts: Mapping[str, _Part], samples: int) -> dict[str, Statistic]:
        """Return moments and quantiles of the inputs, where an ordinary profile has them."""
        if not self.has_moments:
            return {}
        own, number = parts["inputs"], samples * self.positions["inputs"]
        found: dict[str, Statistic] = {"inputs": Moments(own.mean.float(), own.variance.float(), number)}
        if len(own.mean) <= MAX_UNITS:
            found["inputs.quantiles"] = Quantiles(quantiles_of(own.shares, *own.ends), number)
        return found

    def summarise(self, parts: Mapping[str, _Part]) -> Summary:
        """Summarise the inputs by their private ranges and moments."""
        found = {name.removeprefix("inputs."): self._summarise(name, parts[name]) for name in self.shapes}
        return found["inputs"] if "inputs" in self.shapes else TreeSummary(found)

    def _summarise(self, name: str, own: _Part) -> InputSummary:
        mean, variance = own.mean, own.variance
        if len(self.shapes[name]) < 2:
            # Columns of a table are summarised together.
            total = mean.mean()
            mean, variance = total.view(1), (variance + (mean - total).square()).mean().view(1)
        return InputSummary(
            self.shapes[name],
            self.dtypes[name],
            float(own.ends[0].min()),
            float(own.ends[1].max()),
            tuple(round(value, 6) for value in mean.tolist()),
            tuple(round(value, 6) for value in variance.sqrt().tolist()),
        )
