"""One look for all figures: colours that every eye can tell apart, that differ in lightness, and readable print."""

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
"""The source, the target as it came, the target after adapting; wherever the three meet."""


Marker = str | tuple[int, int, int]
"""As matplotlib names them, or for a star its points, 1 and its angle."""


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
}
"""Colour and marker of each method, and of rows that are one with other options: these in a shade of their method."""


COLOURS = tuple(colour for colour, _ in METHODS.values())


_MARKERS = tuple(marker for _, marker in METHODS.values())


FORMATS = ("png", "svg")


LABEL, SMALL = 8, 6.5
"""Sizes of type in points: of labels, and of what stands at the foot."""


_DIRECTIONS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))


def colour(method: str) -> str:
    """A method has the same colour in every figure; one that is not known here may share it with another."""
    return METHODS[method][0] if method in METHODS else COLOURS[_number(method) % len(COLOURS)]


def marker(method: str) -> Marker:
    """And the same marker."""
    return METHODS[method][1] if method in METHODS else _MARKERS[_number(method) // len(COLOURS) % len(_MARKERS)]


def _number(method: str) -> int:
    return zlib.crc32(method.encode())  # the same in every process, which `hash` is not


def ink(shade: str) -> tuple[float, float, float]:
    """A colour as dark as letters in it must be: at least 4.5 to 1 against white (WCAG AA), or as it is if darker."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(shade)
    while _luminance(red, green, blue) > 1.05 / 4.5 - 0.05:
        red, green, blue = 0.95 * red, 0.95 * green, 0.95 * blue
    return red, green, blue


def _luminance(*channels: float) -> float:
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def points(method: str, size: float) -> dict[str, Any]:
    """How a method's points look, for `axis.plot`; stars are small for their size."""
    scaled = size * (1.7 if marker(method) == "*" else 1.4 if isinstance(marker(method), tuple) else 1.0)
    look = {"linestyle": "", "marker": marker(method), "color": colour(method), "markersize": scaled}
    return look | {"markeredgecolor": "white", "markeredgewidth": 0.4, "zorder": 3, "label": method}


def words(name: str) -> str:
    """The name of a shift as words."""
    return name.replace("_", " ")


def canvas(
    rows: int = 1, columns: int = 1, *, width: float = 4.0, height: float = 3.0, **options: Any
) -> tuple[Figure, Any]:
    """A figure and its axes `[rows, columns]`, each of so many inches; no window, no global state."""
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


def title(figure: Figure, text: str) -> None:
    lines = _wrapped(figure, text, 10)
    _heighten(figure, lines, 10)
    figure.suptitle(lines, x=0.01, ha="left", fontsize=10)


def legend(figure: Figure, text: str, entries: tuple[Sequence[Any], Sequence[str]], columns: int) -> None:
    """The title and under it a legend, which as two things the layout would put into the same place."""
    found = figure.legend(
        *entries,
        loc="outside upper left",
        ncols=columns,
        fontsize=7.5,
        frameon=False,
        title=_wrapped(figure, text, 10),
        title_fontsize=10,
        alignment="left",
        borderpad=0.1,
        columnspacing=1.4,
        handletextpad=0.5,
    )
    found.get_title().set_multialignment("left")


def footer(figure: Figure, notes: Iterable[str]) -> None:
    """What a reader has to know, in small type at the foot, each note on a line of its own; the figure grows by it."""
    text = "\n".join(_wrapped(figure, note, SMALL) for note in notes)
    _heighten(figure, text, SMALL)
    # the one text below the axes that the layout makes room for
    figure.supxlabel(text, x=0.01, ha="left", fontsize=SMALL, color="#444444")


def _heighten(figure: Figure, text: str, size: float) -> None:
    """By the lines of a text, so that the axes keep their size."""
    figure.set_figheight(figure.get_figheight() + 1.3 * size / 72 * len(text.splitlines()))


def _wrapped(figure: Figure, text: str, size: float) -> str:
    """In lines that fit the width of the figure; a little less, since an SVG may be shown in another font."""
    room = 0.94 * figure.bbox.width
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}".lstrip()
        if lines[-1] and _extent(figure, longer, size)[0] > room:
            lines.append(word)
        else:
            lines[-1] = longer
    return "\n".join(lines)


