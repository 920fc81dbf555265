"""Draw the two figures of `when-it-works.md` and print its numbers: `python docs/make_toy_figures.py`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

import shiftmend
from shiftmend.research.analysis.toys import Toy, offset_toy, rotation_toy
from shiftmend.utils.files import write_atomically

IMAGES = Path(__file__).parent / "images"
NEGATIVE, POSITIVE, GREY = "#D55E00", "#0072B2", "#444444"  # for every kind of colour vision; hatch and markers in grey
SOFT = shiftmend.Bins(temperature=0.1)


def accuracy(toy: Toy, model: nn.Module, site: str) -> float:
    pair = (getattr(toy, f"{site}_inputs"), getattr(toy, f"{site}_labels"))
    return shiftmend.evaluate(model, pair).accuracy


def mend(
    toy: Toy,
    title: str,
    bins: shiftmend.Bins | None = SOFT,
    method: str = "fr",
    positives: float | None = None,
    **options: Any,
) -> shiftmend.Adaptation:
    """Adapt, and print a row of the page's table. With `positives`, the profile is mixed to have that share of them."""
    profile = shiftmend.profile(toy.model, toy.source_inputs, bins=bins)
    if positives is not None:
        parts = [
            shiftmend.profile(toy.model, toy.source_inputs[toy.source_labels == label], like=profile)
            for label in (0, 1)
        ]
        profile = shiftmend.Profile.mixture(parts, [1 - positives, positives])
    options = {"epochs": 40, "learning_rate": 0.01, **options} if method == "fr" else options
    result = shiftmend.adapt(toy.model, toy.target_inputs, profile, method, **options)
    print(
        f"{title:<44} accuracy {accuracy(toy, toy.model, 'target'):.3f} -> {accuracy(toy, result.model, 'target'):.3f}"
        f"   before: {result.before}   after: {result.after}"
    )
    return result


def save(figure: Figure, name: str) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
    plt.close(figure)
    write_atomically(IMAGES / name, buffer.getvalue())


def tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def draw_offset() -> None:
    toy = offset_toy()
    result = mend(toy, "offset 2", bins=None)
    rows = [
        ("source", toy.model, toy.source_inputs, toy.source_labels, "source"),
        ("target, before", toy.model, toy.target_inputs, toy.target_labels, "target"),
        ("target, after FR", result.model, toy.target_inputs, toy.target_labels, "target"),
    ]
    head = toy.model.get_submodule("head")
    weight, bias = head.weight.detach()[1] - head.weight.detach()[0], head.bias.detach()[1] - head.bias.detach()[0]
    boundary = float(-bias / weight)
    figure, panels = plt.subplots(3, 1, figsize=(6.4, 4.4), sharex=True, sharey=True, layout="constrained")
    with torch.no_grad():
        features = [model.get_submodule("extractor")(inputs)[:, 0] for _, model, inputs, _, _ in rows]
    edges = np.linspace(min(map(torch.min, features)).item() - 0.3, max(map(torch.max, features)).item() + 0.3, 70)
    for axes, values, (title, model, _, labels, site) in zip(panels, features, rows, strict=True):
        for label, colour, hatch, name in ((0, NEGATIVE, "////", "L = −1"), (1, POSITIVE, "", "L = +1")):
            axes.hist(
                values[labels == label], edges, color=colour, alpha=0.75, hatch=hatch, edgecolor="white", label=name
            )
        axes.axvline(boundary, color=GREY, linestyle="--", linewidth=1.5)
        axes.set_title(f"{title}: {accuracy(toy, model, site):.1%} right", fontsize=10, loc="left")
        axes.set_yticks([])
        tidy(axes)
    top = 1.3 * panels[0].get_ylim()[1]  # room for the words above the bars
    panels[0].set_ylim(0, top)
    panels[0].text(boundary - 0.06, 0.97 * top, "called negative ◂", ha="right", va="top", fontsize=8, color=GREY)
    panels[0].text(boundary + 0.06, 0.97 * top, "▸ called positive", ha="left", va="top", fontsize=8, color=GREY)
    panels[0].legend(loc="upper right", fontsize=8, frameon=False)
    panels[-1].set_xlabel("feature Z, what the head reads")
    save(figure, "toy-offset.png")


