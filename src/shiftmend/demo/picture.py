"""The demo's picture: what each device recorded, and what each method read in it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional

from shiftmend.utils.files import said_where, write_atomically

if TYPE_CHECKING:
    from shiftmend.demo import Lesson

GAP = 1


RIGHT, WRONG = "#0072b2", "#d55e00"  # told apart by every eye, and by lightness in print


def draw(
    rows: list[tuple[Lesson, Tensor, dict[str, Tensor]]],
    labels: Tensor,
    accuracies: dict[tuple[str, str], float],
    path: Path,
) -> None:
    """One strip of images a device; under it, for each method, what was read: right or wrong."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = len(labels)
    methods = list(rows[0][2])
    figure = Figure(figsize=(0.62 * columns + 3.4, 1.75 * len(rows) + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(rows), 1, squeeze=False)[:, 0]
    for axis, (lesson, images, guesses) in zip(axes, rows, strict=True):
        _strip(axis, images)
        side = images.shape[-1] + 2 * GAP
        for line, method in enumerate(methods):
            y = side + 8 + 11 * line
            share = accuracies[lesson.title, method]
            axis.text(-3, y, f"{method}   {100 * share:.0f} %", ha="right", va="center", fontsize=9)
            for column in range(columns):
                right = bool(guesses[method][column] == labels[column])
                axis.text(
                    column * side + side / 2,
                    y,
                    str(int(guesses[method][column])),
                    ha="center",
                    va="center",
                    fontsize=10,
                    color=RIGHT if right else WRONG,
                    fontweight="bold" if right else "normal",
                    fontstyle="normal" if right else "italic",
                )
        axis.text(-3, side / 2, lesson.title, ha="right", va="center", fontsize=11, fontweight="bold")
        axis.set_xlim(0, columns * side)
        axis.set_ylim(side + 8 + 11 * len(methods) - 5, 0)
        axis.axis("off")
    figure.suptitle(
        "What four devices recorded, and what each method reads: bold blue is right, italic orange is wrong"
    )
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    with said_where(path):
        write_atomically(path, buffer.getvalue())


def _strip(axis: Any, images: Tensor) -> None:
    """The images side by side with a gap between them, grey ones as grey."""
    colour = images.expand(-1, 3, -1, -1) if images.shape[1] == 1 else images
    colour = functional.pad(colour, (GAP, GAP, GAP, GAP), value=255)
    side = colour.shape[-1]
    joined = colour.permute(2, 0, 3, 1).reshape(side, -1, 3).numpy()
    axis.imshow(joined, extent=(0, joined.shape[1], side, 0), interpolation="nearest")
