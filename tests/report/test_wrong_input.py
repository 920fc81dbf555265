"""What does not fit is refused in one sentence, by the library and on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from report_worlds import Page, mended
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shiftmend
from shiftmend import report
from shiftmend.cli import main
from shiftmend.research.networks import DigitCNN


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    mended()[2].save(tmp_path / "mended")
    return tmp_path / "mended"


def refused(expected: str, *arguments: object, **options: object) -> None:
    world, profile, _ = mended()
    given = [world.model, world.target, profile]
    given[: len(arguments)] = [one if one is not None else two for one, two in zip(arguments, given, strict=False)]
    with pytest.raises(shiftmend.ShiftmendError, match=expected) as caught:
        report.facts(*given, *arguments[3:], **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_a_saved_adaptation_gives_the_page_of_the_one_in_memory(folder: Path) -> None:
    world, profile, result = mended()
    from_disk = report.facts(world.model, world.target, profile, folder)
    in_memory = report.facts(world.model, world.target, profile, result)
    assert from_disk.after == in_memory.after
    assert from_disk.mending is not None
    assert from_disk.mending.file == str(folder / "model.safetensors")
    assert list(from_disk.mending.history) == result.history


def test_models_profiles_and_data_that_do_not_fit() -> None:
    refused("other layers", nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)))
    refused("is empty", None, torch.zeros(0, 6))
    refused("NaN or infinite", None, torch.full((5, 6), float("nan")))
    refused("does not take inputs of shape", None, torch.zeros(5, 7))
    refused("expected a Profile", None, None, 3)
    refused("3 labels for 600 samples", labels=torch.zeros(3))
    refused("whole number from 0 to 100", samples=-1)
    refused("names 2 classes, and the model knows 3", classes=["a", "b"])
    world = mended()[0]
    loader = DataLoader(TensorDataset(world.target), batch_size=100, shuffle=True)
    refused("shuffles", None, loader, labels=world.labels)


def test_adaptations_that_do_not_fit(folder: Path, tmp_path: Path) -> None:
    world, profile, result = mended()
    refused("expected what shiftmend.adapt gave", None, None, None, 3)
    other = shiftmend.Adaptation(nn.Linear(6, 3), result.history, result.manifest)
    refused("other layers than the model", None, None, None, other)
    refused("there is no folder", None, None, None, tmp_path / "nowhere")
    for name in ("model.safetensors", "history.json", "manifest.json"):
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        refused(f"holds no {name}", None, None, None, folder)
        (folder / name).write_bytes(content[: len(content) // 2])
        refused("is damaged", None, None, None, folder)
        (folder / name).write_bytes(content)
    for name, what in (("history.json", "no history"), ("manifest.json", "no manifest")):
        content = (folder / name).read_bytes()
        for nonsense in ("[]" if name == "manifest.json" else "{}", "3", '[{"epoch": "x"}]', '{"method": {}}'):
            (folder / name).write_text(nonsense)
            refused(what, None, None, None, folder)
        (folder / name).write_bytes(content)
    assert report.facts(world.model, world.target, profile, folder).after is not None
    save_file(nn.Linear(2, 2).state_dict(), folder / "model.safetensors")
    refused("of another architecture", None, None, None, folder)
    save_file({name: value.clone() for name, value in world.model.state_dict().items()}, folder / "model.safetensors")
    refused("is not the file that manifest.json", None, None, None, folder)


def test_a_manifest_or_a_history_that_was_changed_is_refused(folder: Path) -> None:
    for name, what, changes in (
        (
            "manifest.json",
            "no manifest",
            [
                {"kept": "best"},
                {"status": 3},
                {"method": {"name": 3}},
                {"selected_epoch": True},
                {"selected_epoch": 99},
                {"selected_epoch": -1},
            ],
        ),
        (
            "history.json",
            "no history",
            [
                *({"epoch": 1.0}, {"block": 3}, {"losses": [1.0]}, {"losses": {"features": "low"}}),
                *({"verification": "low"}, {"seconds": []}, {"entropy": {}}, {"a word": "too many"}),
            ],
        ),
    ):
        content = (folder / name).read_text()
        for change in changes:
            data = json.loads(content)
            (data if name == "manifest.json" else data[-1]).update(change)
            (folder / name).write_text(json.dumps(data))
            refused(what, None, None, None, folder)
        (folder / name).write_text(content)
    rows = json.loads((folder / "history.json").read_text())
    # without its rows the model would pass for one that was adapted to nothing, which is judged more mildly
    for some in ([], rows[:-1], rows[1:], [rows[0], *rows[:-1]]):
        (folder / "history.json").write_text(json.dumps(some))
        refused("history.json is not the file that manifest.json", None, None, None, folder)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A factory, weights, a profile, a folder of images by class, and what `adapt` wrote for it."""
    home = tmp_path_factory.mktemp("site")
    torch.manual_seed(0)
    model = DigitCNN(classes=2, width=4, channels=1, image_size=16)
    images = torch.randint(0, 256, (60, 1, 16, 16), dtype=torch.uint8)
    with torch.no_grad():
        for _ in range(5):
            model(images.float() / 127.5 - 1)
    (home / "factory.py").write_text(
        "from shiftmend.research.networks import DigitCNN\n"
        "def make(): return DigitCNN(classes=2, width=4, channels=1, image_size=16)\n"
    )
    save_file(model.state_dict(), home / "w.safetensors")
    np.savez(home / "source.npz", images=images.numpy())
    for number, image in enumerate((255 - images).numpy()):
        place = home / "away" / ("<i>cat" if number % 2 else "dog")
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0]).save(place / f"{number:02}.png")
    for words in (
        ["profile", "-d", f"{home}/source.npz", "-o", f"{home}/p"],
        ["adapt", "-d", f"{home}/away", "-p", f"{home}/p", "-o", f"{home}/mended", "-m", "fr", "--option", "epochs=2"],
    ):
        with pytest.raises(SystemExit) as stop:
            main([words[0], *common(home), *words[1:]])
        assert stop.value.code == 0
    return home


