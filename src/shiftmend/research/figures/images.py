"""Figures of images: a contact sheet of shifts, and the patches that excite a filter most (section 5.5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from shiftmend.errors import DataError, TapError
from shiftmend.inputs.feed import Feed, Preprocess
from shiftmend.introspection.model_state import on_device
from shiftmend.introspection.modes import force_eager, preserve_modes
from shiftmend.introspection.taps import Tap
from shiftmend.introspection.validate import check_model, unwrap
from shiftmend.passes.evaluation_pass import Observation, run_pass
from shiftmend.research.figures import style
from shiftmend.stats.histograms import Bins, Histogram, soft_histogram
from shiftmend.utils.devices import resolve_device
from shiftmend.utils.tensor_tree import Inputs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GAP_PIXELS = 2
"""White margin in pixels around each image of a contact sheet."""

_BARS = 50


# ---- contact sheet


def draw_sheet(rows: Mapping[str, Tensor], title: str = "") -> Figure:
    """Draw the same images under several shifts, one row each.

    Args:
        rows: uint8 images `[N, 1 or 3, H, W]` of each row, by its name.
        title: title of the figure.
    """
    if not rows or any(images.ndim != 4 or len(images) == 0 for images in rows.values()):
        raise DataError("Expected rows of images [N, C, H, W] with at least one image each, got none or another shape.")
    most = max(len(images) for images in rows.values())
    figure, axes = style.make_canvas(len(rows), 1, width=0.55 * most + 1.4, height=0.6)
    for axis, (name, images) in zip(axes[:, 0], rows.items(), strict=True):
        axis.imshow(_join_images(images).numpy(), interpolation="nearest")
        axis.set_ylabel(style.to_words(name), rotation=0, ha="right", va="center", fontsize=style.SMALL)
        axis.set_xticks([])
        axis.set_yticks([])
        axis.grid(False)
        axis.spines[:].set_visible(False)
    if title:
        style.add_title(figure, title)
    return figure


def _join_images(images: Tensor) -> Tensor:
    """Join images `[N, 1 or 3, H, W]` side by side, with white margins, into one image `[height, width, 3]`."""
    colour = images.cpu().expand(-1, 3, -1, -1) if images.shape[1] == 1 else images.cpu()
    apart = functional.pad(colour, (GAP_PIXELS,) * 4, value=255)
    return apart.permute(2, 0, 3, 1).reshape(apart.shape[2], -1, 3)


# ---- patches


@dataclass(frozen=True, eq=False)
class Responses:
    """Responses of one filter: its strongest patches `[K, height, width, channels]` and all of its activations.

    Patches lie in [0, 1], with NaN outside the image.
    """

    patches: NDArray[np.float64]
    peaks: NDArray[np.float64]
    values: Tensor


def draw_patches(
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
    """Draw the patches that excite a filter most, and below them the distribution of all its activations.

    Columns are the source, and the target before and after adapting. Hatched parts of a patch lie outside its image.
    Where normalisation follows, adapting need not bring the raw output of a filter back. The paper's figure aligned
    the layer itself, as `shiftmend.adapt(..., align=(layer,))` does with a profile that has a tap there.

    Args:
        model: The untouched model.
        source: images of the source.
        target: images of the target.
        adapted: the adapted model.
        layer: name of a convolution, by default the first that runs.
        number: Index of the filter.
        count: Number of patches in a column, at most one per image.
        samples: Largest number of images per site.
        seed: seed of the choice of images.
        batch_size: Number of samples per batch.
        preprocess: Function applied to each batch of inputs on the device, before the model.
        device: Device to compute on.
    """
    place = resolve_device(device, unwrap(model))
    feeds = [
        Feed(data, batch_size=batch_size, device=place, what=what)
        for data, what in ((source, "source data"), (target, "target data"))
    ]
    if layer is None:
        sample = _images(feeds[0].first(2))
        with on_device(unwrap(model), place):
            layer = first_convolution(model, sample if preprocess is None else preprocess(sample))
    columns = [("source", model, feeds[0], style.SOURCE), ("target before adapting", model, feeds[1], style.TARGET)]
    if adapted is not None:
        columns.append(("target after adapting", adapted, feeds[1], style.ADAPTED))
    found = [
        find_strongest(each, feed, preprocess, layer, number, count=count, samples=samples, seed=seed)
        for _, each, feed, _ in columns
    ]
    if float(found[0].values.min()) == float(found[0].values.max()):
        raise DataError(f"Expected a filter that varies on the source, got {number} of {layer!r}. Try another.")
    figure, axes = style.make_canvas(2, len(columns), width=2.4, height=1.7)
    edges = np.linspace(
        min(float(each.values.min()) for each in found), max(float(each.values.max()) for each in found), _BARS + 1
    )
    home = np.histogram(found[0].values, edges)[0] / len(found[0].values)
    for at, ((title, _, _, shade), responses) in enumerate(zip(columns, found, strict=True)):
        _show_patches(axes[0, at], responses.patches)
        axes[0, at].set_title(title, fontsize=9)
        axis = axes[1, at]
        axis.stairs(home, edges, fill=True, color=style.SOURCE, alpha=0.35)
        if at:
            here = np.histogram(responses.values, edges)[0] / len(responses.values)
            axis.stairs(here, edges, color=shade, linewidth=1.5)
            written = f"divergence {measure_divergence(found[0].values, responses.values):.2f}"
            axis.set_title(written, color=style.darken(shade), fontsize=8, pad=2)
        axis.set_yscale("log")
        axis.set_xlabel("activation", fontsize=8)
        axis.sharey(axes[1, 0])
    axes[1, 0].set_ylabel("share of positions", fontsize=8)
    figure.suptitle(
        f"Patches that excite filter {number} of {layer} most, and how its response is distributed", fontsize=9
    )
    return figure


def find_strongest(
    model: nn.Module,
    feed: Feed,
    preprocess: Preprocess | None,
    layer: str,
    number: int,
    *,
    count: int = 4,
    samples: int = 2000,
    seed: int = 0,
) -> Responses:
    """Find the patches with the largest response of a filter, at most one of each of `samples` images.

    Patches are cut from the stored images; where preprocessing changes their size, from the preprocessed ones.
    """

    def prepare(raw: Tensor) -> Tensor:
        return raw if preprocess is None else preprocess(raw.clone())

    best: list[tuple[float, NDArray[np.float64]]] = []
    values: list[Tensor] = []
    low, high = np.inf, -np.inf
    first = _images(feed.first(2))
    ready = prepare(first)
    if ready.ndim != 4:
        raise DataError(f"Expected images [N, channels, height, width], got {list(ready.shape)}.")
    raw = first

    def prepare_batches() -> Iterator[tuple[Tensor, None]]:
        nonlocal raw
        for batch in feed.subset(samples, seed):
            raw = _images(batch)
            yield prepare(raw), None

    def update(seen: Observation) -> None:
        nonlocal low, high, best
        activations, inputs = seen.activations[layer], _images(seen.inputs)
        if not 0 <= number < activations.shape[1]:
            raise DataError(f"Expected one of filters 0 to {activations.shape[1] - 1} of {layer!r}, got {number}.")
        maps = activations[:, number].reshape(len(inputs), *field.positions)
        if not bool(maps.isfinite().all()):
            raise DataError(f"Expected finite activations at {layer!r} on the {feed.what}, got others.")
        values.append(maps.flatten().float().cpu())
        shown = raw if raw.shape[-2:] == inputs.shape[-2:] else inputs
        low, high = min(low, float(shown.min())), max(high, float(shown.max()))
        peaks, at = maps.flatten(1).max(1)
        for index in peaks.argsort(descending=True)[:count].tolist():
            row, column = divmod(int(at[index]), field.positions[1])
            best.append((float(peaks[index]), cut_patch(shown[index], field, row, column)))
        best = sorted(best, key=lambda pair: -pair[0])[:count]

    plain = unwrap(model)
    with on_device(plain, feed.device):
        check_model(plain, [ready])
        field = receptive_field(plain, layer, ready)
        run_pass(plain, prepare_batches(), update, taps={layer: Tap(layer, layer)})
    if first.dtype == torch.uint8 or (low >= 0 and high <= 1):
        low, high = (0.0, 255.0) if first.dtype == torch.uint8 and high > 1 else (0.0, 1.0)
    scaled = (np.stack([patch for _, patch in best]) - low) / max(high - low, 1e-12)
    return Responses(scaled, np.array([peak for peak, _ in best]), torch.cat(values))


def cut_patch(image: Tensor, field: ReceptiveField, row: int, column: int) -> NDArray[np.float64]:
    """Cut the window `[height, width, channels]` that a position sees; NaN outside the image `[C, H, W]`."""
    patch = np.full((*field.size, image.shape[0]), np.nan)
    top, left = (field.start[axis] + field.step[axis] * at for axis, at in enumerate((row, column)))
    rows = slice(max(0, top), max(0, min(image.shape[1], top + field.size[0])))
    columns = slice(max(0, left), max(0, min(image.shape[2], left + field.size[1])))
    inside = image[:, rows, columns].permute(1, 2, 0).cpu().double().numpy()
    patch[max(0, -top) : max(0, -top) + inside.shape[0], max(0, -left) : max(0, -left) + inside.shape[1]] = inside
    return patch


def measure_divergence(source: Tensor, target: Tensor) -> float:
    """Measure the PSI between all activations of a filter, in bins over the source's range."""
    bins = Bins()
    low, high = source.amin().reshape(1), source.amax().reshape(1)
    counts = soft_histogram(source.unsqueeze(1), low, high, bins) * len(source)
    home = Histogram(counts, low, high, len(source), bins)
    return float(home.mean_divergence(home.count(target.unsqueeze(1))))


