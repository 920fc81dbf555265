"""Readings: all label-free signals of a model, from one pass over the target.

The signals of a history (`signals.py`) are measured after each epoch and must be cheap. A reading is made once for a
finished model, and estimates of the accuracy are made from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from shiftmend.inputs.feed import Feed
from shiftmend.passes.evaluation_pass import Observation, run_pass, without_labels
from shiftmend.profiles.profile import Profile
from shiftmend.profiles.rehearsal import Rehearsal
from shiftmend.profiles.shares import reweight
from shiftmend.stats.clusters import assign
from shiftmend.stats.divergences import sampling_floor
from shiftmend.stats.histograms import Bins
from shiftmend.verification import predictions
from shiftmend.verification.class_shares import expect_answers, fit_shares
from shiftmend.verification.predictions import as_class_logits
from shiftmend.verification.signals import VERIFIED, Tally, sample_positions
from shiftmend.verification.verdict import Verification

READ_SIGNALS: dict[str, str] = {
    "slices": "mean divergence of the verification slices, which no method aligns",
    "marginals": "divergence of features plus that of logits, unit by unit",
    "confidence": "mean probability of the predicted class",
    "certainty": "mean negative entropy of the predictions, in nats",
    "confidence above threshold": "share of samples whose confidence exceeds the threshold found at home",
    "certainty above threshold": "share of samples whose negative entropy exceeds the threshold found at home",
    "transported confidence": "mean probability of the assigned class, if classes had their shares of home",
    "nuclear norm": "spread and certainty of all predictions together",
    "skew": "total variation between the class shares of the answers and those at home, without chance",
    "outside": "share of the slices beyond the range of home, less that at home",
    "spread": "deviation of the outputs, relative to home; quantities only",
    "offset": "distance of the mean output from home, in deviations at home; quantities only",
}
"""Signals of a reading by name. If several candidates are read, `agreement with CANDIDATE` is added for each."""

MAX_UNEXPLAINED = 0.4
"""Share of the divergence from home that may be left with free class shares, for these to explain the divergence. A
rehearsal lowers the limit where a simulated device came below it (`Rehearsal.find_unexplained_limit`). It never raises
the limit: what chance leaves falls with the samples of a site, and home cannot draw sites as large as itself."""

CHANCE_MARGIN, SAME_BEYOND_CHANCE = 1.2, 0.005
"""Multiple of the divergence expected by chance, and divergence beyond chance, up to which other class shares explain
all. At 108 sites where nothing but the shares had changed, divergence was 0.2 to 1.13 times that expected. Of 136 sites
with a device that cost more than ten points, and that shares seemed to explain otherwise, 14 were below 1.2: all had
fewer than 120 samples and lost less than 16 points."""

MAX_KEPT_VALUES = 1 << 24
"""Largest number of output values that are kept of a pass; further samples are left out at even spacing."""


@dataclass(frozen=True)
class Reading:
    """Signals, outputs and predictions of a model, from one pass over the target.

    Attributes:
        signals: Signals of `READ_SIGNALS` that could be measured, by name.
        outputs: Logits `[M, classes]` or quantities `[M, outputs]` as the model returns them.
        answers: Predicted classes `[M]`, or the outputs themselves for a regression.
        verification: Divergences of the features, and the verdict about them.
        samples: Number of inputs.
        shares: Class shares `[classes]` that home was reweighted to for the comparison; None for those of home.
        left_by_selection: For a regression, the share of the divergence from home that is left if home is reweighted to
            the clusters of the target's samples. Little is left if the target's samples could be a selection of home's.
            None if there are no clusters.
    """

    signals: dict[str, float]
    outputs: Tensor = field(repr=False)
    answers: Tensor = field(repr=False)
    verification: Verification
    samples: int
    shares: Tensor | None = None
    left_by_selection: float | None = None

    def measure_distance(self, record: Rehearsal) -> float:
        """Return the total variation between the class shares used in the comparison and those of home."""
        return 0.0 if self.shares is None else float((self.shares - record.label_shares).abs().sum() / 2)


def read(
    model: nn.Module,
    feed: Feed,
    profile: Profile,
    rehearsal: Rehearsal | None = None,
    temperature: float = 1.0,
    *,
    free_shares: bool = False,
) -> Reading:
    """Run a model over a feed once, and measure its signals.

    Args:
        model: The model, on the device of the feed.
        feed: The target data.
        profile: The source's profile.
        rehearsal: The rehearsal in the profile. Without it, probabilities are not calibrated, and signals that compare
            with home are left out.
        temperature: Temperature that was folded into the model's head; its logits are multiplied by it.
        free_shares: Whether home is reweighted to the class shares that the model predicts at the target, before it is
            compared.

    Returns:
        The reading, with outputs as they were before the temperature was folded in.
    """
    home = profile.to(feed.device)
    tally, kept = Tally(home), _Kept(feed.known_samples)
    clusters = _Clusters(home, rehearsal) if rehearsal is not None and rehearsal.cluster_centres.numel() else None

    def update(seen: Observation) -> None:
        if temperature != 1.0:
            seen.activations["logits"] = seen.activations["logits"] * temperature
        tally.update(seen.activations, len(seen.inputs))
        kept.update(seen.activations["logits"], len(seen.inputs))
        if clusters is not None:
            clusters.update(seen.activations["features"])

    taps = {name: home.specs[name] for name in VERIFIED}
    run_pass(model, without_labels(feed.batches(feed.inference_batch_size)), update, taps=taps)
    found = summarise(tally, kept.result(), rehearsal, free_shares=free_shares)
    if clusters is None or rehearsal is None:
        return found
    return replace(found, left_by_selection=measure_left_by_selection(tally, clusters.shares(), rehearsal))


@torch.no_grad()
def summarise(
    tally: Tally, outputs: Tensor, rehearsal: Rehearsal | None = None, *, free_shares: bool = False
) -> Reading:
    """Compute a reading from counts and outputs.

    Args:
        tally: Counts of features, logits and slices.
        outputs: Outputs `[M, units]` of the samples.
        rehearsal: The rehearsal, as for `read`.
        free_shares: As for `read`: home is reweighted to the predicted class shares before the comparison.
    """
    shares, own_shares = None, None
    has_classes = rehearsal is not None and rehearsal.task == "classes" and bool(rehearsal.by_class)
    if free_shares and has_classes and rehearsal is not None and bool(outputs.isfinite().all()):
        shares, own_shares = fit_shares(as_class_logits(outputs), rehearsal), rehearsal.shares
        place = tally.slices.counts.device
        tally.profile = reweight(replace(tally.profile, rehearsal=rehearsal), shares).to(place)
        rehearsal = replace(rehearsal, shares=expect_answers(shares, rehearsal).float())
    verification = tally.verification()
    signals = {"slices": verification.divergence, "marginals": verification.marginals}
    signals["outside"] = measure_outside(tally)
    found = measure_outputs(outputs, rehearsal, own_shares)
    values = {name: value for name, value in (signals | found.signals).items() if value is not None}
    return Reading(values, outputs, found.answers, verification, verification.samples, shares)


def measure_left_by_selection(tally: Tally, shares: Tensor, record: Rehearsal) -> float:
    """Return the share of the divergence of slices that is left if home is reweighted to other shares of its clusters.

    Divergence that chance explains does not count.

    Samples of the same device that were selected otherwise, e.g. of one product or with high answers, fall into the
    clusters of home and are distributed as at home within each. Another device moves samples within the clusters.

    Args:
        tally: Counts of features, logits and slices at the target.
        shares: Share of the target's samples in each cluster, `[clusters]`.
        record: The rehearsal in the profile, with histograms of the clusters.
    """
    home = tally.profile
    plain, _, samples = tally.joined()
    tally.profile = reweight(replace(home, rehearsal=record), shares).to(tally.slices.counts.device)
    left = tally.joined()[0]
    tally.profile = home
    at_home = (record.samples * record.label_shares).clamp_min(1.0)
    usual = record.home_level("slices", samples) if record.home_mean.numel() else math.nan
    usual = usual if math.isfinite(usual) else 0.0
    chance = sampling_floor(home.bins, 1 / float((shares.double().square() / at_home).sum()), samples)
    beyond = float(plain) - usual
    return max(0.0, float(left) - max(chance, usual)) / beyond if beyond > 0 else 0.0


def measure_unexplained(plain: Reading, free: Reading, record: Rehearsal, bins: Bins) -> float:
    """Return the share of the divergence from home that other class shares do not explain.

    A device may push samples into the classes of home without making them samples of these classes. The divergence that
    is left then may be a small share of all divergence, and still far beyond chance. So a divergence at the limit of
    chance counts as `MAX_UNEXPLAINED`, and a larger one as more.

    Args:
        plain: Reading of a model, compared with home.
        free: Reading of the same model, compared with home reweighted to the predicted class shares (`free_shares`).
        record: The rehearsal in the profile.
        bins: Bins of the profile.
    """
    parts = [free.signals[name] / max(plain.signals[name], 1e-12) for name in ("slices", "marginals")]
    chance = SAME_BEYOND_CHANCE + CHANCE_MARGIN * expect_chance(free, record, bins)
    return max(*parts, MAX_UNEXPLAINED * free.signals["slices"] / chance)


def expect_chance(free: Reading, record: Rehearsal, bins: Bins) -> float:
    """Return the divergence of slices that sampling noise alone would leave between a site and reweighted home data.

    The noise is larger if a class is rare at home and frequent at the site.

    Args:
        free: Reading of a model, compared with home reweighted to the predicted class shares.
        record: The rehearsal in the profile, with the number of samples of each class at home.
        bins: Bins of the profile.
    """
    shares = record.label_shares if free.shares is None else free.shares.double().cpu()
    at_home = (record.samples * record.label_shares).clamp_min(1.0)
    return sampling_floor(bins, 1 / float((shares.square() / at_home).sum()), free.samples)


def shares_explain(plain: Reading, free: Reading, record: Rehearsal, bins: Bins) -> bool:
    """Return whether other class shares explain the divergence from home.

    Args:
        plain: As for `measure_unexplained`.
        free: As for `measure_unexplained`.
        record: The rehearsal in the profile, which knows how much simulated devices leave unexplained.
        bins: As for `measure_unexplained`.
    """
    return measure_unexplained(plain, free, record, bins) <= record.find_unexplained_limit(MAX_UNEXPLAINED)


def measure_outside(tally: Tally) -> float:
    """Return the share of slice values beyond the range of home, minus that share at home."""
    home = tally.profile.slices["verification"].histogram.counts
    return _find_outside(tally.slices.reduce_over_processes().counts) - _find_outside(home)


def _find_outside(counts: Tensor) -> float:
    """Return the share of counts `[slices, bins]` in the two outer bins, which lie beyond the range of home."""
    counts = counts.cpu().double()  # Some accelerators have no float64.
    return float((counts[:, 0] + counts[:, -1]).sum() / counts.sum())


class _Kept:
    """Accumulator of outputs; keeps every k-th sample if there are too many."""

    def __init__(self, samples: int | None) -> None:
        self.samples, self.inputs, self.parts = samples, 0, list[Tensor]()
        self.step: int | None = None

    def update(self, rows: Tensor, inputs: int) -> None:
        rows = sample_positions(rows, inputs, self.inputs).float()
        self.inputs += inputs
        if self.step is None:
            expected = rows.numel() / max(1, inputs) * (self.samples or inputs)
            self.step = max(1, round(expected / MAX_KEPT_VALUES))
        self.parts.append(rows[:: self.step])

    def result(self) -> Tensor:
        rows = torch.cat(self.parts)
        # Signals need float64, which some accelerators lack.
        return rows if rows.device.type in ("cpu", "cuda") else rows.cpu()


class _Clusters:
    """Counter of the target's samples in each cluster of home."""

    def __init__(self, home: Profile, rehearsal: Rehearsal) -> None:
        self.projector = home.slices["verification"].projector
        self.centres = rehearsal.cluster_centres[:, :-1].to(self.projector.weight.device)
        self.counts = torch.zeros(len(self.centres), device=self.centres.device)

    def update(self, features: Tensor) -> None:
        for part in self.projector.project_in_parts(features):
            self.counts += torch.bincount(assign(part, self.centres), minlength=len(self.centres))

    def shares(self) -> Tensor:
        return self.counts.cpu() / self.counts.sum().cpu().clamp_min(1)


