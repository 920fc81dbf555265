"""The page of a benchmark: from hand-made results whose figures are known."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shiftmend.errors import DataError
from shiftmend.research.bench import footnotes, tables
from shiftmend.research.bench import pages as label_free
from shiftmend.research.bench import tables as tabular
from shiftmend.research.bench.benchmark import SIGNALS, Cell, Outcome, Result
from shiftmend.research.bench.pages import Part, page
from shiftmend.research.bench.plan import plan
from shiftmend.research.bench.published import figure
from shiftmend.research.bench.results import read
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
    slices = section(emnist, "Does it help to align slices too?")
    assert re.search(
        r"^\| all shifts \| 2 \| \+2\.\d ± 0\.0 \| < 0\.001 \| < 0\.001 \| bufr-sliced better \|$", slices, re.MULTILINE
    )
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
    assert section(emnist, "Notes").strip() == "Fog is *thicker* here."
    assert emnist.index("## Notes") < emnist.index("## Accuracy"), "what to make of the tables comes before them"


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
    assert "slices too" not in text


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
    slices = section(text, "Does it help to align slices too?")
    assert re.search(r"^\| fog \| 3 \| \+21\.7 ", slices.replace("‡", ""), re.MULTILINE)
    assert re.search(r"^\| all shifts \| 2 \| \+10\.0 ± 0\.0 \|", slices, re.MULTILINE)
    variants = section(text, "Variants of a method")
    assert re.search(r"^\| bufr-sliced \| bufr \| 2 \| \+10\.0 ± 0\.0 \|", variants, re.MULTILINE)
    assert "without seeds that lack shifts (345)" in variants


@pytest.mark.slow
def test_a_remark_on_many_shifts_is_made_once(tmp_path: Path) -> None:
    cells = plan(find("emnist-da"), methods=["bufr", "bufr-sliced"], seeds=[123])
    cells += plan(find("emnist-da"), methods=["bufr", "bufr-sliced"], seeds=[234], shifts=["fog"])
    text = page("emnist-da", write(tmp_path, "emnist-da", cells, lambda cell: len(cell.method) / 20 + cell.seed / 1e5))
    remarks = [line for line in section(text, "Does it help to align slices too?").splitlines() if "seed " in line]
    assert remarks == [
        "- only one seed done by both: bricks, crystals, dotted\\_line and 9 more",
        "- only one seed done by both; without seeds that lack shifts (234): all shifts",
    ]


@pytest.mark.slow
def test_no_mean_of_differences_without_a_whole_seed(tmp_path: Path) -> None:
    benchmark = find("emnist-da")
    cells = [
        *plan(benchmark, methods=["bufr"], seeds=[123], shifts=list(benchmark.shifts)),
        *plan(benchmark, methods=["bufr-sliced"], seeds=[123], shifts=["fog", "sky"]),
    ]
    text = page("emnist-da", write(tmp_path, "emnist-da", cells, lambda cell: len(cell.method) / 20))
    slices = section(text, "Does it help to align slices too?")
    assert re.search(r"^\| all shifts \| 0 \| – \| – \| – \| too few seeds \|$", slices, re.MULTILINE)
    assert "- no seed has every shift by both: all shifts" in slices
    # of the two shifts that both have done, and so are neither better nor worse on the eleven others
    assert "- bufr-sliced is better on 2 of 2 shifts, bufr on 0" in slices
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
    with pytest.raises(DataError, match="has no results of mnist-c as it is now; run"):
        page("mnist-c", file)
    file.write_text(to_compact([made(replace(cells[0], recipe="old"), "own", 0.5)]))
    with pytest.raises(DataError, match="as it is now, but 1 of other settings"):
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
    assert "| 2 of 13 shifts | 2 |" in section(text, "Does it help to align slices too?")
    assert "all shifts |" not in section(text, "Does it help to align slices too?")
    assert "- the mean is over 2 of 13 shifts" in section(text, "Variants of a method")


def test_two_tables_become_one() -> None:
    cells = [Cell("emnist-da", "offline", "fr", shift, 1, "r") for shift in find("emnist-da").shifts]
    results = [made(cell, "published", 0.5) for cell in cells]
    asked = {"benchmark": "emnist-da", "protocol": "offline", "methods": ["fr"], "shifts": find("emnist-da").shifts}
    paper, again, none = (tables.summary(results, **asked, beside=side) for side in ("paper", "re-run", None))  # type: ignore[arg-type]
    both = tabular.beside_both(paper, again)
    assert [column.title for column in both.columns] == ["ours", "paper", "ours - paper", "re-run", "ours - re-run"]
    assert both.rows[0].entries == (*paper.rows[0].entries, *again.rows[0].entries[1:])
    assert set(both.notes) == {*paper.notes, *again.notes}
    assert len(both.notes) == len(set(both.notes)) > len(paper.notes) > 1
    assert [column.title for column in tabular.beside_both(paper, none).columns] == ["ours", "paper", "ours - paper"]
    assert [column.title for column in tabular.beside_both(none, again).columns] == ["ours", "re-run", "ours - re-run"]
    with pytest.raises(DataError, match="at least one"):
        tables.across(results, benchmark="emnist-da", protocols={}, methods=["fr"], shifts=["sky"])
