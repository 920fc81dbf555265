"""What is said of cells without their labels: every figure of the tables worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from small_worlds import BENCHMARK

from shiftmend.research.bench.benchmark import Cell, Outcome, Result
from shiftmend.research.bench.pages import Part, few_verdicts, signals, verification
from shiftmend.research.bench.results import Reading
from shiftmend.research.bench.tables import Table

JUDGED = {"floor": 0.0001, "samples": 1000}
CELLS = (  # method, shift, accuracy, divergence of the slices
    ("source-only", "dim", 0.5, 0.5),
    ("fr", "dim", 0.85, 0.002),
    ("bufr", "dim", 0.78, 0.004),
    ("shot", "dim", 0.86, 0.001),  # from a source model of its own
    ("target-supervised", "dim", 0.95, 0.001),
    ("source-only", "inverse", 0.82, 0.0025),
    ("fr", "inverse", 0.3, 0.7),
    ("bufr", "inverse", 0.88, 0.002),
)


def result(
    method: str, shift: str, accuracy: float, slices: float, seed: int = 1, protocol: str = "offline", **after: Any
) -> Result:
    """Confidence tells the accuracy, entropy tells the opposite of what it should."""
    told = {"slices": slices, "marginals": 2 * slices, "entropy": accuracy, "confidence": accuracy}
    manifest = {"method": {"name": method.removesuffix("-sliced")}, "verification": {"after": JUDGED | after}}
    cell = Cell("small", protocol, method, shift, seed, method)
    return Result(cell, "own", Outcome(1, accuracy, 0.1, 0.1, 0.1, 0.1), signals=told, manifest=manifest)


CLEAN = [result("source-only", "clean", 0.9, 0.0)]  # of the first seed alone


def part(results: Sequence[Result], protocol: str = "offline", clean: Sequence[Result] = CLEAN, **changes: Any) -> Part:
    cells = [one.cell for one in results]
    return Part(protocol, Reading(replace(BENCHMARK, **changes), cells, list(results), list(clean), 0))


def shown(table: object) -> dict[str, list[object]]:
    """The rows of a table, numbers to a hundredth."""
    assert isinstance(table, Table)
    return {
        row.label: [entry.text or (None if entry.value is None else round(entry.value, 2)) for entry in row.entries]
        for row in table.rows
    }


def test_every_figure_of_the_signals() -> None:
    made = [result(*cell) for cell in CELLS]
    another_seed = result("fr", "dim", 0.1, 0.9, seed=2)
    correlated, near, better, verdicts = signals(part([*made, another_seed]))
    # of eight cells, without the supervised one; over all of them two divergences are equal: -40 / sqrt(42 * 41.5)
    assert shown(correlated)["confidence"] == [1.0, 2, 1.0, 8]
    assert shown(correlated)["entropy"] == [1.0, 2, 1.0, 8]
    assert shown(correlated)["slices"] == [-1.0, 2, -0.96, 8]

    # good: 0.85, 0.82 and 0.88, of 0.9 at home; held out, each shift's threshold is half way between the other's kinds,
    # which lets one of three bad ones through
    held_out = [83.33, 33.33, 0.0]
    assert shown(near) == {
        "slices": [1.0, "≤ 0.00325", 100.0, *held_out],
        "marginals": [1.0, "≤ 0.0065", 100.0, *held_out],
        "entropy": [0.0, "never", 50.0, 50.0, 0.0, 100.0],
        "confidence": [1.0, "≥ 0.8", 100.0, *held_out],
        "slices and marginals": [None, "slices ≤ 0.00325 and marginals ≤ 0.0065", 100.0, *held_out],
    }
    assert isinstance(near, Table)
    assert [(column.heading, column.title, column.digits) for column in near.columns] == [
        ("", "AUC", 2),
        ("", "accept if", 1),
        ("", "balanced accuracy", 1),
        ("held-out shifts", "balanced accuracy", 1),
        ("held-out shifts", "bad ones accepted", 1),
        ("held-out shifts", "good ones rejected", 1),
    ]
    meaning = "accuracy at most 10 points below that of the source model on clean images"
    said = f"good: {meaning} (left out: 1 cells that start from another model)"
    assert near.notes[0] == f"{said}; cells that are: 3, that are not: 3"
    assert near.notes[-1] == "cells of the rarer kind: 3; read with care"
    assert isinstance(better, Table)
    assert better.notes[0].endswith("cells that are: 4, that are not: 1")
    # bufr on dim is the one that is taken for good
    assert shown(verdicts) == {"restored": [3, 1], "not restored": [0, 2]}
    assert isinstance(verdicts, Table)
    assert verdicts.notes == (said,)


def test_a_signal_that_was_not_measured_judges_nothing() -> None:
    made = [result(*cell) for cell in CELLS]
    near = signals(part([replace(one, signals={"slices": one.signals["slices"]}) for one in made]))[1]
    assert {name: row for name, row in shown(near).items() if name != "slices"} == dict.fromkeys(
        ("marginals", "entropy", "confidence", "slices and marginals"), [None] * 6
    )


def test_what_a_correlation_leaves_out_is_said() -> None:
    """A run that has diverged has no signal to rank."""
    made = [result(*cell) for cell in CELLS]
    diverged = replace(result("fr", "dim", 0.1, 0.9, seed=2), signals={"slices": math.nan, "entropy": 0.5})
    correlated = signals(part([*made, diverged]))[0]
    assert [row[3] for row in shown(correlated).values()] == [7, 7, 8, 7]
    assert isinstance(correlated, Table)
    assert correlated.notes[1:] == ("slices: left out 1 whose signal or accuracy is not a number",)
    unmeasured = signals(part([replace(one, signals={"slices": one.signals["slices"]}) for one in made]))[0]
    assert isinstance(unmeasured, Table)
    assert unmeasured.notes[1] == "marginals: too few points, expected at least 3"
    whole = signals(part(made))[0]
    assert isinstance(whole, Table)
    assert len(whole.notes) == 1


@pytest.mark.parametrize(
    ("clean", "said"), [((), "0 cells are good and 0 bad"), ((1.1,), "0 cells are good and 6 bad"), ((0.1,), "6 cells")]
)
def test_one_kind_alone_leaves_nothing_to_tell_apart(clean: Sequence[float], said: str) -> None:
    at_home = [result("source-only", "clean", accuracy, 0.0) for accuracy in clean]
    _, near, better, *verdicts = signals(part([result(*cell) for cell in CELLS], clean=at_home))
    assert isinstance(near, str)
    assert f": {said}" in near
    assert isinstance(better, Table)
    assert len(verdicts) == len(clean)  # with cells that are neither good nor bad there is nothing to count


def test_ten_cells_of_a_kind_need_no_warning() -> None:
    def made(number: int) -> list[Result]:
        good = [result(f"fr-{n}", "dim", 0.9, 0.001 * n) for n in range(number)]
        return good + [result(f"fr-{n}", "inverse", 0.1, 0.5 + n) for n in range(number)]

    settings = {"offline": {f"fr-{n}": BENCHMARK.settings["offline"]["fr"] for n in range(10)}}
    settings["offline"] |= {"source-only": BENCHMARK.settings["offline"]["source-only"]}
    for number, warned in ((9, True), (10, False)):
        near = signals(part(made(number), settings=settings))[1]
        assert isinstance(near, Table)
        assert any("read with care" in note for note in near.notes) == warned


@pytest.mark.parametrize(
    ("method", "after", "expected"),
    [
        # half of the floor may be chance in what was not adapted, and in what was, all of it or nothing
        ("source-only", {"floor": 0.004}, "restored"),
        ("fr", {"floor": 0.004}, "partly restored"),
        ("fr", {"floor": 0.004, "adapted": False}, "restored"),
        ("source-only", {"floor": 0.004, "adapted": True}, "partly restored"),
    ],
)
def test_a_cell_is_judged_by_whether_its_model_was_adapted(method: str, after: dict[str, Any], expected: str) -> None:
    judged = verification(result(method, "dim", 0.5, 0.006, source_samples=70, **after))
    assert judged is not None
    assert (judged.verdict, judged.samples, judged.source_samples) == (expected, 1000, 70)


@pytest.mark.parametrize(
    ("marginals", "expected"),
    [({}, "restored"), ({"marginals": 0.009}, "restored"), ({"marginals": 0.03}, "partly restored")],
)
def test_a_cell_is_judged_by_its_marginals_too(marginals: dict[str, float], expected: str) -> None:
    judged = verification(replace(result("full-gauss", "dim", 0.5, 0.003), signals={"slices": 0.003} | marginals))
    assert judged is not None
    assert (judged.divergence, judged.marginals, judged.verdict) == (0.003, marginals.get("marginals"), expected)


def test_a_cell_that_was_not_measured_is_not_judged() -> None:
    whole = result("fr", "dim", 0.5, 0.006)
    assert verification(replace(whole, signals={"entropy": 0.1})) is None
    assert verification(replace(whole, manifest={"method": {"name": "fr"}})) is None


def test_few_images_are_judged_by_the_methods_that_restore_features() -> None:
    """Of the same source model as the clean images; a variant goes by the method it is one of."""
    rows = BENCHMARK.settings["offline"]
    changes = {
        "settings": {"offline": rows, "few-shot-5": {**rows, "fr-sliced": rows["fr"]}},
        "source_for": lambda setting, shift: "shot" if shift == "apart" else setting.source,
    }
    few = [
        result(*cell, protocol="few-shot-5")
        for cell in (*CELLS, ("fr-sliced", "dim", 0.86, 0.0065), ("fr", "apart", 0.9, 0.001))
    ]
    parts = {
        "offline": part([], **changes),
        "few-shot-5": part(few, "few-shot-5", clean=(), **changes),
        "few-shot-10": part([], "few-shot-10", **changes),
    }
    (table,) = few_verdicts(parts)
    assert isinstance(table, Table)
    assert [(column.heading, column.title) for column in table.columns] == [("5 a class", "good"), ("5 a class", "bad")]
    said = "good: accuracy at most 10 points below that of the source model plain (of dim, inverse) on clean images"
    assert table.notes == (f"{said} (left out: 1 cells that start from another model)",)
    assert shown(table) == {"restored": [2, 1], "partly restored": [1, 0], "not restored": [0, 1]}
    near = [one for one in few if one.cell.shift != "apart"]
    (table,) = few_verdicts(parts | {"few-shot-5": part(near, "few-shot-5", clean=(), **changes)})
    assert isinstance(table, Table)
    assert table.notes == (said,)
