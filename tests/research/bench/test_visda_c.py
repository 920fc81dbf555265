"""VisDA-C from files in the official layout to the page, with a small network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import small_visda
import torch

from shiftmend.errors import DataError
from shiftmend.research.bench.pages import page
from shiftmend.research.bench.results import read
from shiftmend.research.bench.run import run
from shiftmend.research.datasets.streamed import VISDA_CLASSES


@pytest.mark.slow
def test_visda_runs_end_to_end_on_a_small_set(tmp_path: Path) -> None:
    """Every method on every shift, the three clean rows, each class, the page: from files in the official layout."""
    torch.set_num_threads(1)
    small_visda.lay_out(tmp_path)
    name, folder = f"{small_visda.SMALL_VISDA_FILE}:SMALL", tmp_path / "bench"
    options: dict[str, Any] = {"root": tmp_path, "device": "cpu", "workers": 1, "progress": False}
    done = run(name, folder, seeds=[1], **options)
    assert (done.cells, done.failed) == (3 * 5 + 3, ())
    found = read(name, folder, seeds=[1], root=tmp_path)
    assert sorted(result.cell.shift for result in found.clean) == sorted(small_visda.SMALL.clean_sets)
    starts = {result.cell.shift: result.manifest["source"]["name"] for result in found.clean}
    assert starts["clean without label shift"] == "plain-balanced"
    assert starts["clean without pretraining"] == "plain-scratch"
    for result in found.results:
        scores, last = result.class_accuracy, result.last
        assert last is not None
        assert result.mean_class_accuracy == pytest.approx(sum(scores.values()) / len(scores))
        if result.cell.shift == "photographs":
            assert list(scores) == list(VISDA_CLASSES)
            counts = small_visda.COUNTS["validation"]
            weighted = sum(score * count for score, count in zip(scores.values(), counts, strict=True)) / sum(counts)
            assert weighted == pytest.approx(last.accuracy)
        if result.cell.shift == "photographs without label shift":
            assert result.mean_class_accuracy == pytest.approx(last.accuracy)
    text = page(name, folder, root=tmp_path)
    assert "accuracy, mean over classes (last)" not in text
    for words in (
        "accuracy, mean over classes",
        "## Each class",
        "skateboard",
        "in the paper 99.8",
        "in the paper 99.7",
    ):
        assert words in text, words
    (tmp_path / small_visda.WEIGHTS).unlink()
    with pytest.raises(DataError, match="digit-cnn-imagenet"):
        run(name, tmp_path / "other", methods=["source-only"], shifts=["photographs"], seeds=[1], **options)
    alone = ["photographs without pretraining"]
    assert run(name, tmp_path / "other", methods=["source-only"], shifts=alone, seeds=[1], **options).failed == ()
