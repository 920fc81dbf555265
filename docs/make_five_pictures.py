"""Draw the pictures of `feature-restoration.md` with the demo's network: `python docs/make_five_pictures.py`."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from torch import Tensor, nn

import shiftmend
from shiftmend import demo, shifts
from shiftmend.demo.network import DigitReader
from shiftmend.utils.files import write_atomically

IMAGES = Path(__file__).parent / "images"
HOME, SITE, MENDED = "#0072b2", "#d55e00", "#009e73"  # for every kind of colour vision
SHOWN_FEATURES = 4


def read_features(model: nn.Module, images: Tensor) -> Tensor:
    """Return the activations at the demo's tap `features`, `[N, features]`."""
    seen: list[Tensor] = []
    tap = model.get_submodule(DigitReader.shiftmend_taps["features"])
    hook = tap.register_forward_hook(lambda _, inputs, output: seen.append(output))
    with torch.no_grad():
        model(demo.preprocess(images))
    hook.remove()
    return seen[0]


def draw_inputs(home: Tensor, site: Tensor) -> Figure:
    figure, axes = plt.subplots(2, 6, figsize=(7, 2.5), layout="constrained")
    for row, (images, title) in zip(axes, ((home, "home"), (site, "site")), strict=True):
        for axis, image in zip(row, images, strict=False):
            axis.imshow(image[0], cmap="gray", vmin=0, vmax=255)
            axis.set(xticks=[], yticks=[])
        row[0].set_ylabel(title)
    return figure


def draw_features(home: Tensor, other: Tensor, units: Sequence[int], title: str, colour: str, bins: int) -> Figure:
    figure, axes = plt.subplots(1, len(units), figsize=(9, 2.2), layout="constrained")
    for axis, unit in zip(axes, units, strict=True):
        both = torch.cat([home, other])[:, unit]
        span = np.linspace(float(both.min()), float(both.max()), bins + 1)
        axis.hist(home[:, unit], span, density=True, color=HOME, alpha=0.5, label="home")
        axis.hist(other[:, unit], span, density=True, histtype="step", color=colour, lw=2, label=title)
        axis.set(yticks=[], xlabel=f"feature {unit}")
    axes[0].legend(frameon=False, fontsize=8)
    return figure


def draw_counts(profile: shiftmend.Profile, site: shiftmend.Profile, units: Sequence[int]) -> Figure:
    figure, axes = plt.subplots(1, len(units), figsize=(9, 2.2), layout="constrained")
    stored = {"home": profile.taps["features"].counts, "site": site.taps["features"].counts}
    for axis, unit in zip(axes, units, strict=True):
        for (name, counts), colour, move in zip(stored.items(), (HOME, SITE), (-0.2, 0.2), strict=True):
            shares = counts[unit] / counts[unit].sum()
            axis.bar(torch.arange(len(shares)) + move, shares, 0.4, color=colour, label=name)
        axis.set(yticks=[], xticks=range(0, len(shares), 3), xlabel=f"feature {unit}, bin")
    axes[0].legend(frameon=False, fontsize=8)
    return figure


def draw_history(result: shiftmend.Adaptation) -> Figure:
    figure, axis = plt.subplots(figsize=(7, 2.8), layout="constrained")
    rows = [row for row in result.history if row.loss is not None]
    steps = range(1, len(rows) + 1)
    axis.plot(steps, [row.loss for row in rows], color=HOME, label="alignment loss")
    axis.plot(steps, [row.verification for row in rows], color=MENDED, label="verification slices")
    for step, (row, last) in enumerate(zip(rows[1:], rows[:-1], strict=True), start=2):
        if row.block != last.block:
            axis.axvline(step - 0.5, color="grey", lw=0.8, ls=":")
    axis.set(yscale="log", xlabel="round of 32 steps; dotted: the next block is unfrozen", ylabel="divergence")
    axis.legend(frameon=False)
    return figure


def save(figure: Figure, number: int) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    plt.close(figure)
    write_atomically(IMAGES / f"restoration-{number}.png", buffer.getvalue())


def main() -> None:
    torch.set_num_threads(1)
    source, _, at_home = demo.split_digits(0)
    assert source.labels is not None
    assert at_home.labels is not None
    site = shifts.apply(demo.LESSONS[0].shift, at_home.images, severity=demo.LESSONS[0].severity, seed=0)
    model = demo.train_source(source.images, source.labels, 0, lambda: None)
    profile = shiftmend.profile(model, source.images, preprocess=demo.preprocess, progress=False)
    shifted = shiftmend.profile(model, site, preprocess=demo.preprocess, like=profile, progress=False)
    result = shiftmend.adapt(model, site, profile, "bufr", preprocess=demo.preprocess, progress=False)

    home, before, after = (
        read_features(one, images) for one, images in ((model, at_home.images), (model, site), (result.model, site))
    )
    moved = (before.mean(0) - home.mean(0)).abs() / home.std(0)
    units = sorted(moved.topk(SHOWN_FEATURES).indices.tolist())
    save(draw_inputs(at_home.images, site), 1)
    save(draw_features(home, before, units, "site", SITE, 20), 2)
    save(draw_counts(profile, shifted, units), 3)
    save(draw_history(result), 4)
    save(draw_features(home, after, units, "site, mended", MENDED, 20), 5)
    for name, one in (("before", model), ("after", result.model)):
        print(name, shiftmend.evaluate(one, (site, at_home.labels), preprocess=demo.preprocess).accuracy)


if __name__ == "__main__":
    main()
