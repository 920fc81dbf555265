"""One look for all figures: colours that every eye can tell apart, that differ in lightness, and readable print."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shiftmend.errors import DataError
from shiftmend.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SOURCE, TARGET, ADAPTED = "#555555", "#d55e00", "#0072b2"
"""The source, the target as it came, the target after adapting; wherever the three meet."""
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555", "#8c6bb1", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "h", "d")
_METHODS = (
    "bufr",
    "fr",
    "adabn",
    "shot-im",
    "source-only",
    "tent",
    "target-supervised",
    "shot",
    "pl",
    "bnm",
    "bnm-im",
    "full-gauss",
)
FORMATS = ("png", "svg")


def colour(method: str) -> str:
    """A method has the same colour in every figure."""
    return _COLOURS[_number(method) % len(_COLOURS)]


def marker(method: str) -> str:
    """And the same marker: no two methods share both."""
    return _MARKERS[_number(method) % len(_MARKERS)]


def _number(method: str) -> int:
    return _METHODS.index(method) if method in _METHODS else len(_METHODS) + sum(map(ord, method))


def canvas(rows: int = 1, columns: int = 1, *, width: float = 4.0, height: float = 3.0, **options: Any) -> Any:
    """A figure and its axes `[rows, columns]`, each of so many inches; no window, no global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.set_axisbelow(True)
    return figure, axes


def save(figure: Figure, path: Path) -> None:
    """Write a PNG or an SVG, as the name says, in one step; the same figure gives the same bytes."""
    kind = path.suffix.lstrip(".").lower()
    if kind not in FORMATS:
        raise DataError(f"a figure is written as .png or .svg, got {path.name!r}")
    import matplotlib

    buffer = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    with matplotlib.rc_context({"svg.hashsalt": "shiftmend", "svg.fonttype": "none"}):
        figure.savefig(buffer, format=kind, dpi=150, metadata=metadata)
    write_atomically(path, buffer.getvalue())
