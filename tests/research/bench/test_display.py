from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from terminal import Terminal

from shiftmend.research.bench import run as display_module
from shiftmend.research.bench.benchmark import Cell, Outcome, Result
from shiftmend.research.bench.execute import Preparation
from shiftmend.research.bench.run import Display, describe, left

FR, BUFR = (Cell("tiny", "offline", method, "dark", 1, "abc") for method in ("fr", "bufr"))
MODEL, OTHER = Preparation("plain", 1, 0.01), Preparation("plain", 2, 0.01)


def done(cell: Cell, accuracy: float = 0.5) -> Result:
    last, best = (Outcome(epoch, value, 0.1, 0.2, 0.3, 0.4) for epoch, value in ((4, accuracy), (2, 0.75)))
    return Result(cell, "own", last, best, last, seconds=1.26)


def failed(cell: Cell) -> Result:
    return Result(cell, "own", error="it [broke]")


@contextmanager
def standard_error_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm")
    with Terminal() as terminal, os.fdopen(os.dup(terminal.inner), "w") as stream, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", stream)
        yield terminal


@pytest.mark.slow
@pytest.mark.parametrize("show", [None, True])
def test_on_a_terminal(show: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        standard_error_on_a_terminal(monkeypatch) as terminal,
        Display(show, "tiny [x]", cells=4, preparations=2) as display,
    ):
        assert terminal.shows(r"tiny \[x\] +\S+ preparing: 0 of 2 source models")
        for task in (MODEL, OTHER):
            display.advance(task, 0, 0)
        display.advance(OTHER, 3, 10)
        assert terminal.shows(r"  source model plain, seed 2 +\S+ 3 of 10")
        assert "  source model plain, seed 1" in terminal.screen()
        display.over(MODEL, None)
        assert terminal.shows("preparing: 1 of 2 source models")
        assert "seed 1" not in terminal.screen()
        display.over(OTHER, None)
        assert terminal.shows("0 of 4 cells, time left unknown")
        assert "source model" not in terminal.screen()
        for cell in (FR, BUFR):
            display.advance(cell, 0, 0)
        assert terminal.shows(r"  fr on dark, seed 1 +\S+ *\n")
        display.advance(FR, 1, 4)
        display.advance(BUFR, 7, 7)  # which does not know how much there is
        assert terminal.shows(r"  fr on dark, seed 1 +\S+ 1 of 4")
        assert terminal.shows(r"  bufr on dark, seed 1 +\S+ 7 *(\n|$)")
        display.advance(FR, 4, 4)
        assert terminal.shows(r"  fr on dark, seed 1 +\S+ 4 of 4")
        display.over(FR, done(FR))
        assert terminal.shows(r"1 of 4 cells, \d+ s left")
        assert "  fr on dark" not in terminal.screen()
        display.over(BUFR, failed(BUFR))
        assert terminal.shows(r"2 of 4 cells, \d+ s left")
        assert "  bufr on dark" not in terminal.screen()
        assert "\nbufr on dark, seed 1: failed: it [broke]" in "\n" + terminal.screen()
    assert terminal.screen().strip() == "bufr on dark, seed 1: failed: it [broke]"  # the bars are gone


def test_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    for show, say in ((None, said.append), (False, said.append), (True, None), (None, None), (False, None)):
        with Display(show, "tiny", cells=2, preparations=1, say=say) as display:
            display.advance(MODEL, 3, 10)
            display.over(MODEL, None)
            display.advance(FR, 1, 4)
            display.over(FR, done(FR))
            display.over(BUFR, failed(BUFR))
    lines = [
        "1/2  fr on dark, seed 1: 50.0 % (selected 50.0, best 75.0), 1.3 s  (0 s left)",
        "2/2  bufr on dark, seed 1: failed: it [broke]  (0 s left)",
    ]
    assert said == 2 * lines
    shown = capsys.readouterr()
    assert (shown.out, shown.err.splitlines()) == ("", lines)


def test_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(display_module.time, "monotonic", lambda: clock[0])
    with Display(False, "tiny", cells=10, preparations=1) as display:
        clock[0] += 1000  # preparing says nothing about cells
        display.advance(MODEL, 9, 10)
        assert display.remaining() != display.remaining()
        display.over(MODEL, None)
        clock[0] += 30
        display.advance(FR, 0, 0)
        assert display.remaining() != display.remaining()
        display.advance(FR, 1, 4)
        display.advance(BUFR, 7, 7)
        assert display.remaining() == pytest.approx(30 * 9.75 / 0.25)
        display.advance(BUFR, 8, 16)
        assert display.remaining() == pytest.approx(30 * 9.25 / 0.75)
        clock[0] += 30
        display.over(FR, done(FR))
        assert display.remaining() == pytest.approx(60 * 8.5 / 1.5)
        display.over(BUFR, failed(BUFR))
        assert display.remaining() == pytest.approx(60 * 8 / 2)


def test_several_threads_may_say_how_far_they_are() -> None:
    cells = [Cell("tiny", "offline", "fr", str(number), 1, "recipe") for number in range(200)]
    errors: list[BaseException] = []
    interval = sys.getswitchinterval()
    with Display(False, "tiny", cells=len(cells)) as display:

        def lane(own: list[Cell]) -> None:
            try:
                for cell in own * 20:
                    display.advance(cell, 1, 2)
                    display.remaining()
                    display.over(cell, None)
            except RuntimeError as error:
                errors.append(error)

        threads = [threading.Thread(target=lane, args=(cells[start::4],)) for start in range(4)]
        sys.setswitchinterval(1e-6)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
    assert errors == []
    assert display.done == 20 * len(cells)


def test_times_in_words() -> None:
    words = {0.4: "0 s left", 89: "89 s left", 90: "2 min left", 5399: "90 min left", 9000: "2.5 h left"}
    assert {seconds: left(seconds) for seconds in words} == words
    assert left(float("nan")) == "time left unknown"


@given(st.floats(0, 1e7))
def test_times_in_words_are_close(seconds: float) -> None:
    number, unit, _ = left(seconds).split()
    scale, half = {"s": (1, 0.5), "min": (60, 30), "h": (3600, 180)}[unit]
    assert abs(float(number) * scale - seconds) <= half + 1e-6


def test_one_line_for_a_result() -> None:
    assert describe(done(FR, 0.5)) == "fr on dark, seed 1: 50.0 % (selected 50.0, best 75.0), 1.3 s"
    assert describe(failed(FR)) == "fr on dark, seed 1: failed: it [broke]"
