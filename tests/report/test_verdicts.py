"""The verdict about features in words: headline and sentence."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from report_worlds import Page, mended
from worlds import sensors

from shiftmend import report
from shiftmend.report.formatting import format_number
from shiftmend.report.page import render
from shiftmend.report.verdicts import state_verdict
from shiftmend.verification.verdict import Verification


@pytest.mark.slow
def test_before_only_says_shifted_or_as_at_home() -> None:
    world = sensors(samples=1500)
    profile = world.profile()
    assert state_verdict(report.gather(world.model, world.target, profile)).headline == "Shifted"
    assert state_verdict(report.gather(world.model, world.source, profile)).headline == "As at home"
    few = report.gather(world.model, world.source[:40], profile)
    assert (state_verdict(few).headline, few.before.verdict) == ("Undecided", "undecided")
    assert f"{few.samples_needed:,}" in state_verdict(few).sentence


def verdict_of(before: float, after: float, floor: float = 0.004) -> tuple[str, str]:
    world, profile, result = mended()
    found = report.gather(world.model, world.target, profile, result, samples=0)
    made = state_verdict(replace(found, before=Verification(before, floor, 600), after=Verification(after, floor, 600)))
    return made.headline, made.sentence


@pytest.mark.slow
def test_the_sentence_says_what_happened() -> None:
    assert verdict_of(0.404, 0.044)[0] == "Not restored"
    assert "90\u00a0%" in verdict_of(0.404, 0.044)[1]
    assert "more than 99\u00a0%" in verdict_of(2.6, 0.012)[1], "what remains is not nothing"
    assert "100\u00a0%" in verdict_of(2.6, 0.003)[1]
    assert "made it worse, and they now lie at 0.400" in verdict_of(0.1, 0.4)[1]
    assert "lay 0.003 from home; as near as chance allows" in verdict_of(0.003, 0.002)[1]
    assert "they lie at 0.002" in verdict_of(0.003, 0.002)[1]
    assert "no finite numbers" in verdict_of(0.1, math.nan)[1]
    assert verdict_of(0.1, math.nan)[0] == "Not restored"
    assert "finite again" in verdict_of(math.nan, 0.005)[1]
    assert verdict_of(0.1, 0.05, floor=0.04)[0] == "Undecided"
    assert verdict_of(0.1, 0.005)[0] == "Restored"


@pytest.mark.parametrize(
    ("mended_to", "divergence", "floor", "headline"),
    [
        (True, 0.005, 0.004, "Restored"),
        (True, 0.0125, 0.004, "Partly restored"),
        (True, 0.05, 0.04, "Undecided"),
        (True, 0.044, 0.004, "Not restored"),
        (False, 0.005, 0.004, "As at home"),
        (False, 0.0125, 0.004, "Slightly shifted"),
        (False, 0.05, 0.04, "Undecided"),
        (False, 0.044, 0.004, "Shifted"),
    ],
)
def test_the_headline_is_that_of_the_verdict_and_stands_in_the_folded_part(
    mended_to: bool, divergence: float, floor: float, headline: str
) -> None:
    world, profile, result = mended()
    found = report.gather(world.model, world.target, profile, result if mended_to else None, samples=0)
    seen = Verification(divergence, floor, 600)
    found = replace(found, samples_needed=7000, **{"after" if mended_to else "before": seen})
    made = state_verdict(found)
    assert made.headline == headline
    assert ("h2", f"Features: {headline.lower()}") in Page(render(found)).headings
    assert "chance" in made.sentence
    assert f" {format_number(floor)}" in made.sentence
    assert ("a small shift, beyond chance." in made.sentence) == (headline == "Slightly shifted")
    asked = "Collect at least 7,000 samples at this site (these are 600)"
    assert (asked in made.sentence) == (headline == "Undecided")
    few = replace(found, samples_needed=None)
    assert ("profile was made from too few samples" in state_verdict(few).sentence) == (headline == "Undecided")


def test_chance_depends_on_whether_these_inputs_were_adapted_to() -> None:
    world, profile, result = mended()
    found = report.gather(world.model, world.target, profile, result, samples=0)

    def told(adapted: bool) -> str:
        return state_verdict(replace(found, after=Verification(0.0125, 0.004, 600, adapted=adapted))).sentence

    assert "0.013 remains, where chance may leave up to 0.004." in told(True)
    assert "0.013 remains, where chance alone would give 0.004." in told(False)


def test_a_report_says_where_mixtures_of_features_came_home_and_single_ones_did_not() -> None:
    world, profile, result = mended()
    found = report.gather(world.model, world.target, profile, result, samples=0)
    assert found.after is not None
    single = [sum(tap.after or ()) / len(tap.after or ()) for tap in found.taps if tap.name in ("features", "logits")]
    assert found.after.marginals == pytest.approx(sum(single), rel=1e-4)
    near = Verification(0.002, 0.001, 600, marginals=0.0345)
    for one in (replace(found, after=near), replace(found, before=near, after=None, mending=None)):
        made = state_verdict(one)
        assert made.headline == ("Slightly shifted" if one.after is None else "Partly restored")
        assert "ixtures of features, which this distance compares, are as at home, but" in made.sentence
        assert made.sentence.endswith("one by one are not (0.035).")
    no_numbers = state_verdict(replace(found, before=replace(near, marginals=math.nan), after=None, mending=None))
    assert no_numbers.headline == "Shifted"
    assert no_numbers.sentence.endswith("one by one are not (infinite).")
    far = state_verdict(replace(found, after=replace(near, divergence=0.007)))
    assert far.headline == "Partly restored"
    assert "ixtures" not in far.sentence, "they are not as at home"
