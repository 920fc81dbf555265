"""`facts`: run both models over the target once, and put together everything a report says."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shiftmend.adaptation.result import Adaptation
from shiftmend.engine.history import Epoch
from shiftmend.engine.trainer import Keep
from shiftmend.errors import AdaptationError, DataError
from shiftmend.evaluation.classification import ClassificationMetrics, Scores
from shiftmend.evaluation.evaluate import metrics_for
from shiftmend.evaluation.regression import RegressionMetrics, RegressionScores, in_one_shape
from shiftmend.inputs.feed import Feed, Preprocess
from shiftmend.inputs.sources import as_tensor
from shiftmend.introspection.model_state import on_device
from shiftmend.introspection.modes import preserve_modes
from shiftmend.introspection.outputs import Entry, pick
from shiftmend.introspection.taps import attach_taps
from shiftmend.introspection.validate import check_model, unwrap
from shiftmend.profiles import fingerprints
from shiftmend.profiles.fingerprints import InputSummary
from shiftmend.profiles.profile import Profile, as_profile
from shiftmend.stats.divergences import sampling_floor
from shiftmend.stats.histograms import Bins, Histogram
from shiftmend.utils.checks import brief, check_classes
from shiftmend.utils.devices import resolve_device, send, split_rows, sum_dtype
from shiftmend.utils.json import from_strict_json
from shiftmend.utils.rng import isolate_rng
from shiftmend.verification.signals import Tally, class_logits
from shiftmend.verification.verdict import FAILED, RESTORED, Verification, chance_of


@dataclass(frozen=True)
class Seen:
    """How the values of one unit were distributed on the target, with one of the two models."""

    divergence: float
    outside: float
    """Share of its values below the lowest or above the highest one at home."""
    moved: float
    """Difference of its mean to that at home, in parts of the range at home, as far as bins can tell."""
    spread: float
    """Its standard deviation over that at home, as far as bins can tell."""
    shares: tuple[float, ...]


@dataclass(frozen=True)
class Unit:
    number: int
    low: float
    high: float
    home: tuple[float, ...]
    before: Seen
    after: Seen | None


@dataclass(frozen=True)
class TapShift:
    """One tap: every unit's divergence, and the worst of them in full (worst before, and worst after)."""

    name: str
    where: str
    constant: int
    floor: float
    before: tuple[float, ...]
    after: tuple[float, ...] | None
    clear_before: int
    """Units as far from home as would make a verdict "not restored"."""
    clear_after: int | None
    worst: tuple[Unit, ...]

    @property
    def units(self) -> int:
        """Those that varied at home; the constant ones are in no divergence."""
        return len(self.before)

    @property
    def mean_before(self) -> float:
        return sum(self.before) / max(1, len(self.before))

    @property
    def mean_after(self) -> float | None:
        return None if self.after is None else sum(self.after) / max(1, len(self.after))


@dataclass(frozen=True)
class Guesses:
    """The class predictions of one model."""

    counts: tuple[int, ...]
    confidence: float
    histogram: tuple[int, ...]
    """Predictions by confidence, in ten equal steps from 0 to 1."""


@dataclass(frozen=True)
class Predictions:
    total: int
    before: Guesses
    after: Guesses | None
    changed: int | None
    moves: tuple[tuple[int, int, int], ...]
    """The most frequent changes: class before, class after, how many."""


@dataclass(frozen=True)
class Sample:
    """One input as it came, and what it was taken for; the class and its probability."""

    number: int
    values: NDArray[np.generic]
    before: tuple[int, float] | None
    after: tuple[int, float] | None
    label: int | None = None


@dataclass(frozen=True)
class Home:
    """What the profile says about the source."""

    samples: int
    taps: dict[str, tuple[str, int, int]]
    """Place in the model, units, and how many of them were constant."""
    bins: str
    moments: str
    slices: dict[str, int]
    inputs: str
    preset: str
    library: str
    weights: str
    size: int


