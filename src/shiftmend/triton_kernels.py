"""The kernels behind `kernels.py`. Imported on a GPU only; see there for the formula."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def _shares(values, low, scale, inner, sharpness, bins, BINS: tl.constexpr, TOTAL: tl.constexpr):
    """Soft assignment `[rows, columns, BINS]` of values `[rows, columns]`; padding bins get nothing."""
    x = (values - low) * scale
    # a NaN must come out as one, and these two would swallow it
    x = tl.minimum(tl.maximum(x, -1e3, propagate_nan=tl.PropagateNan.ALL), 1e3, propagate_nan=tl.PropagateNan.ALL)
    home = tl.floor(x * inner) + 1
    home = tl.minimum(tl.maximum(home, 0), TOTAL - 1)
    away = bins - home[:, :, None]
    logits = away * (x[:, :, None] - (bins + home[:, :, None] - 1) * (0.5 / inner)) * sharpness
    weights = tl.where(bins < TOTAL, tl.exp(logits), 0.0)
    return weights / tl.sum(weights, 2)[:, :, None]


@triton.jit
def alone(
    values, low, scale, source, result, slopes, samples, units,
    inner, sharpness, forward, backward, epsilon,
    TOTAL: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Histogram, divergence and its slope at every value, for a few units and all of their samples."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    known = column < units
    bins = tl.arange(0, BINS)[None, None, :].to(tl.float32)
    at = tl.load(low + column, mask=known, other=0.0)[None, :]
    by = tl.load(scale + column, mask=known, other=0.0)[None, :]
    counts = tl.zeros([COLUMNS, BINS], dtype=tl.float32)
    for start in range(0, samples, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row[:, None] < samples) & known[None, :]
        x = tl.load(values + row[:, None] * units + column[None, :], mask=inside, other=0.0).to(tl.float32)
        shares = _shares(x, at, by, inner, sharpness, bins, BINS, TOTAL)
        counts += tl.sum(tl.where(inside[:, :, None], shares, 0.0), 0)
    q = counts / samples
    bin_ = tl.arange(0, BINS)[None, :]
    real = known[:, None] & (bin_ < TOTAL)
    p = tl.load(source + column[:, None] * TOTAL + bin_, mask=real, other=0.0)
    usable = (tl.load(scale + column, mask=known, other=0.0) > 0)[:, None] & (bin_ < TOTAL)
    distance = tl.log(p + epsilon) - tl.log(q + epsilon)
    weight = tl.where(usable, forward * p - backward * q, 0.0)
    tl.store(result + column, tl.sum(weight * distance, 1), mask=known)
    gradient = tl.where(usable, -(forward * p - backward * q) / (q + epsilon) - backward * distance, 0.0)
    slope = by * sharpness / samples
    for start in range(0, samples, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row[:, None] < samples) & known[None, :]
        x = tl.load(values + row[:, None] * units + column[None, :], mask=inside, other=0.0).to(tl.float32)
        shares = _shares(x, at, by, inner, sharpness, bins, BINS, TOTAL)
        out = slope * _slope(shares, gradient[None, :, :], bins)
        tl.store(slopes + row[:, None] * units + column[None, :], out, mask=inside)


@triton.jit
def _slope(shares, gradient, bins):
    """Raising a value raises each bin's share by share x (bin - mean bin)."""
    mean = tl.sum(shares * bins, 2)
    return tl.sum(shares * gradient * (bins - mean[:, :, None]), 2)


@triton.jit
def counts(
    values, low, scale, partial, samples, units, each,
    inner, sharpness,
    TOTAL: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Soft counts of a few units over a part of the samples."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    known = column < units
    bins = tl.arange(0, BINS)[None, None, :].to(tl.float32)
    at = tl.load(low + column, mask=known, other=0.0)[None, :]
    by = tl.load(scale + column, mask=known, other=0.0)[None, :]
    first = tl.program_id(1) * each
    last = tl.minimum(first + each, samples)
    sums = tl.zeros([COLUMNS, BINS], dtype=tl.float32)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row[:, None] < last) & known[None, :]
        place = row[:, None].to(tl.int64) * units + column[None, :]
        x = tl.load(values + place, mask=inside, other=0.0).to(tl.float32)
        shares = _shares(x, at, by, inner, sharpness, bins, BINS, TOTAL)
        sums += tl.sum(tl.where(inside[:, :, None], shares, 0.0), 0)
    bin_ = tl.arange(0, BINS)[None, :]
    place = (tl.program_id(1).to(tl.int64) * units + column[:, None]) * TOTAL + bin_
    tl.store(partial + place, sums, mask=known[:, None] & (bin_ < TOTAL))


