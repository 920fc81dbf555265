"""Gaussians of features: every formula against numpy in float64, and what must hold whatever the numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shiftmend.errors import AdaptationError, ProfileError
from shiftmend.stats.gaussians import Comparison, CovarianceTracker, FullGaussian, MarginalGaussian, shrink
from shiftmend.stats.histograms import RangeTracker

SEEDS = st.integers(0, 1000)
SHRINKAGE = st.sampled_from([0.0, 0.1, 0.5, 1.0])


def drawn(samples: int, units: int, seed: int) -> Tensor:
    """Correlated values away from zero, in float64."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(units, units, generator=generator, dtype=torch.float64)
    offset = torch.randn(units, generator=generator, dtype=torch.float64)
    return torch.randn(samples, units, generator=generator, dtype=torch.float64) @ mixing + 2 * offset


def full_of(values: Tensor) -> FullGaussian:
    """The Gaussian of a sample in the sample's own precision, without the tracker."""
    return FullGaussian(
        values.mean(0), torch.from_numpy(np.cov(values.numpy().T, ddof=1)).reshape(2 * [values.shape[1]]), len(values)
    )


def marginal_of(values: Tensor) -> MarginalGaussian:
    return MarginalGaussian(values.mean(0), values.var(0), len(values))


def shrunk_in_numpy(covariance: np.ndarray, shrinkage: float) -> np.ndarray:
    result = covariance.copy()
    for row in range(len(covariance)):
        for column in range(len(covariance)):
            if row != column:
                result[row, column] *= 1 - shrinkage
    return result


def full_divergence_in_numpy(values: Tensor, source: FullGaussian, shrinkage: float) -> float:
    """KL(N_batch || N_source) from inverse and determinants."""
    v = values.double().numpy()
    theirs = shrunk_in_numpy(source.covariance.double().numpy(), shrinkage)
    ours = shrunk_in_numpy(np.atleast_2d(np.cov(v.T, ddof=1)), shrinkage)
    away = source.mean.double().numpy() - v.mean(0)
    precision = np.linalg.inv(theirs)
    least = 1e-6 / np.diag(precision)  # two samples can agree in a unit by chance
    ours = ours + np.diag(np.maximum(least - np.diag(ours), 0))
    logs = np.linalg.slogdet(theirs)[1] - np.linalg.slogdet(ours)[1]
    return 0.5 * (np.trace(precision @ ours) + away @ precision @ away - v.shape[1] + logs)


# --- the divergence of all units together ----------------------------------------------------------------------------


@pytest.mark.slow
@given(SEEDS, st.integers(1, 8), SHRINKAGE)
def test_full_divergence_against_numpy(seed: int, units: int, shrinkage: float) -> None:
    source, values = full_of(drawn(60, units, seed)), drawn(40, units, seed + 1)
    expected = full_divergence_in_numpy(values, source, shrinkage)
    assert float(source.divergence(values, shrinkage)) == pytest.approx(expected, rel=1e-8, abs=1e-10)
    assert float(Comparison.to_source(source, shrinkage)(values)) == pytest.approx(expected, rel=1e-8, abs=1e-10)


@pytest.mark.slow
@given(SEEDS, st.integers(2, 5))
def test_fewer_samples_than_units_against_numpy(seed: int, samples: int) -> None:
    source, values = full_of(drawn(60, 6, seed)), drawn(samples, 6, seed + 1)
    expected = full_divergence_in_numpy(values, source, 0.2)
    assert float(source.divergence(values, 0.2)) == pytest.approx(expected, rel=1e-7)
    with pytest.raises(AdaptationError, match=f"6 features, got {samples}"):
        source.divergence(values)


def test_two_samples_that_agree_in_a_unit_against_numpy() -> None:
    source, values = full_of(drawn(60, 6, 0)), drawn(2, 6, 1)
    values[1, 3] = values[0, 3] + 1e-5
    expected = full_divergence_in_numpy(values, source, 0.2)
    assert float(source.divergence(values, 0.2)) == pytest.approx(expected, rel=1e-7)