@dataclass(frozen=True)
class Mending:
    """What was run: the manifest, the history, and where the result lies."""

    manifest: dict[str, Any]
    history: tuple[Epoch, ...]
    file: str | None
    same_data: bool | None
    """Whether the target of this report is the sample that was adapted to; None where that is unknown."""
    floor_per_epoch: float

    @property
    def method(self) -> str:
        return str(self.manifest["method"]["name"])

    @property
    def used_labels(self) -> bool:
        return self.method == "target-supervised"

    @property
    def kept(self) -> int:
        """The epoch that the mended model is from."""
        if self.manifest["kept"] == "selected":
            return int(self.manifest["selected_epoch"])
        return self.history[-1].epoch if self.history else 0


@dataclass(frozen=True)
class Facts:
    """Everything on the page; the same facts give the same page, byte for byte."""

    title: str
    samples: int
    shape: tuple[str, ...]
    before: Verification
    after: Verification | None
    slices: int
    enough: int | None
    """Target samples with which no verdict is undecided; None where the source had too few for that."""
    cautions: tuple[str, ...]
    inputs: tuple[Sample, ...]
    taps: tuple[TapShift, ...]
    predictions: Predictions | None
    classes: tuple[str, ...]
    scores_before: Scores | RegressionScores | None
    scores_after: Scores | RegressionScores | None
    home: Home
    mending: Mending | None
    original: str | None


WORST = 30
"""Units of a tap that are listed: so many of the worst before, and as many of the worst after."""


MOVES = 6


MOST_CLASSES = 2048
"""Above it, which class became which is not counted: the table would be larger than all else."""


class Look:
    """Gathers over batches. Both models see the same batch before `compare` is asked about it."""

    def __init__(self, profile: Profile, output: Entry, ignore_label: int | None = None) -> None:
        self.profile, self.output, self.ignore_label = profile, output, ignore_label
        self.tally = Tally(profile, profile.taps)
        self.beyond: dict[str, Tensor] = {}
        self.rows = dict.fromkeys(profile.taps, 0)
        self.axis = profile.specs["logits"].channel_axis
        self.chosen: Tensor | None = None
        self.counts: Tensor | None = None
        self.confidences: Tensor | None = None
        self.certainty: Tensor | None = None
        self.moves: Tensor | None = None
        self.changed: Tensor | None = None
        self.metrics: ClassificationMetrics | RegressionMetrics | None = None

    def update(self, returned: Any, values: dict[str, Tensor], inputs: int, labels: Tensor | None) -> None:
        self.tally.update(values, inputs)
        for name, home in self.profile.taps.items():
            self.beyond[name] = _added(self.beyond.get(name), _beyond(values[name], home))
            self.rows[name] += len(values[name])
        logits = class_logits(returned, self.output, self.axis, self.profile.taps["logits"].units)
        if labels is not None and labels.is_floating_point():
            logits = None  # several quantities, which look like the logits of as many classes
        self.chosen = None if logits is None else logits.argmax(1).flatten()
        if logits is not None and self.chosen is not None:
            confidence = logits.to(sum_dtype(logits.device)).softmax(1).amax(1).flatten()
            steps = (confidence.nan_to_num(0.0) * 10).long().clamp(0, 9)
            self.counts = _added(self.counts, torch.bincount(self.chosen, minlength=logits.shape[1]))
            self.confidences = _added(self.confidences, torch.bincount(steps, minlength=10))
            self.certainty = _added(self.certainty, confidence.sum())
        if labels is not None:
            self._score(returned, labels)

    def _score(self, returned: Any, labels: Tensor) -> None:
        result = pick(returned, self.output, "the model")
        if self.metrics is None:
            self.metrics = metrics_for(labels, ignore_label=self.ignore_label)
        if isinstance(self.metrics, RegressionMetrics):
            result, labels = in_one_shape(result, labels)
        elif result.ndim > 2:
            logits = class_logits(returned, self.output, self.axis, self.profile.taps["logits"].units)
            if logits is not None and labels.shape == logits.shape[:1] + logits.shape[2:]:
                result = logits
        self.metrics.update(result, labels)

    def compare(self, before: Look) -> None:
        """Count what became of the predictions of the other model on this batch."""
        if self.chosen is None or before.chosen is None or self.counts is None:
            return
        self.changed = _added(self.changed, (self.chosen != before.chosen).sum())
        classes = len(self.counts)
        if classes <= MOST_CLASSES:
            pairs = torch.bincount(before.chosen * classes + self.chosen, minlength=classes**2)
            self.moves = _added(self.moves, pairs)

    def verification(self) -> Verification:
        return self.tally.verification()

    def at(self, tap: str) -> _Here:
        counter = self.tally.taps[tap]
        return _Here((counter.counts / counter.samples).cpu(), (self.beyond[tap] / self.rows[tap]).cpu())

    def scores(self) -> Scores | RegressionScores | None:
        return None if self.metrics is None else self.metrics.compute()

    def guesses(self) -> Guesses | None:
        if self.counts is None or self.confidences is None or self.certainty is None:
            return None
        total = int(self.counts.sum())
        return Guesses(tuple(self.counts.tolist()), float(self.certainty) / total, tuple(self.confidences.tolist()))


