"""From `rehearse` to a gate for scripts: what is written at home, and what the site reads from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rehearsed_world
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import shiftmend
from shiftmend.cli import main
from shiftmend.cli.verify import _decide, _Limit, _read_limit
from shiftmend.introspection.input_map import load_adapted_state
from shiftmend.profiles import fingerprints
from shiftmend.verification.estimate import Estimate

MODEL = (
    "from torch import nn\n"
    "def make():\n"
    "    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))\n"
    "def quantity():\n"
    "    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))\n"
    "def unsendable():\n"
    "    model = make()\n"
    "    model.note = lambda: 0\n"
    "    return model\n"
)
BATTERY = (
    "import torch\n"
    "def louder(x): return 1.5 * x\n"
    "def noisy(x): return x + torch.randn(x.shape, generator=torch.Generator().manual_seed(0))\n"
    "DEVICES = {'gain/louder': louder, 'noisy': noisy}\n"
    "LIST = [louder, noisy]\n"
)


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    shown = capsys.readouterr()
    return int(stop.value.code or 0), shown.out, shown.err


def ok(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    code, out, err = call(capsys, *arguments)
    assert code == 0, err
    return out


def draw(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a table of four classes."""
    site = rehearsed_world.draw(count, seed)
    return site.inputs, site.labels


def write(path: Path, inputs: torch.Tensor, labels: torch.Tensor | None) -> None:
    arrays = {"inputs": inputs.numpy()} | ({} if labels is None else {"labels": labels.numpy()})
    np.savez(path, **arrays)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained model, its profile, held-out data, a site, and a rehearsed profile `r`."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "table.py").write_text(MODEL)
    (folder / "devices.py").write_text(BATTERY)
    model, profile = rehearsed_world.trained()
    save_file(model.state_dict(), folder / "w.safetensors")
    profile.save(folder / "p")
    rehearsed_world.rehearsed().save(folder / "r")
    write(folder / "source.npz", *draw(600, 1))
    write(folder / "held.npz", *draw(150, 2))
    write(folder / "bare.npz", draw(150, 2)[0], None)
    away, true = draw(500, 12)
    away += torch.linspace(-2, 2, 8)
    write(folder / "away.npz", away, true)
    write(folder / "few.npz", away[:30], true[:30])
    return folder


def common(folder: Path) -> list[str]:
    return [f"{folder}/table.py:make", "-w", f"{folder}/w.safetensors"]


def rehearse(folder: Path) -> list[str]:
    given = ["-p", f"{folder}/p", "--quick", "--candidates", "match-mean,match-moments,adabn"]
    return ["rehearse", *common(folder), *given]


def verify(folder: Path, weights: Path) -> list[str]:
    return ["verify", f"{folder}/table.py:make", "-w", f"{weights}", "-d", f"{folder}/away.npz", "-p", f"{folder}/r"]


@pytest.fixture(scope="module")
def mended(home: Path) -> Path:
    """A folder that `adapt` wrote with the rehearsed profile."""
    given = ["-d", f"{home}/away.npz", "-p", f"{home}/r", "-o", f"{home}/mended", "--candidates", "match-moments"]
    with pytest.raises(SystemExit) as stop:
        main(["adapt", *common(home), *given])
    assert not stop.value.code
    return home / "mended"


