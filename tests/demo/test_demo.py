from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shiftmend
from shiftmend import demo
from shiftmend.errors import DataError


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SOURCE_EPOCHS", 2)
    monkeypatch.setattr(
        demo, "METHODS", {"source-only": {}, "adabn": {}, "fr": {"epochs": 1}, "bufr": {"epochs_per_block": 1}}
    )


EXTRAS = ("matplotlib", "sklearn", "scipy", "ray", "torchvision")


@pytest.mark.slow
def test_nothing_but_figures_and_analyses_imports_an_extra() -> None:
    code = (
        "import importlib, pkgutil, sys\n"
        f"for name in {EXTRAS}: sys.modules[name] = None\n"
        "import shiftmend\n"
        "names = [module.name for module in pkgutil.walk_packages(shiftmend.__path__, 'shiftmend.')]\n"
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
    assert len(report.rows) == 16
    assert {row.verdict for row in report.rows} <= {"restored", "partly restored", "not restored", "undecided"}
    assert json.loads(json.dumps(report.to_json()))["rows"][0]["method"] == "source-only"
    assert shiftmend.Profile.load(tmp_path / "demo/digits.profile.safetensors").samples == 900
    assert (tmp_path / "demo/digits.png").read_bytes().startswith(b"\x89PNG")
    assert "<h1" in (tmp_path / "demo/oranges-bufr.html").read_text()
    assert (tmp_path / "demo/oranges-bufr/model.safetensors").exists()
    text = "\n".join(map(str, said))
    for lesson in demo.LESSONS:
        assert lesson.text in text
    assert "Accuracy needs labels" in text


def test_a_picture_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    images, digits = torch.zeros(2, 1, 28, 28, dtype=torch.uint8), torch.zeros(2).long()
    with pytest.raises(DataError, match=r"digits\.png cannot be written \(No space left on device\)"):
        demo.draw([("stripes", images, {"fr": digits})], digits, {("stripes", "fr"): 1.0}, tmp_path / "digits.png")


@pytest.mark.usefixtures("quick")
def test_a_file_in_place_of_the_folder_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "demo").write_bytes(b"")
    said: list[object] = []
    with pytest.raises(shiftmend.ShiftmendError, match="demo is a file, expected a folder to write into"):
        demo.run(tmp_path / "demo", say=said.append)
    assert said == []


def test_grey_and_colour_images_look_alike_to_the_model() -> None:
    grey = torch.randint(0, 256, (2, 1, 4, 4), dtype=torch.uint8)
    assert torch.equal(demo.preprocess(grey), demo.preprocess(grey.expand(-1, 3, -1, -1)))
    assert demo.preprocess(torch.tensor([[[[0, 255]]]], dtype=torch.uint8)).unique().tolist() == [-1, 1]
