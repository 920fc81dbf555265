from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn import assert_nothing_is_cut, assert_same_bytes, footer, result, texts

from shiftmend.errors import DataError
from shiftmend.evaluation.classification import ClassificationMetrics
from shiftmend.research.bench.benchmark import Result
from shiftmend.research.bench.cell import list_reliability
from shiftmend.research.figures import reliability

CLASSES = 4


def predictions(seed: int, count: int = 300, sharpness: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(count, CLASSES, generator=generator, dtype=torch.float64)
    labels = torch.where(
        torch.rand(count, generator=generator) < 0.6,
        logits.argmax(dim=1),
        torch.randint(0, CLASSES, (count,), generator=generator),
    )
    return logits, labels


def scored(method: str, shift: str, seed: int, bins: int = 10, **options: Any) -> Result:
    metrics = ClassificationMetrics(bins)
    metrics.update(*predictions(seed + sum(map(ord, method + shift)), **options))
    return result(method, shift, seed, manifest={"reliability": list_reliability(metrics.compute())})


RESULTS = [
    scored(method, shift, seed, sharpness=sharpness)
    for method, sharpness in (("fr", 1.0), ("bufr", 3.0))
    for shift in ("sky", "fog")
    for seed in (1, 2)
]


def errors(method: str, places: list[tuple[str, int]]) -> tuple[float, float, np.ndarray, np.ndarray, np.ndarray]:
    """ECE, MCE, and of ten bins images, confidence and accuracy: from the predictions themselves."""
    sharpness = {"fr": 1.0, "bufr": 3.0}[method]
    pairs = [predictions(seed + sum(map(ord, method + shift)), sharpness=sharpness) for shift, seed in places]
    logits, labels = (np.concatenate([pair[side].numpy() for pair in pairs]) for side in (0, 1))
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    sure = (exponentials / exponentials.sum(axis=1, keepdims=True)).max(axis=1)
    right = logits.argmax(axis=1) == labels
    number = np.ceil(10 * sure).astype(int) - 1
    counts = np.bincount(number, minlength=10)
    full = np.maximum(counts, 1)
    confidence = np.bincount(number, sure, minlength=10) / full
    accuracy = np.bincount(number, right, minlength=10) / full
    gaps = np.abs(confidence - accuracy)
    return float(gaps @ counts / counts.sum()), float(gaps.max()), counts, confidence, accuracy


EVERYWHERE = [(shift, seed) for shift in ("sky", "fog") for seed in (1, 2)]


@pytest.mark.parametrize(("shifts", "places"), [(None, EVERYWHERE), (["sky"], [("sky", 1), ("sky", 2)])])
def test_bars_and_errors_are_those_of_all_predictions_together(
    shifts: list[str] | None, places: list[tuple[str, int]]
) -> None:
    figure = reliability.draw(RESULTS, ["fr", "bufr"], shifts)
    top, bottom = figure.axes[:2], figure.axes[2:]
    assert [axis.get_title("left") for axis in top] == ["fr", "bufr"]
    for method, diagram, histogram in zip(("fr", "bufr"), top, bottom, strict=True):
        ece, mce, counts, confidence, accuracy = errors(method, places)
        full = counts > 0
        bars, gaps = diagram.containers
        np.testing.assert_allclose([bar.get_height() for bar in bars], 100 * accuracy[full], atol=1e-9)
        np.testing.assert_allclose([bar.get_x() for bar in bars], 10 * np.flatnonzero(full), atol=1e-9)
        lower, upper = np.minimum(accuracy, confidence)[full], np.maximum(accuracy, confidence)[full]
        np.testing.assert_allclose([bar.get_y() for bar in gaps], 100 * lower, atol=1e-9)
        np.testing.assert_allclose([bar.get_y() + bar.get_height() for bar in gaps], 100 * upper, atol=1e-9)
        shares = [bar.get_height() for bar in histogram.containers[0]]
        np.testing.assert_allclose(shares, 100 * counts / counts.sum(), atol=1e-9)
        assert [text.get_text() for text in diagram.texts] == [f"ECE {100 * ece:.1f} %\nMCE {100 * mce:.1f} %"]
        means = [100 * accuracy @ counts / counts.sum(), 100 * confidence @ counts / counts.sum()]
        np.testing.assert_allclose([line.get_xdata()[0] for line in histogram.get_lines()], means)
        assert histogram.get_title("left") == f"accuracy {means[0]:.1f} %"
        assert histogram.get_title("right") == f"confidence {means[1]:.1f} %"
    assert ("one shift, 2 seeds" if shifts else "2 shifts, 2 seeds") in footer(figure)


@pytest.mark.parametrize("methods", [["bufr"], ["fr", "bufr"]])
def test_nothing_is_cut(methods: list[str]) -> None:
    assert_nothing_is_cut(reliability.draw(RESULTS, methods))


def test_only_places_that_all_methods_have_are_pooled() -> None:
    results = [one for one in RESULTS if (one.cell.method, one.cell.shift) != ("fr", "fog")]
    figure = reliability.draw(results, ["fr", "bufr"])
    ece, mce, *_ = errors("bufr", [("sky", 1), ("sky", 2)])
    assert figure.axes[1].texts[0].get_text() == f"ECE {100 * ece:.1f} %\nMCE {100 * mce:.1f} %"
    assert "2 pairs of shift and seed, those that all of these methods have done" in footer(figure)


def test_the_source_model_on_clean_images_is_a_column_of_its_own() -> None:
    clean = scored("source-only", "clean", 1)
    figure = reliability.draw([*RESULTS, clean], ["clean", "bufr"])
    assert [axis.get_title("left") for axis in figure.axes[:2]] == ["clean", "bufr"]
    total = sum(part["count"] for part in clean.manifest["reliability"])
    hits = sum(part["count"] * part["accuracy"] for part in clean.manifest["reliability"] if part["count"])
    assert figure.axes[2].get_title("left") == f"accuracy {100 * hits / total:.1f} %"
    assert "clean is the source model on clean images, one seed" in footer(figure)
    alone = reliability.draw([clean], ["clean"])
    assert alone.axes[0].get_title("left") == "clean"
    with pytest.raises(DataError, match="no finished result of source-only on clean"):
        reliability.draw(RESULTS, ["clean", "bufr"])


def test_failed_cells_and_missing_methods_are_named_at_the_foot() -> None:
    failed = result("fr", "stripe", 1, error="AdaptationError: the loss is not finite")
    figure = reliability.draw([*RESULTS, failed], ["fr", "bufr", "tent"])
    assert "1 of 9 cells failed: fr on stripe, seed 1: AdaptationError: the loss is not finite" in footer(figure)
    assert "no finished result: tent" in footer(figure)
    assert "stripe" not in texts(figure).replace(footer(figure), "").split("\n")[0]


def test_results_without_bins_are_refused_in_one_sentence() -> None:
    with pytest.raises(
        DataError, match=r"^1 of 5 results have no reliability bins \(the first is bufr on rain, seed 7"
    ):
        reliability.draw([*RESULTS, result("bufr", "rain", 7)], ["bufr"])


def test_bins_that_differ_are_not_pooled() -> None:
    with pytest.raises(DataError, match=r"\[10, 15\] bins"):
        reliability.draw([*RESULTS, scored("bufr", "rain", 1, bins=15)], ["bufr"])


def test_the_same_results_give_the_same_picture(tmp_path: Path) -> None:
    assert_same_bytes(lambda: reliability.draw(RESULTS, ["fr", "bufr"]), tmp_path)


@pytest.mark.parametrize(
    ("results", "methods", "message"),
    [
        ([], ["bufr"], "there is no finished result of bufr"),
        (RESULTS, [], "no method is named"),
        (RESULTS, ["tent"], "there is no finished result of tent"),
        ([RESULTS[0], RESULTS[-1]], ["fr", "bufr"], "no shift and seed that all of fr, bufr have done"),
        ([RESULTS[0], result("fr", protocol="online")], ["fr"], "several tables"),
    ],
)
def test_what_cannot_be_drawn_is_said(results: list[Result], methods: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        reliability.draw(results, methods)
