"""Results in a small file: what comes back, what is left out, and how large it is."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shiftmend.errors import DataError
from shiftmend.research.bench.benchmark import SIGNALS, Cell, Outcome, Result
from shiftmend.research.bench.store import from_compact, read_file, to_compact

CELL = Cell("emnist-da", "offline", "bufr", "sky", 123, "a1b2")
MANIFEST: dict[str, Any] = {
    "environment": {"torch": "2.5", "device": "cpu", "platform": "Linux-6.1"},
    "cell": {"seed": 123},
    "source": {"name": "größer", "recipe": {"learning_rate": 0.1}},
    "target": {"mean": [[0.123456789, 2 / 3]]},
    "reliability": [{"lower": 0.0, "count": 3}],
    "verification": {"before": {"divergence": 1.2345678, "verdict": "not restored"}, "after": {"divergence": 0.5}},
    "adapted_weights": "ab" * 32,
}
DONE = Result(
    CELL,
    "rebuilt",
    last=Outcome(150, 0.853563829787234, 0.05, 0.1, 0.7, 0.3),
    best=Outcome(140, 0.81, 0.04, 0.11, 0.69, 0.29),
    signals={"slices": 0.5, "entropy": 0.4},
    restoration_distance=1.25,
    alignment_loss=0.5,
    epochs=150,
    seconds=12.5,
    peak_memory=2**40,
    history=({"epoch": 0, "loss": 3.5},),
    manifest=MANIFEST,
    finished="2022-04-25T09:00:00Z",
)
FAILED = Result(replace(CELL, seed=234), "rebuilt", error='out of "memory",\nafter all', manifest=MANIFEST)


def test_everything_comes_back_but_what_is_left_out() -> None:
    first, second = from_compact(to_compact([FAILED, DONE]))
    kept = {
        "environment": {"torch": "2.5", "device": "cpu"},
        "source": MANIFEST["source"],
        "target": {"mean": [[0.123457, 0.666667]]},
        "verification": {"before": {"divergence": 1.23457, "verdict": "not restored"}, "after": {}},
    }
    assert first == replace(DONE, last=replace(DONE.last, accuracy=0.853564), history=(), manifest=kept)  # type: ignore[type-var]
    assert second == replace(FAILED, manifest=kept)
    for judged in ({"before": {"divergence": 1.5}}, {"after": None}, {}, None):  # as after an interrupted verification
        (back,) = from_compact(to_compact([replace(DONE, manifest={"verification": judged})]))
        assert back.manifest == {"verification": judged}


def test_what_manifests_share_stands_once_and_cells_are_lines() -> None:
    cells = [replace(DONE, cell=replace(CELL, seed=seed)) for seed in range(50)]
    text = to_compact(cells)
    assert text.count("größer") == 1
    assert json.loads(text)["shared"]["environment"] == [{"torch": "2.5", "device": "cpu"}]
    assert sum(line.startswith('  ["emnist-da"') for line in text.splitlines()) == 50
    other = replace(cells[7], seconds=3.0)
    changed = to_compact([*cells[:7], other, *cells[8:]])
    assert sum(a != b for a, b in zip(text.splitlines(), changed.splitlines(), strict=True)) == 1


@pytest.mark.slow
def test_a_thousand_cells_stay_below_a_megabyte() -> None:
    """With digits that do not end, and a target, a profile and a verdict of its own for every seed and shift."""
    results = []
    for number in range(1000):
        seed, place = number % 5, number % 65
        third = (number + 1) / 3e3
        outcome = Outcome(137, third, third / 3, third / 7, third * 7, third / 11)
        manifest = MANIFEST | {
            "target": {"sha256": f"{place:064x}", "samples": 18800, "mean": [third] * 3, "deviation": [third] * 3},
            "profile_sha256": f"{seed:064x}",
            "method": {"name": f"method-{number % 14}", "learning_rate": 0.1, "epochs": 150},
            "verification": {"before": {"divergence": place / 7, "floor": 0.000123456789}, "after": {"floor": 0.1}},
        }
        cell = Cell("emnist-da", "few-shot-20", f"method-{number % 14}", f"some_noise-{place}", number, "0" * 16)
        results.append(
            replace(DONE, cell=cell, last=outcome, best=outcome, selected=outcome, manifest=manifest)
            if number
            else DONE
        )
    results = [replace(one, signals=dict.fromkeys(SIGNALS, 1 / 3)) for one in results]
    assert len(to_compact(results).encode()) < 1_000_000


numbers = st.floats(allow_nan=True, allow_infinity=True)
values = st.recursive(st.none() | st.integers(-9, 9) | numbers | st.text(max_size=5), st.lists)


@pytest.mark.slow
@given(
    accuracy=numbers,
    signals=st.dictionaries(st.sampled_from(SIGNALS), numbers),
    distance=st.none() | numbers,
    manifest=st.dictionaries(st.text(max_size=4), values, max_size=3),
)
def test_what_was_read_is_written_again_as_it_was(
    accuracy: float, signals: dict[str, float], distance: float | None, manifest: dict[str, Any]
) -> None:
    result = replace(
        DONE,
        last=Outcome(1, accuracy, 0.1, 0.1, 0.1, 0.1),
        signals=signals,
        restoration_distance=distance,
        manifest=manifest,
    )
    text = to_compact([result, FAILED])
    first, _ = back = from_compact(text)
    assert to_compact(back) == text
    assert first.last is not None
    assert first.last.accuracy == pytest.approx(accuracy, rel=1e-5, nan_ok=True)
    assert first.signals == pytest.approx(signals, rel=1e-5, nan_ok=True)
    assert (first.restoration_distance is None) == (distance is None)


def test_numbers_that_are_not_finite_come_back() -> None:
    odd = replace(DONE, last=Outcome(1, 0.1, math.nan, 0.1, math.inf, 0.9), alignment_loss=-math.inf)
    text = to_compact([odd])
    json.loads(text, parse_constant=pytest.fail)
    (back,) = from_compact(text)
    assert back.last is not None
    assert math.isnan(back.last.ece)
    assert (back.last.nll, back.alignment_loss) == (math.inf, -math.inf)


def test_nothing_is_a_file_too() -> None:
    assert from_compact(to_compact([])) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: [], "it holds no results"),
        (lambda content: content | {"format": "other"}, "it holds no results"),
        (lambda content: content | {"version": 9}, "has version 9, expected 1"),
        (lambda content: {key: value for key, value in content.items() if key != "rows"}, "damaged .KeyError"),
        (lambda content: content | {"rows": [content["rows"][0][:-1]]}, "damaged .ValueError"),
        (lambda content: content | {"shared": {**content["shared"], "source": []}}, "damaged .IndexError"),
        (lambda content: content | {"rows": [[*content["rows"][0][:4], "7", *content["rows"][0][5:]]]}, "seed is '7'"),
        (lambda content: content | {"rows": content["rows"] * 2}, "it has 2 rows of bufr on sky, seed 123"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, change: Any, message: str) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps(change(json.loads(to_compact([DONE])))))
    with pytest.raises(DataError, match=rf"results\.json cannot be used as results: .*{message}"):
        read_file(file)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="bytes cannot be read"):
        read_file(tmp_path / "bytes")
