"""Simulated devices for images, signals and tables: the functions and their lists.

Every function takes `values`, a strength from 0 (almost no effect) to 1 (most networks fail), a generator for what
differs between samples, and statistics of the home inputs. Image values are scaled to 0..1 over the range of their
channel at home. Signals and tables have mean 0 and standard deviation 1 per channel or column at home. A device changes
all samples in the same way: its own parameters are drawn from the seed of the generator alone.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from shiftmend.shifts.primitives import coarsen, count_photons, gaussian_blur, plasma, sample_linear, stick_pixels

MAX_MEASURED_VALUES = 1 << 24
"""Largest number of values of the home inputs from which ranges, means and deviations are measured."""

UNIFORM_BORDER_SHARE, UNIFORM_BORDER_SPREAD = 0.8, 0.1
"""A background is uniform if this share of border pixels is this close to their median, relative to full scale."""

ORDERED_CORRELATION = 0.8
"""Mean correlation of neighbouring columns above which their order has a meaning, as in spectra."""

QUANTILES = 33
"""Number of evenly spaced quantiles that are stored for each column, from minimum to maximum."""

# Quantisation of luminance in JPEG (ITU-T T.81, table K.1), in grey levels.
JPEG_STEPS = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)


class Entry(NamedTuple):
    """An entry of the lists of devices below; `least` is the smallest number of channels or columns it needs."""

    name: str
    family: str
    function: Callable[..., Tensor]
    mendable: bool = True
    least: int = 1


@dataclass(frozen=True, eq=False)
class ImageHome:
    """Range of images at home, per channel `[1, C, 1, 1]`; `mean` and `fill` are relative to that range.

    `fill` is the level of a uniform background; None if the background is not uniform.
    """

    origin: Tensor
    scale: Tensor
    mean: Tensor
    fill: Tensor | None

    @classmethod
    def measure(cls, images: Tensor) -> ImageHome:
        """Measure range, mean and background of each channel of images `[N, C, H, W]`."""
        sample = _thin(images)
        low, high = sample.amin((0, 2, 3), keepdim=True), sample.amax((0, 2, 3), keepdim=True)
        unit = (sample - low) / without_zeros(high - low)
        border = torch.cat((unit[..., 0, :], unit[..., -1, :], unit[..., 0], unit[..., -1]), dim=-1)
        level = border.movedim(1, 0).flatten(1).median(dim=1).values.view(1, -1, 1)
        uniform = float(((border - level).abs() < UNIFORM_BORDER_SPREAD).float().mean()) > UNIFORM_BORDER_SHARE
        return cls(low, high - low, unit.mean((0, 2, 3), keepdim=True), level[..., None] if uniform else None)


@dataclass(frozen=True, eq=False)
class SignalHome:
    """Mean, standard deviation and largest deviation (in standard deviations) of signals at home, `[1, C, 1]` each."""

    origin: Tensor
    scale: Tensor
    peak: Tensor

    @classmethod
    def measure(cls, signals: Tensor) -> SignalHome:
        """Measure mean, standard deviation and largest deviation of each channel of signals `[N, C, L]`."""
        sample = _thin(signals)
        mean = sample.mean((0, 2), keepdim=True)
        scale = sample.std((0, 2), keepdim=True, unbiased=False)
        return cls(mean, scale, ((sample - mean) / without_zeros(scale)).abs().amax((0, 2), keepdim=True))


@dataclass(frozen=True, eq=False)
class TableHome:
    """Mean, standard deviation and quantiles (standardised, `[QUANTILES, D]`) of each column at home.

    `ordered` is true if neighbouring columns are related, as in spectra.
    """

    origin: Tensor
    scale: Tensor
    quantiles: Tensor
    ordered: bool

    @classmethod
    def measure(cls, table: Tensor) -> TableHome:
        """Measure mean, standard deviation and quantiles of each column of a table `[N, D]`."""
        sample = _thin(table)
        mean = sample.mean(0, keepdim=True)
        scale = sample.std(0, keepdim=True, unbiased=False)
        values = (sample - mean) / without_zeros(scale)
        ranks = torch.linspace(0, len(values) - 1, QUANTILES, device=values.device)
        neighbours = (values[:, 1:] * values[:, :-1]).mean(0)
        ordered = bool(len(neighbours) > 1 and neighbours.mean() > ORDERED_CORRELATION)
        return cls(mean, scale, values.sort(dim=0).values[ranks.round().long()], ordered)


def _thin(values: Tensor) -> Tensor:
    """Keep every k-th sample, converted to at least float32."""
    kept = values[:: math.ceil(values.numel() / MAX_MEASURED_VALUES)]
    return kept.to(torch.promote_types(values.dtype, torch.float32))


def without_zeros(scale: Tensor) -> Tensor:
    """Replace zeros, which constant channels and columns have, by ones, so that scales can be divisors."""
    return scale.where(scale > 0, 1.0)


def _fixed(rng: torch.Generator) -> torch.Generator:
    """Return a CPU generator for the parameters of a device, equal for all chunks of data and on all machines."""
    return torch.Generator().manual_seed(rng.initial_seed())


def _ranks(count: int, rng: torch.Generator) -> Tensor:
    """Draw a random order of `count` channels, columns or tiles, as a parameter of the device."""
    return torch.randperm(count, generator=_fixed(rng))


def _swap(values: Tensor, share: float, rng: torch.Generator) -> Tensor:
    """Cyclically permute a share of the positions (at least two) along the last axis."""
    order = _ranks(values.shape[-1], rng)
    moved = order[: max(2, round(share * len(order)))]
    places = torch.arange(len(order))
    places[moved] = moved.roll(1)
    return values[..., places.to(values.device)]


def _smooth(values: Tensor, width: float) -> Tensor:
    """Smooth along the last axis by a Gaussian with standard deviation `width`; the ends are mirrored."""
    length = values.shape[-1]
    frequencies = torch.fft.rfftfreq(2 * length, device=values.device, dtype=values.dtype)
    response = torch.exp(-2 * (math.pi * width * frequencies) ** 2)
    doubled = torch.cat((values, values.flip(-1)), dim=-1)
    smooth: Tensor = torch.fft.irfft(torch.fft.rfft(doubled) * response, n=2 * length)
    return smooth[..., :length]


def _grow(least: float, most: float, strength: float) -> float:
    """Interpolate geometrically from `least` to `most`."""
    return least * math.pow(max(least, most) / least, strength)


def _places(values: Tensor) -> Tensor:
    """Return the positions 0, 1, 2, ... along the last axis."""
    return torch.arange(values.shape[-1], device=values.device, dtype=values.dtype)


def _normal(values: Tensor, rng: torch.Generator) -> Tensor:
    return torch.randn(values.shape, generator=rng, device=values.device, dtype=values.dtype)


def _phases(values: Tensor, rng: torch.Generator) -> Tensor:
    """Draw a random phase for each sample, `[N, 1, ...]`."""
    shape = (len(values), *(1 for _ in values.shape[1:]))
    return 2 * math.pi * torch.rand(shape, generator=rng, device=values.device, dtype=values.dtype)


def _per_channel(values: Tensor, rng: torch.Generator) -> Tensor:
    """Draw a normal number for each channel or column, `[1, C, ...]`, as a parameter of the device."""
    drawn = torch.randn(values.shape[1], generator=_fixed(rng)).to(values)
    return drawn.view(1, -1, *(1 for _ in values.shape[2:]))


# Images


def brighten(unit: Tensor, strength: float, rng: torch.Generator, home: ImageHome) -> Tensor:
    """Raise the black level and flatten the response: gain 1 to 0.3, offset 0 to 0.65."""
    return unit * (1 - 0.7 * strength) + 0.65 * strength


def darken(unit: Tensor, strength: float, rng: torch.Generator, home: ImageHome) -> Tensor:
    """Lower the light, and clip below the black level: gain 1 to 0.5, offset 0 to -0.3."""
    return unit * (1 - 0.5 * strength) - 0.3 * strength


def gamma(unit: Tensor, strength: float, rng: torch.Generator, home: ImageHome) -> Tensor:
    """Darken the middle tones: raise values in 0..1 to the power `10 ** strength`, from 1 to 10."""
    return unit ** math.pow(10, strength)


def inverse_gamma(unit: Tensor, strength: float, rng: torch.Generator, home: ImageHome) -> Tensor:
    """Brighten the middle tones: raise values in 0..1 to the power `10 ** -strength`, from 1 to 1/10."""
    return unit ** math.pow(10, -strength)


def lose_contrast(unit: Tensor, strength: float, rng: torch.Generator, home: ImageHome) -> Tensor:
    """Compress levels around the mean of the channel, down to 4 % of their distance."""
    mean = home.mean.to(unit)
    return mean + (unit - mean) * (1 - 0.96 * strength)


def cast_colour(unit: Tensor, strength: float, rng: torch.Generator, home: ImageHome) -> Tensor:
    """Scale the first channel by up to 1.9 and the last down to 0.1, with factors between for the others."""
    gains = 1 + 0.9 * strength * torch.linspace(1, -1, unit.shape[1])
    return unit * gains.to(unit).view(1, -1, 1, 1)


def mix_channels(values: Tensor, strength: float, rng: torch.Generator, home: Any) -> Tensor:
    """Mix each channel with the next one, until each is replaced by its neighbour."""
    return torch.lerp(values, values.roll(1, dims=1), strength)


def defocus(unit: Tensor, strength: float, rng: torch.Generator, home: ImageHome) -> Tensor:
    """Blur by a Gaussian with a standard deviation of up to an eighth of the side."""
    return gaussian_blur(unit, 0.12 * strength * _side(unit), truncate=3)


def move(unit: Tensor, strength: float, rng: torch.Generator, home: ImageHome) -> Tensor:
    """Blur along the rows by a Gaussian with a standard deviation of up to a quarter of the side."""
    return gaussian_blur(unit, 0.25 * strength * _side(unit), truncate=3, axes=(-1,))


def sharpen(unit: Tensor, strength: float, rng: torch.Generator, home: ImageHome) -> Tensor:
    """Amplify fine detail up to nine times."""
    return unit + 8 * strength * _detail(unit)


def keep_edges(unit: Tensor, strength: float, rng: torch.Generator, home: ImageHome) -> Tensor:
    """Replace the image by its fine detail on grey."""
    return torch.lerp(unit, 0.5 + 2 * _detail(unit), strength)


def add_photon_noise(unit: Tensor, strength: float, rng: torch.Generator, home: ImageHome) -> Tensor:
    """Count fewer photons (1,000 down to 3 at full scale), with more read noise (up to half of full scale)."""
    return count_photons(unit, 1000 * math.pow(0.003, strength), 0.5 * strength, rng)


def compress(unit: Tensor, strength: float, rng: torch.Generator, home: ImageHome) -> Tensor:
    """Quantise blocks of 8 x 8 pixels as JPEG does, per channel, with steps of up to 100 times the standard's."""
    height, width = unit.shape[-2:]
    padded = functional.pad(unit, (0, -width % 8, 0, -height % 8), mode="replicate") - 0.5
    blocks = padded.unflatten(-1, (-1, 8)).unflatten(-3, (-1, 8)).transpose(-2, -3)
    grid = torch.arange(8, dtype=torch.float64)
    cosines = torch.cos(math.pi / 8 * grid[:, None] * (grid[None] + 0.5)) / 2
    cosines[0] /= math.sqrt(2)
    basis = cosines.to(unit)
    steps = torch.tensor(JPEG_STEPS).to(unit) * (_grow(0.1, 100, strength) / 255)
    coded = ((basis @ blocks @ basis.T) / steps).round() * steps
    decoded: Tensor = (basis.T @ coded @ basis).transpose(-2, -3).flatten(-4, -3).flatten(-2)
    return decoded[..., :height, :width] + 0.5


