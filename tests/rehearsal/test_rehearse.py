"""`rehearse`: what is recorded, with and without labels, for every kind of output; checkpoints and other processes."""

from __future__ import annotations

import itertools
import json
import logging
import math
import pickle
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rehearsed_world import CANDIDATES, DEVICES, draw, make_net, rehearsed, train, trained
from sklearn.metrics import confusion_matrix
from torch import Tensor, nn

import shiftmend
from shiftmend.errors import DataError, ProfileError, ShiftmendError
from shiftmend.inputs.feed import Feed
from shiftmend.inputs.tables import Table
from shiftmend.methods.fr import FR
from shiftmend.profiles.profile import Profile
from shiftmend.profiles.rehearsal import UNTOUCHED, Rehearsal
from shiftmend.rehearsal import rehearse
from shiftmend.rehearsal.rehearse import QUICK_CANDIDATES
from shiftmend.stats.groups import design_effect
from shiftmend.verification.estimate import Estimator
from shiftmend.verification.predictions import fit_temperature
from shiftmend.verification.reading import read

BATTERY = {
    "offset": lambda inputs: inputs + 2,
    "gain": lambda inputs: 3 * inputs,
    "lamp/dim": lambda inputs: inputs / 4,
}
SHORT: dict[str, Any] = {"battery": BATTERY, "candidates": ["match-mean"], "progress": False}
"""Options of a rehearsal that takes a fraction of a second."""
DEFAULT: dict[str, Any] = {"battery": None, "shifts": 11, "candidates": CANDIDATES, "site_size": 300, "batch_size": 300}
"""Options of a rehearsal with the default battery."""


def record_of(model: nn.Module, home: Any, profile: Profile, **options: Any) -> Rehearsal:
    found = shiftmend.rehearse(model, home, profile, **SHORT | options).rehearsal
    assert found is not None
    return found


def assert_same(one: Rehearsal, other: Rehearsal) -> None:
    for each in fields(Rehearsal):
        first, second = getattr(one, each.name), getattr(other, each.name)
        if isinstance(first, Tensor):
            torch.testing.assert_close(second, first, rtol=0, atol=0, equal_nan=True)
        elif each.name == "by_class":
            assert first.keys() == second.keys()
            assert all(torch.equal(second[name], counts) for name, counts in first.items())
        else:
            assert second == first, each.name


@pytest.fixture(scope="module")
def home() -> tuple[Tensor, Tensor]:
    site = draw(150, 3)
    return site.inputs, site.labels


# ---- what is recorded


@pytest.mark.slow
def test_the_default_battery_is_rehearsed_by_every_candidate() -> None:
    model, profile = trained()
    home = draw(300, 2)
    record = record_of(model, (home.inputs, home.labels), profile, **SHORT | DEFAULT)
    assert record.candidates == (UNTOUCHED, *CANDIDATES)
    assert record.shifts[0].name == "none"
    assert len(record.shifts) == 12
    assert len(record.families) >= 9
    assert record.find_problem() is None
    assert record.scores.shape == (12, 1, 3)
    assert float(record.scores[0, 0, 0]) == pytest.approx(record.score)
    assert float(record.scores[..., 0].min()) < record.score - 0.3  # a battery that never fails teaches nothing
    best = record.scores.amax(2)[:, 0]
    assert float(best.min()) < record.score - 0.3
    assert bool((best > record.scores[:, 0, 0] + 0.1).any())
    assert bool(record.estimates.isfinite().all())


@pytest.mark.slow
def test_the_given_profile_stays_as_it_is() -> None:
    model, profile = trained()
    before = profile.to_bytes()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    made = rehearsed()
    assert made is not profile
    assert profile.rehearsal is None
    assert profile.to_bytes() == before
    assert made.weights == profile.weights
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name