class _Here(NamedTuple):
    """Of each unit of a tap: its shares of the bins, and that of its values beyond the range at home."""

    shares: Tensor
    beyond: Tensor


def _beyond(values: Tensor, home: Histogram) -> Tensor:
    """How many values of each unit are beyond its range at home, or NaN: outer bins have half of those on its edge."""
    counts = [(~((part >= home.low) & (part <= home.high))).sum(0) for part in split_rows(values)]
    return torch.stack(counts).sum(0)


def _added(sums: Tensor | None, more: Tensor) -> Tensor:
    return more if sums is None else sums + more


def guess(returned: Any, output: Entry, axis: int | None, count: int) -> list[tuple[int, float] | None]:
    """Class and probability of each of `count` samples; None where a sample has many predictions, or none.

    Classes are on this `axis` of an output; None where it holds quantities.
    """
    logits = None if axis is None else class_logits(returned, output, axis)
    if logits is None or logits.ndim != 2:
        return [None] * count
    confidence, chosen = logits.softmax(1).max(1)
    return list(zip(chosen.tolist(), confidence.tolist(), strict=True))


def predictions(before: Look, after: Look | None) -> Predictions | None:
    own = before.guesses()
    if own is None:
        return None
    if after is None:
        return Predictions(sum(own.counts), own, None, None, ())
    other = after.guesses()
    assert other is not None and after.changed is not None, "the adapted model has the head of the model"  # noqa: PT018
    return Predictions(sum(own.counts), own, other, int(after.changed), _moves(after.moves, len(own.counts)))


def _moves(table: Tensor | None, classes: int) -> tuple[tuple[int, int, int], ...]:
    if table is None:
        return ()
    pairs = table.clone().view(classes, classes)
    pairs.fill_diagonal_(0)
    # sorted by count, then by class: the order must not depend on the machine
    found = [(int(a), int(b), int(pairs[a, b])) for a, b in pairs.nonzero().tolist()]
    return tuple(sorted(found, key=lambda move: (-move[2], move[0], move[1]))[:MOVES])


def tap_shifts(before: Look, after: Look | None, profile: Profile, samples: int) -> tuple[TapShift, ...]:
    """How far each tap is from home, the features first."""
    # positions of one feature map are not independent: what counts against chance is the number of inputs
    floor = sampling_floor(profile.bins, profile.inputs_seen, samples)
    return tuple(
        _tap_shift(
            name,
            str(profile.specs[name]),
            profile.taps[name],
            floor,
            before.at(name),
            None if after is None else after.at(name),
        )
        for name in profile.taps
    )


