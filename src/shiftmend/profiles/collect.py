"""Collecting a profile at the source: passes over the data that find ranges and then count histograms."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from shiftmend.distributed.batch_norm import synchronised
from shiftmend.distributed.collectives import all_processes, all_true, check_same, warn_without_process_group
from shiftmend.errors import ProfileError
from shiftmend.inputs.feed import Feed, Preprocess
from shiftmend.introspection.model_state import on_device
from shiftmend.introspection.modes import find_batch_norms, preserve_modes
from shiftmend.introspection.outputs import Entry
from shiftmend.introspection.taps import Tap
from shiftmend.introspection.trace import trace
from shiftmend.introspection.validate import check_model, unwrap
from shiftmend.passes.evaluation_pass import Observation, run_pass, without_labels
from shiftmend.profiles import fingerprints, privacy
from shiftmend.profiles.batchnorm import warn_if_stale
from shiftmend.profiles.presets import Preset
from shiftmend.profiles.presets import preset as find_preset
from shiftmend.profiles.privacy import Collected, Privacy
from shiftmend.profiles.profile import Profile, as_profile
from shiftmend.stats.answers import AnswerTracker
from shiftmend.stats.gaussians import CovarianceTracker, FullGaussian
from shiftmend.stats.histograms import SOFT_TEMPERATURE, Bins, CountTracker, RangeTracker, check_bins, usable_units
from shiftmend.stats.moments import MomentTracker
from shiftmend.stats.quantiles import QuantileTracker
from shiftmend.stats.slices import MAX_WEIGHTS, Projector, Slices, bins_of_slices
from shiftmend.stats.statistics import Statistic
from shiftmend.utils.checks import brief, check_known, counted, is_whole
from shiftmend.utils.devices import resolve_device
from shiftmend.utils.processes import of_first_process, world_size
from shiftmend.utils.progress import Bar, PassProgress, Progress, progress_bar
from shiftmend.utils.rng import isolate_rng

logger = logging.getLogger(__name__)


logger.addFilter(of_first_process)


VERIFICATION_SLICES = 128


SLICE_SEEDS = {"verification": 20220425, "alignment": 20220426}


KEEP_BYTES = 2 << 30
"""Activations up to this size are kept, so that the network runs once instead of three times."""


Samples = dict[str, Tensor]


Gaussian = Literal["marginal", "full"]


LEAST_SAMPLES = 10
"""Smallest number of samples of a profile. With fewer, the profile would almost reveal them: the mean of one sample is
that sample."""


MOST_CORRELATED = 4096
"""Largest number of features whose covariance is stored: 32 MiB."""


@torch.inference_mode(False)
@torch.no_grad()
def profile(
    model: nn.Module,
    source: Any,
    *,
    preset: str | None = None,
    bins: Bins | None = None,
    head: str | None = None,
    taps: Mapping[str, str | Tap] | None = None,
    output: Entry = None,
    gaussian: Gaussian | None = None,
    like: Profile | str | os.PathLike[str] | None = None,
    private: Privacy | None = None,
    batch_size: int | None = None,
    preprocess: Preprocess | None = None,
    device: str | torch.device = "auto",
    keep_bytes: int = KEEP_BYTES,
    progress: Progress = None,
) -> Profile:
    """Collect the profile of a model: the distributions of its features and logits over the source inputs.

    The model runs in eval mode, and its train and eval modes are restored. A warning is logged if BatchNorm's running
    statistics clearly differ from those of the source data; see `shiftmend.refresh_batchnorm`.

    In a process group, every process calls `profile` with the same model and data, and gets the same profile; each runs
    its part of every batch.

    Args:
        model: Any `nn.Module`. Inputs in a dict are passed by name, those in a tuple in order.
        source: A tensor, an array, a data frame, a dict of arrays, a `Dataset` or a `DataLoader`, of inputs or of
            (inputs, ...). The column names of a data frame are stored.
        preset: Bins and loss: `"reference"` (the default), `"paper"` or `"sliced"`.
        bins: Bins to use instead of the preset's. The default bins are softer (temperature 0.05) for models without
            BatchNorm.
        head: Name of the module that classifies, if it cannot be found automatically.
        taps: Additional taps by name, e.g. `{"early": "layer1"}`.
        output: Entry of a tuple or dict that is the model's output.
        gaussian: `"full"` also stores the covariance of the features, four bytes a pair, for the method `full-gauss`.
        like: Another profile, or its file, whose ranges and slices are used. Both profiles can then be merged.
        private: A privacy budget, `shiftmend.Privacy(epsilon=1.0)`. Everything that the profile stores is then
            differentially private, with noise from OpenDP (extra `private`). Without it, a profile holds exact
            numbers, among them the lowest and highest value of each feature.
        batch_size: Samples in a batch.
        preprocess: Called with each batch on the device, before the model.
        device: Where to compute.
        keep_bytes: Activations up to this size are kept, so that the network runs once. Otherwise it runs three times
            (ranges, counts, slices) with the same result.
        progress: True shows a progress bar, False does not, None does so on a terminal.

    Returns:
        The profile; `profile.save(path)` writes it to one small file.

    Raises:
        ProfileError: If features are constant, not finite or too many.
        ShiftmendError: If the model or the data cannot be used.

    Example:
        >>> import torch, shiftmend
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
        >>> shiftmend.profile(model, torch.randn(100, 4)).samples
        100
    """
    warn_without_process_group()
    model = unwrap(model)
    place = resolve_device(device, model)
    if like is not None and any(part is not None for part in (preset, bins, taps, head, gaussian)):
        raise ProfileError(
            "Expected neither preset, bins, taps, head nor gaussian beside like=, which brings them, got some. Leave "
            "them out."
        )
    like = None if like is None else as_profile(like, "what like= names")
    if like is not None:
        like.check_architecture(model)
    if private is not None:
        _check_private(private, gaussian, like)
    if gaussian is not None:
        check_known(gaussian, get_args(Gaussian), "kind of Gaussian", ProfileError)
    if not is_whole(keep_bytes):
        raise ProfileError(f"Expected keep_bytes to be a whole number of bytes, got {brief(keep_bytes)}.")
    full = isinstance(like.gaussian, FullGaussian) if like else gaussian == "full"
    chosen = find_preset(like.preset if like else "reference" if preset is None else preset)
    usual = chosen.bins if find_batch_norms(model) else chosen.bins.with_temperature(SOFT_TEMPERATURE)
    cut = like.bins if like else check_bins(bins, usual)
    columns = like.inputs.columns if like else ()
    feed = Feed(source, batch_size=batch_size, device=place, preprocess=preprocess, columns=columns, what="source data")
    weights = fingerprints.weights(model)  # First, since some models change their buffers when they run.
    with (
        on_device(model, place),
        preserve_modes(model),
        isolate_rng(place, lambda: check_model(model, feed.examples(2))),
        progress_bar(progress, "profiling", None) as bar,
    ):
        model.eval()
        summary = fingerprints.summarise(feed.batches())  # It refuses NaN that preprocess has made.
        specs = trace(model, feed.first(2), head=head, taps=like.specs if like else taps, output=output).taps
        _check_agreement(model, feed, (specs, chosen.name, cut, full, keep_bytes), like)
        with all_processes(), synchronised(model):
            passes = _Passes(model, feed, specs, keep_bytes, bar)
            trackers = _ranges(passes, specs, like)
            if private is None:
                made = _collect(passes, trackers, summary, chosen, cut, like, full)
            else:
                made = _collect_privately(passes, trackers, chosen, cut, like, private)
        summary = made.inputs
        if isinstance(summary, fingerprints.InputSummary):
            summary = replace(summary, columns=feed.columns)
        result = Profile(
            statistics=made.statistics,
            mean=made.mean,
            deviation=made.deviation,
            specs=specs,
            preset=chosen.name,
            architecture=fingerprints.architecture(model),
            weights=weights,
            inputs=summary,
            inputs_seen=made.inputs_seen,
            privacy=made.guarantee,
        )
        if like is None and private is None:
            # With the ranges of another profile, the data may be of one class, whose statistics are others. In a
            # private profile, noise looks like stale statistics.
            warn_if_stale(model, feed, result)
    _remark(result)
    return result


def _collect(
    passes: _Passes,
    trackers: Mapping[str, RangeTracker],
    summary: fingerprints.Summary,
    chosen: Preset,
    cut: Bins,
    like: Profile | None,
    full: bool,
) -> Collected:
    """Collect everything that an ordinary profile stores about its data."""
    frame = _frame(trackers, chosen, like)
    counters, slice_counters, covariance = _counts(passes, frame, cut, like, full)
    moments = passes.input_moments.reduce_over_processes().moments()
    answers = passes.answers.answers()
    quantiles = passes.input_quantiles.reduce_over_processes().quantiles()
    statistics: dict[str, Statistic] = {f"tap.{name}": counter.histogram() for name, counter in counters.items()}
    statistics["gaussian"] = trackers["features"].gaussian() if covariance is None else covariance.gaussian()
    for name, projector in frame.projectors.items():
        statistics[f"slices.{name}"] = Slices(slice_counters[name].histogram(), frame.seeds[name], projector)
    if moments is not None:
        statistics["inputs"] = moments
    if answers is not None:
        statistics["answers"] = answers
    if quantiles is not None:
        statistics["inputs.quantiles"] = quantiles
    return Collected(statistics, frame.mean, frame.deviation, summary, passes.feed.samples)


def _collect_privately(
    passes: _Passes,
    trackers: Mapping[str, RangeTracker],
    chosen: Preset,
    cut: Bins,
    like: Profile | None,
    budget: Privacy,
) -> Collected:
    """Collect everything that a private profile stores about its data."""
    numbers = _number_slices(chosen, len(trackers["features"].mean))
    plan = privacy.Plan(
        passes.run,
        passes.feed,
        {name: tracker.samples // passes.feed.samples for name, tracker in trackers.items()},
        cut,
        numbers,
        SLICE_SEEDS,
        {} if like is None else like.to("cpu").statistics,
        None if like is None else (like.mean, like.deviation),
    )
    return privacy.collect(plan, budget)


@dataclass(frozen=True)
class _Frame:
    """Ranges, standardisation and slice directions, fixed before counting; all but the ranges are on the CPU."""

    ranges: dict[str, tuple[Tensor, Tensor]]
    mean: Tensor
    deviation: Tensor
    projectors: dict[str, Projector]
    seeds: dict[str, int]


def _frame(trackers: Mapping[str, RangeTracker], chosen: Preset, like: Profile | None) -> _Frame:
    """Take the ranges and directions of another profile, or make them from the first pass."""
    if like is not None:
        return _Frame(
            {name: (tap.low, tap.high) for name, tap in like.taps.items()},
            like.mean,
            like.deviation,
            {name: part.projector for name, part in like.slices.items()},
            {name: part.seed for name, part in like.slices.items()},
        )
    features = trackers["features"]
    mean, deviation = features.mean.float().cpu(), features.deviation.float().cpu()
    numbers = _number_slices(chosen, len(mean))
    usable = usable_units(features.low, features.high)
    return _Frame(
        {name: (tracker.low, tracker.high) for name, tracker in trackers.items()},
        mean,
        deviation,
        {name: Projector.build(mean, deviation, usable, count, SLICE_SEEDS[name]) for name, count in numbers.items()},
        {name: SLICE_SEEDS[name] for name in numbers},
    )


def _number_slices(chosen: Preset, features: int) -> dict[str, int]:
    """Return the number of slices of each set that a preset has."""
    numbers = {"verification": VERIFICATION_SLICES}
    if chosen.aligned_slices:
        numbers["alignment"] = chosen.aligned_slices
    if sum(numbers.values()) * features > MAX_WEIGHTS:
        raise ProfileError(
            f"Expected fewer features for {sum(numbers.values())} slices, got {features:,}. Tap a smaller layer with "
            "taps={'features': ...}, or leave out the preset 'sliced'."
        )
    return numbers


class _Passes:
    """Passes over the source; the network runs only once if the activations at the taps can be kept."""

    def __init__(self, model: nn.Module, feed: Feed, specs: Mapping[str, Tap], keep_bytes: int, bar: Bar) -> None:
        self.model, self.feed, self.specs, self.bar = model, feed, specs, bar
        self.keep_bytes, self.number = keep_bytes, 0
        self.input_moments, self.input_quantiles = MomentTracker(), QuantileTracker()
        self.answers = AnswerTracker()
        self._kept: list[Samples] | None = None

    def run(self, update: Callable[[Samples], None]) -> None:
        """Call `update` with the activations `[samples, units]` of every batch, by tap."""
        if self._kept is not None:
            for samples in self._kept:
                update(samples)
            return
        self.number += 1
        kept: list[Samples] | None = []
        used = inputs = 0
        own = (self.feed.known_samples or 0) / world_size()
        advance = PassProgress(self.bar, f"pass {self.number}", self.feed.known_samples)

        def see(seen: Observation) -> None:
            nonlocal kept, used, inputs
            samples = seen.activations
            used += sum(value.numel() * value.element_size() for value in samples.values())
            inputs += len(seen.inputs)
            if max(used, used / inputs * own) > self.keep_bytes:  # The first batch shows it, if the size is known.
                kept = None
            if kept is not None:
                kept.append(samples)
            if self.number == 1:
                self.answers.update(samples["logits"])
            if self.number == 1 and isinstance(seen.inputs, Tensor):
                self.input_moments.update(seen.inputs)
                self.input_quantiles.update(seen.inputs)
            advance(len(seen.inputs))
            update(samples)

        run_pass(self.model, without_labels(self.feed.batches()), see, taps=self.specs)
        self._kept = kept if all_true(kept is not None, self.feed.device) else None


def _ranges(passes: _Passes, specs: Mapping[str, Tap], like: Profile | None) -> dict[str, RangeTracker]:
    """Run the first pass, which finds ranges. With `like`, units may be constant, e.g. for a rare class."""
    trackers = {name: RangeTracker() for name in specs}

    def track(samples: Samples) -> None:
        for name, values in samples.items():
            trackers[name].update(values)

    passes.run(track)
    trackers = {name: tracker.reduce_over_processes() for name, tracker in trackers.items()}
    for name, tracker in trackers.items():
        finite = torch.isfinite(tracker.low) & torch.isfinite(tracker.high)
        if name == "features":  # The variance of the values is stored in float32.
            finite &= torch.isfinite(tracker.gaussian().variance).to(finite.device)
        if not bool(finite.all()):
            raise ProfileError(
                f"Expected values below 1e19 at tap {name!r}, got NaN, infinity or larger ones in "
                f"{int((~finite).sum())} units. Check the model's weights and preprocess."
            )
        if like is None and not bool(usable_units(tracker.low, tracker.high).any()):
            raise ProfileError(
                f"Expected values that vary at tap {name!r}, got constant ones over "
                f"{counted(passes.feed.samples, 'sample')}. Use varied samples, and a model that reacts to them."
            )
    return trackers


def _counts(
    passes: _Passes, frame: _Frame, cut: Bins, like: Profile | None, full: bool
) -> tuple[dict[str, CountTracker], dict[str, CountTracker], CovarianceTracker | None]:
    """Run the second and third pass: count at the taps and in the slices, and sum the covariance if wanted."""
    if full and len(frame.mean) > MOST_CORRELATED:
        raise ProfileError(
            f"Expected at most {MOST_CORRELATED:,} features for a covariance, got {len(frame.mean):,}. Leave out "
            "gaussian='full', or tap a smaller layer."
        )
    place = passes.feed.device
    covariance = CovarianceTracker() if full else None
    projectors = {name: part.to(place) for name, part in frame.projectors.items()}
    counters = {name: CountTracker(low.to(place), high.to(place), cut) for name, (low, high) in frame.ranges.items()}
    reach = {name: RangeTracker() for name in projectors}

    def count(samples: Samples) -> None:
        for name, counter in counters.items():
            counter.update(samples[name])
        if covariance is not None:
            covariance.update(samples["features"])
        for name, projector in projectors.items():
            for part in projector.project_in_parts(samples["features"]):
                reach[name].update(part)

    passes.run(count)
    if like is not None:
        homes = {name: part.histogram.to(place) for name, part in like.slices.items()}
        slice_ranges = {name: (home.low, home.high) for name, home in homes.items()}
    else:
        reach = {name: tracker.reduce_over_processes() for name, tracker in reach.items()}
        slice_ranges = {name: (tracker.low, tracker.high) for name, tracker in reach.items()}
    slice_counters = {
        name: CountTracker(low, high, bins_of_slices(name, cut)) for name, (low, high) in slice_ranges.items()
    }

    def count_slices(samples: Samples) -> None:
        for name, projector in projectors.items():
            for part in projector.project_in_parts(samples["features"]):
                slice_counters[name].update(part)

    passes.run(count_slices)
    return (
        {name: counter.reduce_over_processes() for name, counter in counters.items()},
        {name: counter.reduce_over_processes() for name, counter in slice_counters.items()},
        None if covariance is None else covariance.reduce_over_processes(),
    )


def _check_private(given: Any, gaussian: Gaussian | None, like: Profile | None) -> None:
    """Refuse what would break the promise of a private profile."""
    if not isinstance(given, Privacy):
        raise ProfileError(f"Expected private=shiftmend.Privacy(...), got {brief(given)}. Try Privacy(epsilon=1.0).")
    if gaussian == "full":
        raise ProfileError("Expected marginal moments in a private profile, got gaussian='full'. Leave it out.")
    if like is not None and like.privacy is None:
        raise ProfileError("Expected like= to be a private profile, got exact ranges. Try one made with private=.")
    if world_size() > 1:
        raise ProfileError(f"Expected one process for a private profile, got {world_size()}. Run a single process.")


def _remark(made: Profile) -> None:
    """Log warnings about a profile for the person who made it."""
    if made.inputs_seen < LEAST_SAMPLES:
        logger.warning(
            "A profile of only %s nearly reveals the inputs. Do not pass it on if they are confidential.",
            counted(made.inputs_seen, "sample"),
        )
    if made.privacy is not None:
        privacy.remark(made.privacy, made.inputs_seen)
    for name, count in made.unusable.items():
        if count:
            units = made.taps[name].units
            logger.info("%d of %d units at %r were constant on the source and are left out", count, units, name)


def _check_agreement(model: nn.Module, feed: Feed, settings: tuple[Any, ...], like: Profile | None) -> None:
    """Raise if processes were given different arguments. For streamed data, only the first samples are compared."""
    if world_size() == 1:  # Hashing all data takes time, so a single process skips it.
        return
    first = fingerprints.digest(feed.first(64))
    data = first if feed.inputs is None else fingerprints.digest(feed.inputs)
    settings += (feed.batch_size, feed.resident, first, like and like.to_bytes())
    check_same(fingerprints.weights(model), "model", feed.device)
    check_same(f"{data} {feed.samples}", "source data", feed.device)
    check_same(repr(settings), "way to profile (taps, bins, batch size, preprocessing, ...)", feed.device)