def test_home_is_described_in_the_order_of_the_classes(home: tuple[Tensor, Tensor]) -> None:
    model, profile = trained()
    record = record_of(model, home, profile)
    with torch.no_grad():
        logits = model(home[0])
    answers = logits.argmax(1)
    expected = confusion_matrix(home[1], answers)
    assert not np.array_equal(expected, expected.T)
    np.testing.assert_array_equal(record.confusion.numpy(), expected)
    np.testing.assert_allclose(record.shares.numpy(), np.bincount(answers, minlength=4) / 150, rtol=1e-6)
    assert record.score == pytest.approx(float(np.trace(expected)) / 150)
    assert record.temperature == pytest.approx(fit_temperature(logits, home[1]), rel=1e-3)
    confidence = (logits / record.temperature).softmax(1).amax(1)
    above = float((confidence >= record.thresholds[0]).double().mean())
    assert above == pytest.approx(record.score, abs=0.01)


def test_permuted_labels_show_in_score_and_confusion(home: tuple[Tensor, Tensor]) -> None:
    model, profile = trained()
    right, wrong = (record_of(model, (home[0], labels), profile) for labels in (home[1], 3 - home[1]))
    assert wrong.score < 0.1 < 0.8 < right.score
    assert torch.equal(wrong.confusion, right.confusion.flip(0))
    assert torch.equal(wrong.shares, right.shares)


def test_scores_and_signals_are_those_of_the_shifted_data(home: tuple[Tensor, Tensor]) -> None:
    model, profile = trained()
    record = record_of(model, home, profile)
    assert [(shift.name, shift.family) for shift in record.shifts] == [
        ("none", "none"),
        ("offset", "offset"),
        ("gain", "gain"),
        ("dim", "lamp"),
    ]
    for place, function in enumerate([lambda inputs: inputs, *BATTERY.values()]):
        with torch.no_grad():
            logits = model(function(home[0]))
        truth = float((logits.argmax(1) == home[1]).double().mean())
        assert float(record.scores[place, -1, 0]) == pytest.approx(truth)
        confidence = float((logits / record.temperature).softmax(1).amax(1).mean())
        signal = float(record.values[place, -1, 0, record.signals.index("confidence")])
        assert signal == pytest.approx(confidence, rel=2e-3)
    matched = shiftmend.adapt(model, home[0] + 2, profile, "match-mean", progress=False)
    with torch.no_grad():
        truth = float((matched.model(home[0] + 2).argmax(1) == home[1]).double().mean())
    assert float(record.scores[1, -1, 1]) == pytest.approx(truth)
    assert math.isnan(float(record.values[1, -1, 0, record.signals.index(f"agreement with {UNTOUCHED}")]))


def test_two_sizes_are_rehearsed_unless_one_is_named() -> None:
    model, profile = trained()
    site = draw(700, 4)
    both = record_of(model, (site.inputs, site.labels), profile, battery={"offset": BATTERY["offset"]})
    assert len(both.sizes) == 2
    assert both.sizes[-1] == both.samples == 700
    one = record_of(model, (site.inputs, site.labels), profile, battery={"offset": BATTERY["offset"]}, site_size=200)
    assert one.sizes == (200,)
    quick = record_of(model, (site.inputs, site.labels), profile, battery={"offset": BATTERY["offset"]}, quick=True)
    assert quick.sizes == (700,)


def test_a_quick_rehearsal_leaves_out_slow_candidates(home: tuple[Tensor, Tensor]) -> None:
    assert {"fr", "bufr-im"}.isdisjoint(QUICK_CANDIDATES)
    assert {UNTOUCHED, "bufr"} <= set(QUICK_CANDIDATES)


@pytest.mark.slow
def test_unshifted_sites_are_recognised_as_home_and_shifted_ones_are_not() -> None:
    """Skew is the signal to get wrong: the shares at home are those of the very samples that were rehearsed with."""
    model, _ = trained()
    profile = rehearsed()
    assert profile.rehearsal is not None
    estimator = Estimator(profile.rehearsal)

    def is_at_home(inputs: Tensor) -> bool:
        found = read(model, Feed(inputs, batch_size=500), profile, profile.rehearsal)
        return estimator.is_at_home(found.signals, found.samples)

    sites = [draw(500, seed).inputs for seed in range(100, 120)]
    assert sum(is_at_home(site) for site in sites) >= 17
    assert not any(is_at_home(site + torch.linspace(-1, 1, 8)) for site in sites[:5])
    assert not is_at_home(draw(500, 100, (0.7, 0.1, 0.1, 0.1)).inputs)


# ---- kinds of scores


