from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rehearsed_world import draw, rehearsed, trained
from worlds import sensors

import shiftmend
from shiftmend.errors import DataError
from shiftmend.report.saved import load_adaptation


def test_a_run_that_ended_by_itself_is_told_in_rounds_and_steps(tmp_path: Path) -> None:
    world = sensors()
    cases: dict[str, dict[str, Any]] = {"round": {"learning_rate": 0.05}, "epoch": {"epochs": 2}}
    for unit, options in cases.items():
        result = shiftmend.adapt(world.model, world.target, world.profile(), "fr", batch_size=100, **options)
        assert f"kept is {unit}" in repr(result) or unit == "epoch"
        assert ("steps)" in repr(result)) == (unit == "round")
        path = tmp_path / f"{unit}.html"
        shiftmend.report.write(shiftmend.report.gather(world.model, world.target, world.profile(), result), path)
        text = path.read_text()
        assert f"Loss by {unit}" in text
        assert ("one run through the data" in text) == (unit == "epoch")


def test_other_class_shares_are_told_and_drawn_also_from_a_saved_result(tmp_path: Path) -> None:
    model, _ = trained()
    site = draw(500, 13, (0.7, 0.3, 0.0, 0.0))
    result = shiftmend.adapt(model, site.inputs, rehearsed(), progress=False)
    assert result.changed == "patients"
    result.save(tmp_path / "result")
    for number, given in enumerate((result, load_adaptation(tmp_path / "result", model))):
        path = tmp_path / f"{number}.html"
        facts = shiftmend.report.gather(model, site.inputs, rehearsed(), given, classes=["oak", "elm", "ash", "fir"])
        shiftmend.report.write(facts, path)
        text = path.read_text()
        assert "the class shares changed, the device did not" in text
        assert "The data are as at home" not in text
        part = text[text.index('id="changed"') :]
        part = part[: part.index("</section>")]
        assert all(name in part for name in ("oak", "elm", "ash", "fir"))
        assert f"{100 * result.shares.values[0]:.1f}" in part  # type: ignore[union-attr]
    manifest = tmp_path / "result" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"patients"', '"nobody"'))
    with pytest.raises(DataError, match="damaged"):
        load_adaptation(tmp_path / "result", model)
