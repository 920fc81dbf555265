"""The facts of a report: run both models over the target once, and compare them with the profile."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shiftmend.adaptation.result import Adaptation, Candidate, Change, Estimates, name_rows
from shiftmend.engine.history import Epoch
from shiftmend.engine.method import Method
from shiftmend.errors import AdaptationError, DataError
from shiftmend.evaluation.classification import ClassificationMetrics, Scores
from shiftmend.evaluation.evaluate import metrics_for
from shiftmend.evaluation.regression import RegressionMetrics, RegressionScores, match_shapes
from shiftmend.inputs.feed import Feed, Preprocess
from shiftmend.inputs.sources import as_tensor
from shiftmend.introspection.call import call_model
from shiftmend.introspection.model_state import on_device
from shiftmend.introspection.modes import enter_eval, preserve_modes
from shiftmend.introspection.outputs import Entry, pick
from shiftmend.introspection.taps import Tap
from shiftmend.introspection.validate import check_model, unwrap
from shiftmend.methods import METHODS
from shiftmend.passes.evaluation_pass import Observation, run_pass
from shiftmend.profiles import fingerprints
from shiftmend.profiles.fingerprints import InputSummary, Summary, summarise
from shiftmend.profiles.profile import Profile, as_profile
from shiftmend.profiles.rehearsal import UNTOUCHED, Rehearsal
from shiftmend.report.estimates import find_estimates, is_made_with
from shiftmend.report.saved import load_adaptation, read_temperature
from shiftmend.stats.divergences import sampling_floor
from shiftmend.stats.histograms import Bins, Histogram
from shiftmend.utils.checks import brief, check_classes, is_whole, kind
from shiftmend.utils.devices import resolve_device, send, split_rows, sum_dtype
from shiftmend.utils.rng import isolate_rng
from shiftmend.utils.signing import read_public
from shiftmend.utils.tensor_tree import Inputs, TensorTree, wrap_inputs
from shiftmend.verification.class_shares import Shares
from shiftmend.verification.signals import Tally, class_logits
from shiftmend.verification.verdict import FAILED, RESTORED, Verification, chance_of

WORST_UNITS = 30
"""Number of listed units of a tap: the worst before mending, and as many of the worst after."""

MAX_MOVES = 6
"""Number of changes of class that a report lists."""

MAX_PAIRED_CLASSES = 2048
"""Largest number of classes for which changes (class before by class after) are counted."""

SHOWN_SAMPLES = 12
MAX_SHOWN_SAMPLES = 100

MAX_SAMPLE_NUMBERS = 1 << 22
"""Largest number of values in an input that a report shows."""


# ---- the facts


@dataclass(frozen=True)
class Distribution:
    """The values of one unit on the target, under one of the two models."""

    divergence: float
    outside: float
    """Share of values below the lowest or above the highest value at home."""
    moved: float
    """Difference between the means here and at home, relative to the range at home, computed from bins."""
    spread: float
    """Ratio of the standard deviations here and at home, computed from bins."""
    shares: tuple[float, ...]


@dataclass(frozen=True)
class Unit:
    """One unit of a tap: its distribution at home and on the target."""

    number: int
    low: float
    high: float
    home: tuple[float, ...]
    before: Distribution
    after: Distribution | None


@dataclass(frozen=True)
class TapShift:
    """A tap of the model: the distance of each unit from home, and histograms of the worst units."""

    name: str
    where: str
    constant: int
    """Number of units that never varied at home; they have no divergence."""
    floor: float
    before: tuple[float, ...]
    after: tuple[float, ...] | None
    clear_before: int
    """Number of units with a distance that would give the verdict "not restored"."""
    clear_after: int | None
    worst: tuple[Unit, ...]

    @property
    def units(self) -> int:
        """Return the number of units that varied at home."""
        return len(self.before)

    @property
    def mean_before(self) -> float:
        return sum(self.before) / max(1, len(self.before))

    @property
    def mean_after(self) -> float | None:
        return None if self.after is None else sum(self.after) / max(1, len(self.after))


@dataclass(frozen=True)
class ModelPredictions:
    """The class predictions of one model."""

    counts: tuple[int, ...]
    """Number of predictions by class."""
    confidence: float
    histogram: tuple[int, ...]
    """Number of predictions by confidence, in ten equal steps from 0 to 1."""


@dataclass(frozen=True)
class Predictions:
    """The class predictions of both models, compared sample by sample."""

    total: int
    before: ModelPredictions
    after: ModelPredictions | None
    changed: int | None
    moves: tuple[tuple[int, int, int], ...]
    """The most frequent changes: class before, class after, number of predictions."""


@dataclass(frozen=True)
class Sample:
    """One input before preprocessing, with predicted class and probability of each model."""

    number: int
    values: NDArray[np.generic]
    before: tuple[int, float] | None
    after: tuple[int, float] | None
    label: int | None = None


@dataclass(frozen=True)
class Home:
    """The contents of the profile, described in words."""

    samples: int
    taps: dict[str, tuple[str, int, int]]
    """Module, number of units, and number of constant units of each tap."""
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
    """The adaptation: its manifest, its history, and the file of its weights."""

    manifest: dict[str, Any]
    history: tuple[Epoch, ...]
    file: str | None
    same_data: bool | None
    """True if the report uses the inputs that were adapted to; None if unknown."""
    floor_per_epoch: float
    candidates: tuple[Candidate, ...] = ()
    """Methods that `auto` tried."""
    reason: str = ""
    """Reason why `auto` chose this method."""
    shares: Shares | None = None
    """Class shares at the site, if `auto` estimated them."""
    changed: Change | None = None
    """What changed since home: the device, the class shares, both or neither."""

    @property
    def method(self) -> str:
        return str(self.manifest["method"]["name"])

    @property
    def method_class(self) -> type[Method]:
        """Return the class of the method, or `Method` itself for an unknown name."""
        return METHODS.get(self.method, Method)

    @property
    def left_alone(self) -> bool:
        """True if the model was returned untouched."""
        return self.method == UNTOUCHED

    @property
    def unit(self) -> str:
        """Name of a row of the history: epoch, or round of steps."""
        return name_rows(self.manifest)

    @property
    def kept(self) -> int:
        """Return the epoch of the mended model."""
        if self.manifest["kept"] == "selected":
            return int(self.manifest["selected_epoch"])
        return self.history[-1].epoch if self.history else 0


@dataclass(frozen=True)
class Facts:
    """Content of a report, gathered by `gather`. The same content always gives the same bytes of HTML."""

    title: str
    samples: int
    shape: tuple[str, ...]
    before: Verification
    after: Verification | None
    """Verification of the mended model; None if there is no mended model."""
    slices: int
    """Number of slices that verification compares."""
    samples_needed: int | None
    """Number of target samples at which no verdict is undecided; None if the source had too few samples."""
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
    """Name of the file with the original weights."""
    estimates: Estimates | None = None
    """Estimated scores on these inputs; None if nothing was rehearsed."""
    rehearsal: Rehearsal | None = None


# ---- gathering them


def gather(
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
    samples: int = SHOWN_SAMPLES,
    original: str | None = None,
    title: str = "",
    trust: str | os.PathLike[str] | None = None,
) -> Facts:
    """Gather the facts of a report from unlabelled `target` inputs.

    Args:
        model: The model that was profiled.
        target: Inputs of the new site, as for `shiftmend.adapt`. Labels among them are not read.
        profile: The profile of the source, or the path of its file.
        adaptation: The result of `shiftmend.adapt`, or the folder it was saved in. Without an adaptation, the report
            only tells whether the target has shifted.
        labels: One label per sample, in the order of the target. They are used for scores only.
        ignore_label: Label of samples that are not scored.
        classes: Name of each class; their numbers by default.
        batch_size: Number of samples per batch.
        preprocess: Function applied to each batch of inputs on the device, before the model.
        output: Entry of a tuple or dict that is the model's output.
        device: Device to compute on.
        samples: Number of inputs shown on the page, at most 100. Use 0 if no input may leave the site.
        original: Name of the file with the weights of `model`.
        title: Headline of the page.
        trust: Public key, or its file, with which profile and adaptation must be signed.

    Returns:
        The facts, for `shiftmend.report.write`.

    Raises:
        ShiftmendError: If model, profile, target, labels or adaptation do not fit together.

    Example:
        >>> import torch, shiftmend
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).eval()
        >>> source = torch.randn(500, 4)
        >>> profile = shiftmend.profile(model, source, progress=False)
        >>> found = gather(model, source + 2, profile)
        >>> found.before.verdict
        'not restored'
    """
    model = unwrap(model)
    key = None if trust is None else read_public(trust)
    profile = as_profile(profile, trust=key).to(torch.device("cpu"))
    profile.check_architecture(model)
    if not is_whole(samples) or not 0 <= samples <= MAX_SHOWN_SAMPLES:
        raise DataError(
            f"Expected samples (to show) as a whole number from 0 to {MAX_SHOWN_SAMPLES}, got {brief(samples)}."
        )
    place = resolve_device(device, model)
    columns = profile.inputs.columns
    feed = Feed(target, batch_size=batch_size, device=place, preprocess=preprocess, columns=columns, what="target data")
    targets = _check_labels(labels, feed)
    result, file = _resolve_adaptation(adaptation, model, key)
    left_alone = result is None or result.manifest["method"]["name"] == UNTOUCHED
    models = {"before": model} | ({} if result is None or left_alone else {"after": result.model})

    def check() -> None:
        for each in models.values():
            check_model(each, [feed.first(2)])
            profile.check_taps(each, feed.first(2))

    with ExitStack() as stack:
        for each in models.values():
            stack.enter_context(on_device(each, place))
            stack.enter_context(preserve_modes(each))
            enter_eval(each)
        stack.enter_context(torch.no_grad())
        stack.enter_context(isolate_rng(place, check))
        temperature = 1.0 if result is None else read_temperature(result.manifest)
        observers = _observe(models, feed, profile, targets, output, ignore_label, temperature)
        summary = summarise(feed.batches())
        shown = _pick_samples(models, feed, profile, targets, output, samples)
        mending = None if result is None else _describe_mending(result, file, feed, profile)
        same_data = None if mending is None else mending.same_data
        estimates = find_estimates(model, feed, profile, result, same_data)

    before, after = observers["before"], observers.get("after")
    # What was rehearsed holds for the model that was profiled, and for methods as they were rehearsed.
    record = profile.rehearsal if fingerprints.weights(model) == profile.weights else None
    known = record is not None and mending is not None and not record.find_differences(mending.manifest["method"])
    candidate = mending.method if mending is not None and known and not mending.manifest.get("free_shares") else None
    predictions = _compare_predictions(before, after)
    adapted = mending is not None and mending.same_data is not False and mending.kept > 0
    # Positions of one feature map are not independent, so chance depends on the number of inputs.
    floor = sampling_floor(profile.bins, profile.effective_samples, feed.samples)
    return Facts(
        title=title or f"{type(model).__name__} at a new site",
        samples=feed.samples,
        shape=summary.sizes,
        before=before.tally.verification().judge_by(record, UNTOUCHED),
        after=None
        if after is None
        else replace(after.tally.verification(), adapted=adapted).judge_by(record, candidate),
        slices=profile.slices["verification"].histogram.units,
        samples_needed=samples_needed(profile.bins, profile.effective_samples, profile.taps["features"].usable_count),
        cautions=tuple(_list_cautions(model, profile, summary, result, predictions)),
        inputs=shown,
        taps=tuple(_measure_tap(name, profile, floor, observers) for name in profile.taps),
        predictions=predictions,
        classes=_name_classes(classes, len(predictions.before.counts) if predictions is not None else 0),
        scores_before=before.scores(),
        scores_after=None if after is None else after.scores(),
        home=_describe_home(profile),
        mending=mending,
        original=original,
        estimates=estimates,
        rehearsal=profile.rehearsal,
    )


def samples_needed(bins: Bins, source_samples: float, units: int | None = None) -> int | None:
    """Return how many target samples leave no divergence undecided, or None if the profile has too few samples.

    Half as many suffice for samples that were not adapted to, if the features are as at home.
    """
    least, most = chance_of(units)
    left = RESTORED / (most - least) * math.log(bins.total) / (bins.total - 1) - 1 / source_samples
    return None if left <= 0 else math.ceil(1 / left)


def _check_labels(labels: Any, feed: Feed) -> Tensor | None:
    if labels is None:
        return None
    found = as_tensor(labels, "list of labels")
    if found.ndim == 0 or len(found) != feed.samples:
        raise DataError(
            f"Expected one label for each of {feed.samples} samples, got {len(found) if found.ndim else 1} labels."
        )
    if not feed.keeps_order:
        raise DataError("Expected samples in the order of their labels, got a loader that shuffles. Try shuffle=False.")
    return found


def _resolve_adaptation(given: Any, model: nn.Module, trust: str | None) -> tuple[Adaptation | None, str | None]:
    """Return the adaptation, and the file of its weights if it comes from a folder."""
    if isinstance(given, str | os.PathLike):
        return load_adaptation(Path(given), model, trust), str(Path(given) / "model.safetensors")
    if given is None:
        return None, None
    if not isinstance(given, Adaptation):
        raise AdaptationError(
            f"Expected an adaptation from shiftmend.adapt, or the folder it was saved in, got {kind(given)}."
        )
    if fingerprints.architecture(given.model) != fingerprints.architecture(model):
        raise AdaptationError("Expected an adaptation of this model, got one with other layers.")
    return given, None


def _name_classes(classes: Sequence[str] | None, count: int) -> tuple[str, ...]:
    if classes is None:
        return tuple(map(str, range(count)))
    if isinstance(classes, str) or not isinstance(classes, Sequence):
        raise DataError(f"Expected classes as a list of names, one for each class, got {brief(classes)}.")
    if count:
        check_classes(len(classes), count)
    return tuple(map(str, classes))


def _list_cautions(
    model: nn.Module,
    profile: Profile,
    summary: Summary,
    result: Adaptation | None,
    predictions: Predictions | None,
) -> list[str]:
    """List the cautions that a reader must know first, as whole sentences."""
    cautions = [
        f"Check the preprocessing of the inputs: {difference}{'' if difference.endswith('?') else '.'}"
        for difference in profile.inputs.differences(summary)
    ]
    weights = fingerprints.weights(model)
    if weights != profile.weights:
        cautions.append(
            "The model's weights are not those that the profile was made with: distances from home may mislead."
        )
    made = [] if predictions is None else [predictions.before, predictions.after]
    if any(each is not None and math.isnan(each.confidence) for each in made):
        cautions.append("Some outputs are NaN or infinite: ignore the class that they are counted for below.")
    if result is None:
        return cautions
    manifest = result.manifest
    if manifest.get("source_weights") not in (None, weights):
        cautions.append("The adaptation started from other weights than those of the model called “before” here.")
    if not is_made_with(result, profile):
        cautions.append("The adaptation was made with another profile than the one it is judged with here.")
    if manifest.get("unsealed"):
        cautions.append("The adaptation has no seal, as those of earlier versions: a change would go unnoticed.")
    if manifest["status"] != "finished":
        cautions.append(f"The adaptation did not run to its end: it was {manifest['status']}.")
    method = str(manifest["method"]["name"])
    if METHODS.get(method, Method).needs_covariance:
        cautions.append(
            f"The method {method} adjusts the same numbers that the check of the features looks at, so this check says "
            "less than usual."
        )
    return cautions


def _describe_mending(result: Adaptation, file: str | None, feed: Feed, profile: Profile) -> Mending:
    adapted_to = result.manifest.get("target")
    digest = adapted_to.get("sha256") if isinstance(adapted_to, dict) else None
    same = None if digest is None or feed.inputs is None else digest == fingerprints.digest(feed.inputs)
    looked_at: Any = result.manifest.get("verified_per_epoch")
    inputs = looked_at if is_whole(looked_at) else feed.samples
    floor = sampling_floor(profile.bins, profile.effective_samples, inputs)
    return Mending(
        result.manifest,
        tuple(result.history),
        file,
        same,
        floor,
        tuple(result.candidates),
        result.reason,
        result.shares,
        result.changed,
    )


def _describe_home(profile: Profile) -> Home:
    inputs = profile.inputs
    if isinstance(inputs, InputSummary):
        described = _describe_inputs(inputs)
    else:
        described = "; ".join(f"{name}: {_describe_inputs(part)}" for name, part in inputs.parts.items())
    return Home(
        samples=profile.samples,
        taps={
            name: (str(profile.specs[name]), tap.units, profile.unusable[name]) for name, tap in profile.taps.items()
        },
        bins=f"{profile.bins.inner} between the lowest and the highest value, and one on either side",
        moments="mean and covariance" if "full" in profile.gaussian.kind else "mean and variance",
        slices={name: part.histogram.units for name, part in profile.slices.items()},
        inputs=described,
        preset=profile.preset,
        library=profile.library,
        weights=profile.weights,
        size=len(profile.to_bytes()),
    )


def _describe_inputs(inputs: InputSummary) -> str:
    shape = " × ".join(inputs.sizes) or "single numbers"
    return f"{shape}, {inputs.dtype}, values from {inputs.low:.3g} to {inputs.high:.3g}"


# ---- one pass over the target


class _Observer:
    """Sums over the batches of one model."""

    def __init__(self, profile: Profile, output: Entry, ignore_label: int | None) -> None:
        self.profile, self.output, self.ignore_label = profile, output, ignore_label
        self.tally = Tally(profile, profile.taps)
        self.sums: dict[str, Tensor] = {}
        self.outside: dict[str, Tensor] = {}
        self.rows = dict.fromkeys(profile.taps, 0)
        self.chosen: Tensor | None = None
        """Predicted classes of the last batch."""
        self.metrics: ClassificationMetrics | RegressionMetrics | None = None

    def update(self, returned: Any, values: Mapping[str, Tensor], inputs: int, labels: Tensor | None) -> None:
        """Count one batch: the model's output, its activations by tap, the number of inputs, their labels."""
        self.tally.update(values, inputs)
        for name, home in self.profile.taps.items():
            _add(self.outside, name, _count_outside(values[name], home))
            self.rows[name] += len(values[name])
        logits = self._logits(returned)
        if labels is not None and labels.is_floating_point():
            # Several quantities look like the logits of several classes.
            logits = None
        self.chosen = None if logits is None else logits.argmax(1).flatten()
        if logits is not None and self.chosen is not None:
            confidence = logits.to(sum_dtype(logits.device)).softmax(1).amax(1).flatten()
            steps = (confidence.nan_to_num(0.0) * 10).long().clamp(0, 9)
            _add(self.sums, "classes", torch.bincount(self.chosen, minlength=logits.shape[1]))
            _add(self.sums, "steps", torch.bincount(steps, minlength=10))
            _add(self.sums, "confidence", confidence.sum())
        if labels is not None:
            self._score(returned, labels)

    def _logits(self, returned: Any) -> Tensor | None:
        axis, units = self.profile.specs["logits"].channel_axis, self.profile.taps["logits"].units
        return class_logits(returned, self.output, axis, units)

    def _score(self, returned: Any, labels: Tensor) -> None:
        result = pick(returned, self.output, "the model")
        if self.metrics is None:
            self.metrics = metrics_for(labels, ignore_label=self.ignore_label)
        if isinstance(self.metrics, RegressionMetrics):
            result, labels = match_shapes(result, labels)
        elif result.ndim > 2:
            logits = self._logits(returned)
            if logits is not None and labels.shape == logits.shape[:1] + logits.shape[2:]:
                result = logits
        self.metrics.update(result, labels)

    def compare(self, before: _Observer) -> None:
        """Count how the predictions of this model and the other one differ on the last batch."""
        if self.chosen is None or before.chosen is None:
            return
        _add(self.sums, "changed", (self.chosen != before.chosen).sum())
        classes = len(self.sums["classes"])
        if classes <= MAX_PAIRED_CLASSES:
            pairs = torch.bincount(before.chosen * classes + self.chosen, minlength=classes**2)
            _add(self.sums, "moves", pairs)

    def scores(self) -> Scores | RegressionScores | None:
        return None if self.metrics is None else self.metrics.compute()

    def predictions(self) -> ModelPredictions | None:
        if "classes" not in self.sums:
            return None
        counts, steps = self.sums["classes"].tolist(), self.sums["steps"].tolist()
        return ModelPredictions(tuple(counts), float(self.sums["confidence"]) / sum(counts), tuple(steps))


