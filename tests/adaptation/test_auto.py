"""`auto`: the better model is kept, the untouched one wherever nothing is won, and the result says why."""

from __future__ import annotations

import copy
import functools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rehearsed_world import CANDIDATES, Site, draw, make_net, rehearsed, train, trained
from torch import Tensor, nn

import shiftmend
from shiftmend.adaptation.auto import CANDIDATES as CANDIDATES_OF_AUTO
from shiftmend.adaptation.auto import (
    FAR_SHARES,
    Trial,
    _choose_by_features,
    choose_usual,
    finds_home_shares,
    list_candidates,
    may_replace,
    tell_change,
)
from shiftmend.adaptation.result import Adaptation
from shiftmend.engine.method import describe_method
from shiftmend.errors import AdaptationError, ProfileError
from shiftmend.methods import METHODS
from shiftmend.methods.adabn import AdaBN
from shiftmend.methods.fr import FR
from shiftmend.methods.target_supervised import TargetSupervised
from shiftmend.profiles.rehearsal import UNTOUCHED, Rehearsal
from shiftmend.stats.answers import Answers
from shiftmend.verification.estimate import Estimate, Estimator, learn_limits
from shiftmend.verification.reading import Reading

OFFSET = torch.linspace(-2, 2, 8)
DIVERGING = FR(epochs=2, learning_rate=1e30)


def shifted(seed: int = 12, shares: tuple[float, ...] = (0.25, 0.25, 0.25, 0.25)) -> Site:
    site = draw(500, seed, shares)
    return Site(site.inputs + OFFSET, site.labels)


def adapt(inputs: Tensor, profile: Any = None, **options: Any) -> Adaptation:
    model, _ = trained()
    given: dict[str, Any] = {"batch_size": 500, "progress": False}
    return shiftmend.adapt(model, inputs, profile or rehearsed(), **given | options)


@pytest.fixture(scope="module")
def mended() -> tuple[Site, Adaptation]:
    site = shifted()
    return site, adapt(site.inputs)


def assert_untouched(result: Adaptation) -> None:
    model, _ = trained()
    assert result.manifest["method"]["name"] == UNTOUCHED
    assert result.model is not model
    for name, value in model.state_dict().items():
        assert torch.equal(result.model.state_dict()[name], value), name
    assert "calibration" not in result.manifest


