"""The commands under `bench`: hand-made stores for what is printed, and one tiny benchmark that is really run."""

from __future__ import annotations

import csv
import io
import json
import re
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shiftmend.cli import main
from shiftmend.research.bench.benchmark import Benchmark, Cell, Outcome, Result
from shiftmend.research.bench.plan import plan
from shiftmend.research.bench.store import STORE, Store
from shiftmend.research.bench.suite import find

Accuracy = Callable[[Cell], float]

TINY = """
import torch
from shiftmend.research.bench.benchmark import CLEAN
from shiftmend.research.bench.benchmark import Benchmark
from shiftmend.research.bench.benchmark import Setting
from shiftmend.research.bench.benchmark import Source
from shiftmend.research.bench.benchmark import Target
from shiftmend.research.bench.benchmark import Offline
from shiftmend.research.bench.benchmark import Online
from shiftmend.research.bench.recipes import Recipe
from shiftmend.inputs.images import Split
from shiftmend.inputs.images import signed


def split(seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(120) % 3
    rows = torch.arange(16).view(1, 1, 16, 1)
    bars = (rows // 5 == labels.view(-1, 1, 1, 1)) * 160  # a bright bar at the top, in the middle or at the bottom
    noise = torch.randint(0, 60, (120, 1, 16, 16), generator=generator)
    return Split((bars + noise).to(torch.uint8), labels, f"bars-{seed}")


def load_target(shift, root):
    away = split(1)
    if shift == CLEAN:
        return Target(away, away, away)
    if shift == "broken":
        raise OSError("the [disk] is gone")
    seen = Split(away.images // 2, away.labels, "dim")
    return Target(seen, seen, away)


BARS = Benchmark(
    name="bars",
    title="Three bars",
    shifts=("dim", "broken"),
    groups={},
    sources={
        "plain": Recipe(
            network="digit-cnn",
            options={"classes": 3, "width": 2, "image_size": 16},
            epochs=6,
            batch_size=30,
        )
    },
    protocols={"offline": Offline(batch_size=40), "online": Online(batch_size=40)},
    settings={
        "offline": {
            "source-only": Setting("source-only"),
            "adabn": Setting("adabn"),
            "fr-slow": Setting("fr", {"epochs": 1, "learning_rate": 0.01}),
        },
        "online": {"adabn": Setting("adabn")},
    },
    load_source=lambda name, root: Source(split(0), split(0), split(1)),
    load_target=load_target,
    origin=lambda shift, root: "own",
    preprocess=signed,
    seeds=(1,),
    small=True,
)
NUMBER = 7
"""


@pytest.fixture(autouse=True)
def _no_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHIFTMEND_DATA", raising=False)


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["bench", *(str(argument) for argument in arguments)])
    shown = capsys.readouterr()
    return int(stop.value.code or 0), shown.out, shown.err


