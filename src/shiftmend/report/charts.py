"""Small charts as inline SVG. Colours come from the page's style sheet, so that they follow light, dark and print.

All are about 340 units wide: one fits a phone at full size, and on wider screens they stand side by side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shiftmend.report.contents import Unit
from shiftmend.report.markup import Markup, Part, element, join
from shiftmend.report.verdicts import number
from shiftmend.scores import ReliabilityBin
from shiftmend.verification import Verification

WIDTH = 340
LEFT, RIGHT, TOP, BOTTOM = 44, 8, 10, 34
SMALLEST = 1e-4
"""What a logarithmic axis shows of everything below."""
MOST_POINTS = 200


@dataclass(frozen=True)
class Line:
    """One curve: its class in the style sheet, and its points."""

    kind: str
    points: Sequence[tuple[float, float]]


def _svg(height: float, label: str, *parts: Part) -> Markup:
    return element("svg", *parts, viewBox=f"0 0 {WIDTH} {height:g}", role="img", aria_label=label)


def _text(x: float, y: float, text: str, kind: str = "tick", anchor: str = "middle") -> Markup:
    return element("text", text, x=_place(x), y=_place(y), class_=kind, text_anchor=anchor)


def _segment(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return element("line", x1=_place(x1), y1=_place(y1), x2=_place(x2), y2=_place(y2), class_=kind)


def _rectangle(x: float, y: float, width: float, height: float, kind: str) -> Markup:
    return element(
        "rect", x=_place(x), y=_place(y), width=_place(max(0, width)), height=_place(max(0, height)), class_=kind
    )


def _place(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _round_numbers(low: float, high: float) -> list[float]:
    """Four to ten of them in a range."""
    step = 10.0 ** math.floor(math.log10(high - low))
    step /= 5 if high - low < 2 * step else 2 if high - low < 5 * step else 1
    return [number_ * step for number_ in range(math.ceil(low / step), math.floor(high / step) + 1)]


class _Axis:
    """A vertical axis over the values it is given: logarithmic, unless one of them (some losses) is below nought."""

    def __init__(self, values: Sequence[float], height: float) -> None:
        known = _finite(values) or [SMALLEST, 1.0]
        self.linear = min(known) < 0
        low, high = self._level(min(known)), self._level(max(known))
        room = 0.06 * max(high - low, max(abs(low), abs(high)) if self.linear else 0.5)
        self.low, self.high, self.height = low - room, high + room, height

    def _level(self, value: float) -> float:
        return value if self.linear else math.log10(max(value, SMALLEST))

    def __call__(self, value: float) -> float:
        share = (self._level(value) - self.low) / (self.high - self.low)
        return TOP + (self.height - TOP - BOTTOM) * (1 - min(1.0, max(0.0, share)))

    def _ticks(self) -> list[float]:
        """Powers of ten and what lies between them; steps of one size where these would be fewer than two."""
        if self.linear:
            return _round_numbers(self.low, self.high)
        steps = (1, 2, 5) if self.high - self.low < 1.2 else (1, 3) if self.high - self.low < 2.2 else (1,)
        powers = range(math.floor(self.low), math.ceil(self.high) + 1)
        ticks = [step * 10.0**power for power in powers for step in steps]
        shown = [tick for tick in ticks if self.low <= math.log10(tick) <= self.high]
        return shown if len(shown) > 1 else _round_numbers(10**self.low, 10**self.high)

    def drawn(self) -> Markup:
        return join(
            *(
                join(
                    _segment(LEFT, self(tick), WIDTH - RIGHT, self(tick), "grid"),
                    _text(LEFT - 4, self(tick) + 4, f"{tick:g}", anchor="end"),
                )
                for tick in self._ticks()
            )
        )


def gauge(before: Verification, after: Verification | None) -> Markup:
    """Where the features lie between home and far away, on a logarithmic line with the zones of the verdict."""
    last = before if after is None else after
    restored, failed = last.limits
    values = [before.divergence, *([after.divergence] if after is not None else [])]
    top = max([10 * failed, *(2 * value for value in _finite(values))])
    start = min(restored / 10, *(_finite(values) or [restored]), 0.001)
    low, high = math.log10(max(start / 1.5, SMALLEST)), math.log10(top)

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
    few = last.verdict == "undecided" or restored == 0  # so few samples would never be called as at home
    if few or last.strayed:  # which no slices, however near, would undo
        word = "too few samples to tell" if few else "partly as at home"
        zones = [(10, place(failed), "zone-unsure", word), zones[-1]]
    parts = [_rectangle(x1, y, x2 - x1, thick, kind) for x1, x2, kind, _ in zones]
    for x1, x2, _, word in zones:
        if x2 - x1 > 6.2 * len(word):
            parts.append(_text((x1 + x2) / 2, y + thick + 15, word))
    both = [("before", before.divergence)] + ([("after", after.divergence)] if after is not None else [])
    words = {"before": "here" if after is None else "before", "after": "after"}
    places = [place(value) for _, value in both]
    apart = len(places) < 2 or abs(places[0] - places[1]) > 90
    for row, ((kind, value), x) in enumerate(zip(both, places, strict=True)):
        level = y - 9 - (0 if apart else 15 * row)
        anchor = "start" if x < 60 else "end" if x > WIDTH - 60 else "middle"
        parts.append(element("path", d=f"M{x:.1f} {y + 2}l-6 -9h12z", class_=f"mark {kind}"))
        parts.append(_text(x, level - 4, f"{words[kind]} {number(value)}", f"label {kind}", anchor))
    label = f"Distance from home: {', '.join(f'{words[kind]} {number(value)}' for kind, value in both)}"
    return _svg(80, label, *parts)


def distribution(unit: Unit, name: str) -> Markup:
    """Shares of a unit's values in the bins of home: grey columns at home, outlines before and after."""
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
                f"{'M' if index == 0 else 'L'}{_place(10 + index * step)} {_place(top(share))}"
                f"H{_place(10 + (index + 1) * step)}"
                for index, share in enumerate(shares)
            )
            parts.append(element("path", d=path, class_=f"outline {kind} layer-{kind}"))
    parts.append(_segment(10, floor, WIDTH - 10, floor, "axis"))
    for edge, value in ((10 + step, unit.low), (10 + step * (bins - 1), unit.high)):
        parts.append(_segment(edge, floor, edge, floor + 4, "axis"))
        parts.append(_text(edge, floor + 15, f"{value:.3g}"))
    parts.append(_text(10, height - 3, "lower than ever", anchor="start"))
    parts.append(_text(WIDTH / 2, height - 3, "range at home"))
    parts.append(_text(WIDTH - 10, height - 3, "higher than ever", anchor="end"))
    return _svg(height, f"Distribution of {name}", *parts)


