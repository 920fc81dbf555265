"""The first line of a report: what is estimated, one recommendation, and no word that contradicts it."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rehearsed_world import draw, make_record, rehearsed, trained
from report_worlds import Page, mended

import shiftmend
from shiftmend import report
from shiftmend.adaptation.calibrate import fold_temperature
from shiftmend.adaptation.result import Candidate, Estimates
from shiftmend.profiles.rehearsal import UNTOUCHED
from shiftmend.report.answer import Answer, explain_reason, give_answer
from shiftmend.report.facts import Facts
from shiftmend.report.page import render
from shiftmend.report.sections import SECTIONS
from shiftmend.verification.estimate import Estimate
from shiftmend.verification.verdict import Verification

RECORD = make_record()  # ten classes, 95 % at home
REASON = "slices 0.31 lies outside of what was rehearsed (0.01 to 0.2)"
NOBODY = Estimate(None, None, None, "accuracy", (REASON,), (0.77, 0.75, 0.79))
SPECIAL = r"\b(floor|slices?|marginals?|excess|veto|taps?|restored)\b"


def told(value: float, half: float = 0.02) -> Estimate:
    return Estimate(value, value - half, min(1.0, value + half), "accuracy")


@pytest.fixture(scope="module")
def bare() -> Facts:
    """Facts of an adaptation by bufr, without labels, made with a profile that was not rehearsed."""
    world, profile, result = mended()
    return report.gather(world.model, world.target, profile, result)


def judged(facts: Facts, before: Estimate | None, after: Estimate | None, **changes: Any) -> Facts:
    return replace(facts, **{"estimates": Estimates(before, after), "rehearsal": RECORD} | changes)


def left_alone(facts: Facts, reason: str = "") -> Facts:
    assert facts.mending is not None
    manifest = facts.mending.manifest | {"method": {"name": UNTOUCHED}}
    taps = tuple(replace(tap, after=None, clear_after=None) for tap in facts.taps)
    return replace(facts, after=None, taps=taps, mending=replace(facts.mending, manifest=manifest, reason=reason))


def visible(facts: Facts) -> str:
    """Return the text that is not folded away."""
    page = Page(render(facts))
    return " ".join(page.sections[part.__name__] for part in SECTIONS if part.__name__ in page.sections)


def summed_up(facts: Facts) -> tuple[str, str]:
    answer = give_answer(facts)
    return answer.choice, answer.level


def test_a_model_that_was_mended_is_to_be_used(bare: Facts) -> None:
    found = judged(bare, told(0.31), Estimate(0.853, 0.82, 0.874, "accuracy"))
    answer = give_answer(found)
    wanted = "Accuracy about 31 % before, 85 % (82 to 87) after, estimated without labels."
    assert answer.headline.replace("\u00a0", " ") == wanted
    assert (answer.choice, answer.level, answer.advice) == ("mended", "good", "Use the mended model.")
    assert "95.0\u00a0%" in " ".join(answer.remarks)
    page = Page(render(found))
    assert page.headings[1][1].replace("\u00a0", " ") == wanted
    assert page.text.strip().startswith(f"{found.title}: use the mended model.")
    assert "--labelled" in page.sections["answer"]


@pytest.mark.parametrize(
    ("before", "after", "choice", "level"),
    [
        (told(0.9), told(0.8), "untouched", "good"),  # mending did harm
        (told(0.9), told(0.903), "untouched", "good"),  # a gain that is not worth it
        (told(0.9), NOBODY, "untouched", "good"),
        (told(0.3), NOBODY, "neither", "bad"),
        (NOBODY, told(0.9), "mended", "good"),
        (NOBODY, NOBODY, "neither", "unsure"),
        (told(0.2), told(0.4), "neither", "bad"),  # better, and still bad
        (told(0.6), told(0.8, half=0.5), "neither", "unsure"),  # nearly anything is possible
    ],
)
def test_the_estimates_decide(bare: Facts, before: Estimate, after: Estimate, choice: str, level: str) -> None:
    found = judged(bare, before, after)
    assert summed_up(found) == (choice, level)
    for verdict in (0.001, 0.5):  # what features look like changes nothing
        seen = Verification(verdict, 0.0005, 600)
        assert summed_up(replace(found, after=seen)) == (choice, level)
    text = visible(found)
    assert not re.search(SPECIAL, text)
    assert "77" not in give_answer(found).headline, "what is withheld is shown to nobody"
    assert ("It is unknown how accurate" in text) == (before is after is NOBODY)


def test_errors_of_quantities_are_better_if_smaller(bare: Facts) -> None:
    record = replace(RECORD, task="quantities", score=0.5)
    one, other = (Estimate(value, value - 0.1, value + 0.1, "rmse") for value in (0.9, 0.55))
    found = judged(bare, one, other, rehearsal=record, predictions=None)
    assert give_answer(found).headline.startswith("Root mean square error about 0.9 before, 0.55 (0.45")
    assert summed_up(found) == ("mended", "good")
    assert summed_up(judged(bare, other, one, rehearsal=record, predictions=None)) == ("untouched", "good")
    assert "evaluate" in " ".join(give_answer(found).next_steps)
    assert "At home the same score is 0.5." in give_answer(found).remarks
    assert not re.search(SPECIAL, visible(found))


def test_a_profile_that_was_not_rehearsed_is_said_to_be_so_with_the_line_that_does_it(bare: Facts) -> None:
    nobody = Estimate(None, None, None, "accuracy", ("the profile was not rehearsed",))
    for estimates in (None, Estimates(nobody, nobody)):
        answer = give_answer(replace(bare, estimates=estimates))
        assert answer.headline == "It is unknown how accurate the model is here: the profile was not rehearsed."
        assert summed_up(replace(bare, estimates=estimates)) == ("neither", "unsure")
        assert "shiftmend rehearse MODEL --data" in answer.next_steps[-1]
        assert not re.search(r"\d", answer.headline)
    assert "rehearsed" not in Page(render(bare)).sections


def test_labels_stand_beside_the_estimate_and_decide() -> None:
    world, profile, result = mended()
    found = report.gather(world.model, world.target, profile, result, labels=world.labels)
    truths = [100 * world.accuracy(model) for model in (world.model, result.model)]
    written = f"{truths[0]:.1f}\u00a0% before, {truths[1]:.1f}\u00a0% after"
    answer = give_answer(found)
    assert answer.headline.startswith(f"Accuracy {written}, by the labels. Without labels it would be unknown: ")
    beside = judged(found, told(0.31), told(0.85))
    answer = give_answer(beside)
    assert answer.truth == f"Accuracy by the labels: {written}."
    assert "0.31" not in answer.truth
    assert answer.truth in Page(render(beside)).sections["answer"]
    assert "estimated without labels31.0\u00a0% (29.0\u00a0to\u00a033.0)" in Page(render(beside)).sections["scores"]
    assert answer.choice == "mended"
    # The estimate is wrong: what the labels say is followed, and that is said.
    assert found.scores_before is not None
    swapped = replace(beside, scores_before=found.scores_after, scores_after=found.scores_before)
    answer = give_answer(swapped)
    assert answer.choice == "untouched"
    assert "The recommendation follows the labels." in answer.remarks[-1]
    few = replace(beside, scores_before=replace(found.scores_before, samples=5))
    assert give_answer(few).choice == "mended"
    assert "too few" in Page(render(few)).sections["scores"]


def test_a_model_that_was_left_alone_is_kept(bare: Facts) -> None:
    found = left_alone(bare, "the data are as at home, so nothing was changed")
    home = judged(found, told(0.94), told(0.94))
    answer = give_answer(home)
    assert answer.headline.replace("\u00a0", " ") == "Accuracy about 94 % (92 to 96), estimated without labels."
    assert (answer.choice, answer.level) == ("untouched", "good")
    assert "The data look as at home." in answer.remarks
    assert "nobody" not in visible(home).lower()
    harmed = judged(left_alone(bare), told(0.3), told(0.3))
    assert summed_up(harmed) == ("neither", "bad")
    assert "Do not trust the model here" in give_answer(harmed).advice
    assert summed_up(judged(left_alone(bare), NOBODY, NOBODY)) == ("neither", "unsure")
    unrehearsed = replace(left_alone(bare), before=Verification(0.0005, 0.0004, 600))
    assert summed_up(unrehearsed) == ("untouched", "unsure")
    assert "the profile was not rehearsed" in give_answer(unrehearsed).headline


def test_without_an_adaptation_the_advice_is_to_keep_or_to_mend() -> None:
    world, profile, _ = mended()
    found = report.gather(world.model, world.target, profile)
    assert summed_up(found) == ("mend", "bad")
    assert summed_up(judged(found, told(0.7), None)) == ("mend", "bad")
    assert summed_up(judged(found, told(0.94), None)) == ("untouched", "good")
    assert summed_up(judged(found, NOBODY, None)) == ("neither", "unsure")
    home = replace(found, before=Verification(0.0005, 0.0004, 600))
    assert summed_up(home) == ("untouched", "unsure")
    for facts in (found, home, judged(found, told(0.7), None)):
        assert not re.search(SPECIAL, visible(facts))
        assert "after" not in Page(render(facts)).sections["answer"]


def test_reasons_name_no_signals() -> None:
    assert explain_reason(REASON) == "no device that was simulated at home gave such data"
    assert "skew" not in explain_reason("answers fall into other classes than ever at home (skew 0.51, up to 0.30)")
    assert "marginals" not in explain_reason("marginals 3 is odd")
    assert "%" not in explain_reason("the signals leave too much open (accuracy between 0.0 % and 100.0 %)")
    kept = "there are too few samples (20; at least 150 are needed)"
    assert explain_reason(kept) == kept


def test_what_was_tried_is_listed_with_estimates_times_and_the_choice(bare: Facts) -> None:
    assert bare.mending is not None
    candidates = (
        Candidate(UNTOUCHED, told(0.31), {"slices": 0.4}, 0.25),
        Candidate("adabn", NOBODY, {}, 3.04),
        Candidate("fr", None, {}, 250.0, "the loss diverged at tap features"),
        Candidate("bufr", told(0.85), {}, 12.34),
    )
    mending = replace(bare.mending, candidates=candidates, reason="its estimate is the best")
    found = judged(bare, told(0.31), told(0.85), mending=mending)
    page = Page(render(found))
    listed = page.sections["tried"].replace("\u00a0", " ")
    assert "4 models were compared" in listed
    assert "“bufr” was chosen: its estimate is the best." in listed
    for row in ("came31.0 % (29.0 to 33.0)0.25 s", "these inputsunknown3.0 s", "failed here250 s"):
        assert row in listed
    assert "bufr (chosen)" in listed
    assert not re.search(SPECIAL, visible(found))
    full = page.sections["features"]
    assert f"adabn: {REASON}" in full
    assert "fr: the loss diverged at tap features" in full
    held_back = replace(found, mending=replace(mending, same_data=False))
    assert "for the inputs that were adapted to" in Page(render(held_back)).sections["tried"]
    unrehearsed = replace(mending, candidates=tuple(replace(one, estimate=None) for one in candidates))
    text = Page(render(replace(bare, mending=unrehearsed))).sections["tried"]
    assert "the profile was not rehearsed" in text
    assert "%" not in text


def test_the_rehearsal_shows_how_good_estimates_were(bare: Facts) -> None:
    found = judged(bare, told(0.31), told(0.85))
    page = Page(render(found))
    shown = page.sections["rehearsed"]
    assert f"off by {100 * RECORD.mean_error:.1f} points" in shown
    for place, shift in enumerate(RECORD.shifts):
        truth = float(RECORD.chosen_scores()[place, -1])
        guess = float(RECORD.estimates[place, -1, -1])
        assert shift.name in shown
        assert f"{100 * guess:.1f}\u00a0%{100 * truth:.1f}\u00a0%" in shown
    empty = judged(bare, told(0.31), told(0.85), rehearsal=make_record(cross_fitted=False))
    assert "rehearsed" not in Page(render(empty)).sections


def test_calibration_is_told_in_one_sentence(bare: Facts) -> None:
    assert bare.mending is not None

    def said(calibration: dict[str, Any]) -> Page:
        manifest = bare.mending.manifest | {"calibration": calibration}  # type: ignore[union-attr]
        return Page(render(replace(bare, mending=replace(bare.mending, manifest=manifest))))  # type: ignore[type-var]

    adjusted, refused = said({"temperature": 1.5}), said({"refused": "it has no last layer"})
    at_home = said({"temperature": 1.5, "by": "home"})
    assert "mean equals" not in at_home.sections["predictions"]
    assert "accuracy here is" in at_home.sections["predictions"]
    assert "labels at home by a temperature of 1.5" in at_home.sections["run"]
    assert "adjusted so that their mean equals the estimated accuracy" in adjusted.sections["predictions"]
    assert "temperature of 1.5" in adjusted.sections["run"]
    assert "adjusted so that" not in refused.sections["predictions"]
    assert "not adjusted: it has no last layer" in refused.sections["run"]


# ---- a rehearsed profile, end to end


@pytest.fixture(scope="module")
def site() -> tuple[Any, Any, Any, shiftmend.Adaptation]:
    """A model, its rehearsed profile, inputs of a device with another gain, and what auto made of them."""
    model, _ = trained()
    inputs = 1.7 * draw(500, 7).inputs + 1.5
    return model, rehearsed(), inputs, shiftmend.adapt(model, inputs, rehearsed(), progress=False)


def same_answer(one: Answer, other: Answer) -> bool:
    return (one.headline, one.choice, one.level) == (other.headline, other.choice, other.level)


@pytest.mark.slow
def test_a_saved_result_gives_the_page_of_the_one_in_memory(site: Any, tmp_path: Path) -> None:
    model, profile, inputs, result = site
    result.save(tmp_path / "mended")
    live, saved = (report.gather(model, inputs, profile, one) for one in (result, tmp_path / "mended"))
    assert live.estimates == result.estimate
    assert same_answer(give_answer(live), give_answer(saved))
    assert live.mending is not None
    assert saved.mending is not None
    names = [one.name for one in live.mending.candidates]
    assert names == [one.name for one in saved.mending.candidates] == [one.name for one in result.candidates]
    assert saved.mending.reason == result.reason
    assert Page(render(live)).sections["tried"] == Page(render(saved)).sections["tried"]


@pytest.mark.slow
def test_other_inputs_are_estimated_anew(site: Any) -> None:
    model, profile, inputs, result = site
    stored = Estimates(told(0.123), told(0.456))
    marked = replace(result, estimate=stored)
    assert report.gather(model, inputs, profile, marked).estimates == stored
    held_back = 1.7 * draw(500, 9).inputs + 1.5
    anew = report.gather(model, held_back, profile, marked).estimates
    assert anew is not None
    assert anew.before not in (None, stored.before)
    assert anew.after not in (None, stored.after)
    other_profile = replace(result, estimate=stored, manifest=result.manifest | {"profile_sha256": "0"})
    assert report.gather(model, inputs, profile, other_profile).estimates != stored
    few = report.gather(model, inputs[:30], profile, result)
    assert few.estimates is not None
    assert few.estimates.after is not None
    assert not few.estimates.after.reliable
    assert "too few samples" in give_answer(few).headline
    only = report.gather(model, inputs, profile)
    assert only.estimates is not None
    assert only.estimates.after is None
    assert only.estimates.before == shiftmend.verify(model, inputs, profile).estimate


@pytest.mark.slow
def test_models_that_do_not_belong_together_have_no_estimate(site: Any) -> None:
    model, profile, inputs, result = site
    for other in (replace(profile, weights="0"), profile):
        manifest = result.manifest | ({} if other is not profile else {"source_weights": "0"})
        found = report.gather(model, inputs, other, replace(result, manifest=manifest))
        assert found.estimates is not None
        assert found.estimates.after is not None
        assert not found.estimates.after.reliable
        assert "weights" in give_answer(found).headline


def test_the_temperature_in_the_head_is_no_shift_of_the_features() -> None:
    world, profile, result = mended()
    calibrated = copy.deepcopy(result.model)
    assert fold_temperature(calibrated, profile.specs["logits"], 3.0) is None
    manifest = result.manifest | {"calibration": {"temperature": 3.0}}
    plain = report.gather(world.model, world.target, profile, result)
    found = report.gather(world.model, world.target, profile, replace(result, model=calibrated, manifest=manifest))
    assert found.after is not None
    assert plain.after is not None
    assert found.after.marginals == pytest.approx(plain.after.marginals, rel=1e-3)
    assert found.predictions is not None
    assert found.predictions.after is not None
    assert plain.predictions is not None
    assert plain.predictions.after is not None
    assert found.predictions.after.counts == plain.predictions.after.counts
    assert found.predictions.after.confidence < plain.predictions.after.confidence


def ranged(low: float, high: float) -> Estimate:
    return Estimate(None, low, high, "accuracy", ("the signals leave too much open",), ((low + high) / 2, low, high))


@pytest.mark.parametrize(
    ("before", "after", "words", "choice"),
    [
        (told(0.62), ranged(0.65, 0.93), "about 62 % (60 to 64) before, between 65 and 93 % after", "mended"),
        (told(0.62), ranged(0.55, 0.9), "about 62 % (60 to 64) before, between 55 and 90 % after", "untouched"),
        (ranged(0.2, 0.5), told(0.88), "between 20 and 50 % before, about 88 % (86 to 90) after", "mended"),
        (ranged(0.3, 0.6), ranged(0.65, 0.95), "between 30 and 60 % before, between 65 and 95 % after", "mended"),
        (ranged(0.5, 0.8), ranged(0.65, 0.95), "between 50 and 80 % before, between 65 and 95 % after", "neither"),
        (told(0.31), ranged(0.2, 0.6), "about 31 % (29 to 33) before, between 20 and 60 % after", "neither"),
    ],
)
def test_a_range_is_written_and_counts_by_the_end_that_speaks_against_the_mended_model(
    bare: Facts, before: Estimate, after: Estimate, words: str, choice: str
) -> None:
    found = give_answer(judged(bare, before, after))
    assert words in found.headline.replace("\u00a0", " ")
    assert found.choice == choice
    assert "unknown" not in found.headline
    page = visible(judged(bare, before, after))
    assert "Mending did not help" not in page


def test_a_range_far_below_home_asks_for_mending_and_one_around_home_for_labels(bare: Facts) -> None:
    alone = replace(bare, mending=None)
    assert give_answer(judged(alone, ranged(0.5, 0.9), None)).choice == "mend"
    assert give_answer(judged(alone, ranged(0.7, 1.0), None)).choice == "neither"