def _extent(figure: Figure, text: str, size: float) -> tuple[float, float]:
    """Width and height in pixels of a text in one line."""
    from matplotlib.font_manager import FontProperties

    measure = figure.canvas.get_renderer().get_text_width_height_descent  # type: ignore[attr-defined]
    font = FontProperties(size=size)
    (width, height, _), (_, line, _) = measure(text, font, False), measure("lp", font, False)
    return width, max(height, line)  # as matplotlib lays it out


def label_ends(axis: Any, ends: Sequence[tuple[str, float, float, str]]) -> None:
    """Names of lines to the right of the axes, at the height where each line ends: (name, x, y, colour).

    Where lines end close to each other their names move apart, and a thin line leads to each. Call it last: it
    measures the axes.
    """
    texts = [_end(axis, *end) for end in ends]
    axis.figure.draw_without_rendering()
    height = axis.bbox.height / axis.figure.dpi * 72
    heights = axis.transAxes.inverted().transform(axis.transData.transform([(x, y) for _, x, y, _ in ends]))[:, 1]
    order = np.argsort(heights, kind="stable")
    for index, place in zip(order, spread(heights[order], 1.2 * LABEL / height, 0, 1), strict=True):
        texts[index].set_y(place)


def _end(axis: Any, name: str, x: float, y: float, shade: str) -> Any:
    from matplotlib.transforms import offset_copy

    # A distance in points, as one in parts of the axes would change with the layout, and the layout with it.
    beside = offset_copy(axis.transAxes, axis.figure, x=9, units="points")
    return axis.annotate(
        name,
        (x, y),
        (1, 0.5),
        textcoords=beside,
        va="center",
        fontsize=LABEL,
        color=ink(shade),
        arrowprops=_leader(shade),
        annotation_clip=False,
    )


def spread(values: Sequence[float] | np.ndarray[Any, Any], gap: float, low: float, high: float) -> list[float]:
    """Sorted values, moved as little as possible (in squares) to lie `gap` apart within bounds, if these allow it."""
    count = len(values)
    if count > 1:
        gap = min(gap, (high - low) / (count - 1))
    # without the gaps they need only not fall: pools of neighbours that do take their mean
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
    """Names beside points (name, x, y, colour), as near as they can be without covering each other or a point.

    Those that stand further off are led to by a thin line. Call it last: it measures the axes.
    """
    axis.figure.draw_without_rendering()
    scale = axis.figure.dpi / 72
    pixels = axis.transData.transform([(x, y) for _, x, y, _ in places])
    taken = [np.array([*at - 4 * scale, *at + 4 * scale]) for at in pixels]
    inside = np.array(axis.bbox.extents)
    for (name, x, y, shade), at in zip(places, pixels, strict=True):
        size = np.array(_extent(axis.figure, name, LABEL))
        choices = []
        for distance, direction in itertools.product((6, 14, 24, 36), np.array(_DIRECTIONS)):
            # a corner or the middle of a side faces the point
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
            color=ink(shade),
            arrowprops=_leader(shade) if distance > 6 else None,
        )
        taken.append(area)


def _leader(shade: str) -> dict[str, Any]:
    return {"arrowstyle": "-", "color": shade, "linewidth": 0.5, "alpha": 0.7, "shrinkA": 1, "shrinkB": 3}


def _overlap(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    sides = np.minimum(one[2:], other[2:]) - np.maximum(one[:2], other[:2])
    return float(np.prod(np.maximum(sides, 0)))


def save(figure: Figure, path: Path) -> None:
    """Write a PNG or an SVG, as the name says, in one step; the same figure gives the same bytes.

    The first time settles where everything stands, since a layout that starts from the last one ends elsewhere.
    """
    kind = path.suffix.lstrip(".").lower()
    if kind not in FORMATS:
        raise DataError(f"a figure is written as .png or .svg, got {path.name!r}")
    import matplotlib

    if figure.get_layout_engine() is not None:
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
    buffer = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    with matplotlib.rc_context({"svg.hashsalt": "shiftmend", "svg.fonttype": "none"}):
        figure.savefig(buffer, format=kind, dpi=150, metadata=metadata)
    write_atomically(path, buffer.getvalue())