@pytest.mark.slow
@given(SEEDS, st.integers(1, 6), SHRINKAGE)
def test_full_divergence_is_never_negative_and_zero_at_home(seed: int, units: int, shrinkage: float) -> None:
    home = drawn(50, units, seed)
    source = full_of(home)
    assert abs(float(source.divergence(home, shrinkage))) < 1e-8
    assert float(source.divergence(drawn(30, units, seed + 1), shrinkage)) >= 0


def test_it_is_the_divergence_from_the_batch_to_the_source() -> None:
    """Of two centred Gaussians of variance 1 and 4: ln 2 - 3/8 one way, 3/2 - ln 2 the other."""
    one = torch.tensor([[-1.0], [1.0], [0.0]], dtype=torch.float64)  # variance 1
    narrow, wide = full_of(one), full_of(2 * one)
    assert float(wide.divergence(one)) == pytest.approx(math.log(2) - 3 / 8)
    assert float(narrow.divergence(2 * one)) == pytest.approx(3 / 2 - math.log(2))
    assert float(marginal_of(2 * one).divergence(one)) == pytest.approx(3 / 2 - math.log(2))  # the other way round


@pytest.mark.parametrize("shrinkage", [0.0, 0.3])
def test_gradients_of_the_comparison(shrinkage: float) -> None:
    compare = Comparison.to_source(full_of(drawn(40, 4, 1)), shrinkage)
    values = drawn(9, 4, 2).requires_grad_()
    assert torch.autograd.gradcheck(compare, (values,))


def test_gradients_with_fewer_samples_than_units() -> None:
    compare = Comparison.to_source(full_of(drawn(40, 4, 1)), 0.3)
    assert torch.autograd.gradcheck(compare, (drawn(3, 4, 2).requires_grad_(),))


def test_correlations_are_seen_that_marginals_cannot_see() -> None:
    values = drawn(5000, 2, 0)
    values = (values - values.mean(0)) / values.std(0)
    mirrored = values * torch.tensor([1.0, -1.0])
    assert float(marginal_of(values).divergence(mirrored)) < 1e-6
    assert float(full_of(values).divergence(mirrored)) > 0.1
    assert float(full_of(values).divergence(mirrored, 1.0)) < 1e-6  # all shrinkage leaves the marginals


@pytest.mark.parametrize("shrinkage", [0.0, 0.1])
def test_a_unit_that_is_dead_on_the_target_gives_a_finite_loss_that_tells_it_to_move(shrinkage: float) -> None:
    source = full_of(drawn(60, 3, 0))
    values = drawn(40, 3, 1)
    values[:, 1] = 5.0
    values.requires_grad_()
    loss = source.divergence(values, shrinkage)
    loss.backward()
    assert math.isfinite(loss.item())
    assert bool(torch.isfinite(values.grad).all())
    assert bool((values.grad[:, 1] != 0).any())  # its mean is wrong, too


def test_half_precision_is_compared_in_double() -> None:
    source = full_of(drawn(60, 4, 0))
    values = drawn(40, 4, 1).bfloat16()
    got = source.divergence(values)
    assert got.dtype == torch.float64
    assert float(got) == pytest.approx(full_divergence_in_numpy(values.double(), source, 0.0), rel=1e-9)


def test_a_singular_source_is_one_sentence() -> None:
    few = full_of(drawn(5, 6, 0))
    with pytest.raises(AdaptationError, match=r"singular.*5 samples.*shrinkage"):
        Comparison.to_source(few)
    assert math.isfinite(float(few.divergence(drawn(20, 6, 1), 0.1)))


@pytest.mark.parametrize("source", [marginal_of(drawn(30, 2, 0)), full_of(drawn(30, 2, 0))], ids=lambda s: s.kind)
def test_one_sample_has_no_variance(source: MarginalGaussian | FullGaussian) -> None:
    one = drawn(1, 2, 1)
    with pytest.raises(AdaptationError, match="variance"):
        source.divergence(one) if isinstance(source, MarginalGaussian) else source.divergence(one, 0.5)


