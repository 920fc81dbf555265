"""The record of a rehearsal: its file, its size, what is refused, and the table for people."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rehearsed_world import make_record, trained
from same_profiles import same
from torch import Tensor

from shiftmend.adaptation.auto import CANDIDATES
from shiftmend.engine.method import describe_method
from shiftmend.errors import ProfileError
from shiftmend.methods import METHODS
from shiftmend.methods import method as make_method
from shiftmend.profiles import serialize
from shiftmend.profiles.profile import Profile
from shiftmend.profiles.rehearsal import (
    UNTOUCHED,
    Rehearsal,
    RehearsedShift,
    RehearsedSite,
    format_score,
    name_candidate,
    round_signals,
)
from shiftmend.utils.sealing import blank_entries, seal
from shiftmend.verification.reading import READ_SIGNALS

Facts = dict[str, Any]
Tensors = dict[str, Tensor]

RECORD = make_record(sizes=(300, 1000), settings={"batch_size": 256})
TENSORS = tuple(RECORD.to_file()[1])
NAN_ALLOWED = {"values", "home_mean", "home_deviation", "estimates", "scales"}
"""Tensors in which NaN stands for what could not be measured."""


def profiled(record: Rehearsal = RECORD) -> Profile:
    return replace(trained()[1], rehearsal=record)


def forge(alter: Callable[[Facts, Tensors], Any]) -> bytes:
    """Return the file of a rehearsed profile, altered on purpose, with a right sum."""
    content = profiled().to_bytes()
    length = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + length])["__metadata__"]
    facts, tensors = json.loads(metadata["profile"]), safetensors.torch.load(content)
    own = {
        name.removeprefix("rehearsal."): tensors.pop(name) for name in list(tensors) if name.startswith("rehearsal.")
    }
    alter(facts["rehearsal"], own)
    tensors |= {f"rehearsal.{name}": tensor.contiguous() for name, tensor in own.items()}
    file = io.BytesIO(safetensors.torch.save(tensors, metadata | blank_entries() | {"profile": json.dumps(facts)}))
    seal(file)
    return file.getvalue()


def refusal(alter: Callable[[Facts, Tensors], Any]) -> str:
    with pytest.raises(ProfileError) as caught:
        serialize.decode(forge(alter))
    message = str(caught.value)
    assert "\n" not in message
    assert 20 < len(message) < 500
    return message


def assert_same(one: Rehearsal, other: Rehearsal) -> None:
    for each in fields(Rehearsal):
        first, second = getattr(one, each.name), getattr(other, each.name)
        if isinstance(first, Tensor):
            torch.testing.assert_close(second, first, rtol=0, atol=0, equal_nan=True)
        else:
            assert second == first, each.name


# ---- the file


def test_a_rehearsal_comes_back_from_its_file(tmp_path: Path) -> None:
    profiled().save(tmp_path / "home.profile")
    found = Profile.load(tmp_path / "home.profile")
    assert found.rehearsal is not None
    assert_same(RECORD, found.rehearsal)
    assert same(found, trained()[1])
    assert found.to_bytes() == profiled().to_bytes()
    assert str(found.rehearsal) == str(RECORD)


def test_unmeasured_signals_come_back_as_nan() -> None:
    values = RECORD.values.clone()
    values[0, 0, 1, 2] = math.nan
    found = serialize.decode(profiled(replace(RECORD, values=values)).to_bytes()).rehearsal
    assert found is not None
    assert_same(replace(RECORD, values=values), found)


def test_a_candidate_that_failed_in_a_cell_has_no_score_there() -> None:
    scores = RECORD.scores.clone()
    scores[0, 0, 1] = math.nan
    found = serialize.decode(profiled(replace(RECORD, scores=scores)).to_bytes()).rehearsal
    assert found is not None
    assert_same(replace(RECORD, scores=scores), found)


def test_a_rehearsal_of_quantities_comes_back() -> None:
    record = replace(
        RECORD,
        task="quantities",
        scores=3 * RECORD.scores,
        shares=torch.empty(0),
        confusion=torch.empty(0, 0),
        output_mean=torch.tensor([1.0]),
        output_deviation=torch.tensor([2.0]),
    )
    found = serialize.decode(profiled(record).to_bytes()).rehearsal
    assert found is not None
    assert_same(record, found)
    assert found.metric == "rmse"
    assert not found.higher_is_better


def test_signals_are_rounded_to_what_the_file_holds() -> None:
    values = torch.tensor([0.123456, 1e9, -1e9, math.nan])
    rounded = round_signals(values)
    assert rounded[0] == pytest.approx(0.123456, rel=1e-3)
    assert bool(rounded[1:3].isfinite().all())
    assert bool(rounded[3].isnan())
    torch.testing.assert_close(round_signals(rounded), rounded, rtol=0, atol=0, equal_nan=True)


def test_a_profile_without_a_rehearsal_has_none() -> None:
    plain = trained()[1]
    assert plain.rehearsal is None
    assert serialize.decode(plain.to_bytes()).rehearsal is None
    assert b"rehearsal" not in plain.to_bytes()


def test_a_rehearsal_of_the_default_battery_takes_at_most_16_kib() -> None:
    families = 13
    names = [f"background, {number}" for number in range(families)]
    usual = tuple(name for name in CANDIDATES if not METHODS[name].for_tables)
    record = make_record(
        families=families,
        sizes=(300, 5000),
        candidates=usual,
        signals=(*READ_SIGNALS, *(f"agreement with {name}" for name in usual)),
        methods={name: describe_method(make_method(name)) for name in usual},
        shifts=tuple(RehearsedShift(name, name, 0.123456789) for name in names),
        settings={"batch_size": None, "autocast": "False", "seed": 0, "home_sha256": "0" * 64},
        cross_fitted=False,
    )
    more = len(profiled(record).to_bytes()) - len(trained()[1].to_bytes())
    assert 0 < more <= 16 << 10


# ---- what is refused


@pytest.mark.parametrize("name", TENSORS)
def test_missing_surplus_and_misshapen_tensors_are_refused(name: str) -> None:
    if name not in ("group_deviation", "cluster_centres"):  # Files of earlier versions lack it.
        assert "missing or unknown" in refusal(lambda facts, tensors: tensors.pop(name))
    assert "missing or unknown" in refusal(lambda facts, tensors: tensors.update(other=tensors[name].clone()))
    assert "dimensions" in refusal(lambda facts, tensors: tensors.update({name: tensors[name][None]}))
    assert "float32" in refusal(lambda facts, tensors: tensors.update({name: tensors[name].double()}))
    assert "float32" in refusal(lambda facts, tensors: tensors.update({name: tensors[name].int()}))
    larger = torch.ones([size + 1 for size in getattr(RECORD, name).shape])
    refusal(lambda facts, tensors: tensors.update({name: larger}))


@pytest.mark.parametrize("name", [name for name in TENSORS if getattr(RECORD, name).numel()])
def test_entries_that_are_no_numbers_are_refused(name: str) -> None:
    def put(value: float) -> Callable[[Facts, Tensors], Any]:
        def alter(facts: Facts, tensors: Tensors) -> None:
            tensors[name].view(-1)[0] = value

        return alter

    refusal(put(math.inf))
    refusal(put(-math.inf))
    if name in NAN_ALLOWED:
        assert serialize.decode(forge(put(math.nan))).rehearsal is not None
    else:
        refusal(put(math.nan))
    if name not in ("values", "home_mean", "estimates"):
        refusal(put(-0.5))
    if name in ("scores", "shares", "chosen"):
        refusal(put(1.5))


@pytest.mark.parametrize("name", RECORD.to_file()[0])
@pytest.mark.parametrize("value", [None, "x", -1, [], {}, [None], math.nan])
def test_facts_of_another_kind_are_refused(name: str, value: Any) -> None:
    if (name == "settings" and value == {}) or (name == "sites" and value == []):
        return
    if name == "score" and value == -1:
        assert "negative" in refusal(lambda facts, tensors: facts.update(score=-1))
        return
    refusal(lambda facts, tensors: facts.update({name: value}))


LATER = {"error_kurtosis", "sites", "groups", "design_effect", "answer_design_effect"}
"""Facts that files of earlier versions lack."""


def test_a_file_without_the_kurtosis_of_errors_counts_them_as_normal() -> None:
    facts, tensors = replace(RECORD, error_kurtosis=20.0).to_file()
    assert Rehearsal.from_file(facts, tensors).error_kurtosis == 20
    del facts["error_kurtosis"]
    assert Rehearsal.from_file(facts, tensors).error_kurtosis == 3


def test_a_file_without_groups_has_independent_samples() -> None:
    of_groups = {"groups": 9, "design_effect": 4.0, "answer_design_effect": 2.5}
    facts, tensors = replace(RECORD, **of_groups, group_deviation=2 * RECORD.home_deviation).to_file()
    read = Rehearsal.from_file(facts, tensors)
    assert {name: getattr(read, name) for name in of_groups} == of_groups
    torch.testing.assert_close(read.group_deviation, 2 * RECORD.home_deviation)
    assert "9 groups" in str(read)
    for name in of_groups:
        del facts[name]
    with pytest.raises(ProfileError, match="group_deviation"):
        Rehearsal.from_file(facts, tensors)
    del tensors["group_deviation"]
    read = Rehearsal.from_file(facts, tensors)
    assert (read.groups, read.design_effect, read.answer_design_effect) == (0, 1.0, 1.0)
    assert "groups" not in str(read)
    assert "design effect" in refusal(lambda facts, tensors: facts.update(design_effect=0.5))


@pytest.mark.parametrize("name", [name for name in RECORD.to_file()[0] if name not in LATER])
def test_missing_facts_are_refused(name: str) -> None:
    assert "missing or unknown" in refusal(lambda facts, tensors: facts.pop(name))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"task": "poems"}, "task"),
        ({"temperature": 0}, "temperature"),
        ({"thresholds": [0.5]}, "thresholds"),
        ({"sizes": [1000, 300]}, "order"),
        ({"sizes": [300, 300]}, "order"),
        ({"sizes": [0, 300]}, "whole number"),
        ({"candidates": ["bufr", UNTOUCHED]}, "each candidate"),
        ({"candidates": ["bufr", "bufr"], "methods": {"bufr": {}}}, "each candidate"),
        ({"candidates": ["bufr", "fr"], "methods": {"bufr": {}, "fr": {}}}, UNTOUCHED),
        ({"methods": {UNTOUCHED: {}, "bufr": "x"}}, "each candidate"),
        ({"signals": ["slices", "slices", "skew"]}, "twice"),
        ({"signals": "abc"}, "lists"),
        ({"signals": ["slices", "a\nb", "skew"]}, "names"),
        ({"signals": ["slices", "a" * 300, "skew"]}, "names"),
        ({"score": 1.5}, "accuracy"),
        ({"samples": True}, "whole number"),
        ({"labelled": 1}, "task"),
        ({"settings": []}, "settings"),
        ({"surplus": 1}, "missing or unknown"),
    ],
)
def test_facts_that_do_not_fit_together_are_refused(change: Facts, words: str) -> None:
    assert words in refusal(lambda facts, tensors: facts.update(change))


def test_a_rehearsal_without_shifts_is_refused() -> None:
    def empty(facts: Facts, tensors: Tensors) -> None:
        facts["shifts"] = []
        for name in ("scores", "values", "estimates", "scales", "chosen"):
            tensors[name] = tensors[name][:0]

    assert "no shifts" in refusal(empty)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60)
@given(st.sampled_from(sorted(RECORD.to_file()[0])), JSON)
def test_any_json_in_place_of_a_fact_is_refused_or_kept(name: str, value: Any) -> None:
    """Whatever stands there, the file is read as it is or refused in one sentence."""
    content = forge(lambda facts, tensors: facts.update({name: value}))
    with contextlib.suppress(ProfileError):
        found = serialize.decode(content).rehearsal
        assert found is not None
        assert getattr(found, name) == (tuple(value) if isinstance(value, list) else value)
        str(found)


@settings(max_examples=25)
@given(JSON.filter(lambda value: value is not None))
def test_any_json_in_place_of_the_facts_is_refused(value: Any) -> None:
    content = profiled().to_bytes()
    length = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + length])["__metadata__"]
    facts = json.loads(metadata["profile"]) | {"rehearsal": value}
    tensors = safetensors.torch.load(content)
    file = io.BytesIO(safetensors.torch.save(tensors, metadata | blank_entries() | {"profile": json.dumps(facts)}))
    seal(file)
    with pytest.raises(ProfileError, match="rehearsal"):
        serialize.decode(file.getvalue())


# ---- for people


def test_the_table_shows_each_shift_with_its_scores() -> None:
    lines = str(RECORD).splitlines()
    assert "12 simulated shifts" in lines[0]
    assert "with labels" in lines[0]
    assert lines[2].split()[:5] == ["shift", "family", "strength", "untouched", "bufr"]
    for shift, line in zip(RECORD.shifts, lines[3:-1], strict=True):
        place = RECORD.shifts.index(shift)
        assert shift.name in line
        assert shift.family in line
        for score in RECORD.scores[place, -1].tolist():
            assert f"{100 * score:.1f} %" in line
        assert f"{100 * float(RECORD.estimates[place, -1, -1]):.1f} %" in line
    assert f"{100 * RECORD.mean_error:.3g} points" in lines[-1]


def test_without_labels_the_table_says_so() -> None:
    record = replace(RECORD, labelled=False)
    assert record.metric == "agreement"
    assert "without labels" in str(record)
    assert "agreement at home" in str(record)


def test_words_for_people() -> None:
    assert name_candidate(UNTOUCHED) == "untouched"
    assert name_candidate("bufr") == "bufr"
    assert format_score(0.853, "classes") == "85.3 %"
    assert format_score(12.3456, "quantities") == "12.35"
    assert format_score(math.nan, "classes") == "-"


def test_a_candidate_is_found_by_its_name() -> None:
    assert RECORD.index("bufr") == 1
    with pytest.raises(ProfileError, match="was rehearsed"):
        RECORD.index("tent")
    assert RECORD.families == tuple(f"family {number}" for number in range(12))


@pytest.mark.parametrize("chance", [0.0, 3.0])
def test_the_level_of_home_at_any_size_has_a_part_that_chance_makes(chance: float) -> None:
    sizes = (300, 5000)
    means = torch.tensor([[0.05 + chance / size] for size in sizes])
    record = make_record(sizes=sizes, signals=("slices",), home_mean=means, cross_fitted=False)
    for size in (100, 300, 1000, 5000, 20_000):
        assert record.home_level("slices", size) == pytest.approx(0.05 + chance / size, abs=1e-6)
    assert math.isnan(record.home_level("marginals", 300))
    single = make_record(sizes=(300,), signals=("slices",), home_mean=means[:1], cross_fitted=False)
    assert single.home_level("slices", 10_000) == pytest.approx(0.05 + chance / 300, abs=1e-6)


# ---- sites of other class shares

SITE = RehearsedSite("gain", "tail 10", 400, 0.3, 0.2, "both", "bufr", 0.9, 0.91, 0.5, {"bufr": 0.2})
SITES = (SITE, *(replace(SITE, share_errors={"bufr": number / 10}) for number in range(4)))


@pytest.mark.parametrize(
    ("loss", "distance", "truth"),
    [(0.0, 0.0, "neither"), (0.03, 0.05, "device"), (0.01, 0.1, "patients"), (0.5, 0.5, "both")],
)
def test_truth_of_a_site(loss: float, distance: float, truth: str) -> None:
    assert replace(SITE, loss=loss, distance=distance).truth == truth
    assert replace(SITE, loss=0.02, distance=distance).truth is None
    assert replace(SITE, loss=loss, distance=0.07).truth is None


def test_errors_for_other_shares_need_enough_sites() -> None:
    assert replace(RECORD, sites=SITES).find_share_error("bufr") == pytest.approx(0.3)
    assert replace(RECORD, sites=SITES[2:]).find_share_error("bufr") is None
    assert replace(RECORD, sites=SITES).find_share_error("fr") is None


def test_a_device_lowers_how_much_may_stay_unexplained() -> None:
    record = replace(RECORD, sites=(SITE, replace(SITE, device="none", loss=0.0, unexplained=0.1)))
    assert record.find_unexplained_limit(0.4) == 0.4, "a site of other patients does not count"
    close = replace(record, sites=(*record.sites, replace(SITE, device="lamp", unexplained=0.2)))
    assert close.find_unexplained_limit(0.4) == pytest.approx(0.18)
    assert close.find_unexplained_limit(0.4, without="lamp") == 0.4


def test_sites_travel_and_are_checked() -> None:
    record = replace(RECORD, sites=SITES)
    assert Rehearsal.from_file(*record.to_file()).sites == SITES
    assert "both" in str(record)
    facts, tensors = record.to_file()
    for place, wrong in enumerate([1, None, 0.5, "far", math.nan, "all", "nobody", None, "x", [], {"bufr": -1}]):
        site = [*facts["sites"][0]]
        site[place] = wrong
        with pytest.raises(ProfileError, match="site"):
            Rehearsal.from_file(facts | {"sites": [site]}, tensors)
    with pytest.raises(ProfileError, match="site"):
        Rehearsal.from_file(facts | {"sites": [facts["sites"][0][:-1]]}, tensors)
