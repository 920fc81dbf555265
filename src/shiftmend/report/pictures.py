"""Sample inputs in a page: images as small PNGs, signals as lines, tables as numbers."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shiftmend.report import charts
from shiftmend.report.facts import Facts, Sample
from shiftmend.report.markup import Markup, Part, element, join
from shiftmend.report.verdicts import percent

SIDES = (192, 128, 96, 64, 32)
"""Images are scaled down to the first of these many pixels with which they stay below `MOST_BYTES` together."""


MOST_BYTES = 1_500_000


MOST_COLUMNS = 12


MOST_CHANNELS = 6


_Array = NDArray[np.generic]


def gallery(facts: Facts) -> Markup:
    """All sample inputs, in the way that suits their shape."""
    shape = facts.inputs[0].values.shape
    if _is_table(shape):
        return _table(facts)
    cards = [
        element("figure", picture, element("figcaption", *_reading(facts, sample)), class_="sample")
        for sample, picture in zip(facts.inputs, _drawn(facts), strict=True)
    ]
    return element("div", *cards, class_="samples" if len(shape) == 3 else "samples wide")


def remark(facts: Facts) -> str:
    """What was done to the inputs to show them."""
    shape = facts.inputs[0].values.shape
    lengths = "Shown is how large their complex numbers are. "
    return (lengths if _is_complex(facts) and not _is_table(shape) else "") + _remark(facts, shape)


def _is_complex(facts: Facts) -> bool:
    return bool(np.iscomplexobj(facts.inputs[0].values))


def _is_table(shape: tuple[int, ...]) -> bool:
    return len(shape) == 1 and shape[0] <= MOST_COLUMNS


def _remark(facts: Facts, shape: tuple[int, ...]) -> str:
    if len(shape) == 3 and facts.inputs[0].values.dtype != np.uint8:
        scaled = "Their values were scaled together to what a screen can show."
        return scaled if shape[0] in (1, 3) else f"{scaled} Shown is the first of {shape[0]} channels."
    if len(shape) == 3 and shape[0] not in (1, 3):
        return f"Shown is the first of {shape[0]} channels."
    if len(shape) == 2 and shape[0] > MOST_CHANNELS:
        return f"All share one scale; shown are the first {MOST_CHANNELS} of {shape[0]} channels."
    lines = len(shape) == 2 or (len(shape) == 1 and shape[0] > MOST_COLUMNS)
    return "All share one scale." if lines else ""


def _drawn(facts: Facts) -> list[Markup]:
    values = [np.abs(sample.values) if _is_complex(facts) else sample.values for sample in facts.inputs]
    names = [f"Input {sample.number}" for sample in facts.inputs]
    shape = values[0].shape
    if len(shape) == 3:
        return [
            element("img", src=source, alt=f"{name} of the target", class_="picture")
            for name, source in zip(names, _pngs(values), strict=True)
        ]
    if len(shape) in (1, 2):
        channels = [_channels(one) for one in values]
        low, high = _extent(channels)
        return [charts.signal(one.tolist(), low, high, name) for name, one in zip(names, channels, strict=True)]
    return [element("p", f"{' × '.join(map(str, shape)) or 'one number'}: no picture", class_="note")] * len(values)


def _reading(facts: Facts, sample: Sample) -> list[Part]:
    """What the model read, before and after, in a few words."""
    parts: list[Part] = [element("span", f"no. {sample.number}", class_="number")]
    said = {"before": "read as" if sample.after is None else "before", "after": "after"}
    for kind, taken in (("before", sample.before), ("after", sample.after)):
        if taken is not None:
            words = f"{facts.classes[taken[0]]} ({percent(taken[1])})"
            parts.append(element("span", element("i", class_=f"key {kind}"), f"{said[kind]} {words}", class_="reading"))
    if sample.label is not None and 0 <= sample.label < len(facts.classes):
        parts.append(element("span", f"label {facts.classes[sample.label]}", class_="reading"))
    return parts


def _table(facts: Facts) -> Markup:
    columns = facts.inputs[0].values.shape[0]
    head = element(
        "tr",
        element("th", "input"),
        *(element("th", f"value {index}") for index in range(columns)),
        element("th", "read as"),
    )
    rows = [
        element(
            "tr",
            element("td", str(sample.number)),
            *(element("td", f"{value:.3g}") for value in sample.values.tolist()),
            element("td", join(*_reading(facts, sample)[1:])),
        )
        for sample in facts.inputs
    ]
    table = element("table", element("thead", head), element("tbody", *rows), class_="numbers")
    return element("div", table, class_="scroll", tabindex="0", role="region", aria_label="Sample inputs")


def _channels(values: _Array) -> NDArray[np.float64]:
    return np.atleast_2d(values).astype(np.float64)[:MOST_CHANNELS]


def _extent(arrays: Sequence[_Array]) -> tuple[float, float]:
    numbers = [np.asarray(array, dtype=np.float64) for array in arrays]
    return float(min(one.min() for one in numbers)), float(max(one.max() for one in numbers))


def _pngs(arrays: Sequence[_Array]) -> list[str]:
    """Data URIs, as large as the room for all of them allows."""
    low, high = _extent(arrays)
    sources: list[str] = []
    for side in SIDES:
        sources = [_png(values, low, high, side) for values in arrays]
        if sum(map(len, sources)) <= MOST_BYTES:
            break
    return sources


def _png(values: _Array, low: float, high: float, most: int) -> str:
    """8-bit images as they are, others scaled to their common range; at most so many pixels on the longer side."""
    from PIL import Image

    planes = values if values.shape[0] in (1, 3) else values[:1]
    if planes.dtype != np.uint8:
        scaled = (planes.astype(np.float64) - low) * (255 / ((high - low) or 1.0))
        planes = np.rint(scaled).clip(0, 255).astype(np.uint8)
    array = np.ascontiguousarray(np.moveaxis(planes, 0, -1))
    image = Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array)
    longest = max(image.size)
    if longest > most:
        width, height = (max(1, round(side * most / longest)) for side in image.size)
        image = image.resize((width, height), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