def _tap_shift(name: str, where: str, home: Histogram, floor: float, before: _Here, after: _Here | None) -> TapShift:
    own = home.probabilities.double()
    usable = home.usable.nonzero().flatten().tolist()

    def distances(here: _Here) -> list[float]:
        return [float(value) for value in home.divergence_per_unit(here.shares.double())[usable]]

    def clear(values: list[float]) -> int:
        # a single unit varies more by chance than the mean of many slices
        return sum(not value < floor + max(FAILED, 3 * floor) for value in values)

    def seen(here: _Here, place: int) -> Seen:
        row, unit = here.shares[usable[place]].double(), own[usable[place]]
        middles = (torch.arange(-1, home.bins.inner + 1, dtype=torch.float64, device="cpu") + 0.5) / home.bins.inner
        steps = middles.clamp(0, 1)  # of the open bins their only end
        return Seen(
            divergence=(first if here is before else second)[place],
            outside=float(here.beyond[usable[place]]),
            moved=float(((row - unit) * steps).sum()),
            spread=_spread(row, steps) / max(_spread(unit, steps), 1e-12),
            shares=tuple(row.tolist()),
        )

    first = distances(before)
    second = [] if after is None else distances(after)
    places = dict.fromkeys(_worst(first) + _worst(second))
    worst = tuple(
        Unit(
            usable[place],
            float(home.low[usable[place]]),
            float(home.high[usable[place]]),
            tuple(own[usable[place]].tolist()),
            seen(before, place),
            None if after is None else seen(after, place),
        )
        for place in sorted(places, key=lambda place: (-_rank(first[place]), place))
    )
    return TapShift(
        name,
        where,
        home.units - len(usable),
        floor,
        tuple(first),
        None if after is None else tuple(second),
        clear(first),
        None if after is None else clear(second),
        worst,
    )


def _spread(shares: Tensor, steps: Tensor) -> float:
    mean = (shares * steps).sum()
    return float((shares * (steps - mean).square()).sum().clamp_min(0).sqrt())


def _rank(value: float) -> float:
    """NaN is as far from home as can be."""
    return value if value == value else float("inf")


def _worst(values: list[float]) -> list[int]:
    return sorted(range(len(values)), key=lambda place: (-_rank(values[place]), place))[:WORST]


FILES = ("model.safetensors", "history.json", "manifest.json")


REMEDY = "adapt again, or name the folder that `shiftmend adapt --out` wrote"


def load(folder: Path, model: nn.Module) -> Adaptation:
    """The adaptation in a folder, its weights in a copy of `model`; anything wrong with it is one sentence."""
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}; expected one that `shiftmend adapt --out` wrote")
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise DataError(f"{folder} holds no {missing[0]}; {REMEDY}")
    manifest = _manifest(folder / "manifest.json")
    history = _history(folder / "history.json")
    epochs = [row.epoch for row in history]
    if epochs != list(range(len(epochs))) or manifest["epochs"] != max(0, len(epochs) - 1):
        raise DataError(f"{folder / 'history.json'} is not the file that manifest.json beside it describes; {REMEDY}")
    adapted = copy.deepcopy(model)
    path = folder / "model.safetensors"
    try:
        state = safetensors.torch.load_file(path)
    except Exception as error:
        raise DataError(f"{path} is damaged ({error}); {REMEDY}") from error
    try:
        adapted.load_state_dict(state)
    except RuntimeError as error:
        first = next((line.strip() for line in str(error).splitlines()[1:] if line.strip()), str(error))
        raise AdaptationError(
            f"the weights in {path} are of another architecture than the model ({first[:200]}); name the model that "
            "was adapted"
        ) from error
    if fingerprints.weights(adapted) != manifest["adapted_weights"]:
        raise DataError(f"{path} is not the file that manifest.json beside it describes; {REMEDY}")
    return Adaptation(adapted.eval(), history, manifest, selected=manifest["selected_epoch"])


