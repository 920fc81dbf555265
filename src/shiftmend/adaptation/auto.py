"""`auto`: try several candidates on the target and keep the one that is estimated best.

The untouched model is always a candidate, and is kept unless another candidate is clearly better. With a rehearsed
profile, the estimated accuracy decides. Without one, the divergence of the features decides, and the result has no
estimate.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from shiftmend.adaptation.calibrate import find_temperature, fold_temperature
from shiftmend.adaptation.result import Adaptation, Candidate, Change, Estimates
from shiftmend.adaptation.run import Settings, Task, check_compile, run_method
from shiftmend.engine.method import Method, describe_method
from shiftmend.errors import AdaptationError, DivergedError
from shiftmend.introspection.call import call_model
from shiftmend.introspection.model_state import on_device
from shiftmend.introspection.outputs import Entry
from shiftmend.introspection.validate import copy_model
from shiftmend.methods import METHODS
from shiftmend.methods import method as make_method
from shiftmend.profiles import fingerprints
from shiftmend.profiles.fingerprints import TreeSummary
from shiftmend.profiles.profile import Profile
from shiftmend.profiles.rehearsal import UNTOUCHED, Rehearsal, name_candidate
from shiftmend.utils.checks import brief
from shiftmend.utils.logs import hide_warnings
from shiftmend.utils.processes import of_first_process, world_size
from shiftmend.utils.progress import progress_bar
from shiftmend.utils.rng import isolate_rng
from shiftmend.verification.class_shares import Shares, estimate_shares
from shiftmend.verification.estimate import HOME_DEVIATIONS, MAX_OUTSIDE, Estimate, Estimator
from shiftmend.verification.harm import (
    BOTH_POSSIBLE,
    MAX_LEFT_IN_DOUBT,
    OTHER_SAMPLES,
    OTHER_SHARES,
    answers_other_classes,
    find_answers,
    find_worse_answers,
    looks_like_selection,
)
from shiftmend.verification.predictions import as_class_logits, skew, skew_by_chance
from shiftmend.verification.reading import Reading, add_agreements, expect_chance, read, shares_explain
from shiftmend.verification.verdict import Verification

logger = logging.getLogger(__name__)
logger.addFilter(of_first_process)

CANDIDATES = (UNTOUCHED, "match-mean", "match-moments", "adabn", "fr-shares", "fr", "match-fr", "bufr", "bufr-im")
"""Candidates of `auto`, the simplest first: of several that are as good, the simplest is kept."""

MUCH_CLOSER = 0.7
"""Slices, as a share of those of the untouched model, that a candidate must come below where no estimate holds: without
a rehearsal, and where the untouched model is certain of other classes than home has."""
FAR_SHARES = 0.2
"""Distance of class shares from home. If a candidate with free shares mends the features and finds shares farther away,
candidates that force the shares of home must be clearly better than the untouched model."""
SIMPLER = 1.2
"""Without a rehearsal, the simplest candidate is kept whose slice divergence is within this factor of the lowest."""

SHARES_CHANGED_TOO = "class shares seem to differ as well, and estimates of this method hold for those of home"

ADVICE = "try profile = shiftmend.rehearse(model, held_out_home_data, profile) at home"

OTHER_SHARES_AFTER = 0.07
"""Total variation between class shares of the adapted model and of home, beyond sampling noise, above which the classes
count as changed."""

CandidateNames = Iterable[str | Method | type[Method]]


@dataclass
class Trial:
    """The outcome of one candidate on the target: its run and its signals, or the reason for its failure."""

    name: str
    method: Method
    adaptation: Adaptation | None = None
    reading: Reading | None = None
    failure: str | None = None
    seconds: float = 0.0
    signals: dict[str, float] = field(default_factory=dict)


def list_candidates(given: CandidateNames | None, profile: Profile) -> dict[str, Method]:
    """Return the candidates by name, the untouched model first.

    Args:
        given: Names, classes or instances of methods; None takes those that were rehearsed, else `CANDIDATES`.
        profile: The source's profile.

    Raises:
        AdaptationError: If a candidate is unknown, needs labels, or is listed twice.
    """
    if given is None:
        rehearsed = profile.rehearsal.candidates if profile.rehearsal is not None else ()
        # A user's own method cannot be constructed from its name.
        # Without a rehearsal, there are no histograms of the classes.
        usual = [name for name in CANDIDATES if not METHODS[name].frees_shares]
        given = tuple(name for name in rehearsed if name in METHODS) or choose_usual(usual, profile)
    elif isinstance(given, str | Method | type) or not isinstance(given, Iterable):
        raise AdaptationError(
            f"Expected candidates to be a list of methods, e.g. ['adabn', 'bufr'], got {brief(given)}."
        )
    methods = {UNTOUCHED: make_method(UNTOUCHED)}
    for one in given:
        made = make_method("source-only" if one == "untouched" else one)
        if made.takes_labels:
            raise AdaptationError(f"Expected candidates that need no labels, got {made.name}. Leave it out.")
        if made.name in methods and made.name != UNTOUCHED:
            raise AdaptationError(f"Expected different candidates, got {made.name} twice. Name each method once.")
        methods[made.name] = made
    return methods


def choose_usual(names: Sequence[str], profile: Profile, model: nn.Module | None = None) -> tuple[str, ...]:
    """Return the candidates that suit the inputs and the layers of a model.

    Args:
        names: Names of methods.
        profile: The source's profile.
        model: The model; None keeps methods for layers that it may lack.
    """
    kinds = [type(module) for module in model.modules()] if model is not None else []

    def suits(method: type[Method]) -> bool:
        if model is not None and method.layers and not any(issubclass(kind, method.layers) for kind in kinds):
            return False
        if isinstance(profile.inputs, TreeSummary):
            return not method.maps_inputs
        # Each column of a table has a gain and an offset of its own, which FR alone would have to undo by its weights.
        return len(profile.inputs.shape) == 1 or not method.for_tables

    return tuple(name for name in names if suits(METHODS[name]))


def try_candidates(task: Task, settings: Settings, methods: Mapping[str, Method]) -> list[Trial]:
    """Run each candidate on the same target data, and read the signals of each adapted model.

    A candidate that diverges or refuses the data counts as failed. Ctrl-C stops the loop over candidates.
    """
    assert task.profile is not None
    before: Verification | None = None
    trials: list[Trial] = []
    size, reduced = task.feed.batch_size, task.feed.reduced_from
    with progress_bar(settings.progress, "candidates", len(methods)) as bar:
        for name, method in methods.items():
            bar.advance(0, name_candidate(name))
            trial = Trial(name, method)
            started = time.perf_counter()
            own = replace(settings, progress=False, checkpoint=_own_checkpoint(settings.checkpoint, name))
            try:
                # What a candidate remarks about itself matters only to those who name it.
                with hide_warnings() if name != UNTOUCHED else nullcontext():
                    trial.adaptation = run_method(task, method, check_compile(own, task, method), before)
                trial.reading = _read(task, trial.adaptation.model, method)
                _compare_for_shares(trial.adaptation, trial.reading)
                before = trial.adaptation.before
            except DivergedError as error:
                trial.failure = str(error)
            except AdaptationError as error:
                if name == UNTOUCHED:
                    raise
                trial.failure = str(error)
            finally:
                if task.feed.may_resize:
                    # The candidate's schedule may have changed the batch size, which must not affect the next
                    # candidate.
                    task.feed.resize(size)
                    task.feed.reduced_from = reduced
            trial.seconds = time.perf_counter() - started
            trials.append(trial)
            bar.advance(1)
            if trial.adaptation is not None and trial.adaptation.interrupted:
                break
    _add_signals(task, trials)
    return trials


def _read(task: Task, model: nn.Module, method: Method, *, free_shares: bool = False) -> Reading:
    assert task.profile is not None
    # The adapted model lies on the device of the caller's model, which may not be the feed's device.
    place = task.feed.device

    @torch.no_grad()
    def probe() -> None:
        call_model(model, task.feed.first(2))

    with on_device(model, place), isolate_rng(place, probe):
        return read(
            model, task.feed, task.profile, task.profile.rehearsal, free_shares=free_shares or method.frees_shares
        )


def _compare_for_shares(result: Adaptation, reading: Reading) -> None:
    """Verify a result against home reweighted to the class shares that its method estimated, if it estimated any."""
    if reading.shares is not None:
        result.after = replace(reading.verification, adapted=True)
        result.manifest["verification"]["after"] = result.after.to_json()
        result.manifest["free_shares"] = True


def _add_signals(task: Task, trials: Sequence[Trial]) -> None:
    """Add to each trial's signals its agreement with the other trials, if all saw the samples in the same order."""
    assert task.profile is not None
    readings = {trial.name: trial.reading for trial in trials if trial.reading is not None}
    if task.feed.resident or task.feed.keeps_order:
        joined = add_agreements(readings, task.profile.rehearsal)
        for trial in trials:
            if trial.method.frees_shares and trial.reading is not None:
                # If class shares changed, the other candidates are wrong, and agreement with them carries no
                # information.
                joined[trial.name] = dict(trial.reading.signals)
    else:
        joined = {name: dict(reading.signals) for name, reading in readings.items()}
    for trial in trials:
        trial.signals = joined.get(trial.name, {})