def test_shrinking_leaves_variances_alone() -> None:
    covariance = full_of(drawn(50, 5, 0)).covariance
    for shrinkage in (0.0, 0.25, 1.0):
        np.testing.assert_allclose(shrink(covariance, shrinkage), shrunk_in_numpy(covariance.numpy(), shrinkage))
    assert bool(torch.linalg.eigvalsh(shrink(full_of(drawn(3, 8, 0)).covariance, 0.1)).min() > 0)


# --- one Gaussian a unit ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(SEEDS, st.integers(1, 8))
def test_marginal_divergence_against_numpy(seed: int, units: int) -> None:
    source, values = marginal_of(drawn(60, units, seed)), drawn(40, units, seed + 1)
    v, m, s = values.numpy(), source.mean.numpy(), source.variance.numpy()
    each = []
    for unit in range(units):
        batch = v[:, unit].var(ddof=1)
        away = (m[unit] - v[:, unit].mean()) ** 2
        each.append(0.5 * (math.log(batch / s[unit]) + (s[unit] + away) / batch - 1))
    assert min(each) >= 0
    assert float(source.divergence(values)) == pytest.approx(np.mean(each), rel=1e-4, abs=1e-6)


def test_without_correlations_a_full_gaussian_is_the_sum_of_its_marginals_the_other_way_round() -> None:
    source, values = full_of(drawn(60, 4, 0)), drawn(40, 4, 1)
    swapped = [
        float(full_of(values[:, [unit]]).marginal().divergence(scaled))
        for unit in range(4)
        for scaled in [_with_moments(values[:, [unit]], source.mean[unit], source.variance[unit])]
    ]
    assert float(source.divergence(values, 1.0)) == pytest.approx(sum(swapped), rel=1e-4)


