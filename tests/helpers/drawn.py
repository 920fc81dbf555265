"""Make results up, and read back from a figure what was drawn: the data of its artists, not its pixels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.text import Text

from shiftmend.research.bench.benchmark import Cell, Outcome, Result
from shiftmend.research.figures.style import FORMATS, save


def result(
    method: str, shift: str = "sky", seed: int = 1, accuracy: float = 0.5, ece: float = 0.1, **facts: Any
) -> Result:
    cell = Cell("emnist-da", facts.pop("protocol", "offline"), method, shift, seed, f"of {method}")
    origin = facts.pop("origin", "published")
    if "error" in facts:
        return Result(cell, origin, **facts)
    return Result(cell, origin, last=Outcome(9, accuracy, ece, 0.2, 0.7, 0.3), **facts)


def line(axis: Any, label: str) -> np.ndarray[Any, Any]:
    """Return the points `[N, 2]` of the only line of that name."""
    (found,) = [one for one in axis.get_lines() if one.get_label() == label]
    return np.asarray(found.get_xydata(), dtype=np.float64)


def segments(axis: Any) -> list[np.ndarray[Any, Any]]:
    """Return the spreads: lines of two points without a name or a marker."""
    lines = [one for one in axis.get_lines() if one.get_label().startswith("_") and len(one.get_xydata()) == 2]
    return [np.asarray(one.get_xydata(), dtype=np.float64) for one in lines]


def texts(figure: Figure) -> str:
    """Return every text of a figure, one on each line."""
    return "\n".join(text.get_text() for text in figure.findobj(Text) if text.get_visible() and text.get_text())


def footer(figure: Figure) -> str:
    """Return the footer without its line breaks, which depend on the width."""
    return str(figure.get_supxlabel()).replace("\n", " ")


def assert_nothing_is_cut(figure: Figure) -> None:
    figure.draw_without_rendering()
    box, width, height = figure.get_tightbbox(), *figure.get_size_inches()
    assert box.x0 >= 0, "cut at the left"
    assert box.y0 >= 0, "cut at the bottom"
    assert box.x1 <= width, "cut at the right"
    assert box.y1 <= height, "cut at the top"


def assert_same_bytes(draw: Callable[[], Figure], folder: Path) -> None:
    """Check that a figure gives the same bytes when it is saved twice and when it is drawn again."""
    one, other = draw(), draw()
    for kind in FORMATS:
        paths = [folder / f"{name}.{kind}" for name in ("first", "second", "other")]
        for figure, path in zip((one, one, other), paths, strict=True):
            save(figure, path)
        assert paths[0].read_bytes() == paths[1].read_bytes(), "another picture when saved again"
        assert paths[0].read_bytes() == paths[2].read_bytes(), "another picture when drawn again"