def ranks(before: Sequence[float], after: Sequence[float] | None, floor: float, label: str) -> Markup:
    """Distance of every unit, worst first, each curve sorted by itself; what is infinite leaves its place empty."""
    height = 190
    curves = {"before": before} | ({"after": after} if after is not None else {})
    axis = _Axis([floor, *(value for values in curves.values() for value in values)], height)
    parts: list[Part] = [axis.drawn(), _segment(LEFT, axis(floor), WIDTH - RIGHT, axis(floor), "chance")]
    parts.append(_text(WIDTH - RIGHT, axis(floor) - 4, "chance", "label chance-label", "end"))
    longest = max(map(len, curves.values()), default=0)
    for kind, values in curves.items():
        known = sorted(_finite(values), reverse=True)
        first = len(values) - len(known)
        points = [(_across(first + place, longest - 1), axis(known[place])) for place in _thinned(len(known))]
        parts.append(_polyline(points, kind))
    parts.append(_text(LEFT, height - 18, "worst", anchor="start"))
    parts.append(_text(WIDTH - RIGHT, height - 18, f"{longest:,} units", anchor="end"))
    parts.append(_text((LEFT + WIDTH) / 2, height - 4, "units, sorted by distance from home"))
    return _svg(height, label, *parts)


def course(
    lines: Sequence[Line], marks: Sequence[tuple[int, str]], kept: int, floor: float | None, label: str
) -> Markup:
    """Values by epoch; dashed uprights where a further part of the network was released, a ring at the kept epoch."""
    height = 200
    axis = _Axis([value for line in lines for _, value in line.points] + ([floor] if floor else []), height)
    last = max((x for line in lines for x, _ in line.points), default=1) or 1
    parts: list[Part] = [axis.drawn()]
    if floor:
        parts.append(_segment(LEFT, axis(floor), WIDTH - RIGHT, axis(floor), "chance"))
        parts.append(_text(WIDTH - RIGHT, axis(floor) - 4, "chance", "label chance-label", "end"))
    for epoch, _ in marks:
        parts.append(_segment(_across(epoch, last), TOP, _across(epoch, last), height - BOTTOM, "release"))
    for line in lines:
        known = [(x, y) for x, y in line.points if math.isfinite(y)]
        chosen = [known[place] for place in _thinned(len(known))]
        parts.append(_polyline([(_across(x, last), axis(y)) for x, y in chosen], line.kind))
        parts += [
            element("circle", cx=_place(_across(x, last)), cy=_place(axis(y)), r=5, class_="kept")
            for x, y in known
            if x == kept
        ]
    parts += [
        _text(_across(0, last), height - 18, "0"),
        _text(_across(last, last), height - 18, f"{last:g}", anchor="end"),
        _text((LEFT + WIDTH) / 2, height - 4, "epoch (one run through the data)"),
    ]
    return _svg(height, label, *parts)


