"""The common style of all figures: colour-blind-safe colours, direct labels, saving."""

from __future__ import annotations

import io
import itertools
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shiftmend.errors import DataError
from shiftmend.utils.checks import require
from shiftmend.utils.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SOURCE, TARGET, ADAPTED = "#555555", "#d55e00", "#0072b2"
"""Colours of the source, of the target before adapting, and of the target after adapting."""

Marker = str | tuple[int, int, int]
"""A matplotlib marker; for a star, its number of points, 1, and its angle."""

METHODS: dict[str, tuple[str, Marker]] = {
    "bufr": ("#0072b2", "o"),
    "fr": ("#d55e00", "s"),
    "adabn": ("#009e73", "^"),
    "shot-im": ("#cc79a7", "D"),
    "source-only": ("#666666", "X"),
    "tent": ("#e69f00", "v"),
    "target-supervised": ("#000000", "*"),
    "shot": ("#6b1a45", "P"),
    "pl": ("#56b4e9", "<"),
    "bnm": ("#999933", ">"),
    "bnm-im": ("#332288", "h"),
    "full-gauss": ("#8c510a", "d"),
    "bufr-sliced": ("#4d88ff", "8"),
    "fr-sliced": ("#99372e", "p"),
    "fr-features": ("#e6ba7e", (4, 1, 0)),
    "fr-one-sided": ("#660000", (6, 1, 0)),
    "bufr-paper": ("#004b78", (8, 1, 0)),
    "fr-paper": ("#a5784b", (9, 1, 0)),
    "bufr-im": ("#8026ff", (5, 1, 180)),
    "match-mean": ("#a7d1b1", (3, 1, 0)),
    "match-moments": ("#3a044b", (7, 1, 0)),
    "match-histogram": ("#50f050", (10, 1, 0)),
    "neo": ("#8c00c8", (11, 1, 0)),
    "coral": ("#f000f0", (12, 1, 0)),
    "fr-shares": ("#440011", (13, 1, 0)),
    "match-fr": ("#140014", (14, 1, 0)),
    "auto": ("#a0148c", (15, 1, 0)),
}
"""Colour and marker of each method. Variants of a method in a benchmark have a shade of its colour."""

COLOURS = tuple(colour for colour, _ in METHODS.values())

_MARKERS = tuple(marker for _, marker in METHODS.values())

FORMATS = ("png", "svg")

LABEL, SMALL = 8, 6.5
"""Font sizes in points: of labels, and of notes below the figure."""

_DIRECTIONS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))


def colour_of(method: str) -> str:
    """Return the colour of a method, the same in every figure. Unknown methods may share a colour with others."""
    return METHODS[method][0] if method in METHODS else COLOURS[_number(method) % len(COLOURS)]


def marker_of(method: str) -> Marker:
    """Return the marker of a method in every figure."""
    return METHODS[method][1] if method in METHODS else _MARKERS[_number(method) // len(COLOURS) % len(_MARKERS)]


def _number(method: str) -> int:
    # Unlike `hash`, a checksum is the same in every process.
    return zlib.crc32(method.encode())


def darken(shade: str) -> tuple[float, float, float]:
    """Darken a colour until letters in it can be read: a contrast of 4.5 to 1 against white (WCAG AA)."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(shade)
    while _luminance(red, green, blue) > 1.05 / 4.5 - 0.05:
        red, green, blue = 0.95 * red, 0.95 * green, 0.95 * blue
    return red, green, blue


def _luminance(*channels: float) -> float:
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def point_style(method: str, size: float) -> dict[str, Any]:
    """Return the style of a method's points, for `axis.plot`. Stars are enlarged, since they look small."""
    marker = marker_of(method)
    scaled = size * (1.7 if marker == "*" else 1.4 if isinstance(marker, tuple) else 1.0)
    look = {"linestyle": "", "marker": marker, "color": colour_of(method), "markersize": scaled}
    return look | {"markeredgecolor": "white", "markeredgewidth": 0.4, "zorder": 3, "label": method}


def to_words(name: str) -> str:
    """Format the name of a shift as words."""
    return name.replace("_", " ")


def make_canvas(
    rows: int = 1, columns: int = 1, *, width: float = 4.0, height: float = 3.0, **options: Any
) -> tuple[Figure, Any]:
    """Make a figure and its axes `[rows, columns]`, each of this width and height in inches.

    No window is opened and no global state is touched. `options` are those of `Figure.subplots`.
    """
    require("matplotlib", "research")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=LABEL)
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.set_axisbelow(True)
    return figure, axes


