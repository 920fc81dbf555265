"""Rows whose profile has another preset than the usual one: from the cell to the table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_worlds import BENCHMARK, SETTINGS, load_source, load_target

import shiftmend
from shiftmend.errors import DataError
from shiftmend.profiles.presets import PRESETS
from shiftmend.research.analysis.comparisons import compare
from shiftmend.research.analysis.correlations import restoration_and_calibration, signals_and_accuracy
from shiftmend.research.bench.benchmark import Cell, Result
from shiftmend.research.bench.cell import run_cell
from shiftmend.research.bench.plan import plan
from shiftmend.research.bench.rendering import Format, render
from shiftmend.research.bench.resources import Workshop
from shiftmend.research.bench.store import Store
from shiftmend.research.bench.tables import per_shift, summary

pytestmark = pytest.mark.slow

ONLINE = BENCHMARK.settings["online"]
MIXED = replace(
    BENCHMARK,
    settings=dict(BENCHMARK.settings)
    | {
        "offline": SETTINGS
        | {f"{name}-sliced": replace(SETTINGS[name], preset="sliced") for name in ("fr", "bufr")}
        | {"fr-paper": replace(SETTINGS["fr"], preset="paper")},
        "online": dict(ONLINE) | {"fr-sliced": replace(ONLINE["fr"], preset="sliced")},
    },
)
ROWS = ["source-only", "fr", "bufr", "fr-sliced", "bufr-sliced"]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(MIXED, tmp_path_factory.mktemp("bench"), None, "cpu")


@pytest.fixture(scope="module")
def results(shop: Workshop) -> list[Result]:
    found = [run_cell(shop, cell) for cell in plan(MIXED, methods=ROWS, shifts=["dim", "inverse"])]
    assert [result.error for result in found] == [None] * (2 * 2 * len(ROWS))
    return found


def cell_of(row: str, protocol: str = "offline") -> Cell:
    (found,) = plan(MIXED, protocol, methods=[row], shifts=["dim"], seeds=[1])
    return found


def by_hand(shop: Workshop, preset: str, temperature: float) -> shiftmend.Profile:
    return shiftmend.profile(
        shop.model("plain", 1)[0],
        load_source("plain", None).profiled.images,
        preset=preset,
        bins=replace(PRESETS[preset].bins, temperature=temperature),
        batch_size=512,
        preprocess=MIXED.preprocess,
        progress=False,
    )


@pytest.mark.parametrize(("row", "preset"), [("fr-sliced", "sliced"), ("bufr-sliced", "sliced"), ("fr-paper", "paper")])
def test_a_cell_adapts_with_the_profile_of_its_preset(shop: Workshop, row: str, preset: str) -> None:
    result = run_cell(shop, cell_of(row))
    setting = MIXED.settings["offline"][row]
    expected = shiftmend.adapt(
        shop.model("plain", 1)[0],
        load_target("dim", None).adapt.images,
        by_hand(shop, preset, 0.01),
        setting.method,
        batch_size=32,
        seed=1,
        preprocess=MIXED.preprocess,
        progress=False,
        **setting.options,
    )
    assert result.error is None
    assert result.manifest["preset"] == preset
    assert result.manifest["adapted_weights"] == expected.manifest["adapted_weights"]
    usual = run_cell(shop, cell_of(setting.method))
    assert usual.manifest["preset"] == "reference"
    assert usual.manifest["adapted_weights"] != result.manifest["adapted_weights"]
    assert usual.manifest["source_weights"] == result.manifest["source_weights"]


def test_a_stream_has_the_profile_of_its_preset_too(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[shiftmend.Profile] = []
    stream = shiftmend.stream

    def noted(model: Any, profile: shiftmend.Profile, *given: Any, **named: Any) -> Any:
        used.append(profile)
        return stream(model, profile, *given, **named)

    monkeypatch.setattr(shiftmend, "stream", noted)
    sliced, usual = (run_cell(shop, cell_of(row, "online")) for row in ("fr-sliced", "fr"))
    assert [sliced.error, usual.error] == [None, None]
    assert [(profile.preset, profile.bins.temperature) for profile in used] == [("sliced", 0.05), ("reference", 0.05)]
    assert [sliced.manifest["preset"], usual.manifest["preset"]] == ["sliced", "reference"]
    assert sliced.last != usual.last


def test_a_failed_cell_says_its_preset_as_well(tmp_path: Path) -> None:
    def absent(*_: Any) -> Any:
        raise DataError("file x is missing")

    broken = Workshop(replace(MIXED, load_source=absent), tmp_path, None, "cpu")
    result = run_cell(broken, cell_of("fr-sliced"))
    assert result.error == "file x is missing"
    assert result.manifest["preset"] == "sliced"


def test_old_results_stay_and_new_rows_are_what_is_missing(tmp_path: Path, results: list[Result]) -> None:
    """A store that was filled when the benchmark had no such rows."""
    with Store(tmp_path / "results.sqlite") as store:
        for result in results:
            if not result.cell.method.endswith("-sliced"):
                store.record(result)
        known = store.cells()
    before = plan(BENCHMARK, methods=["source-only", "fr", "bufr"], shifts=["dim", "inverse"])
    assert set(known) == set(before)
    todo = [cell for cell in plan(MIXED, methods=ROWS, shifts=["dim", "inverse"]) if cell not in known]
    assert {cell.method for cell in todo} == {"fr-sliced", "bufr-sliced"}
    assert len(todo) == 8


def test_rows_are_compared_like_methods(results: list[Result]) -> None:
    rows = {row.shift: row for row in compare(results, "fr-sliced", "fr")}
    assert set(rows) == {"dim", "inverse", None}
    accuracy = {
        (result.cell.method, result.cell.shift, result.cell.seed): result.last.accuracy  # type: ignore[union-attr]
        for result in results
    }
    for shift in ("dim", "inverse"):
        differences = [accuracy["fr-sliced", shift, seed] - accuracy["fr", shift, seed] for seed in (1, 2)]
        assert rows[shift].pairs == 2
        assert rows[shift].difference == pytest.approx(np.mean(differences))
    restoration = restoration_and_calibration(results)
    assert set(restoration.means) == set(ROWS)
    assert restoration.places == 4
    assert signals_and_accuracy(results)["slices"].overall.points == len(results)


@pytest.mark.parametrize("format", ["terminal", "markdown", "html", "latex"])
@pytest.mark.parametrize("make", [summary, per_shift])
def test_rows_stand_in_every_table(results: list[Result], format: Format, make: Any) -> None:
    table = make(results, benchmark="small", protocol="offline", methods=ROWS, shifts=["dim", "inverse"])
    text = render(table, format, width=200)
    mean = 100 * np.mean([result.last.accuracy for result in results if result.cell.method == "bufr-sliced"])
    for row in ROWS:
        assert row in text
    assert f"{mean:.1f} " in text
