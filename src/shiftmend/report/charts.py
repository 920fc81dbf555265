"""The pictures of a report: charts as inline SVG, sample inputs as small PNGs.

Drawings are 340 units wide: one fits a phone at full size, and wider screens show several side by side. Colours come
from the style sheet of the page, so that they adapt to light, dark and print.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from shiftmend.evaluation.classification import ReliabilityBin
from shiftmend.report.facts import Unit
from shiftmend.report.formatting import format_number, make_printable
from shiftmend.utils.checks import counted
from shiftmend.verification.estimate import Estimate
from shiftmend.verification.verdict import Verification

WIDTH = 340
LEFT, RIGHT, TOP, BOTTOM = 44, 8, 10, 34

MAX_LEVEL = 1e100
"""Largest number that an axis shows."""

MIN_LEVEL = 1e-4
"""The lowest value on a logarithmic axis; anything below is drawn there."""

MAX_POINTS = 200

IMAGE_SIDES_PIXELS = (192, 128, 96, 64, 32)
"""Side lengths of images; the first one is used with which all images together stay below `MAX_IMAGE_BYTES`."""

MAX_IMAGE_BYTES = 1_500_000

Point = tuple[float, float]


# ---- charts


@dataclass(frozen=True)
class ScoreRow:
    """A row of `draw_scores`: a name, an estimate, and the true score if known."""

    name: str
    estimate: Estimate | None
    truth: float | None = None
    chosen: bool = True


NAMES_WIDTH = 120
"""Width of the names in `draw_scores`."""


def draw_scores(rows: Sequence[ScoreRow], home: float | None, label: str) -> Markup:
    """Draw estimates as dots with their intervals, one row each; a diamond is the true score from labels.

    Args:
        rows: The rows, from top to bottom.
        home: Score at home, drawn as a dotted vertical line.
        label: Description of the chart.
    """
    step, top, bottom = 30, 20, 22
    height = top + step * len(rows) + bottom
    told = [row.estimate for row in rows if row.estimate is not None and row.estimate.best_guess is not None]
    percent = not told or told[0].task == "classes"
    ends = [end for one in told for end in (one.value, one.high) if end is not None]
    truths = [row.truth for row in rows if row.truth is not None]
    limit = 1.0 if percent else 1.1 * max([*ends, *truths, home or 0.0, 1e-12])

    def place(value: float) -> float:
        return NAMES_WIDTH + (WIDTH - NAMES_WIDTH - 22) * min(1.0, max(0.0, value / limit))

    floor = height - bottom
    parts: list[Markup] = []
    ticks = [0.0, 0.25, 0.5, 0.75, 1.0] if percent else [0.0, *(n for n in _round_numbers(0.0, limit) if n > 0)]
    for tick in ticks:
        parts.append(_segment(place(tick), top - 6, place(tick), floor, "grid"))
        parts.append(_text(place(tick), floor + 15, f"{100 * tick:.0f} %" if percent else f"{tick:g}"))
    if home is not None:
        parts.append(_segment(place(home), top - 6, place(home), floor, "chance"))
        parts.append(_text(min(place(home), WIDTH - 24), top - 10, "at home", "label chance-label"))
    words = []
    for number, row in enumerate(rows):
        y = top + step * (number + 0.5)
        kind = "before" if row.name in ("before", "here") else "after" if row.chosen else "plain"
        parts.append(_text(NAMES_WIDTH - 10, y + 4, _shorten(row.name), "label" if row.chosen else "tick", "end"))
        estimate = row.estimate
        if estimate is None or estimate.best_guess is None:
            parts.append(_text(place(0) + 6, y + 4, "unknown", anchor="start"))
            words.append(f"{row.name} unknown")
        elif estimate.low is not None and estimate.high is not None:
            low, high = place(estimate.low), place(estimate.high)
            parts.append(_rectangle(low, y - 4, high - low, 8, f"interval {kind}"))
            if estimate.value is None:
                both = (_write_tick(end, percent) for end in (estimate.low, estimate.high))
                words.append(f"{row.name} {' to '.join(both)}")
        if estimate is not None and estimate.value is not None:
            parts.append(_dot(place(estimate.value), y, 5, f"dot {kind}"))
            words.append(f"{row.name} {_write_tick(estimate.value, percent)}")
        if row.truth is not None:
            x = place(row.truth)
            diamond = f"M{_coordinate(x)} {_coordinate(y - 9)}l5 9l-5 9l-5 -9z"
            parts.append(_shape("path", d=diamond, class_="truth"))
            words.append(f"{row.name} by labels {_write_tick(row.truth, percent)}")
    return _svg(height, f"{label}: {', '.join(words)}", parts)


def _shorten(name: str, letters: int = 16) -> str:
    return name if len(name) <= letters else f"{name[: letters - 1]}…"


def _write_tick(value: float, percent: bool) -> str:
    return f"{100 * value:.1f} %" if percent else f"{value:.3g}"


def draw_rehearsal(points: Sequence[Point], *, percent: bool) -> Markup:
    """Draw estimated scores (upwards) against true scores (across). A perfect estimate lies on the diagonal."""
    height = 250
    floor, breadth = height - BOTTOM, WIDTH - LEFT - RIGHT
    limit = 1.0 if percent else 1.1 * max(max(point) for point in points)

    def place(x: float, y: float) -> Point:
        shares = [min(1.0, max(0.0, value / limit)) for value in (x, y)]
        return LEFT + breadth * shares[0], floor - (floor - TOP) * shares[1]

    parts: list[Markup] = []
    for tick in (0.0, 0.5 * limit, limit):
        x, y = place(tick, tick)
        words = f"{100 * tick:.0f} %" if percent else f"{tick:.3g}"
        parts += [*_draw_gridline(y, words), _text(x, height - 18, words, anchor="end" if tick == limit else "middle")]
    parts.append(_segment(*place(0, 0), *place(limit, limit), "chance"))
    parts += [_dot(*place(truth, guess), 4, "dot after") for truth, guess in points]
    parts.append(_text((LEFT + WIDTH) / 2, height - 4, "true score"))
    return _svg(height, f"Estimated against true scores of {counted(len(points), 'simulated device')}", parts)


def draw_gauge(before: Verification, after: Verification | None) -> Markup:
    """Draw the distance of the features from home on a logarithmic scale with the zones of the verdict."""
    last = before if after is None else after
    restored, failed = last.limits
    marks = [("before", before.divergence)] + ([("after", after.divergence)] if after is not None else [])
    known = _finite([value for _, value in marks])
    top = max([10 * failed, *(2 * value for value in known)])
    start = min(restored / 10, *(known or [restored]), 0.001)
    low, high = math.log10(max(start / 1.5, MIN_LEVEL)), math.log10(top)

    def place(value: float) -> float:
        value = value if math.isfinite(value) else top
        share = (math.log10(max(value, 10**low)) - low) / (high - low)
        return 10 + (WIDTH - 20) * min(1.0, share)

    y, thick = 46, 14
    zones = [
        (10, place(restored), "zone-good", "as at home"),
        (place(restored), place(failed), "zone-unsure", "between"),
        (place(failed), WIDTH - 10, "zone-bad", "not as at home"),
    ]
    # With a limit of 0, the sample is too small to count as at home.
    few = last.verdict == "undecided" or restored == 0
    if few or last.strayed:
        word = "too few samples to tell" if few else "partly as at home"
        zones = [(10, place(failed), "zone-unsure", word), zones[-1]]
    parts = [_rectangle(x1, y, x2 - x1, thick, kind) for x1, x2, kind, _ in zones]
    parts += [_text((x1 + x2) / 2, y + thick + 15, word) for x1, x2, _, word in zones if x2 - x1 > 6.2 * len(word)]
    words = {"before": "here" if after is None else "before", "after": "after"}
    places = [place(value) for _, value in marks]
    # A label at an edge lies wholly on one side of its mark, and so extends farther than others.
    edges = any(x < 60 or x > WIDTH - 60 for x in places)
    apart = len(places) < 2 or abs(places[0] - places[1]) > (115 if edges else 90)
    for row, ((kind, value), x) in enumerate(zip(marks, places, strict=True)):
        level = y - 9 - (0 if apart else 15 * row)
        anchor = "start" if x < 60 else "end" if x > WIDTH - 60 else "middle"
        parts.append(_shape("path", d=f"M{x:.1f} {y + 2}l-6 -9h12z", class_=f"mark {kind}"))
        parts.append(_text(x, level - 4, f"{words[kind]} {format_number(value)}", f"label {kind}", anchor))
    told = ", ".join(f"{words[kind]} {format_number(value)}" for kind, value in marks)
    return _svg(80, f"Distance from home: {told}", parts)


def draw_distribution(unit: Unit, name: str) -> Markup:
    """Draw the histogram of a unit's values: grey columns at home, outlines before and after."""
    height = 150
    layers = [("before", unit.before.shares)] + ([("after", unit.after.shares)] if unit.after is not None else [])
    tallest = max(_finite([*unit.home, *(share for _, shares in layers for share in shares)]) or [1.0]) or 1.0
    bins = len(unit.home)
    step = (WIDTH - 20) / bins
    floor = height - 30

    def top(share: float) -> float:
        return floor - (floor - 8) * min(1.0, max(0.0, share / tallest))

    parts = [
        _rectangle(10 + index * step + 1, top(share), step - 2, floor - top(share), "home-bar")
        for index, share in enumerate(unit.home)
    ]
    for kind, shares in layers:
        if all(map(math.isfinite, shares)):
            path = "".join(
                f"{'M' if index == 0 else 'L'}{_coordinate(10 + index * step)} {_coordinate(top(share))}"
                f"H{_coordinate(10 + (index + 1) * step)}"
                for index, share in enumerate(shares)
            )
            parts.append(_shape("path", d=path, class_=f"outline {kind} layer-{kind}"))
    parts.append(_segment(10, floor, WIDTH - 10, floor, "axis"))
    for edge, value in ((10 + step, unit.low), (10 + step * (bins - 1), unit.high)):
        parts.append(_segment(edge, floor, edge, floor + 4, "axis"))
        parts.append(_text(edge, floor + 15, f"{value:.3g}"))
    parts.append(_text(10, height - 3, "lower than ever", anchor="start"))
    parts.append(_text(WIDTH / 2, height - 3, "range at home"))
    parts.append(_text(WIDTH - 10, height - 3, "higher than ever", anchor="end"))
    return _svg(height, f"Distribution of {name}", parts)