def _own_checkpoint(checkpoint: str | os.PathLike[str] | None, name: str) -> str | None:
    return None if checkpoint is None else f"{os.fspath(checkpoint)}.{name}"


def adapt_auto(
    task: Task, settings: Settings, candidates: CandidateNames | None, *, calibrate: bool = True
) -> Adaptation:
    """Try all candidates and return the one that is estimated best, calibrated.

    If the target data look like home data, nothing is trained.
    """
    if task.profile is None:
        raise AdaptationError(
            "Expected a profile of the source, by which 'auto' judges its candidates, got none. Make one with "
            "shiftmend.profile, or name a method."
        )
    if world_size() > 1:
        raise AdaptationError(
            f"Expected one process for the method 'auto', got {world_size()}. Use one process, or name a method such "
            "as 'bufr'."
        )
    if settings.on_epoch is not None:
        raise AdaptationError(
            "Expected on_epoch only beside a single method, got it beside 'auto', which tries several. Name a method."
        )
    methods = list_candidates(candidates, task.profile)
    (untouched,) = try_candidates(task, settings, {UNTOUCHED: methods[UNTOUCHED]})
    assert untouched.reading is not None
    record = task.profile.rehearsal
    if record is None:
        if reason := _find_reason_to_stay(untouched, task.profile):
            return _finish_unrehearsed([untouched], untouched, reason)
        trials = _try_others(task, settings, methods, untouched)
        return _finish_unrehearsed(trials, *_choose_by_features(trials, task.profile))
    estimator = Estimator(record)
    if estimator.is_at_home(untouched.signals, untouched.reading.samples):
        return _finish_at_home(untouched, estimator)
    if estimator.is_at_home(untouched.signals, untouched.reading.samples, grouped=True):
        return _finish_as_other_groups(untouched, estimator)
    if looks_like_selection(untouched.reading, record):
        return _finish_as_selection(untouched, estimator)
    free = None
    if has_skew := answers_other_classes(untouched.reading, task.profile):
        free = compare_with_free_shares(task, untouched)
        if free is not None and shares_explain(untouched.reading, free, record, task.profile.bins):
            beyond = free.signals["slices"] - expect_chance(free, record, task.profile.bins) / 2
            return _finish_with_other_shares(untouched, estimator, max(0.0, beyond))
        # A device may have made the model certain of wrong classes. Candidates that leave class shares free can tell.
        # Whatever assumes the shares of home finds them by pushing samples into other classes, unless it has no more
        # than the few numbers of a map of the inputs.
        careful = {
            name: method
            for name, method in methods.items()
            if name == UNTOUCHED or method.frees_shares or (method.maps_inputs and not method.trains)
        }
        trials = _try_others(task, settings, careful, untouched)
        if free is not None and any(_finds_home_shares(trial, free, estimator) for trial in trials[1:]):
            has_skew = False
            rest = {name: method for name, method in methods.items() if name not in careful}
            trials += try_candidates(task, settings, rest)
            _add_signals(task, trials)
    else:
        trials = _try_others(task, settings, methods, untouched)
    return _finish_rehearsed(task, trials, estimator, calibrate, settings.output, has_skew=has_skew, free=free)


