"""Tables against means written out with numpy; what is left out, what is marked and what is said at the foot."""

import itertools
import subprocess
import sys
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shiftmend.errors import DataError
from shiftmend.research.analysis.comparisons import compare
from shiftmend.research.bench import footnotes
from shiftmend.research.bench.benchmark import Cell, Outcome, Result
from shiftmend.research.bench.grids import Grid
from shiftmend.research.bench.rendering import Table
from shiftmend.research.bench.suite import find
from shiftmend.research.bench.tables import (
    across,
    add_quoted,
    drop_means,
    keep_columns,
    per_shift,
    put_beside,
    selection,
    summary,
)

METHODS = ("source-only", "adabn", "bufr")
SHIFTS = ("fog", "sky", "stripe", "zigzag")
GROUPS = {"without backgrounds": ("fog", "stripe", "zigzag"), "severe": ("sky",)}
SEEDS = (123, 234, 345)
NAMES = {"benchmark": "emnist-da", "protocol": "offline"}


@dataclass(frozen=True)
class Figure:
    mean: float
    deviation: float | None = None


def nothing_published(*_, source):
    return None


def result(method="bufr", shift="fog", seed=123, accuracy=0.5, *, origin="published", error=None, **known):
    cell = Cell("emnist-da", "offline", method, shift, seed, "recipe")
    if error is not None:
        return Result(cell, origin, error=error, **known)
    outcome = Outcome(3, accuracy, ece=accuracy / 2, mce=accuracy / 3, nll=accuracy * 4, brier=accuracy / 5)
    known = {"last": outcome, "best": outcome, "selected": outcome} | known
    return Result(cell, origin, **known)


def grid(methods=METHODS, shifts=SHIFTS, seeds=SEEDS, seed=0) -> tuple[np.ndarray, list[Result]]:
    """Accuracies by method, shift and seed, and the same as results."""
    accuracies = np.random.default_rng(seed).uniform(0.1, 0.9, (len(methods), len(shifts), len(seeds)))
    results = [
        result(method, shift, number, accuracies[i, j, k])
        for (i, method), (j, shift), (k, number) in itertools.product(
            enumerate(methods), enumerate(shifts), enumerate(seeds)
        )
    ]
    return accuracies, results


def summarise(results, methods=METHODS, shifts=SHIFTS, groups=GROUPS, published=nothing_published, **options) -> Table:
    return summary(results, **NAMES, methods=methods, shifts=shifts, groups=groups, published=published, **options)


def by_shift(results, methods=METHODS, shifts=SHIFTS, groups=None, published=nothing_published, **options) -> Table:
    return per_shift(results, **NAMES, methods=methods, shifts=shifts, groups=groups, published=published, **options)


def entry(table: Table, row: str, heading: str, title: str | None = None):
    [line] = [line for line in table.rows if line.label == row]
    [found] = [
        line
        for line, column in zip(line.entries, table.columns, strict=True)
        if (column.heading, column.title) == (heading, title) or (title is None and column.title == heading)
    ]
    return found


def best(table: Table) -> set[tuple[str, int]]:
    return {(row.label, index) for row in table.rows for index, cell in enumerate(row.entries) if cell.best}


def note(table: Table, part: str) -> str:
    found = [text for text in table.notes if part in text]
    assert len(found) == 1, table.notes
    return found[0]


def test_summary_is_mean_and_sample_deviation_over_seeds_of_the_mean_over_shifts():
    accuracies, results = grid()
    table = summarise(results)
    assert [row.label for row in table.rows] == list(METHODS)
    assert [column.title for column in table.columns] == ["all 4 shifts", "without backgrounds (3)", "severe (sky)"]
    assert {column.heading for column in table.columns} == {""}
    for i, method in enumerate(METHODS):
        for heading, members in (
            ("all 4 shifts", [0, 1, 2, 3]),
            ("without backgrounds (3)", [0, 2, 3]),
            ("severe (sky)", [1]),
        ):
            per_seed = 100 * accuracies[i][members].mean(axis=0)
            cell = entry(table, method, heading)
            assert cell.value == pytest.approx(per_seed.mean(), abs=1e-10)
            assert cell.deviation == pytest.approx(
                np.sqrt(((per_seed - per_seed.mean()) ** 2).sum() / (len(SEEDS) - 1)), abs=1e-10
            )
            assert cell.seeds == SEEDS


def test_per_shift_has_a_row_a_shift_and_the_means_below():
    accuracies, results = grid()
    table = by_shift(results, groups=GROUPS)
    assert [(row.label, row.summary) for row in table.rows] == [
        ("fog", False),
        ("sky", False),
        ("stripe", False),
        ("zigzag", False),
        ("all 4 shifts", True),
        ("without backgrounds (3)", True),
    ]
    for i, method in enumerate(METHODS):
        for j, shift in enumerate(SHIFTS):
            cell = entry(table, shift, method)
            assert cell.value == pytest.approx(100 * np.mean(accuracies[i, j]), abs=1e-10)
            assert cell.deviation == pytest.approx(100 * np.std(accuracies[i, j], ddof=1), abs=1e-10)
        whole = entry(table, "all 4 shifts", method)
        assert whole.value == pytest.approx(100 * accuracies[i].mean(), abs=1e-10)
        assert whole.deviation == pytest.approx(100 * accuracies[i].mean(axis=0).std(ddof=1), abs=1e-10)