def _with_moments(values: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return (values - values.mean()) / values.std() * variance.sqrt() + mean


# --- merging and picking ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(SEEDS, st.integers(1, 6), st.integers(1, 59))
def test_two_halves_equal_the_whole_in_either_order(seed: int, units: int, cut: int) -> None:
    values = drawn(60, units, seed)
    for of in (tracked, moments):
        one, other, whole = of(values[:cut]), of(values[cut:]), of(values)
        for merged in (type(one).mix([one, other], [1, 1]), type(one).mix([other, one], [1, 1])):
            assert merged.samples == 60
            assert merged.mean.dtype == one.mean.dtype
            torch.testing.assert_close(merged.mean, whole.mean, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(spread(merged), spread(whole), rtol=1e-4, atol=1e-4)


def tracked(values: Tensor, *sizes: int) -> FullGaussian:
    tracker = CovarianceTracker()
    for part in values.split(list(sizes)) if sizes else [values]:
        tracker.update(part)
    return tracker.gaussian()


def moments(values: Tensor) -> MarginalGaussian:
    tracker = RangeTracker()
    tracker.update(values)
    return tracker.gaussian()


def spread(gaussian: MarginalGaussian | FullGaussian) -> Tensor:
    return gaussian.covariance if isinstance(gaussian, FullGaussian) else gaussian.variance


def test_merging_is_exact_in_double_also_far_from_zero() -> None:
    values = drawn(90, 3, 4) + 1e4
    merged = FullGaussian.mix([full_of(values[:20]), full_of(values[20:50]), full_of(values[50:])], [1, 1, 1])
    np.testing.assert_allclose(merged.covariance, np.cov(values.numpy().T), rtol=1e-9)
    np.testing.assert_allclose(merged.mean, values.numpy().mean(0), rtol=1e-12)


@pytest.mark.slow
@given(SEEDS, st.integers(1, 5), st.floats(0.05, 0.95))
def test_parts_in_other_shares_are_a_weighted_sample(seed: int, units: int, share: float) -> None:
    """With Kish's size, the covariance is the one that numpy gives to samples of unequal importance."""
    parts, shares = (drawn(30, units, seed), drawn(20, units, seed + 1) + 2), (share, 1 - share)
    size = 1 / sum(part**2 / len(values) for part, values in zip(shares, parts, strict=True))
    times = [size * part / len(values) for part, values in zip(shares, parts, strict=True)]
    mixed = FullGaussian.mix([full_of(values) for values in parts], times)
    expected = np.cov(torch.cat(parts).numpy().T, aweights=np.repeat(times, (30, 20)))
    assert mixed.samples == round(size)
    np.testing.assert_allclose(mixed.covariance, expected.reshape(units, units), rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@given(SEEDS, st.integers(1, 5), st.tuples(st.integers(1, 4), st.integers(1, 4)))
def test_a_part_counted_twice_is_a_part_repeated(seed: int, units: int, times: tuple[int, int]) -> None:
    """Whole numbers can be written out; each part has its own unbiased covariance."""
    first, second = drawn(30, units, seed).numpy(), drawn(20, units, seed + 1).numpy() + 2
    weights = np.repeat(times, (30, 20)).astype(np.float64)
    values = np.concatenate([first, second])
    mean = np.average(values, axis=0, weights=weights)
    within = sum(n * (len(x) - 1) * np.cov(x.T) for n, x in zip(times, (first, second), strict=True))
    between = sum(
        n * len(x) * np.outer(x.mean(0) - mean, x.mean(0) - mean) for n, x in zip(times, (first, second), strict=True)
    )
    mixed = FullGaussian.mix([full_of(torch.from_numpy(first)), full_of(torch.from_numpy(second))], times)
    assert mixed.samples == weights.sum()
    np.testing.assert_allclose(mixed.mean, mean, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(mixed.covariance, (within + between) / (weights.sum() - 1), rtol=1e-9, atol=1e-12)


def test_gaussians_of_other_sizes_do_not_merge() -> None:
    for of in (full_of, marginal_of):
        with pytest.raises(ProfileError, match=r"units.*3 and 2"):
            type(of(drawn(20, 3, 0))).mix([of(drawn(20, 3, 0)), of(drawn(20, 2, 0))], [1, 1])


def test_some_units_and_their_marginals() -> None:
    values = drawn(50, 5, 0)
    units = torch.tensor([3, 0, 4])
    part, alone = full_of(values).of_units(units), full_of(values[:, units])
    torch.testing.assert_close(part.covariance, alone.covariance)
    torch.testing.assert_close(part.mean, alone.mean)
    assert part.samples == 50
    marginal = part.marginal()
    torch.testing.assert_close(marginal.variance, values[:, units].var(0))
    torch.testing.assert_close(marginal_of(values).of_units(units).variance, marginal.variance)
    torch.testing.assert_close(full_of(values).variance, values.var(0))


# --- collecting ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(SEEDS, st.lists(st.integers(1, 30), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_covariance_does_not_depend_on_batches_or_order(seed: int, sizes: list[int], random: object) -> None:
    values = drawn(sum(sizes), 4, seed)
    order = list(range(len(values)))
    random.shuffle(order)  # type: ignore[attr-defined]
    got = tracked(values[order], *sizes)
    assert got.samples == len(values)
    if len(values) > 1:
        np.testing.assert_allclose(got.covariance, np.cov(values.numpy().T), rtol=1e-4, atol=1e-5)
    else:
        assert bool((got.covariance == 0).all())
    np.testing.assert_allclose(got.mean, values.numpy().mean(0), rtol=1e-5, atol=1e-6)


def test_a_small_covariance_beside_a_large_mean_survives() -> None:
    values = 1e-2 * drawn(1000, 3, 0) + 1e4
    np.testing.assert_allclose(tracked(values, 300, 700).covariance, np.cov(values.numpy().T), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_other_precisions_are_collected_in_double_and_stored_in_single(dtype: torch.dtype) -> None:
    values = drawn(200, 3, 0).to(dtype).requires_grad_()
    got = tracked(values, 100, 100)
    assert (got.mean.dtype, got.covariance.dtype) == (torch.float32, torch.float32)
    assert not got.covariance.requires_grad
    np.testing.assert_allclose(got.covariance, np.cov(values.detach().double().numpy().T), rtol=1e-5)
    assert torch.equal(got.covariance, got.covariance.T)
