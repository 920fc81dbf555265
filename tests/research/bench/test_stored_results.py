"""What lies in `results/` is what the code of today would make: a changed setting or default makes cells stale."""

import json
from pathlib import Path
from typing import Any

import pytest

from shiftmend.engine.method import describe_method
from shiftmend.methods import method
from shiftmend.research.bench.plan import settings_of
from shiftmend.research.bench.results import read, stored
from shiftmend.research.bench.suite import find

FILES = sorted(file for file in (Path(__file__).parents[3] / "results").glob("*.json") if file.stem != "label-shift")


def test_there_are_results() -> None:
    assert len(FILES) >= 6


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_results_are_of_todays_recipes(file: Path) -> None:
    for protocol in sorted({result.cell.protocol for result in stored(file)}):
        reading = read(file.stem, file, protocol)
        assert reading.results
        assert reading.others == 0


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_results_are_of_todays_options_and_defaults(file: Path) -> None:
    benchmark = find(file.stem)
    for result in stored(file):
        setting = settings_of(benchmark, result.cell.protocol)[result.cell.method]
        options = {**setting.options, **({"labels": [0]} if setting.method == "target-supervised" else {})}
        today = describe_method(method(setting.method, **options))
        assert _but_labels(result.manifest["method"]) == _but_labels(json.loads(json.dumps(today))), result.cell


def _but_labels(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if name != "labels_sha256"}