def lose_resolution(unit: Tensor, strength: float, rng: torch.Generator, home: ImageHome) -> Tensor:
    """Average down to a sixteenth of the side length, but at least three pixels."""
    side = _side(unit)
    return coarsen(unit, math.pow(min(1.0, max(3 / side, 1 / 16)), strength))


def kill_pixels(unit: Tensor, strength: float, rng: torch.Generator, home: ImageHome) -> Tensor:
    """Set up to 40 % of the pixels to black or white, and up to 40 % of the rows to black."""
    return stick_pixels(unit, 0.4 * strength, 0.4 * strength, 1.0, _fixed(rng))


def light_unevenly(unit: Tensor, strength: float, rng: torch.Generator, home: ImageHome) -> Tensor:
    """Add a smooth gradient of random direction behind the image."""
    ramp = _ramp(unit, rng)
    return _lay_behind(unit, strength * (ramp - ramp.min()) / (ramp.max() - ramp.min()).clamp(min=1e-6), home)


def lay_stripes(unit: Tensor, strength: float, rng: torch.Generator, home: ImageHome) -> Tensor:
    """Add stripes of random direction behind the image, four across its side."""
    return _lay_behind(unit, strength * (0.5 + 0.5 * torch.sin(4 * math.pi * _ramp(unit, rng))), home)