def ok(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    code, out, err = call(capsys, *arguments)
    assert code == 0, err
    return out


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert len(err.strip().splitlines()) == 1
    return err


def fill(folder: Path, benchmark: Benchmark, accuracy: Accuracy, protocol: str = "offline", **choice: object) -> None:
    """Record a result for each cell: `last` has the accuracy given, `selected` a point more and `best` two."""
    folder.mkdir(exist_ok=True)
    with Store(folder / STORE) as store:
        for cell in plan(benchmark, protocol, **choice):  # type: ignore[arg-type]
            value = accuracy(cell)
            last, selected, best = (
                Outcome(epoch, value + gain, (1 - value) / 2, 0.5, 1.25, 0.125)
                for epoch, gain in ((3, 0.0), (2, 0.01), (1, 0.02))
            )
            store.record(
                Result(
                    cell,
                    benchmark.origin(cell.shift, None),
                    last,
                    best,
                    selected,
                    signals={"slices": 1 - value, "entropy": value},
                    restoration_distance=4 * (1 - value),
                    seconds=2.0,
                    manifest={"source": {"name": "plain", "remark": REMARK}},
                    finished="2022-04-25T09:00:00Z",
                )
            )


REMARK = "digits of our own"
ACCURACIES = {"source-only": 0.5, "adabn": 0.6, "fr": 0.8, "bufr": 0.9, "target-supervised": 0.95}
SHIFTED = {"brightness": 0.0, "stripe": -0.1, "oranges": -0.2, "clean": 0.47}


def known(cell: Cell) -> float:
    """By method, less for harder shifts, and a little more for the second seed."""
    more = 0.02 if cell.seed == 234 else 0.0
    return ACCURACIES[cell.method] + SHIFTED[cell.shift] + (2 * more if cell.method == "bufr" else more)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    fill(folder, find("digits"), known, methods=list(ACCURACIES))
    return folder


@pytest.mark.slow
def test_list_and_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listing = ok(capsys, "list")
    assert re.search(r"^emnist-da +EMNIST-DA: characters, 13 shifts +13 +5 +offline, few-shot-5", listing, re.MULTILINE)
    rows = json.loads(ok(capsys, "list", "--json"))
    assert [row["name"] for row in rows][:2] == ["digits", "mnist-c"]
    shown = ok(capsys, "show", "emnist-da")
    assert re.search(r"^bufr +plain +epochs_per_block 30, learning_rate", shown, re.MULTILINE)
    assert re.search(r"^shot +shot +epochs 150, learning_rate 0.1", shown, re.MULTILINE)
    assert "label_smoothing 0.1" in shown
    assert "group severe: sky" in shown
    assert "seeds 123, 234, 345, 456, 567" in shown
    facts = json.loads(ok(capsys, "show", "emnist-da", "--json"))
    assert (facts["shifts"]["sky"], facts["shifts"]["fog"]) == ("rebuilt", "regenerated")
    assert facts["settings"]["offline"]["fr"]["options"] == {"epochs": 150, "learning_rate": 1.0}
    assert facts["settings"]["offline"]["fr"]["defaults"]["align"] == ["features", "logits"]
    (tmp_path / "EMNIST/sky/test").mkdir(parents=True)
    assert (
        json.loads(ok(capsys, "show", "emnist-da", "--data-root", tmp_path, "--json"))["shifts"]["sky"] == "published"
    )
    assert f"with the data under {tmp_path}\n" in ok(capsys, "show", "emnist-da", "--data-root", tmp_path)
    assert "epochs" not in json.loads(ok(capsys, "show", "digits", "--json"))["settings"]["online"]["fr"]["defaults"]


@pytest.mark.slow
def test_status_counts_cells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    benchmark = find("digits")
    fill(tmp_path, benchmark, known, methods=["fr"], seeds=[123])
    broken = plan(benchmark, methods=["bufr"], seeds=[123])[:2]
    with Store(tmp_path / STORE) as store:
        for cell in broken:
            store.record(Result(cell, "own", error="no room", seconds=1.0, finished="2022-04-25T09:00:00Z"))
        store.record(Result(replace(broken[0], recipe="old"), "own", error="x", finished="2022-04-25T09:00:00Z"))
    text = ok(capsys, "status", "digits", "-f", tmp_path)
    assert re.search(r"^fr +3 +0 +3 +6$", text, re.MULTILINE)
    assert re.search(r"^bufr +0 +2 +4 +2$", text, re.MULTILINE)
    assert "3 of 74 cells done" in text
    assert "bufr failed 2 times: no room" in text
    assert "1 more results are of other settings" in text
    facts = json.loads(ok(capsys, "status", "digits", "-f", tmp_path, "--json"))
    assert (facts["cells"], facts["others"]) == (74, 1)
    assert next(row for row in facts["rows"] if row["method"] == "bufr")["errors"] == {"no room": 2}
    # seeds of one's own count as far as they have been run
    fill(tmp_path, benchmark, known, methods=["fr"], seeds=[7])
    assert "6 of 77 cells done" in ok(capsys, "status", "digits", "-f", tmp_path)


@pytest.mark.slow
def test_the_table_has_the_numbers_of_the_store(digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = ok(capsys, "table", "digits", "-f", digits)
    # over shifts: 0.9 - 0.1 and 0.94 - 0.1, whose mean is 82.0 and deviation sqrt(2) * 2
    assert re.search(r"^bufr +82\.0 ± 2\.8\*$", text, re.MULTILINE)
    assert re.search(r"^fr +71\.0 ± 1\.4 *$", text, re.MULTILINE)
    assert "\nnot run: pl, shot-im, shot, tent, bnm, bnm-im, full-gauss\n" in text
    assert not re.search("^shot", text, re.MULTILINE)
    assert re.search("^shot +0 +0 +6 ", ok(capsys, "status", "digits", "-f", digits), re.MULTILINE)
    assert re.search(r"^adabn +51\.0 ± 1\.4 +52\.0 ± 1\.4 +53\.0 ± 1\.4 +\+1\.0 ± 0\.0 +\+1\.0", text, re.MULTILINE)
    assert "accuracy of the source model on clean images: 98.0 ± 1.4 (2 seeds)\n" in text
    assert "best is an oracle" in text
    assert "\x1b" not in text
    assert re.search(r"^oranges§ +31\.0", ok(capsys, "table", "digits", "-f", digits, "--per-shift"), re.MULTILINE)
    assert "ECE of the source model on clean images: 1.0 ± 0.7" in ok(
        capsys, "table", "digits", "-f", digits, "--metric", "ece"
    )
    made = json.loads(ok(capsys, "table", "digits", "-f", digits, "--json", "--methods", "fr,bufr"))
    assert [row["label"] for row in made[0]["rows"]] == ["fr", "bufr"]
    assert made[0]["rows"][1]["entries"][0]["value"] == pytest.approx(82.0)
    assert made[0]["rows"][1]["entries"][0]["best"] is True
    assert "seconds" in ok(capsys, "table", "digits", "-f", digits, "--metric", "seconds")


@pytest.mark.slow
def test_a_table_of_some_shifts_has_no_mean(digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = ok(capsys, "table", "digits", "-f", digits, "--shifts", "oranges,stripe", "--methods", "fr,bufr")
    assert re.search(r"^stripe§ +71\.0 ± 1\.4 +82\.0 ± 2\.8\*$", text, re.MULTILINE)
    assert re.search(r"^oranges§ +61\.0 ± 1\.4 +72\.0 ± 2\.8\*$", text, re.MULTILINE)
    assert "brightness" not in text
    assert "all" not in text.replace("§ data of our own: all shifts", "")
    assert "all 3 shifts" in ok(capsys, "table", "digits", "-f", digits, "--shifts", "oranges,stripe,brightness")


@pytest.mark.slow
def test_the_papers_figures_and_notes_stand_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    benchmark = find("emnist-da")
    fill(tmp_path, benchmark, lambda cell: 0.88 if cell.shift == "clean" else 0.75, methods=["source-only", "fr"])
    text = ok(capsys, "table", "emnist-da", "-f", tmp_path, "--methods", "source-only,fr")
    assert re.search(r"^fr +75\.0 ± 0\.0\* +74\.4 ± 0\.8 +\+0\.6", text, re.MULTILINE)
    assert "on clean images: 88.0 ± 0.0 (5 seeds), in the paper 89.4 ± 0.1" in text
    assert "† rebuilt, with other textures" in text
    notes = "SHOT: 80.0 in the paper but 76.1 in the re-run"
    assert notes in text
    plain = ok(capsys, "table", "emnist-da", "-f", tmp_path, "--beside", "none")
    assert notes not in plain
    assert "89.4" not in plain
    some = ok(capsys, "table", "emnist-da", "-f", tmp_path, "--shifts", "sky", "--methods", "fr")
    assert re.search(r"^sky† +75\.0 ± 0\.0 +15\.3 ± 6\.8", some, re.MULTILINE)
    markdown = ok(capsys, "table", "emnist-da", "-f", tmp_path, "--format", "markdown", "--methods", "source-only,fr")
    assert "| fr | **75.0 ± 0.0** | 74.4 ± 0.8 | +0.6 |" in markdown


@pytest.mark.slow
def test_results_on_published_data_can_be_read_without_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    benchmark = find("emnist-da")
    there = replace(benchmark, origin=lambda shift, root: "published")
    fill(tmp_path, there, lambda cell: 0.75, methods=["source-only", "fr"])
    text = ok(capsys, "table", "emnist-da", "-f", tmp_path)
    assert re.search(r"^fr +75\.0", text, re.MULTILINE)
    assert "†" not in text
    # once there are results of rebuilt data, which is what a run here would go on with, those are shown
    fill(tmp_path, benchmark, lambda cell: 0.5, methods=["source-only", "fr"], seeds=[123])
    text = ok(capsys, "table", "emnist-da", "-f", tmp_path)
    assert re.search(r"^fr +50\.0\* ", text, re.MULTILINE)
    assert "more results are of other settings" in text


@pytest.mark.slow
def test_bold_on_a_terminal_and_whole_on_a_narrow_one(
    digits: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "44")
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = ok(capsys, "table", "digits", "-f", digits, "--methods", "adabn,fr,bufr")
    assert "\x1b[1m" in text
    assert "\x1b[2m" in text
    styles = re.compile(r"\x1b\[[0-9;]*m")
    plain = styles.sub("", text)
    assert "82.0 ± 2.8*" in plain
    assert max(len(line) for line in plain.splitlines()) <= 44
    for command in (["list"], ["status", "digits", "-f", digits], ["compare", "digits", "fr", "bufr", "-f", digits]):
        narrow = styles.sub("", ok(capsys, *command))
        assert "…" not in narrow
    monkeypatch.setenv("COLUMNS", "5")
    assert "bufr" in styles.sub("", ok(capsys, "table", "digits", "-f", digits))


@pytest.mark.slow
def test_compare_tells_differences_from_luck(digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = ok(capsys, "compare", "digits", "bufr", "fr", "-f", digits)
    # differences of 10 and 12 points: t = 11 / (sqrt(2) / sqrt(2)) = 11, one degree of freedom
    expected = 2 * (0.5 - np.arctan(11) / np.pi)
    found = re.search(r"^oranges +2 +\+11\.0 ± 1\.4 +(\S+) +(\S+) +no difference shown$", text, re.MULTILINE)
    assert found is not None
    assert float(found[1]) == pytest.approx(expected, rel=0.02)
    assert float(found[2]) == pytest.approx(3 * expected, rel=0.02)
    assert "accuracy in percent, last" in text
    assert text.endswith(f"{REMARK}\n")
    rows = json.loads(ok(capsys, "compare", "digits", "bufr", "fr", "-f", digits, "--json"))
    assert [row["shift"] for row in rows] == ["brightness", "oranges", "stripe", None]
    assert rows[0]["p"] == pytest.approx(expected)
    assert re.search(r"\+0\.00 ± 0\.00", ok(capsys, "compare", "digits", "bufr", "fr", "-f", digits, "--metric", "nll"))
    fill(tmp_path, find("digits"), lambda cell: np.inf if cell.method == "fr" else 0.5, methods=["fr", "adabn"])
    for row in json.loads(ok(capsys, "compare", "digits", "fr", "adabn", "-f", tmp_path, "--json")):
        assert row["difference"] == "Infinity"


@pytest.mark.slow
def test_a_mean_over_some_shifts_is_not_called_one_over_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("compare", "digits", "bufr", "fr", "-f", tmp_path)
    fill(tmp_path, find("digits"), known, methods=["bufr", "fr"], shifts=["stripe", "oranges"])
    text = ok(capsys, *asked)
    assert re.search(r"^2 of 3 shifts +2 +\+11\.0 ± 1\.4 ", text, re.MULTILINE)
    assert "all shifts" not in text
    assert json.loads(ok(capsys, *asked, "--json"))[-1]["shifts"] == 2
    fill(tmp_path, find("digits"), known, methods=["bufr", "fr"])
    assert re.search(r"^all shifts +2 +\+11\.0 ± 1\.4 ", ok(capsys, *asked), re.MULTILINE)


def test_a_remark_on_many_shifts_is_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, find("digits"), known, methods=["bufr", "fr"], seeds=[123])
    text = ok(capsys, "compare", "digits", "bufr", "fr", "-f", tmp_path)
    assert text.count("too few seeds") == 4
    assert "bufr is better on 3 of 3 shifts, fr on 0" in text
    lower = ok(capsys, "compare", "digits", "fr", "bufr", "-f", tmp_path, "--metric", "ece")
    assert "fr is better on 0 of 3 shifts, bufr on 3" in lower
    assert re.search(r"^only one seed done by both: .* and 1 more$", text, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"target": {"sha256": "other"}}, "not every cell was run on the same images of stripe; run"),
        ({"source": {"name": "plain", "file": "other"}}, "source model plain was not trained on the same images for"),
        (
            {"source_weights": "other"},
            "starts from the same training of the source model plain of seed 234; run",
        ),
    ],
)
def test_results_on_other_images_or_models_are_not_mixed_in_silently(
    tmp_path: Path, facts: dict[str, object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = {"target": {"sha256": "one"}, "source": {"name": "plain", "file": "one"}, "source_weights": "one"}
    fill(tmp_path, find("digits"), known, methods=["bufr", "fr"])
    commands = (["table", "digits"], ["compare", "digits", "bufr", "fr"], ["correlate", "digits"])
    for changed in ({}, facts):
        with sqlite3.connect(tmp_path / STORE) as connection:
            connection.execute("update cells set manifest = ?, sha256 = NULL", [json.dumps(manifest)])
            connection.execute(
                "update cells set manifest = ?, sha256 = NULL where method = 'fr' and shift = 'stripe' and seed = 234",
                [json.dumps(manifest | changed)],
            )
        for command in commands:
            assert (said in " ".join(ok(capsys, *command, "-f", tmp_path).split())) == bool(changed)


@pytest.mark.slow
def test_correlate(digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = ok(capsys, "correlate", "digits", "-f", digits)
    assert "over methods: +1.00 (4 points)" in text
    assert re.search(r"^slices +-1\.00 \(mean of 3\) +-1\.00 \(24 points\)$", text, re.MULTILINE)
    assert re.search(r"^marginals +– +– \(too few points", text, re.MULTILINE)
    assert "target-supervised  " not in text
    assert text.endswith(f"{REMARK}\n")
    facts = json.loads(ok(capsys, "correlate", "digits", "-f", digits, "--json"))
    assert set(facts["restoration"]["means"]) == {"source-only", "adabn", "fr", "bufr"}
    assert facts["signals"]["entropy"]["within_shifts"] == pytest.approx(1)


@pytest.mark.slow
def test_variants_of_other_seeds_do_not_keep_methods_from_being_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path, find("mnist-c"), lambda cell: 0.5, methods=["fr", "bufr"], seeds=[123])
    fill(tmp_path, find("mnist-c"), lambda cell: 0.5, methods=["fr-sliced"], seeds=[234])
    text = ok(capsys, "correlate", "mnist-c", "-f", tmp_path)
    assert "\nmeans over 15 shifts x seeds" in text
    assert "\nwithout fr-sliced, for lack of common seeds\n" in text


@pytest.mark.slow
def test_features_of_another_source_model_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.py").write_text(
        "from dataclasses import replace\nfrom shiftmend.research.bench.benchmark import Setting\n"
        "from shiftmend.research.bench.suite.digits import BENCHMARK\n"
        "ROWS = {**BENCHMARK.settings['offline'], 'mine': Setting('fr', source='shot')}\n"
        "MINE = replace(BENCHMARK, settings={**BENCHMARK.settings, 'offline': ROWS})"
    )
    name = f"{tmp_path}/own.py:MINE"
    fill(tmp_path, find(name), lambda cell: 0.5, methods=["source-only", "fr", "mine"])
    text = ok(capsys, "correlate", name, "-f", tmp_path)
    assert "\nwithout mine, whose source model is another\n" in text
    assert not re.search(r"^mine ", text, re.MULTILINE)
    note = "; mine (whose source model is another) is left out\n"
    assert note in ok(capsys, "page", name, "-f", tmp_path)


def test_export_and_the_sqlite_shell(digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(csv.DictReader(io.StringIO(ok(capsys, "export", "-f", digits))))
    assert len(rows) == 5 * 3 * 2 + 2
    assert "written to" in ok(capsys, "export", "-f", digits, "--format", "json", "-o", tmp_path / "new/all.json")
    exported = json.loads((tmp_path / "new/all.json").read_text())
    found = sorted(row["last_accuracy"] for row in exported if row["method"] == "adabn")
    assert found == pytest.approx([0.4, 0.42, 0.5, 0.52, 0.6, 0.62])
    with sqlite3.connect(digits / STORE) as connection:
        query = "select avg(last_accuracy) from cells where status = 'done' and method = 'fr'"
        assert connection.execute(query).fetchone()[0] == pytest.approx(0.71)


@pytest.mark.slow
def test_merge(digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path / "other", find("digits"), known, methods=["fr"], seeds=[9])
    here = tmp_path / "here"
    text = ok(capsys, "merge", digits, tmp_path / "other" / STORE, "-f", here)
    assert f"32 results from {digits / STORE}" in text
    assert f"3 results from {tmp_path / 'other' / STORE}" in text
    assert json.loads(ok(capsys, "merge", digits, "-f", here, "--json")) == {str(digits / STORE): 0}
    twice = json.loads(ok(capsys, "merge", digits, digits / STORE, "-f", tmp_path / "twice", "--json"))
    assert twice == {str(digits / STORE): 32}
    ok(capsys, "export", "-f", here, "--format", "compact", "-o", tmp_path / "all.json")
    again = json.loads(ok(capsys, "merge", tmp_path / "all.json", "-f", tmp_path / "again", "--json"))
    assert again == {str(tmp_path / "all.json"): 35}
    ok(capsys, "export", "-f", tmp_path / "again" / STORE, "--format", "compact", "-o", tmp_path / "second.json")
    assert (tmp_path / "second.json").read_text() == (tmp_path / "all.json").read_text()
    assert "with itself" in refused(capsys, "merge", here, "-f", here)
    assert "Expected a store" in refused(capsys, "merge", digits, tmp_path / "nowhere", "-f", tmp_path / "fresh")
    assert not (tmp_path / "fresh").exists()


@pytest.mark.slow
def test_a_benchmark_of_ones_own_is_run_resumed_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bars.py").write_text(TINY)
    name, home = f"{tmp_path}/bars.py:BARS", tmp_path / "out"
    assert "fr-slow (fr)" in ok(capsys, "show", name)
    common = ("run", name, "-f", home, "--workers", 1, "--device", "cpu")
    report = json.loads(ok(capsys, *common, "--shifts", "dim,clean", "--methods", "source-only,adabn", "--json"))
    assert (report["cells"], report["already"], report["done"], report["failed"]) == (3, 0, 3, [])
    text = ok(capsys, *common, "--shifts", "dim")
    assert re.search(r"^1/1  fr-slow on dim, seed 1: \d", text, re.MULTILINE)
    assert "1 cell done in" in text
    assert "2 were done before, 0 failed" in text
    assert f"see `shiftmend bench table {name} --folder {home}`" in text
    # a failed cell is no reason to stop, but one to say so
    code, out, _ = call(capsys, *common)
    assert code == 1
    assert "0 cells done" in out
    assert "4 were done before, 3 failed" in out
    assert "failed: source-only on broken, seed 1 and 2 more: OSError: the [disk] is gone" in out
    code, out, _ = call(capsys, *common, "--json")
    assert code == 1
    assert json.loads(out)["failed"][0]["cell"]["shift"] == "broken"
    made = json.loads(ok(capsys, "table", name, "-f", home, "--shifts", "dim", "--json"))
    with Store(home / STORE, read_only=True) as store:
        (adabn,) = store.results(method="adabn", shift="dim")
    assert adabn.last is not None
    (row,) = made[0]["rows"]
    assert row["entries"][1]["value"] == pytest.approx(100 * adabn.last.accuracy)
    assert "1/2" in ok(capsys, "table", name, "-f", home)  # no mean before every shift is there
    out = ok(capsys, *common, "--protocol", "online", "--shifts", "dim")
    assert f"--folder {home} --protocol online`" in out
    rates = ("--learning-rates", "0.01,0.1")
    out = ok(capsys, *common, "--shifts", "dim", "--methods", "fr-slow", *rates)
    assert "--learning-rates 0.01,0.1`" in out
    assert "1 of 7 cells done" not in ok(capsys, "status", name, "-f", home)
    assert re.search(r"^fr-slow +1 +0 +1", ok(capsys, "status", name, "-f", home, *rates), re.MULTILINE)


@pytest.mark.slow
def test_names_of_ones_own_are_printed_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    method = "fr [a] [/b] :warning:"
    (tmp_path / "my bars.py").write_text(TINY.replace("fr-slow", method))
    name, home = f"{tmp_path}/my bars.py:BARS", tmp_path / "my results"
    fill(home, find(name), lambda cell: 0.5)
    assert method in ok(capsys, "show", name)
    for command in (("status", name), ("table", name), ("correlate", name), ("compare", name, "adabn", method)):
        assert method in ok(capsys, *command, "-f", home)
    assert f"see `shiftmend bench table '{name}' --folder '{home}'`" in ok(capsys, "run", name, "-f", home)


def test_output_in_an_old_encoding(
    digits: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))
    code, _, err = call(capsys, "table", "digits", "-f", digits)
    assert (code, err) == (
        2,
        "error: output in latin-1 cannot hold '\\u2500'; set PYTHONIOENCODING=utf-8 and call again\n",
    )


FOLDER = ["-f", "{digits}"]
NONSENSE: list[tuple[list[str], str]] = [
    (["fly"], "No such command"),
    (["show"], "Missing argument 'BENCHMARK'"),
    (["show", "digit"], "Try digits."),
    (["show", "{tmp}/none.py:X"], "is missing"),
    (["show", "{tmp}/bars.py:NUMBER"], "a Benchmark called NUMBER"),
    (["show", "{tmp}/wrong.py:X"], "could not be run: SyntaxError"),
    (["show", "{tmp}/odd.py:BARS"], "'mine'"),
    (["run", "{tmp}/odd.py:BARS", "-f", "{tmp}/new"], "'mine'"),
    (["show", "digits", "--data-root", "{tmp}/nowhere"], "does not exist"),
    (["run", "digits", "-f", "{tmp}/file"], "Expected a folder"),
    (["run", "digits", "-f", "{tmp}/file/below"], "Expected a folder"),
    (["run", "digits", "-f", "{tmp}/new", "--methods", "fry"], "Try fr."),
    (["run", "digits", "-f", "{tmp}/new", "--methods", ","], "at least one method"),
    (["run", "digits", "-f", "{tmp}/new", "--shifts", "sky"], "got 'sky'"),
    (["run", "digits", "-f", "{tmp}/new", "--seeds", "1.5"], "whole numbers"),
    (["run", "digits", "-f", "{tmp}/new", "--seeds", "-1"], "whole numbers from 0"),
    (["run", "digits", "-f", "{tmp}/new", "--seeds", "99999999999999999999"], "whole numbers from 0"),
    (["run", "digits", "-f", "{tmp}/new", "--seeds", ","], "whole numbers"),
    (["run", "digits", "-f", "{tmp}/new", "--learning-rates", "fast"], "positive numbers"),
    (["run", "digits", "-f", "{tmp}/new", "--learning-rates", "nan"], "positive numbers"),
    (["run", "digits", "-f", "{tmp}/new", "--learning-rates", ","], "positive numbers"),
    (["run", "digits", "-f", "{tmp}/new", "--workers", "0"], "at least 1"),
    (["run", "digits", "-f", "{tmp}/new", "--workers", "many"], "see `shiftmend bench run --help`"),
    (["run", "digits", "-f", "{tmp}/new", "--executor", "slurm"], "slurm"),
    (["run", "digits", "-f", "{tmp}/new", "--protocol", "offfline"], "(offline, online, few-shot-20, rehearsed)"),
    (["run", "mnist-c", "-f", "{tmp}/new", "--data-root", "{tmp}/nowhere"], "does not exist"),
    (["status", "digits", "-f", "{tmp}/nowhere"], "Run a benchmark"),
    (["status", "digits", "-f", "{tmp}/file"], "cannot be used as results"),
    (["status", "digits", "-f", "{tmp}/junk"], "no SQLite database"),
    (["status", "digits", "-f", "x" * 300], "cannot be used (File name too long); see to its name and permissions"),
    (["table", "digits", *FOLDER, "--protocol", "online"], "results of digits, online"),
    (["table", "mnist-c", *FOLDER], "results of mnist-c, offline"),
    (["table", "digits", *FOLDER, "--learning-rates", "0.5", "--methods", "fr"], "6 are of other settings"),
    (["table", "digits", *FOLDER, "--seeds", "7"], "Expected results of"),
    (["table", "digits", *FOLDER, "--seeds", ","], "whole numbers"),
    (["table", "digits", *FOLDER, "--metric", "acc"], "got 'acc'"),
    (["table", "digits", *FOLDER, "--which", "first"], "last, best or selected"),
    (["table", "digits", *FOLDER, "--which", "best", "--metric", "seconds"], "got best"),
    (["table", "digits", *FOLDER, "--beside", "paper-elsewhere"], "paper, re-run or none"),
    (["table", "digits", *FOLDER, "--format", "pdf"], "pdf"),
    (["table", "digits", *FOLDER, "--format", "html", "--json"], "--json or --format html"),
    (["table", "digits", *FOLDER, "--methods", "fry"], "Try fr."),
    (["table", "digits", *FOLDER, "--shifts", "clean"], "got 'clean'"),
    (["table", "digits", *FOLDER, "--shifts", ","], "at least one shift"),
    (["table", "digits", *FOLDER, "--out", "{tmp}/folder"], "is a folder"),
    (["table", "digits", *FOLDER, "--out", "{tmp}/file/x.md"], "cannot be written"),
    (["compare", "digits", "fr", *FOLDER], "Missing argument 'SECOND'"),
    (["compare", "digits", "fr", "fr", *FOLDER], "fr twice"),
    (["compare", "digits", "fr", "fry", *FOLDER], "Try fr."),
    (["compare", "digits", "fr", "tent", *FOLDER], "finished results of tent"),
    (["compare", "digits", "fr,bufr", "adabn", *FOLDER], "got 'fr,bufr'"),
    (["compare", "digits", "fr", "bufr", *FOLDER, "--metric", "seconds"], "got last seconds"),
    (["compare", "digits", "fr", "bufr", *FOLDER, "--which", "first"], "got first accuracy"),
    (["correlate", "digits", *FOLDER, "--protocol", "online"], "Expected results of"),
    (["export", *FOLDER, "--format", "xml"], "csv, json or compact"),
    (["export", "-f", "{tmp}/nowhere"], "Expected a store"),
    (["export", *FOLDER, "--out", "{tmp}/folder"], "is a folder"),
    (["export", *FOLDER, "--out", "{tmp}/file/new/x.csv"], "x.csv cannot be written (Not a directory)"),
    (["page", "digits", *FOLDER, "--out", "{tmp}/file/x.md"], "x.md cannot be written"),
    (["page", "digits", *FOLDER, "--notes", "{digits}/results.sqlite"], "notes in UTF-8"),
    (["merge", "-f", "{tmp}/new"], "Missing argument"),
    (["merge", "{tmp}/nowhere", "-f", "{tmp}/new"], "Expected a store"),
    (["merge", "{tmp}/folder", "-f", "{tmp}/new"], "Expected a store"),
    (["merge", "{tmp}/junk", "-f", "{tmp}/new"], "no SQLite database"),
    (["merge", "{tmp}/file", "-f", "{tmp}/new"], "cannot be used as results"),
    (["merge", "{digits}", "-f", "{tmp}/file"], "cannot be written"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "words"), NONSENSE, ids=[" ".join(a)[:70] for a, _ in NONSENSE])
def test_nonsense_gets_one_sentence(
    digits: Path, tmp_path: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bars.py").write_text(TINY)
    (tmp_path / "odd.py").write_text(TINY.replace('"own"', '"mine"'))
    (tmp_path / "wrong.py").write_text("def")
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "junk").mkdir()
    (tmp_path / f"junk/{STORE}").write_text("no database")
    before = sorted(tmp_path.rglob("*"))
    filled = [argument.replace("{tmp}", str(tmp_path)).replace("{digits}", str(digits)) for argument in arguments]
    assert words in refused(capsys, *filled)
    assert [path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in path.parts] == before


@pytest.mark.slow
def test_a_compact_export_serves_in_place_of_the_store(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "digits.json"
    ok(capsys, "export", "digits", "-f", digits, "--format", "compact", "-o", file)
    for command in (["table", "digits"], ["compare", "digits", "bufr", "fr"], ["correlate", "digits"]):
        assert ok(capsys, *command, "-f", file) == ok(capsys, *command, "-f", digits)
    assert ok(capsys, "status", "digits", "-f", file) == ok(capsys, "status", "digits", "-f", digits)
    assert "results of mnist-c" in refused(capsys, "export", "mnist-c", "-f", digits)
    assert "csv, json or compact" in refused(capsys, "export", "-f", digits, "--format", "xml")
    assert len(list(csv.DictReader(io.StringIO(ok(capsys, "export", "-f", file))))) == 32


@pytest.mark.slow
def test_page_takes_the_notes_beside_it(digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "digits.md"
    ok(capsys, "page", "digits", "-f", digits, "-o", out)
    assert "## Notes" not in out.read_text()
    assert out.read_text() == ok(capsys, "page", "digits", "-f", digits)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/digits.md").write_text("Mind the *step*.\n")
    ok(capsys, "page", "digits", "-f", digits, "-o", out)
    assert "\n\nMind the *step*.\n\n</details>" in out.read_text().split("## Notes\n")[1]
    (tmp_path / "mine.md").write_text("Mine.")
    assert "\n\nMine.\n\n</details>" in ok(capsys, "page", "digits", "-f", digits, "--notes", tmp_path / "mine.md")
    assert "Expected notes" in refused(capsys, "page", "digits", "-f", digits, "--notes", tmp_path / "none.md")
    assert "results of mnist-c" in refused(capsys, "page", "mnist-c", "-f", digits)
    assert ok(capsys, "page", "digits", "-f", digits, "--data-root", digits) == ok(
        capsys, "page", "digits", "-f", digits
    )
    assert "does not exist" in refused(capsys, "page", "digits", "-f", digits, "--data-root", tmp_path / "none")


@pytest.mark.slow
def test_json_goes_to_the_file_that_is_named(digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = ok(capsys, "table", "digits", "-f", digits, "--json")
    assert "written to" in ok(capsys, "table", "digits", "-f", digits, "--json", "-o", tmp_path / "table.json")
    assert (tmp_path / "table.json").read_text() == shown
    ok(capsys, "storage", "--benchmarks", "digits", "-f", tmp_path, "--json", "-o", tmp_path / "storage.json")
    assert json.loads((tmp_path / "storage.json").read_text())[0]["benchmark"] == "digits"


def test_ctrl_c_is_answered(digits: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shiftmend.research.bench.run.run", interrupt)
    code, out, err = call(capsys, "run", "digits", "-f", digits)
    assert (code, out, err.strip()) == (130, "", "interrupted")


@pytest.mark.slow
def test_storage_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "storage", "--benchmarks", "digits", "-f", tmp_path, "--json")
    assert (code, err) == (0, "")
    (row,) = json.loads(out)
    assert (row["benchmark"], row["pixels"], row["trained"]) == ("digits", 900 * 28 * 28, False)
    assert re.search(r"^digits +0\.011 +0\.011 ", ok(capsys, "storage", "--benchmarks", "digits"), re.MULTILINE)
    ok(capsys, "storage", "--benchmarks", "digits", "-o", tmp_path / "storage.md")
    assert (tmp_path / "storage.md").read_text().startswith("# What a profile costs\n")


@pytest.mark.slow
def test_a_folder_to_write_to_is_made(digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, table, export = (
        tmp_path / f"not/yet/{number}/{name}" for number, name in enumerate(("x.md", "y.md", "z.csv"))
    )
    ok(capsys, "page", "digits", "-f", digits, "--out", page)
    ok(capsys, "table", "digits", "-f", digits, "--format", "markdown", "--out", table)
    assert f"written to {export}" in ok(capsys, "export", "-f", digits, "--out", export).replace("\n", "")
    assert page.read_text().startswith("# ")
    assert table.read_text().startswith("### digits, offline")
    assert len(list(csv.DictReader(export.open()))) == 32


@pytest.mark.slow
def test_a_page_does_not_tell_where_it_was_made(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert digits.is_absolute()
    page = ok(capsys, "page", "digits", "-f", digits)
    assert str(digits) not in page
    assert digits.name not in page
    monkeypatch.chdir(digits.parent)
    assert ok(capsys, "page", "digits", "-f", digits.name) == page
    ok(capsys, "page", "digits", "-f", digits, "-o", tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text() == page


def test_clean_images_of_one_of_several_source_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, find("usps"), lambda cell: 0.75, methods=["source-only", "fr"], seeds=[123])
    text = ok(capsys, "table", "usps", "-f", tmp_path)
    said = "accuracy of the source model plain-mnist (of mnist-to-usps) on clean images: 75.0 (one seed)"
    assert f"\n{said}\n" in text
    page = ok(capsys, "page", "usps", "-f", tmp_path)
    assert f"- {said}\n" in page
    assert "below that of the source model plain-mnist (of mnist-to-usps) on clean images" in page