def answer(model: nn.Module, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return model(inputs)  # type: ignore[no-any-return]


# ---- what is returned


@pytest.mark.slow
def test_unshifted_data_leave_the_model_as_it_came() -> None:
    result = adapt(draw(500, 11).inputs)
    assert_untouched(result)
    assert "as at home" in result.reason
    assert [one.name for one in result.candidates] == [UNTOUCHED]
    assert result.history[-1].epoch == 0


@pytest.mark.slow
def test_shifted_data_are_mended_and_the_estimate_says_so(mended: tuple[Site, Adaptation]) -> None:
    site, result = mended
    model, _ = trained()
    before, after = site.accuracy(model), site.accuracy(result.model)
    assert after > before + 0.3
    assert result.estimate is not None
    assert result.estimate.after is not None
    assert result.estimate.after.value == pytest.approx(after, abs=0.1)
    assert result.estimate.after.low is not None
    assert result.estimate.after.high is not None
    assert result.estimate.after.low <= after <= result.estimate.after.high
    assert {one.name for one in result.candidates} == {UNTOUCHED, *CANDIDATES}
    assert all(one.estimate is not None and one.failure is None for one in result.candidates)


@pytest.mark.slow
def test_what_was_tried_is_in_the_manifest_and_in_print(mended: tuple[Site, Adaptation], tmp_path: Path) -> None:
    _, result = mended
    result.save(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["chosen"] == {"by": "auto", "reason": result.reason}
    assert [one["name"] for one in manifest["candidates"]] == [one.name for one in result.candidates]
    assert manifest["estimate"]["after"]["reliable"]
    assert "withheld" not in (tmp_path / "manifest.json").read_text()
    lines = repr(result).splitlines()
    assert lines[0].startswith("before  accuracy")
    assert lines[1].startswith("after   accuracy about")
    assert lines[2].startswith("took ")
    assert "untouched" in lines[2]
    assert "source-only was" not in repr(result)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shares",
    [
        (0.7, 0.1, 0.1, 0.1),
        (0.4, 0.3, 0.2, 0.1),
        (0.5, 0.5, 0.0, 0.0),
        (1.0, 0.0, 0.0, 0.0),
    ],
)
def test_other_shares_of_the_classes_do_no_harm(shares: tuple[float, ...]) -> None:
    """Every candidate would push answers into the classes of home, and lose."""
    model, _ = trained()
    site = draw(500, 13, shares)
    harmed = adapt(site.inputs, method="match-moments", calibrate=False)
    assert site.accuracy(harmed.model) < site.accuracy(model) - 0.05
    assert site.accuracy(adapt(site.inputs).model) >= site.accuracy(model) - 0.02


@pytest.mark.slow
@pytest.mark.parametrize("shares", [(0.5, 0.5, 0.0, 0.0), (1.0, 0.0, 0.0, 0.0)])
def test_few_classes_are_left_alone_and_their_accuracy_follows_from_home(shares: tuple[float, ...]) -> None:
    site = draw(500, 13, shares)
    result = adapt(site.inputs)
    assert_untouched(result)
    assert result.changed == "patients"
    assert result.manifest["changed"] == "patients"
    assert result.estimate is not None
    after = result.estimate.after
    assert after is not None
    assert after.low is not None
    assert after.high is not None
    assert after.low <= site.accuracy(result.model) <= after.high
    assert result.shares is not None
    assert result.shares.values == pytest.approx(shares, abs=0.06)


@pytest.mark.slow
def test_the_untouched_model_alone_wins() -> None:
    site = shifted()
    result = adapt(site.inputs, candidates=["untouched"])
    assert_untouched(result)
    assert "no candidate is clearly better" in result.reason


@pytest.mark.slow
def test_the_untouched_model_wins_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    same = Estimate(0.8, 0.7, 0.9, "accuracy")
    predict = Estimator.predict

    def alike(self: Estimator, *arguments: Any) -> Any:
        told = predict(self, *arguments)
        return None if told is None else replace(told, value=0.8)

    monkeypatch.setattr(Estimator, "predict", alike)
    monkeypatch.setattr(Estimator, "_bound_by_agreement", lambda *_, **__: None)
    monkeypatch.setattr(Estimator, "estimate", lambda *_, **__: same)
    result = adapt(shifted().inputs)
    assert_untouched(result)
    assert "no candidate is clearly better" in result.reason


@pytest.mark.slow
@pytest.mark.parametrize("has_skew", [False, True])
def test_an_untouched_model_that_is_kept_has_one_estimate(monkeypatch: pytest.MonkeyPatch, has_skew: bool) -> None:
    chosen: list[bool] = []
    estimate = Estimator.estimate

    def spy(self: Estimator, *arguments: Any, **options: Any) -> Estimate:
        if arguments[0] == UNTOUCHED:
            chosen.append(bool(options.get("chosen")))
        return estimate(self, *arguments, **options)

    monkeypatch.setattr(Estimator, "estimate", spy)
    monkeypatch.setattr(Estimator, "choose", lambda *_, **__: UNTOUCHED)
    monkeypatch.setattr("shiftmend.adaptation.auto.answers_other_classes", lambda *_: has_skew)
    monkeypatch.setattr("shiftmend.adaptation.auto.shares_explain", lambda *_: False)
    result = adapt(shifted().inputs, candidates=["fr"])
    assert_untouched(result)
    assert chosen[-1], "the interval is that of what auto chooses"
    assert result.estimate is not None
    assert result.estimate.before is result.estimate.after is result.candidates[0].estimate
    assert result.estimate.after is not None
    assert any("class" in reason for reason in result.estimate.after.reasons) is has_skew
    assert not (has_skew and result.estimate.after.reliable)


# ---- what goes wrong


@pytest.mark.slow
def test_a_candidate_that_diverges_is_a_failure_and_the_others_go_on() -> None:
    site = shifted()
    result = adapt(site.inputs, candidates=[DIVERGING, "match-moments"])
    failed = next(one for one in result.candidates if one.name == "fr")
    assert failed.failure is not None
    assert failed.estimate is None
    assert failed.to_json()["failure"] == failed.failure
    assert result.manifest["method"]["name"] == "match-moments"
    assert site.accuracy(result.model) > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("rehearsal", [True, False])
def test_where_all_diverge_the_untouched_model_comes_back(rehearsal: bool) -> None:
    profile = rehearsed() if rehearsal else trained()[1]
    result = adapt(shifted().inputs, profile, candidates=[DIVERGING])
    assert_untouched(result)
    assert [one.failure is None for one in result.candidates] == [True, False]


@pytest.mark.slow
def test_a_candidate_that_was_not_rehearsed_so_is_not_trusted() -> None:
    profile = rehearsed()
    assert profile.rehearsal is not None
    assert profile.rehearsal.find_differences(describe_method(AdaBN())) == []
    assert "another passes" in profile.rehearsal.find_differences(describe_method(AdaBN(passes=1)))[0]
    result = adapt(shifted().inputs, candidates=[AdaBN(passes=1)])
    assert_untouched(result)
    tried = result.candidates[1].estimate
    assert tried is not None
    assert any("another passes" in reason for reason in tried.reasons)


@pytest.mark.slow
def test_too_few_samples_give_no_number_and_the_model_as_it_came() -> None:
    result = adapt(shifted().inputs[:20])
    assert_untouched(result)
    assert result.estimate is not None
    assert result.estimate.after is not None
    assert not result.estimate.after.reliable
    assert any("too few samples" in reason for reason in result.estimate.after.reasons)


def test_options_that_auto_does_not_take_are_refused() -> None:
    model, profile = trained()
    inputs = draw(50, 1).inputs
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"learning_rate": 0.1}, "Name the method"),
        ({"on_epoch": lambda model, row: None}, "on_epoch"),
        ({"method": "bufr", "candidates": ["fr"]}, "Leave one of the two out"),
        ({"candidates": "bufr"}, "list of methods"),
        ({"candidates": ["adabn", "adabn"]}, "twice"),
        ({"candidates": ["target-supervised"]}, "labels"),
        ({"candidates": [TargetSupervised(labels=torch.zeros(50).long())]}, "need no labels"),
    ]
    for options, words in wrong:
        with pytest.raises(AdaptationError, match=words):
            shiftmend.adapt(model, inputs, profile, progress=False, **options)
    with pytest.raises(AdaptationError, match="Expected a profile"):
        shiftmend.adapt(model, inputs, progress=False)


