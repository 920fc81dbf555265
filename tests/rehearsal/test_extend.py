"""`rehearse(extend=True)`: only missing candidates are run, and what is not the same is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rehearsed_world import draw, trained
from torch import Tensor

import shiftmend
from shiftmend.errors import DataError
from shiftmend.methods.adabn import AdaBN
from shiftmend.profiles.profile import Profile
from shiftmend.profiles.rehearsal import UNTOUCHED, Rehearsal
from shiftmend.rehearsal import rehearse as module

BATTERY: dict[str, Callable[[Tensor], Tensor]] = {
    "offset": lambda inputs: inputs + 2,
    "gain": lambda inputs: 3 * inputs,
    "lamp/dim": lambda inputs: inputs / 4,
}
HOME = draw(150, 3)

pytestmark = pytest.mark.slow


def run(profile: Profile, **options: Any) -> Profile:
    given = {"battery": BATTERY, "progress": False, "home": (HOME.inputs, HOME.labels)} | options
    return shiftmend.rehearse(trained()[0], profile=profile, **given)


def record_of(profile: Profile) -> Rehearsal:
    assert profile.rehearsal is not None
    return profile.rehearsal


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """A profile with one candidate, as a file holds it."""
    path: Path = tmp_path_factory.mktemp("rehearsed") / "profile.safetensors"
    run(trained()[1], candidates=["match-mean"]).save(path)
    return Profile.load(path)


def test_missing_candidates_get_the_cells_that_a_whole_rehearsal_gives_them(
    stored: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, ...]] = []
    original = module.run_job

    def noted(job: Any) -> Any:
        ran.append(tuple(job.methods))
        return original(job)

    whole = record_of(run(trained()[1], candidates=["match-mean", "adabn"]))
    monkeypatch.setattr(module, "run_job", noted)
    extended = record_of(run(stored, candidates=["match-mean", "adabn"], extend=True))
    assert set(ran) == {(UNTOUCHED, "adabn")}
    assert extended.candidates == whole.candidates
    assert extended.find_problem() is None
    torch.testing.assert_close(extended.scores, whole.scores)
    unknown = {(1, "agreement with adabn"), (2, "agreement with match-mean")}
    for place, name in ((place, name) for place in range(3) for name in whole.signals):
        own = extended.values[:, :, place, extended.signals.index(name)]
        if (place, name) in unknown:
            assert bool(own.isnan().all())
        else:
            expected = whole.values[:, :, place, whole.signals.index(name)]
            torch.testing.assert_close(own, expected, equal_nan=True, rtol=2e-3, atol=1e-5)
    assert bool(extended.estimates.isfinite().any()) == bool(whole.estimates.isfinite().any())


def test_an_extended_rehearsal_is_saved_and_the_given_profile_stays(stored: Profile, tmp_path: Path) -> None:
    before = stored.to_bytes()
    made = run(stored, candidates=["adabn"], extend=True)
    assert stored.to_bytes() == before
    made.save(tmp_path / "extended")
    assert record_of(Profile.load(tmp_path / "extended")).candidates == (UNTOUCHED, "match-mean", "adabn")


def test_nothing_is_run_where_nothing_is_missing(stored: Profile) -> None:
    assert run(stored, candidates=["match-mean"], extend=True) is stored


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"home": (HOME.inputs + 1e-3, HOME.labels)}, "home data"),
        ({"home": HOME.inputs}, "home data"),
        ({"seed": 5}, "seed"),
        ({"batch_size": 10}, "batch size"),
        ({"battery": None}, "battery"),
        ({"battery": {"offset": BATTERY["offset"]}}, "battery"),
        ({"battery": {**BATTERY, "gain": lambda inputs: -inputs}}, "'gain'"),
        ({"preprocess": lambda inputs: -inputs}, "as stored"),
        ({"site_size": 20}, "sizes"),
        ({"shifts": 5}, "shifts"),
    ],
)
def test_other_data_and_options_are_refused(stored: Profile, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        run(stored, **{"candidates": ["adabn"], "extend": True} | changes)


def test_a_candidate_with_other_options_is_refused_and_so_is_a_profile_without_a_rehearsal(stored: Profile) -> None:
    extended = run(stored, candidates=["adabn"], extend=True)
    with pytest.raises(DataError, match="another passes"):
        run(extended, candidates=[AdaBN(passes=1)], extend=True)
    with pytest.raises(DataError, match="without a rehearsal"):
        run(replace(stored, rehearsal=None), candidates=["adabn"], extend=True)


def test_strengths_of_the_default_battery_are_not_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(trained()[1], candidates=["match-mean"], battery=None, quick=True, shifts=3)
    monkeypatch.setattr(module, "plan_battery", None)
    made = run(first, candidates=["match-moments"], battery=None, extend=True)
    assert record_of(made).shifts == record_of(first).shifts
    assert record_of(made).candidates == (UNTOUCHED, "match-mean", "match-moments")
