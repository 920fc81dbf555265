"""The charts of a report. Colours come from the page's style sheet, so that they follow light, dark and print."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shiftmend.evaluation.classification import ReliabilityBin
from shiftmend.report.drawing import (
    BOTTOM,
    LEFT,
    RIGHT,
    SMALLEST,
    TOP,
    WIDTH,
    Axis,
    across,
    coordinate,
    dot,
    extremes,
    finite,
    polyline,
    rectangle,
    segment,
    svg,
    text,
    thinned,
)
from shiftmend.report.facts import Unit
from shiftmend.report.markup import Markup, Part, element
from shiftmend.report.verdicts import number
from shiftmend.utils.checks import counted
from shiftmend.verification.verdict import Verification


@dataclass(frozen=True)
class Line:
    """One curve: its class in the style sheet, and its points."""

    kind: str
    points: Sequence[tuple[float, float]]


def gauge(before: Verification, after: Verification | None) -> Markup:
    """Where the features lie between home and far away, on a logarithmic line with the zones of the verdict."""
    last = before if after is None else after
    restored, failed = last.limits
    values = [before.divergence, *([after.divergence] if after is not None else [])]
    top = max([10 * failed, *(2 * value for value in finite(values))])
    start = min(restored / 10, *(finite(values) or [restored]), 0.001)
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
    parts = [rectangle(x1, y, x2 - x1, thick, kind) for x1, x2, kind, _ in zones]
    for x1, x2, _, word in zones:
        if x2 - x1 > 6.2 * len(word):
            parts.append(text((x1 + x2) / 2, y + thick + 15, word))
    both = [("before", before.divergence)] + ([("after", after.divergence)] if after is not None else [])
    words = {"before": "here" if after is None else "before", "after": "after"}
    places = [place(value) for _, value in both]
    apart = len(places) < 2 or abs(places[0] - places[1]) > 90
    for row, ((kind, value), x) in enumerate(zip(both, places, strict=True)):
        level = y - 9 - (0 if apart else 15 * row)
        anchor = "start" if x < 60 else "end" if x > WIDTH - 60 else "middle"
        parts.append(element("path", d=f"M{x:.1f} {y + 2}l-6 -9h12z", class_=f"mark {kind}"))
        parts.append(text(x, level - 4, f"{words[kind]} {number(value)}", f"label {kind}", anchor))
    label = f"Distance from home: {', '.join(f'{words[kind]} {number(value)}' for kind, value in both)}"
    return svg(80, label, *parts)


def distribution(unit: Unit, name: str) -> Markup:
    """Shares of a unit's values in the bins of home: grey columns at home, outlines before and after."""
    height = 150
    layers = [("before", unit.before.shares)] + ([("after", unit.after.shares)] if unit.after is not None else [])
    tallest = max(finite([*unit.home, *(share for _, shares in layers for share in shares)]) or [1.0]) or 1.0
    bins = len(unit.home)
    step = (WIDTH - 20) / bins
    floor = height - 30

    def top(share: float) -> float:
        return floor - (floor - 8) * min(1.0, max(0.0, share / tallest))

    parts = [
        rectangle(10 + index * step + 1, top(share), step - 2, floor - top(share), "home-bar")
        for index, share in enumerate(unit.home)
    ]
    for kind, shares in layers:
        if all(map(math.isfinite, shares)):
            path = "".join(
                f"{'M' if index == 0 else 'L'}{coordinate(10 + index * step)} {coordinate(top(share))}"
                f"H{coordinate(10 + (index + 1) * step)}"
                for index, share in enumerate(shares)
            )
            parts.append(element("path", d=path, class_=f"outline {kind} layer-{kind}"))
    parts.append(segment(10, floor, WIDTH - 10, floor, "axis"))
    for edge, value in ((10 + step, unit.low), (10 + step * (bins - 1), unit.high)):
        parts.append(segment(edge, floor, edge, floor + 4, "axis"))
        parts.append(text(edge, floor + 15, f"{value:.3g}"))
    parts.append(text(10, height - 3, "lower than ever", anchor="start"))
    parts.append(text(WIDTH / 2, height - 3, "range at home"))
    parts.append(text(WIDTH - 10, height - 3, "higher than ever", anchor="end"))
    return svg(height, f"Distribution of {name}", *parts)


