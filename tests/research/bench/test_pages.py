"""The page of a benchmark: from hand-made results whose figures are known."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from small_worlds import BENCHMARK

from shiftmend.errors import DataError
from shiftmend.research.bench import footnotes, tables
from shiftmend.research.bench import pages as label_free
from shiftmend.research.bench.benchmark import SIGNALS, Cell, Outcome, Result
from shiftmend.research.bench.pages import (
    Part,
    few_verdicts,
    page,
    restoration,
    sanity,
    signals,
    variants,
    verification,
)
from shiftmend.research.bench.plan import plan
from shiftmend.research.bench.published import figure
from shiftmend.research.bench.rendering import Table
from shiftmend.research.bench.results import Reading, read
from shiftmend.research.bench.store import to_compact
from shiftmend.research.bench.suite import find

REMARK = "EMNIST, rebuilt: fewer images"
MANIFEST = {
    "environment": {"device": "NVIDIA X", "torch": "2.9", "python": "3.12", "shiftmend": "0.1.0"},
    "learning_rate_chosen": "given",
    "source": {
        "name": "plain",
        "recipe": {"network": "digit-cnn", "epochs": 150, "weight_decay": 0.0},
        "remark": REMARK,
    },
    "target": {"samples": 18800, "sha256": "ab12" * 16},
    "method": {"name": "bufr"},
    "verification": {"after": {"floor": 0.0003, "samples": 18800, "verdict": "as it was when the cell was run"}},
}


def made(cell: Cell, origin: str, accuracy: float) -> Result:
    """The selected epoch a point better than the last, the best one three; signals that tell the accuracy."""
    last, selected, best = (Outcome(3, accuracy + more, 1 - accuracy, 0.5, 1.0, 0.1) for more in (0.0, 0.01, 0.03))
    signals = dict.fromkeys(SIGNALS, 1 - accuracy) | {"confidence": accuracy}
    return Result(
        cell,
        origin,  # type: ignore[arg-type]
        last,
        best,
        selected,
        signals=signals,
        restoration_distance=3 * (1 - accuracy),
        seconds=36.0,
        manifest=MANIFEST,
        finished="2022-04-25T09:00:00Z",
    )


def write(folder: Path, name: str, cells: list[Cell], accuracy: Callable[[Cell], float]) -> Path:
    benchmark = find(name)
    file = folder / f"{name}.json"
    file.write_text(to_compact([made(cell, benchmark.origin(cell.shift, None), accuracy(cell)) for cell in cells]))
    return file


def section(text: str, title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"no section {title!r}"
    return found.group(1)


def rerun(cell: Cell) -> float:
    """The accuracy of the authors' re-run, but 15 points more on fog, and a little from the seed."""
    there = figure("emnist-da", cell.protocol, "accuracy", cell.method.removesuffix("-sliced"), cell.shift, "re-run")
    there = there or figure("emnist-da", cell.protocol, "accuracy", cell.method, "all", "re-run")
    known = 0.5 if there is None else there.mean
    more = 0.023 + cell.seed / 1e7 if cell.method == "bufr-sliced" else 0.0
    return min(1.0, known + more + (0.15 if cell.shift == "fog" else 0.0) + cell.seed / 1e6)


@pytest.fixture(scope="module")
def emnist(tmp_path_factory: pytest.TempPathFactory) -> str:
    benchmark = find("emnist-da")
    seeds = [123, 234]
    cells = plan(benchmark, seeds=seeds) + plan(benchmark, "few-shot-5", seeds=seeds)
    file = write(tmp_path_factory.mktemp("page"), "emnist-da", cells, rerun)
    return page("emnist-da", file, "Fog is *thicker* here.\n")