def test_without_labels_the_score_is_the_agreement_with_clean_answers(home: tuple[Tensor, Tensor]) -> None:
    model, profile = trained()
    record = record_of(model, home[0], profile)
    assert record.metric == "agreement"
    assert not record.labelled
    assert record.score == 1
    assert torch.equal(record.confusion.diagonal() / 150, record.shares), "own answers stand in for labels"
    with torch.no_grad():
        clean, shifted = model(home[0]).argmax(1), model(home[0] + 2).argmax(1)
    assert float(record.scores[1, -1, 0]) == pytest.approx(float((clean == shifted).double().mean()))


@pytest.mark.parametrize("labelled", [True, False])
def test_quantities_have_their_root_mean_square_error(labelled: bool) -> None:
    inputs = draw(400, 5).inputs
    truth = inputs[:, :1] - inputs[:, 1:2]
    model = train(make_net(1), nn.functional.mse_loss, inputs, truth, steps=30)
    profile = shiftmend.profile(model, inputs, progress=False)
    site = draw(150, 6).inputs
    labels = site[:, :1] - site[:, 1:2]
    record = record_of(model, (site, labels) if labelled else site, profile)
    assert record.metric == ("rmse" if labelled else "deviation")
    assert record.task == "quantities"
    assert not record.higher_is_better
    with torch.no_grad():
        clean, shifted = model(site), model(site + 2)
    wanted = labels if labelled else clean
    assert float(record.scores[1, -1, 0]) == pytest.approx(float((shifted - wanted).square().mean().sqrt()), rel=1e-4)
    assert record.score == pytest.approx(float((clean - wanted).square().mean().sqrt()), abs=1e-6)
    np.testing.assert_allclose(record.output_mean, clean.mean(0), rtol=1e-3, atol=1e-4)
    measured = {name for name in ("spread", "offset") if record.values[0, 0, 0, record.signals.index(name)].isfinite()}
    assert measured == {"spread", "offset"}


def test_one_sample_that_makes_most_of_the_error_is_named(caplog: pytest.LogCaptureFixture) -> None:
    inputs = draw(400, 5).inputs
    truth = inputs[:, :1] - inputs[:, 1:2]
    model = train(make_net(1), nn.functional.mse_loss, inputs, truth, steps=30)
    profile = shiftmend.profile(model, inputs, progress=False)
    site = draw(60, 6).inputs
    labels = site[:, :1] - site[:, 1:2]
    plain = record_of(model, (site, labels), profile)
    with torch.no_grad():
        errors = (model(site) - labels).double()
    kurtosis = float((errors**4).mean() / (errors**2).mean() ** 2)
    assert plain.error_kurtosis == pytest.approx(kurtosis, rel=1e-4)
    assert "squared error" not in caplog.text
    labels[17] += 10 * float(errors.abs().max())
    assert record_of(model, (site, labels), profile).error_kurtosis > 2 * kurtosis
    assert "sample 17 makes" in caplog.text


