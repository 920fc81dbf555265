"""Options from a file, and what the command line shows beside its results."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import shiftmend
from shiftmend.cli import main
from shiftmend.research.networks import DigitCNN
from shiftmend.utils import progress
from shiftmend.utils.progress import piped_progress, progress_bar


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    shown = capsys.readouterr()
    return int(stop.value.code or 0), shown.out, shown.err


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp_path = tmp_path_factory.mktemp("site")
    torch.manual_seed(0)
    model = DigitCNN(classes=4, width=4, channels=1, image_size=16).eval()
    images = torch.randint(0, 256, (60, 1, 16, 16), dtype=torch.uint8)
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    np.savez(tmp_path / "target.npz", images=(255 - images).numpy())
    profile = shiftmend.profile(model, images.float() / 127.5 - 1, progress=False)
    profile.save(tmp_path / "p.safetensors")
    write(
        tmp_path / "factory.py",
        "from shiftmend.research.networks import DigitCNN\n"
        "def make(): return DigitCNN(classes=4, width=4, channels=1, image_size=16)\n",
    )
    write(
        tmp_path / "site.toml",
        f"""
        model = "{tmp_path}/factory.py:make"
        weights = "{tmp_path}/w.safetensors"
        data = "{tmp_path}/target.npz"
        profile = "{tmp_path}/p.safetensors"
        batch_size = 20
        [adapt]
        method = "bufr"
        option = {{epochs_per_block = 1, learning_rate = 0.01}}
        out = "{tmp_path}/mended"
        [verify]
        json = true
        """,
    )
    return tmp_path


@pytest.mark.slow
def test_a_file_serves_several_commands_and_the_command_line_wins(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capsys, "adapt", "--config", site / "site.toml", "--batch-size", 30, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)["manifest"]
    assert found["method"]["name"] == "bufr"
    assert found["method"]["learning_rate"] == 0.01
    assert found["batch_size"] == 30
    code, out, _ = call(capsys, "verify", "--config", site / "site.toml")
    assert code == 0
    assert json.loads(out)


def test_the_printed_file_holds_every_option_and_can_be_read_again(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = call(capsys, "adapt", "--config", site / "site.toml", "--seed", 7, "--print-config")
    assert code == 0
    found = tomllib.loads(out)
    assert found["seed"] == 7
    assert found["batch-size"] == 20
    assert found["option"] == ["epochs_per_block=1", "learning_rate=0.01"]
    assert found["calibrate"] is True
    assert found["json"] is False
    assert "# checkpoint =" in out
    assert "config" not in found
    again = write(site / "again.toml", out)
    assert call(capsys, "adapt", "--config", again, "--print-config")[1] == out


@pytest.mark.parametrize(
    ("text", "keyword"),
    [
        ("bach-size = 3", "Try 'batch-size'"),
        ("[verify]\nmethod = 'bufr'", "got 'method'"),
        ("[adopt]\nseed = 1", "Try 'adapt'"),
        ("seed = ", "a TOML file"),
        ("seed = 0.5", "seed"),
        ("autocast = 'perhaps'", "autocast"),
    ],
)
def test_a_wrong_file_is_one_sentence(site: Path, capsys: pytest.CaptureFixture[str], text: str, keyword: str) -> None:
    good = "" if text.startswith("[") else (site / "site.toml").read_text()
    whole = write(site / "bad.toml", f"{text}\n{good}")
    code, out, err = call(capsys, "adapt", "--config", whole)
    assert (code, out) == (2, "")
    assert keyword in err
    assert len(err.splitlines()) == 1


def test_a_log_gets_a_line_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with piped_progress("lines"), progress_bar(None, "bufr", 9) as bar:
        for _ in range(9):
            clock[0] += 2
            bar.advance(1, "loss 0.1")
        with progress_bar(None, "inner", 3) as inner:
            clock[0] += 60
            inner.advance()
    assert capsys.readouterr().err.splitlines() == [
        "bufr: 3 of 9, loss 0.1, 6 s",
        "bufr: 6 of 9, loss 0.1, 12 s",
        "bufr: 9 of 9, loss 0.1, 18 s",
    ]


@pytest.mark.slow
def test_quiet_shows_results_and_errors_alone(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    code, out, err = call(capsys, "verify", "--config", site / "site.toml", "--mean", 9)
    assert "verif" in err
    assert "warning: " in err
    code, quiet, err = call(capsys, "verify", "--config", site / "site.toml", "--mean", 9, "--quiet")
    assert (code, quiet, err) == (0, out, "")


def test_colours_follow_no_color(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[1m" in call(capsys, "shifts")[1]
    monkeypatch.setenv("NO_COLOR", "1")
    shown = call(capsys, "shifts")[1]
    assert "\x1b[3" not in shown
