"""The command line, called as a user calls it: what it prints, what it writes, how it refuses nonsense."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import shiftmend
from shiftmend.cli import main
from shiftmend.cli.verify import scores_json
from shiftmend.evaluation.regression import RegressionScores
from shiftmend.research.networks import DigitCNN


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    shown = capsys.readouterr()
    return int(stop.value.code or 0), shown.out, shown.err


def ok(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    code, out, err = call(capsys, *arguments)
    assert code == 0, err
    return out


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    code, out, err = call(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1
    return err


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a factory, weights, source and target data, and a profile."""
    home = tmp_path_factory.mktemp("site")
    torch.manual_seed(0)
    model = DigitCNN(classes=4, width=4, channels=1, image_size=16)
    images = torch.randint(0, 256, (80, 1, 16, 16), dtype=torch.uint8)
    with torch.no_grad():
        for _ in range(100):
            model(images.float() / 127.5 - 1)
    (home / "factory.py").write_text(
        "from shiftmend.research.networks import DigitCNN\n"
        "def make(classes=4): return DigitCNN(classes=classes, width=4, channels=1, image_size=16)\n"
        "def number(): return 7\n"
    )
    save_file(model.state_dict(), home / "w.safetensors")
    torch.save(model.state_dict(), home / "w.pt")
    labels = np.arange(80) % 4
    np.savez(home / "source.npz", images=images.numpy(), labels=labels)
    np.savez(home / "target.npz", images=(255 - images).numpy(), labels=labels)
    np.savez(home / "bare.npz", images=images.numpy())
    with pytest.raises(SystemExit):
        main(["profile", *common(home), "-d", str(home / "source.npz"), "-o", str(home / "p.safetensors")])
    return home


def common(home: Path) -> list[str]:
    return [f"{home}/factory.py:make", "-w", f"{home}/w.safetensors"]


@pytest.mark.slow
def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    listing = ok(capsys)
    for command in (
        "demo",
        "profile",
        "rehearse",
        "inspect",
        "mix",
        "blocks",
        "adapt",
        "verify",
        "evaluate",
        "shift",
        "shifts",
        "data",
        "bench",
    ):
        assert f"\n  {command} " in listing
    assert "fetch" in ok(capsys, "data")
    assert ok(capsys, "--version").strip() == "0.2.0"
    assert "--profile" in ok(capsys, "adapt", "--help")


