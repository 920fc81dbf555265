"""The script that runs the next cells: order, seeds and models, time limit, resuming, numbers of the figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import paper_cells
from paper_cells import BLOCKS, Block, Place, analyse, choose_seed, list_blocks, read_store, run_blocks
from shiftmend.research.bench.plan import settings_of
from shiftmend.research.bench.store import read_compact
from shiftmend.research.bench.suite import find

TINY = f"{Path(__file__).parents[1] / 'helpers' / 'tiny.py'}:TINY"

FEW = (
    Block("first", TINY, ("source-only", "adabn")),
    Block("second", TINY, ("fr",), seeds=2),
    Block("third", TINY, ("adabn", "fr"), "online"),
)


def make_place(folder: Path, **changes: Any) -> Place:
    torch.set_num_threads(1)
    return replace(Place(folder / "store", folder / "models", folder, "cpu", workers=1), **changes)


def test_every_block_names_rows_that_there_are() -> None:
    for block in BLOCKS:
        assert set(block.methods) <= set(settings_of(find(block.benchmark), block.protocol)), block.title
    assert BLOCKS[-1].whole


@pytest.mark.slow
def test_cells_are_run_in_order_and_never_twice(tmp_path: Path) -> None:
    place, said = make_place(tmp_path), []
    assert next(list_blocks(FEW, place, tmp_path / "none")).startswith("first: 5 cells")
    assert run_blocks(FEW, place, 10, said.append, tmp_path / "none") == ["first", "second", "third"]
    titles = [line.partition(":")[0] for line in said if "cells missing" in line]
    assert titles == ["first", "second", "second", "third"]
    cells = [result.cell for result in read_store(place)]
    # Clean images of both seeds are scored, whatever the rows of a block.
    assert sum(cell.shift == "clean" for cell in cells) == 2
    assert {cell.seed for cell in cells if cell.method == "fr" and cell.protocol == "offline"} == {1, 2}
    assert {result.cell for result in read_compact(place.store / "tiny.json")} == set(cells)
    models = sorted((place.models / "sources").iterdir())
    assert len(models) == 2
    times = [file.stat().st_mtime_ns for file in models]
    said.clear()
    assert run_blocks(FEW, place, 10, said.append, tmp_path / "none") == ["first", "second", "third"]
    assert said == []
    assert [file.stat().st_mtime_ns for file in models] == times
    assert all(line.endswith("done") for line in list_blocks(FEW, place, tmp_path / "none"))


@pytest.mark.slow
def test_a_seed_is_gone_on_with_only_together_with_its_model(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    run_blocks(FEW[:1], place, 10, lambda line: None, tmp_path / "none")
    kept = tmp_path / "kept"
    kept.mkdir()
    (place.store / "tiny.json").rename(kept / "tiny.json")
    block = Block("more", TINY, ("fr",))
    # With the model, its seed is taken up; without, the next one, so that no two models share a seed.
    with_model = make_place(tmp_path, store=tmp_path / "second")
    assert "seed 1" in next(list_blocks([block], with_model, kept))
    lost = make_place(tmp_path, store=tmp_path / "third", models=tmp_path / "nothing")
    assert "seed 2, 1 source model to train" in next(list_blocks([block], lost, kept))
    run_blocks([block], lost, 10, lambda line: None, kept)
    by_seed: dict[int, set[str]] = {}
    for result in read_store(lost):
        by_seed.setdefault(result.cell.seed, set()).add(result.manifest["source_weights"])
    assert {seed: len(weights) for seed, weights in by_seed.items()} == {1: 1, 2: 1}
    # What a compact file leaves out cannot be drawn: such a seed does not serve the analyses.
    whole = replace(FEW[0], whole=True)
    assert choose_seed(whole, read_store(with_model), with_model) != 1


@pytest.mark.slow
def test_a_model_that_only_the_store_has_is_not_lost(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    run_blocks(FEW[:1], place, 10, lambda line: None, tmp_path / "none")
    for file in (place.models / "sources").iterdir():
        file.unlink()
    block = Block("more", TINY, ("fr",))
    assert "seed 1" in next(list_blocks([block], place, tmp_path / "none"))
    assert len(list((place.models / "sources").iterdir())) == 1


@pytest.mark.slow
def test_without_time_nothing_is_begun_and_failures_stop_no_other_block(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    assert run_blocks(FEW, place, 0, lambda line: None, tmp_path / "none") == []
    assert read_store(place) == []
    doomed = Block("doomed", TINY, ("doomed",))
    assert run_blocks([doomed, FEW[0]], place, 10, lambda line: None, tmp_path / "none") == ["first"]


@pytest.mark.slow
def test_from_cells_to_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    block = Block("what figures need", TINY, ("source-only", "fr"), whole=True)
    place = make_place(tmp_path)
    assert run_blocks([block], place, 10, lambda line: None, tmp_path / "none") == [block.title]
    figures: dict[str, tuple[str, dict[str, Any]]] = {
        "reliability": ("reliability", {"methods": ["clean", "fr"]}),
        "curves": ("curves", {"methods": ["fr"], "shifts": ["dark", "noisy"]}),
        "moved": ("moved", {"methods": ["fr"], "shifts": ["noisy"]}),
        "affected": ("affected", {"methods": ["fr"], "shifts": ["noisy"]}),
    }
    assert analyse(block, place, 0.001, lambda line: None, figures) == []
    assert analyse(block, place, 10, lambda line: None, figures, seconds_each=0) == list(figures)
    found = json.loads((place.store / "tiny-analyses.json").read_text())
    assert found["seed"] == 1
    numbers = {name: entry["numbers"] for name, entry in found["figures"].items()}
    assert {row["shift"] for row in numbers["reliability"]} == {"clean", "dark", "noisy"}
    assert set(numbers["curves"]) == {"fr, dark", "fr, noisy"}
    assert all(distance > 0 for distance in numbers["moved"]["fr"].values())
    assert set(numbers["affected"]) == {"before", "after adapting"}
    drawn = sorted(file.name for file in (place.store / "figures").iterdir())
    assert drawn == [f"tiny-{name}.png" for name in sorted(figures)]


def test_the_command_lists_what_digits_lack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--models", str(tmp_path), "--store", str(tmp_path / "store"), "--results", str(tmp_path), "--list"]
    paper_cells.main([Block("digits", "digits", ("source-only", "fr"))], arguments)
    assert "7 cells (source-only, fr), seed 123, 1 source model to train" in capsys.readouterr().out
