"""Figures of results: what is drawn is what was stored."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn import assert_nothing_is_cut, assert_same_bytes, footer, line, result, segments, texts
from scipy import stats

from shiftmend.errors import DataError
from shiftmend.evaluation.classification import ClassificationMetrics
from shiftmend.research.bench.benchmark import Result
from shiftmend.research.bench.cell import list_reliability
from shiftmend.research.bench.published import figure as published
from shiftmend.research.bench.suite import find
from shiftmend.research.figures import style
from shiftmend.research.figures.results import (
    draw_dots,
    draw_reliability,
    draw_restoration,
    draw_shots,
    examples_per_class,
)

# ---- dots


SCORES = {  # by method and shift, of two seeds: accuracy, ECE
    ("fr", "sky"): ((0.3, 0.5), (0.2, 0.4)),
    ("fr", "fog"): ((0.8, 0.9), (0.1, 0.1)),
    ("bufr", "sky"): ((0.7, 0.7), (0.05, 0.07)),
    ("bufr", "fog"): ((0.6, 0.8), (0.02, 0.06)),
}
DOTS = [
    result(
        method,
        shift,
        seed,
        accuracy[seed],
        ece[seed],
        origin="rebuilt" if shift == "sky" else "published",
        manifest={"source": {"remark": "EMNIST, rebuilt: fewer images"}},
    )
    for (method, shift), (accuracy, ece) in SCORES.items()
    for seed in (0, 1)
]


@pytest.mark.slow
def test_points_are_means_over_seeds_and_lines_a_standard_deviation() -> None:
    figure = draw_dots(DOTS, ["fr", "bufr"])
    rows = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert rows == ["fog", "sky †"], "sorted by the accuracy of fr"
    for axis, side in zip(figure.axes, (0, 1), strict=True):
        spreads = {tuple(row): span for *row, span in ((s[0, 1], s[:, 0].mean(), s) for s in segments(axis))}
        for method in ("fr", "bufr"):
            points = line(axis, method)
            for row, shift in enumerate(("fog", "sky")):
                values = 100 * np.array(SCORES[method, shift][side])
                assert points[row, 0] == pytest.approx(values.mean())
                assert abs(points[row, 1] - row) < 0.5, "in the band of its shift"
                (span,) = [s for (y, _), s in spreads.items() if y == points[row, 1]]
                np.testing.assert_allclose(span[:, 0], values.mean() + values.std(ddof=1) * np.array([-1, 1]))
    assert "mean ± standard deviation over 2 seeds" in footer(figure)
    assert "sorted by the accuracy of fr" in footer(figure)
    assert "EMNIST, rebuilt: fewer images" in footer(figure)
    assert "† rebuilt, with other textures than the published ones: sky" in footer(figure)
    assert figure.axes[0].get_xlabel() == "accuracy, %"
    assert_nothing_is_cut(figure)


def test_methods_have_lanes_of_their_own_in_the_order_of_the_legend() -> None:
    figure = draw_dots(DOTS, ["bufr", "fr"])
    first, second = line(figure.axes[0], "bufr")[:, 1], line(figure.axes[0], "fr")[:, 1]
    assert (first < second).all(), "the axis points down"
    assert figure.axes[0].get_ylim()[0] > figure.axes[0].get_ylim()[1]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["bufr", "fr"]
    (drawn,) = [one for one in figure.axes[0].get_lines() if one.get_label() == "fr"]
    assert (drawn.get_color(), drawn.get_marker()) == (style.colour_of("fr"), style.marker_of("fr"))


def test_shifts_stand_in_the_order_given() -> None:
    figure = draw_dots(DOTS, ["fr"], ["sky", "fog"])
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["sky †", "fog"]
    np.testing.assert_allclose(line(figure.axes[0], "fr")[:, 0], [40, 85])
    assert "sorted" not in footer(figure)


def test_one_seed_has_no_spread_and_says_so() -> None:
    figure = draw_dots([one for one in DOTS if one.cell.seed == 1])
    assert segments(figure.axes[0]) == []
    assert "one seed, hence no standard deviation" in footer(figure)


@pytest.mark.slow
def test_failed_missing_and_diverged_cells_leave_a_gap() -> None:
    results = [one for one in DOTS if (one.cell.method, one.cell.shift) != ("bufr", "sky")]
    results += [result("bufr", "sky", 0, error="AdaptationError: diverged"), result("pl", "fog", 0, math.nan, math.nan)]
    figure = draw_dots(results, ["fr", "bufr", "pl", "tent"])
    assert line(figure.axes[0], "bufr")[:, 0] == pytest.approx([70])
    assert "pl" not in {one.get_label() for one in figure.axes[0].get_lines()}
    assert "1 of 8 cells failed: bufr on sky, seed 0: AdaptationError: diverged" in footer(figure)
    assert "no finished result: tent" in footer(figure)
    assert_nothing_is_cut(figure)


def test_clean_images_are_no_shift_unless_asked_for() -> None:
    clean = result("fr", "clean", 0, 0.99)
    assert len(line(draw_dots([*DOTS, clean]).axes[0], "fr")) == 2
    assert line(draw_dots([*DOTS, clean], shifts=["clean"]).axes[0], "fr")[:, 0] == pytest.approx([99])


def test_published_figures_stand_hollow_in_the_same_lane() -> None:
    figure = draw_dots(DOTS, ["fr", "bufr"], ["sky", "fog"], beside="paper")
    for axis, metric in zip(figure.axes, ("accuracy", "ece"), strict=True):
        for method in ("fr", "bufr"):
            there = [published("emnist-da", "offline", metric, method, shift) for shift in ("sky", "fog")]
            points = line(axis, f"published {method}")
            np.testing.assert_allclose(points[:, 0], [100 * one.mean for one in there if one])
            np.testing.assert_array_equal(points[:, 1], line(axis, method)[:, 1])
    assert "hollow: the paper" in footer(figure)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["fr", "bufr"]


def test_the_published_ece_of_a_stream_is_said_to_be_another_quantity() -> None:
    for more, said in (({}, False), ({"ece_per_batch": 0.2}, True)):
        stream = [result("fr", "sky", 0, **more)]
        assert ("the mean over its batches" in footer(draw_dots(stream, beside="paper"))) == said
        assert "batches" not in footer(draw_dots(stream))


def test_nothing_published_is_said() -> None:
    made_up = [result("fr", "rain", 0)]
    assert "has no figures" in footer(draw_dots(made_up, beside="paper"))


def test_the_best_epoch_is_called_an_oracle() -> None:
    results = [result("fr", "sky", 0, best=result("fr", accuracy=0.9).last)]
    figure = draw_dots(results, which="best")
    assert line(figure.axes[0], "fr")[:, 0] == pytest.approx([90])
    assert "oracle" in figure.legends[0].get_title().get_text()


@pytest.mark.slow
def test_a_whole_benchmark_fits_a_page() -> None:
    methods = list(find("cifar-10-c").settings["offline"])  # as many rows, on as many shifts, as any
    results = [result(method, f"shift_{n}", seed, 0.5, 0.1) for method in methods for n in range(19) for seed in (1, 2)]
    figure = draw_dots(results)
    assert figure.get_figheight() < 20
    assert figure.get_figwidth() < 8
    assert_nothing_is_cut(figure)
    assert figure.axes[0].get_yticklabels()[0].get_text() == "shift 0"


@pytest.mark.slow
def test_the_same_results_give_the_same_picture(tmp_path: Path) -> None:
    assert_same_bytes(lambda: draw_dots(DOTS), tmp_path)


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([], "no finished result"),
        ([result("fr", error="x")], "1 failed"),
        ([result("fr"), result("fr", protocol="online")], "several tables"),
    ],
)
def test_what_cannot_be_drawn_is_said(results: list, message: str) -> None:
    with pytest.raises(DataError, match=message):
        draw_dots(results)


# ---- shots


PROTOCOLS = ("few-shot-5", "few-shot-10", "few-shot-50", "offline")
SHIFTS = ("sky", "fog")


def accuracy(method: str, protocol: str, shift: str, seed: int) -> float:
    start = {"bufr": 0.6, "shot-im": 0.2}[method] + 0.1 * PROTOCOLS.index(protocol)
    return start + 0.02 * (shift == "sky") + 0.03 * seed * (1 + (shift == "fog"))


SHOTS = [
    result(method, shift, seed, accuracy(method, protocol, shift, seed), protocol=protocol)
    for method in ("bufr", "shot-im")
    for protocol in PROTOCOLS
    for shift in SHIFTS
    for seed in (0, 1, 2)
]


@pytest.mark.slow
def test_points_are_means_over_shifts_and_spreads_those_over_seeds() -> None:
    figure = draw_shots(SHOTS)
    (axis,) = figure.axes
    assert [text.get_text() for text in axis.get_xticklabels()] == ["5", "10", "50", "all"]
    ticks = axis.get_xticks()
    for method in ("bufr", "shot-im"):
        points = line(axis, method)
        for protocol, tick, (x, y) in zip(PROTOCOLS, ticks, points, strict=True):
            means = [np.mean([100 * accuracy(method, protocol, shift, seed) for shift in SHIFTS]) for seed in range(3)]
            assert y == pytest.approx(np.mean(means))
            assert x == pytest.approx(tick, abs=0.05 * (ticks[-1] - ticks[0]))
            (spread,) = [s for s in segments(axis) if s[0, 0] == s[1, 0] == x]
            np.testing.assert_allclose(spread[:, 1], np.mean(means) + np.std(means, ddof=1) * np.array([-1, 1]))
    assert "mean ± standard deviation over 3 seeds" in footer(figure)
    assert axis.get_xlabel() == "target examples per class"
    assert axis.get_ylabel() == "accuracy, %"
    assert_nothing_is_cut(figure)


def test_doublings_are_as_far_apart_and_the_way_to_all_is_dashed() -> None:
    (axis,) = draw_shots(SHOTS).axes
    ticks = axis.get_xticks()
    assert (ticks[2] - ticks[1]) / (ticks[1] - ticks[0]) == pytest.approx(math.log(5) / math.log(2))
    assert ticks[3] > ticks[2]
    long = [
        one for one in axis.get_lines() if one.get_linestyle() != "None" and one.get_xdata()[0] < one.get_xdata()[-1]
    ]
    dashed = [one for one in long if one.get_linestyle() == "--"]
    assert len(dashed) == 2
    assert all(one.get_xdata()[0] > 0.9 * ticks[2] for one in dashed)
    solid = [one for one in long if one.get_linestyle() == "-"]
    assert sorted(len(one.get_xdata()) for one in solid) == [3, 3]


def test_lines_are_named_at_their_ends() -> None:
    (axis,) = draw_shots(SHOTS).axes
    ends = {text.get_text(): text.xy for text in axis.texts}
    assert set(ends) == {"bufr", "shot-im"}
    for method, end in ends.items():
        np.testing.assert_allclose(end, line(axis, method)[-1])
    assert not axis.figure.legends


@pytest.mark.slow
def test_a_point_needs_a_seed_with_all_shifts() -> None:
    lacking = [
        one for one in SHOTS if (one.cell.method, one.cell.protocol, one.cell.shift) != ("bufr", "few-shot-10", "fog")
    ]
    figure = draw_shots(lacking)
    assert len(line(figure.axes[0], "bufr")) == 3
    assert "no seed has all shifts: bufr (10 per class)" in footer(figure)
    whole = draw_shots(lacking, shifts=["sky"])
    assert len(line(whole.axes[0], "bufr")) == 4
    assert "sky" in whole.get_suptitle()


@pytest.mark.slow
def test_methods_of_one_protocol_are_left_out_unless_named() -> None:
    alone = [result("source-only", shift, 0, 0.1) for shift in SHIFTS]
    (axis,) = draw_shots([*SHOTS, *alone]).axes
    assert {text.get_text() for text in axis.texts} == {"bufr", "shot-im"}
    (axis,) = draw_shots([*SHOTS, *alone], ["source-only", "bufr"]).axes
    assert line(axis, "source-only")[:, 1] == pytest.approx([10])


@pytest.mark.slow
def test_other_protocols_and_clean_images_take_no_part() -> None:
    others = [result("bufr", "sky", 0, 0.9, protocol="online"), result("bufr", "clean", 0, 0.9)]
    (axis,), (plain,) = draw_shots([*SHOTS, *others]).axes, draw_shots(SHOTS).axes
    np.testing.assert_array_equal(line(axis, "bufr"), line(plain, "bufr"))


def test_one_seed_and_another_metric() -> None:
    figure = draw_shots([one for one in SHOTS if one.cell.seed == 0], metric="ece")
    np.testing.assert_allclose(line(figure.axes[0], "bufr")[:, 1], 10)
    assert figure.axes[0].get_ylabel() == "ECE, %"
    assert "one seed, hence no standard deviation" in footer(figure)
    assert_nothing_is_cut(figure)


def test_failed_cells_are_named_once() -> None:
    failed = result("bufr", "sky", 9, protocol="few-shot-5", error="AdaptationError: diverged")
    said = footer(draw_shots([*SHOTS, failed]))
    assert said.count("cells failed: bufr on sky, seed 9: AdaptationError: diverged") == 1


@pytest.mark.slow
def test_only_few_shots_or_only_offline() -> None:
    for kept, count in ((PROTOCOLS[:3], 3), (PROTOCOLS[3:], 1), (PROTOCOLS[:1], 1)):
        figure = draw_shots([one for one in SHOTS if one.cell.protocol in kept])
        assert len(line(figure.axes[0], "bufr")) == count
        assert_nothing_is_cut(figure)


@pytest.mark.parametrize(
    ("protocol", "count"), [("few-shot-20", 20), ("offline", math.inf), ("online", None), ("few-shot-x", None)]
)
def test_examples_of_a_protocol(protocol: str, count: float | None) -> None:
    assert examples_per_class(protocol) == count


@pytest.mark.slow
def test_the_same_results_give_the_same_picture_of_shots(tmp_path: Path) -> None:
    assert_same_bytes(lambda: draw_shots(SHOTS), tmp_path)


@pytest.mark.parametrize("results", [[], [result("bufr", error="x")], [result("bufr", protocol="online")]])
def test_what_cannot_be_drawn_is_said_of_shots(results: list[Result]) -> None:
    with pytest.raises(DataError, match="no seed"):
        draw_shots(results)


# ---- restoration


TABLE = {"source-only": (3.2, 0.31), "adabn": (3.1, 0.30), "pl": (2.6, 0.50), "fr": (1.8, 0.13), "bufr": (1.2, 0.05)}


def restored(table: dict[str, tuple[float, float]]) -> list[Any]:
    """Make results of two shifts and two seeds whose means are the table's."""
    return [
        result(method, shift, seed, ece=ece + 0.01 * sign * seed, restoration_distance=distance - 0.1 * sign * seed)
        for method, (distance, ece) in table.items()
        for shift, sign in (("sky", 1), ("fog", -1))
        for seed in (1, 2)
    ]


