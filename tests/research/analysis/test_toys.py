"""What `docs/when-it-works.md` says about the two toys of the paper's appendix C, measured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import shiftmend
from shiftmend import Adaptation, Bins, Profile
from shiftmend.errors import DataError
from shiftmend.introspection.taps import tapped
from shiftmend.research.analysis.toys import Toy, offset_toy, rotation_toy
from shiftmend.stats.histograms import sampling_floor

SOFT = Bins(temperature=0.1)


def accuracy(toy: Toy, model: torch.nn.Module | None = None, site: str = "target") -> float:
    pair = (getattr(toy, f"{site}_inputs"), getattr(toy, f"{site}_labels"))
    return shiftmend.evaluate(model or toy.model, pair).accuracy


def adapted(toy: Toy, bins: Bins | None = SOFT, method: str = "fr", **options: Any) -> tuple[Profile, Adaptation]:
    profile = shiftmend.profile(toy.model, toy.source_inputs, bins=bins, progress=False)
    if method == "fr":
        options = {"epochs": 12, "batch_size": 100, "learning_rate": 0.01, **options}
    return profile, shiftmend.adapt(toy.model, toy.target_inputs, profile, method, progress=False, **options)


# --- an offset: aligning works ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_an_offset_is_restored(seed: int) -> None:
    """The affine extractor learns to take the offset away; the head is as it was."""
    toy = offset_toy(samples=6000, seed=seed)
    assert accuracy(toy, site="source") == 1.0
    assert bool((toy.model(toy.target_inputs).argmax(1) == 1).all())  # everything is taken for positive
    assert accuracy(toy) == pytest.approx(0.5, abs=0.05)
    _, result = adapted(toy, None, batch_size=300)
    assert result.before is not None
    assert result.after is not None
    assert result.before.verdict == "not restored"
    assert result.after.verdict == "restored"
    assert accuracy(toy, result.model) > 0.97
    before, after = toy.model.state_dict(), result.model.state_dict()
    scale, shift = before["extractor.0.weight"], before["extractor.0.bias"]
    assert float(after["extractor.0.weight"] / scale) == pytest.approx(1.0, abs=0.08)
    assert float((after["extractor.0.bias"] - shift) / scale) == pytest.approx(-2.0, abs=0.15)
    assert all(torch.equal(after[name], before[name]) for name in ("head.weight", "head.bias"))


@pytest.mark.slow
def test_hard_bins_do_not_reach_so_far_and_the_judge_says_so() -> None:
    """Beyond the source range there is no pull: with the paper's temperature only BatchNorm brings the target near."""
    _, stuck = adapted(offset_toy(samples=1000), Bins())
    toy = offset_toy(samples=1000, normalised=True)
    assert stuck.after is not None
    assert accuracy(toy, stuck.model) < 0.6
    assert stuck.after.verdict == "not restored"
    assert accuracy(toy) < 0.6
    _, helped = adapted(toy, Bins(), epochs=5)
    assert accuracy(toy, helped.model) > 0.97


# --- a rotation: nothing can -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_turned_gaussian_is_the_same_gaussian() -> None:
    toy = rotation_toy(samples=4000)
    for angle in np.linspace(0, np.pi, 7):
        direction = torch.tensor([np.cos(angle), np.sin(angle)], dtype=torch.float32)
        test = stats.ks_2samp((toy.source_inputs @ direction).numpy(), (toy.target_inputs @ direction).numpy())
        assert test.pvalue > 1e-3
    # while the label has moved to the other axis
    sign = (toy.target_inputs > 0).long()
    agreement = (sign == toy.target_labels[:, None]).float().mean(0)
    np.testing.assert_allclose(agreement.numpy(), [0.5, 1.0], atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [90, 180])