def _try_others(task: Task, settings: Settings, methods: Mapping[str, Method], untouched: Trial) -> list[Trial]:
    """Try all other candidates; return the untouched model's trial followed by theirs."""
    rest = {name: method for name, method in methods.items() if name != UNTOUCHED}
    trials = [untouched, *try_candidates(task, settings, rest)]
    _add_signals(task, trials)
    return trials


def _finish_at_home(untouched: Trial, estimator: Estimator) -> Adaptation:
    """Return the untouched model, because the target data look like home data."""
    result, reading = untouched.adaptation, untouched.reading
    assert result is not None
    assert reading is not None
    estimate = estimator.estimate_at_home(reading.samples)
    tried = (Candidate(UNTOUCHED, estimate, untouched.signals, untouched.seconds),)
    result.changed = "neither"
    reason = "the data are as at home, so nothing was changed"
    return _complete(result, Estimates(estimate, estimate), tried, reason, estimator.record)


def _finish_as_other_groups(untouched: Trial, estimator: Estimator) -> Adaptation:
    """Return the untouched model, because other groups at home, such as patients, differ as much.

    A small device could hide in that range, so the estimate comes from the signals.
    """
    result, reading = untouched.adaptation, untouched.reading
    assert result is not None
    assert reading is not None
    estimate = estimator.estimate(UNTOUCHED, untouched.signals, reading.samples)
    tried = (Candidate(UNTOUCHED, estimate, untouched.signals, untouched.seconds),)
    reason = "the data differ from home no more than groups at home do, so nothing was changed"
    return _complete(result, Estimates(estimate, estimate), tried, reason, estimator.record)


