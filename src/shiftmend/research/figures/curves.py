"""How an adaptation went, epoch by epoch, and when each block was unfrozen (the paper's figure of BUFR)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from shiftmend.engine.history import Epoch
from shiftmend.errors import DataError
from shiftmend.research.figures import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

History = Sequence[Epoch] | Sequence[Mapping[str, Any]]
"""That of an `Adaptation`, or of a benchmark's `Result`, whose epochs have been scored as well."""


ONLY = "adaptation"
"""The label of the lines of a history without a name."""


_PANELS = {
    "loss": "loss\n(mean over batches)",
    "verification": "verification slices\n(divergence)",
    "accuracy": "accuracy, %\n(found with labels)",
}


def draw(
    history: History | Mapping[str, History], title: str = "", *, selected: int | None = None, notes: Sequence[str] = ()
) -> Figure:
    """Loss, verification slices and accuracy over epochs, as far as each is known; one line for each named history.

    Dashed lines are the moments at which the next block is unfrozen, with its name; where several histories differ in
    them, those of the first. `selected` marks the epoch that a choice without labels keeps.
    """
    named = {"": history} if isinstance(history, Sequence) else history
    rows = {name: [_row(row) for row in one] for name, one in named.items()}
    if not rows or any(len(one) < 2 for one in rows.values()):
        lacking = next((name for name, one in rows.items() if len(one) < 2), "")
        whose = f"the history of {lacking}" if lacking else "the history"
        raise DataError(f"{whose} has no epoch after the first state; draw one of a method that adapts")
    lines = {panel: {name: _points(one, panel) for name, one in rows.items()} for panel in _PANELS}
    panels = [panel for panel, known in lines.items() if any(known.values())]
    if not panels:
        raise DataError("the history has no finite loss, verification or accuracy; there is nothing to draw")
    figure, axes = style.canvas(len(panels), 1, width=5.2, height=1.45, sharex=True)
    if len(panels) == 1:
        figure.set_figheight(2.4)
    shades = {name: _shade(name, index) for index, name in enumerate(rows)}
    for axis, panel in zip(axes[:, 0], panels, strict=True):
        _panel(axis, panel, {name: points for name, points in lines[panel].items() if points}, shades, selected)
    last = max(row["epoch"] for one in rows.values() for row in one)
    axes[-1, 0].set_xlabel("epoch", fontsize=style.LABEL)
    axes[-1, 0].set_xlim(0, last)
    _unfreezing(axes[:, 0], next(iter(rows.values())), last)
    if title:
        style.title(figure, title)
    said = ["dashed: the block named is unfrozen from here on"] if unfreezing(next(iter(rows.values()))) else []
    said += ["ring: the epoch kept by a choice without labels"] if selected is not None else []
    style.footer(figure, [*said, *notes])
    if len(rows) > 1:
        shown = lines[panels[-1]]
        ends = [(style.words(name), *shown[name][-1], shades[name]) for name in rows if shown[name]]
        style.label_ends(axes[-1, 0], ends)
    return figure


def unfreezing(history: History) -> list[tuple[int, str]]:
    """After which epoch each block joins in, and its name; empty where everything is trained from the start."""
    rows = [_row(row) for row in history]
    marks = [
        (before["epoch"], after["block"])
        for before, after in itertools.pairwise(rows)
        if after["block"] and after["block"] != before["block"]
    ]
    return marks if len(marks) > 1 else []


def _row(row: Epoch | Mapping[str, Any]) -> dict[str, Any]:
    values = row.to_json() if isinstance(row, Epoch) else dict(row)
    losses = values.get("losses") or {}
    return values | {"loss": sum(losses.values()) if losses else None}


def _points(rows: Sequence[Mapping[str, Any]], panel: str) -> list[tuple[float, float]]:
    scale = 100 if panel == "accuracy" else 1
    known = [(row["epoch"], row.get(panel)) for row in rows]
    return [(epoch, scale * value) for epoch, value in known if value is not None and math.isfinite(value)]


def _shade(name: str, index: int) -> str:
    return style.colour(name) if name in style.METHODS else style.COLOURS[index % len(style.COLOURS)]


def _panel(
    axis: Any,
    panel: str,
    lines: Mapping[str, list[tuple[float, float]]],
    shades: Mapping[str, str],
    selected: int | None,
) -> None:
    for name, points in lines.items():
        epochs, values = zip(*points, strict=True)
        few = len(points) <= 20  # so that epochs which were not scored do not look as if they were
        axis.plot(
            epochs,
            values,
            color=shades[name],
            linewidth=1.4,
            marker="o" if few else "",
            markersize=3,
            label=name or ONLY,
        )
        kept = [point for point in points if point[0] == selected]
        if kept:
            axis.plot(*kept[0], "o", markersize=7, markerfacecolor="none", markeredgecolor="black", clip_on=False)
    axis.set_ylabel(_PANELS[panel], fontsize=style.LABEL)
    every = [value for points in lines.values() for _, value in points]
    if panel == "accuracy":
        axis.set_ylim(0, 100)
    elif min(every) > 0 and max(every) > 10 * min(every):  # losses with entropy in them may be negative
        _logarithmic(axis, max(every) / min(every))


def _logarithmic(axis: Any, ratio: float) -> None:
    """With plain numbers beside it, and enough of them where it spans little more than a power of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if ratio < 50 else (1,)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_locator(NullLocator())


def _unfreezing(axes: Sequence[Any], rows: Sequence[Mapping[str, Any]], last: int) -> None:
    """Lines through all panels, and above the first the names: upright where they are too long for their span."""
    marks = unfreezing(cast(History, rows))
    if not marks:
        return
    spans = [end - start for (start, _), end in zip(marks, [*(at for at, _ in marks[1:]), last], strict=True)]
    width = 4.3 * 72 / max(last, 1)  # of an epoch, in points
    tight = any(0.6 * 7 * len(name) > width * span for (_, name), span in zip(marks, spans, strict=True))
    if tight:
        figure = axes[0].figure
        figure.set_figheight(figure.get_figheight() + max(0.6 * 7 / 72 * len(name) for _, name in marks))
    for epoch, block in marks:
        for axis in axes:
            axis.axvline(epoch, color="#777777", linewidth=0.8, linestyle="--")
        axes[0].annotate(
            block,
            (epoch, 1),
            (0 if tight else 1, 3),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center" if tight else "left",
            va="bottom",
            rotation=90 if tight else 0,
            fontsize=7,
            color="#444444",
        )