@pytest.mark.slow
def test_the_first_line_says_what_was_made_again_and_what_is_missing(emnist: str) -> None:
    title, _, first, _, *rest = emnist.splitlines()
    assert title == "# EMNIST-DA: characters, 13 shifts"
    assert first.startswith("**Partial: ")
    assert f"**{REMARK}.** Target images: " in first
    assert "rebuilt, with other textures than the published ones (`bricks`, `crystals`" in first
    assert "made again by the published recipe (`dotted_line`" in first
    assert any(line.startswith("- offline: ") and "the seeds `345`, `456`, `567`" in line for line in rest)
    assert any(line.startswith("- few-shot-10: everything (") for line in rest)


@pytest.mark.slow
def test_commands_machines_and_source_are_said(emnist: str) -> None:
    assert "shiftmend bench run emnist-da --protocol few-shot-5\n" in emnist
    assert "few-shot-10\n" not in emnist.split("```")[1]
    assert re.search(r"^- NVIDIA X, PyTorch 2.9, Python 3.12, shiftmend 0.1.0: [\d,]+ cells$", emnist, re.MULTILINE)
    assert "- source model `plain`: network digit-cnn, epochs 150\n" in emnist
    assert re.search(r"^- protocol `offline`: batch size 256, temperature 0.01, ", emnist, re.MULTILINE)
    assert "`ab12ab12ab12ab12`" in section(emnist, "Data")