def _finish_as_selection(untouched: Trial, estimator: Estimator) -> Adaptation:
    """Return the untouched model of a regression, because the target could be a selection of the samples at home.

    Nothing is estimated: some devices move samples towards each other, which looks the same.
    """
    result = untouched.adaptation
    assert result is not None
    estimate = Estimate(None, None, None, estimator.record.metric, (OTHER_SAMPLES,))
    tried = (Candidate(UNTOUCHED, estimate, untouched.signals, untouched.seconds),)
    reason = f"{OTHER_SAMPLES}, so nothing was changed; if you know that the samples are alike, name a method"
    return _complete(result, Estimates(estimate, estimate), tried, reason, estimator.record)


def compare_with_free_shares(task: Task, untouched: Trial) -> Reading | None:
    """Read the untouched model once more, compared with home for the class shares that it finds.

    A device can make a model certain of wrong classes. The samples of each class then do not look as at home, whatever
    the shares. Without histograms of the classes that cannot be told, and there is no such reading.
    """
    assert task.profile is not None
    if task.profile.rehearsal is None or not task.profile.rehearsal.by_class:
        return None
    assert untouched.adaptation is not None
    return _read(task, untouched.adaptation.model, untouched.method, free_shares=True)


def is_mended(signals: Mapping[str, float], free: Mapping[str, float]) -> bool:
    """Return whether a candidate's features came much closer to home than those of the untouched model.

    Each model is compared with the home data reweighted to the class shares that this model predicts at the target.
    The divergence of the slices must fall below `MUCH_CLOSER` times that of the untouched model. If only the class
    shares changed, the untouched model is already close to the reweighted home data. A candidate can then hardly come
    much closer, so the result is False.

    Args:
        signals: Signals of the candidate.
        free: Signals of the untouched model, compared with home for the class shares that it predicts.
    """
    return signals["slices"] < MUCH_CLOSER * free["slices"]


def finds_home_shares(
    name: str, estimate: Estimate, signals: Mapping[str, float], free: Mapping[str, float], record: Rehearsal
) -> bool:
    """Return whether a map of the inputs mends the model, and the mended model answers with the class shares of home.

    A few numbers for all samples cannot push samples into the classes of home. So if they bring features and answers
    back, class shares are as at home, up to the mistakes of the mended model, and all candidates may take part.

    Args:
        name: Name of a candidate, tried where the untouched model is certain of other classes than home has.
        estimate: Its estimated score.
        signals: Its signals.
        free: Signals of the untouched model, compared with home for the class shares that it predicts.
        record: The rehearsal in the profile.
    """
    if name not in METHODS or METHODS[name].trains or not METHODS[name].maps_inputs:
        return False
    lost = find_loss(estimate, record)
    if lost is None or not is_mended(signals, free):
        return False
    return signals.get("skew", math.inf) <= max(OTHER_SHARES_AFTER, lost)