def test_candidates_are_those_that_were_rehearsed() -> None:
    _, profile = trained()
    assert len(list_candidates(None, profile)) > 3
    assert list(list_candidates(["bufr", "untouched"], profile)) == [UNTOUCHED, "bufr"]


def test_candidates_that_could_change_nothing_are_left_out() -> None:
    model, profile = trained()
    assert "fr-shares" not in list_candidates(None, profile)  # It needs the histograms of a rehearsal.
    assert {"adabn", "fr-shares"} <= set(choose_usual(CANDIDATES_OF_AUTO, profile, model))
    plain = nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4))
    assert {"adabn", "fr-shares"} & set(choose_usual(CANDIDATES_OF_AUTO, profile, plain)) == {"fr-shares"}
    assert not {"adabn", "fr-shares"} & set(choose_usual(CANDIDATES_OF_AUTO, profile, plain[0]))
    assert "bufr" in choose_usual(CANDIDATES_OF_AUTO, profile, plain[0])


@pytest.mark.parametrize(
    ("beyond", "lost", "told"),
    [(0.3, 0.0, "both"), (0.02, 0.0, "device"), (0.15, 0.1, None), (0.3, None, None), (None, 0.0, None)],
)
def test_mistakes_of_the_adapted_model_may_look_like_other_shares(
    beyond: float | None, lost: float | None, told: str | None
) -> None:
    record = rehearsed().rehearsal
    assert record is not None
    assert tell_change(beyond, 500, record, lost) == told