def _add(sums: dict[str, Tensor], name: str, more: Tensor) -> None:
    sums[name] = sums[name] + more if name in sums else more


def _count_outside(values: Tensor, home: Histogram) -> Tensor:
    """Count the values of each unit that are NaN or beyond the range at home.

    The outer bins of a soft histogram do not show this: they contain half of the values on the edge.
    """
    counts = [(~((part >= home.low) & (part <= home.high))).sum(0) for part in split_rows(values)]
    return torch.stack(counts).sum(0)


def _observe(
    models: Mapping[str, nn.Module],
    feed: Feed,
    profile: Profile,
    labels: Tensor | None,
    output: Entry,
    ignore_label: int | None,
    temperature: float,
) -> dict[str, _Observer]:
    """Run each batch through both models, so that they can be compared sample by sample.

    The temperature in the head of the mended model is removed from the logits that are compared with home.
    """
    here = profile.to(feed.device)
    observers = {state: _Observer(here, output, ignore_label) for state in models}
    pair = _SideBySide(models)

    def pair_with_labels() -> Iterator[tuple[Inputs, Tensor | None]]:
        position = 0
        for batch in feed.batches():
            yield batch, None if labels is None else send(labels[position : position + len(batch)], feed.device)
            position += len(batch)

    def update(seen: Observation) -> None:
        for state, observer in observers.items():
            values = {name: seen.activations[pair.tap_name(state, name)] for name in profile.specs}
            if state == "after" and temperature != 1.0:
                values["logits"] = values["logits"] * temperature
            observer.update(seen.output[state], values, len(seen.inputs), seen.labels)
        if "after" in observers:
            observers["after"].compare(observers["before"])

    run_pass(pair, pair_with_labels(), update, taps=pair.taps(profile.specs))
    return observers


