from __future__ import annotations

import sys

import pytest

from shiftmend.progress import Bar, progress_bar


@pytest.mark.parametrize("show", [False, None])
def test_silent_where_nobody_looks(show: bool | None, capfd: pytest.CaptureFixture[str]) -> None:
    with progress_bar(show, "work", 3) as bar:
        bar.advance()
        bar.advance(2, "note")
    assert type(bar) is Bar
    assert capfd.readouterr() == ("", "")


def test_none_shows_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress_bar(None, "work", 3) as bar:
        assert type(bar) is not Bar
    with progress_bar(False, "work", 3) as bar:
        assert type(bar) is Bar


@pytest.mark.parametrize("total", [3, None])
def test_shown_on_standard_error_only(total: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(True, "the work", total) as bar:
        bar.advance(1, "loss 0.5")
        bar.advance(2)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "the work" in shown.err


def test_errors_pass_through() -> None:
    for show in (True, False):
        with pytest.raises(KeyError), progress_bar(show, "work", 3):
            raise KeyError("inside")