def test_two_shifts_are_enough_for_a_mean():
    accuracies, results = grid(shifts=SHIFTS[:2])
    table = by_shift(results, shifts=SHIFTS[:2])
    assert [(row.label, row.summary) for row in table.rows] == [("fog", False), ("sky", False), ("both shifts", True)]
    assert entry(table, "both shifts", "bufr").value == pytest.approx(100 * accuracies[2].mean(), abs=1e-10)


def test_one_seed_has_no_deviation():
    _, results = grid(seeds=(123,))
    table = summarise(results)
    assert all(cell.value is not None and cell.deviation is None for row in table.rows for cell in row.entries)
    assert note(table, "seed") == "one seed, hence no standard deviation"


def test_a_mean_is_over_the_seeds_that_have_every_shift():
    accuracies, results = grid()
    results = [r for r in results if (r.cell.method, r.cell.shift, r.cell.seed) != ("bufr", "sky", 234)]
    table = summarise(results)
    per_seed = 100 * accuracies[2][:, [0, 2]].mean(axis=0)
    cell = entry(table, "bufr", "all 4 shifts")
    assert (cell.value, cell.seeds, cell.unfinished) == (pytest.approx(per_seed.mean()), (123, 345), (234,))
    assert cell.deviation == pytest.approx(per_seed.std(ddof=1))
    assert entry(table, "bufr", "without backgrounds (3)").seeds == SEEDS
    assert [entry(table, method, "seeds").text for method in METHODS] == ["3", "3", "2 to 3"]
    seeds = "mean ± standard deviation over 2 to 3 seeds, see the column of seeds"
    assert note(table, "deviation") == f"{seeds}; bufr has 3 for without backgrounds"
    assert note(table, "left out") == "a mean is over the seeds that have all of its shifts; left out: seed 234 of bufr"


def test_a_set_that_no_seed_has_is_counted_and_not_averaged():
    _, results = grid(seeds=(123,))
    results = [r for r in results if r.cell.method != "bufr" or r.cell.shift == "fog"]
    table = summarise(results, published=lambda *_, source: Figure(0.8))
    for heading, text in (("all 4 shifts", "1/4"), ("without backgrounds (3)", "1/3"), ("severe (sky)", "")):
        ours = entry(table, "bufr", heading, "ours")
        assert (ours.value, ours.deviation, ours.text) == (None, None, text)
        assert entry(table, "bufr", heading, "paper").value == pytest.approx(80)
        assert entry(table, "bufr", heading, "difference").value is None
        assert entry(table, "adabn", heading, "difference").value is not None
    assert note(table, "a fraction counts the cells")


def test_cells_are_counted_over_all_seeds():
    _, results = grid()
    results = [
        r for r in results if r.cell.method != "bufr" or (r.cell.shift, r.cell.seed) in {("fog", 123), ("sky", 234)}
    ]
    assert entry(summarise(results), "bufr", "all 4 shifts").text == "2/12"


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_subset_of_cells_agrees_with_numpy(data):
    accuracies, results = grid(methods=("bufr",))
    there = np.array(data.draw(st.lists(st.booleans(), min_size=12, max_size=12))).reshape(4, 3)
    failed = np.array(data.draw(st.lists(st.booleans(), min_size=12, max_size=12))).reshape(4, 3) & there
    kept = []
    for index, item in enumerate(results):
        j, k = divmod(index, 3)
        if failed[j, k]:
            kept.append(result("bufr", item.cell.shift, item.cell.seed, error="broken"))
        elif there[j, k]:
            kept.append(item)
    table = summarise(data.draw(st.permutations(kept)), methods=("bufr",))
    done = there & ~failed
    complete = done.all(axis=0)
    cell = entry(table, "bufr", "all 4 shifts")
    if complete.any():
        per_seed = 100 * accuracies[0][:, complete].mean(axis=0)
        assert cell.value == pytest.approx(per_seed.mean())
        assert cell.deviation == (pytest.approx(per_seed.std(ddof=1), abs=1e-9) if complete.sum() > 1 else None)
        assert cell.text == ""
    else:
        assert cell.value is None
        assert cell.text == (f"{done.sum()}/{4 * there.any(axis=0).sum()}" if there.any() else "")


