"""What one filter of a convolution looks for: the image patches that excite it most (section 5.5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shiftmend.errors import DataError
from shiftmend.inputs.feed import Feed, Preprocess
from shiftmend.introspection.model_state import on_device
from shiftmend.introspection.taps import Tap
from shiftmend.introspection.validate import check_model, unwrap
from shiftmend.research.figures import style
from shiftmend.research.figures.measuring import watched
from shiftmend.research.figures.receptive_fields import Field, first_convolution, receptive_field
from shiftmend.stats.histograms import Bins, Histogram, soft_histogram
from shiftmend.utils.devices import resolve_device

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BARS = 50


@dataclass(frozen=True, eq=False)
class Finding:
    """The strongest patches `[K, height, width, channels]` in [0, 1], NaN outside the image, and all activations."""

    patches: NDArray[np.float64]
    peaks: NDArray[np.float64]
    values: Tensor


def cut(image: Tensor, field: Field, row: int, column: int) -> NDArray[np.float64]:
    """The window `[height, width, channels]` that a position sees; NaN where it lies outside the image `[C, H, W]`."""
    patch = np.full((*field.size, image.shape[0]), np.nan)
    top, left = (field.start[axis] + field.step[axis] * at for axis, at in enumerate((row, column)))
    rows = slice(max(0, top), max(0, min(image.shape[1], top + field.size[0])))
    columns = slice(max(0, left), max(0, min(image.shape[2], left + field.size[1])))
    inside = image[:, rows, columns].permute(1, 2, 0).cpu().double().numpy()
    patch[max(0, -top) : max(0, -top) + inside.shape[0], max(0, -left) : max(0, -left) + inside.shape[1]] = inside
    return patch


def strongest(
    model: nn.Module,
    feed: Feed,
    preprocess: Preprocess | None,
    layer: str,
    number: int,
    *,
    count: int = 4,
    samples: int = 2000,
    seed: int = 0,
) -> Finding:
    """The patches at which filter `number` is largest, one an image, of up to `samples` images of a raw feed.

    Patches are of the stored images; where preprocessing changes their size, of what it makes of them.
    """

    def ready(raw: Tensor) -> Tensor:
        return raw if preprocess is None else preprocess(raw.clone())

    best: list[tuple[float, NDArray[np.float64]]] = []
    values: list[Tensor] = []
    low, high = np.inf, -np.inf
    first = feed.first(2)
    if ready(first).ndim != 4:
        raise DataError(f"patches are cut from images [N, channels, height, width], got {list(ready(first).shape)}")
    with on_device(unwrap(model), feed.device):
        check_model(unwrap(model), [ready(first)])
        field = receptive_field(model, layer, ready(first))
    with watched(model, feed.device, {layer: Tap(layer, layer)}) as (running, recorder):
        for raw in feed.subset(samples, seed):
            inputs = ready(raw)
            running(inputs)
            tapped = recorder.read()[layer]
            if not 0 <= number < tapped.shape[1]:
                raise DataError(f"{layer!r} has filters 0 to {tapped.shape[1] - 1}, got {number}")
            maps = tapped[:, number].reshape(len(inputs), *field.positions)
            if not bool(maps.isfinite().all()):
                raise DataError(f"the model gives NaN or infinite values at {layer!r} on the {feed.what}")
            values.append(maps.flatten().float().cpu())
            shown = raw if raw.shape[-2:] == inputs.shape[-2:] else inputs
            low, high = min(low, float(shown.min())), max(high, float(shown.max()))
            peaks, at = maps.flatten(1).max(1)
            for index in peaks.argsort(descending=True)[:count].tolist():
                row, column = divmod(int(at[index]), field.positions[1])
                best.append((float(peaks[index]), cut(shown[index], field, row, column)))
            best = sorted(best, key=lambda pair: -pair[0])[:count]
    if first.dtype == torch.uint8 or (low >= 0 and high <= 1):
        low, high = (0.0, 255.0) if first.dtype == torch.uint8 and high > 1 else (0.0, 1.0)
    scaled = (np.stack([patch for _, patch in best]) - low) / max(high - low, 1e-12)
    return Finding(scaled, np.array([peak for peak, _ in best]), torch.cat(values))


def divergence(source: Tensor, target: Tensor) -> float:
    """PSI between all activations of a filter, in bins over the source's range."""
    bins = Bins()
    low, high = source.amin().reshape(1), source.amax().reshape(1)
    counts = soft_histogram(source.unsqueeze(1), low, high, bins) * len(source)
    home = Histogram(counts, low, high, len(source), bins)
    return float(home.mean_divergence(home.count(target.unsqueeze(1))))