@triton.jit
def slopes(
    values, low, scale, gradient, result, samples, units,
    inner, sharpness, share,
    TOTAL: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The derivative by each value, from that by the normalised counts."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    known = column < units
    bins = tl.arange(0, BINS)[None, None, :].to(tl.float32)
    at = tl.load(low + column, mask=known, other=0.0)[None, :]
    by = tl.load(scale + column, mask=known, other=0.0)[None, :]
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = (row[:, None] < samples) & known[None, :]
    place = row[:, None].to(tl.int64) * units + column[None, :]
    x = tl.load(values + place, mask=inside, other=0.0).to(tl.float32)
    bin_ = tl.arange(0, BINS)[None, :]
    g = tl.load(gradient + column[:, None] * TOTAL + bin_, mask=known[:, None] & (bin_ < TOTAL), other=0.0)
    shares = _shares(x, at, by, inner, sharpness, bins, BINS, TOTAL)
    out = by * sharpness * share * _slope(shares, g[None, :, :], bins)
    tl.store(result + place, out, mask=inside)


@triton.jit
def _neighbours(values, low, scale, inner, sharpness, TOTAL: tl.constexpr):
    """The bin a value lies in, and its share of that bin, of the one below and of the one above.

    Where bins are wide against the temperature, nothing else gets more than exp(-width / temperature).
    """
    x = (values - low) * scale
    x = tl.minimum(tl.maximum(x, -1e3, propagate_nan=tl.PropagateNan.ALL), 1e3, propagate_nan=tl.PropagateNan.ALL)
    home = tl.minimum(tl.maximum(tl.floor(x * inner) + 1, 0), TOTAL - 1)
    down = tl.where(home > 0, tl.exp(((home - 1) / inner - x) * sharpness), 0.0)
    up = tl.where(home < TOTAL - 1, tl.exp((x - home / inner) * sharpness), 0.0)
    here = 1 / (1 + up + down)
    return home.to(tl.int32), here, down * here, up * here


@triton.jit
def sharp_counts(
    values, low, scale, partial, samples, units, each,
    inner, sharpness,
    TOTAL: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """As `counts`, from three neighbouring bins a value."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    known = column < units
    at = tl.load(low + column, mask=known, other=0.0)[None, :]
    by = tl.load(scale + column, mask=known, other=0.0)[None, :]
    first = tl.program_id(1) * each
    last = tl.minimum(first + each, samples)
    bin_ = tl.arange(0, BINS)[None, :]
    sums = tl.zeros([COLUMNS, BINS], dtype=tl.float32)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row[:, None] < last) & known[None, :]
        place = row[:, None].to(tl.int64) * units + column[None, :]
        x = tl.load(values + place, mask=inside, other=0.0).to(tl.float32)
        home, here, down, up = _neighbours(x, at, by, inner, sharpness, TOTAL)
        home = tl.where(inside, home, -2)
        for j in tl.static_range(TOTAL):
            mass = tl.where(home == j, here, tl.where(home == j + 1, down, tl.where(home == j - 1, up, 0.0)))
            sums += tl.where(bin_ == j, tl.sum(mass, 0)[:, None], 0.0)
    place = (tl.program_id(1).to(tl.int64) * units + column[:, None]) * TOTAL + bin_
    tl.store(partial + place, sums, mask=known[:, None] & (bin_ < TOTAL))


@triton.jit
def sharp_slopes(
    values, low, scale, gradient, result, samples, units,
    inner, sharpness, share,
    TOTAL: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """As `slopes`, from three neighbouring bins a value."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    known = column < units
    at = tl.load(low + column, mask=known, other=0.0)[None, :]
    by = tl.load(scale + column, mask=known, other=0.0)[None, :]
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = (row[:, None] < samples) & known[None, :]
    place = row[:, None].to(tl.int64) * units + column[None, :]
    x = tl.load(values + place, mask=inside, other=0.0).to(tl.float32)
    home, here, down, up = _neighbours(x, at, by, inner, sharpness, TOTAL)
    table = gradient + column[None, :] * TOTAL + home
    g = tl.load(table, mask=inside, other=0.0)
    below = tl.load(table - 1, mask=inside & (home > 0), other=0.0)
    above = tl.load(table + 1, mask=inside & (home < TOTAL - 1), other=0.0)
    mean = up - down
    out = up * above * (1 - mean) - down * below * (1 + mean) - here * g * mean
    tl.store(result + place, by * sharpness * share * out, mask=inside)
