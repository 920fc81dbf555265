"""What a page says of options, of restoring features and of the model without adaptation, worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from shiftmend.research.bench.benchmark import Cell, Outcome, Result
from shiftmend.research.bench.pages import Part, restoration, sanity, slices, variants
from shiftmend.research.bench.published import figure
from shiftmend.research.bench.results import Reading
from shiftmend.research.bench.suite import find
from shiftmend.research.bench.tables import Table

SEEDS = (123, 234, 345)


def result(
    method: str, shift: str, seed: int, accuracy: float, ece: float = 0.1, distance: float | None = 1.0
) -> Result:
    outcome = Outcome(1, accuracy, ece, 0.1, 0.1, 0.1)
    return Result(Cell("", "offline", method, shift, seed, method), "own", outcome, restoration_distance=distance)


def part(benchmark: str, results: Sequence[Result]) -> Part:
    named = [replace(one, cell=replace(one.cell, benchmark=benchmark)) for one in results]
    return Part("offline", Reading(find(benchmark), [one.cell for one in named], named, [], 0))


def published(benchmark: str, metric: str, method: str, shift: str = "all", source: str = "paper") -> float:
    found = figure(benchmark, "offline", metric, method, shift, source)
    assert found is not None
    return found.mean


def test_a_variant_stands_beside_its_method_and_the_papers_difference() -> None:
    """Worse on the first shift, no different on the second, better on all others."""
    shifts = find("cifar-10-c").shifts
    noise = np.random.default_rng(0).normal(0, 0.001, (2, len(shifts), len(SEEDS)))
    gains = np.full(len(shifts), 0.2)
    gains[:2] = -0.2, 0.0
    scores = {"fr": 0.5 + noise[0], "fr-features": 0.5 + gains[:, None] + noise[1]}
    results = [
        result(method, shift, seed, float(values[i, k]))
        for method, values in scores.items()
        for i, shift in enumerate(shifts)
        for k, seed in enumerate(SEEDS)
    ]
    (table,) = variants(part("cifar-10-c", results))
    assert isinstance(table, Table)
    [row] = table.rows
    against, seeds, points, paper, chance, verdict, counted = row.entries
    differences = 100 * (scores["fr-features"] - scores["fr"])
    assert (row.label, against.text, seeds.value) == ("fr-features", "fr", 3)
    assert (points.value, points.deviation) == pytest.approx(
        (differences.mean(), differences.mean(axis=0).std(ddof=1)), abs=1e-9
    )
    there = [published("cifar-10-c", "accuracy", name) for name in ("fr-features", "fr")]
    assert paper.value == pytest.approx(100 * (there[0] - there[1]))
    assert (chance.value, chance.text, verdict.text) == (None, "< 0.001", "fr-features better")
    assert counted.text == f"{len(shifts) - 2} / 1 / 1"
    assert len(table.notes) == 1
    # a seed that lacks a shift is in no mean, and neither are those of one method alone
    lone = [result("fr", shift, 1, 0.9) for shift in shifts]
    some = [result(method, shifts[0], 7, 0.9) for method in scores]
    (cut,) = variants(part("cifar-10-c", [*results, *lone, *some]))
    assert isinstance(cut, Table)
    assert cut.rows[0].entries[:4] == row.entries[:4]
    assert cut.notes[1:] == ("fr-features: without seeds that lack shifts (7)",)
    failed = [replace(one, last=None, error="out of memory") for one in results if one.cell.method == "fr-features"]
    assert variants(part("cifar-10-c", [*(one for one in results if one.cell.method == "fr"), *failed])) == []


def test_a_chance_is_printed_unless_it_would_be_none() -> None:
    gains = (0.01, 0.02, 0.06)
    results = [
        result(method, shift, seed, 0.5 + (gain if method == "fr-sliced" else 0.0))
        for method in ("fr", "fr-sliced")
        for shift in find("usps").shifts
        for seed, gain in zip(SEEDS, gains, strict=True)
    ]
    (table,) = slices(part("usps", results))
    assert isinstance(table, Table)
    p = stats.ttest_1samp(gains, 0).pvalue
    assert [row.summary for row in table.rows] == [False, False, True]
    assert [row.entries[2].value for row in table.rows] == pytest.approx([p] * 3)
    assert [row.entries[3].value for row in table.rows] == pytest.approx([min(1, 2 * p)] * 2 + [p])
    assert [row.entries[1].value for row in table.rows] == pytest.approx([3.0] * 3)


def test_restoration_is_in_the_order_of_the_distances_beside_the_papers_figures() -> None:
    ours = {"pl": (2.5, 0.3), "bufr": (1.5, 0.06), "fr": (1.0, 0.05), "fr-sliced": (3.0, 0.04)}
    results = [
        result(method, shift, seed, 0.5, ece + sign * 0.01, distance + sign / 2)
        for method, (distance, ece) in ours.items()
        for shift, sign in (("sky", 1), ("fog", -1))
        for seed in SEEDS
    ]
    others = [result(method, "sky", 123, 0.5, 0.0, 0.0) for method in ("shot", "target-supervised")]
    said, table = restoration(part("emnist-da", [*results, *others, result("bnm", "sky", 123, 0.5, distance=None)]))
    assert isinstance(table, Table)
    order = ["fr", "bufr", "pl", "fr-sliced"]
    assert [row.label for row in table.rows] == order
    for row in table.rows:
        distance, ece = ours[row.label]
        known = [
            None if row.label == "fr-sliced" else scale * published("emnist-da", metric, row.label)
            for metric, scale in (("restoration_distance", 1), ("ece", 100))
        ]
        assert [entry.value for entry in row.entries] == pytest.approx([distance, 100 * ece, *known])
    # ranks 1 2 3 4 against 2 3 4 1; bufr, fr and pl are in one order by both in the paper
    assert said == (
        "Spearman's rank correlation of the two over methods: -0.20 (4 methods); "
        "of the paper's figures for the same methods: +1.00 (3 methods)."
    )
    assert table.notes[0].startswith("means over the 6 pairs of shift and seed that every method has done")


def test_restoration_compares_methods_though_their_variants_have_other_seeds() -> None:
    results = [result(method, "fog", 123, 0.5, 0.1, distance) for method, distance in (("fr", 1.0), ("bufr", 2.0))]
    _, table = restoration(part("emnist-da", [*results, result("fr-sliced", "fog", 234, 0.5, 0.1, 0.5)]))
    assert isinstance(table, Table)
    assert [row.label for row in table.rows] == ["fr", "bufr"]
    assert "; without fr-sliced, for lack of common seeds" in table.notes[0]
    assert len(restoration(part("emnist-da", [*results, result("pl", "fog", 234, 0.5, 0.1, 0.5)]))) == 1


@pytest.mark.parametrize("off", [0.11, -0.11])
def test_only_the_model_without_adaptation_is_held_against_the_published_one(off: float) -> None:
    shifts = find("emnist-da").shifts
    there = {shift: published("emnist-da", "accuracy", "source-only", shift, "re-run") for shift in shifts}
    results = [result("source-only", s, 123, there[s] + (off if s == "fog" else 0.09)) for s in shifts]
    results += [result("fr", shift, 123, 0.01) for shift in shifts]
    said, table = sanity(part("emnist-da", results))
    assert said == "Source-only accuracy lies within 10 points of the authors' re-run on 12 of 13 shifts."
    assert isinstance(table, Table)
    [fog] = table.rows
    assert [entry.value for entry in fog.entries] == pytest.approx(
        [100 * (there["fog"] + off), 100 * there["fog"], 100 * off]
    )