@pytest.mark.slow
def test_profile_and_inspect(site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ok(capsys, "profile", *common(site), "-d", site / "source.npz", "-o", tmp_path / "p", "--json")
    facts = json.loads(out)
    assert facts["samples"] == 80
    assert facts["bytes"] == (tmp_path / "p").stat().st_size
    text = ok(capsys, "inspect", tmp_path / "p")
    assert "80 source samples" in text
    assert "8 units at 'linear'" in text
    assert json.loads(ok(capsys, "inspect", tmp_path / "p", "--json"))["taps"]["logits"]["units"] == 4


@pytest.mark.slow
def test_profiles_of_classes_are_mixed(site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with np.load(site / "source.npz") as source:
        images, labels = source["images"], source["labels"]
    for name, part in (("few", labels == 0), ("many", labels > 0)):
        np.savez(tmp_path / f"{name}.npz", images=images[part])
        data = ("-d", tmp_path / f"{name}.npz", "-o", tmp_path / name)
        made = ok(capsys, "profile", *common(site), *data, "--like", site / "p.safetensors", "--json")
        assert json.loads(made)["samples"] == part.sum()
    files = (tmp_path / "few", tmp_path / "many")
    text = ok(capsys, "mix", *files, "--shares", "1,3", "-o", tmp_path / "mixed")
    assert "Profile of 80 source samples" in text
    assert f"written to {tmp_path / 'mixed'}" in text
    facts = json.loads(ok(capsys, "mix", *files, "--shares", "0.9,0.1", "-o", tmp_path / "mixed", "--json"))
    assert (facts["samples"], facts["shares"]) == (25, [0.9, 0.1])
    assert "2 numbers" in refused(capsys, "mix", *files, "--shares", "1", "-o", tmp_path / "x")
    assert "a profile to replace" in refused(capsys, "mix", *files, "--shares", "1,1", "-o", tmp_path / "few.npz")
    assert "one of the parts" in refused(capsys, "mix", *files, "--shares", "1,1", "-o", files[1])
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_adapting_never_replaces_the_weights_it_started_from(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes((site / "w.safetensors").read_bytes())
    arguments = (f"{site}/factory.py:make", "-w", weights, "-d", site / "target.npz", "-p", site / "p.safetensors")
    assert "would replace the weights" in refused(capsys, "adapt", *arguments, "-o", tmp_path)
    assert weights.read_bytes() == (site / "w.safetensors").read_bytes()


def test_what_a_factory_prints_does_not_stand_before_the_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loud.py").write_text(
        "import torch\nprint('imported')\n"
        "def make():\n    print('made')\n    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))\n"
    )
    code, out, err = call(capsys, "blocks", f"{tmp_path}/loud.py:make", "--shape", "4", "--json")
    assert (code, err) == (0, "imported\nmade\n")
    assert [row["block"] for row in json.loads(out)] == ["0"]


def test_a_name_that_is_no_text_is_printed_as_it_is(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = os.fsdecode(b"caf\xe9")
    made = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(made, encoding="utf-8", write_through=True))
    ok(capsys, "shift", "sensor/gamma", site / "target.npz", tmp_path / name)
    assert b"caf\xe9, manifest in" in made.getvalue()


@pytest.mark.slow
def test_blocks(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(ok(capsys, "blocks", *common(site), "--shape", "1,16,16", "--json"))
    assert [row["block"] for row in rows] == ["conv1 + bn1", "conv2 + bn2", "conv3 + bn3", "linear"]
    text = ok(capsys, "blocks", "resnet18-cifar", "--shape", "3,32,32")
    assert "8,393,728" in text
    assert "5,130 parameters stay fixed" in text


@pytest.mark.slow
def test_taps_and_blocks_named_by_the_user(site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = ok(
        capsys,
        "profile",
        *common(site),
        "-d",
        site / "source.npz",
        "-o",
        tmp_path / "p",
        "--tap",
        "early=conv1",
        "--json",
    )
    assert json.loads(made)["taps"]["early"] == {"at": "conv1", "units": 4, "constant": 0}
    chosen = ("--block", "conv1,bn1", "--block", "conv2,bn2,conv3,bn3")
    rows = json.loads(ok(capsys, "blocks", *common(site), "--shape", "1,16,16", *chosen, "--json"))
    assert [len(row["modules"]) for row in rows] == [2, 4]
    files = ("-d", site / "target.npz", "-p", tmp_path / "p", "-o", tmp_path / "a")
    options = ("-m", "bufr", "--option", "epochs_per_block=1", "--option", "align=early,logits")
    out = ok(capsys, "adapt", *common(site), *files, *chosen, *options, "--json")
    assert json.loads(out)["manifest"]["epochs"] == 2
    assert "name=module" in refused(
        capsys, "profile", *common(site), "-d", site / "source.npz", "-o", tmp_path / "q", "--tap", "early"
    )


@pytest.mark.slow
def test_adapt_writes_everything_and_says_what_changed(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["adapt", *common(site), "-d", site / "target.npz", "-p", site / "p.safetensors", "-m", "fr"]
    out = ok(
        capsys, *arguments, "-o", tmp_path / "a", "--option", "epochs=2", "--option", "learning_rate=0.01", "--json"
    )
    result = json.loads(out)
    assert result["manifest"]["method"] | {"epochs": 2, "learning_rate": 0.01} == result["manifest"]["method"]
    assert set(result["scores"]) == {"before", "after"}
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"model.safetensors", "history.json", "manifest.json"}
    adapted, source = load_file(tmp_path / "a/model.safetensors"), load_file(site / "w.safetensors")
    assert not torch.equal(adapted["conv1.weight"], source["conv1.weight"])
    assert torch.equal(adapted["head.weight"], source["head.weight"])
    text = ok(capsys, *arguments, "-o", tmp_path / "b", "--option", "epochs=1", "--option", "align=features,logits")
    assert "Adaptation by fr, 1 epoch, finished" in text
    verified = json.loads(
        ok(capsys, "verify", f"{site}/factory.py:make", *("-w", tmp_path / "a/model.safetensors"),
           *("-d", site / "target.npz", "-p", site / "p.safetensors", "--json"))
    )  # fmt: skip
    assert verified["divergence"] == pytest.approx(result["manifest"]["verification"]["after"]["divergence"], rel=1e-4)


def test_what_is_no_number_is_still_json(site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = load_file(site / "w.safetensors")
    damaged["head.bias"][0] = float("nan")
    save_file(damaged, tmp_path / "w.safetensors")
    files = ("-w", tmp_path / "w.safetensors", "-d", site / "target.npz")
    verified = ok(capsys, "verify", f"{site}/factory.py:make", *files, "-p", site / "p.safetensors", "--json")
    found = json.loads(verified, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert (found["marginals"], found["verdict"]) == ("NaN", "not restored")


def test_a_model_that_no_file_holds_is_refused_before_it_is_adapted(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fine.py").write_text(
        "import torch\n"
        "from shiftmend.research.networks import DigitCNN\n"
        "def make():\n"
        "    model = DigitCNN(classes=4, width=4, channels=1, image_size=16)\n"
        "    model.register_buffer('waves', torch.ones(2, dtype=torch.complex128))\n"
        "    return model\n"
    )
    model, profile, checkpoint = f"{tmp_path}/fine.py:make", tmp_path / "p", tmp_path / "c"
    ok(capsys, "profile", model, "-d", site / "source.npz", "-o", profile)
    files = ("-d", site / "target.npz", "-p", profile, "-o", tmp_path / "a", "--checkpoint", checkpoint)
    said = refused(capsys, "adapt", model, *files)
    assert "waves" in said
    assert "complex128" in said
    assert not checkpoint.exists()


@pytest.mark.slow
def test_adapt_by_a_method_of_ones_own(site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gentle.py").write_text(
        "from dataclasses import dataclass\n"
        "from typing import ClassVar\n"
        "from shiftmend.methods import FR\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Gentle(FR):\n"
        "    name: ClassVar[str] = 'gentle'\n"
        "    epochs: int = 2\n"
    )
    arguments = ["adapt", *common(site), "-d", site / "target.npz", "-p", site / "p.safetensors", "-o", tmp_path / "a"]
    ok(capsys, *arguments, "-m", f"{tmp_path}/gentle.py:Gentle", "--option", "learning_rate=0.001")
    manifest = json.loads((tmp_path / "a/manifest.json").read_text())
    assert (manifest["method"]["name"], manifest["method"]["epochs"]) == ("gentle", 2)
    for wrong, said in (
        (f"{tmp_path}/gentle.py:Rough", "Expected 'Rough'"),
        (f"{tmp_path}/nowhere.py:Gentle", "for the method '{}'"),
        (f"{tmp_path}/gentle.py:dataclass", "Expected the method"),
    ):
        assert said.format(wrong) in refused(capsys, *arguments, "-m", wrong)


@pytest.mark.slow
def test_adapt_chooses_among_rates_and_epochs(site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["adapt", *common(site), "-d", site / "target.npz", "-p", site / "p.safetensors", "-m", "fr"]
    rates = ("--option", "epochs=2", "--option", "learning_rate=0.01,1", "--keep", "selected")
    manifest = json.loads(ok(capsys, *arguments, "-o", tmp_path / "a", *rates, "--json"))["manifest"]
    assert [row["learning_rate"] for row in manifest["learning_rates_tried"]] == [0.01, 1]
    assert manifest["learning_rate_chosen"] == "by the verification slices"
    assert manifest["kept"] == "selected"
    # every candidate is the kept epoch of its rate; the result is the better of the two
    tried = {row["learning_rate"]: row["verification"] for row in manifest["learning_rates_tried"]}
    chosen = tried.pop(manifest["method"]["learning_rate"])
    assert all(chosen < 1.1 * other for other in tried.values())


@pytest.mark.slow
def test_the_supervised_method_gets_labels(site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("-p", site / "p.safetensors", "-m", "target-supervised", "--option", "epochs=20")
    arguments = ("adapt", *common(site), "-d", site / "target.npz", *options, "--option", "learning_rate=0.1")
    scores = json.loads(ok(capsys, *arguments, "-o", tmp_path / "a", "--json"))["scores"]
    assert scores["after"]["nll"] < scores["before"]["nll"]
    assert "(on the labels that it was trained with)" in ok(capsys, *arguments, "-o", tmp_path / "b")
    bare = ("adapt", *common(site), "-d", site / "bare.npz", *options, "-o", tmp_path / "c")
    assert "which target-supervised needs" in refused(capsys, *bare)
    assert not (tmp_path / "c").exists()


@pytest.mark.slow
def test_a_full_gaussian_is_stored_on_demand(site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = ("profile", *common(site), "-d", site / "source.npz", "-o", tmp_path / "p", "--gaussian", "full")
    assert json.loads(ok(capsys, *profile, "--json"))["gaussian"] == "full-gaussian"
    adapt = ("adapt", *common(site), "-d", site / "target.npz", "-m", "full-gauss", "--option", "epochs=1")
    ok(capsys, *adapt, "-p", tmp_path / "p", "-o", tmp_path / "a")
    assert "gaussian" in refused(capsys, *adapt, "-p", site / "p.safetensors", "-o", tmp_path / "b").lower()


@pytest.mark.slow
def test_evaluate(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores = json.loads(ok(capsys, "evaluate", *common(site), "-d", site / "source.npz", "--json"))
    assert 0 <= scores["accuracy"] <= 1
    assert "accuracy" in ok(capsys, "evaluate", *common(site), "-d", site / "source.npz")
    assert ok(
        capsys, "evaluate", f"{site}/factory.py:make", "-w", site / "w.pt", "--allow-pickle", "-d", site / "source.npz"
    )


@pytest.mark.slow
def test_labels_of_every_pixel_are_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "factory.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def make():\n    torch.manual_seed(0)\n"
        "    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 1))\n"
    )
    random = np.random.default_rng(0)
    images, labels = random.integers(0, 256, (40, 6, 6), np.uint8), random.integers(0, 3, (40, 6, 6))
    labels[0], labels[1:, 0] = 255, 255
    np.savez(tmp_path / "a.npz", images=images, labels=labels.astype(np.uint8))
    given = [f"{tmp_path}/factory.py:make", "-d", tmp_path / "a.npz"]
    ok(capsys, "profile", *given, "-o", tmp_path / "p")
    assert "a label that is no class number" in refused(capsys, "evaluate", *given)
    scored = json.loads(ok(capsys, "evaluate", *given, "--ignore-label", 255, "--json"))
    assert scored["samples"] == 39 * 5 * 6
    assert len(scored["iou"]) == 3
    rest = ["-p", tmp_path / "p", "--option", "epochs=1", "--method", "fr"]
    assert "a label that is no class number" in refused(capsys, "adapt", *given, *rest, "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    out = ok(capsys, "adapt", *given, *rest, "-o", tmp_path / "out", "--ignore-label", 255, "--json")
    assert json.loads(out)["scores"]["before"] == scored
    page = ["-p", tmp_path / "p", "-o", tmp_path / "r.html", "--adapted", tmp_path / "out"]
    ok(capsys, "report", *given, *page, "--ignore-label", 255)
    assert "mean IoU" in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_scores_as_json_have_each_quantity() -> None:
    one, other = RegressionScores(3, 1.0, 2.0, None), RegressionScores(3, 2.0, 4.0, 0.5)
    alone = {"samples": 3, "mean_absolute_error": 1.0, "root_mean_square_error": 2.0, "r2": None}
    assert scores_json(one) == alone
    both = scores_json(RegressionScores(3, 1.5, 3.0, 0.5, (one, other)))
    assert both["quantities"] == [alone, scores_json(other)]


@pytest.mark.slow
def test_folders_of_images_and_tables(site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ok(capsys, "shift", "emnist-da/inverse", site / "source.npz", tmp_path / "pictures")
    assert sorted(p.name for p in (tmp_path / "pictures").iterdir()) == ["0", "1", "2", "3", "manifest.json"]
    from_folder = json.loads(ok(capsys, "evaluate", *common(site), "-d", tmp_path / "pictures", "--json"))
    from_npz = json.loads(ok(capsys, "evaluate", *common(site), "-d", site / "target.npz", "--json"))
    assert from_folder == pytest.approx(from_npz)
    (tmp_path / "tabular.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def make():\n    torch.manual_seed(0)\n    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))\n"
    )
    np.savez(tmp_path / "table.npz", inputs=np.random.default_rng(0).normal(size=(60, 5)), labels=np.arange(60) % 3)
    ok(capsys, "profile", f"{tmp_path}/tabular.py:make", "-d", tmp_path / "table.npz", "-o", tmp_path / "t.profile")
    assert "5] float32" in ok(capsys, "inspect", tmp_path / "t.profile")


@pytest.mark.slow
def test_a_site_may_order_its_columns_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "tabular.py"
    model.write_text(
        "import torch\nfrom torch import nn\n"
        "def make():\n    torch.manual_seed(0)\n    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))\n"
    )
    values = np.random.default_rng(0).normal(size=(90, 2)).round(4)
    rows = [(a, b, "CO" if a > b else "air") for a, b in values.tolist()]
    home, site = tmp_path / "home.csv", tmp_path / "site.csv"
    home.write_text("a,b,gas\n" + "".join(f"{a},{b},{gas}\n" for a, b, gas in rows))
    site.write_text("operator,gas,b,a\n" + "".join(f"Anna,{gas},{b},{a}\n" for a, b, gas in rows))
    labels = ["--label", "gas", "--classes", "air,CO"]
    ok(capsys, "profile", f"{model}:make", "-d", home, "-o", tmp_path / "p", "--drop", "gas")
    assert "2, from 'a' to 'b'" in ok(capsys, "inspect", tmp_path / "p")
    asked = ["evaluate", f"{model}:make", *labels, "--json", "-p", tmp_path / "p"]
    at_home, at_site = (json.loads(ok(capsys, *asked, "-d", data)) for data in (home, site))
    assert at_home == at_site
    assert "'operator'" in refused(capsys, "evaluate", f"{model}:make", *labels, "-d", site)
    adapting, reporting = ["adapt", "-m", "match-mean", "-o", tmp_path / "out"], ["report", "-o", tmp_path / "r.html"]
    for command in (["verify"], adapting, reporting):
        given = [*command[:1], f"{model}:make", *command[1:], "-p", tmp_path / "p"]
        ok(capsys, *given, "-d", site)
        home.write_text("a,c\n1,2\n")
        assert "lacks b" in refused(capsys, *given, "-d", home)


@pytest.mark.slow
def test_a_missing_class_does_not_renumber_the_others(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with np.load(site / "target.npz") as there:
        rows = there["labels"] != 1
        np.savez(tmp_path / "rare.npz", images=there["images"][rows], labels=there["labels"][rows])
    assert "Write an .npz" in refused(capsys, "shift", "sensor/gamma", tmp_path / "rare.npz", tmp_path / "rare")
    ok(capsys, "shift", "sensor/gamma", site / "target.npz", tmp_path / "pictures")
    shutil.rmtree(tmp_path / "pictures" / "1")
    given = [*common(site), "-d", tmp_path / "pictures"]
    profile = ["-p", site / "p.safetensors"]
    for asked in (["evaluate", *given], ["adapt", *given, *profile, "-o", tmp_path / "out"]):
        said = refused(capsys, *asked)
        assert "got 3" in said
        assert "4 classes" in said
    assert json.loads(ok(capsys, "evaluate", *common(site), "-d", tmp_path / "rare.npz", "--json"))["samples"] == 60


@pytest.mark.slow
def test_shift_and_shifts(site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ok(capsys, "shift", "cifar-c/contrast", site / "source.npz", tmp_path / "c.npz", "--severity", 3)
    manifest = json.loads((tmp_path / "c.json").read_text())
    assert (manifest["severity"], manifest["images"]) == (3, 80)
    assert np.load(tmp_path / "c.npz")["labels"].tolist() == list(np.arange(80) % 4)
    names = [row["name"] for row in json.loads(ok(capsys, "shifts", "--json"))]
    assert {"emnist-da/sky", "mnist-c/zigzag", "mnist-m", "cifar-c/snow"} <= set(names)
    assert "emnist-da/stripe" in ok(capsys, "shifts", "--only", "emnist-da")
    sheet = ("--only", "emnist-da/s", "--sheet", tmp_path / "sheet.png", "-d", site / "source.npz")
    drawn = json.loads(ok(capsys, "shifts", *sheet, "--json"))
    assert (drawn["sheet"], "emnist-da/sky" in drawn["shifts"]) == (f"{tmp_path}/sheet.png", True)
    assert (tmp_path / "sheet.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_sheet_of_every_shift(site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "grey.npz", images=np.full((2, 1, 28, 28), 90, np.uint8))
    for severity in ([], ["--severity", 2]):
        ok(capsys, "shifts", "--sheet", tmp_path / "all.png", "-d", tmp_path / "grey.npz", *severity)
        assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
    colours = np.random.default_rng(0).integers(0, 256, (2, 3, 28, 28), np.uint8)
    np.savez(tmp_path / "colour.npz", images=colours)
    words = refused(
        capsys, "shifts", "--sheet", tmp_path / "no.png", "-d", tmp_path / "colour.npz", "--only", "mnist-m"
    )
    assert "mnist-m cannot be drawn" in words
    assert not (tmp_path / "no.png").exists()


@pytest.mark.slow
def test_a_result_is_written_whole_or_not_at_all(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy.npz"
    copy.write_bytes((site / "source.npz").read_bytes())
    assert "holds the images to shift" in refused(capsys, "shift", "emnist-da/inverse", copy, copy)
    (tmp_path / "notes.json").write_text("[1]")
    assert "got another file" in refused(capsys, "shift", "emnist-da/inverse", copy, tmp_path / "notes.npz")
    assert (tmp_path / "notes.json").read_text() == "[1]"
    (tmp_path / "file").write_bytes(b"")
    for target in (tmp_path / "file/x.npz", tmp_path / "file/folder"):
        assert "cannot be written" in refused(capsys, "shift", "emnist-da/inverse", copy, target)
    assert "cannot be written" in refused(
        capsys, "shifts", "--only", "emnist-da/inverse", "-d", copy, "--sheet", tmp_path / "file/x.png"
    )
    (tmp_path / "new.json").mkdir()  # where the manifest goes
    assert "cannot be written" in refused(capsys, "shift", "emnist-da/inverse", copy, tmp_path / "new.npz")

    def full(image: Image.Image, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    assert "No space left" in refused(capsys, "shift", "emnist-da/inverse", copy, tmp_path / "pictures")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy.npz", "file", "new.json", "notes.json"]
    assert copy.read_bytes() == (site / "source.npz").read_bytes()


def test_pictures_of_several_sizes_are_scaled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    for side in (20, 30):
        Image.new("L", (side, side), side).save(tmp_path / f"in/{side}.png")
    assert "of one size" in refused(capsys, "shift", "cifar-c/contrast", tmp_path / "in", tmp_path / "o.npz")
    ok(capsys, "shift", "cifar-c/contrast", tmp_path / "in", tmp_path / "o.npz", "--size", 24)
    assert np.load(tmp_path / "o.npz")["images"].shape == (2, 1, 24, 24)
    ok(capsys, "shift", "cifar-c/contrast", tmp_path / "o.npz", tmp_path / "small.npz", "--size", 12)
    assert np.load(tmp_path / "small.npz")["images"].shape == (2, 1, 12, 12)


@pytest.mark.slow
def test_signals_are_shifted_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    waves = np.random.default_rng(0).normal(size=(6, 2, 50))
    np.savez(tmp_path / "waves.npz", inputs=waves, labels=np.arange(6))
    ok(capsys, "shift", "signal/gain", tmp_path / "waves.npz", tmp_path / "loud.npz", "--severity", 5)
    with np.load(tmp_path / "loud.npz") as loud:
        np.testing.assert_allclose(loud["inputs"], 2 * waves, rtol=1e-5)
        assert loud["labels"].tolist() == list(range(6))
    assert json.loads((tmp_path / "loud.json").read_text())["signals"] == 6
    scaled = refused(capsys, "shift", "signal/gain", tmp_path / "waves.npz", tmp_path / "x.npz", "--size", 12)
    assert "images for --size 12" in scaled
    assert "[N, C, L]" in refused(capsys, "shift", "signal/gain", tmp_path, tmp_path / "x.npz")
    assert "an .npz" in refused(capsys, "shift", "signal/gain", tmp_path / "waves.npz", tmp_path / "folder")
    assert "not drawn" in refused(capsys, "shifts", "--only", "signal", "--sheet", tmp_path / "s.png")


def test_textures_are_named_in_the_manifest(site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "wide.npz", images=np.zeros((2, 1, 28, 28), np.uint8))
    ok(capsys, "shift", "emnist-da/grass", tmp_path / "wide.npz", tmp_path / "g.npz")
    (entry,) = json.loads((tmp_path / "g.json").read_text())["textures"].values()
    assert entry["origin"] == "procedural"
    assert len(entry["sha256"]) == 64


@pytest.mark.slow
def test_data_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "emnist" in ok(capsys, "data", "list").lower()
    assert len(json.loads(ok(capsys, "data", "list", "--json"))) >= 14
    rows = json.loads(ok(capsys, "data", "verify", "--data-root", tmp_path, "--json"))
    assert {row["state"] for row in rows} == {"missing"}
    assert "missing" in ok(capsys, "data", "verify", "mnist", "--data-root", tmp_path)
    monkeypatch.chdir(tmp_path)
    folder = Path("[/]/MNIST/raw")  # what a file is called is no markup
    folder.mkdir(parents=True)
    (folder / "train-images-idx3-ubyte").write_bytes(b"rubbish")
    code, out, _ = call(capsys, "data", "verify", "mnist", "--data-root", "[/]")
    assert code == 1
    assert "damaged" in out
    assert "[/]/MNIST/raw/train-images-idx3-ubyte" in out
    assert "Expected the dataset" in refused(capsys, "data", "fetch", "nothing", "--data-root", tmp_path)
    monkeypatch.delenv("SHIFTMEND_DATA", raising=False)
    assert "SHIFTMEND_DATA" in refused(capsys, "data", "verify")


ADAPT = ["adapt", "{}/factory.py:make", "-d", "{}/target.npz", "-p", "{}/p.safetensors", "-o", "{}/x"]
REHEARSE = ["rehearse", "{}/factory.py:make", "-w", "{}/w.safetensors", "-d", "{}/source.npz", "-p", "{}/p.safetensors"]
VERIFY = ["verify", "{}/factory.py:make", "-d", "{}/target.npz", "-p", "{}/p.safetensors"]
LIKE = ["profile", "{}/factory.py:make", "-d", "{}/source.npz", "-o", "{}/q", "--like"]
NONSENSE: list[tuple[list[str], str]] = [
    (["fly"], "No such command"),
    (["adapt"], "Missing"),
    (["inspect", "{}/nowhere"], "cannot be read"),
    (["inspect", "{}/source.npz"], "damaged or no safetensors"),
    (["inspect", "{}/w.safetensors"], "no shiftmend profile"),
    (["inspect", "{}"], "cannot be read"),
    (["evaluate", "nomodel", "-d", "{}/source.npz"], "to be built in"),
    (["evaluate", "no.such.package:make", "-d", "{}/source.npz"], "could not be found"),
    (["evaluate", "{}/factory.py:nothing", "-d", "{}/source.npz"], "Expected 'nothing' in"),
    (["evaluate", "{}/absent.py:make", "-d", "{}/source.npz"], "Expected the file"),
    (["evaluate", "{}/factory.py:number", "-d", "{}/source.npz"], "to return a torch.nn.Module"),
    (["evaluate", "{}/factory.py:make", "--model-option", "width=3", "-d", "{}/source.npz"], "Expected options that"),
    (["evaluate", "{}/factory.py:make", "--model-option", "width=²", "-d", "{}/source.npz"], "Expected options that"),
    (["evaluate", "{}/factory.py:make", "--model-option", "width", "-d", "{}/source.npz"], "name=value"),
    (["evaluate", "{}/factory.py:make", "-w", "{}/w.pt", "-d", "{}/source.npz"], "can run code"),
    (["evaluate", "{}/factory.py:make", "-w", "{}/none.safetensors", "-d", "{}/source.npz"], "file of weights"),
    (["evaluate", "{}/factory.py:make", "-w", "{}/p.safetensors", "-d", "{}/source.npz"], "weights of the model"),
    (["evaluate", "{}/factory.py:make", "-w", "{}/source.npz", "-d", "{}/source.npz"], "could not be read"),
    (["evaluate", "{}/factory.py:make", "-d", "{}/nowhere"], "a folder of images"),
    (["evaluate", "{}/factory.py:make", "-d", "{}/factory.py"], "a folder of images"),
    (["evaluate", "{}/factory.py:make", "-d", "{}/bare.npz"], "Expected labels in"),
    (["evaluate", "{}/factory.py:make", "-d", "{}/source.npz", "--mean", "x"], "one number"),
    (["evaluate", "{}/factory.py:make", "-d", "{}/source.npz", "--std", "0"], "positive"),
    (["evaluate", "{}/factory.py:make", "-d", "{}/source.npz", "--channels", "3"], "the model takes"),
    (["evaluate", "{}/factory.py:make", "-d", "{}/source.npz", "--device", "tpu"], "is available here"),
    (["evaluate", "{}/factory.py:make", "-d", "{}/source.npz", "--batch-size", "0"], "at least 1"),
    (["profile", "{}/factory.py:make", "-d", "{}/source.npz", "-o", "{}/q", "--preset", "best"], "Expected the preset"),
    (["profile", "{}/factory.py:make", "-d", "{}/source.npz", "-o", "{}/q", "--gaussian", "bell"], "marginal, full"),
    (["profile", "{}/factory.py:make", "-d", "{}/source.npz", "-o", "{}/q", "--head", "nose"], "name a module"),
    ([*LIKE, "{}/nowhere"], "cannot be read"),
    ([*LIKE, "{}/p.safetensors", "--preset", "paper"], "Leave them out"),
    (["mix", "{}/p.safetensors", "--shares", "a,b", "-o", "{}/q"], "numbers with commas"),
    (["mix", "{}/w.safetensors", "--shares", "1", "-o", "{}/q"], "no shiftmend profile"),
    (["blocks", "{}/factory.py:make", "--shape", "1,x"], "whole numbers"),
    (["blocks", "{}/factory.py:make", "--shape", "1" + 30 * "0"], "that fit into memory"),
    (["blocks", "{}/factory.py:make", "--shape", "7,16,16"], "the model takes"),
    (["blocks", "{}/factory.py:make", "--shape", "1,16,16", "--output-entry=--5"], "'--5'"),
    (["adapt", "resnet18-cifar", "-d", "{}/target.npz", "-p", "{}/p.safetensors", "-o", "{}/x"], "other layers"),
    ([*ADAPT, "-m", "magic"], "Expected the method"),
    ([*ADAPT, "--option", "epochs=1"], "Name the method"),
    ([*ADAPT, "-m", "bufr", "--candidates", "adabn"], "beside the method 'auto'"),
    ([*ADAPT, "-w", "{}/w.safetensors", "--candidates", "adabn,magic"], "Expected the method"),
    ([*ADAPT, "-m", "bufr", "--option", "speed=9"], "got 'speed'"),
    ([*ADAPT, "-m", "bufr", "--option", "learning_rate=fast"], "positive number"),
    ([*ADAPT, "--option", "learning_rate=0.1,fast"], "Expected numbers in"),
    ([*ADAPT, "-m", "bufr", "--option", "learning_rate=,"], "at least one"),
    ([*ADAPT, "--option", "seed=3"], "an option of a method"),
    ([*REHEARSE, "-o", "{}/factory.py"], "a profile to replace"),
    ([*REHEARSE, "-o", "{}/w.safetensors"], "the file of the weights"),
    ([*REHEARSE, "-o", "{}/q", "--battery", "{}/factory.py"], "Expected the battery"),
    ([*REHEARSE, "-o", "{}/q", "--battery", "{}/factory.py:number"], "a dict or list of functions"),
    ([*REHEARSE, "-o", "{}/q", "--candidates", "target-supervised"], "Expected 'labels'"),
    ([*REHEARSE, "-o", "{}/q", "--workers", "0"], "workers"),
    ([*VERIFY, "--at-least", "80"], "Try 0.8 or 80%"),
    ([*VERIFY, "--at-most", "few"], "a number"),
    ([*VERIFY, "--at-least", "0.8", "--at-most", "1"], "Leave one of them out"),
    ([*VERIFY, "--labelled", "{}/source.npz"], "a rehearsed profile"),
    ([*VERIFY, "--adaptation", "{}"], "which is no file"),
    ([*VERIFY, "--adaptation", "{}/factory.py"], "damaged"),
    ([*ADAPT, "--keep", "best"], "'last' or 'selected'"),
    (["shift", "emnist-da/skyy", "{}/source.npz", "{}/x.npz"], "Try emnist-da/sky"),
    (["shift", "emnist-da/inverse", "{}/source.npz", "{}/x.npz", "--severity", "9"], "a severity from"),
    (["shift", "emnist-da/inverse", "{}/source.npz", "{}"], "which exists"),
    (["shift", "emnist-da/inverse", "{}/nowhere", "{}/x.npz"], "Expected a folder of images or an .npz"),
    (["shift", "emnist-da/inverse", "{}/factory.py", "{}/x.npz"], "a folder of images or"),
    (["shift", "emnist-da/fog", "{}/source.npz", "{}/x.npz", "--seed", str(2**70)], "64 bits"),
    (["demo", "-o", "{}/demo", "--seed", "1" + 30 * "0"], "whole number of at most 64 bits"),
    (["shifts", "--only", "zzz"], "names begin with"),
    (["shifts", "--severity", "3"], "only for a sheet"),
    (["data", "verify", "--data-root", "{}/nowhere"], "Expected the folder that"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "words"), NONSENSE, ids=[" ".join(a)[:60] for a, _ in NONSENSE])
def test_nonsense_gets_one_sentence(
    site: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in site.rglob("*") if "__pycache__" not in path.parts}
    assert words in refused(capsys, *(argument.replace("{}", str(site)) for argument in arguments))
    after = {path: path.stat().st_mtime_ns for path in site.rglob("*") if "__pycache__" not in path.parts}
    assert before == after


@pytest.mark.slow
def test_the_script_is_installed(capsys: pytest.CaptureFixture[str]) -> None:

    done = subprocess.run(
        [Path(sys.executable).parent / "shiftmend", "inspect", "nowhere"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: Expected a shiftmend profile")


@pytest.mark.slow
def test_places_that_cannot_be_written_to_are_refused_before_the_work(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shiftmend, "adapt", lambda *given, **named: pytest.fail("began to work"))
    monkeypatch.setattr(shiftmend, "profile", lambda *given, **named: pytest.fail("began to work"))
    (tmp_path / "file").write_text("mine")
    asked = ["adapt", *common(site), "-d", site / "target.npz", "-p", site / "p.safetensors", "-o"]
    assert "Expected a folder" in refused(capsys, *asked, tmp_path / "file")
    assert "cannot be made" in refused(capsys, *asked, tmp_path / "file" / "x")
    asked = ["profile", *common(site), "-d", site / "source.npz", "-o"]
    before = (site / "w.safetensors").read_bytes()
    assert "the file of the weights" in refused(capsys, *asked, site / "w.safetensors")
    assert (site / "w.safetensors").read_bytes() == before
    assert "a profile to replace" in refused(capsys, *asked, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
    assert "got the folder" in refused(capsys, *asked, tmp_path)
    absent = ["profile", f"{site}/factory.py:make", "-w", site / "none.safetensors", "-d", site / "source.npz", "-o"]
    assert "file of weights" in refused(capsys, *absent, site / "p.safetensors")


def test_labels_that_do_not_fit_are_refused_before_the_work(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shiftmend, "adapt", lambda *given, **named: pytest.fail("began to work"))
    with np.load(site / "target.npz") as there:
        np.savez(tmp_path / "odd.npz", images=there["images"], labels=there["labels"] + 50)
    asked = ["adapt", *common(site), "-d", tmp_path / "odd.npz", "-p", site / "p.safetensors", "-o", tmp_path / "out"]
    assert "label" in refused(capsys, *asked)
    assert not (tmp_path / "out").exists()


def test_a_profile_of_weights_that_nobody_named_is_remarked(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["-d", site / "source.npz", "-o", tmp_path / "p.safetensors"]
    code, _, err = call(capsys, "profile", f"{site}/factory.py:make", *asked)
    assert code == 0
    assert "no --weights given: this is the profile of the weights that" in err
    assert call(capsys, "profile", *common(site), *asked)[2] == ""  # and a profile may replace a profile


@pytest.mark.slow
def test_a_verdict_on_weights_that_nobody_named_is_remarked(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verify = ["-d", site / "source.npz", "-p", site / "p.safetensors"]
    assert "not those that the profile was made with" in call(capsys, "verify", f"{site}/factory.py:make", *verify)[2]
    assert call(capsys, "verify", *common(site), *verify)[2] == ""
    evaluate = ["-d", site / "target.npz"]
    err = call(capsys, "evaluate", f"{site}/factory.py:make", *evaluate)[2]
    assert err.startswith("warning: no --weights given: these are the scores of the weights that")
    assert call(capsys, "evaluate", *common(site), *evaluate)[2] == ""


@pytest.mark.parametrize(
    ("entry", "option"), [("'scores'", "scores"), ("'class-logits'", "class-logits"), ("'all of it'", "'all of it'")]
)
def test_what_to_do_is_said_in_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], entry: str, option: str
) -> None:
    (tmp_path / "named.py").write_text(
        "from torch import nn\n"
        "class Named(nn.Sequential):\n"
        "    def forward(self, x):\n"
        f"        return {{{entry}: super().forward(x), 'input': x}}\n"
        "def make():\n"
        "    return Named(nn.Flatten(), nn.Linear(48, 4), nn.ReLU(), nn.Linear(4, 2))\n"
    )
    said = refused(capsys, "blocks", f"{tmp_path}/named.py:make", "--shape", "3,4,4")
    assert said.rstrip().endswith(f"e.g. --output-entry {option}.")


def test_a_file_in_an_error_keeps_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "output=3" / "head=fc"
    assert str(place) in refused(capsys, "inspect", place)


def test_the_bins_of_a_preset_can_be_softer(site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = ["profile", *common(site), "-d", site / "source.npz", "-o", tmp_path / "p", "--preset", "paper"]
    ok(capsys, *made, "--temperature", "0.05")
    assert shiftmend.Profile.load(tmp_path / "p").bins == shiftmend.Bins(8, "paper", 0.05)
    assert "temperature to be a number from" in refused(capsys, *made, "--temperature", "-1")


def test_an_interrupted_adaptation_is_saved_and_no_success(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapt = shiftmend.adapt

    def cut_short(*given: Any, **named: Any) -> Any:
        result = adapt(*given, **named)
        result.manifest["status"] = "interrupted"
        return result

    monkeypatch.setattr(shiftmend, "adapt", cut_short)
    asked = ["-d", site / "bare.npz", "-p", site / "p.safetensors", "-o", tmp_path, "-m", "adabn"]
    code, out, _ = call(capsys, "adapt", *common(site), *asked)
    assert code == 130
    assert "interrupted" in out
    assert (tmp_path / "model.safetensors").is_file()


def test_refreshed_weights_are_written_and_profiled(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fresh, out = tmp_path / "fresh.safetensors", tmp_path / "p"
    given = ("profile", *common(site), "-d", site / "source.npz", "-o", out)
    assert "from now on" in call(capsys, *given, "--refresh-batchnorm", fresh)[2]
    old, new = load_file(site / "w.safetensors"), load_file(fresh)
    moved = {name for name in old if not torch.equal(old[name], new[name])}
    assert moved
    assert all("running_" in name or "num_batches" in name for name in moved)
    assert shiftmend.Profile.load(out).weights != shiftmend.Profile.load(site / "p.safetensors").weights
    assert "which exists" in refused(capsys, *given, "--refresh-batchnorm", fresh)
    assert ".safetensors" in refused(capsys, *given, "--refresh-batchnorm", tmp_path / "weights")