def confidences(before: Sequence[int], after: Sequence[int] | None) -> Markup:
    """Share of predictions in each tenth of confidence."""
    height = 170
    layers = {"before": before} | ({"after": after} if after is not None else {})
    shares = {kind: [count / max(1, sum(counts)) for count in counts] for kind, counts in layers.items()}
    tallest = max(max(values) for values in shares.values()) or 1.0
    floor, step = height - BOTTOM, (WIDTH - LEFT - RIGHT) / 10
    wide = (step - 4) / len(shares)
    parts: list[Part] = []
    for share in (0.0, tallest / 2, tallest):
        y = floor - (floor - TOP) * share / tallest
        parts += [
            _segment(LEFT, y, WIDTH - RIGHT, y, "grid"),
            _text(LEFT - 4, y + 4, f"{100 * share:.0f} %", anchor="end"),
        ]
    for row, (kind, values) in enumerate(shares.items()):
        for index, share in enumerate(values):
            high = (floor - TOP) * share / tallest
            x = LEFT + index * step + 2 + row * wide
            parts.append(_rectangle(x, floor - high, wide, high, f"column {kind} layer-{kind}"))
    for index in range(0, 11, 2):
        parts.append(_text(LEFT + index * step, height - 18, f"{10 * index}"))
    parts.append(_text((LEFT + WIDTH) / 2, height - 4, "confidence of a prediction, %"))
    return _svg(height, "How confident the predictions were", *parts)


def reliability(before: Sequence[ReliabilityBin], after: Sequence[ReliabilityBin] | None) -> Markup:
    """Accuracy against confidence: an honest model lies on the diagonal."""
    height = 250
    floor, across = height - BOTTOM, WIDTH - LEFT - RIGHT

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + across * x, floor - (floor - TOP) * y

    parts: list[Part] = []
    for tick in (0.0, 0.5, 1.0):
        _, y = place(0, tick)
        parts += [
            _segment(LEFT, y, WIDTH - RIGHT, y, "grid"),
            _text(LEFT - 4, y + 4, f"{100 * tick:.0f} %", anchor="end"),
            _text(place(tick, 0)[0], height - 18, f"{100 * tick:.0f} %", anchor="end" if tick == 1 else "middle"),
        ]
    parts.append(_segment(*place(0, 0), *place(1, 1), "chance"))
    for kind, bins in (("before", before), ("after", after or ())):
        points = [
            place(one.confidence, one.accuracy)
            for one in bins
            if one.confidence is not None and one.accuracy is not None
        ]
        parts.append(_polyline(points, kind))
        parts += [
            element("circle", cx=_place(x), cy=_place(y), r=3.5, class_=f"dot {kind} layer-{kind}") for x, y in points
        ]
    parts.append(_text((LEFT + WIDTH) / 2, height - 4, "confidence that the model stated"))
    return _svg(height, "Accuracy by confidence", *parts)


def signal(channels: Sequence[Sequence[float]], low: float, high: float, label: str) -> Markup:
    """One recording, each channel a line; all recordings of a page share one scale."""
    height = 110
    extent = high - low or 1.0
    parts = []
    for number_, values in enumerate(channels):
        last = max(1, len(values) - 1)
        points = [
            (8 + (WIDTH - 16) * place / last, height - 8 - (height - 16) * (values[place] - low) / extent)
            for place in _extremes(values)
        ]
        parts.append(_polyline(points, f"channel channel-{number_ % 6}", layer=False))
    return _svg(height, label, *parts)


def _across(place: float, last: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * place / max(1, last)


def _polyline(points: Sequence[tuple[float, float]], kind: str, layer: bool = True) -> Markup:
    if not points:
        return Markup("")
    if len(points) == 1:  # of which a line would show nothing
        points = [(points[0][0] - 3, points[0][1]), (points[0][0] + 3, points[0][1])]
    text = " ".join(f"{_place(x)},{_place(y)}" for x, y in points)
    return element("polyline", points=text, class_=f"curve {kind} layer-{kind}" if layer else f"curve {kind}")


def _extremes(values: Sequence[float], stretches: int = 200) -> list[int]:
    """Places of the lowest and the highest value of each stretch: of a long recording no spike is lost."""
    size = math.ceil(len(values) / stretches)
    if size <= 2:
        return list(range(len(values)))
    chosen = {0, len(values) - 1}
    for start in range(0, len(values), size):
        part = range(start, min(start + size, len(values)))
        chosen |= {min(part, key=values.__getitem__), max(part, key=values.__getitem__)}
    return sorted(chosen)


def _thinned(count: int) -> list[int]:
    """Places of at most `MOST_POINTS` of so many points, the ends included."""
    if count <= MOST_POINTS:
        return list(range(count))
    return sorted({round(place * (count - 1) / (MOST_POINTS - 1)) for place in range(MOST_POINTS)})