def test_the_published_figure_and_the_difference():
    accuracies, results = grid()
    asked = []

    def published(benchmark, protocol, metric, method, shift, *, source):
        asked.append((benchmark, protocol, metric, source))
        return {("bufr", "all"): Figure(0.861, 0.001), ("bufr", "sky"): Figure(0.846)}.get((method, shift))

    table = summarise(results, published=published, beside="re-run")
    assert set(asked) == {("emnist-da", "offline", "accuracy", "re-run")}
    headings = [(column.heading, column.title) for column in table.columns]
    assert headings == [  # nothing is published about the second group, so that it has but one column
        ("all 4 shifts", "ours"),
        ("all 4 shifts", "re-run"),
        ("all 4 shifts", "difference"),
        ("without backgrounds (3)", "ours"),
        ("severe (sky)", "ours"),
        ("severe (sky)", "re-run"),
        ("severe (sky)", "difference"),
    ]
    there = entry(table, "bufr", "all 4 shifts", "re-run")
    assert (there.value, there.deviation) == (pytest.approx(86.1), pytest.approx(0.1))
    ours = 100 * accuracies[2].mean()
    assert entry(table, "bufr", "all 4 shifts", "difference").value == pytest.approx(ours - 86.1)
    severe = entry(table, "bufr", "severe (sky)", "difference").value
    assert severe == pytest.approx(100 * accuracies[2, 1].mean() - 84.6)  # by the shift's name, as there is no summary
    assert entry(table, "adabn", "all 4 shifts", "re-run").value is None
    assert entry(table, "adabn", "all 4 shifts", "difference").value is None
    assert note(table, "minus") == "difference is ours minus the re-run's"
    assert note(table, "released code")


def test_per_shift_asks_for_each_shift():
    accuracies, results = grid()
    table = by_shift(results, published=lambda *asked, source: {"fog": Figure(0.5)}.get(asked[-1]))
    assert entry(table, "fog", "adabn", "difference").value == pytest.approx(100 * accuracies[1, 0].mean() - 50)
    assert entry(table, "sky", "adabn", "paper").value is None
    assert entry(table, "all 4 shifts", "adabn", "paper").value is None


def test_the_paper_is_the_default():
    table = summary([result()], **NAMES, methods=["bufr"], shifts=["fog"], groups={})
    # Table of the paper: BUFR on EMNIST-DA, mean over all shifts.
    assert table.rows[0].entries[1].value == pytest.approx(86.1)
    assert [column.title for column in table.columns] == ["ours", "paper", "difference"]


def test_without_anything_beside_nobody_is_asked():
    def published(*_, source):
        raise AssertionError

    table = summarise(grid()[1], beside=None, published=published)
    assert {column.kind for column in table.columns} == {"ours"}
    assert not [text for text in table.notes if "paper" in text or "minus" in text]
    assert note(summarise(grid()[1]), "no figures") == "the paper has no figures for this table"


@pytest.mark.parametrize(("metric", "first"), [("accuracy", "bufr"), ("ece", "adabn"), ("nll", "adabn")])
def test_best_is_highest_or_lowest(metric, first):
    results = [result("adabn", "fog", accuracy=0.3), result("bufr", "fog", accuracy=0.6)]
    options = {"methods": ("adabn", "bufr"), "shifts": ("fog",), "metric": metric}
    assert best(summarise(results, groups=None, **options)) == {(first, 0)}
    table = by_shift(results, **options)
    assert best(table) == {("fog", ("adabn", "bufr").index(first))}
    assert table.marked == f"{'highest' if metric == 'accuracy' else 'lowest'} of its row"


def test_who_saw_labels_is_not_best():
    results = [result(method, accuracy=a) for method, a in (("adabn", 0.3), ("bufr", 0.6), ("target-supervised", 0.9))]
    table = summarise(results, methods=("adabn", "bufr", "target-supervised"), shifts=("fog",), groups=None)
    assert best(table) == {("bufr", 0)}
    assert table.marked == "highest of its column among methods that saw no labels"
    without = [r for r in results if r.cell.method != "target-supervised"]
    missing = summarise(without, methods=("adabn", "bufr", "target-supervised"), shifts=("fog",), groups=None)
    assert best(missing) == {("bufr", 0)}


def test_nothing_is_best_while_a_rival_lacks_a_cell():
    _, results = grid()
    complete = best(summarise(results))
    assert {index for _, index in complete} == {0, 1, 2}
    lacking = [r for r in results if (r.cell.method, r.cell.shift, r.cell.seed) != ("adabn", "sky", 123)]
    table = summarise(lacking)
    assert table.columns[0].title == "seeds"
    assert best(table) == {(label, index + 1) for label, index in complete if index == 1}
    assert table.marked
    assert note(table, "none is marked as best") == footnotes.NO_BEST
    assert footnotes.NO_BEST not in summarise(results).notes
    assert best(summarise(results, methods=("bufr",))) == set()  # first of one


def test_equal_to_the_digit_shown_is_equally_good():
    results = [result("adabn", accuracy=0.60002), result("bufr", accuracy=0.6), result("fr", accuracy=0.58)]
    table = summarise(results, methods=("adabn", "bufr", "fr"), shifts=("fog",), groups=None)
    assert best(table) == {("adabn", 0), ("bufr", 0)}


