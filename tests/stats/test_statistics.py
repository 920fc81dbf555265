from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shiftmend.errors import ProfileError
from shiftmend.stats.histograms import Bins
from shiftmend.stats.slices import Projector, Slices, random_directions
from shiftmend.stats.statistics import CountTracker, Histogram, RangeTracker
from shiftmend.utils.devices import AT_ONCE

UNITS = 5


def sample(count: int = 400, seed: int = 0, units: int = UNITS) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-3, 3, units)
    return torch.randn(count, units, generator=generator) * scale + scale * torch.linspace(-20, 20, units)


def cut_up(values: Tensor, sizes: list[int]) -> list[Tensor]:
    """Parts of the sizes given; what remains is the last part."""
    parts, start = [], 0
    for size in sizes:
        parts.append(values[start : start + size])
        start += size
    return [part for part in (*parts, values[start:]) if len(part)]


def soft_counts(values: Tensor, low: Tensor, high: Tensor, bins: Bins) -> np.ndarray:
    """Equation (4) of the paper in float64, written out."""
    x = (values.double().numpy() - low.double().numpy()) / (high.double().numpy() - low.double().numpy())
    cuts = np.arange(bins.total - 1) / (bins.total - 2)
    logits = np.arange(1, bins.total + 1) * x[..., None] - np.concatenate([[0.0], np.cumsum(cuts)])
    logits /= bins.temperature
    weight = np.exp(logits - logits.max(-1, keepdims=True))
    return (weight / weight.sum(-1, keepdims=True)).sum(0)


def counted(values: Tensor, low: Tensor, high: Tensor, bins: Bins | None = None) -> Histogram:
    tracker = CountTracker(low, high, bins or Bins())
    tracker.update(values)
    return tracker.histogram()


def histogram_of(values: Tensor) -> Histogram:
    return counted(values, values.amin(0), values.amax(0))


# --- ranges ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_range_mean_and_deviation_against_numpy(dtype: torch.dtype) -> None:
    values = (sample() / 500).to(dtype)
    tracker = RangeTracker()
    for part in values.split(37):
        tracker.update(part)
    reference = values.double().numpy()
    assert tracker.samples == 400
    np.testing.assert_allclose(tracker.low.numpy(), reference.min(0), rtol=1e-7)
    np.testing.assert_allclose(tracker.high.numpy(), reference.max(0), rtol=1e-7)
    np.testing.assert_allclose(tracker.mean.numpy(), reference.mean(0), rtol=1e-12)
    np.testing.assert_allclose(tracker.deviation.numpy(), reference.std(0), rtol=1e-9)


def test_a_small_deviation_beside_a_large_mean_survives() -> None:
    """Sums of squares would lose it: 1e6 squared against 1 in float32."""
    values = 1e6 + torch.randn(5000, 1).round()  # whole numbers, so that float32 holds them exactly
    tracker = RangeTracker()
    for part in values.split(100):
        tracker.update(part)
    np.testing.assert_allclose(tracker.deviation.numpy(), values.double().numpy().std(0), rtol=1e-9)