@pytest.mark.slow
def test_where_nothing_is_taken_rejected_candidates_tell_nothing_of_the_untouched_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With 5 % positives at home and others at the site, a rejected candidate told 88.9 % where 60.2 were true."""
    site = shifted()
    monkeypatch.setattr(Estimator, "choose", lambda *_, **__: UNTOUCHED)
    result = adapt(site.inputs)
    assert_untouched(result)
    assert any(one.estimate is not None and one.estimate.reliable for one in result.candidates[1:])
    own = next(one.estimate for one in result.candidates if one.name == UNTOUCHED)
    assert result.estimate is not None
    assert own is not None
    both = [(one.value, one.low, one.high) for one in (result.estimate.before, result.estimate.after) if one]
    assert len(both) == 2
    assert both[0] == (own.value, own.low, own.high)


@pytest.mark.slow
def test_data_within_the_range_of_groups_at_home_are_left_alone() -> None:
    profile = rehearsed()
    record = profile.rehearsal
    assert record is not None
    inputs = draw(500, 11).inputs + 0.3 * OFFSET
    plain = adapt(inputs)
    assert len(plain.candidates) > 1
    grouped = replace(record, groups=10, design_effect=4.0, group_deviation=50 * record.home_deviation)
    result = adapt(inputs, replace(profile, rehearsal=grouped))
    assert_untouched(result)
    assert result.changed is None
    assert "groups" in result.reason
    assert [one.name for one in result.candidates] == [UNTOUCHED]
    # The data of home itself are still told as such.
    assert adapt(draw(500, 11).inputs, replace(profile, rehearsal=grouped)).changed == "neither"


@pytest.mark.slow
def test_rehearsed_candidates_are_the_default() -> None:
    assert tuple(list_candidates(None, rehearsed())) == (UNTOUCHED, *CANDIDATES)


@pytest.mark.slow
def test_each_candidate_has_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    site = shifted()
    given = {"candidates": ["adabn", "match-moments"], "checkpoint": tmp_path / "run"}
    first = adapt(site.inputs, trained()[1], **given)
    again = adapt(site.inputs, trained()[1], **given)
    assert first.manifest["method"] == again.manifest["method"]
    for name, value in first.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name


# ---- without a rehearsal


@pytest.mark.slow
def test_without_a_rehearsal_features_decide_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    site = shifted()
    result = adapt(site.inputs, trained()[1], candidates=CANDIDATES)
    assert result.manifest["method"]["name"] in CANDIDATES
    assert site.accuracy(result.model) > site.accuracy(trained()[0])
    assert result.estimate is not None
    for one in (result.estimate.before, result.estimate.after):
        assert one is not None
        assert not one.reliable
        assert "not rehearsed" in str(one)
    assert "shiftmend.rehearse(" in caplog.text
    assert "not known" in result.reason
    assert "calibration" not in result.manifest


@pytest.mark.slow
def test_without_a_rehearsal_unshifted_data_leave_the_model_as_it_came() -> None:
    result = adapt(draw(4000, 1).inputs, trained()[1], candidates=CANDIDATES)
    assert_untouched(result)


@pytest.mark.slow
@pytest.mark.parametrize("shares", [(0.5, 0.5, 0.0, 0.0), (1.0, 0.0, 0.0, 0.0), (0.7, 0.1, 0.1, 0.1)])
def test_without_a_rehearsal_other_shares_of_the_classes_do_no_harm(shares: tuple[float, ...]) -> None:
    model, profile = trained()
    site = draw(500, 13, shares)
    harmed = adapt(site.inputs, profile, method="match-moments")
    assert site.accuracy(harmed.model) < site.accuracy(model) - 0.05
    result = adapt(site.inputs, profile, candidates=CANDIDATES)
    assert_untouched(result)
    assert "other classes" in result.reason
    assert [one.name for one in result.candidates] == [UNTOUCHED]


@pytest.mark.slow
def test_an_older_profile_without_answers_is_read_and_mends(tmp_path: Path) -> None:
    _, profile = trained()
    statistics = {name: one for name, one in profile.statistics.items() if name != "answers"}
    replace(profile, statistics=statistics).save(tmp_path / "old.profile")
    old = shiftmend.Profile.load(tmp_path / "old.profile")
    assert "answers" not in old.statistics
    assert "answers" not in old.merge(profile).statistics
    site = shifted()
    result = adapt(site.inputs, old, candidates=CANDIDATES)
    assert site.accuracy(result.model) > site.accuracy(trained()[0])


def tried(name: str, shares: tuple[float, ...], confidence: float, slices: float) -> Trial:
    """A candidate of 400 answers."""
    answers = torch.repeat_interleave(torch.arange(4), (400 * torch.tensor(shares)).long())
    signals = {"slices": slices, "marginals": slices, "confidence": confidence}
    reading = Reading(signals, torch.zeros(400, 4), answers, None, 400)  # type: ignore[arg-type]
    return Trial(name, AdaBN(), reading=reading, signals=signals)


@pytest.mark.parametrize(
    ("shares", "confidence", "kept"),
    [
        ((0.25, 0.25, 0.25, 0.25), 0.6, "adabn"),
        ((0.25, 0.25, 0.25, 0.25), 0.45, UNTOUCHED),
        ((0.3, 0.3, 0.2, 0.2), 0.6, "adabn"),
        ((0.7, 0.1, 0.1, 0.1), 0.9, UNTOUCHED),
    ],
    ids=["as home", "less certain", "by chance", "skewed"],
)
def test_answers_may_speak_against_a_candidate(shares: tuple[float, ...], confidence: float, kept: str) -> None:
    home = Answers(torch.full((4,), 0.25), torch.tensor([0.9]), 1500)
    profile = replace(trained()[1], statistics={**trained()[1].statistics, "answers": home})
    trials = [tried(UNTOUCHED, (0.3, 0.3, 0.2, 0.2), 0.6, 0.5), tried("adabn", shares, confidence, 0.1)]
    chosen, reason = _choose_by_features(trials, profile)
    assert chosen.name == kept
    assert ("certain" in reason) == (kept == UNTOUCHED)


# ---- calibration


@pytest.mark.slow
def test_the_mean_confidence_is_the_estimate_and_answers_stay(mended: tuple[Site, Adaptation]) -> None:
    site, result = mended
    raw = adapt(site.inputs, calibrate=False)
    assert "calibration" not in raw.manifest
    assert result.estimate is not None
    assert result.estimate.after is not None
    logits, plain = answer(result.model, site.inputs), answer(raw.model, site.inputs)
    assert torch.equal(logits.argmax(1), plain.argmax(1))
    assert float(logits.softmax(1).amax(1).mean()) == pytest.approx(result.estimate.after.value, abs=1e-3)
    temperature = result.manifest["calibration"]["temperature"]
    torch.testing.assert_close(logits * temperature, plain, rtol=1e-4, atol=1e-4)
    assert [type(module) for module in result.model.modules()] == [type(module) for module in raw.model.modules()]


@pytest.mark.slow
def test_a_head_that_cannot_be_divided_is_left_and_that_is_said() -> None:
    model, _ = trained()
    site = shifted()
    tied = copy.deepcopy(model)
    nn.utils.parametrizations.weight_norm(tied[-1])
    profile = shiftmend.profile(tied, draw(1500, 1).inputs, progress=False)
    profile = replace(profile, rehearsal=rehearsed().rehearsal)
    result = shiftmend.adapt(tied, site.inputs, profile, "match-moments", batch_size=500, progress=False)
    assert "refused" in result.manifest["calibration"]


# ---- a named method


@pytest.mark.slow
def test_a_named_method_has_estimates_too() -> None:
    site = shifted()
    result = adapt(site.inputs, method="match-moments")
    assert result.candidates == ()
    assert result.estimate is not None
    assert result.estimate.after is not None
    assert result.estimate.after.value == pytest.approx(site.accuracy(result.model), abs=0.1)
    assert "temperature" in result.manifest["calibration"]
    assert repr(result).startswith("before  ")


@pytest.mark.slow
def test_a_named_method_that_was_not_rehearsed_has_no_number() -> None:
    result = adapt(shifted().inputs, method="match-mean")
    assert result.estimate is not None
    assert result.estimate.after is not None
    assert not result.estimate.after.reliable
    assert "match-mean was not rehearsed" in str(result.estimate.after)
    record = rehearsed().rehearsal
    assert record is not None
    assert result.manifest["calibration"] == {"temperature": record.temperature, "by": "home"}
    assert all(math.isfinite(value) for value in answer(result.model, shifted().inputs).flatten().tolist())


def test_a_device_that_makes_a_model_certain_of_wrong_classes_is_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pixels behind a brighter camera were all answered as one class, with certainty: 99.6 % were told, 22.6 true."""
    monkeypatch.setattr(Estimator, "has_other_shares", lambda *_: True)
    site = draw(500, 13)
    away = Site(1.5 * site.inputs + 3 * OFFSET, site.labels)
    result = adapt(away.inputs)
    assert result.changed == "device"
    assert result.estimate is not None
    model, _ = trained()
    pairs = ((result.estimate.before, away.accuracy(model)), (result.estimate.after, away.accuracy(result.model)))
    assert pairs[1][1] > pairs[0][1] + 0.3
    for told, true in pairs:
        assert told is not None
        assert told.low is not None
        assert told.high is not None
        assert told.low <= true <= told.high


