from __future__ import annotations

import math
import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from worlds import sensors

import shiftmend
from shiftmend.adaptation import run as adaptation
from shiftmend.engine import trainer
from shiftmend.evaluation import evaluate as evaluation
from shiftmend.profiles import collect as profiling
from shiftmend.utils.progress import Bar, PassProgress, long_task, piped_progress, progress_bar
from shiftmend.verification import verify as verification


class Notes(Bar):
    """Remembers what was shown."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def advance(self, steps: int = 1, note: str = "") -> None:
        self.shown.append(note)


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


def test_there_is_one_bar_at_a_time() -> None:
    """Whoever scores the model after every epoch, inside of `adapt`, must not draw over its bar."""
    with progress_bar(True, "outer", 3):
        with progress_bar(True, "inner", 3) as bar:
            assert type(bar) is Bar
        with progress_bar(True, "inner", 3) as bar:
            assert type(bar) is Bar
    with progress_bar(True, "next", 3) as bar:
        assert type(bar) is not Bar


@pytest.mark.parametrize("task", ["verify", "evaluate"])
def test_long_passes_show_how_far_they_are(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world, passed = sensors(), list[int]()
    profile = world.profile()

    class Counting(Bar):
        def advance(self, steps: int = 1, note: str = "") -> None:
            passed.append(steps)

    opened: list[tuple[object, ...]] = []
    module = verification if task == "verify" else evaluation
    monkeypatch.setattr(module, "progress_bar", lambda *given: (opened.append(given), nullcontext(Counting()))[1])
    if task == "verify":
        shiftmend.verify(world.model, world.target, profile, batch_size=100, progress=True)
    else:
        shiftmend.evaluate(world.model, (world.target, world.labels), batch_size=100, progress=True)
    assert opened == [(True, task, len(world.target))]
    assert sum(passed) == len(world.target)
    assert len(passed) == math.ceil(len(world.target) / 100)


def test_errors_pass_through() -> None:
    for show in (True, False):
        with pytest.raises(KeyError), progress_bar(show, "work", 3):
            raise KeyError("inside")


@pytest.mark.parametrize(("whole", "amount"), [(None, "1,500"), (3000, "1,500 of 3,000")])
def test_a_pass_says_how_far_it_is(whole: int | None, amount: str) -> None:
    notes = Notes()
    step = PassProgress(notes, "reading", whole)
    step(1000)
    step(500)
    assert notes.shown[-1] == f"reading  {amount} samples"


def test_every_pass_over_the_data_is_shown_from_the_first_batch_on(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = Notes()
    for module in (adaptation, profiling):
        monkeypatch.setattr(module, "progress_bar", lambda *_: nullcontext(notes))
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    profile = shiftmend.profile(model, inputs, batch_size=10, keep_bytes=0)
    assert [notes.shown[0], notes.shown[-1]] == ["pass 1  10 of 40 samples", "pass 3  40 of 40 samples"]
    notes.shown.clear()
    shiftmend.adapt(model, inputs, profile, "fr", epochs=1, batch_size=20)
    assert [note for note in notes.shown if note.endswith("  20 of 40 samples")] == [
        "verification before  20 of 40 samples",
        "all blocks  slices 0.0000  20 of 40 samples",
        "verification of epoch 1  20 of 40 samples",
        "verification after  20 of 40 samples",
    ]


def test_a_pass_that_a_method_makes_is_shown_as_its_own_and_a_partial_one_as_partial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes = Notes()
    monkeypatch.setattr(adaptation, "progress_bar", lambda *_: nullcontext(notes))
    for module in (adaptation, trainer):
        monkeypatch.setattr(module, "VERIFIED_PER_EPOCH", 30)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    shiftmend.adapt(model, inputs, shiftmend.profile(model, inputs), "shot", epochs=1, batch_size=20)
    assert [note.rpartition("  ")[::2] for note in notes.shown if note.startswith(("verification of", "targets"))] == [
        ("verification of epoch 0", "20 of 30 samples"),
        ("verification of epoch 0", "30 of 30 samples"),
        ("targets of epoch 1", "20 of 40 samples"),
        ("targets of epoch 1", "40 of 40 samples"),
        ("verification of epoch 1", "20 of 30 samples"),
        ("verification of epoch 1", "30 of 30 samples"),
    ]


def test_shares_that_are_not_even_are_no_more_than_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shiftmend.utils.progress.world_size", lambda: 2)
    notes = Notes()
    PassProgress(notes, "reading", 7)(4)
    assert notes.shown == ["reading  7 of 7 samples"]


def test_a_long_task_says_now_and_then_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr("shiftmend.utils.progress.time.monotonic", lambda: now[0])
    with long_task(), progress_bar(None, "rehearsing", 3) as bar:
        for now[0], note in ((29.0, "blur"), (31.0, "noise"), (59.0, "fog")):
            bar.advance(1, note)
    assert capsys.readouterr().err == "rehearsing: 2 of 3, noise, 31 s\n"
    with progress_bar(None, "rehearsing", 1) as bar:
        now[0] = 100.0
        bar.advance()
    with long_task(), piped_progress("off"), progress_bar(None, "rehearsing", 1) as bar:
        now[0] = 200.0
        bar.advance()
    assert capsys.readouterr().err == ""