@dataclass(frozen=True)
class _Measured:
    signals: dict[str, float]
    answers: Tensor


def measure_outputs(outputs: Tensor, rehearsal: Rehearsal | None, home_shares: Tensor | None = None) -> _Measured:
    """Return the signals of outputs `[M, units]`, and the predictions.

    Args:
        outputs: Outputs of the model.
        rehearsal: The rehearsal; predictions are compared with its `shares`.
        home_shares: Shares of the predictions at home, if those of `rehearsal` have been replaced.
    """
    quantities = outputs.shape[1] == 1 if rehearsal is None else rehearsal.task == "quantities"
    if quantities:
        return _Measured(_measure_quantities(outputs, rehearsal), outputs)
    logits = as_class_logits(outputs)
    answers = logits.argmax(1)
    if not bool(logits.isfinite().all()):
        return _Measured({}, answers)
    logits = logits / (1.0 if rehearsal is None else rehearsal.temperature)
    confidence, certainty = predictions.confidence(logits), predictions.negative_entropy(logits)
    signals = {
        "confidence": float(confidence.double().mean()),
        "certainty": float(certainty.double().mean()),
        "nuclear norm": predictions.nuclear_norm(
            logits, None if rehearsal is None or home_shares is None else rehearsal.shares, home_shares
        ),
    }
    if rehearsal is not None:
        above = zip((confidence, certainty), rehearsal.thresholds, strict=True)
        shares = [predictions.share_above(values, threshold) for values, threshold in above]
        signals |= {"confidence above threshold": shares[0], "certainty above threshold": shares[1]}
        signals["transported confidence"] = predictions.transported_confidence(logits, rehearsal.shares)
        own = predictions.class_shares(answers, logits.shape[1])
        signals["skew"] = predictions.skew(own, rehearsal.shares, len(answers), rehearsal.samples)
    return _Measured(signals, answers)


