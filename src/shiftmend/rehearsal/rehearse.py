"""`rehearse`: simulate devices at home, adapt to each, and store how label-free signals relate to the true score."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shiftmend.accelerate.precision import nothing_cached
from shiftmend.adaptation.auto import (
    CANDIDATES,
    CandidateNames,
    Trial,
    choose_usual,
    compare_with_free_shares,
    list_candidates,
    measure_other_shares,
    try_candidates,
)
from shiftmend.adaptation.run import Settings, prepare
from shiftmend.adaptation.run import Task as AdaptationTask
from shiftmend.engine.method import Method, describe_method
from shiftmend.errors import DataError, ProfileError, ShiftmendError
from shiftmend.evaluation.classification import Scores
from shiftmend.evaluation.evaluate import Evaluator
from shiftmend.inputs.batching import random_order
from shiftmend.inputs.feed import Feed, Preprocess
from shiftmend.inputs.tables import Table
from shiftmend.introspection.blocks import BlockNames
from shiftmend.introspection.model_state import on_device
from shiftmend.introspection.outputs import Entry, pick
from shiftmend.introspection.validate import check_model, unwrap
from shiftmend.methods import METHODS
from shiftmend.methods import method as make_method
from shiftmend.passes.evaluation_pass import Observation, run_pass, without_labels
from shiftmend.profiles import fingerprints
from shiftmend.profiles.profile import Profile, as_profile
from shiftmend.profiles.rehearsal import (
    MAX_CLASSES,
    UNTOUCHED,
    Rehearsal,
    RehearsedShift,
    RehearsedSite,
    Task,
    empty_estimates,
    round_signals,
)
from shiftmend.rehearsal import extend as extension
from shiftmend.rehearsal.battery import PlannedShift, from_functions, list_devices, plan_battery
from shiftmend.rehearsal.label_shifts import AS_AT_HOME, PlannedSite, judge_sites, plan_sites
from shiftmend.stats.clusters import assign, find_centres
from shiftmend.stats.groups import as_groups, design_effect, resemble_neighbours
from shiftmend.utils import sealing
from shiftmend.utils.checks import brief, counted, is_whole
from shiftmend.utils.devices import resolve_device
from shiftmend.utils.files import as_path, write_atomically
from shiftmend.utils.json import dumps
from shiftmend.utils.logs import hide_warnings
from shiftmend.utils.progress import Bar, Progress, long_task, progress_bar
from shiftmend.utils.rng import isolate_rng
from shiftmend.utils.tensor_tree import Inputs
from shiftmend.verification import predictions
from shiftmend.verification.class_shares import estimate_shares
from shiftmend.verification.estimate import HOME_DEVIATIONS, MIN_CELLS, Estimator, cross_fit
from shiftmend.verification.predictions import as_class_logits
from shiftmend.verification.reading import READ_SIGNALS, Reading, measure_unexplained, read
from shiftmend.verification.signals import VERIFIED

logger = logging.getLogger(__name__)

DEFAULT_SHIFTS = 12
QUICK_SHIFTS = 9
"""Shifts of a quick rehearsal. With the unshifted data, they are the fewest that allow a 90 % interval."""
SMALL_SIZE = 300
"""Sample size of a site with few samples."""
MAX_SAMPLES = 10_000
"""Largest number of home samples that a rehearsal uses."""
MIN_SAMPLES = 40
"""Smallest number of home samples. So few suffice to choose among candidates, but rarely for a useful interval."""
MIN_SMALL_SIZE = 50
"""Smallest value of the small size. With fewer than three times as many home samples, there is only one size."""
PLANNING_SAMPLES = 1000
"""Number of samples for the search of strengths, which runs the untouched model only."""
SMALL_DRAWS, HALF_DRAWS = 20, 10
"""Random draws of unshifted data that show how signals vary at home: of the small size, and of half of all samples."""
QUICK_CANDIDATES = tuple(name for name in CANDIDATES if not METHODS[name].slow)
UNLABELLED_SHARE = 0.9
"""Share of samples above the confidence threshold if home data have no labels, since then all predictions count as
correct."""
SUSPICIOUSLY_CLOSE = 0.4
"""Divergence relative to its floor below which home data look like the data of the profile itself."""
TOO_GOOD = 0.9995
"""Accuracy above which held-out data look like training data, if there are many samples."""
BELOW_CHANCE = 0.8
"""Accuracy, relative to that of guessing, below which labels look as if classes were in another order."""
MAX_CLASS_BYTES = 192 << 10
"""Largest size of the histograms per class, so that a profile stays below 256 KiB."""
MAX_CLUSTERS, SAMPLES_IN_CLUSTER = 16, 12
"""Number of clusters of the home samples of a regression, and samples that each should have at least on average."""
MAX_SHARE_OF_ONE = 0.25
"""Largest share of the squared error at home that a single sample may cause. One tablet in 100 caused 40 to 48 % of it
between two spectrometers, and made the error at home look 30 to 40 % larger.
"""
FILE_FORMAT = "shiftmend rehearsal"
SITE = -1
"""Stands for the size of a cell that is a site of other class shares."""


@torch.inference_mode(False)
@nothing_cached()
def rehearse(
    model: nn.Module,
    home: Any,
    profile: Profile | str | os.PathLike[str],
    *,
    battery: Sequence[Any] | Mapping[str, Callable[[Tensor], Tensor]] | None = None,
    shifts: int | None = None,
    candidates: CandidateNames | None = None,
    extend: bool = False,
    site_size: int | None = None,
    quick: bool = False,
    per_class: bool = True,
    groups: Any = None,
    batch_size: int | None = None,
    preprocess: Preprocess | None = None,
    blocks: BlockNames | None = None,
    output: Entry = None,
    ignore_label: int | None = None,
    device: str | torch.device = "auto",
    autocast: bool | torch.dtype = False,
    seed: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
    executor: Executor | None = None,
    progress: Progress = None,
) -> Profile:
    """Rehearse adaptations at home, so that a site can estimate its accuracy without labels.

    Held-out home data are passed through a dozen simulated devices. For each device, every candidate of `adapt` adapts
    the model, as it would at a site. The profile stores how the label-free signals relate to the score. With labels,
    the score is the accuracy (or the error of a regression). Without labels, it is the agreement with the model's own
    predictions on the clean inputs.

    Rehearsing takes about as long as fifteen adaptations. Pass the same options as the site will pass to `adapt`.

    Args:
        model: The model that was profiled.
        home: Held-out home data, as inputs or (inputs, labels). The model must not have been trained on them.
        profile: The profile of the model, or the path of its file. It is not changed.
        battery: Your own simulated devices: functions from inputs to inputs, as a list or a dict by name. By default,
            there are devices for images, signals `[N, C, L]` and tables `[N, D]`.
        shifts: Number of simulated shifts; 12, or 9 if `quick`.
        candidates: Methods to rehearse. By default those of `adapt`.
        extend: Keep the rehearsal that the profile holds, and add the candidates that it lacks. Data, battery and
            options must be those of that rehearsal.
        site_size: Samples that sites have, if that is known. By default all home samples and 300 are rehearsed.
        quick: Leave out the slowest candidates (FR, BUFR-IM), the small size and three shifts.
        per_class: Store histograms of each class, which `fr-shares` and `shiftmend.shares` need. They are left out
            anyway where they would take more than 192 KiB. With them, with labels and with `fr-shares` among the
            candidates, sites of other class shares are rehearsed as well. For a regression, histograms of clusters of
            the samples are stored, by which `adapt` tells other samples from another device.
        groups: Name or number of the group of each home sample, if samples come in groups: frames of one patient,
            windows of one recording, photographs of one object. Samples of a group resemble each other, so intervals
            are wider, and draws from home consist of whole groups. Sites are assumed to have groups of the same size.
            By default, all samples count as independent, which makes intervals of such data too narrow.
        batch_size: Samples in a batch, as for `adapt`.
        preprocess: Called with each batch on the device, before the model. Simulated devices change what comes before.
        blocks: Blocks of BUFR, as for `adapt`.
        output: Entry of a tuple or dict that is the model's output.
        ignore_label: Label of samples that no score counts.
        device: Device to compute on.
        autocast: As for `adapt`.
        seed: Seed of the drawn samples and simulated devices.
        checkpoint: Path of a checkpoint file. A rehearsal that was killed resumes from this file.
        executor: Executor that runs shifts in parallel, e.g. `concurrent.futures.ProcessPoolExecutor(4)`.
        progress: Whether to show progress; None shows a bar on a terminal, and a line every half minute elsewhere.

    Returns:
        A new profile with the attribute `rehearsal`; `print(profile.rehearsal)` shows a summary.

    Raises:
        ShiftmendError: If the model, the data, the profile or an option cannot be used.

    Example:
        >>> import torch, shiftmend
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
        >>> profile = shiftmend.profile(model, torch.randn(500, 4))
        >>> rehearsed = shiftmend.rehearse(model, torch.randn(200, 4), profile, candidates=["match-mean"], quick=True)
        >>> rehearsed.rehearsal.metric
        'agreement'
    """
    model, profile = unwrap(model), as_profile(profile)
    if profile.privacy is not None:
        raise ProfileError(
            "Expected an ordinary profile, got a private one, and a rehearsal is not private. Profile without private=."
        )
    profile.check_architecture(model)
    profile.check_weights(model)
    settings = Settings(
        batch_size=batch_size,
        seed=seed,
        preprocess=preprocess,
        blocks=blocks,
        output=output,
        device=resolve_device(device, model),
        autocast=autocast,
        resident=True,
        capture=True,
        compile=False,
        keep=None,
        on_epoch=None,
        checkpoint=None,
        progress=False,
    )
    number = (QUICK_SHIFTS if quick else DEFAULT_SHIFTS) if shifts is None else shifts
    if not is_whole(number) or number < 1:
        raise DataError(f"Expected shifts to be a whole number of at least 1, got {brief(shifts)}.")
    world = _Home.open(model, home, profile, settings, ignore_label, groups)
    if candidates is None:
        candidates = choose_usual(QUICK_CANDIDATES if quick else CANDIDATES, profile, model)
        by_class = per_class and world.task == "classes"
        candidates = tuple(name for name in candidates if by_class or not METHODS[name].frees_shares)
    methods = list_candidates(candidates, profile)
    path = None if checkpoint is None else as_path(checkpoint, "checkpoint")
    if extend:
        return _extend(world, methods, battery, shifts, site_size, path, executor, progress)
    sizes = choose_sizes(world.samples, site_size, quick)
    with progress_bar(progress, "rehearsing", None) as bar, hide_warnings():
        bar.advance(0, "home data")
        blank, remark = world.begin(methods, sizes, per_class=per_class)
        bar.advance(0, "strengths of the simulated devices")
        planned = world.plan(battery, int(number))
    if remark:
        logger.warning("%s", remark)
    logger.info(
        "rehearsing %s at %s with %s; quick=True would leave out fr, bufr-im and the small size",
        counted(len(planned), "simulated shift"),
        counted(len(sizes), "size"),
        counted(len(methods), "candidate"),
    )
    jobs = _Jobs(world, blank, planned, methods, path, with_sites=True)
    with long_task(), progress_bar(progress, "rehearsing", jobs.total) as bar, hide_warnings():
        cells = jobs.run(executor, bar)
    estimator = Estimator(jobs.assemble(cells))
    estimator.record = cross_fit(estimator.record, estimator)
    record = replace(estimator.record, sites=jobs.judge(estimator))
    return replace(profile, rehearsal=record)


def _extend(
    world: _Home,
    methods: Mapping[str, Method],
    battery: Any,
    shifts: int | None,
    site_size: int | None,
    path: Path | None,
    executor: Executor | None,
    progress: Progress,
) -> Profile:
    """Rehearse the candidates that a stored rehearsal lacks, and add them to it."""
    record = world.profile.rehearsal
    if record is None:
        raise DataError("Expected a rehearsed profile to extend, got one without a rehearsal. Leave extend out.")
    sizes = record.sizes if site_size is None else choose_sizes(world.samples, site_size, quick=False)
    extension.check_settings(record, world.list_settings())
    if sizes != record.sizes or (shifts is not None and shifts != len(record.shifts) - 1):
        raise DataError("Expected sizes and shifts of the stored rehearsal, got others. Leave them out.")
    missing = extension.find_missing(record, methods)
    if not missing:
        logger.info("the profile was rehearsed with all of these candidates; nothing is left to do")
        return world.profile
    planned = extension.plan_again(record, world.inputs, battery)
    untouched = {UNTOUCHED: make_method(UNTOUCHED)}
    jobs = _Jobs(world, extension.start_record(record, missing), planned, untouched | missing, path)
    with long_task(), progress_bar(progress, "rehearsing", jobs.total) as bar, hide_warnings():
        bar.advance(0, "comparing with the stored rehearsal")
        for (shift, size), score in jobs.score_untouched():
            extension.check_score(record, shift, size, score)
        cells = jobs.run(executor, bar)
    return replace(world.profile, rehearsal=cross_fit(extension.join(record, jobs.assemble(cells))))


def choose_sizes(samples: int, site_size: int | None, quick: bool) -> tuple[int, ...]:
    """Return the sample sizes to rehearse, in ascending order."""
    if site_size is not None:
        if not is_whole(site_size) or not site_size >= 2:
            raise DataError(f"Expected site_size to be a whole number of at least 2, got {brief(site_size)}.")
        return (min(int(site_size), samples),)
    small = min(SMALL_SIZE, samples // 3)
    return (samples,) if quick or small < MIN_SMALL_SIZE else (small, samples)


@dataclass(frozen=True, eq=False)
class _Home:
    """A model with its held-out home data."""

    model: nn.Module
    profile: Profile
    inputs: Inputs
    labels: Tensor
    labelled: bool
    task: Task
    settings: Settings
    ignore_label: int | None
    groups: Tensor | None = None

    @property
    def samples(self) -> int:
        return len(self.inputs)

    @staticmethod
    def open(
        model: nn.Module, home: Any, profile: Profile, settings: Settings, ignore_label: int | None, groups: Any
    ) -> _Home:
        """Load home data into memory. Without labels, the model's own predictions on clean inputs replace them."""
        place = resolve_device(settings.device)
        feed = Feed(
            home,
            batch_size=settings.batch_size,
            device=place,
            preprocess=settings.preprocess,
            columns=profile.inputs.columns,
            what="home data",
        )
        if feed.inputs is None:
            raise DataError(
                "Expected home data of one shape that fits into memory, got others. Try a few thousand samples."
            )
        if feed.samples < MIN_SAMPLES:
            raise DataError(f"Expected at least {MIN_SAMPLES} samples of home data, got {feed.samples}. Add some.")
        inputs, labels = feed.inputs, feed.labels
        if groups is None and isinstance(home, Table):
            groups = home.groups or None
        numbers = None if groups is None else as_groups(groups, len(inputs))
        if len(inputs) > MAX_SAMPLES:
            chosen = random_order(len(inputs), settings.seed)[:MAX_SAMPLES].sort().values
            inputs = inputs[chosen.to(inputs.device)]
            labels = None if labels is None else labels[chosen.to(labels.device)]
            numbers = None if numbers is None else as_groups(numbers[chosen], len(inputs))
        labelled = labels is not None
        if labels is None:
            with on_device(model, place):
                labels = _answer(model, Feed(inputs, device=place, preprocess=settings.preprocess), settings.output)
        task: Task = "quantities" if labels.is_floating_point() else "classes"
        return _Home(model, profile, inputs, labels, labelled, task, settings, ignore_label, numbers)

    def feed(self, inputs: Inputs) -> Feed:
        """Make a feed of inputs with the options of the rehearsal."""
        own = self.settings
        return Feed(inputs, batch_size=own.batch_size, device=resolve_device(own.device), preprocess=own.preprocess)

    def draw(self, size: int, number: int, *, grouped: bool = False) -> Tensor:
        """Draw random sample indices, or those of random groups, and return them sorted."""
        if size >= self.samples:
            return torch.arange(self.samples)
        seed = self.settings.seed + 7919 * (number + 1)
        order = random_order(self.samples, seed)
        if grouped and self.groups is not None:
            rank = random_order(int(self.groups.max()) + 1, seed).argsort()
            order = order[rank[self.groups[order]].argsort(stable=True)]
        return order[:size].sort().values

    def score(self, model: nn.Module, inputs: Inputs, labels: Tensor) -> float:
        """Return the accuracy of `model` if it predicts classes, otherwise its root mean square error."""
        own = self.settings
        found = Evaluator(
            (inputs, labels),
            preprocess=own.preprocess,
            output=own.output,
            device=own.device,
            ignore_label=self.ignore_label,
            progress=False,
        )(model)
        return found.accuracy if isinstance(found, Scores) else found.root_mean_square_error

    def begin(self, methods: Mapping[str, Method], sizes: tuple[int, ...], *, per_class: bool) -> tuple[Rehearsal, str]:
        """Start a record with the unshifted data only; also return a remark on the data, or ""."""
        place = resolve_device(self.settings.device)
        everything = self.feed(self.inputs)

        def probe() -> None:
            check_model(self.model, everything.examples(2), output=self.settings.output)
            self.profile.check_taps(self.model, everything.first(2))

        with on_device(self.model, place), isolate_rng(place, probe):
            first = read(self.model, everything, self.profile)
            score = self.score(self.model, self.inputs, self.labels)
            record = self._describe(first, score, methods, sizes)
            remark = self._find_remark(first, score)
            if per_class and record.confusion.numel():
                labels = self.labels.flatten().long().cpu()
                record = replace(record, by_class=self._count_by_class(labels, len(record.shares)))
            if per_class and self.task == "quantities":
                record = self._add_clusters(record)
            mean, deviation = self._watch_unshifted(record, sizes)
            record = replace(record, home_mean=mean, home_deviation=deviation)
            if self.groups is not None:
                record = replace(record, group_deviation=self._watch_unshifted(record, sizes, grouped=True)[1])
        return record, remark

    def _describe(
        self, reading: Reading, score: float, methods: Mapping[str, Method], sizes: tuple[int, ...]
    ) -> Rehearsal:
        others = [f"agreement with {name}" for name in methods]
        known: dict[str, Any] = {"thresholds": (0.0, 0.0), "temperature": 1.0}
        if self.task == "classes":
            logits = as_class_logits(reading.outputs).cpu()
            labels = self.labels.flatten().cpu()
            if len(labels) == len(logits) and self.ignore_label is None:
                if self.labelled:
                    known["temperature"] = predictions.fit_temperature(logits, labels)
                if logits.shape[1] <= MAX_CLASSES:
                    pairs = labels * logits.shape[1] + logits.argmax(1)
                    counts = torch.bincount(pairs, minlength=logits.shape[1] ** 2)
                    known["confusion"] = counts.view(logits.shape[1], -1).float()
            logits = logits / known["temperature"]
            share = score if self.labelled else UNLABELLED_SHARE
            known["thresholds"] = (
                predictions.find_threshold(predictions.confidence(logits), share),
                predictions.find_threshold(predictions.negative_entropy(logits), share),
            )
            known["shares"] = predictions.class_shares(logits.argmax(1), logits.shape[1]).float()
            known |= self._measure_groups(logits)
        else:
            known["output_mean"] = reading.outputs.mean(0).cpu()
            known["output_deviation"] = reading.outputs.std(0, unbiased=False).cpu()
            squares = self._square_errors(reading)
            if squares is not None:
                known["error_kurtosis"] = len(squares) * float(squares.square().sum() / squares.sum().square())
                if self.groups is not None:
                    known["design_effect"] = design_effect(squares, self.groups)
        nothing = torch.empty(0)
        return empty_estimates(
            Rehearsal(
                task=self.task,
                labelled=self.labelled,
                samples=self.samples,
                sizes=sizes,
                score=score,
                candidates=tuple(methods),
                methods={name: describe_method(method) for name, method in methods.items()},
                signals=(*READ_SIGNALS, *others),
                shifts=(),
                scores=nothing,
                values=nothing,
                home_mean=nothing,
                home_deviation=nothing,
                estimates=nothing,
                scales=nothing,
                chosen=nothing,
                settings=self.list_settings(),
                groups=0 if self.groups is None else int(self.groups.max()) + 1,
                **known,
            )
        )

    def _measure_groups(self, logits: Tensor) -> dict[str, float]:
        """Return the design effects of groups on the accuracy and on the predicted classes."""
        labels, answers = self.labels.flatten().cpu(), logits.argmax(1)
        if self.groups is None or len(answers) != len(self.groups):
            return {}
        correct = (answers == labels).double()
        # If all samples are correct, only the confidence shows how alike samples of a group are.
        scored = predictions.confidence(logits) if bool((correct == correct[0]).all()) else correct
        one_hot = torch.nn.functional.one_hot(answers, logits.shape[1])
        both = (design_effect(values, self.groups) for values in (scored, one_hot))
        return dict(zip(("design_effect", "answer_design_effect"), both, strict=True))

    def _add_clusters(self, record: Rehearsal) -> Rehearsal:
        """Add clusters of the home samples with their histograms, unless samples are too few or too large."""
        profile = self.profile.to(resolve_device(self.settings.device))
        count = min(MAX_CLUSTERS, self.samples // SAMPLES_IN_CLUSTER)
        if count < 2 or not self._has_one_row_each():
            return record
        parts: list[Tensor] = []

        def project(seen: Observation) -> None:
            parts.extend(profile.slices["verification"].projector.project_in_parts(seen.activations["features"]))

        batches = without_labels(self.feed(self.inputs).batches())
        run_pass(self.model, batches, project, taps={"features": profile.specs["features"]})
        values = torch.cat(parts).cpu()
        centres = find_centres(values, count, self.settings.seed)
        numbers = assign(values, centres)
        by_cluster = self._count_by_class(numbers, len(centres)) if len(centres) > 1 else {}
        if not by_cluster:
            return record
        shares = torch.bincount(numbers, minlength=len(centres)) / len(numbers)
        return replace(record, by_class=by_cluster, cluster_centres=torch.cat([centres, shares.unsqueeze(1)], 1))

    def _has_one_row_each(self) -> bool:
        """Return whether each sample has one row of features and of logits, unlike the positions of a map."""
        return all(self.profile.taps[name].samples == self.profile.inputs_seen for name in VERIFIED)

    def _count_by_class(self, labels: Tensor, classes: int) -> dict[str, Tensor]:
        """Count histograms by class in the form of `Rehearsal.by_class`; return {} if they are too large.

        Args:
            labels: Class, or cluster, of each sample.
            classes: Number of classes.
        """
        profile = self.profile.to(resolve_device(self.settings.device))
        slices = profile.slices["verification"]
        whole = {name: profile.taps[name] for name in VERIFIED} | {"slices": slices.histogram}
        size = classes * sum(one.counts.numel() for one in whole.values())
        if not self._has_one_row_each() or size > MAX_CLASS_BYTES:
            return {}
        trackers = {name: [one.new_tracker() for _ in range(classes)] for name, one in whole.items()}

        def update(seen: Observation) -> None:
            assert seen.labels is not None
            for number in seen.labels.unique().tolist():
                rows = (seen.labels == number).to(seen.inputs.device)
                own = {name: seen.activations[name][rows] for name in VERIFIED}
                for name, values in own.items():
                    trackers[name][number].update(values)
                trackers["slices"][number].update(slices.projector(own["features"]))

        def pairs() -> Iterator[tuple[Inputs, Tensor | None]]:
            done = 0
            for batch in self.feed(self.inputs).batches():
                yield batch, labels[done : done + len(batch)]
                done += len(batch)

        run_pass(self.model, pairs(), update, taps={name: profile.specs[name] for name in VERIFIED})
        counts = {name: torch.stack([one.counts for one in every]).cpu() for name, every in trackers.items()}
        largest = {name: one.amax(2, keepdim=True).clamp_min(1e-12) for name, one in counts.items()}
        return {name: (255 * one / largest[name]).round().byte() for name, one in counts.items()}

    def list_settings(self) -> dict[str, Any]:
        """Return the options and the fingerprint of the data that a rehearsal depends on."""
        return {
            "batch_size": self.settings.batch_size,
            "autocast": str(self.settings.autocast),
            "seed": self.settings.seed,
            "home_sha256": self.fingerprint(),
        }

    def fingerprint(self) -> str:
        """Return the SHA-256 of home inputs and labels."""
        parts = [self.inputs, self.labels] + ([] if self.groups is None else [self.groups])
        return hashlib.sha256("".join(map(fingerprints.digest, parts)).encode()).hexdigest()

    def _find_remark(self, reading: Reading, score: float) -> str:
        """Return a remark if the data look like those the model was trained on or profiled with."""
        # With many positions per input, sampling noise is below the floor, which is computed from the number of inputs.
        by_input = self.profile.taps["features"].samples == self.profile.inputs_seen
        if by_input and reading.verification.divergence < SUSPICIOUSLY_CLOSE * reading.verification.floor:
            return "the home data look like those of the profile itself; use held-out data, or estimates are too high"
        squares = self._square_errors(reading) if self.task == "quantities" else None
        if squares is not None and (share := float(squares.max() / squares.sum())) > MAX_SHARE_OF_ONE:
            worst = int(squares.argmax())
            return f"sample {worst} makes {share:.0%} of the squared error at home; check its label, or leave it out"
        guessing = 0.0 if self.task == "quantities" else 1 / as_class_logits(reading.outputs).shape[1]
        if self.labelled and score < BELOW_CHANCE * guessing:
            return f"the accuracy at home is {score:.1%}, below chance; check the labels and the order of the classes"
        if self.labelled and self.task == "classes" and score >= TOO_GOOD and self.samples >= 1000:
            return "the model answers all home data correctly; if it was trained on them, estimates are too high"
        if self.groups is None and by_input and self._resemble_neighbours(reading, squares):
            return (
                "neighbouring home samples resemble each other, as frames of one patient or windows of one recording "
                "do; intervals are too narrow unless you pass groups="
            )
        return ""

    def _resemble_neighbours(self, reading: Reading, squares: Tensor | None) -> bool:
        if self.task == "quantities":
            return squares is not None and resemble_neighbours(squares, torch.zeros(len(squares)))
        logits, labels = as_class_logits(reading.outputs).cpu(), self.labels.flatten().cpu()
        if len(logits) != len(labels) or self.ignore_label is not None:
            return False
        correct = (logits.argmax(1) == labels).double()
        return any(resemble_neighbours(values, labels) for values in (logits, correct))

    def _square_errors(self, reading: Reading) -> Tensor | None:
        """Return the squared error of each sample, `[N]`; None for maps, or if all errors are zero."""
        labels = self.labels.double().cpu()
        if not self.labelled or labels.numel() != reading.outputs.numel():
            return None
        squares = (reading.outputs.double().cpu() - labels.view(reading.outputs.shape)).square().mean(1)
        return squares if bool(squares.sum() > 0) else None

    def _watch_unshifted(
        self, record: Rehearsal, sizes: tuple[int, ...], *, grouped: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return mean and deviation of the untouched model's signals on unshifted data, for each size: `[S, G]`.

        Samples are drawn independently, or by group.
        """
        means, deviations = [], []
        skew = record.signals.index("skew")
        for size in sizes:
            whole = size >= self.samples
            draws, each = (HALF_DRAWS, max(2, self.samples // 2)) if whole else (SMALL_DRAWS, size)
            places = [self.draw(each, 100 + draw, grouped=grouped) for draw in range(draws)]
            rows = torch.stack([self._read_row(record, one) for one in places])
            # Halves drawn without replacement vary as much as samples of the full size do between sites.
            mean = self._read_row(record, self.draw(size, 0)) if whole else rows.mean(0)
            means.append(mean)
            deviations.append(rows.std(0))
            if self.task == "classes":
                # Draws share the class shares of the samples they come from. Data of a site do not.
                means[-1][skew] = 0.0
                deviations[-1][skew] = self._find_skew_deviation(record, size, grouped)
        return torch.stack(means).float(), torch.stack(deviations).float()

    def _find_skew_deviation(self, record: Rehearsal, size: int, grouped: bool) -> float:
        alone = predictions.skew_by_chance(record.shares, size, self.samples)
        if not grouped:
            return alone[1]
        both = [number / record.answer_design_effect for number in (size, self.samples)]
        by_group = predictions.skew_by_chance(record.shares, *both)
        # The signal is above its mean for independent samples, so the limit has to be that much higher.
        return by_group[1] + (by_group[0] - alone[0]) / HOME_DEVIATIONS

    def _read_row(self, record: Rehearsal, places: Tensor) -> Tensor:
        reading = read(self.model, self.feed(self.inputs[places.to(self.inputs.device)]), self.profile, record)
        return as_row(record, reading.signals)

    def plan(self, battery: Any, number: int) -> list[PlannedShift]:
        """Choose the simulated shifts and their strengths."""
        if battery is not None:
            return from_functions(battery)
        some = self.draw(min(PLANNING_SAMPLES, self.samples), 1)
        inputs, labels = self.inputs[some.to(self.inputs.device)], self.labels[some.to(self.labels.device)]
        devices = list_devices(self.inputs)
        assert isinstance(inputs, Tensor), "`list_devices` refuses several inputs"
        sign, ruined = 1.0, None
        if self.task == "quantities":
            # A model that always predicts the mean is useless, so larger errors count as equal to its error.
            sign, ruined = -1.0, -float(labels.double().std())
        return plan_battery(
            inputs,
            devices,
            lambda shifted: sign * self.score(self.model, shifted, labels),
            size=number,
            seed=self.settings.seed,
            ruined=ruined,
        )


def as_row(record: Rehearsal, signals: Mapping[str, float]) -> Tensor:
    """Return signals as a row in the order of the record, `[G]`; NaN if a signal is missing or not finite."""
    values = [signals.get(name, math.nan) for name in record.signals]
    return torch.tensor([value if math.isfinite(value) else math.nan for value in values], dtype=torch.float64)


def _answer(model: nn.Module, feed: Feed, output: Entry) -> Tensor:
    """Return the model's own predictions: classes, or the quantities themselves."""
    parts: list[Tensor] = []

    def keep(seen: Observation) -> None:
        result = pick(seen.output, output, "the model")
        classes = result.ndim > 1 and result.shape[1] > 1
        parts.append((result.argmax(1) if classes else result).cpu())

    run_pass(model, without_labels(feed.batches()), keep)
    return torch.cat(parts)


@dataclass(frozen=True, eq=False)
class _Job:
    """One simulated shift at one sample size, with everything that another process needs to run it."""

    home: _Home
    record: Rehearsal
    methods: Mapping[str, Method]
    inputs: Inputs
    labels: Tensor
    looks_at_shares: bool = False


Cell = dict[str, dict[str, Any]]
"""Score and signals by candidate."""


def run_job(job: _Job) -> Cell:
    """Adapt by every candidate to one simulated shift; return scores and signals by candidate."""
    home = job.home
    profile = replace(home.profile, rehearsal=job.record)
    with hide_warnings():
        task = prepare(home.model, job.inputs, profile, make_method(UNTOUCHED), home.settings)
        trials = try_candidates(task, home.settings, job.methods)
        cell: Cell = {}
        for trial in trials:
            if trial.adaptation is None:
                continue
            if trial.adaptation.interrupted:
                raise KeyboardInterrupt
            score = home.score(trial.adaptation.model, job.inputs, job.labels)
            cell[trial.name] = {"score": score, "signals": trial.signals, "seconds": round(trial.seconds, 3)}
            if job.looks_at_shares:
                cell[trial.name] |= _look_at_shares(task, trial, job.record)
    return cell


def _look_at_shares(task: AdaptationTask, trial: Trial, record: Rehearsal) -> dict[str, Any]:
    """Return what a candidate tells of class shares, for a site to be judged by."""
    assert trial.reading is not None
    found = estimate_shares(trial.reading.outputs, record)
    facts: dict[str, Any] = {
        "beyond": measure_other_shares(found, record),
        "distance": trial.reading.measure_distance(record),
    }
    if trial.name == UNTOUCHED:
        free = compare_with_free_shares(task, trial)
        assert task.profile is not None
        assert free is not None, "there are histograms of the classes"
        facts |= {
            "answers": predictions.class_shares(trial.reading.answers, len(record.shares)).tolist(),
            "free": {name: free.signals[name] for name in ("slices", "marginals")},
            "unexplained": measure_unexplained(trial.reading, free, record, task.profile.bins),
            "expected": Estimator(record).estimate_with_shares(found).value,
        }
    return facts


class _Jobs:
    """All cells of a rehearsal: finished ones, missing ones, and the file that stores them."""

    def __init__(
        self,
        home: _Home,
        record: Rehearsal,
        planned: Sequence[PlannedShift],
        methods: Mapping[str, Method],
        path: Path | None,
        *,
        with_sites: bool = False,
    ) -> None:
        self.home, self.methods, self.path = home, methods, path
        self.planned: list[PlannedShift | None] = [None, *planned]
        names = [RehearsedShift("none", "none", 0.0)]
        names += [RehearsedShift(one.name, one.family, float(one.strength)) for one in planned]
        self.record = replace(record, shifts=tuple(names))
        self.sites = self._plan_sites() if with_sites else []
        self.cells = self._load()

    def _plan_sites(self) -> list[PlannedSite]:
        """Choose sites of other class shares, if a candidate can make use of them."""
        is_used = any(method.frees_shares for method in self.methods.values())
        if not (is_used and self.record.by_class and self.home.labelled and self.record.task == "classes"):
            return []
        mendable = [shift is None or shift.device.mendable for shift in self.planned]
        return plan_sites(self.home.labels.flatten().long(), self.record, mendable, self.home.settings.seed)

    @property
    def total(self) -> int:
        """Number of cells."""
        return len(self.planned) * len(self.record.sizes) + len(self.sites)

    @property
    def identity(self) -> str:
        """Hash of everything that determines the rehearsal."""
        record = self.record
        facts = {
            "weights": fingerprints.weights(self.home.model),
            "settings": dict(record.settings),
            "methods": {name: dict(method) for name, method in record.methods.items()},
            "sizes": list(record.sizes),
            "shifts": [[shift.name, shift.strength] for shift in record.shifts],
            "sites": [[site.kind, site.shift, len(site.places)] for site in self.sites],
        }
        return hashlib.sha256(dumps(facts).encode()).hexdigest()

    def _load(self) -> dict[str, Cell]:
        """Load the cells of an interrupted rehearsal from the checkpoint."""
        if self.path is None or not self.path.exists():
            return {}
        try:
            found, _ = sealing.check_json(self.path.read_text())
            cells: dict[str, Cell] = found["cells"]
            known = found["format"] == FILE_FORMAT and found["identity"] == self.identity
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ShiftmendError(
                f"Expected a checkpoint of a rehearsal, got {self.path}, which is none. Remove it, or name another "
                "file."
            ) from error
        if not known:
            raise ShiftmendError(
                f"Expected a checkpoint of this rehearsal, got {self.path}, which belongs to another. Remove it, or "
                "name another file."
            )
        return cells

    def _save(self) -> None:
        if self.path is not None:
            facts = {"format": FILE_FORMAT, "identity": self.identity, "cells": self.cells}
            content = sealing.seal_json(dumps(sealing.blank_entries() | facts))
            write_atomically(self.path, content.encode())

    def run(self, executor: Executor | None, bar: Bar) -> dict[str, Cell]:
        """Run what is missing, and keep it as it comes."""
        missing = [place for place in (*self._places(), *self._list_sites()) if _key(*place) not in self.cells]
        bar.advance(self.total - len(missing))
        started = time.perf_counter()
        outcomes = (
            ((place, run_job(self._make_job(*place))) for place in missing)
            if executor is None
            else self._run_in_parallel(executor, missing)
        )
        for done, ((shift, size), cell) in enumerate(outcomes, 1):
            self.cells[_key(shift, size)] = cell
            self._save()
            left = (time.perf_counter() - started) / done * (len(missing) - done)
            what = self.record.shifts[shift].name if size != SITE else "other class shares"
            bar.advance(1, f"{what}, about {math.ceil(left / 60)} min left")
        return self.cells

    def score_untouched(self) -> Iterator[tuple[tuple[int, int], float]]:
        """Score the untouched model in each cell, without adapting."""
        with on_device(self.home.model, resolve_device(self.home.settings.device)):
            for place in self._places():
                job = self._make_job(*place)
                yield place, self.home.score(self.home.model, job.inputs, job.labels)

    def _run_in_parallel(
        self, executor: Executor, missing: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[tuple[int, int], Cell]]:
        waiting = [(place, executor.submit(run_job, self._make_job(*place))) for place in missing]
        for place, future in waiting:
            yield place, future.result()

    def _places(self) -> Iterator[tuple[int, int]]:
        for size in reversed(range(len(self.record.sizes))):
            for shift in range(len(self.planned)):
                yield shift, size

    def _list_sites(self) -> Iterator[tuple[int, int]]:
        for number in range(len(self.sites)):
            yield number, SITE

    def _make_job(self, number: int, size: int) -> _Job:
        home, methods = self.home, self.methods
        if size == SITE:
            shift, places = self.sites[number].shift, self.sites[number].places
            # Behind the device of home, `auto` looks at the untouched model alone.
            methods = methods if shift else {UNTOUCHED: methods[UNTOUCHED]}
        else:
            shift, places = number, home.draw(self.record.sizes[size], 1000 * size + number)
        device = self.planned[shift]
        inputs = home.inputs[places.to(home.inputs.device)]
        labels = home.labels[places.to(home.labels.device)]
        shifted = inputs if device is None else device(inputs, home.settings.seed)
        # Another process needs the model and the options, and of the data this cell alone.
        bare = replace(home, inputs=home.inputs[:0].cpu(), labels=home.labels[:0].cpu())
        looks = bool(self.sites) and size in (SITE, len(self.record.sizes) - 1)
        return _Job(bare, self.record, methods, shifted.cpu(), labels.cpu(), looks)

    def judge(self, estimator: Estimator) -> tuple[RehearsedSite, ...]:
        """Return what would have been told of each site, and of each simulated shift at the class shares of home."""
        record = estimator.record
        if not self.sites:
            return ()
        free = [name for name in record.candidates if self.methods[name].frees_shares]
        last = len(record.sizes) - 1
        alone = [
            (PlannedSite(AS_AT_HOME, shift, self.home.draw(record.sizes[last], 1000 * last + shift), 0.0), shift)
            for shift in range(1, len(record.shifts))
        ]
        pairs = [(site, self.cells[_key(shift, last)]) for site, shift in alone]
        pairs += [(site, self.cells[_key(number, SITE)]) for number, site in enumerate(self.sites)]
        return judge_sites(estimator, pairs, free)

    def assemble(self, cells: Mapping[str, Cell]) -> Rehearsal:
        """Combine all cells into a record; failed cells are NaN, and candidates that mostly failed are left out.

        Raises:
            DataError: If the untouched model has no score for a shift.
        """
        record = self.record
        failures = {name: self._find_failures(cells, name) for name in record.candidates}
        if failures[UNTOUCHED]:
            unscored = record.shifts[failures[UNTOUCHED][0][0]].name
            raise DataError(
                f"Expected a score of the untouched model for each shift, got none for {unscored}. Leave that shift "
                "out."
            )
        names = [name for name, failed in failures.items() if self._is_usable(failed)]
        for name, failed in failures.items():
            if name not in names:
                logger.warning("%s failed in a rehearsal and is no candidate", name)
            elif failed:
                logger.warning("%s failed in %d of %d cells of the rehearsal", name, len(failed), self.total)
        scores = torch.full((len(record.shifts), len(record.sizes), len(names)), math.nan, dtype=torch.float64)
        values = torch.full((*scores.shape, len(record.signals)), math.nan, dtype=torch.float64)
        for shift, size in self._places():
            cell = cells[_key(shift, size)]
            for place, name in enumerate(names):
                if not _has_score(cell, name):
                    continue
                scores[shift, size, place] = cell[name]["score"]
                values[shift, size, place] = as_row(record, cell[name]["signals"])
        complete = replace(
            record,
            candidates=tuple(names),
            methods={name: record.methods[name] for name in names},
            scores=scores.float(),
            values=round_signals(values),
        )
        return empty_estimates(complete)

    def _find_failures(self, cells: Mapping[str, Cell], name: str) -> list[tuple[int, int]]:
        return [place for place in self._places() if not _has_score(cells[_key(*place)], name)]

    def _is_usable(self, failed: Sequence[tuple[int, int]]) -> bool:
        """Return whether a candidate succeeded in half of all cells, and in enough cells of one size to fit a map."""
        if not failed:
            return True
        each = [len(self.planned) - sum(size == own for _, own in failed) for size in range(len(self.record.sizes))]
        return 2 * len(failed) <= self.total and max(each) >= MIN_CELLS


def _has_score(cell: Cell, name: str) -> bool:
    """Return whether a candidate has a finite score in a cell."""
    return name in cell and math.isfinite(cell[name]["score"])


def _key(shift: int, size: int) -> str:
    return f"{shift},{size}"
