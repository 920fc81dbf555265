from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shiftmend
from shiftmend import Estimate, demo
from shiftmend.demo import Row
from shiftmend.errors import DataError
from shiftmend.inputs.digits import enlarged_digits


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SOURCE_EPOCHS", 6)
    monkeypatch.setattr(demo, "CANDIDATES", ("adabn",))
    monkeypatch.setattr(demo, "SHIFTS", 9)
    monkeypatch.setattr(demo, "WORKERS", 1)


EXTRAS = ("matplotlib", "sklearn", "scipy", "ray", "torchvision")


@pytest.mark.slow
def test_nothing_but_figures_and_analyses_imports_an_extra() -> None:
    code = (
        "import importlib, pkgutil, sys\n"
        f"for name in {EXTRAS}: sys.modules[name] = None\n"
        "import shiftmend\n"
        "names = [module.name for module in pkgutil.walk_packages(shiftmend.__path__, 'shiftmend.')]\n"
        "names = [name for name in names if not name.startswith('shiftmend.integrations.')]\n"
        "for name in names: importlib.import_module(name)\n"
        "print(len(names))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 50


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_the_demo_says_and_writes_what_it_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It profiles, adapts, verifies, evaluates and reports: all of them do without the extras.
    for name in [*EXTRAS, *(module for module in sys.modules if module.startswith(tuple(f"{one}." for one in EXTRAS)))]:
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    said: list[object] = []
    threads = torch.get_num_threads()
    report = demo.run(tmp_path / "demo", say=lambda thing: said.append(thing))
    assert torch.get_num_threads() == threads
    profile = shiftmend.Profile.load(tmp_path / "demo/digits.profile.safetensors")
    source, home, _ = demo.split_digits(0)
    assert profile.samples == len(source)
    assert profile.rehearsal is not None
    assert profile.rehearsal.samples == len(home)
    assert (tmp_path / "demo/digits.png").read_bytes().startswith(b"\x89PNG")
    assert "<h1" in (tmp_path / "demo/report.html").read_text()
    assert (tmp_path / "demo/mended/model.safetensors").exists()
    assert [row.device for row in report.rows] == [lesson.title for lesson in demo.LESSONS]
    for row in report.rows:
        if row.left_alone:
            assert row.true_after == row.true_before
        told = row.estimated_after
        assert told.reliable or told.reasons
    text = "\n".join(map(str, said))
    assert demo.EXPLANATION in text
    for lesson in demo.LESSONS:
        assert lesson.text in text
    facts = json.loads(json.dumps(report.to_json()))
    assert facts["rows"][0]["estimated_after"]["metric"] == "accuracy"
    assert "withheld" not in json.dumps(facts)


def test_no_digit_is_in_two_places() -> None:
    parts = demo.split_digits(3)
    assert sum(map(len, parts)) == 1797
    whole = torch.cat([part.images.flatten(1) for part in parts])
    assert len(whole.unique(dim=0)) == len(enlarged_digits().images.flatten(1).unique(dim=0))
    assert [part.name for part in parts] == ["source", "home", "site"]
    for digit in range(10):
        shares = [float((part.labels == digit).double().mean()) for part in parts if part.labels is not None]
        assert max(shares) - min(shares) < 0.01


@pytest.mark.slow
def test_workers_have_one_thread_each() -> None:
    with demo._start_workers() as workers:
        assert workers is not None
        assert workers.submit(torch.get_num_threads).result() == 1


def make_row(chosen: str, before: Estimate, after: Estimate, tried: tuple[str, ...] = ("untouched", "bufr")) -> Row:
    return Row("lamp", chosen, "its estimate is the best", tried, before, after, 0.5, 0.8, 1.0)


UNTOLD = Estimate(None, None, None, "accuracy", ("the signals leave too much open (0 to 1)",), (0.4321, None, None))


def test_words_follow_the_outcome() -> None:
    good, missed = Estimate(0.81, 0.75, 0.85, "accuracy"), Estimate(0.9, 0.85, 0.95, "accuracy")
    mended = " ".join(demo.describe(make_row("bufr", UNTOLD, good)))
    assert "Took bufr (also tried: untouched)" in mended
    assert "as it came is unknown" in mended
    assert "label fifty" not in mended
    assert "trained" in " ".join(demo.describe(make_row("adabn", UNTOLD, good)))
    assert "after mending misses the truth" in " ".join(demo.describe(make_row("bufr", UNTOLD, missed)))
    alone = " ".join(demo.describe(make_row("untouched", UNTOLD, UNTOLD)))
    assert "bufr were tried" in alone
    assert "label fifty samples" in alone
    assert "last bit" in " ".join(demo.describe(make_row("untouched", good, good, ("untouched",))))


def test_a_withheld_value_is_in_no_text() -> None:
    row = make_row("untouched", UNTOLD, UNTOLD)
    assert "43" not in " ".join(demo.describe(row)) + json.dumps(row.to_json())


def test_a_picture_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    images, digits = torch.zeros(2, 1, 28, 28, dtype=torch.uint8), torch.zeros(2).long()
    with pytest.raises(DataError, match=r"digits\.png.*No space"):
        demo.draw([demo.Strip("stripes", images, {"by fr": digits})], digits, tmp_path / "digits.png")


@pytest.mark.usefixtures("quick")
def test_a_file_in_place_of_the_folder_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "demo").write_bytes(b"")
    said: list[object] = []
    with pytest.raises(shiftmend.ShiftmendError, match=r"Expected a folder.*demo"):
        demo.run(tmp_path / "demo", say=said.append)
    assert said == []


def test_grey_and_colour_images_look_alike_to_the_model() -> None:
    grey = torch.randint(0, 256, (2, 1, 4, 4), dtype=torch.uint8)
    assert torch.equal(demo.preprocess(grey), demo.preprocess(grey.expand(-1, 3, -1, -1)))
    assert demo.preprocess(torch.tensor([[[[0, 255]]]], dtype=torch.uint8)).unique().tolist() == [-1, 1]