def draw_ranks(before: Sequence[float], after: Sequence[float] | None, floor: float, label: str) -> Markup:
    """Draw the distances of all units in descending order, one curve for each model; infinite values leave a gap."""
    height = 190
    curves = {"before": before} | ({"after": after} if after is not None else {})
    axis = _Axis([floor, *(value for values in curves.values() for value in values)], height)
    parts = [*axis.draw(), *_draw_chance(axis(floor))]
    longest = max(map(len, curves.values()), default=0)
    for kind, values in curves.items():
        known = sorted(_finite(values), reverse=True)
        first = len(values) - len(known)
        points = [(_across(first + place, longest - 1), axis(known[place])) for place in _thin_out(len(known))]
        parts.append(_polyline(points, f"{kind} layer-{kind}"))
    parts.append(_text(LEFT, height - 18, "worst", anchor="start"))
    parts.append(_text(WIDTH - RIGHT, height - 18, counted(longest, "unit"), anchor="end"))
    parts.append(_text((LEFT + WIDTH) / 2, height - 4, "units, sorted by distance from home"))
    return _svg(height, label, parts)


def draw_epochs(
    kind: str,
    points: Sequence[Point],
    releases: Sequence[int],
    kept: int,
    floor: float | None,
    label: str,
    unit: str = "epoch",
) -> Markup:
    """Draw values by epoch as a line.

    Args:
        kind: Class of the line in the style sheet, such as `"after"`.
        points: Pairs of epoch and value.
        releases: Epochs in which a block was unfrozen, drawn as dashed vertical lines.
        kept: Epoch of the returned state, drawn as a ring.
        floor: Value that chance alone explains, drawn as a band below it; None draws no band.
        label: Description of the chart for screen readers.
        unit: `"epoch"` or `"round"`, the label of the horizontal axis.
    """
    height = 200
    axis = _Axis([value for _, value in points] + ([floor] if floor else []), height)
    last = max((x for x, _ in points), default=1) or 1
    parts = [*axis.draw(), *(_draw_chance(axis(floor)) if floor else [])]
    for epoch in releases:
        parts.append(_segment(_across(epoch, last), TOP, _across(epoch, last), height - BOTTOM, "release"))
    known = [(x, y) for x, y in points if math.isfinite(y)]
    drawn = [(_across(x, last), axis(y)) for x, y in (known[place] for place in _thin_out(len(known)))]
    parts.append(_polyline(drawn, f"{kind} layer-{kind}"))
    parts += [_dot(_across(x, last), axis(y), 5, "kept") for x, y in known if x == kept]
    parts += [
        _text(_across(0, last), height - 18, "0"),
        _text(_across(last, last), height - 18, f"{last:g}", anchor="end"),
        _text((LEFT + WIDTH) / 2, height - 4, "epoch (one run through the data)" if unit == "epoch" else "round"),
    ]
    return _svg(height, label, parts)