@pytest.mark.slow
def test_points_names_and_coefficient() -> None:
    figure = draw_restoration(restored(TABLE))
    (axis,) = figure.axes
    for method, (distance, ece) in TABLE.items():
        np.testing.assert_allclose(line(axis, method), [(distance, 100 * ece)])
    named = {text.get_text(): text.xy for text in axis.texts}
    assert set(named) == set(TABLE)
    np.testing.assert_allclose(named["pl"], (2.6, 50))
    expected = stats.spearmanr(*zip(*TABLE.values(), strict=True)).statistic
    assert f"rank correlation {expected:.2f}" in figure.get_suptitle().replace("\n", " ")
    assert "4 pairs of shift and seed" in footer(figure)
    assert "2 seeds" in footer(figure)
    assert "distance" in axis.get_xlabel()
    assert "%" in axis.get_ylabel()
    assert_nothing_is_cut(figure)


@pytest.mark.slow
def test_shot_is_left_out_unless_named_or_allowed() -> None:
    everything = restored(TABLE | {"shot": (9.0, 0.2)})
    figure = draw_restoration(everything)
    assert "not drawn, with a source model of its own: shot" in footer(figure)
    assert "shot" not in {text.get_text() for text in figure.axes[0].texts}
    for shown in (
        draw_restoration(everything, ["fr", "bufr", "shot"]),
        draw_restoration(everything, exclude=()),
    ):
        np.testing.assert_allclose(line(shown.axes[0], "shot"), [(9, 20)])
        assert "not drawn" not in footer(shown)