def test_a_file_of_ones_own_is_called_as_it_was_without_its_folder(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    file = write(tmp_path, "digits", plan(find("digits"), methods=["fr"], seeds=[1]), lambda cell: 0.5)
    for name, called in (("own.py", "own.py:MINE"), ("my own.py", "'my own.py:MINE'")):
        own = tmp_path / "a b" / name
        own.write_text("from shiftmend.research.bench.suite.digits import BENCHMARK as MINE")
        commands = page(f"{own}:MINE", file).split("```")[1]
        assert f"shiftmend bench run {called}\n" in commands
        assert f"bench page {called} --folder results/digits.json --out docs/results/digits.md\n" in commands


@pytest.mark.slow
def test_few_images_without_clean_ones_to_compare_with_have_no_verdicts(tmp_path: Path) -> None:
    cells = plan(find("emnist-da"), "few-shot-5", seeds=[123])
    file = write(tmp_path, "emnist-da", cells, rerun)
    parts = {"few-shot-5": Part("few-shot-5", read("emnist-da", file, "few-shot-5"))}
    assert len(parts["few-shot-5"].results) == len(cells)
    assert label_free.few_verdicts(parts) == []
    assert label_free.few_verdicts(parts | {"offline": Part("offline", read("emnist-da", file, "offline"))}) == []


@pytest.mark.slow
def test_means_stand_beside_paper_and_re_run(emnist: str) -> None:
    text = section(emnist, "Accuracy and calibration")
    header, _, *rows = [line for line in text.splitlines() if line.startswith("|")][: 2 + 13]
    assert "### emnist-da, offline: accuracy (last), all 13 shifts†‡\n" in text
    columns = ["ours", "paper", "ours - paper", "re-run", "ours - re-run"]
    assert header == f"| method | {' | '.join(columns)} |"
    cells = next(row for row in rows if row.startswith("| fr |")).strip("| ").split(" | ")
    paper, again = (figure("emnist-da", "offline", "accuracy", "fr", "all", side) for side in ("paper", "re-run"))
    assert paper is not None
    assert again is not None
    shifts = find("emnist-da").shifts
    own = np.mean([[rerun(Cell("", "offline", "fr", shift, seed, "")) for shift in shifts] for seed in (123, 234)])
    assert cells[1].startswith(f"{100 * own:.1f} ± ")
    assert cells[2].startswith(f"{100 * paper.mean:.1f} ± ")
    assert cells[3] == f"{100 * (own - paper.mean):+.1f}"
    assert cells[5] == f"{100 * (own - again.mean):+.1f}"
    assert "severe (sky)†: re-run" in text
    assert emnist.count(footnotes.RATES) == 1


def test_every_question_is_answered(emnist: str) -> None:
    assert re.search(
        r"^\| bufr \| .*\+2\.0 ± 0\.0 \| \+1\.0 ± 0\.0 \|$",
        section(emnist, "Which epoch: last, selected, best"),
        re.MULTILINE,
    )
    assert re.search(r"^\| bufr-sliced \| bufr \| 2 \| \+2", section(emnist, "Variants of a method"), re.MULTILINE)
    few = section(emnist, "Few images")
    assert "5 a class: re-run" in few
    assert re.search(r"^\| verdict \| 5 a class: good \| 5 a class: bad \|", few, re.MULTILINE)
    assert re.search(r"^\| not restored( \| \d+)+ \|$", few, re.MULTILINE)
    restored = section(emnist, "Restoration and calibration")
    assert "of the paper's figures for the same methods: +0.59 (9 methods)" in restored
    assert "; shot (whose source model is another) and target-supervised are left out; the paper's are" in restored
    signals = section(emnist, "Signals that need no labels")
    assert re.search(r"^\| confidence \| \+1\.00 \| 13 \|", signals, re.MULTILINE)
    assert re.search(r"^\| slices \| 1\.00 \| ≤ 0\.\d+ \| 100\.0 \| \d", signals, re.MULTILINE)  # near clean
    assert re.search(r"^\| not restored \| \d+ \| \d+ \|$", signals, re.MULTILINE)
    # shot on 13 shifts from two seeds
    assert signals.count("(left out: 26 cells that start from another model)") == 2
    sanity = section(emnist, "Does the model without adaptation do as published?")
    assert "on 12 of 13 shifts" in sanity
    assert re.findall(r"^\| (\w+)‡", sanity, re.MULTILINE) == ["fog"]
    notes = section(emnist, "Notes")
    assert re.fullmatch(r"\s*<details><summary>.*</summary>\n\nFog is \*thicker\* here\.\n\n</details>\s*", notes)
    assert emnist.index("## Accuracy") < emnist.index("## Notes") < emnist.index("## How this page was made")
    folded = re.findall(r"<details>.*?</details>", emnist, re.DOTALL)
    assert len(folded) == 5  # notes, each shift, signals, how the page was made, hashes
    assert not any(re.search(r"^#+ ", part, re.MULTILINE) for part in folded), "a heading ends a folded part"


@pytest.mark.slow
def test_a_page_of_some_shifts_takes_no_mean(tmp_path: Path) -> None:
    benchmark = find("emnist-da")
    cells = plan(benchmark, methods=["source-only", "fr"], shifts=["sky", "fog", "clean"], seeds=[123])
    text = page("emnist-da", write(tmp_path, "emnist-da", cells, lambda cell: 0.25))
    assert "No mean is taken before all 13 shifts have been run" in section(text, "Accuracy and calibration")
    shifts = section(text, "Each shift")
    assert "all 13 shifts" not in shifts
    assert re.search(r"^\| sky† \| \*\*25\.0\*\* \| \*\*25\.0\*\* \|$", shifts, re.MULTILINE)
    assert "mean over the shifts run so far" in text
    assert "left out" not in section(text, "Restoration and calibration"), "nothing was run that could be"
    assert "Few images" not in text
    assert "## Variants" not in text


@pytest.mark.slow
def test_a_single_cell_of_a_kind_is_counted_in_a_sentence_that_fits_one(tmp_path: Path) -> None:
    benchmark = find("emnist-da")
    cells = plan(benchmark, methods=["source-only", "fr"], shifts=["sky", "fog", "stripe"], seeds=[123])

    def accuracy(cell: Cell) -> float:  # fr does harm on one shift of three
        return 0.5 if cell.method == "source-only" else 0.3 if cell.shift == "sky" else 0.7

    text = page("emnist-da", write(tmp_path, "emnist-da", cells, accuracy))
    signals = section(text, "Signals that need no labels")
    assert "source-only on the same shift and seed; cells that are: 2, that are not: 1\n" in signals
    assert "- cells of the rarer kind: 1; read with care\n" in signals


def test_without_clean_versions_of_the_images_nothing_is_said_of_restoring_them(tmp_path: Path) -> None:
    benchmark = find("usps")
    cells = plan(benchmark, methods=["source-only", "fr"], seeds=[123])
    results = [replace(made(cell, "published", 0.25), restoration_distance=None) for cell in cells]
    file = tmp_path / "usps.json"
    file.write_text(to_compact(results))
    text = page("usps", file)
    assert "## Restoration" not in text
    assert "both shifts" in section(text, "Accuracy and calibration")


@pytest.mark.slow
def test_seeds_are_counted_and_what_was_not_run_is_named(tmp_path: Path) -> None:
    """One method on all shifts for two seeds and on one shift for a third, its variant alike, another for one seed."""
    benchmark = find("emnist-da")
    shifts = {"shifts": list(benchmark.shifts)}
    cells = [
        *plan(benchmark, methods=["bufr", "bufr-sliced"], seeds=[123, 234], **shifts),
        *plan(benchmark, methods=["bufr", "bufr-sliced"], seeds=[345], shifts=["fog"]),
        *plan(benchmark, methods=["fr"], seeds=[123], **shifts),
    ]

    def accuracy(cell: Cell) -> float:
        known = {"bufr": 0.5, "bufr-sliced": 0.6, "fr": 0.4}[cell.method] + cell.seed / 1e4
        return known + (0.35 if cell.method == "bufr-sliced" and cell.seed == 345 else 0.0)

    text = page("emnist-da", write(tmp_path, "emnist-da", cells, accuracy))
    means = section(text, "Accuracy and calibration")
    assert re.search(r"^\| bufr \| 2 \| 51\.8 ± 0\.8 \| 86\.1 ± 0\.1 \|", means, re.MULTILINE)
    assert re.search(r"^\| fr \| 1 \| 41\.2 \| 74\.4 ± 0\.8 \|", means, re.MULTILINE)
    assert text.count("- not run: source-only, adabn, bnm, ") == 1
    assert "left out: seed 345 of bufr, bufr-sliced\n" in means
    assert re.search(r"^\| seeds \| 1 \| 2 to 3 \| 2 to 3 \|$", section(text, "Each shift"), re.MULTILINE)
    assert re.search(
        r"^\| bufr \| 2 \| 51\.8 ± 0\.8 \| 52\.8", section(text, "Which epoch: last, selected, best"), re.MULTILINE
    )
    # ten points on each shift of the whole seeds, and 45 on the one shift of the third, which is not in the mean
    variants = section(text, "Variants of a method")
    assert re.search(r"^\| bufr-sliced \| bufr \| 2 \| \+10\.0 ± 0\.0 \|", variants, re.MULTILINE)
    assert "without seeds that lack shifts (345)" in variants


@pytest.mark.slow
def test_no_mean_of_differences_without_a_whole_seed(tmp_path: Path) -> None:
    benchmark = find("emnist-da")
    cells = [
        *plan(benchmark, methods=["bufr"], seeds=[123], shifts=list(benchmark.shifts)),
        *plan(benchmark, methods=["bufr-sliced"], seeds=[123], shifts=["fog", "sky"]),
    ]
    text = page("emnist-da", write(tmp_path, "emnist-da", cells, lambda cell: len(cell.method) / 20))
    assert "- bufr-sliced: no seed has every shift by both" in section(text, "Variants of a method")
    # of the two shifts that both have done, and so are neither better nor worse on the eleven others
    assert re.search(r"^\| bufr-sliced .* 0 / 0 / 2 \|$", section(text, "Variants of a method"), re.MULTILINE)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("FileNotFoundError: '/home/me/data/sky.npy'", "FileNotFoundError: 'sky.npy'"),
        ("OSError: C:\\\\Users\\\\me\\\\sky.npy is gone", "OSError: sky.npy is gone"),
        (
            "ValueError: 3/4 of results/x.json, see https://example.org/a/b",
            "ValueError: 3/4 of results/x.json, see https://example.org/a/b",
        ),
    ],
)
def test_errors_are_told_without_folders(tmp_path: Path, error: str, said: str) -> None:
    benchmark = find("digits")
    cells = plan(benchmark, methods=["source-only", "fr"], seeds=[123])
    results = [
        Result(cell, "own", error=error) if (cell.method, cell.shift) == ("fr", "stripe") else made(cell, "own", 0.5)
        for cell in cells
    ]
    (tmp_path / "one.json").write_text(to_compact(results))
    text = page("digits", tmp_path / "one.json")
    assert f"cells failed: fr on stripe, seed 123: {said}\n" in text
    assert "same images" not in text  # of those of a failed cell nothing is known
    assert "me/data" not in text
    assert "Users" not in text
    assert str(tmp_path) not in text