class _SideBySide(nn.Module):
    """Both models as one module, so that one pass shows them the same batches. Both are in eval mode."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleDict(models)

    def forward(self, inputs: Any, /) -> dict[str, Any]:
        # The copy protects the inputs of one model from in-place operations of the other.
        return {state: call_model(model, wrap_inputs(inputs).clone()) for state, model in self.models.items()}

    def train(self, mode: bool = True) -> _SideBySide:
        return self

    def taps(self, specs: Mapping[str, Tap]) -> dict[str, Tap]:
        """Return the taps of both models."""
        taps = {}
        for state in self.models:
            for name, tap in specs.items():
                module = f"models.{state}.{tap.module}".rstrip(".")
                taps[self.tap_name(state, name)] = replace(tap, name=self.tap_name(state, name), module=module)
        return taps

    @staticmethod
    def tap_name(state: str, name: str) -> str:
        return f"{state} {name}"


def _compare_predictions(before: _Observer, after: _Observer | None) -> Predictions | None:
    first, second = before.predictions(), None if after is None else after.predictions()
    if first is None:
        return None
    total = sum(first.counts)
    if after is None or second is None:
        return Predictions(total, first, None, None, ())
    changed = int(after.sums["changed"])
    return Predictions(total, first, second, changed, _list_moves(after.sums.get("moves"), len(first.counts)))


def _list_moves(table: Tensor | None, classes: int) -> tuple[tuple[int, int, int], ...]:
    if table is None:
        return ()
    pairs = table.clone().view(classes, classes)
    pairs.fill_diagonal_(0)
    moves = [(int(a), int(b), int(pairs[a, b])) for a, b in pairs.nonzero().tolist()]
    # Sorting by class as well makes the order of equal counts deterministic.
    return tuple(sorted(moves, key=lambda move: (-move[2], move[0], move[1]))[:MAX_MOVES])


def _pick_samples(
    models: Mapping[str, nn.Module],
    feed: Feed,
    profile: Profile,
    labels: Tensor | None,
    output: Entry,
    count: int,
) -> tuple[Sample, ...]:
    """Pick evenly spaced inputs of the target, before preprocessing; of a stream, the first ones."""
    if count == 0 or isinstance(feed.inputs, TensorTree):
        return ()
    if feed.inputs is None:
        # A second pass over a stream may give other inputs.
        ready = feed.first(count)
        if isinstance(ready, TensorTree):
            return ()
        raw = ready.cpu()
        places = list(range(len(raw)))
    else:
        places = sorted({round(step) for step in np.linspace(0, feed.samples - 1, min(count, feed.samples))})
        raw = feed.inputs[places].cpu()
        ready = feed.prepare(feed.inputs[places])
    if raw[0].numel() > MAX_SAMPLE_NUMBERS:
        return ()
    quantities = labels is not None and labels.is_floating_point()
    axis = None if quantities else profile.specs["logits"].channel_axis
    guesses = {
        state: _classify(call_model(each, ready.clone()), output, axis, len(raw)) for state, each in models.items()
    }
    values = raw.float().numpy() if raw.dtype == torch.bfloat16 else raw.numpy()
    return tuple(
        Sample(
            place,
            values[row].copy(),
            guesses["before"][row],
            guesses["after"][row] if "after" in guesses else None,
            None if labels is None or quantities or labels.ndim > 1 else int(labels[place]),
        )
        for row, place in enumerate(places)
    )


def _classify(returned: Any, output: Entry, axis: int | None, count: int) -> list[tuple[int, float] | None]:
    """Return class and probability of each sample; None for a sample with many predictions or no class."""
    logits = None if axis is None else class_logits(returned, output, axis)
    if logits is None or logits.ndim != 2:
        return [None] * count
    confidence, chosen = logits.softmax(1).max(1)
    return list(zip(chosen.tolist(), confidence.tolist(), strict=True))


# ---- taps


def _measure_tap(name: str, profile: Profile, floor: float, observers: Mapping[str, _Observer]) -> TapShift:
    """Measure the distance of each unit of a tap from home, for each model."""
    home = profile.taps[name]
    units = home.usable.nonzero().flatten().tolist()
    found = {state: _distributions(name, home, units, observer) for state, observer in observers.items()}
    before, after = found["before"], found.get("after")
    # Sampling noise of a single unit is larger than that of the mean of many slices.
    limit = floor + max(FAILED, 3 * floor)
    worst = dict.fromkeys(place for each in found.values() for place in _sort_worst_first(each)[:WORST_UNITS])
    return TapShift(
        name,
        str(profile.specs[name]),
        home.units - len(units),
        floor,
        tuple(unit.divergence for unit in before),
        None if after is None else tuple(unit.divergence for unit in after),
        sum(not unit.divergence < limit for unit in before),
        None if after is None else sum(not unit.divergence < limit for unit in after),
        tuple(
            Unit(
                units[place],
                float(home.low[units[place]]),
                float(home.high[units[place]]),
                tuple(home.probabilities[units[place]].double().tolist()),
                before[place],
                None if after is None else after[place],
            )
            for place in _sort_worst_first(before)
            if place in worst
        ),
    )


def _distributions(name: str, home: Histogram, units: list[int], observer: _Observer) -> list[Distribution]:
    """Describe the distributions of these units for one model."""
    counter = observer.tally.taps[name]
    everything = (counter.counts / counter.samples).cpu().double()
    here, there = everything[units], home.probabilities.double()[units]
    outside = (observer.outside[name] / observer.rows[name]).cpu()[units]
    # Values in the open outer bins count as lying at the end of the range.
    middles = (torch.arange(-1, home.bins.inner + 1, dtype=torch.float64, device="cpu") + 0.5) / home.bins.inner
    middles = middles.clamp(0, 1)
    moved = ((here - there) * middles).sum(1)
    spread = _deviations(here, middles) / _deviations(there, middles).clamp_min(1e-12)
    columns = (
        column.tolist() for column in (home.divergence_per_unit(everything)[units], outside, moved, spread, here)
    )
    return [Distribution(a, b, c, d, tuple(shares)) for a, b, c, d, shares in zip(*columns, strict=True)]


def _deviations(shares: Tensor, middles: Tensor) -> Tensor:
    means = (shares * middles).sum(1, keepdim=True)
    return (shares * (middles - means).square()).sum(1).clamp_min(0).sqrt()


def _sort_worst_first(units: Sequence[Distribution]) -> list[int]:
    """Sort indices by divergence; NaN counts as infinite."""

    def distance(place: int) -> float:
        value = units[place].divergence
        return math.inf if math.isnan(value) else value

    return sorted(range(len(units)), key=lambda place: (-distance(place), place))
