"""Random directions against splitmix64 and Box-Muller in Python's whole numbers, and slices against numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from shiftmend.errors import ProfileError
from shiftmend.stats.histograms import Bins, CountTracker, Histogram, RangeTracker
from shiftmend.stats.slices import Projector, Slices, random_directions
from shiftmend.utils.devices import VALUES_PER_PART

UNITS = 5


def sample(count: int = 400, seed: int = 0, units: int = UNITS) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-3, 3, units)
    return torch.randn(count, units, generator=generator) * scale + scale * torch.linspace(-20, 20, units)


def counted(values: Tensor, low: Tensor, high: Tensor, bins: Bins | None = None) -> Histogram:
    tracker = CountTracker(low, high, bins or Bins())
    tracker.update(values)
    return tracker.histogram()


def histogram_of(values: Tensor) -> Histogram:
    return counted(values, values.amin(0), values.amax(0))


def splitmix(place: int, seed: int) -> float:
    """Vigna's splitmix64 with whole numbers of Python, as a number between 0 and 1."""
    mask = (1 << 64) - 1
    z = (place + 1 + seed * 0xD1342543DE82EF95) * 0x9E3779B97F4A7C15 & mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    z ^= z >> 31
    return ((z >> 11) + 0.5) / 2**53


@pytest.mark.parametrize("seed", [0, 1, 20220425, 20220426, (1 << 64) - 1])
@pytest.mark.parametrize(("count", "units"), [(1, 1), (3, 4), (7, 2)])
def test_directions_against_whole_numbers_of_python(count: int, units: int, seed: int) -> None:
    rows = []
    for row in range(count):
        normal = [
            math.sqrt(-2 * math.log(splitmix(place, seed)))
            * math.cos(2 * math.pi * splitmix(count * units + place, seed))
            for place in range(row * units, (row + 1) * units)
        ]
        rows.append([value / math.hypot(*normal) for value in normal])
    np.testing.assert_allclose(random_directions(count, units, seed).numpy(), rows, atol=1e-6)


def test_directions_never_change() -> None:
    """A profile stores only their seed: were they to change, every profile that exists would be wrong."""
    expected = [
        [0.36349046, 0.53867429, 0.44417536, 0.61677623],
        [-0.12209819, 0.49599174, -0.46323916, -0.72421940],
        [-0.72378355, -0.09723045, -0.63997000, 0.23900212],
    ]
    np.testing.assert_allclose(random_directions(3, 4, 20220425).numpy(), expected, atol=1e-6)
    larger = random_directions(128, 512, 20220425)
    np.testing.assert_allclose(larger[0, :3].numpy(), [0.02165515, -0.04248067, 0.03275132], atol=1e-7)
    np.testing.assert_allclose(larger[-1, -3:].numpy(), [0.05905210, 0.01036188, 0.05261929], atol=1e-7)


def test_directions_do_not_depend_on_how_many_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = random_directions(50, 7, 11)
    for at_once in (1, 7, 20, 350):
        monkeypatch.setitem(VALUES_PER_PART, "cpu", at_once)
        assert torch.equal(random_directions(50, 7, 11), whole)


@pytest.mark.usefixtures("other_default_dtype")
def test_directions_do_not_depend_on_the_precision_that_is_usual_elsewhere() -> None:
    assert random_directions(3, 4, 20220425).dtype == torch.float32
    expected = np.array([0.36349046, 0.53867429, 0.44417536, 0.61677623], dtype=np.float32)
    np.testing.assert_allclose(random_directions(3, 4, 20220425)[0].numpy(), expected, atol=1e-7)


def test_directions_are_of_length_one_and_point_everywhere() -> None:
    directions = random_directions(4096, 32, 20220425).double()
    torch.testing.assert_close(directions.norm(dim=1), torch.ones(4096, dtype=torch.float64), atol=1e-6, rtol=0)
    # for isotropic directions the second moment is I / 32, up to the noise of 4096 samples: (1 +- sqrt(32 / 4096))^2
    eigenvalues = torch.linalg.eigvalsh(32 * directions.T @ directions / 4096)
    assert 0.80 < float(eigenvalues.min()) < float(eigenvalues.max()) < 1.22
    assert float(directions.mean(0).norm()) < 3 / math.sqrt(4096)
    # a projection on a fixed direction has fourth moment 3 / (d (d + 2))
    np.testing.assert_allclose((directions[:, 0] ** 4).mean(), 3 / (32 * 34), rtol=0.15)


def test_sets_of_other_seeds_have_nothing_in_common() -> None:
    a, b = random_directions(128, 64, 20220425), random_directions(512, 64, 20220426)
    assert float((a @ b.T).abs().max()) < 0.7
    near, far = random_directions(100, 64, 1), random_directions(100, 64, 2)
    assert float((near * far).sum(1).abs().mean()) < 0.2


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
    assert float(marginals.mean_divergence(marginals.count(target))) < 1e-6
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
    assert Slices.mix([slices, Slices(histogram, 3, projector_of(values))], [1, 1]).samples == 800
    for other in (Slices(histogram, 4, projector), Slices(histogram, 3, projector_of(2 * values))):
        with pytest.raises(ProfileError, match="the same directions"):
            Slices.mix([slices, other], [1, 1])
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
    monkeypatch.setitem(VALUES_PER_PART, "cpu", 80)
    assert [len(part) for part in projector.project_in_parts(values)] == [10] * 10 + [1]
    torch.testing.assert_close(torch.cat([*projector.project_in_parts(values)]), projector(values))
    tracker, taken = RangeTracker(), []
    monkeypatch.setattr(tracker, "_update", lambda part, take=tracker._update: (taken.append(len(part)), take(part)))
    tracker.update(values)
    assert taken == [16] * 6 + [5]
    exact = values.double().numpy()
    np.testing.assert_array_equal(tracker.low, values.amin(0))
    np.testing.assert_allclose(tracker.mean, exact.mean(0), rtol=1e-12)
    np.testing.assert_allclose(tracker.deviation, exact.std(0), rtol=1e-12)
