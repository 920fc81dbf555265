from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawn import assert_nothing_is_cut, assert_same_bytes, footer, line, result
from scipy import stats

from shiftmend.errors import DataError
from shiftmend.research.figures import restoration

TABLE = {"source-only": (3.2, 0.31), "adabn": (3.1, 0.30), "pl": (2.6, 0.50), "fr": (1.8, 0.13), "bufr": (1.2, 0.05)}


def results(table: dict[str, tuple[float, float]]) -> list[Any]:
    """Two shifts and two seeds, whose means are the table's."""
    return [
        result(method, shift, seed, ece=ece + 0.01 * sign * seed, restoration_distance=distance - 0.1 * sign * seed)
        for method, (distance, ece) in table.items()
        for shift, sign in (("sky", 1), ("fog", -1))
        for seed in (1, 2)
    ]


@pytest.mark.slow
def test_points_names_and_coefficient() -> None:
    figure = restoration.draw(results(TABLE))
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
    everything = results(TABLE | {"shot": (9.0, 0.2)})
    figure = restoration.draw(everything)
    assert "not drawn, with a source model of its own: shot" in footer(figure)
    assert "shot" not in {text.get_text() for text in figure.axes[0].texts}
    for shown in (restoration.draw(everything, ["fr", "bufr", "shot"]), restoration.draw(everything, exclude=())):
        np.testing.assert_allclose(line(shown.axes[0], "shot"), [(9, 20)])
        assert "not drawn" not in footer(shown)


@pytest.mark.slow
def test_who_saw_labels_is_left_out_unless_named() -> None:
    everything = results(TABLE | {"target-supervised": (0.1, 0.01)})
    figure = restoration.draw(everything)
    assert figure.get_suptitle() == restoration.draw(results(TABLE)).get_suptitle()
    assert "not drawn, trained with labels: target-supervised" in footer(figure)
    named = restoration.draw(everything, ["fr", "bufr", "target-supervised"])
    np.testing.assert_allclose(line(named.axes[0], "target-supervised"), [(0.1, 1)])
    assert "not drawn" not in footer(named)


@pytest.mark.slow
def test_only_places_that_all_methods_have() -> None:
    some = [one for one in results(TABLE) if (one.cell.method, one.cell.shift) != ("fr", "fog")]
    figure = restoration.draw(some)
    np.testing.assert_allclose(line(figure.axes[0], "bufr"), [(1.2 - 0.15, 5 + 1.5)])
    assert "2 pairs of shift and seed" in footer(figure)
    only = restoration.draw(results(TABLE), shifts=["fog"])
    np.testing.assert_allclose(line(only.axes[0], "bufr"), [(1.2 + 0.15, 5 - 1.5)])


@pytest.mark.slow
def test_variants_without_a_common_seed_are_left_out_unless_named() -> None:
    everything = [*results(TABLE), result("fr-sliced", "sky", 3, restoration_distance=0.5)]
    figure = restoration.draw(everything, variants=["fr-sliced"])
    assert figure.get_suptitle() == restoration.draw(results(TABLE)).get_suptitle()
    assert "not drawn, for lack of common seeds: fr-sliced" in footer(figure)
    with pytest.raises(DataError, match="no shift and seed for which all methods"):
        restoration.draw(everything, ["fr", "fr-sliced"], variants=["fr-sliced"])


def test_methods_without_a_distance_are_named() -> None:
    figure = restoration.draw([*results(TABLE), result("tent"), result("bnm", restoration_distance=None)])
    assert "without a finite restoration distance: tent, bnm" in footer(figure)


def test_a_diverged_method_is_not_drawn_and_leaves_no_coefficient() -> None:
    figure = restoration.draw(results(TABLE | {"tent": (math.nan, 0.1)}))
    assert {text.get_text() for text in figure.axes[0].texts} == set(TABLE)
    assert "no rank correlation: a value is not a number" in figure.get_suptitle().replace("\n", " ")


@pytest.mark.slow
def test_two_methods_have_points_but_no_coefficient() -> None:
    figure = restoration.draw(results(TABLE), ["fr", "bufr"])
    assert len(figure.axes[0].texts) == 2
    assert "no rank correlation: too few points" in figure.get_suptitle().replace("\n", " ")
    assert_nothing_is_cut(figure)


@pytest.mark.slow
def test_what_is_rebuilt_and_what_failed_is_said() -> None:
    figure = restoration.draw(
        [
            *(result(m, origin="rebuilt", restoration_distance=d) for m, (d, _) in TABLE.items()),
            result("tent", error="x"),
        ]
    )
    assert "rebuilt, with other textures than the published ones: all shifts" in footer(figure)
    assert "cells failed: tent on sky, seed 1: x" in footer(figure)
    assert "one seed" in footer(figure)


@pytest.mark.slow
def test_the_same_results_give_the_same_picture(tmp_path: Path) -> None:
    assert_same_bytes(lambda: restoration.draw(results(TABLE)), tmp_path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "there is no finished result"),
        ([result("fr"), result("bufr")], "no shift and seed for which all methods have a restoration distance"),
        ([result("fr", restoration_distance=math.inf)], "no restoration distance is finite|not a number|too few"),
    ],
)
def test_what_cannot_be_drawn_is_said(given: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        restoration.draw(given)