@pytest.mark.slow
def test_a_whole_page_is_not_called_partial(tmp_path: Path) -> None:
    benchmark = find("digits")
    cells = [cell for protocol in benchmark.protocols for cell in plan(benchmark, protocol)]
    file = write(tmp_path, "digits", cells, lambda cell: 0.5 + len(cell.method) / 100 + cell.seed / 1e4)
    text = page("digits", file)
    assert "Partial" not in text
    done = f"All {len(cells)} cells (one method on one shift from one seed) are done."
    assert text.splitlines()[2] == f"**{REMARK}.** Target images: data of our own (all shifts). {done}"
    assert "ECE, mean over batches" in section(text, "Online")
    assert "\n## Does the model" not in text
    assert footnotes.RATES not in text
    assert text.count("the paper has no figures for this table") == 1
    with pytest.raises(DataError, match="results of mnist-c"):
        page("mnist-c", file)
    file.write_text(to_compact([made(replace(cells[0], recipe="old"), "own", 0.5)]))
    with pytest.raises(DataError, match="1 of other settings"):
        page("digits", file)


def test_inputs_that_differ_between_cells_are_reported(tmp_path: Path) -> None:
    benchmark = find("digits")
    cells = plan(benchmark, methods=["source-only", "fr"], seeds=[123])
    results = [made(cell, "own", 0.5) for cell in cells]
    results[0] = replace(results[0], manifest=MANIFEST | {"target": {"samples": 1, "sha256": "cd34" * 16}})
    (tmp_path / "odd.json").write_text(to_compact(results))
    shift = cells[0].shift
    said = f"Not every cell was run on the same images of {shift}; run the benchmark again in another folder."
    text = page("digits", tmp_path / "odd.json")
    assert f"**{said}**" in section(text, "Data")
    assert said[1:-1] in section(text, "Accuracy and calibration")  # under the first table that it is about