def lay_texture(unit: Tensor, strength: float, rng: torch.Generator, home: ImageHome) -> Tensor:
    """Add a cloud texture behind the image."""
    height, width = unit.shape[-2:]
    size = 1 << max(1, (max(height, width) - 1).bit_length())
    clouds = plasma(1, size, 1.3, _fixed(rng))[0, :height, :width]
    return _lay_behind(unit, strength * (3 * clouds - 1).clamp(0, 1).to(unit), home)


def translate(unit: Tensor, strength: float, rng: torch.Generator, home: ImageHome) -> Tensor:
    """Shift the image in a random direction, by up to 40 % of its side."""
    angle = 2 * math.pi * float(torch.rand((), generator=_fixed(rng)))
    return _warp(unit, home, ((1, 0, 0.8 * strength * math.cos(angle)), (0, 1, 0.8 * strength * math.sin(angle))))


def rotate(unit: Tensor, strength: float, rng: torch.Generator, home: ImageHome) -> Tensor:
    """Rotate the image in one direction, by up to 90 degrees."""
    sign = 1 if torch.rand((), generator=_fixed(rng)) < 0.5 else -1
    angle, aspect = sign * strength * math.pi / 2, unit.shape[-2] / unit.shape[-1]
    cos, sin = math.cos(angle), math.sin(angle)
    return _warp(unit, home, ((cos, -sin * aspect, 0), (sin / aspect, cos, 0)))


