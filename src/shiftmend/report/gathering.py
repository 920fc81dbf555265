"""`facts`: run both models over the target once, and put together everything a report says."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shiftmend import fingerprints
from shiftmend.adaptations import Adaptation
from shiftmend.checks import brief, check_classes
from shiftmend.devices import placed, resolve_device, sent
from shiftmend.dice import rolled
from shiftmend.errors import AdaptationError, DataError
from shiftmend.feeds import Feed, Preprocess
from shiftmend.fingerprints import InputSummary
from shiftmend.histograms import Bins, sampling_floor
from shiftmend.loaders import as_tensor
from shiftmend.profiles import Profile, as_profile
from shiftmend.report import saved
from shiftmend.report.contents import Facts, Home, Mending, Predictions, Sample
from shiftmend.report.looking import Look, guess, predictions, tap_shifts
from shiftmend.taps import Entry, check_takes, modes, tapped, unwrap
from shiftmend.verification import RESTORED, chance_of

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
            stack.enter_context(placed(one, place))
            stack.enter_context(modes(one))
            one.eval()
        stack.enter_context(torch.no_grad())
        stack.enter_context(rolled(place, lambda: _check(models.values(), feed)))
        looks = _looks(models, feed, profile, marks, output, ignore_label)
        summary = InputSummary.of(feed.batches())
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
    if not feed.ordered:
        raise DataError("labels are given in the order of the samples, and this loader shuffles; use shuffle=False")
    return marks


def _adaptation(given: Any, model: nn.Module) -> tuple[Adaptation | None, str | None]:
    """The adaptation, and the file that its weights are in if it comes from a folder."""
    if isinstance(given, str | os.PathLike):
        return saved.load(Path(given), model), str(Path(given) / "model.safetensors")
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
        check_takes(one, feed.first(2))


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
        recorders = {name: stack.enter_context(tapped(one, profile.specs)) for name, one in models.items()}
        position = 0
        for batch in feed.batches():
            marks = None if labels is None else sent(labels[position : position + len(batch)], feed.device)
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
        ready = feed.ready(feed.inputs[places])
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
