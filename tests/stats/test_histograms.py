from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from shiftmend.errors import ShiftmendError
from shiftmend.stats import histograms
from shiftmend.stats.histograms import (
    COLDEST,
    EPSILON,
    HOTTEST,
    Bins,
    as_samples,
    divergence,
    sampling_floor,
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


@pytest.mark.parametrize("temperature", [COLDEST, HOTTEST])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_extremes_of_temperature_are_hard_bins_and_none(temperature: float, dtype: torch.dtype) -> None:
    values = torch.tensor([[-torch.inf], [0.1], [0.3], [0.3], [torch.inf]], dtype=dtype, requires_grad=True)
    counts = soft_histogram(values, torch.zeros(1), torch.ones(1), Bins(2, temperature=temperature))
    counts.sum().backward()
    assert values.grad is not None
    assert bool(torch.isfinite(values.grad).all())
    expected = [0.2, 0.6, 0.0, 0.2] if temperature == COLDEST else [0.35, 0.15, 0.15, 0.35]
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
        monkeypatch.setitem(histograms._CHUNK, "cpu", elements)
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
        monkeypatch.setitem(histograms._CHUNK, "cpu", at_once)
        with LargestTensor() as watch:
            soft_histogram(values, low, high, Bins()).square().sum().backward()
        assert watch.most == largest


def test_all_parts_use_the_same_memory_for_their_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """To get it anew for each of them, page by page, took up to twice as long as all the rest."""
    values, low, high = case(samples=300, units=8)
    monkeypatch.setitem(histograms._CHUNK, "cpu", 1000)  # 12 rows at a time
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


def reference_kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    def one(x: np.ndarray, y: np.ndarray) -> float:
        return sum(a * (math.log(a + 1e-8) - math.log(b + 1e-8)) for a, b in zip(x, y, strict=True))

    return np.array([one(x, y) for x, y in zip(p, q, strict=True)])


def tables(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(6, 10, generator=generator, dtype=torch.float64) ** 4
    q = torch.rand(6, 10, generator=generator, dtype=torch.float64) ** 4
    p[0, :4] = 0  # empty bins
    q[1, 5:] = 0
    return p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True)


@given(st.integers(0, 50))
def test_divergences_against_numpy(seed: int) -> None:
    p, q = tables(seed)
    forward, backward = reference_kl(p.numpy(), q.numpy()), reference_kl(q.numpy(), p.numpy())
    expected = {
        "kl-source-target": forward,
        "kl-target-source": backward,
        "symmetric-kl": (forward + backward) / 2,
        "psi": (forward + backward) / math.log(10),
    }
    for kind, value in expected.items():
        np.testing.assert_allclose(divergence(p, q, kind).numpy(), value, rtol=1e-10, atol=1e-12)  # type: ignore[arg-type]
    assert bool((divergence(p, q) >= 0).all())
    assert float(divergence(p, p).abs().max()) == 0
    assert EPSILON == 1e-8


def test_divergence_gradcheck() -> None:
    p, q = tables(3)
    q = (q + 0.01).requires_grad_()
    for kind in ("psi", "symmetric-kl", "kl-source-target", "kl-target-source"):
        assert torch.autograd.gradcheck(lambda t, kind=kind: divergence(p, t, kind), (q,))


def test_the_reference_loss_is_the_papers_times_a_constant() -> None:
    p, q = tables(1)
    torch.testing.assert_close(divergence(p, q, "psi"), divergence(p, q, "symmetric-kl") * (2 / math.log(10)))


@pytest.mark.parametrize(
    ("shape", "lows", "highs"),
    [((0, 3), 3, 3), ((4,), 1, 1), ((4, 3), 2, 2), ((4, 3), 3, 1), ((2, 3, 4), 3, 3)],
)
def test_wrong_shapes_are_one_sentence(shape: tuple[int, ...], lows: int, highs: int) -> None:
    with pytest.raises(ShiftmendError):
        soft_histogram(torch.zeros(shape), torch.zeros(lows), torch.ones(highs), Bins())


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ShiftmendError, match="divergence"):
        divergence(torch.ones(1, 3), torch.ones(1, 3), "hellinger")  # type: ignore[arg-type]
    with pytest.raises(ShiftmendError, match="shape"):
        divergence(torch.ones(1, 3), torch.ones(1, 4))


def test_the_sampling_floor_is_what_chance_gives() -> None:
    """Samples of one distribution, many times: the mean divergence is the floor, within its stated roughness."""
    generator = torch.Generator().manual_seed(0)
    home, away = (torch.rand(400, 600, generator=generator) for _ in range(2))
    low, high = torch.zeros(600), torch.ones(600)
    # uniform values leave the outer bins nearly empty: eight bins take part
    measured = float(
        divergence(soft_histogram(home, low, high, Bins()), soft_histogram(away, low, high, Bins())).mean()
    )
    floor = sampling_floor(Bins(), 400, 400)
    assert 0.5 * floor < measured < 1.1 * floor
    assert sampling_floor(Bins(6, "paper"), 400, 1000) == pytest.approx(5 * (1 / 400 + 1 / 1000) / math.log(6))


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
        ({"count": "8"}, "the number of bins in the reference layout must be a whole number from 1 to 1024, got '8'"),
        ({"count": 1025}, "from 1 to 1024, got 1025"),
        ({"count": 2, "layout": "paper"}, "in the paper layout must be a whole number from 3 to 1026, got 2"),
        ({"layout": ["paper"]}, r"unknown bin layout \['paper'\], expected one of reference, paper"),
        ({"temperature": "0.1"}, r"the temperature must be a number from 1e-30 to 1e\+30, got '0.1'"),
        ({"temperature": None}, "the temperature must be a number from 1e-30 to .*, got None"),
        ({"temperature": True}, "the temperature must be a number from 1e-30 to .*, got True"),
        ({"temperature": math.inf}, "the temperature must be a number from 1e-30 to .*, got inf"),
        ({"temperature": 1e-31}, "the temperature must be a number from 1e-30 to .*, got 1e-31"),
        ({"temperature": np.zeros(3)}, "the temperature must be a number from 1e-30 to .*, got a ndarray"),
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