def test_few_images_are_drawn_by_the_seed_and_so_differ_between_seeds(tmp_path: Path) -> None:
    def adapted(cell: Cell, digest: str) -> Result:
        target = {"target": {"samples": 200, "sha256": digest * 16}, "protocol": {"kind": "few-shot"}}
        return replace(made(cell, "own", 0.5), manifest=MANIFEST | target)

    cells = plan(find("digits"), "few-shot-20", methods=["adabn", "fr"])
    results = [adapted(cell, f"{cell.seed:04d}") for cell in cells]
    (tmp_path / "few.json").write_text(to_compact(results))
    assert "same images" not in page("digits", tmp_path / "few.json")
    (tmp_path / "odd.json").write_text(to_compact([adapted(cells[0], "cd34"), *results[1:]]))
    assert f"same images of {cells[0].shift};" in page("digits", tmp_path / "odd.json")


@pytest.mark.slow
def test_a_difference_over_some_of_the_shifts_is_not_called_one_over_all(tmp_path: Path) -> None:
    cells = plan(find("emnist-da"), methods=["bufr", "bufr-sliced"], seeds=[123, 234], shifts=["fog", "sky"])
    text = page("emnist-da", write(tmp_path, "emnist-da", cells, lambda cell: len(cell.method) / 20 + cell.seed / 1e4))
    assert "- the mean is over 2 of 13 shifts" in section(text, "Variants of a method")