def test_a_rotation_cannot_be_seen_and_is_not_restored(degrees: int) -> None:
    toy = rotation_toy(degrees, samples=2000)
    expected = 0.5 if degrees == 90 else 0.0
    assert accuracy(toy, site="source") > 0.97
    assert accuracy(toy) == pytest.approx(expected, abs=0.05)
    profile, result = adapted(toy)
    # before anything is done, both taps agree with the source as well as two samples of one distribution do
    with torch.no_grad(), tapped(toy.model, profile.specs) as recorder:
        toy.model(toy.target_inputs)
        activations = recorder.read()
    floor = sampling_floor(profile.bins, 2000, 2000)
    for name, home in profile.taps.items():
        assert float(home.mean_divergence(home.of(activations[name]))) < 1.5 * floor
    assert accuracy(toy, result.model) == pytest.approx(expected, abs=0.08)
    # and so the judge, who sees only how features are distributed, has nothing to complain of: an honest limit
    assert shiftmend.verify(toy.model, toy.target_inputs, profile).verdict == "restored"
    assert shiftmend.verify(result.model, toy.target_inputs, profile).verdict == "restored"


# --- label shift -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_other_proportions_of_classes_are_taken_for_a_shift_and_mended_to_death() -> None:
    """Same device, nine positives in ten: the model was perfect, and aligning ruins it, which the judge notices."""
    toy = offset_toy(0.0, positives=0.9, samples=1000, normalised=True)
    assert accuracy(toy) == 1.0
    _, result = adapted(toy)
    assert result.before is not None
    assert result.after is not None
    assert accuracy(toy, result.model) < 0.7
    assert result.after.divergence > result.before.divergence
    assert result.after.verdict == result.before.verdict == "not restored"


@pytest.mark.slow
@pytest.mark.parametrize("offset", [0.0, 2.0])
def test_a_profile_in_the_shares_of_the_site_is_no_such_trap(offset: float) -> None:
    """The same nine in ten, known beforehand: the good model is left in peace, and the offset is mended."""
    toy = offset_toy(offset, positives=0.9, normalised=True)
    whole = shiftmend.profile(toy.model, toy.source_inputs, bins=SOFT, progress=False)
    parts = [
        shiftmend.profile(toy.model, toy.source_inputs[toy.source_labels == label], like=whole, progress=False)
        for label in (0, 1)
    ]
    mixed = Profile.mixture(parts, [0.1, 0.9])
    result = shiftmend.adapt(
        toy.model, toy.target_inputs, mixed, "fr", epochs=12, batch_size=100, learning_rate=0.01, progress=False
    )
    assert result.before is not None
    assert result.after is not None
    assert result.before.verdict == ("restored" if offset == 0 else "not restored")
    assert result.after.verdict == "restored"
    assert accuracy(toy, result.model) > 0.99


# --- the toys themselves ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_toys_depend_on_their_seed_alone() -> None:
    for make in (offset_toy, rotation_toy):
        before = torch.get_rng_state()
        first = make(samples=50, seed=3)
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(99)
        again, other = make(samples=50, seed=3), make(samples=50, seed=4)
        for name in ("source_inputs", "source_labels", "target_inputs", "target_labels"):
            assert torch.equal(getattr(first, name), getattr(again, name))
        assert not torch.equal(first.target_inputs, other.target_inputs)
        for ours, theirs in zip(first.model.parameters(), again.model.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        assert not first.model.training


@pytest.mark.slow
def test_the_data_is_what_the_paper_says() -> None:
    toy = offset_toy(2.0, positives=0.25, samples=4000)
    for inputs, labels, offset, share in (
        (toy.source_inputs, toy.source_labels, 0.0, 0.5),
        (toy.target_inputs, toy.target_labels, 2.0, 0.25),
    ):
        noise = (inputs[:, 0] - offset - (2 * labels - 1)).numpy()
        assert stats.kstest(noise, stats.uniform(-0.5, 1).cdf).pvalue > 1e-3
        assert float(labels.float().mean()) == pytest.approx(share, abs=0.03)
    turned = rotation_toy(30.0, samples=4000)
    back = turned.target_inputs.numpy() @ [[np.sqrt(3) / 2, -1 / 2], [1 / 2, np.sqrt(3) / 2]]
    np.testing.assert_array_equal(back[:, 0] > 0, turned.target_labels.numpy())
    assert stats.kstest(back.ravel(), stats.norm.cdf).pvalue > 1e-3


def test_impossible_toys_are_refused() -> None:
    for share in (0.0, 1.0, -1.0):
        with pytest.raises(DataError, match="share of positives"):
            offset_toy(positives=share)
    for make in (offset_toy, rotation_toy):
        with pytest.raises(DataError, match="at least 2 samples"):
            make(samples=1)