@pytest.mark.slow
def test_who_saw_labels_is_left_out_unless_named() -> None:
    everything = restored(TABLE | {"target-supervised": (0.1, 0.01)})
    figure = draw_restoration(everything)
    assert figure.get_suptitle() == draw_restoration(restored(TABLE)).get_suptitle()
    assert "not drawn, trained with labels: target-supervised" in footer(figure)
    named = draw_restoration(everything, ["fr", "bufr", "target-supervised"])
    np.testing.assert_allclose(line(named.axes[0], "target-supervised"), [(0.1, 1)])
    assert "not drawn" not in footer(named)


@pytest.mark.slow
def test_only_places_that_all_methods_have() -> None:
    some = [one for one in restored(TABLE) if (one.cell.method, one.cell.shift) != ("fr", "fog")]
    figure = draw_restoration(some)
    np.testing.assert_allclose(line(figure.axes[0], "bufr"), [(1.2 - 0.15, 5 + 1.5)])
    assert "2 pairs of shift and seed" in footer(figure)
    only = draw_restoration(restored(TABLE), shifts=["fog"])
    np.testing.assert_allclose(line(only.axes[0], "bufr"), [(1.2 + 0.15, 5 - 1.5)])


@pytest.mark.slow
def test_variants_without_a_common_seed_are_left_out_unless_named() -> None:
    everything = [*restored(TABLE), result("fr-sliced", "sky", 3, restoration_distance=0.5)]
    figure = draw_restoration(everything, variants=["fr-sliced"])
    assert figure.get_suptitle() == draw_restoration(restored(TABLE)).get_suptitle()
    assert "not drawn, for lack of common seeds: fr-sliced" in footer(figure)
    with pytest.raises(DataError, match="no shift and seed"):
        draw_restoration(everything, ["fr", "fr-sliced"], variants=["fr-sliced"])