def _finds_home_shares(trial: Trial, free: Reading, estimator: Estimator) -> bool:
    if trial.reading is None or estimator.record.find_differences(describe_method(trial.method)):
        return False
    estimate = estimator.estimate(trial.name, trial.signals, trial.reading.samples)
    return finds_home_shares(trial.name, estimate, trial.signals, free.signals, estimator.record)


def may_replace(
    name: str,
    estimate: Estimate,
    signals: Mapping[str, float],
    free: Mapping[str, float],
    record: Rehearsal,
    samples: int,
) -> bool:
    """Return whether a candidate may replace an untouched model that is certain of other classes than home has.

    Its estimate must hold, and its features must be much closer to home. If the candidate assumes the class shares of
    home, its features must be as close to home as those of good models in the rehearsal.

    Args:
        name: Name of the candidate.
        estimate: Its estimated score.
        signals: Its signals.
        free: Signals of the untouched model, compared with home for the class shares that it predicts.
        record: The rehearsal in the profile.
        samples: Number of samples at the site.
    """
    if not estimate.reliable or not is_mended(signals, free):
        return False
    if name in METHODS and METHODS[name].frees_shares:
        return True
    return Estimator(record).looks_good(name, signals, samples)


def _finish_with_other_shares(untouched: Trial, estimator: Estimator, beyond: float) -> Adaptation:
    """Return the untouched model: other classes are frequent here, which no candidate can undo.

    `beyond` is the divergence that neither shares nor half of what chance is expected to leave explain.
    """
    result, reading = untouched.adaptation, untouched.reading
    assert result is not None
    assert reading is not None
    result.shares = estimate_shares(reading.outputs, estimator.record)
    result.changed = "patients" if result.shares.reliable else None
    hidden = estimator.measure_hidden_loss(beyond, reading.samples)
    estimate = estimator.estimate_with_shares(result.shares, hidden)
    tried = (Candidate(UNTOUCHED, estimate, untouched.signals, untouched.seconds),)
    reason = f"{OTHER_SHARES}, so nothing was changed"
    return _complete(result, Estimates(estimate, estimate), tried, reason, estimator.record)