def test_matched_inputs_with_the_classes_of_home_let_every_candidate_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device left a digit reader at 11.9 %, certain of wrong classes; bufr had 89.6 % and was not tried."""
    monkeypatch.setattr(Estimator, "has_other_shares", lambda *_: True)
    result = adapt(1.5 * draw(500, 13).inputs + 3 * OFFSET)
    assert [one.name for one in result.candidates] == [UNTOUCHED, *CANDIDATES]
    assert any(not METHODS[name].maps_inputs for name in CANDIDATES), "one that is not tried at first"
    monkeypatch.setattr("shiftmend.adaptation.auto.finds_home_shares", lambda *_: False)
    result = adapt(1.5 * draw(500, 13).inputs + 3 * OFFSET)
    assert all(METHODS[one.name].maps_inputs for one in result.candidates[1:])


def test_matched_inputs_find_the_classes_of_home_up_to_the_mistakes_of_the_model() -> None:
    record = rehearsed().rehearsal
    assert record is not None
    told = Estimate(record.score - 0.15, 0.7, 0.9, "accuracy")
    free, signals = {"slices": 1.0}, {"slices": 0.1, "skew": 0.14}
    assert finds_home_shares("match-moments", told, signals, free, record)
    assert not finds_home_shares("match-moments", told, signals | {"skew": 0.16}, free, record)
    good = replace(told, value=record.score)
    assert finds_home_shares("match-moments", good, signals | {"skew": 0.06}, free, record)
    assert not finds_home_shares("match-moments", good, signals | {"skew": 0.08}, free, record)
    assert not finds_home_shares("match-moments", told, signals | {"slices": 0.9}, free, record), "not mended"
    assert not finds_home_shares("match-moments", replace(told, value=None), signals, free, record)
    assert not finds_home_shares("adabn", told, signals, free, record), "it may push samples into classes"


@pytest.mark.slow
def test_where_class_shares_changed_beside_the_device_no_number_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digits of another data set were told to be read with 90.9 %, where 78.4 were true, although shares differed."""
    monkeypatch.setattr("shiftmend.adaptation.auto.tell_change", lambda *_: "both")
    result = adapt(shifted().inputs)
    assert result.changed == "both"
    assert result.manifest["method"]["name"] != UNTOUCHED
    assert result.estimate is not None
    assert result.estimate.after is not None
    assert result.estimate.after.low is None
    assert "class shares" in str(result.estimate.after)