def test_two_tables_become_one() -> None:
    cells = [Cell("emnist-da", "offline", "fr", shift, 1, "r") for shift in find("emnist-da").shifts]
    results = [made(cell, "published", 0.5) for cell in cells]
    asked = {"benchmark": "emnist-da", "protocol": "offline", "methods": ["fr"], "shifts": find("emnist-da").shifts}
    paper, again, none = (tables.summary(results, **asked, beside=side) for side in ("paper", "re-run", None))  # type: ignore[arg-type]
    both = tables.put_beside(paper, again)
    assert [column.title for column in both.columns] == ["ours", "paper", "ours - paper", "re-run", "ours - re-run"]
    assert both.rows[0].entries == (*paper.rows[0].entries, *again.rows[0].entries[1:])
    assert set(both.notes) == {*paper.notes, *again.notes}
    assert len(both.notes) == len(set(both.notes)) > len(paper.notes) > 1
    assert [column.title for column in tables.put_beside(paper, none).columns] == ["ours", "paper", "ours - paper"]
    assert [column.title for column in tables.put_beside(none, again).columns] == ["ours", "re-run", "ours - re-run"]


# ---- What a page says of options, of restoring features and of the model without adaptation, worked out by hand

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
    (table,) = variants(part("usps", results))
    assert isinstance(table, Table)
    (row,) = table.rows
    assert row.entries[2].value == pytest.approx(3.0)
    assert row.entries[4].value == pytest.approx(stats.ttest_1samp(gains, 0).pvalue)


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


# ---- What is said of cells without their labels: every figure of the tables worked out by hand

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


def judged_result(
    method: str, shift: str, accuracy: float, slices: float, seed: int = 1, protocol: str = "offline", **after: Any
) -> Result:
    """Confidence tells the accuracy, entropy tells the opposite of what it should."""
    told = {"slices": slices, "marginals": 2 * slices, "entropy": accuracy, "confidence": accuracy}
    manifest = {"method": {"name": method.removesuffix("-sliced")}, "verification": {"after": JUDGED | after}}
    cell = Cell("small", protocol, method, shift, seed, method)
    return Result(cell, "own", Outcome(1, accuracy, 0.1, 0.1, 0.1, 0.1), signals=told, manifest=manifest)


AT_HOME = [judged_result("source-only", "clean", 0.9, 0.0)]  # of the first seed alone


def judged_part(
    results: Sequence[Result], protocol: str = "offline", clean: Sequence[Result] = AT_HOME, **changes: Any
) -> Part:
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
    made = [judged_result(*cell) for cell in CELLS]
    another_seed = judged_result("fr", "dim", 0.1, 0.9, seed=2)
    correlated, near, better, verdicts = signals(judged_part([*made, another_seed]))
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
    made = [judged_result(*cell) for cell in CELLS]
    near = signals(judged_part([replace(one, signals={"slices": one.signals["slices"]}) for one in made]))[1]
    assert {name: row for name, row in shown(near).items() if name != "slices"} == dict.fromkeys(
        ("marginals", "entropy", "confidence", "slices and marginals"), [None] * 6
    )


def test_what_a_correlation_leaves_out_is_said() -> None:
    """A run that has diverged has no signal to rank."""
    made = [judged_result(*cell) for cell in CELLS]
    diverged = replace(judged_result("fr", "dim", 0.1, 0.9, seed=2), signals={"slices": math.nan, "entropy": 0.5})
    correlated = signals(judged_part([*made, diverged]))[0]
    assert [row[3] for row in shown(correlated).values()] == [7, 7, 8, 7]
    assert isinstance(correlated, Table)
    assert correlated.notes[1:] == ("slices: left out 1 whose signal or accuracy is not a number",)
    unmeasured = signals(judged_part([replace(one, signals={"slices": one.signals["slices"]}) for one in made]))[0]
    assert isinstance(unmeasured, Table)
    assert unmeasured.notes[1] == "marginals: too few points, expected at least 3"
    whole = signals(judged_part(made))[0]
    assert isinstance(whole, Table)
    assert len(whole.notes) == 1