def _finish_rehearsed(
    task: Task,
    trials: Sequence[Trial],
    estimator: Estimator,
    calibrate: bool,
    output: Entry,
    *,
    has_skew: bool = False,
    free: Reading | None = None,
) -> Adaptation:
    """Choose by the estimates.

    Where the untouched model is certain of other classes (`has_skew`), candidates take part only if they may replace it
    (`may_replace`), judged by its reading with free class shares (`free`).
    """
    record = estimator.record
    left = trials[0].reading.left_by_selection if trials[0].reading is not None else None
    doubts = [BOTH_POSSIBLE] if left is not None and left <= MAX_LEFT_IN_DOUBT else []
    tried: list[Candidate] = []
    readings: dict[str, dict[str, float]] = {}
    withheld: dict[str, list[str]] = {}
    for trial in trials:
        if trial.reading is None:
            tried.append(Candidate(trial.name, None, {}, trial.seconds, trial.failure))
            continue
        reasons = record.find_differences(describe_method(trial.method))
        if has_skew and trial.name == UNTOUCHED:
            # Its signals are those of other class shares, which were not rehearsed for them.
            reasons = [OTHER_SHARES, *reasons]
        apart = trial.reading.measure_distance(record)
        why = withheld[trial.name] = reasons if trial.name == UNTOUCHED else [*reasons, *doubts]
        estimate = estimator.estimate(trial.name, trial.signals, trial.reading.samples, reasons=why, distance=apart)
        credible = not has_skew or (
            free is not None
            and may_replace(trial.name, estimate, trial.signals, free.signals, record, trial.reading.samples)
        )
        if trial.name == UNTOUCHED or (not reasons and credible and estimator.check_distance(apart) is None):
            readings[trial.name] = trial.signals
        tried.append(Candidate(trial.name, estimate, trial.signals, trial.seconds, trial.failure))
    assert trials[0].reading is not None
    strict = [trial.name for trial in trials if trial.method.frees_shares]
    forcing = _find_forcing(task, trials, free)
    name = estimator.choose(readings, trials[0].reading.samples, strict, forcing=forcing)
    chosen = next(trial for trial in trials if trial.name == name)
    assert chosen.adaptation is not None
    assert chosen.reading is not None
    reasons, apart, size = withheld[name], chosen.reading.measure_distance(record), chosen.reading.samples
    after = estimator.estimate(name, chosen.signals, size, chosen=True, distance=apart, reasons=reasons)
    result = chosen.adaptation
    if record.task == "classes" and record.confusion.numel() and name != UNTOUCHED:
        lost = find_loss(after, record)
        result.shares = estimate_shares(chosen.reading.outputs, record, lost=lost)
        result.changed = tell_change(measure_other_shares(result.shares, record), result.shares.samples, record, lost)
        if result.changed == "device" and estimator.looks_good(UNTOUCHED, trials[0].signals, size):
            # Before, features were as close to home as those of good models, so that nothing has to have changed.
            result.changed = None
        if result.changed == "both" and not chosen.method.frees_shares:
            reasons = [*reasons, SHARES_CHANGED_TOO]
            after = estimator.estimate(name, chosen.signals, size, chosen=True, distance=apart, reasons=reasons)
    before = tried[0].estimate
    assert before is not None
    # A model that is kept has one estimate. Its signals may overstate its accuracy, which is why it was kept, so the
    # wider interval counts.
    before = (
        after
        if name == UNTOUCHED
        else estimator.estimate_before(before, after, name, trials[0].signals, size, distance=apart)
    )
    tried[0] = replace(tried[0], estimate=before)
    reason = _explain_choice(name, after, has_skew=has_skew)
    _complete(result, Estimates(before, after), tuple(tried), reason, record)
    if calibrate and name != UNTOUCHED:
        calibrate_result(result, chosen.reading, task, output)
    return result


def _find_forcing(task: Task, trials: Sequence[Trial], free: Reading | None) -> list[str]:
    """Return the names of candidates that force the shares of home, if there is a sign of other shares at the site.

    The sign is a candidate with free shares that finds shares far from home (`FAR_SHARES`) and brings the features much
    closer to home than a change of class shares alone could.

    Args:
        task: The task.
        trials: All candidates, the untouched model first.
        free: Reading of the untouched model with free class shares, if there is one already.
    """
    assert task.profile is not None
    record = task.profile.rehearsal
    assert record is not None
    found = [
        trial
        for trial in trials
        if trial.method.frees_shares
        and trial.reading is not None
        and trial.reading.measure_distance(record) > FAR_SHARES
    ]
    free = free if free is not None or not found else compare_with_free_shares(task, trials[0])
    if free is None or not any(is_mended(trial.signals, free.signals) for trial in found):
        return []
    return [trial.name for trial in trials if forces_shares(trial.method)]


def forces_shares(method: Method | type[Method]) -> bool:
    """Return whether a method brings features home whatever the class shares are.

    A map of the inputs has only a few numbers for all samples, with which it cannot push samples into other classes.
    """
    fixed = method.maps_inputs and not method.trains
    return method.name != UNTOUCHED and not method.frees_shares and not fixed


def _explain_choice(name: str, after: Estimate, *, has_skew: bool) -> str:
    if name == UNTOUCHED and has_skew:
        return f"{OTHER_SHARES}, so nothing was changed"
    if name == UNTOUCHED:
        return "no candidate is clearly better than the untouched model"
    if after.reliable:
        return "its estimate is the best"
    if after.is_range:
        return "its estimate is the best, but its interval is wide; label about fifty samples before using it"
    return "its signals are the best, but leave its accuracy unknown; label about fifty samples before using it"


def find_loss(estimate: Estimate, record: Rehearsal) -> float | None:
    """Return how much accuracy was lost since home, 0 at least; None if the accuracy is unknown."""
    return None if estimate.value is None else max(0.0, record.score - estimate.value)