def shrink(unit: Tensor, strength: float, rng: torch.Generator, home: ImageHome) -> Tensor:
    """Shrink the image down to 35 % of its side."""
    factor = 1 / (1 - 0.65 * strength)
    return _warp(unit, home, ((factor, 0, 0), (0, factor, 0)))


def enlarge(unit: Tensor, strength: float, rng: torch.Generator, home: ImageHome) -> Tensor:
    """Enlarge the image up to 2.5 times, cropped to its frame."""
    factor = 1 / (1 + 1.5 * strength)
    return _warp(unit, home, ((factor, 0, 0), (0, factor, 0)))


def invert(unit: Tensor, strength: float, rng: torch.Generator, home: ImageHome) -> Tensor:
    """Invert all levels above a threshold that sinks from white to black."""
    return torch.where(unit >= 1 - strength, 1 - unit, unit)


def _side(unit: Tensor) -> int:
    return min(unit.shape[-2:])


def _detail(unit: Tensor) -> Tensor:
    return unit - gaussian_blur(unit, max(1.0, 0.04 * _side(unit)), truncate=3)


def _ramp(unit: Tensor, rng: torch.Generator) -> Tensor:
    """Return a linear ramp in a random direction, `[H, W]`, that rises by 2 over the side of the image."""
    angle = 2 * math.pi * float(torch.rand((), generator=_fixed(rng)))
    rows, columns = (torch.arange(side).to(unit) * (2 / _side(unit)) for side in unit.shape[-2:])
    return rows[:, None] * math.sin(angle) + columns * math.cos(angle)


def _lay_behind(unit: Tensor, pattern: Tensor, home: ImageHome) -> Tensor:
    """Add a pattern to the background: light on dark backgrounds, shade on bright ones; objects stay in front."""
    pattern = 0.9 * pattern
    return unit * (1 - pattern) if home.mean.mean() > 0.5 else unit + pattern * (1 - unit)


