"""Accuracy and calibration error of every method on every shift."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shiftmend.research.bench import footnotes
from shiftmend.research.bench.benchmark import Result, Which
from shiftmend.research.bench.grids import Beside, Grid
from shiftmend.research.bench.rendering import Entry
from shiftmend.research.figures import picking, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_METRICS = ("accuracy", "ece")


_NAMES = {"accuracy": "accuracy, %", "ece": "expected calibration error, %"}


_BAND = 0.76
"""Of a row's height, what the lanes of its methods take up."""


def draw(
    results: Sequence[Result],
    methods: Sequence[str] | None = None,
    shifts: Sequence[str] | None = None,
    *,
    which: Which = "last",
    beside: Beside | None = None,
) -> Figure:
    """A row a shift, in it a lane for each method: the mean over seeds, and a thin line of a standard deviation.

    Shifts stand in the order given, or else by the accuracy of the first method, highest first. `beside` adds the
    published figures as hollow markers.
    """
    grids = [picking.pick(results, methods, shifts, metric=metric, which=which, beside=beside) for metric in _METRICS]
    rows = list(grids[0].shifts) if shifts is not None else _sorted(grids[0])
    lanes = len(grids[0].methods)
    height = 1.1 + 0.17 * math.ceil(lanes / 6) + max(0.8, len(rows) * (0.14 + 0.06 * lanes))
    figure, axes = style.canvas(1, 2, width=3.6, height=height, sharey=True)
    entries: list[tuple[str, str, Entry]] = []
    found = False
    for axis, grid in zip(axes[0], grids, strict=True):
        compared = grid.comparisons({shift: (shift,) for shift in rows})
        for lane, method in enumerate(grid.methods):
            places = [row + _BAND * ((lane + 0.5) / lanes - 0.5) for row in range(len(rows))]
            _lane(axis, method, [compared[method, shift][0] for shift in rows], places)
            found |= _published(axis, method, [compared[method, shift][1] for shift in rows], places)
        if grid.metric == "accuracy":
            entries = [(method, shift, entry) for (method, shift), (entry, _, _) in compared.items()]
        for row in range(0, len(rows), 2):
            axis.axhspan(row - 0.5, row + 0.5, color="#f2f2f2", zorder=0, linewidth=0)
        axis.set_xlabel(_NAMES[grid.metric], fontsize=style.LABEL)
        axis.grid(visible=False, axis="y")
        axis.tick_params(axis="y", length=0)
    axes[0, 0].set_xlim(0, 100)
    axes[0, 1].set_xlim(0, min(100, axes[0, 1].get_xlim()[1]))
    axes[0, 0].set_ylim(len(rows) - 0.5, -0.5)
    names = [f"{style.words(shift)} {footnotes.origin_marks(grids[0], [shift])}".strip() for shift in rows]
    axes[0, 0].set_yticks(range(len(rows)), names)
    pairs = [
        (handle, label)
        for handle, label in zip(*axes[0, 0].get_legend_handles_labels(), strict=True)
        if label in grids[0].methods
    ]
    title = f"{grids[0].benchmark} ({grids[0].protocol}), {picking.MOMENTS[which]}"
    style.legend(figure, title, ([handle for handle, _ in pairs], [label for _, label in pairs]), 6)
    said = [note for note in footnotes.about_numbers(grids[0], entries)[1:] if note != footnotes.PARTIAL]
    if shifts is None:
        said.append(f"shifts sorted by the accuracy of {grids[0].methods[0]}")
    said += footnotes.about_published(grids[0], found)[: 0 if found else 1]
    said += [f"hollow: {'the paper' if beside == 'paper' else 'the re-run of the released code'}"] if found else []
    said += [footnotes.STREAM.partition(":")[0]] if found and any(grid.unlike for grid in grids) else []
    style.footer(figure, [*said, *picking.notes(grids[0], methods, shifts, marked=True)])
    return figure


def _sorted(grid: Grid) -> list[str]:
    def accuracy(shift: str) -> float:
        value = grid.mean(grid.methods[0], [shift]).value
        return -math.inf if value is None or math.isnan(value) else value

    return sorted(grid.shifts, key=accuracy, reverse=True)


def _lane(axis: Any, method: str, entries: Sequence[Entry], places: Sequence[float]) -> None:
    shade = style.colour(method)
    shown = _finite(entries, places)
    for value, y, deviation in shown:
        if deviation is not None:
            axis.plot([value - deviation, value + deviation], [y, y], color=shade, linewidth=0.9)
    if shown:
        xs, ys = [value for value, _, _ in shown], [y for _, y, _ in shown]
        axis.plot(xs, ys, clip_on=False, **style.points(method, 4.5))


def _published(axis: Any, method: str, entries: Sequence[Entry], places: Sequence[float]) -> bool:
    shown = _finite(entries, places)
    hollow = {"markerfacecolor": "none", "markeredgecolor": style.colour(method), "markeredgewidth": 0.7, "zorder": 2}
    if shown:
        axis.plot(
            [value for value, _, _ in shown],
            [y for _, y, _ in shown],
            clip_on=False,
            **style.points(method, 4.5) | hollow | {"label": f"published {method}"},
        )
    return bool(shown)


def _finite(entries: Sequence[Entry], places: Sequence[float]) -> list[tuple[float, float, float | None]]:
    """Value, place and deviation of what can be drawn."""
    pairs = zip(entries, places, strict=True)
    return [(e.value, y, e.deviation) for e, y in pairs if e.value is not None and math.isfinite(e.value)]