def _measure_quantities(outputs: Tensor, rehearsal: Rehearsal | None) -> dict[str, float]:
    if rehearsal is None or not bool(outputs.isfinite().all()):
        return {}
    mean, deviation = (one.to(outputs) for one in (rehearsal.output_mean, rehearsal.output_deviation))
    unit = deviation.clamp_min(1e-12)
    return {
        "spread": float((outputs.std(0, unbiased=False) / unit).mean()),
        "offset": float(((outputs.mean(0) - mean) / unit).abs().mean()),
    }


def agree(first: Reading, second: Reading, deviation: Tensor | None = None) -> float | None:
    """Measure the agreement of two models on the same samples.

    Args:
        first: Reading of one model.
        second: Reading of the other.
        deviation: For a regression, the standard deviation of each output at home.

    Returns:
        The share of equal predictions; for a regression, the negative root mean square difference in standard
        deviations.
    """
    one, other = first.answers, second.answers
    if one.shape != other.shape:
        return None
    if not one.is_floating_point():
        return float((one == other).double().mean())
    unit = torch.ones(one.shape[1]) if deviation is None else deviation.clamp_min(1e-12)
    return -float(((one - other) / unit.to(one)).square().mean().sqrt())


def add_agreements(readings: Mapping[str, Reading], rehearsal: Rehearsal | None = None) -> dict[str, dict[str, float]]:
    """Return the signals of each candidate, together with its agreement with every other candidate.

    Args:
        readings: Readings of candidates on the same samples, by name.
        rehearsal: The rehearsal; provides the unit of a regression's outputs.
    """
    deviation = rehearsal.output_deviation if rehearsal is not None and rehearsal.task == "quantities" else None
    joined: dict[str, dict[str, Any]] = {}
    for name, reading in readings.items():
        others = {other: agree(reading, theirs, deviation) for other, theirs in readings.items() if other != name}
        found = {f"agreement with {other}": value for other, value in others.items() if value is not None}
        joined[name] = reading.signals | found
    return joined
