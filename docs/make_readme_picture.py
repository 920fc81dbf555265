"""Run the demo and draw the picture of the README from its first device: `python docs/make_readme_picture.py`."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from safetensors.torch import load_file
from torch import Tensor

from shiftmend import demo, shifts
from shiftmend.demo.network import DigitReader
from shiftmend.introspection.input_map import load_adapted_state
from shiftmend.utils.files import write_atomically
from shiftmend.verification.estimate import Estimate

OUT = Path(__file__).parent / "images" / "before-after.png"
RIGHT, WRONG = "#0072b2", "#d55e00"  # for every kind of colour vision
SHOWN = 14


def draw(images: Tensor, labels: Tensor, before: Tensor, after: Tensor, row: demo.Row) -> Figure:
    """Draw some digits with both readings above the accuracies, estimated and true."""
    figure = plt.figure(figsize=(9, 3.2), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[1, 1])
    for column, axis in enumerate(above.subplots(1, SHOWN)):
        axis.imshow(images[column, 0], cmap="gray", vmin=0, vmax=255)
        axis.set(xticks=[], yticks=[])
        for height, read in ((-0.25, before), (-0.62, after)):
            right = bool(read[column] == labels[column])
            axis.text(
                *(0.5, height, str(int(read[column]))),
                transform=axis.transAxes,
                ha="center",
                va="center",
                color=RIGHT if right else WRONG,
                weight="bold" if right else "normal",
                size=13,
            )
            if column == 0:
                title = "before" if read is before else "after"
                axis.text(-0.35, height, title, transform=axis.transAxes, ha="right", va="center", size=11)
    above.suptitle(f"A digit reader behind another device: {row.device}. Blue is right, orange is wrong.", size=12)
    axis = below.subplots()
    _draw_row(axis, 1, row.estimated_before, row.true_before)
    _draw_row(axis, 0, row.estimated_after, row.true_after)
    axis.set(
        yticks=[0, 1], yticklabels=["after", "before"], xlim=(20, 110), ylim=(-0.6, 1.6), xlabel="accuracy, percent"
    )
    axis.set_xticks(range(20, 101, 20))
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_row(axis: Axes, height: int, told: Estimate, truth: float) -> None:
    """Draw an estimate with its interval beside the truth."""
    axis.plot(100 * truth, height, "D", color="black")
    assert told.low is not None
    assert told.high is not None
    low, high = 100 * told.low, 100 * told.high
    axis.plot([low, high], [height, height], color=RIGHT, lw=6, alpha=0.4, solid_capstyle="butt")
    if told.value is not None:
        axis.plot(100 * told.value, height, "o", color=RIGHT)
    said = str(told).partition(":")[0].replace("accuracy", "estimated without labels:")
    axis.text(low - 1.2, height, said, ha="right", va="center")
    axis.text(max(high, 100 * truth) + 1.2, height, f"true {100 * truth:.1f} %", ha="left", va="center")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = demo.run(Path(folder), say=print)
        weights = load_file(Path(folder) / "mended" / "model.safetensors")
    torch.set_num_threads(1)
    source, _, site = demo.split_digits(0)
    assert source.labels is not None
    assert site.labels is not None
    lesson = demo.LESSONS[0]
    images = shifts.apply(lesson.shift, site.images, severity=lesson.severity, seed=0)
    model = demo.train_source(source.images, source.labels, 0, lambda: None)
    mended = DigitReader().eval()
    load_adapted_state(mended, weights)
    with torch.no_grad():
        before, after = (one(demo.preprocess(images[:SHOWN])).argmax(1) for one in (model, mended))
    buffer = io.BytesIO()
    draw(images, site.labels, before, after, report.rows[0]).savefig(buffer, format="png", dpi=130)
    write_atomically(OUT, buffer.getvalue())


if __name__ == "__main__":
    main()