def test_a_diverged_run_is_shown_and_never_best():
    results = [result("adabn", accuracy=float("nan")), result("bufr", accuracy=0.3), result("fr", accuracy=0.4)]
    table = summarise(results, methods=("adabn", "bufr", "fr"), shifts=("fog",), groups=None, metric="ece")
    assert np.isnan(table.rows[0].entries[0].value)
    assert best(table) == {("bufr", 0)}


@pytest.mark.parametrize(
    ("metric", "value", "digits", "said"),
    [
        ("accuracy", 50.0, 1, "accuracy in percent"),
        ("ece", 25.0, 1, "ECE in percent"),
        ("mce", 50 / 3, 1, "MCE in percent"),
        ("brier", 10.0, 1, "Brier score in percent"),
        ("nll", 2.0, 2, None),
        ("restoration_distance", 1.25, 2, None),
        ("alignment_loss", 0.0123, 4, None),
        ("ece_per_batch", 12.5, 1, "ECE, mean over batches in percent"),
        ("seconds", 61.5, 1, "time in seconds"),
        ("peak_memory", 256.0, 0, "peak memory in MiB"),
    ],
)
def test_metrics_and_their_units(metric, value, digits, said):
    known = {
        "restoration_distance": 1.25,
        "alignment_loss": 0.0123,
        "ece_per_batch": 0.125,
        "seconds": 61.5,
        "peak_memory": 256 * 1024 * 1024,
    }
    table = summarise([result(**known)], methods=("bufr",), shifts=("fog",), groups=None, metric=metric)
    assert table.rows[0].entries[0].value == pytest.approx(value)
    assert table.columns[0].digits == digits
    assert [text for text in table.notes if " in " in text] == ([said] if said else [])


@pytest.mark.parametrize("metric", ["alignment_loss", "seconds", "peak_memory"])
def test_nobody_is_best_in_loss_time_and_memory(metric):
    results = [result(method, alignment_loss=n, seconds=n, peak_memory=n) for n, method in enumerate(METHODS, 1)]
    table = summarise(results, shifts=("fog",), groups=None, metric=metric)
    assert [row.entries[0].value for row in table.rows] == sorted(row.entries[0].value for row in table.rows)
    assert best(table) == set()


def test_what_is_not_known_is_missing():
    results = [result("bufr", "fog", restoration_distance=1.0), result("bufr", "sky")]
    table = summarise(results, methods=("bufr",), shifts=("fog", "sky"), groups=None, metric="restoration_distance")
    assert table.rows[0].entries[0].text == "1/2"
    chosen = [result("bufr", "fog"), result("bufr", "sky", selected=None)]
    table = summarise(chosen, methods=("bufr",), shifts=("fog", "sky"), groups=None, which="selected")
    assert table.rows[0].entries[0].text == "1/2"
    unmeasured = summarise(results[1:], methods=("bufr",), shifts=("sky",), groups=None, metric="restoration_distance")
    assert unmeasured.rows[0].entries[0].text == ""  # nothing failed: there is nothing to count


def test_the_ece_of_a_stream_is_compared_batch_by_batch():
    def published(benchmark, protocol, metric, method, shift, *, source):
        return Figure(0.2) if metric == "ece" else None

    options = {"methods": ("bufr",), "shifts": ("fog",), "groups": None, "published": published}
    stream = [result(accuracy=0.2, ece_per_batch=0.25)]
    whole = summarise(stream, metric="ece", **options)
    assert [column.title for column in whole.columns] == ["ours", "paper"]
    assert note(whole, "mean over its batches")
    batches = summarise(stream, metric="ece_per_batch", **options)
    assert [cell.value for cell in batches.rows[0].entries] == pytest.approx([25, 20, 5])
    offline = summarise([result(accuracy=0.2)], metric="ece", **options)
    assert [cell.value for cell in offline.rows[0].entries] == pytest.approx([10, 20, -10])
    streamed = [replace(one, cell=replace(one.cell, protocol="online")) for one in stream]
    given = {"methods": ("bufr",), "shifts": ("fog",), "published": published, "metric": "ece"}
    for protocols in ({"offline": "offline", "online": "online"}, {"online": "online", "offline": "offline"}):
        both = across([result(accuracy=0.2), *streamed], benchmark="emnist-da", protocols=protocols, **given)
        titles = {name: [column.title for column in both.columns if column.heading == name] for name in protocols}
        assert titles == {"offline": ["ours", "paper", "difference"], "online": ["ours", "paper"]}
        assert note(both, "mean over its batches")
        assert note(both, "difference is ours minus the paper's")


def test_best_is_called_an_oracle_wherever_it_stands():
    _, results = grid()
    results = [replace(r, best=replace(r.best, accuracy=0.95)) for r in results]
    for table in (summarise(results, which="best"), by_shift(results, which="best")):
        assert table.rows[0].entries[0].value == pytest.approx(95)
        assert "oracle" in table.title
        assert all("(oracle)" in column.title for column in table.columns)
        assert note(table, "oracle")
    beside = summarise(results, which="best", published=lambda *_, source: Figure(0.5))
    assert {column.title for column in beside.columns} == {"best (oracle)", "paper", "difference"}
    for which in ("last", "selected"):
        table = summarise(results, which=which)
        assert which in table.title
        assert not any("oracle" in text for text in (table.title, *table.notes))