def ranks(before: Sequence[float], after: Sequence[float] | None, floor: float, label: str) -> Markup:
    """Distance of every unit, worst first, each curve sorted by itself; what is infinite leaves its place empty."""
    height = 190
    curves = {"before": before} | ({"after": after} if after is not None else {})
    axis = Axis([floor, *(value for values in curves.values() for value in values)], height)
    parts: list[Part] = [axis.drawn(), segment(LEFT, axis(floor), WIDTH - RIGHT, axis(floor), "chance")]
    parts.append(text(WIDTH - RIGHT, axis(floor) - 4, "chance", "label chance-label", "end"))
    longest = max(map(len, curves.values()), default=0)
    for kind, values in curves.items():
        known = sorted(finite(values), reverse=True)
        first = len(values) - len(known)
        points = [(across(first + place, longest - 1), axis(known[place])) for place in thinned(len(known))]
        parts.append(polyline(points, kind))
    parts.append(text(LEFT, height - 18, "worst", anchor="start"))
    parts.append(text(WIDTH - RIGHT, height - 18, counted(longest, "unit"), anchor="end"))
    parts.append(text((LEFT + WIDTH) / 2, height - 4, "units, sorted by distance from home"))
    return svg(height, label, *parts)


def course(
    lines: Sequence[Line], marks: Sequence[tuple[int, str]], kept: int, floor: float | None, label: str
) -> Markup:
    """Values by epoch; dashed uprights where a further part of the network was released, a ring at the kept epoch."""
    height = 200
    axis = Axis([value for line in lines for _, value in line.points] + ([floor] if floor else []), height)
    last = max((x for line in lines for x, _ in line.points), default=1) or 1
    parts: list[Part] = [axis.drawn()]
    if floor:
        parts.append(segment(LEFT, axis(floor), WIDTH - RIGHT, axis(floor), "chance"))
        parts.append(text(WIDTH - RIGHT, axis(floor) - 4, "chance", "label chance-label", "end"))
    for epoch, _ in marks:
        parts.append(segment(across(epoch, last), TOP, across(epoch, last), height - BOTTOM, "release"))
    for line in lines:
        known = [(x, y) for x, y in line.points if math.isfinite(y)]
        chosen = [known[place] for place in thinned(len(known))]
        parts.append(polyline([(across(x, last), axis(y)) for x, y in chosen], line.kind))
        parts += [dot(across(x, last), axis(y), 5, "kept") for x, y in known if x == kept]
    parts += [
        text(across(0, last), height - 18, "0"),
        text(across(last, last), height - 18, f"{last:g}", anchor="end"),
        text((LEFT + WIDTH) / 2, height - 4, "epoch (one run through the data)"),
    ]
    return svg(height, label, *parts)


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
            segment(LEFT, y, WIDTH - RIGHT, y, "grid"),
            text(LEFT - 4, y + 4, f"{100 * share:.0f} %", anchor="end"),
        ]
    for row, (kind, values) in enumerate(shares.items()):
        for index, share in enumerate(values):
            high = (floor - TOP) * share / tallest
            x = LEFT + index * step + 2 + row * wide
            parts.append(rectangle(x, floor - high, wide, high, f"column {kind} layer-{kind}"))
    for index in range(0, 11, 2):
        parts.append(text(LEFT + index * step, height - 18, f"{10 * index}"))
    parts.append(text((LEFT + WIDTH) / 2, height - 4, "confidence of a prediction, %"))
    return svg(height, "How confident the predictions were", *parts)


def reliability(before: Sequence[ReliabilityBin], after: Sequence[ReliabilityBin] | None) -> Markup:
    """Accuracy against confidence: an honest model lies on the diagonal."""
    height = 250
    floor, breadth = height - BOTTOM, WIDTH - LEFT - RIGHT

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + breadth * x, floor - (floor - TOP) * y

    parts: list[Part] = []
    for tick in (0.0, 0.5, 1.0):
        _, y = place(0, tick)
        parts += [
            segment(LEFT, y, WIDTH - RIGHT, y, "grid"),
            text(LEFT - 4, y + 4, f"{100 * tick:.0f} %", anchor="end"),
            text(place(tick, 0)[0], height - 18, f"{100 * tick:.0f} %", anchor="end" if tick == 1 else "middle"),
        ]
    parts.append(segment(*place(0, 0), *place(1, 1), "chance"))
    for kind, bins in (("before", before), ("after", after or ())):
        points = [
            place(one.confidence, one.accuracy)
            for one in bins
            if one.confidence is not None and one.accuracy is not None
        ]
        parts.append(polyline(points, kind))
        parts += [dot(x, y, 3.5, f"dot {kind} layer-{kind}") for x, y in points]
    parts.append(text((LEFT + WIDTH) / 2, height - 4, "confidence that the model stated"))
    return svg(height, "Accuracy by confidence", *parts)


def signal(channels: Sequence[Sequence[float]], low: float, high: float, label: str) -> Markup:
    """One recording, each channel a line; all recordings of a page share one scale."""
    height = 110
    extent = high - low or 1.0
    parts = []
    for number_, values in enumerate(channels):
        last = max(1, len(values) - 1)
        points = [
            (8 + (WIDTH - 16) * place / last, height - 8 - (height - 16) * (values[place] - low) / extent)
            for place in extremes(values)
        ]
        parts.append(polyline(points, f"channel channel-{number_ % 6}", layer=False))
    return svg(height, label, *parts)