def _warp(unit: Tensor, home: ImageHome, matrix: tuple[tuple[float, ...], ...]) -> Tensor:
    """Transform images by an affine matrix. Uncovered areas get a uniform background, else the edge pixels."""
    theta = torch.tensor(matrix).to(unit)[None]
    grid = functional.affine_grid(theta, [1, *unit.shape[1:]], align_corners=False).expand(len(unit), -1, -1, -1)
    if home.fill is None:
        return functional.grid_sample(unit, grid, padding_mode="border", align_corners=False)
    fill = home.fill.to(unit)
    return fill + functional.grid_sample(unit - fill, grid, padding_mode="zeros", align_corners=False)


# Signals, and what tables share with them


def amplify(values: Tensor, strength: float, rng: torch.Generator, home: Any) -> Tensor:
    """Raise the gain about the mean, up to five times."""
    return values * math.pow(5, strength)


def attenuate(values: Tensor, strength: float, rng: torch.Generator, home: Any) -> Tensor:
    """Lower the gain about the mean, down to 5 %."""
    return values * math.pow(0.05, strength)


def offset_channels(values: Tensor, strength: float, rng: torch.Generator, home: Any) -> Tensor:
    """Shift each channel or column by its own random offset, with a scale of up to three standard deviations."""
    drawn = _per_channel(values, rng)
    return values + 3 * strength * drawn / drawn.abs().mean()


def offset_all(values: Tensor, strength: float, rng: torch.Generator, home: Any) -> Tensor:
    """Shift all channels or columns up by the same amount, up to three standard deviations."""
    return values + 3 * strength


def add_noise(values: Tensor, strength: float, rng: torch.Generator, home: Any) -> Tensor:
    """Add white noise with a standard deviation of up to three."""
    return values + 3 * strength * _normal(values, rng)


def quantise(values: Tensor, strength: float, rng: torch.Generator, home: Any) -> Tensor:
    """Round to steps of up to four standard deviations."""
    step = _grow(0.02, 4, strength)
    return (values / step).round() * step


def kill_channels(values: Tensor, strength: float, rng: torch.Generator, home: Any) -> Tensor:
    """Fade channels or columns to their means one after another, up to 80 % of them."""
    count = values.shape[1]
    dead = (0.8 * strength * count - _ranks(count, rng)).clamp(0, 1).to(values)
    return values * (1 - dead).view(1, -1, *(1 for _ in values.shape[2:]))


def wander(signals: Tensor, strength: float, rng: torch.Generator, home: SignalHome) -> Tensor:
    """Add a slow baseline wave of random phase, with an amplitude of up to four standard deviations."""
    time = _places(signals) / signals.shape[-1]
    return signals + 4 * strength * torch.sin(2 * math.pi * time + _phases(signals, rng))


def smooth(signals: Tensor, strength: float, rng: torch.Generator, home: SignalHome) -> Tensor:
    """Smooth by a Gaussian with a standard deviation of 0.2 samples up to 8 % of the length."""
    return _smooth(signals, _grow(0.2, 0.08 * signals.shape[-1], strength))


def tick_fast(signals: Tensor, strength: float, rng: torch.Generator, home: SignalHome) -> Tensor:
    """Resample as with a clock up to three times as fast: the signal is stretched and its end cut off."""
    return sample_linear(signals, _places(signals) / math.pow(3, strength))


def clip(signals: Tensor, strength: float, rng: torch.Generator, home: SignalHome) -> Tensor:
    """Clip at a limit, from the largest deviation at home down to a tenth of a standard deviation."""
    peak = home.peak.to(signals)
    limit = peak * (0.1 / peak.clamp(min=0.1)) ** strength
    return signals.clamp(-limit, limit)


def delay(signals: Tensor, strength: float, rng: torch.Generator, home: SignalHome) -> Tensor:
    """Delay by up to 60 % of the length, repeating the first value."""
    return _slide(signals, 0.6 * strength * signals.shape[-1])