def common(home: Path) -> list[str]:
    return [f"{home}/factory.py:make", "-w", f"{home}/w.safetensors"]


def call(capsys: pytest.CaptureFixture[str], home: Path, *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["report", *common(home), *words])
    shown = capsys.readouterr()
    return int(stop.value.code or 0), shown.out, shown.err


@pytest.mark.slow
def test_the_command_writes_a_page(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-d", f"{site}/away", "-p", f"{site}/p", "--adapted", f"{site}/mended", "-o", f"{site}/r.html"]
    code, out, _ = call(capsys, site, *words)
    assert code == 0
    page = Page.read(site / "r.html")
    verdict = json.loads((site / "mended/manifest.json").read_text())["verification"]["after"]["verdict"].capitalize()
    assert out.startswith(f"{verdict}. Before mending, the model's features lay ")
    assert out.splitlines()[0].isascii()
    assert f"written to {site}/r.html" in out
    assert page.headings[1][1].endswith(verdict)
    assert "<i>cat" in page.sections["predictions"]
    assert f"{site}/mended/model.safetensors" in page.sections["undo"]
    assert f"{site}/w.safetensors" in page.sections["undo"]
    assert "accuracy" in page.sections["scores"]
    code, out, _ = call(capsys, site, *words[:4], "-o", f"{site}/b.html", "--json", "--samples", "0")
    values = json.loads(out)
    assert (code, values["verdict"], values["report"]) == (0, "undecided", f"{site}/b.html")
    assert "after" not in values
    assert not [1 for tag, _ in Page.read(site / "b.html").elements if tag == "img"]


@pytest.mark.slow
def test_the_command_refuses_in_one_sentence(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    away, profile, out = ["-d", f"{site}/away"], ["-p", f"{site}/p"], ["-o", f"{site}/no.html"]
    for words, expected in (
        ([*away, *profile, *out, "--adapted", f"{site}/nowhere"], "there is no folder"),
        ([*away, "-p", f"{site}/w.safetensors", *out], "profile"),
        (["-d", f"{site}/nothing", *profile, *out], "there is no"),
        ([*away, *profile, "-o", f"{site}/away"], "is a folder"),
        ([*away, *profile, "-o", f"{site}/factory.py"], "is there already and is no HTML page"),
        ([*away, *profile, "-o", f"{site}/p/no.html"], "is a file"),
    ):
        code, _, err = call(capsys, site, *words)
        assert code == 2
        (line,) = [line for line in err.strip().splitlines() if not line.startswith("warning: ")]
        assert line.startswith("error: ")
        assert expected in line
    assert not (site / "no.html").exists()
    assert "DigitCNN" in (site / "factory.py").read_text()


def test_labels_and_classes_of_the_wrong_kind() -> None:
    for labels, kind in (("cat", "a str"), (["cat"], "a list"), ({}, "a dict")):
        refused(f"list of labels holds {kind}, which is no tensor of numbers", labels=labels)
    refused("classes is 'abc', expected a list of names, one for each class", classes="abc")
    refused("classes is 3, expected a list of names", classes=3)


@pytest.mark.parametrize("path", [None, 3, ""])
def test_a_page_is_written_of_facts_into_a_file(path: object, tmp_path: Path) -> None:
    world, profile, _ = mended()
    with pytest.raises(shiftmend.ShiftmendError, match=r"the file to write is .*, expected a name"):
        report.write(report.facts(world.model, world.target, profile), path)  # type: ignore[arg-type]
    with pytest.raises(shiftmend.ShiftmendError, match=r"written of a Profile; expected what report\.facts gives"):
        report.write(profile, tmp_path / "report.html")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_a_place_where_no_page_can_be_written_is_named(tmp_path: Path) -> None:
    world, profile, _ = mended()
    found = report.facts(world.model, world.target, profile)
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "file" / "report.html"):
        with pytest.raises(shiftmend.DataError, match=f"^{place} cannot be written"):
            report.write(found, place)