def draw_confidences(before: Sequence[int], after: Sequence[int] | None) -> Markup:
    """Draw the share of predictions in each tenth of the confidence."""
    height = 170
    layers = {"before": before} | ({"after": after} if after is not None else {})
    shares = {kind: [count / max(1, sum(counts)) for count in counts] for kind, counts in layers.items()}
    tallest = max(max(values) for values in shares.values()) or 1.0
    floor, step = height - BOTTOM, (WIDTH - LEFT - RIGHT) / 10
    wide = (step - 4) / len(shares)
    parts: list[Markup] = []
    for share in (0.0, tallest / 2, tallest):
        y = floor - (floor - TOP) * share / tallest
        parts += _draw_gridline(y, f"{100 * share:.0f} %")
    for row, (kind, values) in enumerate(shares.items()):
        for index, share in enumerate(values):
            high = (floor - TOP) * share / tallest
            x = LEFT + index * step + 2 + row * wide
            parts.append(_rectangle(x, floor - high, wide, high, f"column {kind} layer-{kind}"))
    parts += [_text(LEFT + index * step, height - 18, f"{10 * index}") for index in range(0, 11, 2)]
    parts.append(_text((LEFT + WIDTH) / 2, height - 4, "confidence of a prediction, %"))
    return _svg(height, "How confident the predictions were", parts)