def test_selection_says_what_it_costs_and_gains():
    generator = np.random.default_rng(1)
    last, selected, top = generator.uniform(0.2, 0.9, (3, len(METHODS), len(SHIFTS), len(SEEDS)))
    results = []
    for i, method in enumerate(METHODS):
        for j, shift in enumerate(SHIFTS):
            for k, seed in enumerate(SEEDS):
                outcomes = {
                    which: Outcome(1, values[i, j, k], 0, 0, 0, 0)
                    for which, values in (("last", last), ("selected", selected), ("best", top))
                }
                results.append(result(method, shift, seed, **outcomes))
    table = selection(results, **NAMES, methods=METHODS, shifts=SHIFTS)
    titles = ["last", "selected", "best (oracle)", "best - selected", "selected - last"]
    assert [column.title for column in table.columns] == titles
    expected = (last, selected, top, top - selected, selected - last)
    for i, row in enumerate(table.rows):
        for cell, values in zip(row.entries, expected, strict=True):
            per_seed = 100 * values[i].mean(axis=0)
            assert cell.value == pytest.approx(per_seed.mean(), abs=1e-9)
            assert cell.deviation == pytest.approx(per_seed.std(ddof=1), abs=1e-9)
    assert table.title == "emnist-da, offline: accuracy by choice of epoch, all 4 shifts"
    assert note(table, "oracle")
    highest = [METHODS[values.mean(axis=(1, 2)).argmax()] for values in (last, selected)]
    assert best(table) == {(method, index) for index, method in enumerate(highest)}  # and none in the oracle's column
    assert table.marked == "highest of its column"


def test_selection_is_over_runs_that_have_all_three():
    results = [result(seed=123, accuracy=0.3), result(seed=234, accuracy=0.7, selected=None)]
    results.append(result(seed=345, accuracy=0.9, best=None))
    table = selection(results, **NAMES, methods=["bufr"], shifts=["fog"])
    assert [cell.value for cell in table.rows[0].entries] == pytest.approx([30, 30, 30, 0, 0])
    assert {cell.seeds for cell in table.rows[0].entries} == {(123,)}


def test_other_source_images_than_the_published_are_named_under_every_table():
    remark = "EMNIST, rebuilt: fewer images"
    results = [replace(r, manifest={"source": {"name": "plain", "remark": remark}}) for r in grid()[1]]
    chosen = selection(results, **NAMES, methods=METHODS, shifts=SHIFTS)
    assert all(table.notes.count(remark) == 1 for table in (by_shift(results), summarise(results), chosen))
    assert remark not in summarise(grid()[1]).notes


def test_only_shifts_that_both_have_done_are_counted_for_who_is_better():
    bufr = [result("bufr", shift, seed, 0.5 + seed / 1e4) for shift in SHIFTS for seed in SEEDS]
    others = [result("adabn", shift, seed, 0.4) for shift in SHIFTS[:3] for seed in SEEDS]
    told = footnotes.about_comparisons(compare([*bufr, *others], "bufr", "adabn"), len(SHIFTS))
    assert told == ["bufr is better on 3 of 3 shifts, adabn on 0", "no seed done by both: zigzag"]
    alone = footnotes.about_comparisons(compare([*bufr, *others[:3]], "bufr", "adabn"), len(SHIFTS))
    assert alone == ["no seed done by both: sky, stripe, zigzag"]


def test_a_model_trained_on_other_images_hides_no_other_that_was_trained_twice():
    def trained(name, file, weights, seed):
        return result(seed=seed, manifest={"source": {"name": name, "file": file}, "source_weights": weights})

    given = [("plain", "a", "1", 234), ("plain", "b", "2", 234), ("shot", "a", "3", 99), ("shot", "a", "4", 99)]
    told = footnotes.about_mixtures([trained(*facts) for facts in (*given, ("shot", "a", "5", 7))])
    assert [note.partition(";")[0] for note in told] == [
        "the source model plain was not trained on the same images for every cell",
        "not every cell starts from the same training of the source model shot of seed 99",
    ]


def test_the_origin_of_data_is_marked():
    origins = {"fog": "regenerated", "sky": "rebuilt", "stripe": "published", "zigzag": "rebuilt"}
    results = [replace(r, origin=origins[r.cell.shift]) for r in grid()[1]]
    table = by_shift(results)
    assert [row.label for row in table.rows] == ["fog‡", "sky†", "stripe", "zigzag†", "all 4 shifts†‡"]
    assert note(table, "†").endswith("textures than the published ones: sky, zigzag")
    assert note(table, "‡") == "‡ made again by the published recipe: fog"
    heads = [column.title for column in summarise(results).columns]
    assert heads == ["all 4 shifts†‡", "without backgrounds (3)†‡", "severe (sky)†"]
    own = summarise([replace(r, origin="own") for r in results])
    assert note(own, "§") == "§ data of our own: all shifts"
    assert selection(results, **NAMES, methods=METHODS, shifts=SHIFTS).title.endswith("†‡")
    several = across([*results, *(replace(r, origin="rebuilt") for r in online("bufr"))], methods=METHODS, **ACROSS)
    assert several.title.endswith(", all 4 shifts†‡")
    plain = summarise(grid()[1])
    assert not any(mark in text for text in (*plain.notes, plain.columns[0].title) for mark in "†‡§")