def add_title(figure: Figure, text: str) -> None:
    """Add a title above the axes; the figure grows by its lines."""
    lines = _wrap(figure, text, 10)
    _heighten(figure, lines, 10)
    figure.suptitle(lines, x=0.01, ha="left", fontsize=10)


def add_legend(figure: Figure, text: str, entries: tuple[Sequence[Any], Sequence[str]], columns: int) -> None:
    """Add a title with a legend below it, as one artist, because the layout would overlap two."""
    found = figure.legend(
        *entries,
        loc="outside upper left",
        ncols=columns,
        fontsize=7.5,
        frameon=False,
        title=_wrap(figure, text, 10),
        title_fontsize=10,
        alignment="left",
        borderpad=0.1,
        columnspacing=1.4,
        handletextpad=0.5,
    )
    found.get_title().set_multialignment("left")


def add_footer(figure: Figure, notes: Iterable[str]) -> None:
    """Add notes below the axes in small type, one per line; the figure grows by its lines."""
    text = "\n".join(_wrap(figure, note, SMALL) for note in notes)
    _heighten(figure, text, SMALL)
    # The layout makes room for no other text below the axes.
    figure.supxlabel(text, x=0.01, ha="left", fontsize=SMALL, color="#444444")


def _heighten(figure: Figure, text: str, size: float) -> None:
    """Make a figure taller by the lines of a text, so that the axes keep their size."""
    figure.set_figheight(figure.get_figheight() + 1.3 * size / 72 * len(text.splitlines()))


def _wrap(figure: Figure, text: str, size: float) -> str:
    """Break a text into lines that fit the figure, with room to spare: an SVG may be shown in another font."""
    room = 0.94 * figure.bbox.width
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}".lstrip()
        if lines[-1] and _measure(figure, longer, size)[0] > room:
            lines.append(word)
        else:
            lines[-1] = longer
    return "\n".join(lines)


def _measure(figure: Figure, text: str, size: float) -> tuple[float, float]:
    """Return width and height in pixels of a text in one line."""
    from matplotlib.font_manager import FontProperties

    measure = figure.canvas.get_renderer().get_text_width_height_descent  # type: ignore[attr-defined]
    font = FontProperties(size=size)
    (width, height, _), (_, line, _) = measure(text, font, False), measure("lp", font, False)
    # matplotlib gives every line at least the height of "lp".
    return width, max(height, line)


def label_ends(axis: Any, ends: Sequence[tuple[str, float, float, str]]) -> None:
    """Write the names of lines to the right of the axes, each at the height at which its line ends.

    A thin line connects each name with the end of its line, and names that would overlap are moved apart. Call this
    function last, because it measures the axes.

    Args:
        axis: Matplotlib axes with the lines.
        ends: Name, x and y of the end in data coordinates, and colour, for each line.
    """
    texts = [_write_at_end(axis, *end) for end in ends]
    axis.figure.draw_without_rendering()
    height = axis.bbox.height / axis.figure.dpi * 72
    heights = axis.transAxes.inverted().transform(axis.transData.transform([(x, y) for _, x, y, _ in ends]))[:, 1]
    order = np.argsort(heights, kind="stable")
    for index, place in zip(order, spread_out(heights[order], 1.2 * LABEL / height, 0, 1), strict=True):
        texts[index].set_y(place)


def _write_at_end(axis: Any, name: str, x: float, y: float, shade: str) -> Any:
    from matplotlib.transforms import offset_copy

    # The distance is in points: in parts of the axes it would change with the layout, and the layout with it.
    beside = offset_copy(axis.transAxes, axis.figure, x=9, units="points")
    return axis.annotate(
        name,
        (x, y),
        (1, 0.5),
        textcoords=beside,
        va="center",
        fontsize=LABEL,
        color=darken(shade),
        arrowprops=_leader(shade),
        annotation_clip=False,
    )