def draw_reliability(before: Sequence[ReliabilityBin], after: Sequence[ReliabilityBin] | None) -> Markup:
    """Draw accuracy against confidence; a calibrated model lies on the diagonal."""
    height = 250
    floor, breadth = height - BOTTOM, WIDTH - LEFT - RIGHT

    def place(x: float, y: float) -> Point:
        return LEFT + breadth * x, floor - (floor - TOP) * y

    parts: list[Markup] = []
    for tick in (0.0, 0.5, 1.0):
        x, y = place(tick, tick)
        words = f"{100 * tick:.0f} %"
        parts += [*_draw_gridline(y, words), _text(x, height - 18, words, anchor="end" if tick == 1 else "middle")]
    parts.append(_segment(*place(0, 0), *place(1, 1), "chance"))
    for kind, bins in (("before", before), ("after", after or ())):
        points = [
            place(each.confidence, each.accuracy)
            for each in bins
            if each.confidence is not None and each.accuracy is not None
        ]
        parts.append(_polyline(points, f"{kind} layer-{kind}"))
        parts += [_dot(x, y, 3.5, f"dot {kind} layer-{kind}") for x, y in points]
    parts.append(_text((LEFT + WIDTH) / 2, height - 4, "confidence that the model stated"))
    return _svg(height, "Accuracy by confidence", parts)


