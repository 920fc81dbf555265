"""Profiles for other class shares."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rehearsed_world import draw, rehearsed, trained

import shiftmend
from shiftmend.errors import ProfileError
from shiftmend.profiles.rehearsal import BY_CLASS
from shiftmend.profiles.shares import reweight

SHARES = (0.6, 0.3, 0.1, 0.0)


def test_shares_of_home_change_nothing() -> None:
    profile = rehearsed()
    assert profile.rehearsal is not None
    same = reweight(profile, profile.rehearsal.label_shares)
    for name in ("features", "logits"):
        torch.testing.assert_close(same.taps[name].counts, profile.taps[name].counts, rtol=1e-4, atol=1e-3)


def test_other_shares_give_the_profile_of_such_a_home() -> None:
    model, profile = trained()
    site = draw(4000, 11, SHARES)
    there = shiftmend.profile(model, site.inputs, like=profile, progress=False)
    mixed = reweight(rehearsed(), torch.tensor(SHARES))
    for name in ("features", "logits"):
        true, plain, found = (one.taps[name].probabilities for one in (there, profile, mixed))
        assert (found - true).abs().mean() < 0.35 * (plain - true).abs().mean()
    slices = [one.slices["verification"].histogram.probabilities for one in (there, profile, mixed)]
    assert (slices[2] - slices[0]).abs().mean() < 0.35 * (slices[1] - slices[0]).abs().mean()
    torch.testing.assert_close(mixed.taps["features"].counts.sum(1), profile.taps["features"].counts.sum(1))


@pytest.mark.parametrize("shares", [[0.5, 0.5], [1, -1, 0.5, 0.5], [0, 0, 0, 0], [float("nan"), 1, 1, 1]])
def test_what_are_no_shares_of_its_classes_is_refused(shares: list[float]) -> None:
    with pytest.raises(ProfileError, match="shares"):
        reweight(rehearsed(), torch.tensor(shares))


def test_a_profile_without_classes_is_refused() -> None:
    with pytest.raises(ProfileError, match="rehearse"):
        reweight(trained()[1], torch.ones(4))


def test_classes_travel_in_the_file(tmp_path: Path) -> None:
    profile = rehearsed()
    profile.save(tmp_path / "file")
    back = shiftmend.Profile.load(tmp_path / "file").rehearsal
    assert profile.rehearsal is not None
    assert back is not None
    assert set(back.by_class) == set(BY_CLASS)
    for name, counts in profile.rehearsal.by_class.items():
        assert torch.equal(back.by_class[name], counts)
        torch.testing.assert_close(back.class_histograms(name).sum(2), torch.ones(counts.shape[:2]).double())


def test_damaged_classes_are_refused() -> None:
    profile = rehearsed()
    assert profile.rehearsal is not None
    record, counts = profile.rehearsal, profile.rehearsal.by_class
    wrong = (
        {**counts, "features": counts["features"][:, :3]},
        {**counts, "logits": counts["logits"][:2]},
        {name: counts[name] for name in ("features", "logits")},
        {**counts, "slices": counts["slices"].float()},
    )
    for by_class in wrong:
        with pytest.raises(ProfileError):
            shiftmend.profiles.serialize.decode(  # type: ignore[attr-defined]
                replace(profile, rehearsal=replace(record, by_class=by_class)).to_bytes()
            )
