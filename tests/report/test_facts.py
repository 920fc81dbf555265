"""Every number of a report against numpy in float64, computed another way."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from report_worlds import Page, assert_refused, mended
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from worlds import sensors

import shiftmend
from shiftmend import report
from shiftmend.profiles.profile import Profile
from shiftmend.report.facts import samples_needed
from shiftmend.report.page import render
from shiftmend.report.verdicts import state_verdict
from shiftmend.stats.divergences import sampling_floor
from shiftmend.stats.histograms import Bins
from shiftmend.verification.verdict import Verification

Array = NDArray[np.float64]


def softmax(values: Array) -> Array:
    powers = np.exp(values - values.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def reference_shares(values: Array, low: float, high: float, bins: Bins) -> Array:
    """Compute equation (4) of the paper for one unit."""
    cuts = np.arange(bins.inner + 1) / bins.inner
    unit = (values - low) / (high - low)
    weights = np.arange(1, bins.total + 1)
    offsets = np.concatenate([[0.0], -np.cumsum(cuts)])
    return softmax((unit[:, None] * weights + offsets) / bins.temperature).mean(0)


def reference_divergence(home: Array, here: Array) -> float:
    logs = np.log(home + 1e-8) - np.log(here + 1e-8)
    return float(((home - here) * logs).sum() / math.log(len(home)))


def activations(model: nn.Module, inputs: torch.Tensor) -> tuple[Array, Array]:
    """Return the inputs and outputs of the last layer."""
    with torch.no_grad():
        features = nn.Sequential(*list(model)[:-1])(inputs)  # type: ignore[call-overload]
        return features.double().numpy(), list(model)[-1](features).double().numpy()  # type: ignore[call-overload]


@pytest.fixture(scope="module")
def found() -> report.Facts:
    world, profile, result = mended()
    return report.gather(world.model, world.target, profile, result, labels=world.labels)


@pytest.mark.slow
def test_the_verdict_is_that_of_verify(found: report.Facts) -> None:
    world, profile, result = mended()
    for seen, model in ((found.before, world.model), (found.after, result.model)):
        own = replace(shiftmend.verify(model, world.target, profile), adapted=model is result.model)
        assert seen is not None
        assert seen.divergence == pytest.approx(own.divergence, rel=1e-6)
        assert (seen.floor, seen.samples, seen.verdict) == (own.floor, own.samples, own.verdict)
        assert seen.adapted == own.adapted
    assert state_verdict(found).headline.lower() == result.after.verdict  # type: ignore[union-attr]


@pytest.mark.slow
def test_units_against_numpy(found: report.Facts) -> None:
    world, profile, result = mended()
    for tap in found.taps:
        place = ("features", "logits").index(tap.name)
        stored = profile.taps[tap.name]
        usable = [unit for unit in range(stored.units) if bool(stored.usable[unit])]
        assert (tap.units, tap.constant) == (len(usable), stored.units - len(usable))
        for side, model in (("before", world.model), ("after", result.model)):
            values = activations(model, world.target)[place]
            expected = {}
            for unit in usable:
                home = stored.counts[unit].double().numpy() / stored.samples
                low, high = float(stored.low[unit]), float(stored.high[unit])
                shares = reference_shares(values[:, unit], low, high, profile.bins)
                expected[unit] = reference_divergence(home, shares)
                shown = next((one for one in tap.worst if one.number == unit), None)
                assert shown is not None, "there are fewer units than are listed"
                seen = getattr(shown, side)
                middle = np.concatenate([[0.0], np.arange(profile.bins.inner) + 0.5, [profile.bins.inner]])
                middle = middle / profile.bins.inner
                assert np.allclose(seen.shares, shares, atol=2e-4)
                assert seen.outside == pytest.approx(
                    ((values[:, unit] < low) | (values[:, unit] > high)).mean(), abs=2e-3
                )
                assert seen.moved == pytest.approx(((shares - home) * middle).sum(), abs=2e-4)
                deviations = [np.sqrt((p * (middle - (p * middle).sum()) ** 2).sum()) for p in (shares, home)]
                assert seen.spread == pytest.approx(deviations[0] / deviations[1], rel=1e-2, abs=1e-3)
            assert getattr(tap, side) == pytest.approx([expected[unit] for unit in usable], rel=2e-2, abs=1e-3)
            limit = tap.floor + max(0.01, 3 * tap.floor)
            clear = sum(value >= limit for value in getattr(tap, side))
            assert getattr(tap, f"clear_{side}") == clear
        assert tap.floor == sampling_floor(profile.bins, 600, 600)
        distances = [one.before.divergence for one in tap.worst]
        assert distances == sorted(distances, reverse=True)


@pytest.mark.parametrize("temperature", [0.01, 0.1])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU])
def test_at_home_nothing_is_beyond_the_range(activation: type[nn.Module], temperature: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), activation(), nn.Linear(12, 3))
    inputs = torch.randn(600, 6)
    profile = shiftmend.profile(model, inputs, bins=Bins(temperature=temperature))
    for tap in report.gather(model, inputs, profile).taps:
        assert max(unit.before.outside for unit in tap.worst) < 2e-3


def test_predictions_against_numpy(found: report.Facts) -> None:
    world, _, result = mended()
    probabilities = [softmax(activations(model, world.target)[1]) for model in (world.model, result.model)]
    chosen = [p.argmax(1) for p in probabilities]
    made = found.predictions
    assert made is not None
    assert made.after is not None
    assert made.total == 600
    for side, p, guess in zip((made.before, made.after), probabilities, chosen, strict=True):
        assert list(side.counts) == np.bincount(guess, minlength=3).tolist()
        assert side.confidence == pytest.approx(p.max(1).mean(), rel=1e-5)
        expected = np.histogram(p.max(1), bins=np.arange(11) / 10)[0]
        assert np.abs(np.array(side.histogram) - expected).sum() <= 2  # one sample may lie on an edge
    assert made.changed == int((chosen[0] != chosen[1]).sum()) > 0
    pairs = {(a, b): int(((chosen[0] == a) & (chosen[1] == b)).sum()) for a in range(3) for b in range(3) if a != b}
    assert {(a, b): count for a, b, count in made.moves} == {pair: n for pair, n in pairs.items() if n}
    counts = [count for _, _, count in made.moves]
    assert counts == sorted(counts, reverse=True)
    for sample in found.inputs:
        for side, p in (("before", probabilities[0]), ("after", probabilities[1])):
            guess, confidence = getattr(sample, side)
            assert guess == p[sample.number].argmax()
            assert confidence == pytest.approx(p[sample.number].max(), rel=1e-4)
        assert np.array_equal(sample.values, world.target[sample.number].numpy())
        assert sample.label == int(world.labels[sample.number])


def test_scores_are_those_of_evaluate_and_absent_without_labels(found: report.Facts) -> None:
    world, profile, result = mended()
    assert found.scores_before == shiftmend.evaluate(world.model, (world.target, world.labels))
    assert found.scores_after == shiftmend.evaluate(result.model, (world.target, world.labels))
    bare = report.gather(world.model, (world.target, world.labels), profile, result)
    assert bare.scores_before is None
    assert bare.scores_after is None
    assert all(sample.label is None for sample in bare.inputs)


def test_models_and_data_stay_as_they_were() -> None:
    world, profile, result = mended()
    world.model.train()
    try:
        before = [value.clone() for value in world.model.state_dict().values()]
        target = world.target.clone()
        report.gather(world.model, world.target, profile, result)
        assert world.model.training
        assert all(torch.equal(a, b) for a, b in zip(before, world.model.state_dict().values(), strict=True))
        assert torch.equal(world.target, target)
    finally:
        world.model.eval()


def test_streams_and_batches_give_the_same() -> None:
    world, profile, result = mended()
    whole = report.gather(world.model, world.target, profile, result)
    parts = report.gather(world.model, list(world.target.split(70)), profile, result, batch_size=50)
    assert whole.after is not None
    assert parts.after is not None
    assert parts.after.divergence == pytest.approx(whole.after.divergence, rel=1e-5)
    assert parts.predictions is not None
    assert whole.predictions is not None
    assert parts.predictions.changed == whole.predictions.changed


class Noisy(Dataset[torch.Tensor]):
    """A data set that gives other inputs in each pass, as an augmentation does."""

    def __len__(self) -> int:
        return 600

    def __getitem__(self, index: int) -> torch.Tensor:
        return mended()[0].target[index] + torch.as_tensor(np.random.default_rng().normal(size=6), dtype=torch.float32)


def test_the_inputs_shown_of_a_stream_are_those_that_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    world, profile, _ = mended()
    monkeypatch.setattr("shiftmend.inputs.feed.max_resident_bytes", lambda _: 0)
    found = report.gather(world.model, Noisy(), profile, samples=5)
    for sample in found.inputs:
        with torch.no_grad():
            probabilities = world.model(torch.as_tensor(sample.values)[None]).softmax(1)
        assert sample.before == (int(probabilities.argmax()), pytest.approx(float(probabilities.max()), rel=1e-4))
    assert [sample.number for sample in found.inputs] == [0, 1, 2, 3, 4]
    assert "5 of 600 inputs, the first." in Page(render(found)).sections["inputs"]


@pytest.mark.slow
def test_cautions_say_what_does_not_belong_together() -> None:
    world, profile, result = mended()
    assert report.gather(world.model, world.source, profile, result).cautions == ()
    inputs = report.gather(world.model, world.target, profile).cautions
    assert inputs == (
        "Check the preprocessing of the inputs: their values lie in [-16.6, 14.4], at the source in [-6.08, 6]: "
        "another normalisation?",
    )
    assert "did not run to its end" in _one(replace(result, manifest=result.manifest | {"status": "interrupted"}))
    assert "other weights" in _one(replace(result, manifest=result.manifest | {"source_weights": "0"}))
    gauss = result.manifest | {"method": result.manifest["method"] | {"name": "full-gauss"}}
    assert "says less than usual" in _one(replace(result, manifest=gauss))
    (weights,) = report.gather(world.model, world.source, replace(profile, weights="0")).cautions
    assert "weights are not those that the profile was made with" in weights
    assert "another profile" in _one(replace(result, manifest=result.manifest | {"profile_sha256": "0"}))


def test_predictions_that_are_no_numbers_are_remarked() -> None:
    world, profile, _ = mended()
    broken = copy.deepcopy(world.model)
    broken.register_forward_hook(lambda module, given, made: made.index_fill(0, torch.tensor([0]), float("nan")))
    (caution,) = report.gather(broken, world.source, profile).cautions
    assert "Some outputs are NaN" in caution


def _one(result: shiftmend.Adaptation) -> str:
    world, profile, _ = mended()
    (caution,) = report.gather(world.model, world.source, profile, result).cautions
    return caution


def test_whether_the_judged_data_was_adapted_to() -> None:
    world, profile, result = mended()
    for target, same in ((world.target, True), (world.target[1:], False)):
        found = report.gather(world.model, target, profile, result)
        assert found.mending is not None
        assert found.after is not None
        assert found.mending.same_data is found.after.adapted is same
        assert not found.before.adapted


@pytest.mark.parametrize("quantities", [1, 2])
def test_a_model_of_numbers_has_no_predictions(quantities: int) -> None:
    layers = nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, quantities), nn.Flatten(0) if quantities == 1 else nn.Identity()
    model = nn.Sequential(*layers).eval()
    inputs, wanted = torch.randn(300, 6), torch.randn(300) if quantities == 1 else torch.randn(300, 2)
    profile = shiftmend.profile(model, inputs, progress=False)
    result = shiftmend.adapt(model, inputs + 1, profile, "fr", epochs=1, progress=False)
    found = report.gather(model, inputs + 1, profile, result, labels=wanted)
    assert found.predictions is None
    assert all(sample.before is None for sample in found.inputs)
    with torch.no_grad():
        error = np.abs(model(inputs + 1).double().numpy() - wanted.double().numpy()).mean()
    assert isinstance(found.scores_before, shiftmend.RegressionScores)
    assert found.scores_before.mean_absolute_error == pytest.approx(error, rel=1e-5)
    page = render(found)
    assert "predicts no classes" in page
    assert (f"{quantities} unit is compared" in page) == (quantities == 1)
    assert f"mean absolute error{', of 2 quantities' if quantities == 2 else ''}</td><td>{error:.4g}" in page
    assert "R²" in page
    assert "mean confidence" not in page


def test_a_model_with_a_prediction_for_every_pixel() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 1)).eval()
    images = torch.randn(60, 1, 5, 6)
    profile = shiftmend.profile(model, images, progress=False)
    found = report.gather(model, images[:40], profile)
    assert found.predictions is not None
    assert found.predictions.total == 40 * 12
    assert all(sample.before is None for sample in found.inputs)
    assert "Below each" not in render(found)
    assert {tap.floor for tap in found.taps} == {sampling_floor(profile.bins, 60, 40)}, "pixels are not independent"
    labels = torch.randint(0, 4, (40, 3, 4))
    scored = report.gather(model, images[:40], profile, labels=labels)
    assert scored.scores_before == shiftmend.evaluate(model, (images[:40], labels))
    assert "40 inputs came with labels" in render(scored)
    assert "mean IoU" in render(scored)
    labels[:, 0] = 255
    scored = report.gather(model, images[:40], profile, labels=labels, ignore_label=255)
    assert scored.scores_before == shiftmend.evaluate(model, (images[:40], labels), ignore_label=255)


def test_a_model_with_a_prediction_for_every_token() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 6), nn.Tanh(), nn.Linear(6, 5)).eval()
    tokens, labels = torch.randint(0, 9, (60, 5)), torch.randint(0, 5, (60, 5))  # as many tokens as classes
    profile = shiftmend.profile(model, tokens, progress=False)
    found = report.gather(model, tokens, profile, labels=labels)
    assert isinstance(found.scores_before, shiftmend.Scores)
    with torch.no_grad():
        right = model(tokens).argmax(-1) == labels
    assert found.scores_before.accuracy == pytest.approx(float(right.double().mean()))


class InPlace(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.mul_(0.5)


def test_a_model_that_works_in_place_does_not_change_what_the_other_sees() -> None:
    torch.manual_seed(0)
    model, data = nn.Sequential(InPlace(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval(), torch.randn(300, 6)
    profile = shiftmend.profile(model, data.clone(), progress=False)
    same = shiftmend.adapt(model, data.clone(), profile, "source-only", progress=False)
    same = replace(same, manifest=same.manifest | {"method": {"name": "fr"}})
    found = report.gather(model, data.clone(), profile, same)
    assert found.after == found.before
    assert found.predictions is not None
    assert found.predictions.changed == 0
    assert all(sample.after == sample.before for sample in found.inputs)


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("units", [None, 1, 2])
@given(st.integers(50, 100_000))
def test_enough_samples_are_just_enough(units: int | None, adapted: bool, source: int) -> None:
    bins = Bins()

    def undecided(floor: float) -> bool:
        found = (Verification(d, floor, 1, source, adapted, units=units) for d in np.linspace(0, 6 * floor, 3001))
        return any(each.verdict == "undecided" for each in found)

    least = samples_needed(bins, source, units)
    if least is None:
        assert undecided(1.01 * sampling_floor(bins, source, 10**12))
        return
    assert not undecided(sampling_floor(bins, source, least + 1))  # rounding aside
    assert undecided(1.01 * sampling_floor(bins, source, least - 1))


@pytest.mark.slow
def test_who_is_undecided_is_asked_for_more_samples_than_there_are() -> None:
    world = sensors(samples=1500)
    found = report.gather(world.model, world.source, world.profile())
    unsure = replace(
        found, samples=500, before=Verification(0.0125, 0.0098, 500, 2000), samples_needed=samples_needed(Bins(), 2000)
    )
    assert unsure.before.verdict == "undecided"
    assert unsure.samples_needed is not None
    assert unsure.samples_needed > unsure.samples


def test_a_model_that_was_left_as_it_came_is_shown_once() -> None:
    world, profile, _ = mended()
    untouched = shiftmend.adapt(world.model, world.target, profile, "source-only", progress=False)
    found = report.gather(world.model, world.target, profile, untouched)
    assert found.mending is not None
    assert found.mending.left_alone
    assert found.mending.same_data
    assert found.after is None
    assert "after mending" not in render(found)


def test_profile_may_be_a_file(tmp_path: object) -> None:
    world, profile, _ = mended()
    path = f"{tmp_path}/p.safetensors"
    profile.save(path)
    found = report.gather(world.model, world.target, path)
    assert isinstance(Profile.load(path), Profile)
    assert found.home.size == len(profile.to_bytes())


def test_models_profiles_and_data_that_do_not_fit() -> None:
    assert_refused("other layers", nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)))
    assert_refused("is empty", None, torch.zeros(0, 6))
    assert_refused("NaN or infinity", None, torch.full((5, 6), float("nan")))
    assert_refused("shape", None, torch.zeros(5, 7))
    assert_refused("Profile or the path", None, None, 3)
    assert_refused("3 labels", labels=torch.zeros(3))
    assert_refused("whole number", samples=-1)
    assert_refused("3 classes.* 2", classes=["a", "b"])
    world = mended()[0]
    loader = DataLoader(TensorDataset(world.target), batch_size=100, shuffle=True)
    assert_refused("shuffles", None, loader, labels=world.labels)


def test_labels_and_classes_of_the_wrong_kind() -> None:
    for labels in ("cat", ["cat"], {}):
        assert_refused("labels", labels=labels)
    assert_refused("classes", classes="abc")
    assert_refused("classes", classes=3)