def hum(signals: Tensor, strength: float, rng: torch.Generator, home: SignalHome) -> Tensor:
    """Add a tone of random phase, up to four standard deviations high, at 5 to 15 % of the sampling rate."""
    frequency = 0.05 + 0.1 * float(torch.rand((), generator=_fixed(rng)))
    return signals + 4 * strength * torch.sin(2 * math.pi * frequency * _places(signals) + _phases(signals, rng))


def drop_out(signals: Tensor, strength: float, rng: torch.Generator, home: SignalHome) -> Tensor:
    """Set random twentieths of each signal to the channel's mean, each with a probability of up to 80 %.

    The twentieths are drawn anew for each sample and are the same in all channels. `strength` scales the probability.
    """
    lost = torch.rand(len(signals), 1, 20, generator=rng, device=signals.device) < 0.8 * strength
    length = signals.shape[-1]
    return signals.masked_fill(lost[..., torch.arange(length, device=signals.device) * 20 // length], 0.0)


def turn_phase(signals: Tensor, strength: float, rng: torch.Generator, home: SignalHome) -> Tensor:
    """Rotate the phase of all frequencies, up to inverted polarity."""
    turned = torch.fft.rfft(signals) * cmath.exp(1j * math.pi * strength)
    result: Tensor = torch.fft.irfft(turned, n=signals.shape[-1])
    return result


def keep_changes(signals: Tensor, strength: float, rng: torch.Generator, home: SignalHome) -> Tensor:
    """Remove components slower than a fiftieth of the length."""
    return signals - strength * _smooth(signals, max(1.0, 0.02 * signals.shape[-1]))


def _slide(values: Tensor, distance: float) -> Tensor:
    return sample_linear(values, (_places(values) - distance).clamp(min=0))


# Tables


def amplify_columns(table: Tensor, strength: float, rng: torch.Generator, home: TableHome) -> Tensor:
    """Scale each column about its mean by a random factor, typically up to seven."""
    return table * torch.exp(2 * strength * _per_channel(table, rng))


def warp(table: Tensor, strength: float, rng: torch.Generator, home: TableHome) -> Tensor:
    """Bend the response of each column: raise the standardised value to a power from 1/4 to 4."""
    powers = torch.exp(strength * math.log(4) * _per_channel(table, rng).clamp(-1, 1))
    return table.sign() * table.abs() ** powers


def bend_baseline(table: Tensor, strength: float, rng: torch.Generator, home: TableHome) -> Tensor:
    """Add a smooth curve along the columns, up to four standard deviations high, with a random height per sample."""
    phase = 2 * math.pi * float(torch.rand((), generator=_fixed(rng)))
    curve = torch.sin(1.5 * math.pi * _places(table) / table.shape[-1] + phase)
    height = 0.5 + torch.rand(len(table), 1, generator=rng, device=table.device)
    return table + 4 * strength * height * curve


def smooth_columns(table: Tensor, strength: float, rng: torch.Generator, home: TableHome) -> Tensor:
    """Smooth along the columns by a Gaussian with a standard deviation of 0.2 columns up to 10 % of all columns."""
    width = _grow(0.2, max(1.5, 0.1 * table.shape[-1]), strength)
    return _along_columns(table, home, lambda values: _smooth(values, width))


def leak(table: Tensor, strength: float, rng: torch.Generator, home: TableHome) -> Tensor:
    """Mix each column with the mean of its neighbours, until replaced by it."""
    return torch.lerp(table, (table.roll(1, -1) + table.roll(-1, -1)) / 2, strength)


def clip_columns(table: Tensor, strength: float, rng: torch.Generator, home: TableHome) -> Tensor:
    """Clip each column at a quantile of home, from the maximum down to the fifth percentile."""
    rank = torch.full((1,), (1 - 0.95 * strength) * (QUANTILES - 1), device=table.device)
    limits = sample_linear(home.quantiles.to(table).T, rank)
    return torch.minimum(table, limits.T)


def slide_columns(table: Tensor, strength: float, rng: torch.Generator, home: TableHome) -> Tensor:
    """Shift along the columns by up to a fifth of them, at least two."""
    distance = strength * max(2.0, 0.2 * table.shape[-1])
    return _along_columns(table, home, lambda values: _slide(values, distance))


def invert_columns(table: Tensor, strength: float, rng: torch.Generator, home: TableHome) -> Tensor:
    """Mirror columns at their means one after another, up to all of them."""
    count = table.shape[1]
    return table * (1 - 2 * (strength * count - _ranks(count, rng)).clamp(0, 1).to(table))


def shuffle_columns(table: Tensor, strength: float, rng: torch.Generator, home: TableHome) -> Tensor:
    """Permute up to all columns, in standardised units."""
    return _swap(table, strength, rng)


def _along_columns(table: Tensor, home: TableHome, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a change along the columns: to spectra in their own units, to other tables in standardised units."""
    if not home.ordered:
        return change(table)
    origin, scale = home.origin.to(table), home.scale.to(table)
    return (change(table * scale + origin) - origin) / without_zeros(scale)


# A battery uses families in this order, so those that matter most for estimates come first.
IMAGE_DEVICES = (
    Entry("brighter", "levels", brighten),
    Entry("darker", "levels", darken),
    Entry("out of focus", "blur", defocus),
    Entry("motion blur", "blur", move),
    Entry("noise", "noise", add_photon_noise),
    Entry("translation", "geometry", translate),
    Entry("rotation", "geometry", rotate),
    Entry("smaller", "geometry", shrink),
    Entry("larger", "geometry", enlarge),
    Entry("textured background", "background", lay_texture),
    Entry("uneven light", "background", light_unevenly),
    Entry("striped background", "background", lay_stripes),
    Entry("low contrast", "contrast", lose_contrast),
    Entry("colour cast", "colour", cast_colour, least=2),
    Entry("mixed channels", "colour", mix_channels, least=2),
    Entry("compression", "compression", compress),
    Entry("low resolution", "resolution", lose_resolution),
    Entry("gamma", "gamma", gamma),
    Entry("inverse gamma", "gamma", inverse_gamma),
    Entry("dead pixels", "defects", kill_pixels),
    Entry("sharpened", "sharpness", sharpen),
    Entry("inverted", "inversion", invert, mendable=False),
    Entry("edges only", "sharpness", keep_edges, mendable=False),
)

SIGNAL_DEVICES = (
    Entry("higher gain", "gain", amplify),
    Entry("lower gain", "gain", attenuate),
    Entry("noise", "noise", add_noise),
    Entry("wandering baseline", "drift", wander),
    Entry("smoothed", "low-pass", smooth),
    Entry("offset", "offset", offset_channels),
    Entry("fast clock", "clock", tick_fast),
    Entry("delay", "timing", delay),
    Entry("saturation", "saturation", clip),
    Entry("dead channels", "channels", kill_channels, least=2),
    Entry("mixed channels", "channels", mix_channels, least=2),
    Entry("hum", "hum", hum),
    Entry("drop-outs", "drop-outs", drop_out),
    Entry("coarse levels", "resolution", quantise),
    Entry("inverted polarity", "polarity", turn_phase, mendable=False),
    Entry("high-pass", "high-pass", keep_changes, mendable=False),
)

TABLE_DEVICES = (
    Entry("gain per column", "gain", amplify_columns),
    Entry("higher gain", "gain", amplify),
    Entry("lower gain", "gain", attenuate),
    Entry("offset per column", "offset", offset_channels),
    Entry("common offset", "offset", offset_all),
    Entry("noise", "noise", add_noise),
    Entry("bent response", "warp", warp),
    Entry("dead columns", "defects", kill_channels, least=2),
    Entry("bent baseline", "baseline", bend_baseline, least=3),
    Entry("saturation", "saturation", clip_columns),
    Entry("smoothed columns", "smoothing", smooth_columns, least=3),
    Entry("cross-talk", "cross-talk", leak, least=3),
    Entry("shifted columns", "shift", slide_columns, least=3),
    Entry("coarse levels", "resolution", quantise),
    Entry("inverted columns", "inversion", invert_columns, mendable=False),
    Entry("shuffled columns", "shuffling", shuffle_columns, mendable=False, least=2),
)