def draw_signal(channels: Sequence[Sequence[float]], low: float, high: float, label: str) -> Markup:
    """Draw one recording, one line per channel, on the common scale of all recordings of the page."""
    height = 110
    extent = high - low or 1.0
    parts = []
    for index, values in enumerate(channels):
        last = max(1, len(values) - 1)
        points = [
            (8 + (WIDTH - 16) * place / last, height - 8 - (height - 16) * (values[place] - low) / extent)
            for place in _find_extremes(values)
        ]
        parts.append(_polyline(points, f"channel channel-{index % 6}"))
    return _svg(height, label, parts)


# ---- axes and points


class _Axis:
    """A vertical axis: logarithmic, unless a value is negative, as some losses are."""

    def __init__(self, values: Sequence[float], height: float) -> None:
        # A margin around a number at the end of the scale would be infinite.
        known = [min(MAX_LEVEL, max(-MAX_LEVEL, value)) for value in _finite(values)] or [MIN_LEVEL, 1.0]
        self.linear = min(known) < 0
        low, high = self._level(min(known)), self._level(max(known))
        room = 0.06 * max(high - low, max(abs(low), abs(high)) if self.linear else 0.5)
        self.low, self.high, self.height = low - room, high + room, height

    def _level(self, value: float) -> float:
        return value if self.linear else math.log10(max(value, MIN_LEVEL))

    def __call__(self, value: float) -> float:
        share = (self._level(value) - self.low) / (self.high - self.low)
        return TOP + (self.height - TOP - BOTTOM) * (1 - min(1.0, max(0.0, share)))

    def _ticks(self) -> list[float]:
        """Return powers of ten and numbers between them, or equal steps if there would be fewer than two."""
        if self.linear:
            return _round_numbers(self.low, self.high)
        steps = (1, 2, 5) if self.high - self.low < 1.2 else (1, 3) if self.high - self.low < 2.2 else (1,)
        powers = range(math.floor(self.low), math.ceil(self.high) + 1)
        ticks = [step * 10.0**power for power in powers for step in steps]
        shown = [tick for tick in ticks if self.low <= math.log10(tick) <= self.high]
        return shown if len(shown) > 1 else _round_numbers(10**self.low, 10**self.high)

    def draw(self) -> list[Markup]:
        return [part for tick in self._ticks() for part in _draw_gridline(self(tick), f"{tick:g}")]


def _round_numbers(low: float, high: float) -> list[float]:
    """Return four to ten round numbers in a range."""
    step = 10.0 ** math.floor(math.log10(high - low))
    step /= 5 if high - low < 2 * step else 2 if high - low < 5 * step else 1
    return [count * step for count in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _across(place: float, last: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * place / max(1, last)


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _find_extremes(values: Sequence[float], stretches: int = 200) -> list[int]:
    """Return the indices of the lowest and the highest value of each stretch, so that no spike is lost."""
    size = math.ceil(len(values) / stretches)
    if size <= 2:
        return list(range(len(values)))
    chosen = {0, len(values) - 1}
    for start in range(0, len(values), size):
        part = range(start, min(start + size, len(values)))
        chosen |= {min(part, key=values.__getitem__), max(part, key=values.__getitem__)}
    return sorted(chosen)


def _thin_out(count: int) -> list[int]:
    """Return the indices of at most `MAX_POINTS` of `count` points, including both ends."""
    if count <= MAX_POINTS:
        return list(range(count))
    return sorted({round(place * (count - 1) / (MAX_POINTS - 1)) for place in range(MAX_POINTS)})


# ---- SVG


def _shape(name: str, content: str = "", **attributes: str | float) -> Markup:
    """Write one SVG element. Text and attributes are escaped, and underscores in names become dashes."""
    written = Markup("").join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), make_printable(value))
        for key, value in attributes.items()
    )
    return Markup("<{0}{1}>{2}</{0}>").format(name, written, make_printable(content))


