"""Which stored results belong to a benchmark as it is now."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from shiftmend.engine.method import describe_method
from shiftmend.errors import DataError
from shiftmend.methods import method
from shiftmend.research.bench import footnotes
from shiftmend.research.bench import results as reading
from shiftmend.research.bench.benchmark import Benchmark, Cell, Origin, Outcome, Result
from shiftmend.research.bench.plan import UNUSED_ONLINE, plan, settings_of
from shiftmend.research.bench.results import read
from shiftmend.research.bench.store import STORE, Store, load_results, to_compact
from shiftmend.research.bench.suite import find


def record(folder: Path, benchmark: Benchmark, cells: list[Cell]) -> None:
    outcome = Outcome(1, 0.5, 0.1, 0.2, 1.0, 0.3)
    with Store(folder / STORE) as store:
        for cell in cells:
            store.record(Result(cell, benchmark.origin(cell.shift, None), outcome, outcome, outcome, finished="2022"))


def test_cells_of_other_settings_are_counted_but_not_read(tmp_path: Path) -> None:
    digits = find("digits")
    now = plan(digits, methods=["fr", "source-only"])
    before = [replace(cell, recipe="before") for cell in now[:3]]
    elsewhere = [replace(cell, benchmark="usps") for cell in now[:2]]
    record(tmp_path, digits, [*now, *before, *elsewhere, *plan(digits, "online", methods=["adabn"])])
    found = read("digits", tmp_path, methods=["fr", "source-only"])
    assert {result.cell for result in found.results} == set(now)
    assert found.others == 3
    assert found.methods == ["source-only", "fr"]
    assert sorted(result.cell.seed for result in found.clean) == [123, 234]
    # each choice narrows what is counted as well
    assert read("digits", tmp_path, methods=["bufr"]).others == 0
    second = read("digits", tmp_path, methods=["fr"], seeds=[234])
    assert (len(second.results), second.others, {cell.seed for cell in before}) == (3, 0, {123})
    # with learning rates of one's own, those of the benchmark's are other results
    tried = read("digits", tmp_path, methods=["fr"], rates=[0.1, 1.0])
    assert (tried.results, tried.others) == ([], 6 + sum(cell.method == "fr" for cell in before))
    assert len(read("digits", tmp_path, "online").clean) == 2


def test_results_from_before_kl_was_divided_are_read_with_a_remark_until_they_are_run_again(tmp_path: Path) -> None:
    cifar = find("cifar-10-c")
    choice: dict[str, Any] = {"methods": ["fr", "fr-one-sided"], "shifts": ["fog", "snow"], "seeds": [123]}
    now, before = plan(cifar, **choice), plan(cifar, former=True, **choice)
    assert [cell.recipe == other.recipe for cell, other in zip(now, before, strict=True)] == [True, False, True, False]
    record(tmp_path, cifar, before)
    record(tmp_path, cifar, [cell for cell in now if cell.shift == "snow"])
    found = read("cifar-10-c", tmp_path, methods=choice["methods"], seeds=[123])
    assert {result.cell for result in found.results} == set(now)
    marked = [result for result in found.results if "outdated" in result.manifest]
    assert [(result.cell.method, result.cell.shift) for result in marked] == [("fr-one-sided", "fog")]
    (note,) = footnotes.about_outdated(found.results)
    assert "fr-one-sided" in note
    assert "ln 10" in note
    # A run does not take them for its own.
    with Store(tmp_path / STORE) as store:
        assert marked[0].cell not in store.cells()


def test_the_severest_shift_is_that_of_the_lowest_adabn_and_stands_beside_the_papers(tmp_path: Path) -> None:
    benchmark = find("emnist-da")
    cells = plan(benchmark, methods=["adabn"], seeds=[123, 234])
    shifts = [shift for shift in benchmark.shifts if shift != "shot_noise"]
    shifts = ["inverse", *(shift for shift in shifts if shift != "inverse"), "shot_noise"]
    with Store(tmp_path / STORE) as store:
        for cell in cells:
            score = Outcome(1, 0.1 + 0.05 * shifts.index(cell.shift), 0.1, 0.2, 1.0, 0.3)
            store.record(Result(cell, benchmark.origin(cell.shift, None), score, score, score, finished="2022"))
    groups = read("emnist-da", tmp_path, methods=["adabn"]).groups
    # Shot noise is the mildest in the paper and here.
    assert groups == {**benchmark.groups, "severe here": ("inverse",)}
    assert groups["severe"] == ("sky",)
    few = read("emnist-da", tmp_path, methods=["fr"])
    assert few.groups == benchmark.groups


def test_other_seeds_count_as_far_as_they_have_been_run(tmp_path: Path) -> None:
    digits = find("digits")
    extra = plan(digits, methods=["fr"], shifts=["stripe"], seeds=[5])
    record(tmp_path, digits, extra)
    found = read("digits", tmp_path, methods=["fr"])
    assert found.cells == [*plan(digits, methods=["fr"]), *extra]
    assert [result.cell for result in found.results] == extra
    # a cell that was planned stands once, also when it is done; and who asks for some seeds or methods gets no others
    usual = plan(digits, methods=["fr"], seeds=[123])
    at_home = plan(digits, methods=["source-only"], shifts=["clean"], seeds=[5])
    record(tmp_path, digits, [*usual, *at_home])
    found = read("digits", tmp_path, methods=["fr"])
    assert found.cells == [*plan(digits, methods=["fr"]), *extra]
    assert {result.cell for result in found.results} == {*usual, *extra}
    assert [result.cell for result in found.clean] == at_home
    assert {result.cell for result in read("digits", tmp_path, methods=["fr"], seeds=[123]).results} == set(usual)
    assert read("digits", tmp_path, methods=["bufr"]).results == []


def test_the_origin_is_that_of_the_store_where_a_run_here_has_another(tmp_path: Path) -> None:
    here = find("emnist-da")
    there = replace(here, origin=lambda shift, root: "published")
    cells = plan(there, methods=["fr"], seeds=[123])
    record(tmp_path, there, cells)
    assert {result.cell for result in read("emnist-da", tmp_path, methods=["fr"]).results} == set(cells)
    rebuilt = plan(here, methods=["fr"], shifts=["sky"], seeds=[123])
    record(tmp_path, here, rebuilt)
    found = {result.cell.shift: result for result in read("emnist-da", tmp_path, methods=["fr"]).results}
    assert found["sky"].cell == rebuilt[0]
    assert found["fog"].origin == "published"


def test_a_failure_here_hides_nothing_that_was_done_elsewhere(tmp_path: Path) -> None:
    here = find("emnist-da")
    there = replace(here, origin=lambda shift, root: "published")
    cells = plan(there, methods=["fr"], shifts=["sky"], seeds=[123])
    (tried,) = plan(here, methods=["fr"], shifts=["sky"], seeds=[234])
    with Store(tmp_path / STORE) as store:
        store.record(Result(tried, here.origin("sky", None), error="out of memory", finished="2023"))
    assert [result.cell for result in read("emnist-da", tmp_path, methods=["fr"]).results] == [tried]
    record(tmp_path, there, cells)
    found = read("emnist-da", tmp_path, methods=["fr"])
    assert [result.cell for result in found.results] == cells
    assert found.others == 1


@pytest.mark.parametrize("latest", ["published", "regenerated"])
def test_of_several_origins_the_one_done_last_counts(tmp_path: Path, latest: Origin) -> None:
    """A failure, however late, has nothing to show."""
    here = find("emnist-da")
    outcome = Outcome(1, 0.5, 0.1, 0.2, 1.0, 0.3)
    with Store(tmp_path / STORE) as store:
        for origin in get_args(Origin):
            if origin == here.origin("sky", None):
                continue
            there = replace(here, origin=lambda shift, root, origin=origin: origin)
            (cell,) = plan(there, methods=["fr"], shifts=["sky"], seeds=[123])
            done = Result(cell, origin, outcome, finished="2022-02" if origin == latest else "2022-01")
            store.record(replace(done, last=None, error="full", finished="2022-03") if origin == "own" else done)
    assert [result.origin for result in read("emnist-da", tmp_path, methods=["fr"]).results] == [latest]


def test_the_data_folder_decides_which_cells_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = replace(find("digits"), origin=lambda shift, root: "own" if root is None else "published")
    monkeypatch.setattr(reading, "find", lambda name: places)
    record(tmp_path, places, [])
    for root in (None, tmp_path):
        assert read("digits", tmp_path, methods=["fr"], root=root).cells == plan(places, methods=["fr"], root=root)
    assert plan(places, methods=["fr"]) != plan(places, methods=["fr"], root=tmp_path)


def test_a_compact_export_is_read_as_the_store_it_was_made_from(tmp_path: Path) -> None:
    digits = find("digits")
    record(tmp_path, digits, [*plan(digits, methods=["fr", "source-only"]), *plan(digits, "online", methods=["fr"])])
    file = tmp_path / "digits.json"
    file.write_text(to_compact(load_results(tmp_path)))
    for protocol in ("offline", "online"):
        assert read("digits", file, protocol) == read("digits", tmp_path, protocol)
    assert load_results(file, "emnist-da") == []


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="no JSON"):
        read("digits", tmp_path / "file")
    with pytest.raises(DataError, match="Expected a store"):
        read("digits", tmp_path)


# ---- What lies in `results/` is what the code of today would make: a changed setting or default makes cells stale

BY_SCRIPTS = (
    "harm",
    "streams",
    "private",
    "private-membership",
    "other-shares",
    "label-shift",
    "real-instruments",
    "real-instruments-single",
    "refining",
    "time-to-mend",
    "time-to-mend-curves",
    "architectures",
    "emnist-da-analyses",
    "unrehearsed",
    "selections",
)
"""Files in `results/` that scripts in `benchmarks/` write, in a form of their own."""
FILES = sorted(file for file in (Path(__file__).parents[3] / "results").glob("*.json") if file.stem not in BY_SCRIPTS)


def test_there_are_results() -> None:
    assert len(FILES) >= 6


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_results_are_of_todays_recipes(file: Path) -> None:
    for protocol in sorted({result.cell.protocol for result in load_results(file)}):
        reading = read(file.stem, file, protocol)
        assert reading.results
        assert reading.others == 0


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_results_are_of_todays_options_and_defaults(file: Path) -> None:
    benchmark = find(file.stem)
    for result in load_results(file):
        setting = settings_of(benchmark, result.cell.protocol)[result.cell.method]
        options = {**setting.options, **({"labels": [0]} if setting.method == "target-supervised" else {})}
        today = describe_method(method(setting.method, **options))
        without = ("labels_sha256", *(UNUSED_ONLINE if result.cell.protocol == "online" else ()))
        assert _leave_out(without, result.manifest["method"]) == _leave_out(without, today), result.cell


def _leave_out(names: Sequence[str], facts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in json.loads(json.dumps(facts)).items() if name not in names}