def test_failures_are_counted_and_the_first_is_told():
    traceback = "Traceback (most recent call last):\n  File somewhere\nValueError: loss is not finite\n"
    results = [
        result("adabn", "fog", 123, error="out of memory\nand more", finished="2022-04-25T10:00:00Z"),
        result("bufr", "sky", 234, error=traceback, finished="2022-04-25T09:00:00Z"),
        result("adabn", "sky", 123),
    ]
    table = summarise(results, groups=None)
    failures = "2 of 3 cells failed, the first of them: bufr on sky, seed 234: ValueError: loss is not finite"
    assert note(table, "failed") == failures
    assert entry(table, "bufr", "all 4 shifts").text == "0/8"
    assert note(table, "not run") == "not run: source-only"
    assert [row.label for row in table.rows] == ["adabn", "bufr"]  # where all has failed, it was run
    alone = summarise(results[:1], groups=None)
    assert note(alone, "failed") == "1 of 1 cells failed: adabn on fog, seed 123: out of memory"
    assert not any("failed" in text for text in summarise(results[2:]).notes)


def test_a_method_that_was_not_run_has_no_row_and_takes_nothing_from_the_others():
    _, results = grid()
    without = [r for r in results if r.cell.method != "adabn"]
    published = {"published": lambda *_, source: Figure(0.8)}
    for make in (summarise, by_shift):
        table, two = make(without, **published), make(without, methods=("source-only", "bufr"), **published)
        assert table == replace(two, notes=table.notes)
        assert set(table.notes) - set(two.notes) == {"not run: adabn"}
        assert best(table)
        assert table.marked
    for which in (METHODS, ("source-only", "bufr")):
        chosen = selection(without, **NAMES, methods=which, shifts=SHIFTS)
        assert [row.label for row in chosen.rows] == ["source-only", "bufr"]
        assert {index for _, index in best(chosen)} == {0, 1}
        assert ("not run: adabn" in chosen.notes) == (which is METHODS)
    several = across([*without, *online("adabn")], methods=METHODS, **ACROSS)
    assert [row.label for row in several.rows] == list(METHODS)  # run under one of the protocols
    assert not [text for text in several.notes if "not run" in text]
    assert [row.label for row in across(without, methods=METHODS, **ACROSS).rows] == ["source-only", "bufr"]
    assert note(several, "deviation") == "mean ± standard deviation over 3 seeds"
    rated = [replace(one, manifest={"learning_rate_chosen": "given"}) for one in online("bufr")]
    assert footnotes.RATES in across([*without, *rated], methods=METHODS, **ACROSS).notes
    assert footnotes.RATES not in several.notes
    failing = [replace(one, last=None, error="out of memory") for one in online("bufr")[:1]]
    told = note(across([*without, *failing], methods=METHODS, **ACROSS), "failed")  # of whichever protocol
    assert told.startswith("1 of 1 cells failed: bufr")
    unseen = summarise(without, methods=(*METHODS, "target-supervised"))
    assert unseen.marked == "highest of its column"
    assert note(unseen, "not run") == "not run: adabn, target-supervised"


ACROSS = {
    "benchmark": "emnist-da",
    "protocols": {"all images": "offline", "stream": "online"},
    "shifts": SHIFTS,
    "published": nothing_published,
}


def online(method: str) -> list[Result]:
    return [
        replace(one, cell=replace(one.cell, protocol="online"))
        for one in (result(method, shift, seed) for shift in SHIFTS for seed in SEEDS)
    ]


def uneven() -> tuple[np.ndarray, list[Result]]:
    """One method on all shifts for two seeds and on one shift for a third, the others for a single seed."""
    accuracies, results = grid()
    keep = {"bufr": lambda cell: cell.seed != 345 or cell.shift == "fog"}
    return accuracies, [r for r in results if keep.get(r.cell.method, lambda cell: cell.seed == 123)(r.cell)]