def measure_other_shares(shares: Shares, record: Rehearsal) -> float | None:
    """Return the total variation of class shares from those of home, beyond chance; None if they are not reliable."""
    if not shares.reliable:
        return None
    both = [number / record.answer_design_effect for number in (shares.samples, record.samples)]
    return skew(torch.tensor(shares.values), record.label_shares, *both)


def tell_change(beyond: float | None, samples: int, record: Rehearsal, lost: float | None) -> Change | None:
    """Tell, after adapting, whether class shares changed beside the device.

    Args:
        beyond: Total variation of the class shares from those of home, beyond chance; None if unknown.
        samples: Number of samples at the site.
        record: The rehearsal in the profile.
        lost: Accuracy that the adapted model has lost since home, whose mistakes may look like other shares; None if
            unknown.

    Returns:
        `"both"` or `"device"`; None if the mistakes of the model leave it open.
    """
    if beyond is None or lost is None:
        return None
    both = [number / record.answer_design_effect for number in (samples, record.samples)]
    limit = max(OTHER_SHARES_AFTER, HOME_DEVIATIONS * skew_by_chance(record.label_shares, *both)[1])
    if beyond <= limit:
        return "device"
    return "both" if beyond > limit + lost else None


def _finish_unrehearsed(trials: Sequence[Trial], chosen: Trial, reason: str) -> Adaptation:
    """Complete the chosen result without an estimate; its reason says how to get one."""
    assert chosen.adaptation is not None
    nobody = Estimate(None, None, None, "accuracy", ("the profile was not rehearsed",))
    tried = tuple(Candidate(trial.name, None, trial.signals, trial.seconds, trial.failure) for trial in trials)
    result = _complete(chosen.adaptation, Estimates(nobody, nobody), tried, reason)
    logger.warning("the profile was not rehearsed, so the gain cannot be estimated; %s", ADVICE)
    return result


def _find_reason_to_stay(untouched: Trial, profile: Profile) -> str | None:
    """Return, without a rehearsal, the reason to keep the untouched model; None if candidates should be tried."""
    assert untouched.reading is not None
    if untouched.reading.verification.verdict == "restored":
        return "the features are as at home, so nothing was changed"
    if answers_other_classes(untouched.reading, profile):
        return f"{OTHER_SHARES}, so nothing was changed"
    if find_answers(profile) is None and untouched.signals.get("outside", math.inf) <= MAX_OUTSIDE:
        # Without class predictions, nothing tells a selection of home's samples from a mild device.
        return "the features lie in their range at home, as those of other samples would, so nothing was changed"
    return None


def _choose_by_features(trials: Sequence[Trial], profile: Profile) -> tuple[Trial, str]:
    """Choose by divergences: slices must come much closer to home, and marginals and predictions must not object."""
    untouched = trials[0]
    limits = {name: untouched.signals.get(name, float("inf")) for name in ("slices", "marginals")}
    closer = [
        trial
        for trial in trials[1:]
        if trial.reading is not None
        and trial.signals["slices"] < MUCH_CLOSER * limits["slices"]
        and trial.signals["marginals"] < limits["marginals"]
    ]
    if not closer:
        return untouched, "no candidate brought the features much closer to home"
    assert untouched.reading is not None
    better = [
        trial
        for trial in closer
        if trial.reading is not None and not find_worse_answers(untouched.reading, trial.reading, profile)
    ]
    if not better:
        return untouched, "where features came closer to home, answers became less certain or less like those of home"
    lowest = min(trial.signals["slices"] for trial in better)
    chosen = next(trial for trial in better if trial.signals["slices"] <= SIMPLER * lowest)
    return chosen, "it brought the features closest to home; whether answers are better is not known"


def _complete(
    result: Adaptation,
    estimates: Estimates,
    tried: tuple[Candidate, ...],
    reason: str,
    record: Rehearsal | None = None,
) -> Adaptation:
    """Store the estimates and the tried candidates in the result and its manifest."""
    judge_by_rehearsal(result, record)
    result.estimate, result.candidates, result.reason = estimates, tried, reason
    result.manifest["chosen"] = {"by": "auto", "reason": reason}
    result.manifest["candidates"] = [one.to_json() for one in tried]
    result.manifest["estimate"] = estimates.to_json()
    if result.changed is not None:
        result.manifest["changed"] = result.changed
    if result.shares is not None:
        result.manifest["shares"] = result.shares.to_json()
    mark(result)
    return result


