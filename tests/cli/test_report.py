"""`shiftmend report` on files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from report_worlds import Page
from safetensors.torch import save_file

from shiftmend.cli import main
from shiftmend.research.networks import DigitCNN


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
    verdict = json.loads((site / "mended/manifest.json").read_text())["verification"]["after"]["verdict"]
    headline, advice, *_ = out.splitlines()
    assert headline.startswith("Accuracy ")
    assert "the profile was not rehearsed" in headline
    assert headline.isascii()
    assert page.headings[1][1].replace("\u00a0", " ") == headline
    assert advice in page.sections["answer"]
    assert f"written to {site}/r.html" in out
    assert ("h2", f"Features: {verdict}") in page.headings
    assert "<i>cat" in page.sections["predictions"]
    assert f"{site}/mended/model.safetensors" in page.sections["undo"]
    assert f"{site}/w.safetensors" in page.sections["undo"]
    assert "accuracy" in page.sections["scores"]
    code, out, _ = call(capsys, site, *words[:4], "-o", f"{site}/b.html", "--json", "--samples", "0")
    values = json.loads(out)
    assert (code, values["verdict"], values["report"]) == (0, "undecided", f"{site}/b.html")
    assert values["recommendation"] in ("mended", "untouched", "mend", "neither")
    assert "after" not in values
    assert not [1 for tag, _ in Page.read(site / "b.html").elements if tag == "img"]


@pytest.mark.slow
def test_the_command_refuses_in_one_sentence(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    away, profile, out = ["-d", f"{site}/away"], ["-p", f"{site}/p"], ["-o", f"{site}/no.html"]
    for words, expected in (
        ([*away, *profile, *out, "--adapted", f"{site}/nowhere"], "does not exist"),
        ([*away, "-p", f"{site}/w.safetensors", *out], "profile"),
        (["-d", f"{site}/nothing", *profile, *out], "a folder of images"),
        ([*away, *profile, "-o", f"{site}/away"], "the folder"),
        ([*away, *profile, "-o", f"{site}/factory.py"], "HTML page"),
        ([*away, *profile, "-o", f"{site}/p/no.html"], "got the file"),
    ):
        code, _, err = call(capsys, site, *words)
        assert code == 2
        (line,) = [line for line in err.strip().splitlines() if not line.startswith("warning: ")]
        assert line.startswith("error: ")
        assert expected in line
    assert not (site / "no.html").exists()
    assert "DigitCNN" in (site / "factory.py").read_text()