def test_means_of_an_uneven_store_are_over_whole_seeds_only():
    accuracies, results = uneven()
    whole = 100 * accuracies[2][:, :2]
    table = summarise(results)
    cell = entry(table, "bufr", "all 4 shifts")
    assert cell.value == pytest.approx(whole.mean())
    assert cell.deviation == pytest.approx(whole.mean(axis=0).std(ddof=1))
    assert [entry(table, method, "seeds").text for method in METHODS] == ["1", "1", "2"]
    assert note(table, "left out").endswith("left out: seed 345 of bufr")
    assert note(table, "see the column of seeds").endswith(
        "over 1 to 2 seeds, see the column of seeds; a single one has no deviation"
    )
    assert best(table) == set()
    assert footnotes.NO_BEST in table.notes
    shifts = by_shift(results)
    assert entry(shifts, "fog", "bufr").value == pytest.approx(100 * accuracies[2, 0].mean())
    assert entry(shifts, "sky", "bufr").value == pytest.approx(whole[1].mean())
    assert entry(shifts, "all 4 shifts", "bufr").value == pytest.approx(whole.mean())
    assert [entry(shifts, "seeds", method).text for method in METHODS] == ["1", "1", "2 to 3"]
    assert note(shifts, "see the row of seeds").endswith("; bufr has 3 for fog")
    chosen = selection(results, **NAMES, methods=METHODS, shifts=SHIFTS)
    assert [entry(chosen, method, "seeds").text for method in METHODS] == ["1", "1", "2"]
    assert note(chosen, "left out").endswith("345 of bufr")


def test_seeds_are_counted_where_there_is_a_mean():
    results = [r for r in grid()[1] if r.cell.method == "bufr" or (r.cell.method, r.cell.shift) == ("adabn", "sky")]
    table = summarise([*results[:-1], result("source-only", "fog")])
    assert [entry(table, method, "seeds").text for method in METHODS] == ["", "3", "2 to 3"]
    means = {method: [cell.text for cell in row.entries[1:]] for method, row in zip(METHODS, table.rows, strict=True)}
    assert means == {"source-only": ["1/12", "1/9", ""], "adabn": ["3/12", "", ""], "bufr": ["", "", ""]}


def test_a_seed_that_was_begun_does_not_keep_the_best_from_being_marked():
    accuracies, results = grid(seeds=(123, 234))
    first = METHODS[accuracies.mean(axis=(1, 2)).argmax()]
    table = summarise([*results, result("bufr", "fog", 345)])
    assert (first, 0) in best(table)
    assert not any(column.kind == "seeds" for column in table.columns)
    assert note(table, "deviation") == "mean ± standard deviation over 2 seeds"


def test_as_many_seeds_but_others_are_told_and_not_compared():
    _, results = grid()
    results = [r for r in results if (r.cell.seed == 123) == (r.cell.method != "bufr") and r.cell.seed != 345]
    table = summarise(results)
    said = "one seed, hence no standard deviation; not the same everywhere: source-only 123; adabn 123; bufr 234"
    assert note(table, "one seed") == said
    two = summarise([r for r in results if r.cell.method != "adabn"], methods=("source-only", "bufr"))
    alone = summarise([r for r in results if r.cell.method == "bufr"], methods=("bufr",))
    for made, rivals in ((table, True), (two, True), (alone, False)):
        assert (best(made), made.marked) == (set(), "")
        assert (footnotes.NO_BEST in made.notes) == rivals


def test_a_part_of_the_columns_keeps_its_own_count():
    table = summarise(uneven()[1] + [result("adabn", "sky", 234)], published=lambda *_, source: Figure(0.5))
    severe = keep_columns(table, lambda column: column.heading == "severe (sky)")
    assert [column.title for column in severe.columns] == ["seeds", "ours", "paper", "difference"]
    assert [row.entries[0].text for row in severe.rows] == ["1", "2", "2"]
    assert [row.entries[0].text for row in table.rows] == ["1", "1 to 2", "2"]
    assert keep_columns(table, lambda column: column.kind == "difference").columns[0].kind == "difference"
    shifts = by_shift(uneven()[1], groups=GROUPS)
    assert [row.label for row in drop_means(shifts).rows] == [*SHIFTS, "seeds"]
    assert shifts.rows[-1].summary  # set apart from the shifts, as the means are
    fewer = keep_columns(shifts, lambda column: column.title != "adabn")
    assert [cell.text for cell in fewer.rows[-1].entries] == ["1", "2 to 3"]
    # what is published has no seeds of ours, and a table without anything of ours none to count
    published = by_shift(uneven()[1], published=lambda *_, source: Figure(0.5))
    assert [cell.text for cell in published.rows[-1].entries] == ["1", "", "", "1", "", "", "2 to 3", "", ""]
    differences = keep_columns(published, lambda column: column.kind == "difference")
    assert [row.label for row in differences.rows] == [*SHIFTS, "all 4 shifts"]
    two = put_beside(
        *(summarise(uneven()[1], published=lambda *_, source: Figure(0.5), beside=side) for side in ("paper", "re-run"))
    )
    assert [column.kind for column in two.columns].count("seeds") == 1
    even = summarise(grid()[1])
    assert keep_columns(even, lambda column: True) == even  # the same number everywhere is not counted


