from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from drawn import assert_nothing_is_cut, assert_same_bytes, footer, line, result, segments

from shiftmend.errors import DataError
from shiftmend.research.bench.published import figure as published
from shiftmend.research.bench.suite import find
from shiftmend.research.figures import dots, style

SCORES = {  # by method and shift, of two seeds: accuracy, ECE
    ("fr", "sky"): ((0.3, 0.5), (0.2, 0.4)),
    ("fr", "fog"): ((0.8, 0.9), (0.1, 0.1)),
    ("bufr", "sky"): ((0.7, 0.7), (0.05, 0.07)),
    ("bufr", "fog"): ((0.6, 0.8), (0.02, 0.06)),
}
RESULTS = [
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
    figure = dots.draw(RESULTS, ["fr", "bufr"])
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
    figure = dots.draw(RESULTS, ["bufr", "fr"])
    first, second = line(figure.axes[0], "bufr")[:, 1], line(figure.axes[0], "fr")[:, 1]
    assert (first < second).all(), "the axis points down"
    assert figure.axes[0].get_ylim()[0] > figure.axes[0].get_ylim()[1]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["bufr", "fr"]
    (drawn,) = [one for one in figure.axes[0].get_lines() if one.get_label() == "fr"]
    assert (drawn.get_color(), drawn.get_marker()) == (style.colour("fr"), style.marker("fr"))


def test_shifts_stand_in_the_order_given() -> None:
    figure = dots.draw(RESULTS, ["fr"], ["sky", "fog"])
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["sky †", "fog"]
    np.testing.assert_allclose(line(figure.axes[0], "fr")[:, 0], [40, 85])
    assert "sorted" not in footer(figure)


def test_one_seed_has_no_spread_and_says_so() -> None:
    figure = dots.draw([one for one in RESULTS if one.cell.seed == 1])
    assert segments(figure.axes[0]) == []
    assert "one seed, hence no standard deviation" in footer(figure)


@pytest.mark.slow
def test_failed_missing_and_diverged_cells_leave_a_gap() -> None:
    results = [one for one in RESULTS if (one.cell.method, one.cell.shift) != ("bufr", "sky")]
    results += [result("bufr", "sky", 0, error="AdaptationError: diverged"), result("pl", "fog", 0, math.nan, math.nan)]
    figure = dots.draw(results, ["fr", "bufr", "pl", "tent"])
    assert line(figure.axes[0], "bufr")[:, 0] == pytest.approx([70])
    assert "pl" not in {one.get_label() for one in figure.axes[0].get_lines()}
    assert "1 of 8 cells failed: bufr on sky, seed 0: AdaptationError: diverged" in footer(figure)
    assert "no finished result: tent" in footer(figure)
    assert_nothing_is_cut(figure)


def test_clean_images_are_no_shift_unless_asked_for() -> None:
    clean = result("fr", "clean", 0, 0.99)
    assert len(line(dots.draw([*RESULTS, clean]).axes[0], "fr")) == 2
    assert line(dots.draw([*RESULTS, clean], shifts=["clean"]).axes[0], "fr")[:, 0] == pytest.approx([99])


def test_published_figures_stand_hollow_in_the_same_lane() -> None:
    figure = dots.draw(RESULTS, ["fr", "bufr"], ["sky", "fog"], beside="paper")
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
        assert ("the mean over its batches" in footer(dots.draw(stream, beside="paper"))) == said
        assert "batches" not in footer(dots.draw(stream))


def test_nothing_published_is_said() -> None:
    made_up = [result("fr", "rain", 0)]
    assert "has no figures" in footer(dots.draw(made_up, beside="paper"))


def test_the_best_epoch_is_called_an_oracle() -> None:
    results = [result("fr", "sky", 0, best=result("fr", accuracy=0.9).last)]
    figure = dots.draw(results, which="best")
    assert line(figure.axes[0], "fr")[:, 0] == pytest.approx([90])
    assert "oracle" in figure.legends[0].get_title().get_text()


@pytest.mark.slow
def test_a_whole_benchmark_fits_a_page() -> None:
    methods = list(find("cifar-10-c").settings["offline"])  # as many rows, on as many shifts, as any
    results = [result(method, f"shift_{n}", seed, 0.5, 0.1) for method in methods for n in range(19) for seed in (1, 2)]
    figure = dots.draw(results)
    assert figure.get_figheight() < 20
    assert figure.get_figwidth() < 8
    assert_nothing_is_cut(figure)
    assert figure.axes[0].get_yticklabels()[0].get_text() == "shift 0"


@pytest.mark.slow
def test_the_same_results_give_the_same_picture(tmp_path: Path) -> None:
    assert_same_bytes(lambda: dots.draw(RESULTS), tmp_path)


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([], "there is no finished result; run"),
        ([result("fr", error="x")], "there is no finished result, 1 failed; run"),
        ([result("fr"), result("fr", protocol="online")], "several tables"),
    ],
)
def test_what_cannot_be_drawn_is_said(results: list, message: str) -> None:
    with pytest.raises(DataError, match=message):
        dots.draw(results)