def spread_out(values: Sequence[float] | np.ndarray[Any, Any], gap: float, low: float, high: float) -> list[float]:
    """Move sorted values as little as possible (least squares), so that they are `gap` apart within bounds.

    The gap shrinks where the bounds leave no room for it.
    """
    count = len(values)
    if count > 1:
        gap = min(gap, (high - low) / (count - 1))
    # With the gaps taken off, this is isotonic regression: neighbours in the wrong order are pooled at their mean.
    pools: list[tuple[float, int]] = []
    for index, value in enumerate(values):
        mean, size = float(value) - index * gap, 1
        while pools and pools[-1][0] > mean:
            before, others = pools.pop()
            mean, size = (mean * size + before * others) / (size + others), size + others
        pools.append((mean, size))
    level = itertools.chain.from_iterable([mean] * size for mean, size in pools)
    top = high - (count - 1) * gap
    return [min(max(mean, low), top) + index * gap for index, mean in enumerate(level)]


def label_points(axis: Any, places: Sequence[tuple[str, float, float, str]]) -> None:
    """Write the names of points next to them, as near as possible without covering a name or a point.

    Thin lines connect distant names with their points. Call this function last, because it measures the axes.

    Args:
        axis: Matplotlib axes with the points.
        places: Name, x and y in data coordinates, and colour, for each point.
    """
    axis.figure.draw_without_rendering()
    scale = axis.figure.dpi / 72
    pixels = axis.transData.transform([(x, y) for _, x, y, _ in places])
    taken = [np.array([*at - 4 * scale, *at + 4 * scale]) for at in pixels]
    inside = np.array(axis.bbox.extents)
    for (name, x, y, shade), at in zip(places, pixels, strict=True):
        size = np.array(_measure(axis.figure, name, LABEL))
        choices = []
        for distance, direction in itertools.product((6, 14, 24, 36), np.array(_DIRECTIONS)):
            # A corner of the text, or the middle of a side, faces the point.
            corner = at + direction * distance * scale + (direction - 1) / 2 * size
            area = np.array([*corner, *corner + size])
            covered = sum(_overlap(area, other) for other in taken) + np.prod(size) - _overlap(area, inside)
            choices.append((covered + distance, distance, direction, area))
        _, distance, direction, area = min(choices, key=lambda choice: choice[0])
        axis.annotate(
            name,
            (x, y),
            tuple(float(distance) * direction),
            textcoords="offset points",
            ha=("right", "center", "left")[direction[0] + 1],
            va=("top", "center", "bottom")[direction[1] + 1],
            fontsize=LABEL,
            color=darken(shade),
            arrowprops=_leader(shade) if distance > 6 else None,
        )
        taken.append(area)


def _leader(shade: str) -> dict[str, Any]:
    return {"arrowstyle": "-", "color": shade, "linewidth": 0.5, "alpha": 0.7, "shrinkA": 1, "shrinkB": 3}


def _overlap(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    sides = np.minimum(one[2:], other[2:]) - np.maximum(one[:2], other[:2])
    return float(np.prod(np.maximum(sides, 0)))


def save(figure: Figure, path: Path) -> None:
    """Write a PNG or an SVG atomically, by the file's suffix. Equal figures give equal bytes.

    The first call fixes the layout: a layout that starts from an earlier one ends elsewhere.
    """
    kind = path.suffix.lstrip(".").lower()
    if kind not in FORMATS:
        raise DataError(f"Expected a file .png or .svg, got {path.name!r}.")
    import matplotlib

    if figure.get_layout_engine() is not None:
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
    buffer = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    with matplotlib.rc_context({"svg.hashsalt": "shiftmend", "svg.fonttype": "none"}):
        figure.savefig(buffer, format=kind, dpi=150, metadata=metadata)
    write_atomically(path, buffer.getvalue())
