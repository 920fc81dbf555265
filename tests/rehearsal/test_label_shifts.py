"""Sites of other class shares that a rehearsal draws from home: their shares, and what is told of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from rehearsed_world import DEVICES, draw, trained

import shiftmend
from shiftmend.methods.fr_shares import FRShares
from shiftmend.profiles.profile import Profile
from shiftmend.rehearsal.label_shifts import AS_AT_HOME, HOME_DRAWS, KINDS, LABEL_SHIFTS, draw_places, draw_shares

HOME = np.full(10, 0.1)


@pytest.mark.parametrize("kind", [AS_AT_HOME, *KINDS])
def test_shares_of_each_kind(kind: str) -> None:
    shares = draw_shares(kind, HOME, np.random.default_rng(0))
    assert np.isclose(shares.sum(), 1)
    assert (shares >= 0).all()
    assert (shares == 0).sum() == {"one missing": 1, "half missing": 5}.get(kind, 0)
    if kind.startswith("tail"):
        assert np.isclose(shares.max() / shares.min(), float(kind.split()[1]))
    assert np.array_equal(shares, HOME) == (kind == AS_AT_HOME)


def test_places_have_the_shares_and_none_comes_twice() -> None:
    labels = torch.arange(1000) % 4
    places = draw_places(labels, np.array([0.5, 0.3, 0.2, 0.0]), 400, np.random.default_rng(0))
    assert len(places.unique()) == len(places) == 400
    assert labels[places].bincount(minlength=4).tolist() == [200, 120, 80, 0]
    scarce = draw_places(labels, np.array([0.9, 0.1, 0.0, 0.0]), 400, np.random.default_rng(0))
    assert labels[scarce].bincount(minlength=4).tolist() == [249, 28, 0, 0], "the scarcest class decides the size"


@pytest.mark.slow
def test_a_rehearsal_tells_how_often_it_is_right(tmp_path: Path) -> None:
    model, profile = trained()
    home = draw(400, 2)
    names = ("offset", "gain", "drift", "lamp", "gaps", "steps")
    options = {"battery": {name: DEVICES[name] for name in names}, "site_size": 400, "progress": False}
    found = shiftmend.rehearse(
        model, (home.inputs, home.labels), profile, candidates=["match-moments", FRShares(steps=3)], **options
    )
    record = found.rehearsal
    assert record is not None
    by_truth = [(site.device != "none", site.kind != AS_AT_HOME) for site in record.sites]
    assert by_truth.count((False, False)) == HOME_DRAWS
    assert by_truth.count((False, True)) == LABEL_SHIFTS
    assert by_truth.count((True, False)) == len(names)
    assert by_truth.count((True, True)) == 4, "three for each four simulated shifts"
    alone = [site for site in record.sites if site.truth == "patients"]
    assert sum(site.told in ("patients", None) for site in alone) > 0.7 * len(alone)
    assert all(site.told != "neither" for site in record.sites if site.loss > 0.2)
    assert "told wrong" in str(record)
    found.save(tmp_path / "profile")
    loaded = Profile.load(tmp_path / "profile").rehearsal
    assert loaded is not None
    assert loaded.sites == record.sites
    plain = shiftmend.rehearse(model, (home.inputs, home.labels), profile, candidates=["match-moments"], **options)
    assert plain.rehearsal is not None
    assert not plain.rehearsal.sites, "only a candidate that leaves shares free has a use for them"