def draw_patients(patients: int, each: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw samples [N, 8] of patients, half of whom are hard, with the patient of each."""
    site = draw(patients * each, seed)
    generator = torch.Generator().manual_seed(seed)
    who = torch.arange(patients).repeat_interleave(each)
    noise = 2 * torch.randn(site.inputs.shape, generator=generator)
    return site.inputs + noise * (who % 2).unsqueeze(1), site.labels, who


def test_groups_make_home_say_less(caplog: pytest.LogCaptureFixture) -> None:
    model, profile = trained()
    inputs, labels, who = draw_patients(20, 30, 11)
    plain = record_of(model, (inputs, labels), profile)
    assert "groups=" in caplog.text
    caplog.clear()
    record = record_of(model, (inputs, labels), profile, groups=[f"patient {one}" for one in who.tolist()])
    assert "groups=" not in caplog.text
    assert (plain.groups, plain.design_effect, plain.answer_design_effect) == (0, 1.0, 1.0)
    assert record.groups == 20
    with torch.no_grad():
        answers = model(inputs).argmax(1)
    assert record.design_effect == pytest.approx(design_effect((answers == labels).double(), who))
    assert record.answer_design_effect == pytest.approx(design_effect(nn.functional.one_hot(answers, 4), who))
    assert record.design_effect > 2
    # Home data differ more from draw to draw if whole patients are drawn.
    confidence = record.signals.index("confidence")
    torch.testing.assert_close(record.home_deviation, plain.home_deviation, equal_nan=True)
    assert float(record.group_deviation[-1, confidence]) > 1.5 * float(record.home_deviation[-1, confidence])
    halves = [
        Estimator(one).estimate_at_home(600).withheld or (0.0, Estimator(one).estimate_at_home(600).low)
        for one in (plain, record)
    ]
    assert halves[1][1] < halves[0][1] - 0.02


def test_whole_groups_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    model, profile = trained()
    inputs, labels, who = draw_patients(12, 25, 11)
    drawn: list[list[int]] = []
    draw_once = rehearse._Home.draw

    def keep(self: Any, size: int, number: int, grouped: bool = False) -> Tensor:
        places = draw_once(self, size, number, grouped=grouped)
        if grouped:
            drawn.append(sorted(who[places].bincount(minlength=12).tolist()))
        return places

    monkeypatch.setattr(rehearse._Home, "draw", keep)
    record_of(model, (inputs, labels), profile, groups=who, site_size=110)
    assert len(drawn) > 5
    assert all(one == [0] * 7 + [10] + [25] * 4 for one in drawn)


def test_a_table_brings_its_groups() -> None:
    model, profile = trained()
    inputs, labels, who = draw_patients(12, 25, 11)
    table = Table(inputs, labels=labels, groups=tuple(map(str, who.tolist())))
    assert record_of(model, table, profile).groups == 12
    with pytest.raises(DataError, match="300 samples"):
        record_of(model, (inputs, labels), profile, groups=who[1:])


def test_classes_in_another_order_are_noticed(home: tuple[Tensor, Tensor], caplog: pytest.LogCaptureFixture) -> None:
    model, profile = trained()
    record_of(model, home, profile)
    assert "order of the classes" not in caplog.text
    record_of(model, (home[0], (home[1] + 1) % 4), profile)
    assert "order of the classes" in caplog.text


def test_perfect_answers_leave_the_confidence_to_tell_groups_apart() -> None:
    model, profile = trained()
    inputs, _, who = draw_patients(12, 25, 11)
    with torch.no_grad():
        answers = model(inputs).argmax(1)
    record = record_of(model, (inputs, answers), profile, groups=who)
    assert record.score == 1
    assert record.design_effect > 1


def test_a_single_logit_answers_one_of_two_classes() -> None:
    source = draw(400, 5, (0.5, 0.5, 0.0, 0.0))
    model = train(
        make_net(1),
        lambda outputs, labels: nn.functional.binary_cross_entropy_with_logits(outputs[:, 0], labels.float()),
        source.inputs,
        source.labels,
    )
    profile = shiftmend.profile(model, source.inputs, progress=False)
    site = draw(150, 6, (0.5, 0.5, 0.0, 0.0))
    record = record_of(model, (site.inputs, site.labels), profile)
    with torch.no_grad():
        answers = (model(site.inputs)[:, 0] > 0).long()
    assert record.metric == "accuracy"
    assert record.score == pytest.approx(float((answers == site.labels).double().mean()))
    assert record.score > 0.8
    np.testing.assert_array_equal(record.confusion.numpy(), confusion_matrix(site.labels, answers))
    np.testing.assert_allclose(record.shares, np.bincount(answers, minlength=2) / 150, rtol=1e-6)


def test_classes_of_pixels_are_scored_pixel_by_pixel(caplog: pytest.LogCaptureFixture) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(240, 1, 6, 6, generator=generator)
    labels = (images[:, 0] > 0.5).long()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    train(model, nn.functional.cross_entropy, images, labels, steps=60)
    profile = shiftmend.profile(model, images[:120], progress=False)
    labels[:, 0, 0] = 255
    record = record_of(
        model,
        (images[120:], labels[120:]),
        profile,
        battery={"dark": lambda given: given - 0.4},
        ignore_label=255,
    )
    with torch.no_grad():
        clean, dark = model(images[120:]).argmax(1), model(images[120:] - 0.4).argmax(1)
    counted = labels[120:] != 255
    assert record.score == pytest.approx(float((clean == labels[120:])[counted].double().mean()))
    truth = float((dark == labels[120:])[counted].double().mean())
    assert float(record.scores[1, -1, 0]) == pytest.approx(truth)
    assert truth < record.score
    assert "profile itself" not in caplog.text


# ---- checkpoints and other processes


class Stopped(Exception):
    """A rehearsal is killed."""


def test_a_killed_rehearsal_goes_on_from_its_checkpoint(tmp_path: Path, home: tuple[Tensor, Tensor]) -> None:
    model, profile = trained()
    calls: list[str] = []
    broken = True

    def gain(inputs: Tensor) -> Tensor:
        if broken:
            raise Stopped
        calls.append("gain")
        return 3 * inputs

    def offset(inputs: Tensor) -> Tensor:
        calls.append("offset")
        return inputs + 2

    battery = {"offset": offset, "gain": gain}
    path = tmp_path / "rehearsal.json"
    with pytest.raises(Stopped):
        record_of(model, home, profile, battery=battery, site_size=150, checkpoint=path)
    assert calls == ["offset"]
    broken = False
    calls.clear()
    resumed = record_of(model, home, profile, battery=battery, site_size=150, checkpoint=path)
    assert calls == ["gain"]
    whole = record_of(model, home, profile, battery=battery, site_size=150)
    assert_same(resumed, whole)
    calls.clear()
    assert_same(record_of(model, home, profile, battery=battery, site_size=150, checkpoint=path), whole)
    assert calls == []


def test_a_checkpoint_of_another_rehearsal_is_refused(tmp_path: Path, home: tuple[Tensor, Tensor]) -> None:
    model, profile = trained()
    path = tmp_path / "rehearsal.json"
    one = {"battery": {"offset": BATTERY["offset"]}, "checkpoint": path}
    record_of(model, home, profile, **one)
    content = path.read_bytes()
    for changed in ({"candidates": ["match-moments"]}, {"battery": {"gain": BATTERY["gain"]}}, {"seed": 1}):
        with pytest.raises(ShiftmendError, match="belongs to another"):
            record_of(model, home, profile, **one | changed)
    with pytest.raises(ShiftmendError, match="belongs to another"):
        record_of(model, (home[0] + 1, home[1]), profile, **one)
    assert path.read_bytes() == content
    facts = json.loads(content)
    for damaged in ("", "[]", json.dumps(facts | {"format": "x"}), json.dumps({"format": facts["format"]})):
        path.write_text(damaged)
        with pytest.raises(ShiftmendError, match="Remove it"):
            record_of(model, home, profile, **one)


class Elsewhere(Executor):
    """An executor that sends everything through pickle, as another process would get it."""

    def __init__(self) -> None:
        self.jobs = 0

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.jobs += 1
        function, arguments = pickle.loads(pickle.dumps((fn, args)))
        future: Future[Any] = Future()
        future.set_result(pickle.loads(pickle.dumps(function(*arguments))))
        return future


def test_other_processes_give_the_same_record(home: tuple[Tensor, Tensor]) -> None:
    model, profile = trained()
    options = {"candidates": ["match-mean", "adabn"], "site_size": 150}
    alone = record_of(model, home, profile, **options)
    elsewhere = Elsewhere()
    assert_same(record_of(model, home, profile, executor=elsewhere, **options), alone)
    assert elsewhere.jobs == len(alone.shifts)
    with ThreadPoolExecutor(1) as pool:
        assert_same(record_of(model, home, profile, executor=pool, **options), alone)


def test_the_same_seed_gives_the_same_record_whatever_was_drawn_before(home: tuple[Tensor, Tensor]) -> None:
    model, profile = trained()
    options = {"battery": None, "shifts": 2, "site_size": 100}
    first = record_of(model, home, profile, **options)
    torch.manual_seed(77)
    assert_same(record_of(model, home, profile, **options), first)


# ---- what goes wrong


def test_a_candidate_that_fails_is_left_out(home: tuple[Tensor, Tensor], caplog: pytest.LogCaptureFixture) -> None:
    model, profile = trained()
    record = record_of(model, home, profile, candidates=["match-mean", FR(epochs=2, learning_rate=1e30)])
    assert record.candidates == (UNTOUCHED, "match-mean")
    assert list(record.methods) == [UNTOUCHED, "match-mean"]
    assert record.scores.shape[2] == 2
    assert "fr failed" in caplog.text


def fail_in(monkeypatch: pytest.MonkeyPatch, name: str, places: set[int]) -> None:
    """Let a candidate fail in some cells, which are run one after the other."""
    run, numbers = rehearse.run_job, itertools.count()

    def run_job(job: Any) -> Any:
        cell = run(job)
        if next(numbers) in places:
            del cell[name]
        return cell

    monkeypatch.setattr(rehearse, "run_job", run_job)


def test_a_candidate_that_fails_in_one_cell_stays(
    home: tuple[Tensor, Tensor], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, profile = trained()
    battery = dict(list(DEVICES.items())[:6])
    fail_in(monkeypatch, "match-mean", {3})
    made = shiftmend.rehearse(model, home, profile, **SHORT | {"battery": battery, "site_size": 150})
    record = made.rehearsal
    assert record is not None
    assert record.candidates == (UNTOUCHED, "match-mean")
    assert record.scores.isnan().nonzero().tolist() == [[3, 0, 1]]
    assert "match-mean failed in 1 of 7 cells" in caplog.text
    assert record.find_problem() is None
    made.save(tmp_path / "p")
    assert_same(record, shiftmend.Profile.load(tmp_path / "p").rehearsal or record)
    signals = dict(zip(record.signals, record.values[1, 0, 1].tolist(), strict=True))
    known = {name: value for name, value in signals.items() if math.isfinite(value)}
    assert Estimator(record).predict("match-mean", known, 150) is not None


@pytest.mark.parametrize(("devices", "places"), [(8, {0, 2, 4, 5, 7}), (4, {1})])
def test_a_candidate_that_mostly_fails_or_has_too_few_cells_is_left_out(
    home: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch, devices: int, places: set[int]
) -> None:
    model, profile = trained()
    fail_in(monkeypatch, "match-mean", places)
    record = record_of(model, home, profile, battery=dict(list(DEVICES.items())[:devices]), site_size=150)
    assert record.candidates == (UNTOUCHED,)


def test_a_shift_without_a_score_of_the_untouched_model_is_refused(
    home: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, profile = trained()
    fail_in(monkeypatch, UNTOUCHED, {1})
    with pytest.raises(DataError, match="none for offset"):
        record_of(model, home, profile, site_size=150)


def test_home_data_that_the_profile_was_made_from_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    model, profile = trained()
    source = draw(1500, 1)
    one = {"offset": BATTERY["offset"]}
    record_of(model, (source.inputs, source.labels), profile, battery=one, site_size=300)
    assert "those of the profile itself" in caplog.text
    caplog.clear()
    held_out = draw(1500, 8)
    record_of(model, (held_out.inputs, held_out.labels), profile, battery=one, site_size=300)
    assert "profile itself" not in caplog.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shifts": 0}, "shifts"),
        ({"shifts": 2.5}, "shifts"),
        ({"site_size": 1}, "site_size"),
        ({"candidates": "bufr"}, "candidates"),
        ({"candidates": ["mend"]}, "mend"),
        ({"candidates": ["target-supervised"]}, "labels"),
        ({"battery": {}}, "battery"),
    ],
)
def test_wrong_options_are_one_sentence(home: tuple[Tensor, Tensor], options: dict[str, Any], words: str) -> None:
    model, profile = trained()
    with pytest.raises(ShiftmendError, match=words) as caught:
        record_of(model, home, profile, **options)
    assert "\n" not in str(caught.value)


def test_too_few_home_data_are_refused(home: tuple[Tensor, Tensor]) -> None:
    model, profile = trained()
    with pytest.raises(DataError, match="at least 40"):
        record_of(model, (home[0][:39], home[1][:39]), profile)


def test_another_model_is_refused(home: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(ProfileError, match="other layers"):
        record_of(nn.Sequential(nn.Linear(8, 4)), home, trained()[1])


def test_warnings_come_back_after_a_rehearsal(home: tuple[Tensor, Tensor], caplog: pytest.LogCaptureFixture) -> None:
    model, profile = trained()
    record_of(model, home, profile)
    logging.getLogger("shiftmend").warning("still heard")
    assert "still heard" in caplog.text