def _show_patches(axis: Any, patches: NDArray[np.float64]) -> None:
    """Show patches in a square grid, hatched where there is no image."""
    from matplotlib.patches import Rectangle

    across = int(np.ceil(np.sqrt(len(patches))))
    for index, patch in enumerate(patches):
        row, column = divmod(index, across)
        left, bottom = column * 1.08, -row * 1.08
        extent = (left, left + 1, bottom, bottom + 1)
        axis.add_patch(Rectangle((left, bottom), 1, 1, facecolor="white", edgecolor="0.6", hatch="/////", linewidth=0))
        axis.imshow(_to_rgba(patch), extent=extent, interpolation="nearest", zorder=2)
        axis.add_patch(Rectangle((left, bottom), 1, 1, fill=False, edgecolor="0.4", linewidth=0.6, zorder=3))
    axis.set_xlim(-0.04, across * 1.08 - 0.04)
    axis.set_ylim(-((len(patches) - 1) // across) * 1.08 - 0.04, 1.04)
    axis.set_aspect("equal")
    axis.axis("off")


def _to_rgba(patch: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return red, green, blue and opacity; other than three channels are shown as grey, by their mean."""
    colour = patch if patch.shape[2] == 3 else patch.mean(2, keepdims=True).repeat(3, axis=2)
    opaque = np.isfinite(colour[..., :1])
    return np.concatenate([np.where(opaque, colour, 0).clip(0, 1), opaque], axis=2)


# ---- receptive fields


@dataclass(frozen=True)
class ReceptiveField:
    """The window of the image that a position `[row, column]` of a feature map sees; pairs are height and width.

    The window begins at `start + step * position`, which may lie outside the image, in the padding.
    """

    size: tuple[int, int]
    step: tuple[int, int]
    start: tuple[int, int]
    positions: tuple[int, int]


def first_convolution(model: nn.Module, sample: Tensor) -> str:
    """Return the name of the 2-D convolution that runs first."""
    for name, module, _, _ in _trace_shapes(unwrap(model), sample):
        if isinstance(module, nn.Conv2d):
            return name
    raise TapError("Expected a model with filters to show, got no 2-D convolution.")


def receptive_field(model: nn.Module, layer: str, sample: Tensor) -> ReceptiveField:
    """Find the receptive field of a convolution's output positions, by running the model on one batch.

    The layers below must form a chain of convolutions, pooling and layers that keep the shape. A shortcut that keeps
    the shape, as in a plain residual block, does no harm: it sees less than the layers it goes around.
    """
    plain = unwrap(model)
    modules = dict(plain.named_modules())
    if not isinstance(modules.get(layer), nn.Conv2d):
        known = [name for name, module in modules.items() if isinstance(module, nn.Conv2d)]
        hint = f". Try {', '.join(map(repr, known[:6]))}" if known else ". The model has none"
        raise TapError(f"Expected the name of a 2-D convolution, got {layer!r}{hint}")
    size, step, start = [1, 1], [1, 1], [0, 0]
    before = sample.shape
    for name, module, read, written in _trace_shapes(plain, sample):
        window = _window_of(module)
        if read != before or (window is None and written != read):
            raise TapError(
                f"Expected a chain of convolutions and pooling below {layer!r}, got {name!r}, which breaks it. "
                "Try an earlier layer."
            )
        before = written
        if window is not None:
            for axis, (kernel, stride, padding, dilation) in enumerate(window):
                start[axis] -= padding * step[axis]
                size[axis] += dilation * (kernel - 1) * step[axis]
                step[axis] *= stride
        if name == layer:
            return ReceptiveField(*((pair[0], pair[1]) for pair in (size, step, start, written[-2:])))
    raise TapError(f"Expected a convolution that runs in a forward pass, got {layer!r}, which does not.")


def _trace_shapes(model: nn.Module, sample: Tensor) -> list[tuple[str, nn.Module, torch.Size, torch.Size]]:
    """List the innermost modules in the order in which they run, with the shapes that they read and wrote."""
    events: list[tuple[str, nn.Module, torch.Size, torch.Size]] = []

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            shapes = [part.shape if isinstance(part, Tensor) else torch.Size() for part in (*args[:1], output)]
            events.append((name, module, shapes[0], shapes[-1]))

        return hook

    with ExitStack() as stack:
        for context in (torch.no_grad(), preserve_modes(model), force_eager(model)):
            stack.enter_context(context)
        model.eval()
        for name, module in model.named_modules():
            inside = [child for child, _ in module.named_children() if child != "parametrizations"]
            if not inside and "parametrizations" not in name.split("."):
                stack.callback(module.register_forward_hook(note(name)).remove)
        model(sample)
    return events


def _window_of(module: nn.Module) -> list[tuple[int, int, int, int]] | None:
    """Return kernel, stride, leading padding and dilation of height and width; None for a module without a window."""
    if isinstance(module, nn.Conv2d):
        # This attribute also knows the padding of padding="same"; the last axis comes first.
        padding = module._reversed_padding_repeated_twice
        paddings = (int(padding[2]), int(padding[0]))
        return list(zip(module.kernel_size, module.stride, paddings, module.dilation, strict=True))
    if isinstance(module, nn.MaxPool2d | nn.AvgPool2d):
        dilation = module.dilation if isinstance(module, nn.MaxPool2d) else 1
        sides = (module.kernel_size, module.stride, module.padding, dilation)
        return list(zip(*((side, side) if isinstance(side, int) else side for side in sides), strict=True))
    return None


def _images(inputs: Inputs) -> Tensor:
    """Return inputs that are one tensor."""
    if not isinstance(inputs, Tensor):
        raise DataError(f"Expected images in one tensor, got {', '.join(inputs.names)}; draw a model of images.")
    return inputs
