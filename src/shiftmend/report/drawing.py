"""What charts are drawn with: shapes as inline SVG, an axis, and which points of a long curve to draw.

Drawings are about 340 units wide: one fits a phone at full size, and on wider screens they stand side by side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shiftmend.report.markup import Markup, Part, element, join

WIDTH = 340


LEFT, RIGHT, TOP, BOTTOM = 44, 8, 10, 34


SMALLEST = 1e-4
"""What a logarithmic axis shows of everything below."""


MOST_POINTS = 200


def svg(height: float, label: str, *parts: Part) -> Markup:
    return element("svg", *parts, viewBox=f"0 0 {WIDTH} {height:g}", role="img", aria_label=label)


def text(x: float, y: float, words: str, kind: str = "tick", anchor: str = "middle") -> Markup:
    return element("text", words, x=coordinate(x), y=coordinate(y), class_=kind, text_anchor=anchor)


def segment(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return element("line", x1=coordinate(x1), y1=coordinate(y1), x2=coordinate(x2), y2=coordinate(y2), class_=kind)


def rectangle(x: float, y: float, width: float, height: float, kind: str) -> Markup:
    size = {"width": coordinate(max(0, width)), "height": coordinate(max(0, height))}
    return element("rect", x=coordinate(x), y=coordinate(y), **size, class_=kind)


def dot(x: float, y: float, radius: float, kind: str) -> Markup:
    return element("circle", cx=coordinate(x), cy=coordinate(y), r=radius, class_=kind)


def coordinate(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _round_numbers(low: float, high: float) -> list[float]:
    """Four to ten of them in a range."""
    step = 10.0 ** math.floor(math.log10(high - low))
    step /= 5 if high - low < 2 * step else 2 if high - low < 5 * step else 1
    return [number_ * step for number_ in range(math.ceil(low / step), math.floor(high / step) + 1)]


class Axis:
    """A vertical axis over the values it is given: logarithmic, unless one of them (some losses) is below nought."""

    def __init__(self, values: Sequence[float], height: float) -> None:
        known = finite(values) or [SMALLEST, 1.0]
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
                    segment(LEFT, self(tick), WIDTH - RIGHT, self(tick), "grid"),
                    text(LEFT - 4, self(tick) + 4, f"{tick:g}", anchor="end"),
                )
                for tick in self._ticks()
            )
        )


def across(place: float, last: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * place / max(1, last)


def polyline(points: Sequence[tuple[float, float]], kind: str, layer: bool = True) -> Markup:
    if not points:
        return Markup("")
    if len(points) == 1:  # of which a line would show nothing
        points = [(points[0][0] - 3, points[0][1]), (points[0][0] + 3, points[0][1])]
    listed = " ".join(f"{coordinate(x)},{coordinate(y)}" for x, y in points)
    return element("polyline", points=listed, class_=f"curve {kind} layer-{kind}" if layer else f"curve {kind}")


def extremes(values: Sequence[float], stretches: int = 200) -> list[int]:
    """Places of the lowest and the highest value of each stretch: of a long recording no spike is lost."""
    size = math.ceil(len(values) / stretches)
    if size <= 2:
        return list(range(len(values)))
    chosen = {0, len(values) - 1}
    for start in range(0, len(values), size):
        part = range(start, min(start + size, len(values)))
        chosen |= {min(part, key=values.__getitem__), max(part, key=values.__getitem__)}
    return sorted(chosen)


def thinned(count: int) -> list[int]:
    """Places of at most `MOST_POINTS` of so many points, the ends included."""
    if count <= MOST_POINTS:
        return list(range(count))
    return sorted({round(place * (count - 1) / (MOST_POINTS - 1)) for place in range(MOST_POINTS)})