@pytest.mark.parametrize(
    ("clean", "said"), [((), "0 cells are good and 0 bad"), ((1.1,), "0 cells are good and 6 bad"), ((0.1,), "6 cells")]
)
def test_one_kind_alone_leaves_nothing_to_tell_apart(clean: Sequence[float], said: str) -> None:
    at_home = [judged_result("source-only", "clean", accuracy, 0.0) for accuracy in clean]
    _, near, better, *verdicts = signals(judged_part([judged_result(*cell) for cell in CELLS], clean=at_home))
    assert isinstance(near, str)
    assert f": {said}" in near
    assert isinstance(better, Table)
    assert len(verdicts) == len(clean)  # with cells that are neither good nor bad there is nothing to count


def test_ten_cells_of_a_kind_need_no_warning() -> None:
    def made(number: int) -> list[Result]:
        good = [judged_result(f"fr-{n}", "dim", 0.9, 0.001 * n) for n in range(number)]
        return good + [judged_result(f"fr-{n}", "inverse", 0.1, 0.5 + n) for n in range(number)]

    settings = {"offline": {f"fr-{n}": BENCHMARK.settings["offline"]["fr"] for n in range(10)}}
    settings["offline"] |= {"source-only": BENCHMARK.settings["offline"]["source-only"]}
    for number, warned in ((9, True), (10, False)):
        near = signals(judged_part(made(number), settings=settings))[1]
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
    judged = verification(judged_result(method, "dim", 0.5, 0.006, source_samples=70, **after))
    assert judged is not None
    assert (judged.verdict, judged.samples, judged.source_samples) == (expected, 1000, 70)


@pytest.mark.parametrize(
    ("marginals", "expected"),
    [({}, "restored"), ({"marginals": 0.009}, "restored"), ({"marginals": 0.03}, "partly restored")],
)
def test_a_cell_is_judged_by_its_marginals_too(marginals: dict[str, float], expected: str) -> None:
    judged = verification(
        replace(judged_result("full-gauss", "dim", 0.5, 0.003), signals={"slices": 0.003} | marginals)
    )
    assert judged is not None
    assert (judged.divergence, judged.marginals, judged.verdict) == (0.003, marginals.get("marginals"), expected)


def test_a_cell_that_was_not_measured_is_not_judged() -> None:
    whole = judged_result("fr", "dim", 0.5, 0.006)
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
        judged_result(*cell, protocol="few-shot-5")
        for cell in (*CELLS, ("fr-sliced", "dim", 0.86, 0.0065), ("fr", "apart", 0.9, 0.001))
    ]
    parts = {
        "offline": judged_part([], **changes),
        "few-shot-5": judged_part(few, "few-shot-5", clean=(), **changes),
        "few-shot-10": judged_part([], "few-shot-10", **changes),
    }
    (table,) = few_verdicts(parts)
    assert isinstance(table, Table)
    assert [(column.heading, column.title) for column in table.columns] == [("5 a class", "good"), ("5 a class", "bad")]
    said = "good: accuracy at most 10 points below that of the source model plain (of dim, inverse) on clean images"
    assert table.notes == (f"{said} (left out: 1 cells that start from another model)",)
    assert shown(table) == {"restored": [2, 1], "partly restored": [1, 0], "not restored": [0, 1]}
    near = [one for one in few if one.cell.shift != "apart"]
    (table,) = few_verdicts(parts | {"few-shot-5": judged_part(near, "few-shot-5", clean=(), **changes)})
    assert isinstance(table, Table)
    assert table.notes == (said,)