def _svg(height: float, label: str, parts: Sequence[Markup]) -> Markup:
    viewbox = f"0 0 {WIDTH} {height:g}"
    return _shape("svg", Markup("").join(parts), viewBox=viewbox, role="img", aria_label=label)


def _text(x: float, y: float, words: str, kind: str = "tick", anchor: str = "middle") -> Markup:
    return _shape("text", words, x=_coordinate(x), y=_coordinate(y), class_=kind, text_anchor=anchor)


def _segment(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return _shape("line", x1=_coordinate(x1), y1=_coordinate(y1), x2=_coordinate(x2), y2=_coordinate(y2), class_=kind)


def _rectangle(x: float, y: float, width: float, height: float, kind: str) -> Markup:
    size = {"width": _coordinate(max(0, width)), "height": _coordinate(max(0, height))}
    return _shape("rect", x=_coordinate(x), y=_coordinate(y), **size, class_=kind)


def _dot(x: float, y: float, radius: float, kind: str) -> Markup:
    return _shape("circle", cx=_coordinate(x), cy=_coordinate(y), r=radius, class_=kind)


def _polyline(points: Sequence[Point], kind: str) -> Markup:
    if not points:
        return Markup("")
    if len(points) == 1:
        # A line of one point would be invisible.
        points = [(points[0][0] - 3, points[0][1]), (points[0][0] + 3, points[0][1])]
    listed = " ".join(f"{_coordinate(x)},{_coordinate(y)}" for x, y in points)
    return _shape("polyline", points=listed, class_=f"curve {kind}")


def _draw_gridline(y: float, words: str) -> list[Markup]:
    return [_segment(LEFT, y, WIDTH - RIGHT, y, "grid"), _text(LEFT - 4, y + 4, words, anchor="end")]


def _draw_chance(y: float) -> list[Markup]:
    """Draw a line at the distance that sampling noise alone causes."""
    label = _text(WIDTH - RIGHT, y - 4, "chance", "label chance-label", "end")
    return [_segment(LEFT, y, WIDTH - RIGHT, y, "chance"), label]


def _coordinate(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


# ---- images


def encode_images(arrays: Sequence[NDArray[np.generic]]) -> list[str]:
    """Encode images `[channels, height, width]` as data URIs, as large as their total size allows.

    8-bit images are not changed, others are scaled to their common range. With channels other than 1 or 3, the first
    channel is shown.
    """
    low, high = find_range(arrays)
    sources: list[str] = []
    for side in IMAGE_SIDES_PIXELS:
        sources = [_encode_image(values, low, high, side) for values in arrays]
        if sum(map(len, sources)) <= MAX_IMAGE_BYTES:
            break
    return sources


def find_range(arrays: Sequence[NDArray[np.generic]]) -> Point:
    """Return the lowest and the highest value of all arrays."""
    numbers = [np.asarray(array, dtype=np.float64) for array in arrays]
    return float(min(each.min() for each in numbers)), float(max(each.max() for each in numbers))


def _encode_image(values: NDArray[np.generic], low: float, high: float, max_side: int) -> str:
    from PIL import Image

    planes = values if values.shape[0] in (1, 3) else values[:1]
    if planes.dtype != np.uint8:
        scaled = (planes.astype(np.float64) - low) * (255 / ((high - low) or 1.0))
        planes = np.rint(scaled).clip(0, 255).astype(np.uint8)
    array = np.ascontiguousarray(np.moveaxis(planes, 0, -1))
    image = Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array)
    longest = max(image.size)
    if longest > max_side:
        width, height = (max(1, round(side * max_side / longest)) for side in image.size)
        image = image.resize((width, height), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