def test_methods_without_a_distance_are_named() -> None:
    figure = draw_restoration([*restored(TABLE), result("tent"), result("bnm", restoration_distance=None)])
    assert "without a finite restoration distance: tent, bnm" in footer(figure)


def test_a_diverged_method_is_not_drawn_and_leaves_no_coefficient() -> None:
    figure = draw_restoration(restored(TABLE | {"tent": (math.nan, 0.1)}))
    assert {text.get_text() for text in figure.axes[0].texts} == set(TABLE)
    assert "no rank correlation: a value is not a number" in figure.get_suptitle().replace("\n", " ")


@pytest.mark.slow
def test_two_methods_have_points_but_no_coefficient() -> None:
    figure = draw_restoration(restored(TABLE), ["fr", "bufr"])
    assert len(figure.axes[0].texts) == 2
    assert "no rank correlation: too few points" in figure.get_suptitle().replace("\n", " ")
    assert_nothing_is_cut(figure)


@pytest.mark.slow
def test_what_is_rebuilt_and_what_failed_is_said() -> None:
    figure = draw_restoration(
        [
            *(result(m, origin="rebuilt", restoration_distance=d) for m, (d, _) in TABLE.items()),
            result("tent", error="x"),
        ]
    )
    assert "rebuilt, with other textures than the published ones: all shifts" in footer(figure)
    assert "cells failed: tent on sky, seed 1: x" in footer(figure)
    assert "one seed" in footer(figure)


