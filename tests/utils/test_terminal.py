from __future__ import annotations

import io

import pytest
from rich.table import Table

from shiftmend.cli import main
from shiftmend.utils.terminal import neutralise, neutralise_cell, open_console

HOSTILE = "a\x1b[2J\x9b31mb\rc\x07\u202ed"


def is_harmless(text: str) -> bool:
    return not set("\x1b\x9b\r\x07\u202e") & set(text)


def test_what_steers_a_terminal_shows() -> None:
    assert neutralise(HOSTILE) == r"a\x1b[2J\x9b31mb\x0dc\x07\u202ed"
    assert neutralise("größer\n\t± – 漢") == "größer\n\t± – 漢"


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1"])
def test_a_formula_is_text(text: str) -> None:
    assert neutralise_cell(text).startswith("'")


def test_texts_and_cells_of_tables_are_neutral_but_styles_stay() -> None:
    file = io.StringIO()
    console = open_console(file=file, force_terminal=True, color_system="truecolor", width=200)
    table = Table(HOSTILE, title=HOSTILE)
    table.add_row(HOSTILE)
    console.print(table)
    console.print(HOSTILE)
    console.print("plain", style="bold")
    found = file.getvalue()
    assert "\x1b[1mplain" in found
    assert "\x1b[2J" not in found
    assert "\x9b" not in found


def test_an_error_that_names_a_hostile_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["inspect", f"/nowhere/{HOSTILE}"])
    said = capsys.readouterr().err
    assert r"\x1b[2J" in said
    assert is_harmless(said)