def scatter(axes: Axes, inputs: Tensor, labels: Tensor, model: nn.Module, title: str) -> None:
    grid = torch.linspace(-3.4, 3.4, 150)
    x, y = torch.meshgrid(grid, grid, indexing="xy")
    with torch.no_grad():
        logits = model(torch.stack([x.flatten(), y.flatten()], 1))
    margin = (logits[:, 1] - logits[:, 0]).reshape(x.shape)
    for label, colour, marker in ((0, NEGATIVE, "x"), (1, POSITIVE, "o")):
        part = inputs[labels == label][:250]
        axes.scatter(part[:, 0], part[:, 1], s=9, c=colour, marker=marker, linewidths=0.7, alpha=0.75)
    axes.contour(x, y, margin, levels=[0.0], colors=GREY, linestyles="--", linewidths=1.5)
    axes.set(xlim=(-3.4, 3.4), ylim=(-3.4, 3.4), aspect="equal", xlabel="$X_1$", ylabel="$X_2$")
    axes.set_title(title, fontsize=10, loc="left")
    tidy(axes)


def draw_rotation() -> None:
    toy = rotation_toy()
    mend(toy, "rotation by 90 degrees")
    figure, (home, here, slices) = plt.subplots(1, 3, figsize=(9.2, 3.3), layout="constrained")
    scatter(
        home, toy.source_inputs, toy.source_labels, toy.model, f"source: {accuracy(toy, toy.model, 'source'):.1%} right"
    )
    scatter(
        here, toy.target_inputs, toy.target_labels, toy.model, f"target: {accuracy(toy, toy.model, 'target'):.1%} right"
    )
    handles = [
        plt.Line2D([], [], color=NEGATIVE, marker="x", linestyle="", label="$L_1 < 0$"),
        plt.Line2D([], [], color=POSITIVE, marker="o", linestyle="", label="$L_1 > 0$"),
        plt.Line2D([], [], color=GREY, linestyle="--", label="boundary"),
    ]
    home.legend(handles=handles, fontsize=7, loc="lower left", framealpha=0.9)
    profile = shiftmend.profile(toy.model, toy.source_inputs, bins=SOFT)
    projector, extractor = profile.slices["verification"].projector, toy.model.get_submodule("extractor")
    edges = np.linspace(-3, 3, 28)
    sites = ((toy.source_inputs, "black", "-", 2.6, "source"), (toy.target_inputs, "#E69F00", "--", 1.6, "target"))
    for inputs, colour, style, width, name in sites:
        with torch.no_grad():
            projections = projector(extractor(inputs))[:, :4].numpy()
        for row, values in enumerate(projections.T):
            heights, _ = np.histogram(values, edges, density=True)
            label = name if row == 0 else None
            slices.stairs(
                1.6 * row + heights, edges, baseline=None, color=colour, linestyle=style, linewidth=width, label=label
            )
    slices.set_title("four slices of the features", fontsize=10, loc="left")
    slices.set(xlabel="projection of the features", yticks=[], ylim=(-0.1, 7.0))
    slices.legend(fontsize=7, loc="upper right", ncols=2, framealpha=0.9)
    tidy(slices)
    save(figure, "toy-rotation.png")


def print_the_rest() -> None:
    mend(rotation_toy(180.0), "rotation by 180 degrees")
    mend(offset_toy(), "offset 2, sharp bins", shiftmend.Bins())
    mend(offset_toy(4.0), "offset 4", bins=None)
    mend(offset_toy(4.0), "offset 4, softer bins")
    mend(offset_toy(normalised=True), "offset 2, sharp bins, BatchNorm", bins=None)
    mend(
        offset_toy(0.0, positives=0.9, normalised=True),
        "no offset, 90%, sharp bins, BatchNorm, mixed",
        None,
        positives=0.9,
    )
    mend(offset_toy(normalised=True), "offset 2, BatchNorm, AdaBN", method="adabn")
    for positives in (0.5, 0.7, 0.9):
        toy = offset_toy(0.0, positives=positives, normalised=True)
        mend(toy, f"no offset, {positives:.0%} positives, BatchNorm")
        mend(toy, f"no offset, {positives:.0%} positives, BatchNorm, AdaBN", method="adabn")
        mend(toy, f"no offset, {positives:.0%} positives, BatchNorm, mixed", positives=positives)
    mend(offset_toy(0.0, positives=0.9), "no offset, 90% positives")
    toy = offset_toy(positives=0.9, normalised=True)
    mend(toy, "offset 2, 90% positives, BatchNorm")
    for assumed in (0.7, 0.8, 0.85, 0.9, 0.95, 0.98):
        mend(toy, f"offset 2, 90% positives, BatchNorm, mixed {assumed:.0%}", positives=assumed)


if __name__ == "__main__":
    torch.set_num_threads(1)
    draw_offset()
    draw_rotation()
    print_the_rest()