def test_long_lists_of_fewer_seeds_are_cut_short():
    shifts = tuple(f"shift-{n}" for n in range(8))
    _, results = grid(shifts=shifts)
    results = [r for r in results if r.cell.method != "bufr" or r.cell.seed != 345]
    table = by_shift(results, shifts=shifts)
    assert [cell.text for cell in table.rows[-1].entries] == ["3", "3", "2"]
    assert note(table, "standard deviation").endswith("over 2 to 3 seeds, see the row of seeds")
    more = [result("bufr", shift, 345) for shift in shifts[:4]]
    said = note(by_shift([*results, *more], shifts=shifts), "standard deviation")
    assert said.endswith("; bufr has 3 for shift-0, shift-1, shift-2 and 1 more")


def test_seeds_that_depend_on_the_shift_alone_are_told_by_shift():
    results = [r for r in grid()[1] if r.cell.seed != 345 or r.cell.shift == "fog"]
    assert note(by_shift(results), "deviation") == "mean ± standard deviation over 2 seeds, 3 for fog"
    fewer = [r for r in grid()[1] if r.cell.seed != 345 or r.cell.shift != "fog"]
    assert note(by_shift(fewer), "deviation") == "mean ± standard deviation over 3 seeds, 2 for fog, all"
    # a single one has no deviation, which only the row of seeds tells
    single = [r for r in results if r.cell.seed != 234 or r.cell.shift == "fog"]
    assert note(by_shift(single), "deviation").startswith("mean ± standard deviation over 1 to 3 seeds, see the row")


def test_other_results_are_passed_over():
    _, results = grid()
    other = [
        replace(results[0], cell=replace(results[0].cell, benchmark="mnist-c")),
        replace(results[0], cell=replace(results[0].cell, protocol="online"), error="failed there"),
        result("tent", "fog", error="failed there"),
        result("bufr", "grass", seed=999, error="failed there"),
    ]
    assert summarise(results + other) == summarise(results)


def test_two_results_of_one_cell_are_refused():
    twice = [result(), replace(result(), cell=replace(result().cell, recipe="another"))]
    with pytest.raises(DataError, match=r"one result.*seed 123"):
        summarise(twice)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": "f1"}, r"metric.*accuracy.*'f1'"),
        ({"which": "first"}, "epoch.*'first'"),
        ({"metric": "seconds", "which": "best"}, r"seconds.*got best"),
    ],
)
@pytest.mark.parametrize("make", [summarise, by_shift])
def test_what_makes_no_table(make, options, message):
    with pytest.raises(DataError, match=message):
        make(grid()[1], **options)


def test_no_results_at_all_leave_the_published_figures():
    table = summarise([], published=lambda *_, source: Figure(0.5, 0.01))
    assert entry(table, "bufr", "all 4 shifts", "paper").value == pytest.approx(50)
    assert entry(table, "bufr", "all 4 shifts", "ours").value is None
    assert not any("seed" in text for text in table.notes)


@pytest.mark.slow
def test_nothing_heavy_is_imported():
    heavy = "{'rich', 'scipy', 'sklearn', 'matplotlib'}"
    code = f"import sys, shiftmend.research.bench.rendering; print({heavy} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_a_figure_has_no_line_for_seeds_and_says_them_at_the_foot():
    made = Grid(results=uneven()[1], methods=METHODS, shifts=SHIFTS, **NAMES)
    ours = [(method, shift, made.mean(method, [shift])) for method in METHODS[1:] for shift in SHIFTS]
    said = "mean ± standard deviation over 3 seeds, but 1 for adabn, "
    assert footnotes.about_numbers(made, ours)[1] == f"{said}2 for bufr (sky, stripe, zigzag)"
    ragged = {"fog": (), "zigzag": (123,)}
    less = [(method, shift, replace(mean, seeds=ragged.get(shift, mean.seeds))) for method, shift, mean in ours]
    assert (
        footnotes.about_numbers(made, less)[1]
        == "mean ± standard deviation over 2 seeds, but 0 to 1 for adabn, 0 to 1 for bufr (fog, zigzag)"
    )


def test_rows_that_the_paper_quotes_stand_below_the_others() -> None:
    shifts = find("cifar-10-c").shifts
    names = {"benchmark": "cifar-10-c", "protocol": "offline", "methods": ["bufr"], "shifts": shifts}
    cells = [replace(result(shift=shift).cell, benchmark="cifar-10-c") for shift in shifts]
    results = [replace(result(), cell=cell) for cell in cells]
    tables = [summary(results, **names, beside=side) for side in ("paper", "re-run")]
    both = add_quoted(put_beside(*tables), Grid(results=[], **names))
    assert [row.label for row in both.rows] == ["bufr", "dann*", "uda-ss*"]
    paper = [column.title for column in both.columns].index("paper")
    for row, value in zip(both.rows[1:], (81.7, 83.3), strict=True):
        assert row.entries[paper].value == pytest.approx(value)
        assert all(entry.value is None for at, entry in enumerate(row.entries) if at != paper)
    assert any("source data" in note for note in both.notes)
    # Neither another metric nor another benchmark has any.
    assert add_quoted(tables[0], Grid(results=[], **names, metric="ece")) is tables[0]
    assert add_quoted(tables[0], Grid(results=[], **names | {"benchmark": "emnist-da"})) is tables[0]
