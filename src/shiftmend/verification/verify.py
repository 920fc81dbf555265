"""`verify`: check without labels whether a model's features on the target are distributed as at home."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from shiftmend.errors import DataError
from shiftmend.evaluation.classification import Scores
from shiftmend.evaluation.evaluate import Evaluator
from shiftmend.inputs.feed import Feed, Preprocess
from shiftmend.inputs.sources import find_table
from shiftmend.introspection.model_state import on_device
from shiftmend.introspection.outputs import Entry
from shiftmend.introspection.validate import check_model, unwrap
from shiftmend.profiles import fingerprints
from shiftmend.profiles.fingerprints import summarise
from shiftmend.profiles.profile import Profile, as_profile
from shiftmend.profiles.rehearsal import UNTOUCHED, Rehearsal
from shiftmend.utils.devices import resolve_device
from shiftmend.utils.progress import Progress, progress_bar
from shiftmend.utils.rng import isolate_rng
from shiftmend.verification.estimate import Estimate, Estimator
from shiftmend.verification.harm import OTHER_SAMPLES, looks_like_selection
from shiftmend.verification.reading import Reading, read
from shiftmend.verification.verdict import Verification


def verify(
    model: nn.Module,
    target: Any,
    profile: Profile | str | os.PathLike[str],
    *,
    adaptation: Any = None,
    labelled: Any = None,
    batch_size: int | None = None,
    preprocess: Preprocess | None = None,
    output: Entry = None,
    device: str | torch.device = "auto",
    progress: Progress = None,
) -> Verification:
    """Check without labels whether the features of a model, adapted or not, are distributed as at home.

    With a rehearsed profile, `estimate` of the result is the estimated accuracy on the target, with an interval. As in
    `adapt`, a warning is logged if the inputs seem to be preprocessed in another way than at the source. Weights that
    differ from the profile's cause no warning, because an adapted model has such weights.

    Args:
        model: The model to verify. It runs in eval mode, and its train and eval modes are restored.
        target: A tensor, an array, a data frame, a `Dataset` or a `DataLoader`, of inputs or (inputs, ...).
        profile: The source's profile, or the path of its file.
        adaptation: How the model was adapted: the result of `adapt` or its manifest. Not needed for a model that
            `adapt` returned, nor for one with the weights of the profile, which is untouched.
        labelled: A few labelled samples of the target, as (inputs, labels). They narrow the estimate; their own score
            is shown as well.
        batch_size: Number of samples per batch.
        preprocess: Function applied to each batch of inputs on the device, before the model.
        output: Entry of a tuple or dict that is the model's output; used for `labelled` only.
        device: Device to compute on.
        progress: Whether to show a progress bar; None shows one on a terminal only.

    Returns:
        The divergences, and the verdict about them.

    Raises:
        ShiftmendError: If the model, the data or the profile cannot be used together.

    Example:
        >>> import torch, shiftmend
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
        >>> profile = shiftmend.profile(model, torch.randn(2000, 4))
        >>> shiftmend.verify(model, torch.randn(2000, 4) + 2, profile).verdict
        'not restored'
    """
    model = unwrap(model)
    profile = as_profile(profile)
    profile.check_architecture(model)
    place = resolve_device(device, model)
    columns = profile.inputs.columns
    feed = Feed(target, batch_size=batch_size, device=place, preprocess=preprocess, columns=columns, what="target data")

    def probe() -> None:
        check_model(model, feed.examples(2))
        profile.check_taps(model, feed.first(2))

    with (
        on_device(model, place),
        isolate_rng(place, probe),
        progress_bar(progress, "verify", feed.known_samples) as bar,
    ):
        profile.check_inputs(summarise(feed.batches()))
        feed.on_batch = bar.advance
        how = find_adaptation(model, profile, adaptation)
        reading = read(model, feed, profile, profile.rehearsal, how.temperature, free_shares=how.free_shares)
    if profile.rehearsal is None:
        return reading.verification
    estimate = _estimate(reading, profile.rehearsal, how.method)
    if labelled is not None:
        few, _ = find_table(labelled, columns, "labelled samples")
        evaluate = Evaluator(few, preprocess=preprocess, output=output, device=place, progress=False)
        scores = evaluate(model)
        if not isinstance(scores, Scores):
            raise DataError("Expected labelled samples with class numbers, got quantities. Try shiftmend.evaluate.")
        estimate = estimate.with_labels(round(scores.accuracy * scores.samples), scores.samples)
    return replace(reading.verification.judge_by(profile.rehearsal, how.method), estimate=estimate)


class Adapted(NamedTuple):
    """Record of how a model was adapted.

    Attributes:
        method: Name of the method; None if the method is unknown.
        temperature: Calibration temperature: weight and bias of the head were divided by it. 1 without calibration.
        free_shares: True if the method estimated the class shares of the target instead of assuming those of home.
    """

    method: str | None
    temperature: float = 1.0
    free_shares: bool = False


def find_adaptation(model: nn.Module, profile: Profile, given: Any) -> Adapted:
    """Return how a model was adapted; the method is None if unknown."""
    manifest = getattr(given, "manifest", given)
    if isinstance(manifest, Mapping):
        temperature = manifest.get("calibration", {}).get("temperature", 1.0)
        return Adapted(str(manifest["method"]["name"]), float(temperature), bool(manifest.get("free_shares")))
    known = getattr(model, "shiftmend_adaptation", None)
    if isinstance(known, Mapping):
        return Adapted(str(known["method"]), float(known["temperature"]), bool(known.get("free_shares")))
    return Adapted(UNTOUCHED if fingerprints.weights(model) == profile.weights else None)


def _estimate(reading: Reading, record: Rehearsal, method: str | None) -> Estimate:
    if method is None:
        reason = "it is not known how the model was adapted; pass adaptation=, the result of adapt or its manifest"
        return Estimate(None, None, None, record.metric, (reason,))
    estimator = Estimator(record)
    if method == UNTOUCHED and estimator.is_at_home(reading.signals, reading.samples):
        return estimator.estimate_at_home(reading.samples)
    apart = reading.measure_distance(record)
    doubts = [OTHER_SAMPLES] if method == UNTOUCHED and looks_like_selection(reading, record) else []
    return estimator.estimate(method, reading.signals, reading.samples, distance=apart, reasons=doubts)
