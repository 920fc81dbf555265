"""Charts, read back to the values that were drawn by the numbers at their axes, as people read them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from markupsafe import Markup

from shiftmend.evaluation.classification import ReliabilityBin
from shiftmend.report import charts
from shiftmend.report.charts import MAX_POINTS, WIDTH
from shiftmend.report.facts import Distribution, Unit
from shiftmend.verification.estimate import Estimate
from shiftmend.verification.verdict import Verification

START, END = 44.0, 332.0  # of what lies beside a vertical axis
STYLED = set(
    re.findall(r"\.([a-z][\w-]*)", Path(charts.__file__).with_name("templates").joinpath("page.css").read_text())
)


def check_that_it_can_be_seen(one: ElementTree.Element, height: float) -> None:
    """Check that a shape is known, has a style, and lies inside the drawing; letters are half as wide as high."""
    assert one.tag in ("circle", "line", "path", "polyline", "rect", "text")
    styles = set(one.get("class", "").split()) - {"layer-before", "layer-after", "layer-plain"}
    assert styles
    assert styles <= STYLED
    places = {name: float(one.get(name, 0)) for name in ("x", "x1", "x2", "cx", "y", "y1", "y2", "cy")}
    assert all(0 <= place <= (WIDTH if "x" in name else height) for name, place in places.items())
    assert places["y"] + float(one.get("height", 0)) <= height
    assert one.tag != "circle" or float(one.get("r", 0)) > 2
    assert re.fullmatch(r"[MLHlhz0-9. -]*", one.get("d", ""))
    for point in one.get("points", "").split():
        x, y = map(float, point.split(","))
        assert 0 <= x <= WIDTH
        assert 0 <= y <= height
    if one.tag == "text":
        width = 5.5 * len(one.text or "")
        left = places["x"] - {"start": 0.0, "middle": 0.5, "end": 1.0}[one.get("text-anchor", "")] * width
        assert left >= -8
        assert left + width <= WIDTH + 8
        assert places["x"] != START - 4 or one.get("text-anchor") == "end", "beside the axis, not across it"


class Drawing:
    """A parsed SVG."""

    def __init__(self, chart: Markup) -> None:
        self.root = ElementTree.fromstring(chart)
        *corner, width, height = map(float, self.root.get("viewBox", "").split())
        assert (self.root.tag, self.root.get("role"), *corner, width) == ("svg", "img", 0, 0, WIDTH)
        for one in self.root:
            check_that_it_can_be_seen(one, height)
        self.label = self.root.get("aria-label")
        texts = [(one.text or "", float(one.get("x", "")), float(one.get("y", ""))) for one in self.root.iter("text")]
        self.ticks = [(float(text.strip(" %")), y - 4) for text, x, y in texts if x == START - 4]
        self.texts = {text: (x, y) for text, x, y in texts if x != START - 4}

    def numbers(self, kind: str, *names: str) -> list[list[float]]:
        """Return these attributes of all elements of a class."""
        found = [one for one in self.root.iter() if kind in (one.get("class") or "").split()]
        return [[float(one.get(name, "")) for name in names] for one in found if one.tag != "text"]

    def curve(self, kind: str) -> np.ndarray:
        (line,) = [one for one in self.root.iter("polyline") if kind in (one.get("class") or "").split()]
        return np.array([point.split(",") for point in line.get("points", "").split()], dtype=float)

    def scale(self, linear: bool = False) -> Callable[[float | np.ndarray], np.ndarray]:
        """Return the map from heights to values, from the outermost numbers at the axis; check the others."""
        assert 1 < len(self.ticks) < 12
        assert [[y, y] for _, y in self.ticks] == pytest.approx(np.array(self.numbers("grid", "y1", "y2")))
        values, heights = np.array(sorted(self.ticks)).T
        assert (np.diff(heights) < 0).all()
        levels = values if linear else np.log10(values)
        slope = (levels[-1] - levels[0]) / (heights[-1] - heights[0])

        def value(height: float | np.ndarray) -> np.ndarray:
            level = levels[0] + slope * (np.asarray(height) - heights[0])
            return np.asarray(level if linear else 10**level)

        assert value(heights) == pytest.approx(values, rel=0.01, abs=0.01 * np.ptp(values))
        return value


# ---- distances and losses


def test_units_are_drawn_worst_first_beside_what_chance_gives() -> None:
    before, after = [0.2, 1.5, 0.7, 0.05, 3.0], [0.02, 0.3, math.nan, 0.01, math.inf]
    drawing = Drawing(charts.draw_ranks(before, after, 0.006, "Distance of <all>"))
    value = drawing.scale()
    assert value(drawing.curve("before")[:, 1]) == pytest.approx([3.0, 1.5, 0.7, 0.2, 0.05], rel=0.02)
    assert drawing.curve("before")[:, 0] == pytest.approx(np.linspace(START, END, 5))
    assert value(drawing.curve("after")[:, 1]) == pytest.approx([0.3, 0.02, 0.01], rel=0.02)
    assert drawing.curve("after")[:, 0] == pytest.approx(np.linspace(START, END, 5)[2:]), "the worst two have no number"
    ((y1, y2),) = drawing.numbers("chance", "y1", "y2")
    assert value(np.array([y1, y2])) == pytest.approx(0.006, rel=0.02)
    assert y1 - drawing.curve("before")[0, 1] > 120, "most of the height is used"
    assert drawing.texts["chance"] == (END, pytest.approx(y1 - 4))
    assert (drawing.texts["worst"], drawing.texts["5 units"]) == ((START, 172), (END, 172))
    assert "units, sorted by distance from home" in drawing.texts
    assert drawing.label == "Distance of <all>"


def test_of_many_units_the_ends_are_kept() -> None:
    drawing = Drawing(charts.draw_ranks(list(np.geomspace(0.001, 10, 1_234)), None, 0.01, ""))
    curve = drawing.curve("before")
    assert len(curve) == MAX_POINTS
    assert drawing.scale()(curve[[0, -1], 1]) == pytest.approx([10, 0.001], rel=0.03)
    assert curve[[0, -1], 0].tolist() == [START, END]
    assert np.abs(np.diff(curve, 2, axis=0)).max() < 0.5, "a straight line"
    assert "1,234 units" in drawing.texts


def test_a_single_unit_is_drawn_and_none_that_is_infinite() -> None:
    drawing = Drawing(charts.draw_ranks([0.5], [math.inf], 0.01, ""))
    dash = drawing.curve("before")
    assert drawing.scale()(dash[:, 1]) == pytest.approx(0.5, rel=0.02)
    assert (dash[:, 0].mean(), np.ptp(dash[:, 0])) == (START, 6)
    assert drawing.numbers("after") == []
    course = Drawing(charts.draw_epochs("after", [(0.0, math.nan), (1.0, math.nan)], [], 1, None, ""))
    assert course.numbers("after") == []


@pytest.mark.parametrize(
    "values",
    [
        [8.0, 0.9, 0.02, 0.0004],
        [2.0, 0.9, 0.11, 0.05],
        [0.9, 0.5, 0.4, 0.15],
        [0.44, 0.4, 0.36, 0.31],  # between two round numbers
        [0.0075, 0.0075, 0.0075, 0.0075],
        [2400.0, 2000.0, 1900.0, 1800.0],
        [0.4, -0.2, -0.75, -0.9],  # as the loss of SHOT
        [-1.07, -1.08, -1.1, -1.1],
    ],
)
def test_a_course_can_be_read_back(values: list[float]) -> None:
    points = [*zip((1.0, 2.0, 4.0, 8.0), values, strict=True), (3.0, math.nan)]
    drawing = Drawing(charts.draw_epochs("plain", points, [2, 6], 4, None, "Loss"))
    value, curve = drawing.scale(linear=min(values) < 0), drawing.curve("plain")
    assert value(curve[:, 1]) == pytest.approx(values, rel=0.02, abs=0.002)
    assert curve[:, 0] == pytest.approx([START + (END - START) * epoch / 8 for epoch in (1, 2, 4, 8)])
    assert drawing.numbers("kept", "cx", "cy") == [curve[2].tolist()]
    uprights = [[START + (END - START) * epoch / 8] * 2 for epoch in (2, 6)]
    assert drawing.numbers("release", "x1", "x2") == uprights
    assert drawing.texts["0"][0] == START
    assert drawing.texts["8"][0] == END
    assert "epoch (one run through the data)" in drawing.texts
    assert drawing.numbers("chance", "y1") == []


def test_a_course_shows_chance_and_a_single_epoch() -> None:
    drawing = Drawing(charts.draw_epochs("after", [(1.0, 0.3)], [], 0, 0.02, "Distance"))
    ((y1, y2),) = drawing.numbers("chance", "y1", "y2")
    assert drawing.scale()(np.array([y1, y2])) == pytest.approx(0.02, rel=0.02)
    assert drawing.texts["chance"] == (END, pytest.approx(y1 - 4))
    dash = drawing.curve("after")
    assert drawing.scale()(dash[:, 1]) == pytest.approx(0.3, rel=0.02)
    assert (dash[:, 0].mean(), np.ptp(dash[:, 0])) == (END, 6)
    assert drawing.numbers("kept", "cx") == []


def test_an_axis_ends_where_distances_are_as_good_as_none() -> None:
    drawing = Drawing(charts.draw_ranks([1.0, 0.0], [1e-9, 1e-9], 0.01, ""))
    assert drawing.scale()(drawing.curve("before")[:, 1]) == pytest.approx([1.0, charts.MIN_LEVEL], rel=0.03)
    assert drawing.scale()(drawing.curve("after")[:, 1]) == pytest.approx(charts.MIN_LEVEL, rel=0.03)


# ---- the line of the verdict


def zones(drawing: Drawing) -> dict[str, tuple[float, float]]:
    found = {kind: drawing.numbers(f"zone-{kind}", "x", "width") for kind in ("good", "unsure", "bad")}
    return {kind: (one[0][0], sum(one[0])) for kind, one in found.items() if one}


def marks(drawing: Drawing) -> dict[str, float]:
    paths = [one for one in drawing.root.iter("path") if "mark" in (one.get("class") or "").split()]
    return {(one.get("class") or "").split()[1]: float((one.get("d") or "")[1:].split()[0]) for one in paths}


@pytest.mark.parametrize(("before", "after"), [(0.8, 0.004), (3.0, 0.03), (0.9, 0.7), (0.5, 0.00012)])
def test_marks_lie_where_their_distance_is_between_the_limits(before: float, after: float) -> None:
    last = Verification(after, 0.002, 5000)
    drawing = Drawing(charts.draw_gauge(Verification(before, 0.002, 5000), last))
    limits, found = last.limits, zones(drawing)
    assert found["good"] == pytest.approx((10, found["unsure"][0]), abs=0.11)
    assert found["unsure"][1] == pytest.approx(found["bad"][0], abs=0.11)
    assert found["bad"][1] == pytest.approx(WIDTH - 10, abs=0.11)
    decade = (found["bad"][0] - found["unsure"][0]) / math.log10(limits[1] / limits[0])
    for kind, value in (("before", before), ("after", after)):
        place = found["bad"][0] + decade * math.log10(value / limits[1])
        assert marks(drawing)[kind] == pytest.approx(place, abs=0.02 * decade)
        assert 10 <= marks(drawing)[kind] <= WIDTH - 10
    texts = {word: x for word, (x, _) in drawing.texts.items()}
    assert texts[f"before {before:.3f}" if before < 1 else f"before {before:.2f}"] == marks(drawing)["before"]
    for word, kind in (("as at home", "good"), ("not as at home", "bad")):
        assert texts[word] == pytest.approx(sum(found[kind]) / 2, abs=0.11)
    assert "between" not in texts, "for which there is no room"


def test_an_undecided_line_has_no_zone_of_home() -> None:
    last = Verification(0.012, 0.01, 100)
    assert last.verdict == "undecided"
    assert last.divergence > last.limits[0] > 0
    found = zones(Drawing(charts.draw_gauge(Verification(0.8, 0.01, 100), last)))
    assert found == {"unsure": (10, pytest.approx(found["bad"][0], abs=0.11)), "bad": found["bad"]}


def test_what_is_infinite_lies_at_one_end_and_nothing_at_the_other() -> None:
    drawing = Drawing(charts.draw_gauge(Verification(math.nan, 0.002, 5000), None))
    assert marks(drawing) == {"before": WIDTH - 10}
    assert drawing.label == "Distance from home: here infinite"
    assert "here infinite" in drawing.texts
    assert marks(Drawing(charts.draw_gauge(Verification(0.0, 0.002, 5000), None))) == {"before": 10}


def test_words_of_marks_that_are_near_do_not_cover_each_other() -> None:
    near, far = (
        Drawing(charts.draw_gauge(Verification(before, 0.002, 5000), Verification(0.7, 0.002, 5000)))
        for before in (0.8, 90)
    )
    assert near.texts["before 0.800"][1] - near.texts["after 0.700"][1] >= 12
    assert far.texts["before 90.00"][1] == far.texts["after 0.700"][1]


# ---- shares


def seen(*shares: float) -> Distribution:
    return Distribution(shares=shares, divergence=0.1, outside=0.0, moved=0.0, spread=1.0)


def outline(drawing: Drawing, kind: str) -> list[tuple[float, float, float]]:
    """Return left, right and height of each step."""
    (path,) = [one.get("d", "") for one in drawing.root.iter("path") if kind in (one.get("class") or "").split()]
    steps = [step.replace("H", " ").split() for step in path[1:].split("L")]
    return [(float(left), float(right), float(y)) for left, y, right in steps]


def test_a_distribution_has_the_shares_and_the_range_of_home() -> None:
    home, before, after = (0.01, 0.3, 0.5, 0.19, 0.0), (0.1, 0.1, 0.2, 0.2, 0.4), (0.05, 0.35, 0.4, 0.2, 0.0)
    drawing = Drawing(
        charts.draw_distribution(Unit(7, -1.25, 3.5, home, seen(*before), seen(*after)), "unit 7 of <tap>")
    )
    bars = np.array(drawing.numbers("home-bar", "x", "y", "width", "height"))
    floor = drawing.numbers("axis", "y1")[0][0]
    assert bars[:, 1] + bars[:, 3] == pytest.approx(floor, abs=0.11)
    tallest = bars[2, 3]
    assert tallest > 100
    assert bars[:, 3] == pytest.approx(np.array(home) / 0.5 * tallest, abs=0.11)
    edges = np.linspace(10, WIDTH - 10, 6)
    assert (bars[:, 0] >= edges[:-1]).all()
    assert (bars[:, 0] + bars[:, 2] <= edges[1:]).all()
    for kind, shares in (("before", before), ("after", after)):
        left, right, y = np.array(outline(drawing, kind)).T
        assert left == pytest.approx(edges[:-1], abs=0.11)
        assert right == pytest.approx(edges[1:], abs=0.11)
        assert floor - y == pytest.approx(np.array(shares) / 0.5 * tallest, abs=0.11)
    assert drawing.texts["-1.25"][0] == edges[1], "the outer bins are what home never gave"
    assert drawing.texts["3.5"][0] == edges[4]
    axis = [[10, floor, WIDTH - 10, floor], *([edge, floor, edge, floor + 4] for edge in (edges[1], edges[4]))]
    assert drawing.numbers("axis", "x1", "y1", "x2", "y2") == axis
    words = [drawing.texts[word] for word in ("lower than ever", "range at home", "higher than ever")]
    assert words == [(10, 147), (WIDTH / 2, 147), (WIDTH - 10, 147)]
    assert drawing.label == "Distribution of unit 7 of <tap>"


def test_a_distribution_of_no_numbers_has_no_outline() -> None:
    nothing = Unit(0, 0.0, 1.0, (0.0, 1.0, 0.0), seen(0.0, 0.5, 0.5), seen(*[math.nan] * 3))
    drawing = Drawing(charts.draw_distribution(nothing, ""))
    assert len(outline(drawing, "before")) == 3
    assert drawing.numbers("after") == []


def columns(drawing: Drawing, kind: str) -> np.ndarray:
    return np.array(drawing.numbers(kind, "x", "y", "width", "height"))


@pytest.mark.parametrize("after", [None, [5, 0, 0, 0, 0, 0, 0, 0, 15, 20]])
def test_confidences_are_shares_of_their_own_total(after: Sequence[int] | None) -> None:
    before = [0, 0, 0, 10, 0, 0, 20, 30, 0, 40] if after else [0] * 9 + [7]
    drawing = Drawing(charts.draw_confidences(before, after))
    value = drawing.scale(linear=True)
    assert max(drawing.ticks)[0] == (50 if after else 100), "as high as the tallest"
    edges = [drawing.texts[f"{percent}"][0] for percent in range(0, 101, 20)]
    assert edges == pytest.approx(np.linspace(START, END, 6), abs=0.11)
    tenths, ends = np.linspace(START, END, 11), []
    for kind, counts in (("before", before), ("after", after)):
        if counts is not None:
            x, y, width, height = columns(drawing, kind).T
            assert value(y) == pytest.approx(100 * np.array(counts) / sum(counts), abs=0.6)
            assert y + height == pytest.approx((y + height)[0], abs=0.11)
            assert value((y + height)[0]) == pytest.approx(0, abs=0.2)
            assert (x > tenths[:-1]).all()
            assert (x + width < tenths[1:]).all()
            assert (width > 8).all()
            ends += [x, x + width]
    if after is not None:
        assert (ends[1] <= ends[2] + 0.11).all(), "before stands left of after"
    assert "confidence of a prediction, %" in drawing.texts
    assert drawing.label == "How confident the predictions were"


def test_reliability_is_accuracy_above_confidence() -> None:
    before = [(0.25, 0.4), (None, None), (0.95, 0.6)]
    bins = [ReliabilityBin(0.0, 1.0, 5, confidence, accuracy) for confidence, accuracy in before]
    drawing = Drawing(charts.draw_reliability(bins, [ReliabilityBin(0.0, 1.0, 5, 0.5, 0.52)]))
    value = drawing.scale(linear=True)
    x, y = np.array(drawing.numbers("dot", "cx", "cy")).T
    assert (x - START) / (END - START) == pytest.approx([0.25, 0.95, 0.5], abs=0.001)
    assert value(y) == pytest.approx([40, 60, 52], abs=0.1)
    assert [len(drawing.numbers(f"layer-{kind}")) for kind in ("before", "after")] == [3, 2], "dots, and their line"
    assert drawing.curve("before").tolist() == drawing.numbers("dot", "cx", "cy")[:2]
    ((x1, y1, x2, y2),) = drawing.numbers("chance", "x1", "y1", "x2", "y2")
    assert ((x1, x2), value(np.array([y1, y2]))) == ((START, END), pytest.approx([0, 100], abs=0.1))
    assert [drawing.texts[f"{percent} %"][0] for percent in (0, 50, 100)] == [START, (START + END) / 2, END]
    assert "confidence that the model stated" in drawing.texts
    assert drawing.label == "Accuracy by confidence"
    assert len(Drawing(charts.draw_reliability(bins, None)).numbers("dot")) == 2


def test_signals_share_the_scale_that_they_are_given() -> None:
    drawing = Drawing(charts.draw_signal([[-1.0, 0.0, 3.0], [1.0] * 2000], -1.0, 3.0, "Input 3"))
    first, second = drawing.curve("channel-0"), drawing.curve("channel-1")
    assert first.tolist() == [[8, 102], [170, 78.5], [332, 8]]
    assert np.unique(second[:, 1]).tolist() == [55]
    assert second[[0, -1], 0].tolist() == [8, 332]
    assert len(second) <= 402
    assert drawing.label == "Input 3"


@pytest.mark.parametrize("length", [401, 999, 50_000])
def test_no_spike_of_a_long_signal_is_lost(length: int) -> None:
    places = [7, length // 2 + 1, length - 3]
    values = [0.0] * length
    for place, value in zip(places, (4.0, -2.0, 3.0), strict=True):
        values[place] = value
    curve = Drawing(charts.draw_signal([values], -2.0, 4.0, "Input 0")).curve("channel-0")
    assert len(curve) <= 402
    for place, height in zip(places, (8.0, 102.0, 23.7), strict=True):
        assert any(abs(curve - [8 + 324 * place / (length - 1), height]).max(axis=1) < 0.1)


def test_a_signal_that_never_changes_is_a_level_line() -> None:
    drawing = Drawing(charts.draw_signal([[2.0, 2.0], [2.0]], 2.0, 2.0, "Input 0"))
    assert len({*drawing.curve("channel-0")[:, 1], *drawing.curve("channel-1")[:, 1]}) == 1


def test_estimates_are_drawn_at_their_values_with_their_intervals() -> None:
    rows = [
        charts.ScoreRow("before", Estimate(0.25, 0.2, 0.3, "accuracy"), truth=0.5),
        charts.ScoreRow("after", Estimate(None, None, None, "accuracy", ("why",), (0.9, 0.8, 1.0))),
        charts.ScoreRow("range", Estimate(None, 0.4, 0.8, "accuracy", ("why",), (0.6, 0.4, 0.8))),
        charts.ScoreRow("a name that is much too long to be shown", Estimate(0.75, None, None, "accuracy")),
    ]
    chart = charts.draw_scores(rows, 0.95, "Scores")
    drawing = Drawing(chart)
    written = {one.text or "": float(one.get("x", "")) for one in drawing.root.iter("text")}
    ticks = {text: x for text, x in written.items() if text.endswith(" %")}

    def value(x: float) -> float:
        return (x - ticks["0 %"]) / (ticks["100 %"] - ticks["0 %"])

    dots = [value(float(one.get("cx", ""))) for one in drawing.root.iter("circle")]
    assert dots == pytest.approx([0.25, 0.75], abs=1e-3)
    spans = []
    for bar in drawing.root.iter("rect"):
        left, width = (float(bar.get(name, "")) for name in ("x", "width"))
        spans += [value(left), value(left + width)]
    assert spans == pytest.approx([0.2, 0.3, 0.4, 0.8], abs=1e-3), "a range has no dot"
    (diamond,) = drawing.root.iter("path")
    assert value(float(diamond.get("d", "").split()[0][1:])) == pytest.approx(0.5, abs=1e-3)
    assert "unknown" in written
    assert drawing.label is not None
    assert "after unknown" in drawing.label
    assert "range 40.0 % to 80.0 %" in drawing.label
    assert "90.0 %" not in str(chart), "what is withheld is not drawn"


def test_errors_are_drawn_in_their_own_unit() -> None:
    drawing = Drawing(charts.draw_scores([charts.ScoreRow("here", Estimate(3.0, 2.0, 4.0, "rmse"))], 1.0, "Errors"))
    written = {one.text or "": float(one.get("x", "")) for one in drawing.root.iter("text")}
    ticks = {float(text): x for text, x in written.items() if re.fullmatch(r"[\d.]+", text)}
    (dot,) = drawing.root.iter("circle")
    slope = (ticks[4.0] - ticks[0.0]) / 4
    assert float(dot.get("cx", "")) == pytest.approx(ticks[0.0] + 3 * slope, abs=0.1)


@pytest.mark.parametrize("percent", [True, False])
def test_rehearsed_estimates_stand_above_their_truth(percent: bool) -> None:
    scale = 1.0 if percent else 4.0
    points = [(0.2 * scale, 0.4 * scale), (0.9 * scale, 0.9 * scale)]
    drawing = Drawing(charts.draw_rehearsal(points, percent=percent))
    (line,) = [one for one in drawing.root.iter("line") if one.get("class") == "chance"]
    x1, x2, y1, y2 = (float(line.get(name, "")) for name in ("x1", "x2", "y1", "y2"))
    for dot, (truth, guess) in zip(drawing.root.iter("circle"), points, strict=True):
        x, y = (float(dot.get(name, "")) for name in ("cx", "cy"))
        assert (x - x1) / (x2 - x1) / ((y - y1) / (y2 - y1)) == pytest.approx(truth / guess, rel=0.02)
