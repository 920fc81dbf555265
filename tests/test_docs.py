"""The documentation's examples run as written, and its links lead somewhere."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from worlds import GAIN, OFFSET, sensors

import shiftmend
from shiftmend.cli import main
from shiftmend.methods import METHODS
from shiftmend.research.analysis.toys import offset_toy
from shiftmend.research.bench.run import run
from shiftmend.research.networks import MODELS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]


def in_the_repository(page: Path) -> str:
    return str(page.relative_to(ROOT))


def code_blocks(page: Path, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.slow
def test_the_readme_runs_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    world = sensors()
    clean = (world.target - OFFSET) / GAIN
    names = {
        "model": world.model,
        "source_loader": DataLoader(TensorDataset(world.source), batch_size=200),
        "held_out_loader": DataLoader(TensorDataset(clean[::2], world.labels[::2]), batch_size=200),
        "target_loader": DataLoader(TensorDataset(world.target[1::2], world.labels[1::2]), batch_size=200),
    }
    home, away = code_blocks(ROOT / "README.md")
    assert "held_out_loader, profile)" in home
    home = home.replace("loader, profile)", "loader, profile, quick=True, candidates=['match-moments', 'adabn'])")
    exec(home, dict(names))
    exec(away, after := dict(names))
    assert "was chosen of untouched" in capsys.readouterr().out
    assert (tmp_path / "mended/manifest.json").exists()
    assert world.accuracy(after["mended"]) > 0.95 > world.accuracy(world.model)


class ImageAndAge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.stem = nn.Linear(5, 2), nn.Conv2d(3, 4, 3)

    def forward(self, image: Tensor, age: Tensor) -> Tensor:
        return self.head(torch.cat([self.stem(image).mean((2, 3)), age], dim=1))


def test_the_profile_page_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    joining, refreshing, merging, mixing, by_hand = code_blocks(ROOT / "docs/profiles.md")[-5:]
    given = {"nn": nn, "torch": torch, "shiftmend": shiftmend, "net": ImageAndAge()}
    exec(joining, found := given | {"images": torch.randn(20, 3, 32, 32), "ages": torch.rand(20, 1)})
    assert str(found["profile"].specs["logits"]) == "net.head"
    world = sensors()
    names: dict[str, Any] = {"shiftmend": shiftmend, "model": world.model}
    names |= {"hospital_a": world.source, "hospital_b": world.target}
    exec(refreshing, names | {"loader": world.source})
    exec(merging, names)
    for part, name in (("first", "benign"), ("second", "tumour")):
        names[part].save(f"{name}.profile")
    exec(mixing, names)
    assert 0 < names["site"].samples < names["both"].samples
    loader = [torch.randn(64, 8) for _ in range(3)]
    names = {"nn": nn, "torch": torch, "shiftmend": shiftmend, "loader": loader, "x": loader[0] + 1}
    exec(by_hand, names | {"backbone": nn.Linear(8, 512), "head": nn.Linear(512, 2)})


@pytest.mark.slow
def test_the_page_of_when_it_works_runs_as_written(capsys: pytest.CaptureFixture[str]) -> None:
    offset, mixing = code_blocks(ROOT / "docs/when-it-works.md")
    exec(offset, {})
    assert capsys.readouterr().out.rstrip().endswith("1.0")
    toy = offset_toy(positives=0.9)
    names: dict[str, Any] = {"shiftmend": shiftmend, "model": toy.model, "target": toy.target_inputs}
    names |= {"images": toy.source_inputs, "labels": toy.source_labels}
    exec(mixing, names)
    assert names["result"].before.excess < shiftmend.verify(toy.model, toy.target_inputs, names["whole"]).excess


@pytest.mark.slow
def test_the_methods_page_runs_as_written() -> None:
    calls, auto, selection, online, own, _, history = code_blocks(ROOT / "docs/methods.md")  # _ is in test_torchrun.py
    world = sensors()
    made = world.profile()
    assert calls.count("shiftmend.adapt(") == 5
    quick = re.sub(r"epochs=\d+", "epochs=1", re.sub(r"epochs_per_block=\d+", "epochs_per_block=1", calls))
    quick = quick.replace('method="fr", align', 'method="fr", epochs=1, align')
    quick = quick.replace('method="fr", divergence', 'method="fr", epochs=1, divergence')
    names = {"shiftmend": shiftmend, "model": world.model, "target": world.target, "profile": made}
    exec(quick, names)
    first, quick = auto.split("\n", 1)
    assert "candidates" not in first  # it tries all of them, which takes long
    exec(quick, names)
    exec(selection, names)
    exec(online, names | {"batches": world.target.split(100)})
    exec(own, found := names | {"__name__": __name__})
    assert len(found["result"].manifest["learning_rates_tried"]) == 2
    assert found["online"].method.learning_rate == 0.02
    exec(history, {"result": shiftmend.adapt(world.model, world.target, made, "fr", epochs=1, progress=False)})


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute with one thread, so that figures on a page come out the same everywhere."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_the_guide_runs_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in code_blocks(ROOT / "docs/guide.md"):
        exec(block, names)
    out = capsys.readouterr().out
    assert "the data are as at home, so nothing was changed" in out
    mended = shiftmend.evaluate(names["model"], (names["away"], names["site_labels"]))  # its weights were loaded
    assert mended.accuracy > 0.96
    estimate = names["result"].estimate.after
    assert estimate.low <= mended.accuracy <= estimate.high


@pytest.mark.slow
def test_the_rehearsal_page_runs_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in code_blocks(ROOT / "docs/rehearsal.md"):
        exec(block, names)
    assert "Rehearsal of 13 simulated shifts" in capsys.readouterr().out
    model, truth = names["model"], names["labels"][1200:]
    same, result = names["same"], names["result"]
    # New digits from the old device are left alone, and told their accuracy.
    assert same.manifest["method"]["name"] == "source-only"
    at_site = shiftmend.evaluate(model, (names["site"], truth)).accuracy
    assert same.estimate.after.low <= at_site <= same.estimate.after.high
    before, after = (shiftmend.evaluate(one, (names["hazy"], truth)).accuracy for one in (model, result.model))
    assert after > before - 0.02
    found = names["found"].estimate
    assert found.labelled[-1] == 50
    assert found.low - 0.02 <= after <= found.high + 0.02


def test_the_rehearsal_page_knows_every_reason() -> None:
    page = (ROOT / "docs/rehearsal.md").read_text()
    for reason in (
        "the profile was not rehearsed",
        "there are too few samples",
        "there are far more samples",
        "was not rehearsed",
        "was rehearsed with another",
        "the model gives values that are NaN or infinite",
        "lies outside of what was rehearsed",
        "answers fall into other classes than ever at home",
        "answers are as certain as at home but fall into other classes",
        "the signals contradict each other more than they ever did at home",
        "the signals leave too much open",
        "it is not known how the model was adapted",
    ):
        assert reason in page
        assert any(reason in path.read_text() for path in (ROOT / "src").rglob("*.py")), reason


@pytest.mark.parametrize("name", ["profile", "adapt", "verify", "evaluate", "stream", "rehearse", "refresh_batchnorm"])
def test_the_guide_names_every_argument(name: str) -> None:
    page = (ROOT / "docs/guide.md").read_text()
    sections = [part for part in re.split(r"\n(?=### |\| `shiftmend)", page) if f"shiftmend.{name}(model" in part]
    own = sections[-1].partition("\n\n###")[0]
    for argument, parameter in inspect.signature(getattr(shiftmend, name)).parameters.items():
        shown = f"**{argument}" if parameter.kind is parameter.VAR_KEYWORD else argument
        assert re.search(rf"\b{argument}\b" if shown == argument else re.escape(shown), own), (name, argument)


@pytest.mark.slow
def test_the_benchmarks_page_runs_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs/benchmarks.md"
    benchmark, use, own = code_blocks(page)
    quick = re.sub(r"epochs=\d+", "epochs=2", re.sub(r'"epochs": \d+', '"epochs": 1', benchmark))
    for many, few in (
        ("order[:900]", "order[:200]"),
        ("order[900:]", "order[900:1100]"),
        ("seeds=(1, 2)", "seeds=(1,)"),
    ):
        assert many in quick
        quick = quick.replace(many, few)
    (tmp_path / "scanner.py").write_text(quick)
    exec(use, {})
    out = capsys.readouterr().out
    assert "| shift | source-only | fr | fr-features |" in out
    assert re.search(r"^\| stripe§ \| \**\d", out, re.MULTILINE)
    query = re.search(r'sqlite3 bench/results.sqlite "(.*?)"', page.read_text(), re.DOTALL)
    assert query is not None
    with closing(sqlite3.connect("results/results.sqlite")) as connection:
        rows = connection.execute(query[1].replace("'digits'", "'scanner'").replace("'oranges'", "'stripe'")).fetchall()
    assert [row[0] for row in rows] == ["fr", "fr-features", "source-only"]
    assert all(0 <= accuracy <= 100 and seconds >= 0 for _, accuracy, seconds in rows)
    monkeypatch.setattr("sys.path", [*sys.path])
    for names, name in ((METHODS, "centred"), (MODELS, "perceptron")):
        monkeypatch.setitem(names, name, None)  # type: ignore[arg-type] # the file puts its own there for this test
    method = code_blocks(ROOT / "docs/methods.md")[4].partition("\n\n\nresult =")[0]
    (tmp_path / "centred.py").write_text(method)
    (tmp_path / "perceptron.py").write_text(own.replace("epochs=20", "epochs=2").replace('"epochs": 8', '"epochs": 1'))
    report = run("perceptron.py:PLAIN", "results", workers=1, progress=False)
    assert (report.done, report.failed) == (5, ())


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=in_the_repository)
def test_commands_exist(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in re.findall(r"^shiftmend .*?(?=  +#|$)", "\n".join(code_blocks(page, "bash")), re.MULTILINE):
        words = line.split()[1:]
        command = words[:2] if words[0] in ("bench", "data", "key") else words[:1]
        with pytest.raises(SystemExit) as stop:
            main([*command, "--help"])
        assert stop.value.code == 0, line
        known = capsys.readouterr().out
        for option in (word for word in words if word.startswith("--")):
            assert option in known, f"{line}: there is no {option}"


@pytest.mark.parametrize("page", PAGES, ids=in_the_repository)
def test_links_lead_somewhere(page: Path) -> None:
    # notes are included in the page of their benchmark, which lies one folder up
    folder = page.parent.parent if page.parent.name == "notes" else page.parent
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not link.startswith("http"):
            assert (folder / link).exists(), f"{in_the_repository(page)} links to {link}"


def test_pages_of_results_are_checked_too() -> None:
    assert {"docs/benchmarks.md", "docs/results/README.md"} <= {in_the_repository(page) for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=in_the_repository)
def test_no_page_names_a_folder_of_somebodys_machine(page: Path) -> None:
    found = re.findall(r"(?<![\w.:/])/(?:home|root|work|tmp|mnt|data|Users|scratch)/\S*", page.read_text())
    assert not found, f"{in_the_repository(page)} has {found}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "stats.divergences",
        "stats.histograms",
        "stats.stats_layer",
        "profiles.profile",
        "evaluation.classification",
        "evaluation.evaluate",
        "adaptation.adapt",
        "adaptation.calibrate",
        "adaptation.result",
        "profiles.collect",
        "adaptation.stream",
        "verification.estimate",
        "verification.maps",
        "verification.predictions",
        "verification.verdict",
        "verification.verify",
        "methods",
        "inputs.digits",
        "inputs.folders",
        "inputs.images",
        "rehearsal.battery",
        "rehearsal.rehearse",
        "research.networks",
        "shifts",
    ],
)
def test_docstring_examples(name: str) -> None:
    results = doctest.testmod(importlib.import_module(f"shiftmend.{name}"))
    assert results.attempted > 0
    assert results.failed == 0


def test_the_methods_table_names_every_method() -> None:
    page = (ROOT / "docs/methods.md").read_text()
    for name in shiftmend.methods.METHODS:
        assert f"| `{name}` |" in page