def draw(
    model: nn.Module,
    source: Any,
    target: Any,
    adapted: nn.Module | None = None,
    *,
    layer: str | None = None,
    number: int = 0,
    count: int = 4,
    samples: int = 2000,
    seed: int = 0,
    batch_size: int | None = None,
    preprocess: Preprocess | None = None,
    device: str | torch.device = "auto",
) -> Figure:
    """Patches above, the distribution of all activations below: source, target before and after adapting.

    `layer` is a convolution, the first one if none is named, and `number` its filter, counted from 0. At most
    `samples` images of either site are looked at. Hatched parts of a patch lie outside its image. Where normalisation
    follows, adapting need not bring the raw output of a filter back; the paper's figure aligned the layer itself, as
    `shiftmend.adapt(..., align=(layer,))` does with a profile that has a tap there.
    """
    if count < 1 or samples < count:
        raise DataError(f"{count} patches cannot be found in {samples} images; ask for at least one of as many images")
    place = resolve_device(device, unwrap(model))
    feeds = [
        Feed(data, batch_size=batch_size, device=place, what=what)
        for data, what in ((source, "source data"), (target, "target data"))
    ]
    few = min(feeds, key=lambda feed: feed.samples)
    if few.samples < count:
        raise DataError(f"the {few.what} has {few.samples} images, too few for {count} patches, one an image")
    if layer is None:
        sample = feeds[0].first(2)
        with on_device(unwrap(model), place):
            layer = first_convolution(model, sample if preprocess is None else preprocess(sample))
    columns = [("source", model, feeds[0], style.SOURCE), ("target before adapting", model, feeds[1], style.TARGET)]
    if adapted is not None:
        columns.append(("target after adapting", adapted, feeds[1], style.ADAPTED))
    found = [
        strongest(one, feed, preprocess, layer, number, count=count, samples=samples, seed=seed)
        for _, one, feed, _ in columns
    ]
    figure, axes = style.canvas(2, len(columns), width=2.4, height=1.7)
    if float(found[0].values.min()) == float(found[0].values.max()):
        raise DataError(f"filter {number} of {layer!r} gives one and the same value on the source; choose another")
    edges = np.linspace(
        min(float(one.values.min()) for one in found), max(float(one.values.max()) for one in found), _BARS + 1
    )
    home = np.histogram(found[0].values, edges)[0] / len(found[0].values)
    for at, ((title, _, _, ink), finding) in enumerate(zip(columns, found, strict=True)):
        _show(axes[0, at], finding.patches)
        axes[0, at].set_title(title, fontsize=9)
        axis = axes[1, at]
        axis.stairs(home, edges, fill=True, color=style.SOURCE, alpha=0.35)
        if at:
            here = np.histogram(finding.values, edges)[0] / len(finding.values)
            axis.stairs(here, edges, color=ink, linewidth=1.5)
            written = f"divergence {divergence(found[0].values, finding.values):.2f}"
            axis.set_title(written, color=style.ink(ink), fontsize=8, pad=2)
        axis.set_yscale("log")
        axis.set_xlabel("activation", fontsize=8)
        axis.sharey(axes[1, 0])
    axes[1, 0].set_ylabel("share of positions", fontsize=8)
    figure.suptitle(
        f"Patches that excite filter {number} of {layer} most, and how its response is distributed", fontsize=9
    )
    return figure


def _show(axis: Any, patches: NDArray[np.float64]) -> None:
    """Patches side by side in a square of their own, hatched where there is no image."""
    from matplotlib.patches import Rectangle

    across = int(np.ceil(np.sqrt(len(patches))))
    for index, patch in enumerate(patches):
        row, column = divmod(index, across)
        left, bottom = column * 1.08, -row * 1.08
        extent = (left, left + 1, bottom, bottom + 1)
        axis.add_patch(Rectangle((left, bottom), 1, 1, facecolor="white", edgecolor="0.6", hatch="/////", linewidth=0))
        axis.imshow(_painted(patch), extent=extent, interpolation="nearest", zorder=2)
        axis.add_patch(Rectangle((left, bottom), 1, 1, fill=False, edgecolor="0.4", linewidth=0.6, zorder=3))
    axis.set_xlim(-0.04, across * 1.08 - 0.04)
    axis.set_ylim(-((len(patches) - 1) // across) * 1.08 - 0.04, 1.04)
    axis.set_aspect("equal")
    axis.axis("off")


def _painted(patch: NDArray[np.float64]) -> NDArray[np.float64]:
    """Red, green, blue and opacity; other than three channels are shown as grey, by their mean."""
    colour = patch if patch.shape[2] == 3 else patch.mean(2, keepdims=True).repeat(3, axis=2)
    opaque = np.isfinite(colour[..., :1])
    return np.concatenate([np.where(opaque, colour, 0).clip(0, 1), opaque], axis=2)
