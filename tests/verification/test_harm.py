"""Signs of harm: each is found where it is there, and none where nothing speaks of harm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from rehearsed_world import draw, trained
from worlds import sensors

import shiftmend
from shiftmend.profiles.profile import Profile
from shiftmend.stats.answers import Answers
from shiftmend.verification.estimate import Estimate
from shiftmend.verification.harm import answers_other_classes, describe_harm, find_harm, find_worse_answers
from shiftmend.verification.reading import Reading
from shiftmend.verification.verdict import Verification

EVEN, SKEWED = (0.25, 0.25, 0.25, 0.25), (0.7, 0.1, 0.1, 0.1)


def home() -> Profile:
    answers = Answers(torch.tensor(EVEN), torch.tensor([0.9]), 1500)
    return replace(trained()[1], statistics={**trained()[1].statistics, "answers": answers})


def read(shares: tuple[float, ...], confidence: float, outside: float = 0.0, reverse: bool = False) -> Reading:
    """A reading of 400 answers."""
    answers = torch.repeat_interleave(torch.arange(4), (400 * torch.tensor(shares)).long())
    signals = {"confidence": confidence, "outside": outside}
    answers = answers.flip(0) if reverse else answers
    return Reading(signals, torch.zeros(400, 4), answers, Verification(0.1, 0.01, 400), 400)


@pytest.mark.parametrize(
    ("shares", "confidence", "outside", "expected"),
    [
        (EVEN, 0.9, 0.0, False),
        (SKEWED, 0.9, 0.0, True),
        (SKEWED, 0.75, 0.0, True),
        (SKEWED, 0.5, 0.0, False),
        (SKEWED, 0.9, 0.1, False),
    ],
    ids=["as home", "skewed", "a little less certain", "uncertain", "out of range"],
)
def test_other_classes_answered_with_certainty_are_told(
    shares: tuple[float, ...], confidence: float, outside: float, expected: bool
) -> None:
    assert answers_other_classes(read(shares, confidence, outside), home()) == expected


def test_answers_that_leave_home_or_become_uncertain_are_signs() -> None:
    before = read(EVEN, 0.8)
    assert find_worse_answers(before, read(EVEN, 0.75), home()) == []
    assert "skew" in find_worse_answers(before, read(SKEWED, 0.8), home())[0]
    assert "less certain" in find_worse_answers(before, read(EVEN, 0.6), home())[0]
    assert find_worse_answers(read(SKEWED, 0.8), read(EVEN, 0.8), home()) == []
    assert "less certain" in find_worse_answers(before, replace(before, signals={}), home())[0]
    old = replace(home(), statistics={})
    assert find_worse_answers(before, read(SKEWED, 0.1), old) == []


def test_every_sign_is_in_one_sentence_with_what_to_do() -> None:
    good, bad = Verification(0.02, 0.01, 400), Verification(0.5, 0.01, 400)
    estimates = (Estimate(0.9, 0.88, 0.92, "accuracy"), Estimate(0.6, 0.55, 0.65, "accuracy"))
    readings = (read(SKEWED, 0.9), read((0.9, 0.1, 0.0, 0.0), 0.6))
    found = find_harm(home(), (good, bad), readings, estimates)
    for words in ("class shares", "skew", "less certain", "verification got worse", "90.0 % to 60.0 %"):
        assert sum(words in sign for sign in found) == 1, words
    said = describe_harm(found)
    assert 'method="auto"' in said
    assert "rehearse" in said
    assert all(sign in said for sign in found)


def test_nothing_is_said_of_what_got_better_or_changed_no_answer() -> None:
    bad, good = Verification(0.5, 0.01, 400), Verification(0.02, 0.01, 400)
    estimates = (Estimate(2.0, 1.9, 2.1, "rmse"), Estimate(1.0, 0.9, 1.1, "rmse"))
    changed = (read(EVEN, 0.6), read(EVEN, 0.9, reverse=True))
    assert find_harm(home(), (bad, good), changed, estimates) == []
    assert find_harm(home(), (good, bad), (read(SKEWED, 0.9), read(SKEWED, 0.3)), estimates) == []
    assert "rmse got worse" in find_harm(home(), (bad, good), changed, estimates[::-1])[0]
    assert find_harm(home(), (None, None)) == []


@pytest.mark.slow
def test_a_named_method_that_does_harm_says_so_once_and_a_harmless_one_does_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, profile = trained()
    options: dict[str, Any] = {"method": "adabn", "progress": False}
    site = draw(500, 13, (1.0, 0.0, 0.0, 0.0))
    harmed = shiftmend.adapt(model, site.inputs, profile, **options)
    assert site.accuracy(harmed.model) < site.accuracy(model) - 0.05
    assert caplog.text.count("may have done harm") == 1
    assert any("class shares" in sign for sign in harmed.harm)
    assert harmed.manifest["harm"] == list(harmed.harm)
    assert "may have done harm" in repr(harmed)
    caplog.clear()
    world = sensors()
    mended = shiftmend.adapt(
        world.model, world.target, world.profile(), "fr", epochs=2, learning_rate=0.01, progress=False
    )
    assert world.accuracy(mended.model) > world.accuracy(world.model)
    assert mended.harm == ()
    assert "harm" not in mended.manifest
    assert "done harm" not in caplog.text
