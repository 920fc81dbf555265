"""Requirements that every kind of statistic has to meet."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shiftmend.errors import ProfileError
from shiftmend.stats.answers import Answers, AnswerTracker
from shiftmend.stats.gaussians import FullGaussian, MarginalGaussian
from shiftmend.stats.histograms import Bins, CountTracker, Histogram
from shiftmend.stats.moments import Moments
from shiftmend.stats.quantiles import Quantiles, find_quantiles
from shiftmend.stats.slices import Projector, Slices
from shiftmend.stats.statistics import KINDS, Frame, Statistic

SEEDS = st.integers(0, 1000)


def drawn(samples: int, units: int, seed: int) -> Tensor:
    """Correlated values away from zero, in float64."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(units, units, generator=generator, dtype=torch.float64)
    offset = torch.randn(units, generator=generator, dtype=torch.float64)
    return torch.randn(samples, units, generator=generator, dtype=torch.float64) @ mixing + 2 * offset


def full_of(values: Tensor) -> FullGaussian:
    return FullGaussian(values.mean(0), values.T.cov(), len(values))


def marginal_of(values: Tensor) -> MarginalGaussian:
    return MarginalGaussian(values.mean(0), values.var(0), len(values))


def answers_of(values: Tensor) -> Answers:
    tracker = AnswerTracker()
    tracker.update(values)
    found = tracker.answers()
    assert found is not None
    return found


def quantiles_of(values: Tensor) -> Quantiles:
    return Quantiles(find_quantiles(values), len(values))


def histogram_of(values: Tensor, like: Histogram | None = None) -> Histogram:
    low, high = (values.amin(0), values.amax(0)) if like is None else (like.low, like.high)
    counter = CountTracker(low.float(), high.float(), Bins())
    counter.update(values.float())
    return counter.histogram()


def slices_of(values: Tensor, like: Slices | None = None, seed: int = 3) -> Slices:
    usable = torch.ones(values.shape[1], dtype=torch.bool)
    projector = like.projector if like else Projector.build(values.mean(0), values.std(0), usable, 16, seed)
    return Slices(histogram_of(projector(values.float()), like.histogram if like else None), seed, projector)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(seed=SEEDS)
def test_every_statistic_merges_and_is_zero_at_home(kind: str, seed: int) -> None:
    values = drawn(80, 3, seed)
    one, other, whole = _statistics(kind, values)
    assert one.kind == kind
    merged = type(one).mix([one, other], [1, 1])
    assert (merged.samples, merged.kind) == (80, kind)
    assert abs(float(whole.divergence(values))) < 1e-4
    # Answers do not change where all logits do alike: far from home, the least likely class is answered.
    far = -values if kind == "answers" else values * 1.5 + 1
    # Quantiles of parts give those of the whole only nearly.
    tolerance = 0.05 if kind == "quantiles" else 1e-3
    assert float(merged.divergence(far)) == pytest.approx(float(whole.divergence(far)), rel=tolerance)
    assert float(merged.to(torch.device("cpu")).divergence(far)) > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_every_statistic_comes_back_from_what_a_file_holds(kind: str) -> None:
    values = drawn(80, 3, 0)
    whole = _statistics(kind, values)[2]
    tensors = whole.tensors()
    assert {part: tensor.ndim for part, tensor in tensors.items()} == whole.tensor_dims
    frame = Frame(Bins(), values.mean(0), values.std(0), torch.ones(3, dtype=torch.bool))
    back = KINDS[kind].from_file("any", whole.facts(), tensors, frame)
    assert back.facts() == whole.facts()
    assert back.problems() == []
    far = values * 1.5 + 1
    assert float(back.divergence(far)) == pytest.approx(float(whole.divergence(far)), rel=1e-12)


def _statistics(kind: str, values: Tensor) -> tuple[Statistic, Statistic, Statistic]:
    """That of the first 30 samples, of the others and of all; what has a range takes it from all."""
    parts = (values[:30], values[30:], values)
    if kind == "soft-histogram":
        whole = histogram_of(values)
        return histogram_of(parts[0], whole), histogram_of(parts[1], whole), whole
    if kind == "sliced-histogram":
        slices = slices_of(values)
        return slices_of(parts[0], slices), slices_of(parts[1], slices), slices
    if kind == "answers":
        return tuple(answers_of(part) for part in parts)  # type: ignore[return-value]
    if kind == "quantiles":
        return tuple(quantiles_of(part) for part in parts)  # type: ignore[return-value]
    if kind == "moments":
        return tuple(Moments(part.mean(0), part.var(0), len(part)) for part in parts)  # type: ignore[return-value]
    return tuple((full_of if kind == "full-gaussian" else marginal_of)(part) for part in parts)  # type: ignore[return-value]


def test_slices_in_other_directions_do_not_merge() -> None:
    values = drawn(50, 3, 0)
    first = slices_of(values)
    assert Slices.mix([first, slices_of(values, first)], [1, 1]).samples == 100
    with pytest.raises(ProfileError, match="the same directions"):
        Slices.mix([first, slices_of(values, seed=4)], [1, 1])
    with pytest.raises(ProfileError, match="the same directions"):
        Slices.mix([first, slices_of(2 * values)], [1, 1])  # the same seed, another standardisation
    other = Slices(histogram_of(first.projector(2 * values.float())), first.seed, first.projector)
    with pytest.raises(ProfileError, match="the same ranges"):
        Slices.mix([first, other], [1, 1])


def test_the_divergence_of_a_histogram_is_that_of_its_counts() -> None:
    values = drawn(50, 3, 0)
    home = histogram_of(values)
    far = (values * 1.2).float()
    for kind in ("psi", "symmetric-kl"):
        assert float(home.divergence(far, kind)) == pytest.approx(float(home.mean_divergence(home.count(far), kind)))
    sliced = slices_of(values)
    assert float(sliced.divergence(far)) == pytest.approx(float(sliced.histogram.divergence(sliced.projector(far))))
