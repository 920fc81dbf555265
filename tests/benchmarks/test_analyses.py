from __future__ import annotations

import json
from pathlib import Path

import pytest

import analyses
from analyses import answer_blocks, answer_layers, answer_moved, main, tabulate_calibration

BLOCKS = {
    "fog": {"": 0.04, "conv1": 0.8, "conv2": 0.86, "linear": 0.85},
    "sky": {"": 0.05, "conv1": 0.7, "conv2": 0.84, "linear": 0.87},
}


def test_later_blocks_are_compared_with_the_first_two() -> None:
    text = answer_blocks(BLOCKS)
    assert "+1.0 points" in text
    assert "between -1.0 and +3.0; 1 of 2" in text


def test_layers_behind_the_first_are_what_it_restores() -> None:
    before = {"conv1": 9.0, "conv2": 2.0, "linear": 2.0}
    after = {"first": {"conv1": 0.0, "conv2": 0.5, "linear": 0.5}, "all": {"conv1": 0.0, "conv2": 0.1, "linear": 0.1}}
    text = answer_layers({"before": before, **after})
    assert "75 %" in text
    assert "95 %" in text


def test_each_method_is_measured_by_its_own_way() -> None:
    text = answer_moved({"fr": {"conv1": 1.0, "conv2": 3.0}, "bufr": {"conv1": 0.8, "conv2": 0.2}})
    assert "`fr` 25 %" in text
    assert "`bufr` 80 %" in text


def test_bins_are_pooled_by_their_counts() -> None:
    low = {"lower": 0.0, "upper": 0.9, "count": 30, "confidence": 0.5, "accuracy": 0.4}
    high = {"lower": 0.9, "upper": 1.0, "count": 10, "confidence": 1.0, "accuracy": 0.8}
    empty = {"lower": 0.9, "upper": 1.0, "count": 0, "confidence": None, "accuracy": None}
    rows = [
        {"method": "source-only", "shift": "fog", "bins": [low, high]},
        {"method": "source-only", "shift": "clean", "bins": [low, empty]},
    ]
    table = tabulate_calibration(rows)
    assert "| source-only, unshifted | 40.0 | 50.0 | 0 % |" in table
    assert "| source-only | 50.0 | 62.5 | 25 % |" in table


@pytest.mark.slow
def test_the_kept_page_is_what_the_kept_numbers_give(tmp_path: Path) -> None:
    root = Path(analyses.__file__).parents[1]
    images = tmp_path / "images" / "analyses"
    images.mkdir(parents=True)
    for picture in (root / "docs/images/analyses").glob("*.png"):
        (images / picture.name).write_bytes(b"")
    page = tmp_path / "results" / "page.md"
    page.parent.mkdir()
    main(["emnist-da", "--page", str(page), "--images", str(images)])
    assert page.read_text() == (root / "docs/results/emnist-da-analyses.md").read_text()
    drawn = [path for path in images.iterdir() if path.stat().st_size]
    stored = json.loads((root / "results/emnist-da-analyses.json").read_text())["figures"].values()
    assert len(drawn) == sum(one["figure"] in ("reliability", "curves") for one in stored)
