"""The course of an adaptation: loss, verification and accuracy by epoch (the paper's figure of BUFR)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shiftmend.engine.history import Epoch
from shiftmend.errors import DataError
from shiftmend.research.figures import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

History = Sequence[Epoch] | Sequence[Mapping[str, Any]]
"""The history of an `Adaptation`, or of a benchmark's `Result`, whose epochs also have scores."""

_PANELS = {
    "loss": "loss\n(mean over batches)",
    "verification": "verification slices\n(divergence)",
    "accuracy": "accuracy, %\n(found with labels)",
}


def draw_curves(
    history: History | Mapping[str, History], title: str = "", *, selected: int | None = None, notes: Sequence[str] = ()
) -> Figure:
    """Draw loss, verification slices and accuracy over epochs, if known.

    Dashed lines, with the name of a block, are the moments at which the block is unfrozen in the first history.

    Args:
        history: one history, or several by name; each is a line.
        title: title of the figure.
        selected: The epoch that is selected without labels, marked by a ring.
        notes: further notes for the foot.
    """
    named = {"": history} if isinstance(history, Sequence) else history
    rows = {name: [_to_dict(row) for row in each] for name, each in named.items()}
    if not rows or any(len(each) < 2 for each in rows.values()):
        lacking = next((name for name, each in rows.items() if len(each) < 2), "")
        whose = f" of {lacking}" if lacking else ""
        raise DataError(f"Expected a history{whose} with an epoch after the first state, got none. Try another method.")
    lines = {panel: {name: _points(each, panel) for name, each in rows.items()} for panel in _PANELS}
    panels = [panel for panel, known in lines.items() if any(known.values())]
    if not panels:
        raise DataError("Expected a finite loss, verification or accuracy in the history, got none.")
    figure, axes = style.make_canvas(len(panels), 1, width=5.2, height=1.45, sharex=True)
    if len(panels) == 1:
        figure.set_figheight(2.4)
    shades = {name: _shade(name, index) for index, name in enumerate(rows)}
    for axis, panel in zip(axes[:, 0], panels, strict=True):
        _draw_panel(axis, panel, {name: points for name, points in lines[panel].items() if points}, shades, selected)
    last = max(row["epoch"] for each in rows.values() for row in each)
    axes[-1, 0].set_xlabel("epoch", fontsize=style.LABEL)
    axes[-1, 0].set_xlim(0, last)
    moments = unfreezing_moments(next(iter(rows.values())))
    _mark_unfreezing(axes[:, 0], moments, last)
    if title:
        style.add_title(figure, title)
    marks = ["dashed: the block named is unfrozen from here on"] if moments else []
    marks += ["ring: the epoch kept by a choice without labels"] if selected is not None else []
    style.add_footer(figure, [*marks, *notes])
    if len(rows) > 1:
        shown = lines[panels[-1]]
        ends = [(style.to_words(name), *shown[name][-1], shades[name]) for name in rows if shown[name]]
        style.label_ends(axes[-1, 0], ends)
    return figure


def unfreezing_moments(history: History) -> list[tuple[int, str]]:
    """List the blocks in the order in which they are unfrozen.

    Args:
        history: Rows of a run, starting with epoch 0, the state before training.

    Returns:
        Pairs of the last epoch before a block is unfrozen and the block's name. The list is empty if the whole model is
        trained from the start.
    """
    rows = [_to_dict(row) for row in history]
    marks = [
        (before["epoch"], after["block"])
        for before, after in itertools.pairwise(rows)
        if after["block"] and after["block"] != before["block"]
    ]
    return marks if len(marks) > 1 else []


def _to_dict(row: Epoch | Mapping[str, Any]) -> dict[str, Any]:
    values = row.to_json() if isinstance(row, Epoch) else dict(row)
    losses = values.get("losses") or {}
    return values | {"loss": sum(losses.values()) if losses else None}


def _points(rows: Sequence[Mapping[str, Any]], panel: str) -> list[tuple[float, float]]:
    scale = 100 if panel == "accuracy" else 1
    known = [(row["epoch"], row.get(panel)) for row in rows]
    return [(epoch, scale * value) for epoch, value in known if value is not None and math.isfinite(value)]


def _shade(name: str, index: int) -> str:
    return style.colour_of(name) if name in style.METHODS else style.COLOURS[index % len(style.COLOURS)]


def _draw_panel(
    axis: Any,
    panel: str,
    lines: Mapping[str, list[tuple[float, float]]],
    shades: Mapping[str, str],
    selected: int | None,
) -> None:
    for name, points in lines.items():
        epochs, values = zip(*points, strict=True)
        # Markers distinguish scored epochs from others.
        marker = "o" if len(points) <= 20 else ""
        look = {"color": shades[name], "linewidth": 1.4, "marker": marker, "markersize": 3}
        axis.plot(epochs, values, label=name or "adaptation", **look)
        kept = [point for point in points if point[0] == selected]
        if kept:
            axis.plot(*kept[0], "o", markersize=7, markerfacecolor="none", markeredgecolor="black", clip_on=False)
    axis.set_ylabel(_PANELS[panel], fontsize=style.LABEL)
    every = [value for points in lines.values() for _, value in points]
    if panel == "accuracy":
        axis.set_ylim(0, 100)
    elif min(every) > 0 and max(every) > 10 * min(every):
        _make_logarithmic(axis, max(every) / min(every))


def _make_logarithmic(axis: Any, ratio: float) -> None:
    """Make the vertical axis logarithmic, with plain numbers and enough of them for the ratio of its ends."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if ratio < 50 else (1,)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_locator(NullLocator())


def _mark_unfreezing(axes: Sequence[Any], marks: Sequence[tuple[int, str]], last: int) -> None:
    """Draw lines through all panels, with names above the first: upright where they are too long for their span."""
    if not marks:
        return
    spans = [end - start for (start, _), end in zip(marks, [*(at for at, _ in marks[1:]), last], strict=True)]
    points_per_epoch = 4.3 * 72 / max(last, 1)
    tight = any(0.6 * 7 * len(name) > points_per_epoch * span for (_, name), span in zip(marks, spans, strict=True))
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
