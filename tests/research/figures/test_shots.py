from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from drawn import assert_nothing_is_cut, assert_same_bytes, footer, line, result, segments

from shiftmend.errors import DataError
from shiftmend.research.bench.benchmark import Result
from shiftmend.research.figures import shots

PROTOCOLS = ("few-shot-5", "few-shot-10", "few-shot-50", "offline")
SHIFTS = ("sky", "fog")


def accuracy(method: str, protocol: str, shift: str, seed: int) -> float:
    start = {"bufr": 0.6, "shot-im": 0.2}[method] + 0.1 * PROTOCOLS.index(protocol)
    return start + 0.02 * (shift == "sky") + 0.03 * seed * (1 + (shift == "fog"))


RESULTS = [
    result(method, shift, seed, accuracy(method, protocol, shift, seed), protocol=protocol)
    for method in ("bufr", "shot-im")
    for protocol in PROTOCOLS
    for shift in SHIFTS
    for seed in (0, 1, 2)
]


@pytest.mark.slow
def test_points_are_means_over_shifts_and_spreads_those_over_seeds() -> None:
    figure = shots.draw(RESULTS)
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
    (axis,) = shots.draw(RESULTS).axes
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
    (axis,) = shots.draw(RESULTS).axes
    ends = {text.get_text(): text.xy for text in axis.texts}
    assert set(ends) == {"bufr", "shot-im"}
    for method, end in ends.items():
        np.testing.assert_allclose(end, line(axis, method)[-1])
    assert not axis.figure.legends


@pytest.mark.slow
def test_a_point_needs_a_seed_with_all_shifts() -> None:
    lacking = [
        one for one in RESULTS if (one.cell.method, one.cell.protocol, one.cell.shift) != ("bufr", "few-shot-10", "fog")
    ]
    figure = shots.draw(lacking)
    assert len(line(figure.axes[0], "bufr")) == 3
    assert "no seed has all shifts: bufr (10 per class)" in footer(figure)
    whole = shots.draw(lacking, shifts=["sky"])
    assert len(line(whole.axes[0], "bufr")) == 4
    assert "sky" in whole.get_suptitle()


@pytest.mark.slow
def test_methods_of_one_protocol_are_left_out_unless_named() -> None:
    alone = [result("source-only", shift, 0, 0.1) for shift in SHIFTS]
    (axis,) = shots.draw([*RESULTS, *alone]).axes
    assert {text.get_text() for text in axis.texts} == {"bufr", "shot-im"}
    (axis,) = shots.draw([*RESULTS, *alone], ["source-only", "bufr"]).axes
    assert line(axis, "source-only")[:, 1] == pytest.approx([10])


@pytest.mark.slow
def test_other_protocols_and_clean_images_take_no_part() -> None:
    others = [result("bufr", "sky", 0, 0.9, protocol="online"), result("bufr", "clean", 0, 0.9)]
    (axis,), (plain,) = shots.draw([*RESULTS, *others]).axes, shots.draw(RESULTS).axes
    np.testing.assert_array_equal(line(axis, "bufr"), line(plain, "bufr"))


def test_one_seed_and_another_metric() -> None:
    figure = shots.draw([one for one in RESULTS if one.cell.seed == 0], metric="ece")
    np.testing.assert_allclose(line(figure.axes[0], "bufr")[:, 1], 10)
    assert figure.axes[0].get_ylabel() == "ECE, %"
    assert "one seed, hence no standard deviation" in footer(figure)
    assert_nothing_is_cut(figure)


def test_failed_cells_are_named_once() -> None:
    failed = result("bufr", "sky", 9, protocol="few-shot-5", error="AdaptationError: diverged")
    said = footer(shots.draw([*RESULTS, failed]))
    assert said.count("cells failed: bufr on sky, seed 9: AdaptationError: diverged") == 1


@pytest.mark.slow
def test_only_few_shots_or_only_offline() -> None:
    for kept, count in ((PROTOCOLS[:3], 3), (PROTOCOLS[3:], 1), (PROTOCOLS[:1], 1)):
        figure = shots.draw([one for one in RESULTS if one.cell.protocol in kept])
        assert len(line(figure.axes[0], "bufr")) == count
        assert_nothing_is_cut(figure)


@pytest.mark.parametrize(
    ("protocol", "count"), [("few-shot-20", 20), ("offline", math.inf), ("online", None), ("few-shot-x", None)]
)
def test_examples_of_a_protocol(protocol: str, count: float | None) -> None:
    assert shots.examples(protocol) == count


@pytest.mark.slow
def test_the_same_results_give_the_same_picture(tmp_path: Path) -> None:
    assert_same_bytes(lambda: shots.draw(RESULTS), tmp_path)


@pytest.mark.parametrize("results", [[], [result("bufr", error="x")], [result("bufr", protocol="online")]])
def test_what_cannot_be_drawn_is_said(results: list[Result]) -> None:
    with pytest.raises(DataError, match="no seed of any method has all of these shifts"):
        shots.draw(results)
