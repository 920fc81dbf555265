from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shiftmend.errors import ProfileError, ShiftmendError
from shiftmend.stats import histograms
from shiftmend.stats.divergences import divergence
from shiftmend.stats.histograms import (
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    Bins,
    CountTracker,
    Histogram,
    RangeTracker,
    as_samples,
    soft_histogram,
    usable_units,
)

LAYOUTS = [Bins(8, "reference"), Bins(8, "paper"), Bins(3, "paper"), Bins(1, "reference"), Bins(20, "reference", 0.004)]


def reference_histogram(values: np.ndarray, low: np.ndarray, high: np.ndarray, bins: Bins) -> np.ndarray:
    """Appendix A of the paper, one number at a time."""
    total = bins.count if bins.layout == "paper" else bins.count + 2
    cuts = [k / (total - 2) for k in range(total - 1)]
    result = np.zeros((values.shape[1], total))
    for d in range(values.shape[1]):
        for value in values[:, d].astype(np.float64):
            x = (value - low[d]) / (high[d] - low[d])
            logits = np.array([(b + 1) * x - sum(cuts[:b]) for b in range(total)]) / bins.temperature
            weights = np.exp(logits - logits.max())
            result[d] += weights / weights.sum()
    return result / len(values)


def case(samples: int = 40, units: int = 5, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values that partly lie outside the range they are binned in."""
    generator = torch.Generator().manual_seed(seed)
    home = torch.randn(samples, units, generator=generator, dtype=torch.float64) * 3 + 1
    values = home * 1.3 + 0.5 * torch.randn(samples, units, generator=generator, dtype=torch.float64)
    return values, home.amin(0), home.amax(0)


@pytest.mark.parametrize("bins", LAYOUTS, ids=str)
def test_agrees_with_the_paper_written_out(bins: Bins) -> None:
    values, low, high = case()
    expected = reference_histogram(values.numpy(), low.numpy(), high.numpy(), bins)
    got = soft_histogram(values, low, high, bins)
    assert got.shape == (5, bins.total)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-9, atol=1e-30)


def test_layouts_count_their_outer_bins_as_said() -> None:
    assert (Bins(8, "reference").total, Bins(8, "reference").inner) == (10, 8)
    assert (Bins(8, "paper").total, Bins(8, "paper").inner) == (8, 6)


@pytest.mark.parametrize(
    "wrong",
    [
        {"count": 0},
        {"count": 2, "layout": "paper"},
        {"layout": "?"},
        {"temperature": 0.0},
        {"count": 1.5},
        {"count": True},
    ],
)
def test_bins_refuse_nonsense(wrong: dict[str, object]) -> None:
    with pytest.raises(ShiftmendError):
        Bins(**wrong)  # type: ignore[arg-type]


@pytest.mark.slow
@given(st.integers(1, 60), st.integers(1, 6), st.integers(0, 1000))
def test_rows_are_probabilities_whatever_the_values(samples: int, units: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(samples, units, generator=generator) * 10.0 ** torch.randint(
        -3, 6, (units,), generator=generator
    )
    low, high = -torch.rand(units, generator=generator), torch.rand(units, generator=generator) + 0.1
    counts = soft_histogram(values, low, high, Bins())
    assert bool((counts >= 0).all())
    torch.testing.assert_close(counts.sum(1), torch.ones(units), atol=2e-5, rtol=0)


def test_values_outside_the_range_fall_into_the_outer_bins() -> None:
    low, high = torch.zeros(1), torch.ones(1)
    below = soft_histogram(torch.full((3, 1), -1e7), low, high, Bins())
    above = soft_histogram(torch.full((3, 1), 1e7), low, high, Bins())
    assert below[0, 0] == 1
    assert above[0, -1] == 1


@pytest.mark.parametrize("bins", [Bins(), Bins(8, "paper"), Bins(temperature=0.05)], ids=str)
def test_gradients(bins: Bins) -> None:
    values, low, high = case(samples=9, units=3)
    values.requires_grad_()
    assert torch.autograd.gradcheck(lambda v: soft_histogram(v, low, high, bins), (values,), atol=1e-6)


def test_float32_loses_no_digits_of_nearly_empty_bins() -> None:
    """Their logarithm counts in a divergence, so that shares far below the rounding of 1 have to be right as well."""
    places = torch.rand(64, 3, generator=torch.Generator().manual_seed(0)) * 0.1 + torch.tensor([0.31, 0.45, 0.93])
    low, high = torch.zeros(3), torch.ones(3)
    expected = reference_histogram(places.numpy(), low.numpy(), high.numpy(), Bins())
    assert expected[:, 1:-1].min() < 1e-12
    got = soft_histogram(places, low, high, Bins()).numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-30)


@pytest.mark.parametrize("bins", [Bins(), Bins(temperature=0.05), Bins(1024)], ids=str)
@pytest.mark.parametrize("where", [-0.3, 1.3, 0.5 / 8])
def test_float32_loses_no_digits_of_small_gradients(where: float, bins: Bins) -> None:
    """A value far from every cut should hardly move, and an optimiser that scales its steps would follow any noise."""
    values = torch.full((4, 1), where)
    weights = torch.linspace(-3, 2, bins.total).square().unsqueeze(0)
    got, expected = (
        torch.autograd.grad(soft_histogram(leaf, torch.zeros(1), torch.ones(1), bins), leaf, weights.to(leaf))[0]
        for leaf in (values.clone().requires_grad_(), values.double().requires_grad_())
    )
    torch.testing.assert_close(got.double(), expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("temperature", [MIN_TEMPERATURE, MAX_TEMPERATURE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_extremes_of_temperature_are_hard_bins_and_none(temperature: float, dtype: torch.dtype) -> None:
    values = torch.tensor([[-torch.inf], [0.1], [0.3], [0.3], [torch.inf]], dtype=dtype, requires_grad=True)
    counts = soft_histogram(values, torch.zeros(1), torch.ones(1), Bins(2, temperature=temperature))
    counts.sum().backward()
    assert values.grad is not None
    assert bool(torch.isfinite(values.grad).all())
    expected = [0.2, 0.6, 0.0, 0.2] if temperature == MIN_TEMPERATURE else [0.35, 0.15, 0.15, 0.35]
    torch.testing.assert_close(counts[0], torch.tensor(expected, dtype=dtype))


@pytest.mark.slow
@given(st.floats(0.002, 0.3), st.integers(1, 40), st.integers(0, 5))
def test_agrees_with_the_softmax_at_any_temperature(temperature: float, count: int, seed: int) -> None:
    bins = Bins(count, "reference", temperature)
    values, low, high = case(seed=seed)
    expected = histograms.soft_assignment((values - low) / (high - low), bins).mean(0)
    torch.testing.assert_close(soft_histogram(values, low, high, bins), expected, rtol=1e-8, atol=1e-30)


def test_work_in_several_goes_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    values, low, high = case(samples=50)
    weights = torch.rand(5, 10, dtype=torch.float64)

    def both() -> list[torch.Tensor]:
        leaf = values.clone().requires_grad_()
        counts = soft_histogram(leaf, low, high, Bins())
        (counts * weights).sum().backward()
        assert leaf.grad is not None
        return [counts.detach(), leaf.grad]

    at_once = both()
    for elements in (1, 60, 350):  # of 7 rows at a time the last part has a single one
        monkeypatch.setitem(histograms._SHARES_AT_ONCE, "cpu", elements)
        torch.testing.assert_close(both(), at_once, rtol=0, atol=1e-13)


def test_the_order_in_memory_changes_no_bit() -> None:
    values, low, high = case(samples=300)
    turned = values.T.contiguous().T
    assert torch.equal(soft_histogram(turned, low, high, Bins()), soft_histogram(values, low, high, Bins()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_values_are_binned_in_float32(dtype: torch.dtype) -> None:
    values, low, high = case()
    halves = values.to(dtype)
    got = soft_histogram(halves, low.float(), high.float(), Bins())
    assert got.dtype == torch.float32
    expected = reference_histogram(halves.double().numpy(), low.float().numpy(), high.float().numpy(), Bins())
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-4)


def test_autocast_changes_nothing() -> None:
    values, low, high = (part.float() for part in case())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = soft_histogram(values, low, high, Bins())
    assert torch.equal(inside, soft_histogram(values, low, high, Bins()))


class LargestTensor(TorchDispatchMode):
    """Watches every tensor an operation returns, in the forward and in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self.blocks: dict[int, torch.Tensor] = {}
        """By where they begin; kept, so that no other begins there."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        for part in result if isinstance(result, tuple | list) else (result,):
            if isinstance(part, torch.Tensor):
                self.most = max(self.most, part.numel())
                self.blocks[part.untyped_storage().data_ptr()] = part.detach()
        return result


def test_shares_are_built_for_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    values, low, high = case(samples=300, units=8)
    values.requires_grad_()
    for at_once, largest in ((1 << 18, values.numel() * 10), (1000, values.numel())):
        monkeypatch.setitem(histograms._SHARES_AT_ONCE, "cpu", at_once)
        with LargestTensor() as watch:
            soft_histogram(values, low, high, Bins()).square().sum().backward()
        assert watch.most == largest


def test_all_parts_use_the_same_memory_for_their_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """To get it anew for each of them, page by page, took up to twice as long as all the rest."""
    values, low, high = case(samples=300, units=8)
    monkeypatch.setitem(histograms._SHARES_AT_ONCE, "cpu", 1000)  # 12 rows at a time
    with LargestTensor() as watch:
        soft_histogram(values.requires_grad_(), low, high, Bins()).square().sum().backward()
    bytes_of_shares = 12 * 8 * 10 * values.element_size()
    assert sum(block.untyped_storage().nbytes() == bytes_of_shares for block in watch.blocks.values()) == 5


def test_constant_units_are_unusable_and_stay_finite() -> None:
    low = torch.tensor([0.0, 3.0, -5.0, 1e-30, 0.0])
    high = torch.tensor([0.0, 3.0, 1.0, 1e-30, 1.0])
    assert usable_units(low, high).tolist() == [False, False, True, False, True]
    values = torch.randn(20, 5, requires_grad=True)
    counts = soft_histogram(values, low, high, Bins())
    divergence(torch.full_like(counts, 0.1), counts).sum().backward()
    assert bool(torch.isfinite(counts).all())
    assert bool(torch.isfinite(values.grad).all())
    assert values.grad[:, :2].abs().max() == 0


@pytest.mark.parametrize(
    ("low", "high", "usable"),
    [
        (1e4, 1e4 + 2.0, True),
        (1e4, 1e4 + 0.5, False),  # rounding would shape its bins
        (-1e4 - 0.5, -1e4, False),
        (1e-7, 2e-7, True),  # small, but not beside its own magnitude
        (0.0, 1e-25, True),
        (0.0, 1e-31, False),  # one over such a range, times a gradient, would be infinite
        (-3e38, 3e38, False),  # its extent is no number
    ],
)
def test_a_range_is_judged_by_the_magnitude_of_its_unit(low: float, high: float, usable: bool) -> None:
    assert usable_units(torch.tensor([low]), torch.tensor([high])).tolist() == [usable]


def test_nan_values_show_in_the_counts_instead_of_crashing() -> None:
    values = torch.zeros(4, 2)
    values[1, 0] = torch.nan
    counts = soft_histogram(values, torch.tensor([-1.0, -1.0]), torch.ones(2), Bins())
    assert bool(torch.isnan(counts[0]).any())
    assert bool(torch.isfinite(counts[1]).all())


@pytest.mark.parametrize(
    ("shape", "axis", "samples", "units"),
    [((6, 4), 1, 6, 4), ((6, 4, 3, 2), 1, 36, 4), ((6, 4, 5), 1, 30, 4), ((6, 5, 4), -1, 30, 4), ((6,), 1, 6, 1)],
)
def test_positions_are_samples_of_their_channel(shape: tuple[int, ...], axis: int, samples: int, units: int) -> None:
    values = torch.randn(shape)
    flat = as_samples(values, axis)
    assert flat.shape == (samples, units)
    if len(shape) > 1:
        assert torch.equal(flat[:, 2].sort().values, values.select(axis, 2).flatten().sort().values)


@pytest.mark.parametrize(
    ("shape", "lows", "highs"),
    [((0, 3), 3, 3), ((4,), 1, 1), ((4, 3), 2, 2), ((4, 3), 3, 1), ((2, 3, 4), 3, 3)],
)
def test_wrong_shapes_are_one_sentence(shape: tuple[int, ...], lows: int, highs: int) -> None:
    with pytest.raises(ShiftmendError):
        soft_histogram(torch.zeros(shape), torch.zeros(lows), torch.ones(highs), Bins())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_same_on_a_gpu() -> None:
    values, low, high = case(samples=500)
    expected = soft_histogram(values, low, high, Bins())
    got = soft_histogram(values.float().cuda(), low.float().cuda(), high.float().cuda(), Bins())
    torch.testing.assert_close(got.double().cpu(), expected, atol=1e-5, rtol=0)
    wide = soft_histogram(values.cuda(), low.cuda(), high.cuda(), Bins())  # no kernel takes float64
    torch.testing.assert_close(wide.cpu(), expected, atol=1e-30, rtol=1e-9)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"count": "8"}, r"reference layout.*1024.*'8'"),
        ({"count": 1025}, r"1024.*1025"),
        ({"count": 2, "layout": "paper"}, r"paper layout.*1026.*2"),
        ({"layout": ["paper"]}, r"layout.*\['paper'\]"),
        ({"temperature": "0.1"}, r"temperature.*'0\.1'"),
        ({"temperature": None}, r"temperature.*got None"),
        ({"temperature": True}, r"temperature.*got True"),
        ({"temperature": math.inf}, r"temperature.*got inf"),
        ({"temperature": 1e-31}, r"temperature.*1e-31"),
        ({"temperature": np.zeros(3)}, r"temperature.*ndarray"),
    ],
)
def test_bins_say_what_they_expect(wrong: dict[str, object], sentence: str) -> None:
    with pytest.raises(ShiftmendError, match=sentence):
        Bins(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["reference", "paper"])
def test_the_most_bins_that_are_named_are_taken(layout: str) -> None:
    assert Bins(1024 if layout == "reference" else 1026, layout).inner == 1024  # type: ignore[arg-type]


def test_bins_take_numbers_of_numpy() -> None:
    bins = Bins(np.int64(4), temperature=np.float32(0.5))  # type: ignore[arg-type]
    assert bins == Bins(4, temperature=0.5)
    assert (type(bins.count), type(bins.temperature)) == (int, float)


# --- trackers and stored histograms ----------------------------------------------------------------------------------


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
    for merged in (Histogram.mix([first, second], [1, 1]), Histogram.mix([second, first], [1, 1])):
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
        with pytest.raises(ProfileError, match="same ranges and bins"):
            Histogram.mix([home, other], [1, 1])


@pytest.mark.parametrize("kind", ["psi", "symmetric-kl", "kl-source-target", "kl-target-source"])
def test_divergence_is_zero_for_the_same_and_positive_for_others(kind: str) -> None:
    values = sample()
    home = histogram_of(values)
    assert home.mean_divergence(home.probabilities, kind) == 0
    torch.testing.assert_close(home.mean_divergence(home.count(values), kind), torch.tensor(0.0), atol=1e-6, rtol=0)
    assert bool((home.divergence_per_unit(home.count(values * 1.1), kind) > 1e-3).all())


def test_mean_divergence_against_numpy() -> None:
    home, target = histogram_of(sample()), sample(350, seed=1)
    p = home.counts.double().numpy() / 400
    q = soft_counts(target, home.low, home.high, home.bins) / 350
    each = ((p - q) * (np.log(p + 1e-8) - np.log(q + 1e-8))).sum(1) / math.log(10)
    counts = home.count(target)
    np.testing.assert_allclose(home.divergence_per_unit(counts).numpy(), each, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(float(home.mean_divergence(counts)), each.mean(), rtol=1e-4, atol=1e-6)
    for kind, one, other in (("kl-source-target", p, q), ("kl-target-source", q, p)):
        each = (one * (np.log(one + 1e-8) - np.log(other + 1e-8))).sum(1) / math.log(10)
        np.testing.assert_allclose(home.divergence_per_unit(counts, kind).numpy(), each, rtol=1e-4, atol=1e-6)


def test_constant_units_take_no_part() -> None:
    values = sample(units=6)
    values[:, 1] = 0.0
    values[:, 4] = 123.456
    home = histogram_of(values)
    assert home.usable.tolist() == [True, False, True, True, False, True]
    assert home.usable_count == 4
    assert home.units == 6
    target = (values + 50).requires_grad_()
    each = home.divergence_per_unit(home.count(target))
    assert each[[1, 4]].tolist() == [0, 0]
    torch.testing.assert_close(home.mean_divergence(home.count(target)), each.sum() / 4)
    each.sum().backward()
    assert target.grad is not None
    assert bool(torch.isfinite(target.grad).all())
    assert not bool(target.grad[:, [1, 4]].any())


def test_no_usable_unit_is_no_divergence() -> None:
    home = histogram_of(torch.ones(10, 3))
    assert home.usable_count == 0
    assert float(home.mean_divergence(home.count(torch.randn(10, 3)))) == 0


def test_moving_a_histogram_keeps_it_whole() -> None:
    home = histogram_of(sample())
    moved = home.to(torch.device("cpu"))
    assert moved.usable_count == home.usable_count == UNITS
    assert torch.equal(moved.probabilities, home.probabilities)
    away = home.to(torch.device("meta"))  # where nothing can be read, so that it must be known already
    assert {value.device.type for value in (away.counts, away.low, away.high, away.scale)} == {"meta"}
    assert (away.usable_count, away.samples, away.bins) == (UNITS, home.samples, home.bins)