@pytest.mark.slow
def test_rehearse_says_what_it_does_and_writes_a_new_profile(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (home / "p").read_bytes()
    given = [*rehearse(home), "--battery", f"{home}/devices.py:DEVICES", "-o", tmp_path / "r"]
    first, *rest = ok(capsys, *given, "-d", home / "held.npz").splitlines()
    assert first.startswith("2 simulated shifts x 1 size x 4 candidates on 150 samples with their labels: about as ")
    assert "3 adaptations" in first
    assert "with labels" in rest[0]
    assert {"shift", "none", "louder", "noisy"} <= {line.split()[0] for line in rest}
    assert rest[-1].startswith(f"written to {tmp_path}/r")
    assert (home / "p").read_bytes() == before
    assert shiftmend.Profile.load(home / "p").rehearsal is None
    listed = [*rehearse(home), "--battery", f"{home}/devices.py:LIST", "-o", tmp_path / "r", "--json"]
    record = json.loads(ok(capsys, *listed, "-d", home / "bare.npz"))["rehearsal"]
    assert (record["metric"], record["labelled"], record["samples"]) == ("agreement", False, 150)
    assert [row["name"] for row in record["shifts"]] == ["none", "louder", "noisy"]
    assert set(record["shifts"][1]["scores"]) == {"source-only", "match-mean", "match-moments", "adabn"}


@pytest.mark.slow
def test_a_profile_is_replaced_only_if_it_is_named(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p").write_bytes((home / "p").read_bytes())
    given = ["rehearse", *common(home), "-p", tmp_path / "p", "--candidates", "match-mean", "--shifts", "1"]
    ok(capsys, *given, "-d", home / "held.npz", "-o", tmp_path / "p", "--checkpoint", tmp_path / "c")
    assert shiftmend.Profile.load(tmp_path / "p").rehearsal is not None
    assert json.loads((tmp_path / "c").read_text())["cells"]


@pytest.mark.slow
def test_quick_is_offered_before_a_long_rehearsal(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def stop(*given: Any, **named: Any) -> None:
        asked.update(named)
        raise KeyboardInterrupt

    monkeypatch.setattr(shiftmend, "rehearse", stop)
    given = ["rehearse", *common(home), "-p", home / "p", "-d", home / "source.npz", "-o", tmp_path / "r"]
    code, out, _ = call(capsys, *given, "--site-size", 200, "--seed", 3, "--batch-size", 64)
    assert code == 130
    assert out.strip() == (
        "12 simulated shifts x 1 size x 9 candidates on 600 samples with their labels: about as long as 5 adaptations; "
        "--quick leaves out fr, match-fr, bufr-im, 3 shifts"
    )
    assert (asked["site_size"], asked["seed"], asked["batch_size"], asked["executor"]) == (200, 3, 64, None)
    assert "x 2 sizes x" in call(capsys, *given)[1]
    assert "--quick" not in call(capsys, *given, "--quick")[1]


@pytest.mark.slow
def test_processes_share_the_shifts(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--candidates", "adabn", "--battery", f"{home}/devices.py:LIST", "-d", home / "held.npz"]
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    ok(capsys, "rehearse", *common(home), "-p", home / "p", *given, "-o", alone)
    out = ok(capsys, "rehearse", *common(home), "-p", home / "p", *given, "-o", shared, "--workers", 2)
    assert "shared by 2 processes" in out
    scores = [shiftmend.Profile.load(path).rehearsal.scores for path in (alone, shared)]  # type: ignore[union-attr]
    assert torch.allclose(*scores, atol=0.02)
    refused = call(capsys, "rehearse", f"{home}/table.py:unsendable", *common(home)[1:], "-p", home / "p", *given,
                   "-o", shared, "--workers", 2)  # fmt: skip
    assert refused[0] == 2
    assert "--workers 1" in refused[2]


@pytest.mark.slow
def test_what_cannot_be_rehearsed_writes_nothing(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs, labels = draw(150, 3)
    write(tmp_path / "odd.npz", inputs, labels + 5)
    for data, words in ((home / "few.npz", "at least 40 samples"), (tmp_path / "odd.npz", "label")):
        code, _, err = call(capsys, *rehearse(home), "-d", data, "-o", tmp_path / "r")
        assert code == 2
        assert words in err
    assert not (tmp_path / "r").exists()


@pytest.mark.slow
def test_inspect_shows_the_rehearsal(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = ok(capsys, "inspect", home / "r")
    assert text.index("source samples") < text.index("intact") < text.index("Rehearsal of 14 simulated shifts")
    assert "mean error of the estimate" in text
    record = json.loads(ok(capsys, "inspect", home / "r", "--json"))["rehearsal"]
    assert (record["metric"], record["sizes"], len(record["shifts"])) == ("accuracy", [500], 15)
    assert record["score"] > 0.8
    assert "rehearsal" not in json.loads(ok(capsys, "inspect", home / "p", "--json"))


@pytest.mark.slow
def test_adapt_tells_what_was_won(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["adapt", *common(home), "-d", home / "away.npz", "-p", home / "r", "--candidates", "match-moments,adabn"]
    text = ok(capsys, *given, "-o", tmp_path / "a")
    first, second, third, *_ = text.splitlines()
    assert first.startswith("before  accuracy")
    assert second.startswith("after   accuracy about")
    assert third.startswith("took ")
    assert "(also tried: untouched, " in third
    manifest = json.loads(ok(capsys, *given, "-o", tmp_path / "b", "--no-calibrate", "--json"))["manifest"]
    assert [one["name"] for one in manifest["candidates"]] == ["source-only", "match-moments", "adabn"]
    assert manifest["estimate"]["after"]["value"] > 0.6
    assert "calibration" not in manifest
    calibrated = json.loads((tmp_path / "a/manifest.json").read_text())
    assert calibrated["calibration"]["temperature"] > 0
    assert calibrated["adapted_weights"] != manifest["adapted_weights"]


@pytest.mark.slow
def test_without_a_rehearsal_adapt_says_so(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["-d", home / "away.npz", "-p", home / "p", "-o", tmp_path, "--candidates", "adabn"]
    code, out, err = call(capsys, "adapt", *common(home), *given)
    assert code == 0
    assert out.startswith("before and after: accuracy unknown: the profile was not rehearsed")
    assert "not rehearsed" in err


@pytest.mark.slow
def test_mapped_inputs_are_mended_saved_and_verified(
    home: Path, mended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = load_file(mended / "model.safetensors")
    assert "shiftmend_input_scale" in state
    # The manifest lies beside the weights and describes them as they were saved.
    first, second, *_ = ok(capsys, *verify(home, mended / "model.safetensors")).splitlines()
    assert first.startswith("accuracy about")
    assert second.startswith("features ")
    found = json.loads(ok(capsys, *verify(home, mended / "model.safetensors"), "--json"))
    told = json.loads((mended / "manifest.json").read_text())["estimate"]["after"]["value"]
    assert found["estimate"]["value"] == pytest.approx(told, abs=0.05)
    assert "withheld" not in found["estimate"]
    # Elsewhere the manifest has to be named.
    save_file(state, tmp_path / "lost.safetensors")
    assert "pass --adaptation" in ok(capsys, *verify(home, tmp_path / "lost.safetensors"))
    for named in (mended, mended / "manifest.json"):
        again = ok(capsys, *verify(home, tmp_path / "lost.safetensors"), "--adaptation", named, "--json")
        assert json.loads(again)["estimate"] == found["estimate"]
    # And it must be that of these weights.
    code, _, err = call(capsys, *verify(home, home / "w.safetensors"), "--adaptation", mended)
    assert code == 2
    assert "got others" in err
    (tmp_path / "manifest.json").write_text("[]")
    assert "pass --adaptation" in ok(capsys, *verify(home, tmp_path / "lost.safetensors"))


@pytest.mark.slow
def test_the_manifest_describes_calibrated_weights(mended: Path) -> None:
    adapted = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    load_adapted_state(adapted, load_file(mended / "model.safetensors"))
    manifest = json.loads((mended / "manifest.json").read_text())
    assert "temperature" in manifest["calibration"]
    assert fingerprints.weights(adapted) == manifest["adapted_weights"]


@pytest.mark.slow
def test_shares_of_classes_are_told(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = rehearsed_world.draw(600, 31, (0.6, 0.4, 0.0, 0.0))
    write(tmp_path / "few.npz", site.inputs, None)
    given = ["shares", *common(home), "-p", home / "r", "-d", tmp_path / "few.npz"]
    found = json.loads(ok(capsys, *given, "--json"))
    assert found["values"] == pytest.approx([0.6, 0.4, 0, 0], abs=0.07)
    assert found["reliable"]
    assert "at home" in ok(capsys, *given)
    given[given.index(home / "r")] = home / "p"
    code, _, err = call(capsys, *given)
    assert code == 2
    assert "rehearse" in err


@pytest.mark.slow
def test_a_few_labels_are_shown_beside_the_estimate(
    home: Path, mended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*verify(home, mended / "model.safetensors"), "--labelled"]
    _, second, *_ = ok(capsys, *given, home / "few.npz").splitlines()
    assert second.startswith("  the 30 labelled samples alone: ")
    assert json.loads(ok(capsys, *given, home / "few.npz", "--json"))["estimate"]["labelled"]["samples"] == 30
    code, _, err = call(capsys, *given, home / "bare.npz")
    assert (code, "Expected labels in" in err) == (2, True)
    inputs, labels = draw(6, 3)
    write(tmp_path / "odd.npz", inputs, labels + 5)
    code, _, err = call(capsys, *given, tmp_path / "odd.npz")
    assert (code, "label" in err) == (2, True)


@pytest.mark.slow
def test_a_limit_decides_the_exit_code(home: Path, mended: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = verify(home, mended / "model.safetensors")
    estimate = json.loads(ok(capsys, *given, "--json"))["estimate"]
    between = (estimate["low"] + estimate["value"]) / 2
    for limit, code, words in (
        (f"{100 * estimate['low'] - 0.1:.3f}%", 0, "yes"),
        (f"{between:.5f}", 4, "unknown"),
        ("1", 3, "no"),
    ):
        ended, out, _ = call(capsys, *given, "--at-least", limit)
        assert (ended, out.splitlines()[-1]) == (code, f"at least {limit}: {words}")
    ended, out, _ = call(capsys, *given, "--at-least", "1", "--json")
    assert (ended, json.loads(out)["decision"]) == (3, {"at_least": 1.0, "answer": "no"})
    ended, _, err = call(capsys, *given, "--at-most", "1")
    assert (ended, "Expected --at-least" in err) == (2, True)
    # Nobody rehearsed: there is no estimate to decide by.
    unrehearsed = [*given[:-1], home / "p"]
    ended, out, _ = call(capsys, *unrehearsed, "--at-least", "0.5")
    assert ended == 4
    assert out.startswith("no estimate: the profile was not rehearsed")


@pytest.mark.parametrize(
    ("value", "low", "high", "name", "answer"),
    [
        (0.9, 0.8, 0.95, "at least", "yes"),
        (0.9, 0.79, 0.95, "at least", "unknown"),
        (0.79, 0.6, 0.9, "at least", "no"),
        (0.8, None, None, "at least", "yes"),
        (0.79, None, None, "at least", "no"),
        (None, None, None, "at least", "unknown"),
        (0.7, 0.5, 0.8, "at most", "yes"),
        (0.7, 0.5, 0.9, "at most", "unknown"),
        (0.9, 0.7, 1.2, "at most", "no"),
    ],
)
def test_the_whole_interval_must_keep_a_limit(
    value: float | None, low: float | None, high: float | None, name: Any, answer: str
) -> None:
    estimate = shiftmend.Estimate(value, low, high, "accuracy" if name == "at least" else "rmse")
    assert _decide(estimate, _Limit(name, "0.8", 0.8)) == answer


def test_limits_are_read_as_shares_or_percentages() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    profile = shiftmend.profile(model, draw(60, 0)[0])
    assert _read_limit("85.5%", None, profile) == ("at least", "85.5%", pytest.approx(0.855))
    assert _read_limit(None, "2.5", profile) == ("at most", "2.5", 2.5)
    for text in ("nan", "high", "-0.1", "80", "101%", ""):
        with pytest.raises(shiftmend.DataError, match="0 to 1"):
            _read_limit(text, None, profile)


@pytest.mark.slow
def test_errors_of_quantities_have_a_limit_too(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inputs, _ = draw(150, 4)
    write(tmp_path / "a.npz", inputs, inputs[:, 0] + 0.5)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    given = [f"{home}/table.py:quantity", "-w", tmp_path / "w.safetensors", "-d", tmp_path / "a.npz"]
    ok(capsys, "profile", *given, "-o", tmp_path / "p")
    ok(capsys, "rehearse", *given, "-p", tmp_path / "p", "-o", tmp_path / "r", "--quick", "--candidates", "match-mean")
    code, out, _ = call(capsys, "verify", *given, "-p", tmp_path / "r", "--at-most", "1e6", "--json")
    found = json.loads(out)
    assert (found["estimate"]["metric"], found["decision"]["answer"], code) == ("rmse", "yes", 0)
    code, _, err = call(capsys, "verify", *given, "-p", tmp_path / "r", "--at-least", "0.5")
    assert (code, "Expected --at-most" in err) == (2, True)


@pytest.mark.parametrize(
    ("name", "limit", "answer"),
    [
        ("at least", 0.5, "yes"),
        ("at least", 0.7, "unknown"),
        ("at least", 0.9, "no"),
        ("at most", 0.9, "yes"),
        ("at most", 0.7, "unknown"),
        ("at most", 0.5, "no"),
    ],
)
def test_a_range_decides_where_all_of_it_lies_on_one_side(name: Any, limit: float, answer: str) -> None:
    metric = "accuracy" if name == "at least" else "rmse"
    found = Estimate(None, 0.55, 0.85, metric, ("the signals leave too much open",), (0.7, 0.55, 0.85))
    assert _decide(found, _Limit(name, str(limit), limit)) == answer