@pytest.mark.slow
def test_the_same_results_give_the_same_picture_of_restoration(tmp_path: Path) -> None:
    assert_same_bytes(lambda: draw_restoration(restored(TABLE)), tmp_path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "no finished result"),
        ([result("fr"), result("bufr")], "restoration distance"),
        ([result("fr", restoration_distance=math.inf)], "restoration distance"),
    ],
)
def test_what_cannot_be_drawn_is_said_of_restoration(given: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        draw_restoration(given)


# ---- reliability


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


BINNED = [
    scored(method, shift, seed, sharpness=sharpness)
    for method, sharpness in (("fr", 1.0), ("bufr", 3.0))
    for shift in ("sky", "fog")
    for seed in (1, 2)
]


def errors(method: str, places: list[tuple[str, int]]) -> tuple[float, float, np.ndarray, np.ndarray, np.ndarray]:
    """Compute ECE, MCE and ten bins (images, confidence, accuracy) from the predictions themselves."""
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
    figure = draw_reliability(BINNED, ["fr", "bufr"], shifts)
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


@pytest.mark.slow
@pytest.mark.parametrize("methods", [["bufr"], ["fr", "bufr"]])
def test_nothing_is_cut(methods: list[str]) -> None:
    assert_nothing_is_cut(draw_reliability(BINNED, methods))


def test_only_places_that_all_methods_have_are_pooled() -> None:
    results = [one for one in BINNED if (one.cell.method, one.cell.shift) != ("fr", "fog")]
    figure = draw_reliability(results, ["fr", "bufr"])
    ece, mce, *_ = errors("bufr", [("sky", 1), ("sky", 2)])
    assert figure.axes[1].texts[0].get_text() == f"ECE {100 * ece:.1f} %\nMCE {100 * mce:.1f} %"
    assert "2 pairs of shift and seed, those that all of these methods have done" in footer(figure)


def test_the_source_model_on_clean_images_is_a_column_of_its_own() -> None:
    clean = scored("source-only", "clean", 1)
    figure = draw_reliability([*BINNED, clean], ["clean", "bufr"])
    assert [axis.get_title("left") for axis in figure.axes[:2]] == ["clean", "bufr"]
    total = sum(part["count"] for part in clean.manifest["reliability"])
    hits = sum(part["count"] * part["accuracy"] for part in clean.manifest["reliability"] if part["count"])
    assert figure.axes[2].get_title("left") == f"accuracy {100 * hits / total:.1f} %"
    assert "clean is the source model on clean images, one seed" in footer(figure)
    alone = draw_reliability([clean], ["clean"])
    assert alone.axes[0].get_title("left") == "clean"
    with pytest.raises(DataError, match="no finished result"):
        draw_reliability(BINNED, ["clean", "bufr"])


@pytest.mark.slow
def test_failed_cells_and_missing_methods_are_named_at_the_foot() -> None:
    failed = result("fr", "stripe", 1, error="AdaptationError: the loss is not finite")
    figure = draw_reliability([*BINNED, failed], ["fr", "bufr", "tent"])
    assert "1 of 9 cells failed: fr on stripe, seed 1: AdaptationError: the loss is not finite" in footer(figure)
    assert "no finished result: tent" in footer(figure)
    assert "stripe" not in texts(figure).replace(footer(figure), "").split("\n")[0]


def test_results_without_bins_are_refused_in_one_sentence() -> None:
    with pytest.raises(DataError, match="1 of 5 results"):
        draw_reliability([*BINNED, result("bufr", "rain", 7)], ["bufr"])


def test_bins_that_differ_are_not_pooled() -> None:
    with pytest.raises(DataError, match=r"\[10, 15\] bins"):
        draw_reliability([*BINNED, scored("bufr", "rain", 1, bins=15)], ["bufr"])


@pytest.mark.slow
def test_the_same_results_give_the_same_picture_of_reliability(tmp_path: Path) -> None:
    assert_same_bytes(lambda: draw_reliability(BINNED, ["fr", "bufr"]), tmp_path)


@pytest.mark.parametrize(
    ("results", "methods", "message"),
    [
        ([], ["bufr"], "bufr"),
        (BINNED, ["tent"], "tent"),
        ([BINNED[0], BINNED[-1]], ["fr", "bufr"], "fr, bufr"),
        ([BINNED[0], result("fr", protocol="online")], ["fr"], "several tables"),
    ],
)
def test_what_cannot_be_drawn_is_said_of_reliability(results: list[Result], methods: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        draw_reliability(results, methods)
