"""A figure of features by t-SNE: where the classes of source and target lie under each model (section 5.5)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shiftmend.errors import DataError
from shiftmend.inputs.feed import Feed, Preprocess
from shiftmend.introspection.model_state import on_device
from shiftmend.introspection.validate import check_model, unwrap
from shiftmend.passes.evaluation_pass import Observation, run_pass
from shiftmend.profiles.profile import Profile
from shiftmend.research.figures import style
from shiftmend.utils.checks import require
from shiftmend.utils.devices import resolve_device
from shiftmend.utils.tensor_tree import Inputs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIN_POINTS = 10
"""Smallest number of points of both sites for t-SNE."""

PERPLEXITY = 30.0

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#aa4499", "#997700", "#333333", "#56b4e9", "#882255")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")


def draw_embedding(
    model: nn.Module,
    adapted: Mapping[str, nn.Module],
    source: Any,
    target: Any,
    profile: Profile,
    *,
    classes: Sequence[int] | None = None,
    class_names: Sequence[str] | None = None,
    samples: int = 500,
    seed: int = 0,
    batch_size: int | None = None,
    preprocess: Preprocess | None = None,
    device: str | torch.device = "auto",
) -> Figure:
    """Draw the features of a few classes: a panel for `model`, called source-only, and one for each adapted model.

    Dark points are source features under `model`, light ones target features under the panel's model. Beside a model's
    name stands its accuracy over all of `target`.

    Args:
        model: The untouched model.
        adapted: adapted models by name.
        source: labelled source data, (inputs, labels).
        target: labelled target data, (inputs, labels).
        profile: the profile of the source.
        classes: numbers of the classes to show, by default the first five that both have.
        class_names: the name of every class.
        samples: Largest number of points per site.
        seed: seed of the choice of samples and of t-SNE.
        batch_size: Number of samples per batch.
        preprocess: Function applied to each batch of inputs on the device, before the model.
        device: Device to compute on.
    """
    place = resolve_device(device, unwrap(model))
    options: dict[str, Any] = {"batch_size": batch_size, "device": place, "preprocess": preprocess}
    feeds = {
        what: Feed(data, what=f"{what} data", **options) for what, data in (("source", source), ("target", target))
    }
    labels = {what: _read_labels(feed) for what, feed in feeds.items()}
    wanted = _choose_classes(labels, classes)
    if class_names is not None and max(wanted) >= len(class_names):
        raise DataError(f"Expected a name of class {max(wanted)}, got {len(class_names)} names.")
    chosen = {what: choose_samples(values, wanted, samples, seed) for what, values in labels.items()}
    if sum(map(len, chosen.values())) < MIN_POINTS:
        found = sum(map(len, chosen.values()))
        raise DataError(f"Expected at least {MIN_POINTS} samples of these classes for t-SNE, got {found}.")
    home, _ = read_features(model, feeds["source"], profile, chosen["source"], all_scored=False)
    panels = [("source-only", model), *adapted.items()]
    figure, axes = style.make_canvas(1, len(panels), width=2.3, height=2.5)
    for axis, (title, each) in zip(axes[0], panels, strict=True):
        away, accuracy = read_features(each, feeds["target"], profile, chosen["target"])
        places = embed(home, away, seed)
        of_source, of_target = labels["source"][chosen["source"]], labels["target"][chosen["target"]]
        _scatter_classes(axis, places[: len(home)], places[len(home) :], of_source.numpy(), of_target.numpy(), wanted)
        axis.set_title(f"{title} ({100 * accuracy:.0f} %)", fontsize=9)
    _add_class_legend(figure, wanted, class_names)
    return figure


def choose_samples(labels: Tensor, classes: Sequence[int], samples: int, seed: int) -> Tensor:
    """Choose up to `samples` random samples of these classes, and return their sorted indices."""
    inside = torch.isin(labels, torch.tensor(list(classes))).nonzero().flatten()
    order = torch.randperm(len(inside), generator=torch.Generator().manual_seed(seed))
    return inside[order[:samples]].sort().values


def read_features(
    model: nn.Module, feed: Feed, profile: Profile, chosen: Tensor, *, all_scored: bool = True
) -> tuple[NDArray[np.float64], float]:
    """Return the features of the chosen samples of a labelled feed, and the model's accuracy over all samples.

    Without `all_scored`, only the chosen samples are run and scored.
    """
    plain = unwrap(model)
    profile.check_architecture(plain)
    kept: list[Tensor] = []
    hits = scored = 0
    places: list[int] | slice = slice(None)

    def pick_batches() -> Iterator[tuple[Inputs, Tensor]]:
        nonlocal places
        start = 0
        for inputs, labels in feed.labelled_batches():
            places = (chosen[(chosen >= start) & (chosen < start + len(inputs))] - start).tolist()
            start += len(inputs)
            if all_scored:
                yield inputs, labels
            elif places:
                inputs, labels, places = inputs[places], labels[places], slice(None)
                yield inputs, labels

    def update(seen: Observation) -> None:
        nonlocal hits, scored
        features, logits = seen.activations["features"], seen.activations["logits"]
        if len(features) != len(seen.inputs) or len(logits) != len(seen.inputs):
            raise DataError(
                "Expected one vector of features for each input, got several vectors (tokens or positions). "
                "Try a profile with taps={'features': ...} at a later layer."
            )
        if logits.shape[1] < 2:
            raise DataError("Expected logits of at least two classes, got one number for each input.")
        assert seen.labels is not None
        kept.append(features[places].cpu().double())
        hits += int((logits.argmax(1) == seen.labels).sum())
        scored += len(seen.inputs)

    with on_device(plain, feed.device):
        check_model(plain, [feed.first(2)])
        taps = {name: profile.specs[name] for name in ("features", "logits")}
        run_pass(plain, pick_batches(), update, taps=taps)
    return torch.cat(kept).numpy(), hits / scored


def embed(source: NDArray[np.float64], target: NDArray[np.float64], seed: int = 0) -> NDArray[np.float64]:
    """Embed both sets in two dimensions, with the rows of the source first.

    Every panel starts from the principal plane of the source, so that its clusters are similar in all panels. For few
    points, the perplexity is a third of their number.
    """
    manifold = require("sklearn.manifold", "research")
    everything = np.concatenate([source, target])
    if not np.isfinite(everything).all():
        raise DataError("Expected finite features, got NaN or infinite ones.")
    centre = source.mean(0)
    _, _, axes = np.linalg.svd(source - centre, full_matrices=False)
    start = np.zeros((len(everything), 2))
    plane = (everything - centre) @ axes[:2].T
    start[:, : plane.shape[1]] = 1e-4 * plane / max(float(plane[:, 0].std()), 1e-12)
    perplexity = min(PERPLEXITY, (len(everything) - 1) / 3)
    tsne = manifold.TSNE(perplexity=perplexity, init=start, random_state=seed)
    places: NDArray[np.float64] = tsne.fit_transform(everything)
    return places


def lighten(colour: str) -> tuple[float, float, float]:
    """Return the light version of a colour, for the target."""
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return tuple(0.45 * part + 0.55 for part in (red, green, blue))  # type: ignore[return-value]


def _read_labels(feed: Feed) -> Tensor:
    labels = torch.cat([labels for _, labels in feed.labelled_batches()]).cpu()
    if labels.ndim != 1 or labels.is_floating_point():
        raise DataError(f"Expected one class number for each sample of the {feed.what}, got other labels.")
    return labels.long()


def _choose_classes(labels: Mapping[str, Tensor], classes: Sequence[int] | None) -> list[int]:
    common = sorted(set(labels["source"].tolist()) & set(labels["target"].tolist()))
    wanted = list(dict.fromkeys(int(number) for number in classes)) if classes is not None else common[:5]
    missing = [number for number in wanted if number not in common]
    if missing:
        raise DataError(f"Expected samples of class {missing[0]} in source and target data, got none in one of them.")
    if not 2 <= len(wanted) <= len(_COLOURS):
        raise DataError(f"Expected 2 to {len(_COLOURS)} classes for t-SNE, got {len(wanted)}.")
    return wanted


def _scatter_classes(
    axis: Any,
    source: NDArray[np.float64],
    target: NDArray[np.float64],
    source_labels: NDArray[np.int64],
    target_labels: NDArray[np.int64],
    classes: Sequence[int],
) -> None:
    for number, colour, marker in zip(classes, _COLOURS, _MARKERS, strict=False):
        far, near = target[target_labels == number], source[source_labels == number]
        axis.scatter(
            far[:, 0], far[:, 1], s=9, marker=marker, color=[lighten(colour)], linewidths=0, label=f"target {number}"
        )
        axis.scatter(
            near[:, 0], near[:, 1], s=9, marker=marker, color=colour, linewidths=0, zorder=3, label=f"source {number}"
        )
    axis.set_xticks([])
    axis.set_yticks([])
    axis.spines[:].set_visible(True)
    axis.spines[:].set_color("0.8")


def _add_class_legend(figure: Figure, classes: Sequence[int], names: Sequence[str] | None) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.lines import Line2D

    pairs: list[Any] = []
    titles = []
    for number, colour, marker in zip(classes, _COLOURS, _MARKERS, strict=False):
        dots: Any = {"marker": marker, "linestyle": "", "markersize": 5, "markeredgewidth": 0}
        pairs.append((Line2D([], [], color=colour, **dots), Line2D([], [], color=lighten(colour), **dots)))
        titles.append(names[number] if names is not None else f"class {number}")
    figure.legend(
        pairs,
        titles,
        handler_map={tuple: HandlerTuple(ndivide=None)},
        loc="outside lower center",
        ncols=len(pairs),
        fontsize=8,
        frameon=False,
        title="dark: source, light: target",
        title_fontsize=8,
    )