def judge_by_rehearsal(result: Adaptation, record: Rehearsal | None) -> None:
    """Judge the features of a result by what the rehearsal taught about its method, if it did."""
    if record is None:
        return
    method = result.manifest["method"]
    name = None if record.find_differences(method) else method["name"]
    result.before, result.after = (
        None if found is None else found.judge_by(record, candidate)
        for found, candidate in ((result.before, UNTOUCHED), (result.after, name))
    )
    judged = {"before": result.before, "after": result.after}
    result.manifest["verification"] = {when: found.to_json() for when, found in judged.items() if found is not None}


def mark(result: Adaptation, temperature: float = 1.0) -> None:
    """Record on the model how it was adapted, so that `verify` uses the estimate's map for that method."""
    result.model.shiftmend_adaptation = {  # type: ignore[assignment]
        "method": result.manifest["method"]["name"],
        "temperature": temperature,
        "free_shares": bool(result.manifest.get("free_shares")),
    }


def read_both(task: Task, method: Method, result: Adaptation) -> dict[str, Reading]:
    """Read the signals of the untouched and the adapted model on the target; only the former if they are the same."""
    untouched = copy_model(task.model).to(task.feed.device).eval()
    readings = {UNTOUCHED: _read(task, untouched, make_method(UNTOUCHED))}
    name = result.manifest["method"]["name"]
    if name != UNTOUCHED:
        readings[name] = _read(task, result.model, method)
        _compare_for_shares(result, readings[name])
    return readings


def estimate_one(
    task: Task,
    method: Method,
    result: Adaptation,
    readings: Mapping[str, Reading],
    *,
    calibrate: bool = True,
    output: Entry = None,
) -> None:
    """Add the estimated scores before and after to the result of a single method, from the signals of both models."""
    assert task.profile is not None
    record = task.profile.rehearsal
    assert record is not None
    estimator = Estimator(record)
    joined = add_agreements(readings, record)
    if method.frees_shares:
        joined[method.name] = dict(readings[method.name].signals)
    doubt = [OTHER_SAMPLES] if looks_like_selection(readings[UNTOUCHED], record) else []
    before = estimator.estimate(UNTOUCHED, joined[UNTOUCHED], readings[UNTOUCHED].samples, reasons=doubt)
    after = before
    if method.name != UNTOUCHED:
        reading, reasons = readings[method.name], [*doubt, *record.find_differences(describe_method(method))]
        apart = reading.measure_distance(record)
        after = estimator.estimate(method.name, joined[method.name], reading.samples, reasons=reasons, distance=apart)
        before = estimator.estimate_before(
            before, after, method.name, joined[UNTOUCHED], reading.samples, distance=apart
        )
    judge_by_rehearsal(result, record)
    result.estimate = Estimates(before, after)
    result.manifest["estimate"] = result.estimate.to_json()
    if calibrate and method.name != UNTOUCHED:
        calibrate_result(result, readings[method.name], task, output)


def calibrate_result(result: Adaptation, reading: Reading, task: Task, output: Entry = None) -> None:
    """Fold into the head the temperature at which the mean confidence equals the estimated accuracy.

    If nothing is known of the accuracy, use the temperature that calibrates the untouched model at home.
    """
    after = result.estimate.after if result.estimate is not None else None
    profile = task.profile
    if profile is None or profile.rehearsal is None or profile.rehearsal.task != "classes":
        return
    if after is None or not profile.rehearsal.labelled:
        return
    temperature, by = profile.rehearsal.temperature, "home"
    if after.best_guess is not None:
        temperature, by = find_temperature(as_class_logits(reading.outputs), after.best_guess), "estimate"
    sample = task.feed.first(2)
    with on_device(result.model, task.feed.device):
        refusal = fold_temperature(result.model, profile.specs["logits"], temperature, sample, output)
    if refusal is None:
        mark(result, temperature)
        # A manifest is matched to its weights by this fingerprint.
        result.manifest["adapted_weights"] = fingerprints.weights(result.model)
    folded = {"temperature": temperature, "by": by}
    result.manifest["calibration"] = folded if refusal is None else {"refused": refusal}
