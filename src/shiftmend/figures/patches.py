"""What one filter of a convolution looks for: the image patches that excite it most (section 5.5)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shiftmend.devices import placed, resolve_device
from shiftmend.errors import DataError, TapError
from shiftmend.feeds import Feed, Preprocess
from shiftmend.figures import style
from shiftmend.figures.measuring import watched
from shiftmend.histograms import Bins, soft_histogram
from shiftmend.statistics import Histogram
from shiftmend.taps import Tap, check_takes, eager, modes, unwrap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BARS = 50


@dataclass(frozen=True)
class Field:
    """What a position `[row, column]` of a feature map sees of the image: pairs are of height and width.

    The window begins at `start + step * position`, which may lie outside the image, in the padding.
    """

    size: tuple[int, int]
    step: tuple[int, int]
    start: tuple[int, int]
    positions: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Finding:
    """The strongest patches `[K, height, width, channels]` in [0, 1], NaN outside the image, and all activations."""

    patches: NDArray[np.float64]
    peaks: NDArray[np.float64]
    values: Tensor


def first_convolution(model: nn.Module, sample: Tensor) -> str:
    """The name of the 2-D convolution that runs first."""
    for name, module, _, _ in _events(unwrap(model), sample):
        if isinstance(module, nn.Conv2d):
            return name
    raise TapError("no 2-D convolution runs in the model, so there are no filters whose patches could be shown")


def receptive_field(model: nn.Module, layer: str, sample: Tensor) -> Field:
    """What each position of a convolution's output sees, from the layers that run before it.

    They must form a chain of convolutions, pooling and layers that keep the shape. A shortcut that keeps the shape, as
    in a plain residual block, does no harm: it sees less than what it goes around.
    """
    plain = unwrap(model)
    modules = dict(plain.named_modules())
    if not isinstance(modules.get(layer), nn.Conv2d):
        known = [name for name, module in modules.items() if isinstance(module, nn.Conv2d)]
        hint = f"; its 2-D convolutions are {', '.join(map(repr, known[:6]))}" if known else ", which has none"
        raise TapError(f"{layer!r} is no 2-D convolution of the model{hint}")
    size, step, start = [1, 1], [1, 1], [0, 0]
    before = sample.shape
    for name, module, read, written in _events(plain, sample):
        window = _window(module)
        if read != before or (window is None and written != read):
            raise TapError(
                f"what {layer!r} sees of an image cannot be told: {name!r} below it breaks the plain chain of "
                "convolutions and pooling; choose an earlier layer"
            )
        before = written
        if window is not None:
            for axis, (kernel, stride, padding, dilation) in enumerate(window):
                start[axis] -= padding * step[axis]
                size[axis] += dilation * (kernel - 1) * step[axis]
                step[axis] *= stride
        if name == layer:
            return Field(_pair(size), _pair(step), _pair(start), _pair(list(written[-2:])))
    raise TapError(f"the convolution {layer!r} does not run in a forward pass of the model")


def cut(image: Tensor, field: Field, row: int, column: int) -> NDArray[np.float64]:
    """The window `[height, width, channels]` that a position sees; NaN where it lies outside the image `[C, H, W]`."""
    patch = np.full((*field.size, image.shape[0]), np.nan)
    top, left = (field.start[axis] + field.step[axis] * at for axis, at in enumerate((row, column)))
    rows = slice(max(0, top), max(0, min(image.shape[1], top + field.size[0])))
    columns = slice(max(0, left), max(0, min(image.shape[2], left + field.size[1])))
    inside = image[:, rows, columns].permute(1, 2, 0).double().cpu().numpy()
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
    with placed(unwrap(model), feed.device):
        check_takes(unwrap(model), ready(first))
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
    return float(home.mean_divergence(home.of(target.unsqueeze(1))))


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
        with placed(unwrap(model), place):
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


def _events(model: nn.Module, sample: Tensor) -> list[tuple[str, nn.Module, torch.Size, torch.Size]]:
    """The innermost modules in the order in which they run, with the shapes of what they read and wrote."""
    events: list[tuple[str, nn.Module, torch.Size, torch.Size]] = []

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            shapes = [part.shape if isinstance(part, Tensor) else torch.Size() for part in (*args[:1], output)]
            events.append((name, module, shapes[0], shapes[-1]))

        return hook

    with ExitStack() as stack:
        for context in (torch.no_grad(), modes(model), eager(model)):
            stack.enter_context(context)
        model.eval()
        for name, module in model.named_modules():
            inside = [child for child, _ in module.named_children() if child != "parametrizations"]
            if not inside and "parametrizations" not in name.split("."):
                stack.callback(module.register_forward_hook(note(name)).remove)
        model(sample)
    return events


def _window(module: nn.Module) -> list[tuple[int, int, int, int]] | None:
    """Kernel, stride, padding in front and dilation, of height and width; None for what has no window."""
    if isinstance(module, nn.Conv2d):
        before = module._reversed_padding_repeated_twice  # also of padding="same"; the last axis comes first
        paddings = (int(before[2]), int(before[0]))
        return list(zip(module.kernel_size, module.stride, paddings, module.dilation, strict=True))
    if isinstance(module, nn.MaxPool2d | nn.AvgPool2d):
        kernel, padding = _both(module.kernel_size), _both(module.padding)
        stride = _both(module.stride)
        dilation = _both(module.dilation) if isinstance(module, nn.MaxPool2d) else (1, 1)
        return list(zip(kernel, stride, padding, dilation, strict=True))
    return None


def _both(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _pair(values: list[int]) -> tuple[int, int]:
    return values[0], values[1]
