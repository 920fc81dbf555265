"""The search for a learning rate, over runs made by hand; `test_keeping.py` has real ones."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from shiftmend.adaptation.learning_rates import best_rate
from shiftmend.adaptation.result import Adaptation
from shiftmend.adaptation.run import Settings
from shiftmend.engine.history import Epoch

SETTINGS = Settings(
    batch_size=None,
    seed=0,
    preprocess=None,
    blocks=None,
    output=None,
    device="cpu",
    autocast=False,
    resident=True,
    capture=False,
    compile=False,
    keep="last",
    on_epoch=None,
    checkpoint=None,
    progress=False,
)


def run(slices: float | None, entropy: float, status: str = "complete") -> Adaptation:
    """A run that ended so; without slices it was interrupted before anything was seen."""
    signals = {name: value for name, value in (("slices", slices), ("entropy", entropy)) if value is not None}
    rows = [Epoch(1, "all", 0.1, {}, 0.0, signals)] if slices is not None else []
    method = {"name": "fr", "learning_rate": 0.1}
    return Adaptation(nn.Identity(), rows, {"method": method, "kept": "last", "status": status})


def search(*runs: Adaptation, entropy_may_decide: bool = True) -> tuple[int, dict[str, Any]]:
    """Which of them is the result, and its manifest."""
    remaining = iter(runs)
    result = best_rate(
        [0.1] * len(runs),
        lambda rate, settings, before: next(remaining),
        SETTINGS,
        entropy_may_decide=entropy_may_decide,
    )
    return next(place for place, one in enumerate(runs) if one is result), result.manifest


@pytest.mark.parametrize(("may_decide", "chosen"), [(True, 1), (False, 0)])
def test_entropy_decides_only_where_it_may(may_decide: bool, chosen: int) -> None:
    assert search(run(1.0, 0.8), run(1.05, 0.3), entropy_may_decide=may_decide)[0] == chosen


@pytest.mark.parametrize(("slices", "chosen"), [(2.0, 0), (0.5, 1)])
def test_after_an_interrupt_the_best_so_far_says_that_not_all_was_tried(
    slices: float, chosen: int, caplog: pytest.LogCaptureFixture
) -> None:
    place, manifest = search(run(1.0, 0.5), run(slices, 0.5, status="interrupted"), run(0.1, 0.5))
    assert place == chosen
    assert manifest["status"] == "interrupted"
    assert [entry.get("interrupted", False) for entry in manifest["learning_rates_tried"]] == [False, True]
    assert ("keeping the result of learning rate 0.1" in caplog.text) == (chosen == 0)


def test_a_run_interrupted_before_anything_was_seen_replaces_none() -> None:
    nothing = run(None, 0.0, status="interrupted")
    place, manifest = search(run(1.0, 0.5), nothing, run(0.1, 0.5))
    assert (place, manifest["status"], len(manifest["learning_rates_tried"])) == (0, "interrupted", 1)
    assert search(nothing, run(0.1, 0.5))[0] == 0


def test_a_search_that_was_not_interrupted_does_not_say_so() -> None:
    assert search(run(1.0, 0.5), run(0.5, 0.5))[1]["status"] == "complete"