@pytest.mark.parametrize("scale", [0.8, 1.2, 2.0])
def test_samples_pushed_into_one_class_do_not_pass_for_patients(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind an offset, nearly all answers were one class, and 89 % were told where 42 % were true."""
    monkeypatch.setattr(Estimator, "has_other_shares", lambda *_: True)
    model, _ = trained()
    (direction,) = torch.autograd.functional.jacobian(lambda inputs: model(inputs)[:, 0].sum(), draw(1, 14).inputs)
    site = draw(500, 13)
    result = adapt(site.inputs + 6 * scale * direction / direction.norm())
    assert result.changed != "patients"
    assert result.estimate is not None
    assert result.estimate.after is not None
    if result.estimate.after.value is not None:
        away = Site(site.inputs + 6 * scale * direction / direction.norm(), site.labels)
        assert result.estimate.after.value == pytest.approx(away.accuracy(result.model), abs=0.1)


def test_of_methods_that_assume_the_shares_of_home_those_without_training_alone_may_replace_a_certain_model() -> None:
    record = rehearsed().rehearsal
    assert record is not None
    told = Estimate(0.85, 0.8, 0.9, "accuracy")
    limits = learn_limits(record, "match-moments", 500)
    assert limits is not None
    free = {"slices": 10 * limits.restored, "marginals": 10 * limits.marginals}
    home = {"slices": limits.restored, "marginals": limits.marginals}
    assert may_replace("match-moments", told, home, free, record, 500)
    assert not may_replace("match-moments", told, home | {"slices": 1.01 * limits.restored}, free, record, 500)
    assert not may_replace("match-moments", told, home | {"marginals": 1.01 * limits.marginals}, free, record, 500)
    assert not may_replace("match-moments", replace(told, value=None), home, free, record, 500)
    assert not may_replace("match-moments", told, home, home, record, 500), "there was nothing to mend"
    assert not may_replace("bufr", told, home, free, record, 500), "it was not rehearsed"


@pytest.mark.slow
@pytest.mark.parametrize("closer", [True, False])
def test_a_certain_model_is_mended_only_if_features_come_closer_and_the_estimate_holds(
    closer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearsed()  # The rehearsal is made as it always is, and kept for other tests.
    monkeypatch.setattr(Estimator, "has_other_shares", lambda *_: True)
    monkeypatch.setattr(AdaBN, "frees_shares", True)
    monkeypatch.setattr(Rehearsal, "find_share_error", lambda *_: 0.0)
    if not closer:
        monkeypatch.setattr("shiftmend.adaptation.auto.MUCH_CLOSER", 0.0)
    result = adapt(shifted().inputs)
    assert (result.manifest["method"]["name"] in CANDIDATES) == closer
    assert [one.name for one in result.candidates] == [UNTOUCHED, *CANDIDATES]


@pytest.mark.slow
@pytest.mark.parametrize(("distance", "closer"), [(0.5, True), (0.1, True), (0.5, False)])
def test_candidates_force_shares_only_where_others_were_found_that_mend(
    monkeypatch: pytest.MonkeyPatch, distance: float, closer: bool
) -> None:
    rehearsed()
    named: list[list[str]] = []

    def choose(*_: Any, forcing: list[str], **__: Any) -> str:
        named.append(forcing)
        return UNTOUCHED

    monkeypatch.setattr(AdaBN, "frees_shares", True)
    monkeypatch.setattr(Estimator, "check_distance", lambda *_: None)
    monkeypatch.setattr(Reading, "measure_distance", lambda *_: distance)
    monkeypatch.setattr("shiftmend.adaptation.auto.is_mended", lambda *_: closer)
    monkeypatch.setattr(Estimator, "choose", choose)
    assert_untouched(adapt(shifted().inputs, candidates=["match-moments", "adabn", "fr"]))
    assert named == [["fr"] if distance > FAR_SHARES and closer else []]


@pytest.mark.slow
def test_a_candidate_with_shares_beyond_what_was_rehearsed_does_not_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    rehearsed()
    asked: list[float] = []

    def far(self: Estimator, distance: float) -> str | None:
        asked.append(distance)
        return "class shares differ too much"

    monkeypatch.setattr(Estimator, "check_distance", far)
    result = adapt(shifted().inputs)
    assert_untouched(result)
    assert asked
    assert all("too much" in str(one.estimate) for one in result.candidates if one.name != UNTOUCHED)


# ---- regressions


@functools.cache
def quantities() -> tuple[nn.Module, Any, Tensor, Tensor]:
    """A table whose answer is a sum of columns, its rehearsed profile, and samples for sites."""
    torch.manual_seed(3)
    inputs = torch.randn(3600, 5) @ torch.randn(5, 8) + 0.3 * torch.randn(3600, 8)
    truth = inputs[:, :3].sum(1, keepdim=True).tanh() + 0.3 * inputs[:, 3:4]
    model = train(make_net(1), nn.functional.mse_loss, inputs[:800], truth[:800], steps=150)
    profile = shiftmend.profile(model, inputs[:800], progress=False)
    home = (inputs[800:1200], truth[800:1200])
    options: dict[str, Any] = {"candidates": ["match-mean", "match-moments"], "site_size": 400, "progress": False}
    return model, shiftmend.rehearse(model, home, profile, **options), inputs[1200:], truth[1200:]


def measure_error(model: nn.Module, inputs: Tensor, truth: Tensor) -> float:
    return float((answer(model, inputs) - truth).square().mean().sqrt())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["high answers", "low in one column", "both ends"])
def test_a_selection_of_samples_does_not_pass_for_another_device(kind: str) -> None:
    """Where a site had high answers only, matching raised the error from 0.11 to 1.22, and 0.14 to 0.51 were told."""
    model, profile, inputs, truth = quantities()
    keys = {"high answers": truth[:, 0], "low in one column": -inputs[:, 0], "both ends": truth[:, 0].abs()}
    chosen = keys[kind].argsort(descending=True)[:400]
    harmed = shiftmend.adapt(model, inputs[chosen], profile, "match-moments", progress=False)
    assert any("selection" in sign for sign in harmed.harm)
    assert harmed.estimate is not None
    assert harmed.estimate.after is not None
    assert harmed.estimate.after.low is None
    result = shiftmend.adapt(model, inputs[chosen], profile, progress=False)
    assert result.manifest["method"]["name"] == UNTOUCHED
    assert "selection" in result.reason
    assert "name a method" in result.reason
    for told in (result.estimate, shiftmend.verify(model, inputs[chosen], profile, progress=False)):
        estimate = told.after if told is result.estimate else told.estimate
        assert estimate is not None
        assert estimate.low is None
        assert "selection" in str(estimate)
    before = measure_error(model, inputs[chosen], truth[chosen])
    if kind == "high answers":
        assert measure_error(harmed.model, inputs[chosen], truth[chosen]) > 1.5 * before
    assert measure_error(result.model, inputs[chosen], truth[chosen]) == pytest.approx(before, rel=1e-5)


@pytest.mark.slow
def test_another_device_does_not_pass_for_a_selection_of_samples() -> None:
    model, profile, inputs, truth = quantities()
    generator = torch.Generator().manual_seed(0)
    away = inputs[:400] * torch.exp(0.5 * torch.randn(8, generator=generator)) + torch.randn(8, generator=generator)
    result = shiftmend.adapt(model, away, profile, progress=False)
    assert result.manifest["method"]["name"] != UNTOUCHED
    before, after = (measure_error(one, away, truth[:400]) for one in (model, result.model))
    assert after < 0.7 * before


@pytest.mark.slow
def test_clusters_travel_in_the_file(tmp_path: Path) -> None:
    _, profile, *_ = quantities()
    profile.save(tmp_path / "p")
    read = shiftmend.Profile.load(tmp_path / "p").rehearsal
    assert read is not None
    assert torch.equal(read.cluster_centres, profile.rehearsal.cluster_centres)
    assert float(read.label_shares.sum()) == pytest.approx(1)
    assert len(read.by_class["slices"]) == len(read.cluster_centres)
    negative = read.cluster_centres.clone()
    negative[0, -1] = -0.1
    damaged = {
        "NaN": replace(read, cluster_centres=read.cluster_centres * math.nan),
        "negative": replace(read, cluster_centres=negative),
        "as many classes": replace(read, cluster_centres=read.cluster_centres[1:]),
        "without histograms": replace(read, by_class={}),
    }
    for words, record in damaged.items():
        assert words in str(record.find_problem())
    with pytest.raises(ProfileError, match="slices"):
        replace(profile, rehearsal=replace(read, cluster_centres=read.cluster_centres[:, 1:])).save(tmp_path / "q")


@pytest.mark.slow
def test_without_a_rehearsal_a_regression_in_the_range_of_home_is_left_alone() -> None:
    model, profile, inputs, truth = quantities()
    chosen = truth[:, 0].argsort(descending=True)[:400]
    bare = replace(profile, rehearsal=None)
    result = shiftmend.adapt(model, inputs[chosen], bare, candidates=["match-moments"], progress=False)
    assert result.manifest["method"]["name"] == UNTOUCHED
    assert "range" in result.reason
    far = shiftmend.adapt(model, inputs[:400] + 6, bare, candidates=["match-mean"], progress=False)
    assert far.manifest["method"]["name"] == "match-mean"
