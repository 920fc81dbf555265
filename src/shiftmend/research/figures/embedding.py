"""Where the features of a few classes lie, by t-SNE: the source's, and the target's under each model (section 5.5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shiftmend.errors import DataError
from shiftmend.inputs.feed import Feed, Preprocess
from shiftmend.introspection.model_state import on_device
from shiftmend.introspection.validate import check_model, unwrap
from shiftmend.profiles.profile import Profile
from shiftmend.research.figures import style
from shiftmend.research.figures.measuring import watched
from shiftmend.utils.checks import require
from shiftmend.utils.devices import resolve_device

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEWEST = 10
"""Points of both sites together that t-SNE needs to show anything."""


PERPLEXITY = 30.0


_INKS = ("#0072b2", "#d55e00", "#009e73", "#aa4499", "#997700", "#333333", "#56b4e9", "#882255")


_MARKS = ("o", "s", "^", "D", "v", "P", "X", "<")


def draw(
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
    """One panel for `model` itself, called source-only, and one for each adapted model, named as given.

    `source` and `target` are of (inputs, labels). In each panel are up to `samples` of either, of the chosen classes
    (the first five if none are named): source features as `model` gives them, dark, and target features as the panel's
    model gives them, light. Beside a model's name stands its accuracy over all of `target`.
    """
    place = resolve_device(device, unwrap(model))
    options: dict[str, Any] = {"batch_size": batch_size, "device": place, "preprocess": preprocess}
    feeds = {
        what: Feed(data, what=f"{what} data", **options) for what, data in (("source", source), ("target", target))
    }
    labels = {what: _labels(feed) for what, feed in feeds.items()}
    wanted = _classes(labels, classes)
    if class_names is not None and max(wanted) >= len(class_names):
        raise DataError(f"class {max(wanted)} has no name: {len(class_names)} names were given")
    if samples < 1:
        raise DataError(f"at least one sample of either site must be shown, got {samples}")
    chosen = {what: choose(values, wanted, samples, seed) for what, values in labels.items()}
    if sum(map(len, chosen.values())) < FEWEST:
        found = sum(map(len, chosen.values()))
        raise DataError(f"{found} samples of these classes are too few for t-SNE, expected at least {FEWEST}")
    home, _ = features(model, feeds["source"], profile, chosen["source"], all_scored=False)
    panels = [("source-only", model), *adapted.items()]
    figure, axes = style.canvas(1, len(panels), width=2.3, height=2.5)
    for axis, (title, one) in zip(axes[0], panels, strict=True):
        away, accuracy = features(one, feeds["target"], profile, chosen["target"])
        places = embed(home, away, seed)
        of_source, of_target = labels["source"][chosen["source"]], labels["target"][chosen["target"]]
        _scatter(axis, places[: len(home)], places[len(home) :], of_source.numpy(), of_target.numpy(), wanted)
        axis.set_title(f"{title} ({100 * accuracy:.0f} %)", fontsize=9)
    _legend(figure, wanted, class_names)
    return figure


def choose(labels: Tensor, classes: Sequence[int], samples: int, seed: int) -> Tensor:
    """Which samples are shown: up to so many of these classes, at random, in their own order."""
    inside = torch.isin(labels, torch.tensor(list(classes))).nonzero().flatten()
    order = torch.randperm(len(inside), generator=torch.Generator().manual_seed(seed))
    return inside[order[:samples]].sort().values


def features(
    model: nn.Module, feed: Feed, profile: Profile, chosen: Tensor, *, all_scored: bool = True
) -> tuple[NDArray[np.float64], float]:
    """The features of the chosen samples of a labelled feed, and the model's accuracy over all of it.

    Without `all_scored` only the chosen samples run, and the accuracy is theirs.
    """
    profile.check_architecture(unwrap(model))
    kept: list[Tensor] = []
    hits = scored = seen = 0
    with on_device(unwrap(model), feed.device):
        check_model(unwrap(model), [feed.first(2)])
    with watched(model, feed.device, {name: profile.specs[name] for name in ("features", "logits")}) as (
        running,
        recorder,
    ):
        for inputs, labels in feed.labelled_batches():
            here = (chosen[(chosen >= seen) & (chosen < seen + len(inputs))] - seen).to(feed.device)
            seen += len(inputs)
            if not all_scored:
                inputs, labels, here = inputs[here], labels[here], torch.arange(len(here), device=feed.device)
            if len(inputs) == 0:
                continue
            running(inputs)
            values = recorder.read()
            if len(values["features"]) != len(inputs) or len(values["logits"]) != len(inputs):
                raise DataError(
                    "the features or logits are several vectors an input (tokens or positions), where each point needs "
                    "one; profile the model with taps={'features': ...} at a later layer"
                )
            if values["logits"].shape[1] < 2:
                raise DataError("the model gives one number an input: there are no classes to tell apart by colour")
            kept.append(values["features"][here].cpu().double())
            hits += int((values["logits"].argmax(1) == labels).sum())
            scored += len(inputs)
    return torch.cat(kept).numpy(), hits / scored


def embed(source: NDArray[np.float64], target: NDArray[np.float64], seed: int = 0) -> NDArray[np.float64]:
    """Both in two dimensions, the source's rows first.

    Every panel starts from the source's own principal plane, so that its clusters lie alike in all of them. For few
    points the perplexity is a third of their number.
    """
    manifold = require("sklearn.manifold", "research")

    everything = np.concatenate([source, target])
    if not np.isfinite(everything).all():
        raise DataError("the model gives features that are NaN or infinite, which cannot be drawn")
    centre = source.mean(0)
    _, _, axes = np.linalg.svd(source - centre, full_matrices=False)
    start = np.zeros((len(everything), 2))
    plane = (everything - centre) @ axes[:2].T
    start[:, : plane.shape[1]] = 1e-4 * plane / max(float(plane[:, 0].std()), 1e-12)
    perplexity = min(PERPLEXITY, (len(everything) - 1) / 3)
    tsne = manifold.TSNE(perplexity=perplexity, init=start, random_state=seed)
    places: NDArray[np.float64] = tsne.fit_transform(everything)
    return places


def light(ink: str) -> tuple[float, float, float]:
    """The light version of a colour, for the target."""
    red, green, blue = (int(ink[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return tuple(0.45 * part + 0.55 for part in (red, green, blue))  # type: ignore[return-value]


def _labels(feed: Feed) -> Tensor:
    labels = torch.cat([labels for _, labels in feed.labelled_batches()]).cpu()
    if labels.ndim != 1 or labels.is_floating_point():
        raise DataError(f"the {feed.what} must have one class number a sample; other labels have no colours to show")
    return labels.long()


def _classes(labels: Mapping[str, Tensor], classes: Sequence[int] | None) -> list[int]:
    common = sorted(set(labels["source"].tolist()) & set(labels["target"].tolist()))
    wanted = list(dict.fromkeys(int(one) for one in classes)) if classes is not None else common[:5]
    missing = [one for one in wanted if one not in common]
    if missing:
        raise DataError(f"class {missing[0]} has no samples in both the source and the target data")
    if not 2 <= len(wanted) <= len(_INKS):
        raise DataError(f"t-SNE shows how classes lie apart: expected 2 to {len(_INKS)} classes, got {len(wanted)}")
    return wanted


def _scatter(
    axis: Any,
    source: NDArray[np.float64],
    target: NDArray[np.float64],
    source_labels: NDArray[np.int64],
    target_labels: NDArray[np.int64],
    classes: Sequence[int],
) -> None:
    for number, ink, mark in zip(classes, _INKS, _MARKS, strict=False):
        far, near = target[target_labels == number], source[source_labels == number]
        axis.scatter(far[:, 0], far[:, 1], s=9, marker=mark, color=[light(ink)], linewidths=0, label=f"target {number}")
        axis.scatter(
            near[:, 0], near[:, 1], s=9, marker=mark, color=ink, linewidths=0, zorder=3, label=f"source {number}"
        )
    axis.set_xticks([])
    axis.set_yticks([])
    axis.spines[:].set_visible(True)
    axis.spines[:].set_color("0.8")


def _legend(figure: Figure, classes: Sequence[int], names: Sequence[str] | None) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.lines import Line2D

    pairs: list[Any] = []
    titles = []
    for number, ink, mark in zip(classes, _INKS, _MARKS, strict=False):
        dots: Any = {"marker": mark, "linestyle": "", "markersize": 5, "markeredgewidth": 0}
        pairs.append((Line2D([], [], color=ink, **dots), Line2D([], [], color=light(ink), **dots)))
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