@pytest.mark.slow
@given(st.lists(st.integers(1, 200), max_size=6), st.integers(0, 20))
def test_ranges_do_not_depend_on_batches_or_order(sizes: list[int], seed: int) -> None:
    values = sample(300)
    whole, parts = RangeTracker(), RangeTracker()
    whole.update(values)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(seed))
    for part in cut_up(values[order], sizes):
        parts.update(part)
    assert torch.equal(whole.low, parts.low)
    assert torch.equal(whole.high, parts.high)
    assert parts.samples == 300
    torch.testing.assert_close(parts.mean, whole.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(parts.deviation, whole.deviation, rtol=1e-11, atol=1e-12)


def test_one_sample_and_one_at_a_time() -> None:
    tracker = RangeTracker()
    tracker.update(torch.tensor([[3.0, -1.0]]))
    assert tracker.deviation.tolist() == [0, 0]
    tracker.update(torch.tensor([[5.0, -1.0]]))
    assert tracker.low.tolist() == [3, -1]
    assert tracker.high.tolist() == [5, -1]
    assert tracker.mean.tolist() == [4, -1]
    assert tracker.deviation.tolist() == [1, 0]


def test_a_nan_is_not_swallowed() -> None:
    for bad in (float("nan"), float("inf")):
        values = torch.zeros(30, 2)
        values[13, 1] = bad
        tracker = RangeTracker()
        for part in values.split(10):
            tracker.update(part)
        finite = torch.isfinite(tracker.low) & torch.isfinite(tracker.high)
        assert finite.tolist() == [True, False]


# --- counts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bins", [Bins(), Bins(8, "paper"), Bins(8, "reference", 0.05), Bins(3, "paper")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_counts_against_numpy(bins: Bins, dtype: torch.dtype) -> None:
    home, values = sample().to(dtype), sample(350, seed=1).to(dtype)
    low, high = home.amin(0), home.amax(0)
    tracker = CountTracker(low, high, bins)
    for part in values.split(41):
        tracker.update(part)
    assert tracker.samples == 350
    np.testing.assert_allclose(
        tracker.counts.numpy(), soft_counts(values, low, high, bins), rtol=1e-4 if dtype == torch.float32 else 1e-9
    )
    np.testing.assert_allclose(tracker.counts.sum(1).numpy(), 350, rtol=1e-5)
    stored = tracker.histogram()
    assert stored.counts.dtype == stored.low.dtype == stored.high.dtype == torch.float32
    assert stored.samples == 350


@pytest.mark.slow
@given(st.lists(st.integers(1, 200), max_size=6), st.integers(0, 20))
def test_counts_do_not_depend_on_batches_or_order(sizes: list[int], seed: int) -> None:
    values = sample(300)
    low, high = values.amin(0), values.amax(0)
    whole = counted(values, low, high)
    tracker = CountTracker(low, high, Bins())
    order = torch.randperm(300, generator=torch.Generator().manual_seed(seed))
    for part in cut_up(values[order], sizes):
        tracker.update(part)
    torch.testing.assert_close(tracker.histogram().counts, whole.counts, rtol=1e-5, atol=1e-4)


def test_a_single_sample_still_counts_after_very_many() -> None:
    tracker = CountTracker(torch.zeros(1), torch.ones(1), Bins())
    tracker.counts += 2**25  # from which on float32 leaves out odd numbers
    tracker.update(torch.tensor([[0.55]]))
    assert float((tracker.counts - 2**25).sum()) == pytest.approx(1, abs=1e-3)


def test_neither_tracker_holds_on_to_a_graph() -> None:
    values = sample().requires_grad_()
    tracker = RangeTracker()
    tracker.update(values)
    counter = CountTracker(tracker.low, tracker.high, Bins())
    counter.update(values)
    assert not tracker.mean.requires_grad
    assert not counter.counts.requires_grad


# --- histograms ------------------------------------------------------------------------------------------------------


def test_merged_parts_equal_the_whole() -> None:
    values = sample(500)
    low, high = values.amin(0), values.amax(0)
    whole = counted(values, low, high)
    first, second = counted(values[:120], low, high), counted(values[120:], low, high)
    for merged in (Histogram.mixed([first, second], [1, 1]), Histogram.mixed([second, first], [1, 1])):
        assert merged.samples == 500
        torch.testing.assert_close(merged.counts, whole.counts, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(merged.counts.sum(1), torch.full((UNITS,), 500.0), rtol=1e-5, atol=0)
    assert first.samples == 120  # the parts stay as they were


def test_histograms_of_other_ranges_or_bins_do_not_merge() -> None:
    values = sample()
    low, high = values.amin(0), values.amax(0)
    home = counted(values, low, high)
    for other in (
        counted(values, low - 1, high),
        counted(values, low, high + 1),
        counted(values, low, high, Bins(7)),
        counted(values, low, high, Bins(8, "reference", 0.02)),
        counted(values[:, :-1], low[:-1], high[:-1]),
    ):
        with pytest.raises(ProfileError, match="different ranges or bins"):
            Histogram.mixed([home, other], [1, 1])


@pytest.mark.parametrize("kind", ["psi", "symmetric-kl", "kl-source-target", "kl-target-source"])
def test_divergence_is_zero_for_the_same_and_positive_for_others(kind: str) -> None:
    values = sample()
    home = histogram_of(values)
    assert home.mean_divergence(home.probabilities, kind) == 0
    torch.testing.assert_close(home.mean_divergence(home.of(values), kind), torch.tensor(0.0), atol=1e-6, rtol=0)
    assert bool((home.per_unit(home.of(values * 1.1), kind) > 1e-3).all())


def test_mean_divergence_against_numpy() -> None:
    home, target = histogram_of(sample()), sample(350, seed=1)
    p = home.counts.double().numpy() / 400
    q = soft_counts(target, home.low, home.high, home.bins) / 350
    each = ((p - q) * (np.log(p + 1e-8) - np.log(q + 1e-8))).sum(1) / math.log(10)
    counts = home.of(target)
    np.testing.assert_allclose(home.per_unit(counts).numpy(), each, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(float(home.mean_divergence(counts)), each.mean(), rtol=1e-4, atol=1e-6)
    for kind, one, other in (("kl-source-target", p, q), ("kl-target-source", q, p)):
        each = (one * (np.log(one + 1e-8) - np.log(other + 1e-8))).sum(1)
        np.testing.assert_allclose(home.per_unit(counts, kind).numpy(), each, rtol=1e-4, atol=1e-6)


def test_constant_units_take_no_part() -> None:
    values = sample(units=6)
    values[:, 1] = 0.0
    values[:, 4] = 123.456
    home = histogram_of(values)
    assert home.usable.tolist() == [True, False, True, True, False, True]
    assert home.usable_count == 4
    assert home.units == 6
    target = (values + 50).requires_grad_()
    each = home.per_unit(home.of(target))
    assert each[[1, 4]].tolist() == [0, 0]
    torch.testing.assert_close(home.mean_divergence(home.of(target)), each.sum() / 4)
    each.sum().backward()
    assert target.grad is not None
    assert bool(torch.isfinite(target.grad).all())
    assert not bool(target.grad[:, [1, 4]].any())


def test_no_usable_unit_is_no_divergence() -> None:
    home = histogram_of(torch.ones(10, 3))
    assert home.usable_count == 0
    assert float(home.mean_divergence(home.of(torch.randn(10, 3)))) == 0


def test_moving_a_histogram_keeps_it_whole() -> None:
    home = histogram_of(sample())
    moved = home.to(torch.device("cpu"))
    assert moved.usable_count == home.usable_count == UNITS
    assert torch.equal(moved.probabilities, home.probabilities)
    away = home.to(torch.device("meta"))  # where nothing can be read, so that it must be known already
    assert {value.device.type for value in (away.counts, away.low, away.high, away.scale)} == {"meta"}
    assert (away.usable_count, away.samples, away.bins) == (UNITS, home.samples, home.bins)


# --- directions and slices -------------------------------------------------------------------------------------------


def projector_of(values: Tensor, count: int = 16, seed: int = 3) -> Projector:
    tracker = RangeTracker()
    tracker.update(values)
    usable = histogram_of(values).usable
    return Projector.build(tracker.mean.float(), tracker.deviation.float(), usable, count, seed)


def test_slices_against_numpy() -> None:
    values = sample(1000)
    standard = (values.double().numpy() - values.double().numpy().mean(0)) / values.double().numpy().std(0)
    expected = standard @ random_directions(16, UNITS, 3).double().numpy().T
    got = projector_of(values)(values)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-4)
    np.testing.assert_allclose(got.mean(0).numpy(), 0, atol=1e-4)


def test_constant_units_are_not_in_any_slice() -> None:
    values = sample(1000, units=6)
    values[:, 2] = 7.0
    values[:, 5] = 0.0
    projector = projector_of(values)
    assert not bool(projector.weight[:, [2, 5]].any())
    moved = values.clone()
    moved[:, [2, 5]] += 1e6
    torch.testing.assert_close(projector(moved), projector(values))
    # what remains is a direction of length one again
    deviation = values.double().numpy().std(0)
    np.testing.assert_allclose(np.linalg.norm(projector.weight.numpy() * deviation, axis=1), 1, rtol=1e-5)


def test_all_units_constant_gives_zeros() -> None:
    projector = Projector.build(torch.ones(4), torch.zeros(4), torch.zeros(4, dtype=torch.bool), 8, 0)
    assert not bool(projector(torch.randn(5, 4)).any())


def test_slices_are_taken_in_full_precision_under_autocast() -> None:
    values = sample(200)
    projector = projector_of(values)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(projector(values), projector(values.float()))
        assert projector(values).dtype == torch.float32
    assert projector(values.double()).dtype == projector(values.bfloat16()).dtype == torch.float32


def test_slices_see_what_marginals_cannot() -> None:
    """Two units that were correlated at home and no longer are: same marginals, another joint distribution."""
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(4000, 1, generator=generator)
    home = shared + 0.3 * torch.randn(4000, 2, generator=generator)
    target = torch.stack([home[:, 0], home[torch.randperm(4000, generator=generator), 1]], 1)
    marginals = histogram_of(home)
    projector = projector_of(home, 64)
    slices = Slices(histogram_of(projector(home)), 3, projector)
    assert float(marginals.mean_divergence(marginals.of(target))) < 1e-6
    assert float(slices.divergence(home)) < 1e-6
    assert float(slices.divergence(target)) > 0.05
    moved = slices.to(torch.device("cpu"))
    assert moved.seed == 3
    torch.testing.assert_close(moved.divergence(target), slices.divergence(target))


def test_slices_in_other_directions_do_not_merge_and_move_whole() -> None:
    values = sample()
    projector = projector_of(values)
    histogram = histogram_of(projector(values))
    slices = Slices(histogram, 3, projector)
    assert Slices.mixed([slices, Slices(histogram, 3, projector_of(values))], [1, 1]).samples == 800
    for other in (Slices(histogram, 4, projector), Slices(histogram, 3, projector_of(2 * values))):
        with pytest.raises(ProfileError, match="different directions"):
            Slices.mixed([slices, other], [1, 1])
    away = slices.to(torch.device("meta"))
    assert {away.histogram.counts.device.type, away.projector.weight.device.type} == {"meta"}
    assert (away.projector.weight.shape, away.projector.offset.shape) == (projector.weight.shape, (16,))


def test_gradients_pass_through_slices() -> None:
    home = sample(500)
    projector = projector_of(home)
    slices = Slices(histogram_of(projector(home)), 3, projector)
    target = (home * 1.5).requires_grad_()
    slices.divergence(target).backward()
    assert target.grad is not None
    assert bool(torch.isfinite(target.grad).all())
    assert bool((target.grad.abs().sum(0) > 0).all())


def test_work_on_large_maps_is_done_in_parts_and_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(101, 5, generator=torch.Generator().manual_seed(0))
    projector = Projector.build(values.mean(0), values.std(0), torch.ones(5, dtype=torch.bool), 8, 1)
    monkeypatch.setitem(AT_ONCE, "cpu", 80)
    assert [len(part) for part in projector.by_parts(values)] == [10] * 10 + [1]
    torch.testing.assert_close(torch.cat([*projector.by_parts(values)]), projector(values))
    tracker, taken = RangeTracker(), []
    monkeypatch.setattr(tracker, "_take", lambda part, take=tracker._take: (taken.append(len(part)), take(part)))
    tracker.update(values)
    assert taken == [16] * 6 + [5]
    exact = values.double().numpy()
    np.testing.assert_array_equal(tracker.low, values.amin(0))
    np.testing.assert_allclose(tracker.mean, exact.mean(0), rtol=1e-12)
    np.testing.assert_allclose(tracker.deviation, exact.std(0), rtol=1e-12)
