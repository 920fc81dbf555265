from __future__ import annotations

from pathlib import Path
from typing import Any

from worlds import sensors

import shiftmend


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