def _json(path: Path) -> Any:
    try:
        return from_strict_json(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:  # also text that is no UTF-8
        raise DataError(f"{path} is damaged: it is not readable as JSON; {REMEDY}") from error


def _manifest(path: Path) -> dict[str, Any]:
    data = _json(path)
    needed = {"method": dict, "kept": str, "status": str, "adapted_weights": str, "selected_epoch": int, "epochs": int}
    fits = (
        isinstance(data, dict)
        and all(type(data.get(name)) is kind for name, kind in needed.items())
        and isinstance(data["method"].get("name"), str)
        and data["kept"] in get_args(Keep)
        and 0 <= data["selected_epoch"] <= data["epochs"]
    )
    if not fits:
        raise DataError(f"{path} is damaged: it is no manifest of an adaptation; {REMEDY}")
    return dict(data)


def _history(path: Path) -> list[Epoch]:
    data = _json(path)
    needed = {"epoch", "block", "learning_rate", "losses", "verification", "seconds"}
    fits = isinstance(data, list) and all(
        isinstance(row, dict)
        and needed <= set(row)
        and type(row["epoch"]) is int
        and isinstance(row["block"], str)
        and isinstance(row["losses"], dict)
        and all(isinstance(row[name], int | float | None) for name in set(row) - {"block", "losses"})
        and all(isinstance(loss, int | float) for loss in row["losses"].values())
        for row in data
    )
    if not fits:
        raise DataError(f"{path} is damaged: it is no history of an adaptation; {REMEDY}")
    return [Epoch.from_json(row) for row in data]


SAMPLES = 12


MOST_SAMPLES = 100


LARGEST_SAMPLE = 1 << 22
"""Numbers in an input that is still shown; more would not be looked at in a page."""


def facts(
    model: nn.Module,
    target: Any,
    profile: Profile | str | os.PathLike[str],
    adaptation: Adaptation | str | os.PathLike[str] | None = None,
    *,
    labels: Any = None,
    ignore_label: int | None = None,
    classes: Sequence[str] | None = None,
    batch_size: int | None = None,
    preprocess: Preprocess | None = None,
    output: Entry = None,
    device: str | torch.device = "auto",
    samples: int = SAMPLES,
    original: str | None = None,
    title: str = "",
) -> Facts:
    """Gather what `write` puts on the page, from unlabelled `target` inputs.

    `model` is the one that was profiled and `adaptation` what `shiftmend.adapt` gave, or the folder it was saved in;
    without it, the report asks only whether the target has shifted. `labels`, one for each sample in the order of the
    target, are used for scores alone, and labels that the target brings along are not looked at; those that are
    `ignore_label` are not scored. `samples` inputs are shown on the page: 0 where none may leave the site. `original`
    names the file of the model as it came.
    """
    model = unwrap(model)
    profile = as_profile(profile).to(torch.device("cpu"))
    profile.check_architecture(model)
    if isinstance(samples, bool) or not isinstance(samples, int) or not 0 <= samples <= MOST_SAMPLES:
        raise DataError(
            f"the number of samples to show must be a whole number from 0 to {MOST_SAMPLES}, got {samples!r}"
        )
    place = resolve_device(device, model)
    feed = Feed(target, batch_size=batch_size, device=place, preprocess=preprocess, what="target data")
    marks = _labels(labels, feed)
    result, file = _adaptation(adaptation, model)
    models = {"before": model} | ({"after": result.model} if result is not None else {})

    with ExitStack() as stack:
        for one in models.values():
            stack.enter_context(on_device(one, place))
            stack.enter_context(preserve_modes(one))
            one.eval()
        stack.enter_context(torch.no_grad())
        stack.enter_context(isolate_rng(place, lambda: _check(models.values(), feed)))
        looks = _looks(models, feed, profile, marks, output, ignore_label)
        summary = InputSummary.from_batches(feed.batches())
        shown = _samples(models, feed, profile, marks, output, samples)

    before, after = looks["before"], looks.get("after")
    guesses = predictions(before, after)
    mending = None if result is None else _mending(result, file, feed, profile)
    adapted = mending is not None and mending.same_data is not False and mending.kept > 0
    return Facts(
        title=title or f"{type(model).__name__} at a new site",
        samples=feed.samples,
        shape=summary.sizes,
        before=before.verification(),
        after=None if after is None else replace(after.verification(), adapted=adapted),
        slices=profile.slices["verification"].histogram.units,
        enough=enough(profile.bins, profile.inputs_seen, profile.taps["features"].usable_count),
        cautions=tuple(_cautions(model, profile, summary, result, guesses)),
        inputs=shown,
        taps=tap_shifts(before, after, profile, feed.samples),
        predictions=guesses,
        classes=_names(classes, len(guesses.before.counts) if guesses is not None else 0),
        scores_before=before.scores(),
        scores_after=None if after is None else after.scores(),
        home=_home(profile),
        mending=mending,
        original=original,
    )


def enough(bins: Bins, source_samples: int, units: int | None = None) -> int | None:
    """Target samples with which no divergence is undecided; None if the profile has too few for that.

    Half as many may do for samples that were not adapted to, if the features are as at home.
    """
    least, most = chance_of(units)
    left = RESTORED / (most - least) * math.log(bins.total) / (bins.total - 1) - 1 / source_samples
    return None if left <= 0 else math.ceil(1 / left)


def _labels(labels: Any, feed: Feed) -> Tensor | None:
    if labels is None:
        return None
    marks = as_tensor(labels, "list of labels")
    if marks.ndim == 0 or len(marks) != feed.samples:
        raise DataError(
            f"there are {len(marks) if marks.ndim else 1} labels for {feed.samples} samples; expected one for each"
        )
    if not feed.keeps_order:
        raise DataError("labels are given in the order of the samples, and this loader shuffles; use shuffle=False")
    return marks


def _adaptation(given: Any, model: nn.Module) -> tuple[Adaptation | None, str | None]:
    """The adaptation, and the file that its weights are in if it comes from a folder."""
    if isinstance(given, str | os.PathLike):
        return load(Path(given), model), str(Path(given) / "model.safetensors")
    if given is None:
        return None, None
    if not isinstance(given, Adaptation):
        raise AdaptationError(
            f"the adaptation is a {type(given).__name__}, expected what shiftmend.adapt gave, or the folder it was "
            "saved in"
        )
    if fingerprints.architecture(given.model) != fingerprints.architecture(model):
        raise AdaptationError("the adapted model has other layers than the model; pass the model that was adapted")
    return given, None


def _check(models: Iterable[nn.Module], feed: Feed) -> None:
    for one in models:
        check_model(one, [feed.first(2)])


def _looks(
    models: dict[str, nn.Module],
    feed: Feed,
    profile: Profile,
    labels: Tensor | None,
    output: Entry,
    ignore_label: int | None,
) -> dict[str, Look]:
    """One pass: each batch goes through both models, so that they are compared sample by sample."""
    moved = profile.to(feed.device)
    looks = {name: Look(moved, output, ignore_label) for name in models}
    with ExitStack() as stack:
        recorders = {name: stack.enter_context(attach_taps(one, profile.specs)) for name, one in models.items()}
        position = 0
        for batch in feed.batches():
            marks = None if labels is None else send(labels[position : position + len(batch)], feed.device)
            position += len(batch)
            for name, one in models.items():
                # a copy: a model that works in place must not change what the other sees
                returned = one(batch.clone())
                looks[name].update(returned, recorders[name].read(), len(batch), marks)
            if "after" in looks:
                looks["after"].compare(looks["before"])
    return looks


def _samples(
    models: dict[str, nn.Module],
    feed: Feed,
    profile: Profile,
    labels: Tensor | None,
    output: Entry,
    count: int,
) -> tuple[Sample, ...]:
    """Inputs from all over the target, as they came; of streamed data only what the model is fed is at hand."""
    if count == 0:
        return ()
    if feed.inputs is None:
        ready = feed.first(count)  # once: another pass may give others
        raw = ready.cpu()
        places = list(range(len(raw)))
    else:
        places = sorted({round(step) for step in np.linspace(0, feed.samples - 1, min(count, feed.samples))})
        raw = feed.inputs[places].cpu()
        ready = feed.prepare(feed.inputs[places])
    if raw[0].numel() > LARGEST_SAMPLE:
        return ()
    axis = None if labels is not None and labels.is_floating_point() else profile.specs["logits"].channel_axis
    taken = {name: guess(one(ready.clone()), output, axis, len(raw)) for name, one in models.items()}
    values = raw.float().numpy() if raw.dtype == torch.bfloat16 else raw.numpy()
    return tuple(
        Sample(
            place,
            values[row].copy(),
            taken["before"][row],
            taken["after"][row] if "after" in taken else None,
            None if labels is None or labels.is_floating_point() or labels.ndim > 1 else int(labels[place]),
        )
        for row, place in enumerate(places)
    )


def _names(classes: Sequence[str] | None, count: int) -> tuple[str, ...]:
    if classes is None:
        return tuple(map(str, range(count)))
    if isinstance(classes, str) or not isinstance(classes, Sequence):
        raise DataError(f"classes is {brief(classes)}, expected a list of names, one for each class")
    if count:
        check_classes(len(classes), count)
    return tuple(map(str, classes))


def _cautions(
    model: nn.Module,
    profile: Profile,
    summary: InputSummary,
    result: Adaptation | None,
    guesses: Predictions | None,
) -> list[str]:
    """What a reader should know before believing anything else; each is a whole sentence."""
    found = [
        f"Look at the preprocessing of the inputs: {difference}{'' if difference.endswith('?') else '.'}"
        for difference in profile.inputs.differences(summary)
    ]
    own = fingerprints.weights(model)
    if own != profile.weights:
        found.append(
            "The model's weights are not those that the profile was made with: distances from home may mislead."
        )
    made = [] if guesses is None else [guesses.before, guesses.after]
    if any(one is not None and math.isnan(one.confidence) for one in made):
        found.append("Some outputs are NaN or infinite: the class that they count for below means nothing.")
    if result is None:
        return found
    manifest = result.manifest
    if manifest.get("source_weights") not in (None, own):
        found.append("The adaptation started from other weights than those of the model called “before” here.")
    made_with = manifest.get("profile_sha256")
    if made_with is not None and made_with != hashlib.sha256(profile.to_bytes()).hexdigest():
        found.append("The adaptation was made with another profile than the one it is judged with here.")
    if manifest["status"] != "finished":
        found.append(f"The adaptation did not run to its end: it was {manifest['status']}.")
    if manifest["method"]["name"] == "full-gauss":
        found.append(
            "The method full-gauss also moves what the verification looks at, so a good verdict says less than usual."
        )
    return found


def _mending(result: Adaptation, file: str | None, feed: Feed, profile: Profile) -> Mending:
    adapted_to = result.manifest.get("target")
    digest = adapted_to.get("sha256") if isinstance(adapted_to, dict) else None
    same = None if digest is None or feed.inputs is None else digest == fingerprints.digest(feed.inputs)
    looked_at = result.manifest.get("verified_per_epoch")
    floor = sampling_floor(profile.bins, profile.inputs_seen, looked_at if type(looked_at) is int else feed.samples)
    return Mending(result.manifest, tuple(result.history), file, same, floor)


def _home(profile: Profile) -> Home:
    inputs = profile.inputs
    shape = " × ".join(inputs.sizes) or "single numbers"
    return Home(
        samples=profile.samples,
        taps={
            name: (str(profile.specs[name]), tap.units, profile.unusable[name]) for name, tap in profile.taps.items()
        },
        bins=f"{profile.bins.inner} between the lowest and the highest value, and one on either side",
        moments="mean and covariance" if "full" in profile.gaussian.kind else "mean and variance",
        slices={name: part.histogram.units for name, part in profile.slices.items()},
        inputs=f"{shape}, {inputs.dtype}, values from {inputs.low:.3g} to {inputs.high:.3g}",
        preset=profile.preset,
        library=profile.library,
        weights=profile.weights,
        size=len(profile.to_bytes()),
    )
