"""`bench speed` on the command line; what it measures is tested with its tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shiftmend.cli import main


def run(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "speed", "--device", "cpu", *arguments])
    return ended.value.code


def test_json_goes_to_the_screen_and_to_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "speed.json"
    assert run("--only", "packed", "--json", "--out", str(out), "--repeats", "2") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(out.read_text())
    assert (printed["repeats"], printed["packed"]) == (2, [])
    assert printed["environment"]["device"] == "cpu"


def test_tables_are_printed_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--only", "packed,compiled") == 0
    first, compiled, packed = (line for line in capsys.readouterr().out.splitlines() if line)
    assert "medians of 3 (lowest to highest)" in first
    assert compiled.startswith("compiled steps are measured on a CUDA device only")
    assert packed.startswith("cells side by side are measured on a GPU only")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--only", "histograms"], "did you mean histogram?"),
        (["--only", ","], "no table is named"),
        (["--repeats", "0"], "Invalid value for '--repeats'"),
        (["--only", "packed", "--out", "/proc/speed.json"], "/proc/speed.json cannot be written"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert sentence in shown.err
    assert shown.err.count("\n") == 1
