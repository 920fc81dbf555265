"""Label-free signals, measured in one pass over the target.

`SIGNALS` is the only list of them; histories, benchmarks, reports and correlations iterate over it. To add a signal,
add an entry to the list and an accumulator that measures it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shiftmend.accelerate.precision import Precision
from shiftmend.distributed.collectives import all_gather, all_sum, is_distributed, reduce_mean
from shiftmend.errors import TapError
from shiftmend.inputs.feed import Feed
from shiftmend.introspection.outputs import Entry, pick
from shiftmend.introspection.taps import Tap
from shiftmend.passes.evaluation_pass import Observation, RepeatedPass
from shiftmend.profiles.profile import Profile
from shiftmend.utils.processes import rank
from shiftmend.verification.verdict import Verification, judge

SIGNALS: dict[str, str] = {
    "slices": "mean divergence of the verification slices, which no method aligns: the judge",
    "marginals": "divergence of features plus that of logits, unit by unit: what FR and BUFR minimise, in eval mode",
    "entropy": "mean entropy of the predictions, in nats",
    "confidence": "mean probability of the predicted class",
}
"""Descriptions of the signals by name. The first two need a profile, the others class logits."""

VERIFIED = ("features", "logits")
"""Taps whose marginals are measured."""

POSITIONS = 256
"""Largest number of positions that are counted per input if features or logits are maps. On a CPU, all positions of 96
x 96 pixels would take several times as long as a small network and add little information: 256 random positions per
input increase the sampling noise by about 1/256."""

_WHOLE = 1 << 24
_STEPS = (12664746, 9560334)
"""Step sizes of the R2 sequence of Roberts as 24-bit fractions: 1 / g and 1 / g^2 with g^3 = g + 1."""


@dataclass(frozen=True)
class Signals:
    """Signals of one pass.

    Attributes:
        values: Signals that could be measured, by name, in the order of `SIGNALS`.
        verification: The verdict from slices and marginals; None without a profile.
    """

    values: dict[str, float] = field(default_factory=dict)
    verification: Verification | None = None

    def get(self, name: str) -> float | None:
        """Return a signal by name; None if it could not be measured."""
        return self.values.get(name)


def observe(
    model: nn.Module, feed: Feed, profile: Profile | None, output: Entry = None, limit: int | None = None
) -> Signals:
    """Measure all signals over a feed, or over a fixed random part of it, with one device synchronisation at the end.

    In a process group, every process must call `observe`. Each runs its part of the batches, and all get the same
    result.
    """
    return SignalReader(model, feed, profile, output, limit=limit)()


class SignalReader:
    """A repeatable measurement of the signals of one model; see `RepeatedPass`.

    Args:
        model: The model to measure.
        feed: The target data.
        profile: The source's profile, if there is one.
        output: Entry of a tuple or dict that is the model's output.
        limit: Largest number of samples; None for all.
        capture: Whether the pass may be captured as a CUDA graph.
        precision: A context manager for the forward pass. Histograms are always counted in full precision.
        logits: Tap of the model's head, if there is no profile; it tells which axis of the output holds the classes.
    """

    def __init__(
        self,
        model: nn.Module,
        feed: Feed,
        profile: Profile | None,
        output: Entry = None,
        *,
        limit: int | None = None,
        capture: bool = False,
        precision: Precision = nullcontext,
        logits: Tap | None = None,
    ) -> None:
        self.profile = profile.to(feed.device) if profile is not None else None
        taps = {"logits": logits} if logits is not None else {}
        if self.profile is not None:
            taps = {name: self.profile.specs[name] for name in VERIFIED}
        self._ahead: Signals | None = None
        own = self.profile  # The graph's observers must not refer to this object, because it owns the graph.
        self._pass = RepeatedPass(
            model,
            feed,
            lambda: _SignalObserver(own, output, taps),
            taps=taps,
            limit=limit,
            shared=True,
            capture=capture,
            precision=precision,
        )

    @property
    def sees_all(self) -> bool:
        """True if a call measures every sample in full precision, as `observe` without a limit does."""
        inputs, limit = self._pass.feed.inputs, self._pass.limit
        return inputs is not None and (limit is None or len(inputs) <= limit) and self._pass.precision is nullcontext

    def look_ahead(self) -> Signals:
        """Measure the current model. The next call returns the same signals without a new pass."""
        self._ahead = self()
        return self._ahead

    def __call__(self) -> Signals:
        """Measure the signals of the current model."""
        if self._ahead is not None:
            found, self._ahead = self._ahead, None
            return found
        return self._measure()

    def _measure(self) -> Signals:
        seen = self._pass()
        found: dict[str, float] = dict(zip(seen.names, seen.values.tolist(), strict=True))
        verification = None
        if self.profile is not None:
            verification = judge(found["slices"], found["marginals"], seen.inputs, self.profile)
        return Signals({name: found[name] for name in SIGNALS if name in found}, verification)

    def forget(self) -> None:
        """Drop a captured pass, because more than the values of the model's tensors has changed."""
        self._ahead = None
        self._pass.forget()


@dataclass(frozen=True)
class _Measured:
    """Signals of a pass, still on the device."""

    names: tuple[str, ...]
    values: Tensor
    inputs: int


class _SignalObserver:
    """An observer that feeds each batch to the accumulators."""

    def __init__(self, profile: Profile | None, output: Entry, taps: Mapping[str, Tap]) -> None:
        self.output = output
        self.axis = taps["logits"].channel_axis if taps else 1
        self.tally = Tally(profile) if profile is not None else None
        self.certainty = Certainty()

    def update(self, seen: Observation) -> None:
        tapped = seen.activations.get("logits")
        logits = class_logits(seen.output, self.output, self.axis, None if tapped is None else tapped.shape[1])
        if self.tally is not None:
            self.tally.update(seen.activations, len(seen.inputs))
        if logits is not None:
            self.certainty.update(logits)

    def result(self) -> _Measured:
        found = self.certainty.values()
        inputs = 0
        if self.tally is not None:
            found["slices"], found["marginals"], inputs = self.tally.joined()
        values = torch.stack([*found.values()]) if found else torch.empty(0, device="cpu")
        return _Measured(tuple(found), values, inputs)


class Certainty:
    """Accumulator of the mean entropy and confidence of predictions."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None
        self._predictions = 0

    def update(self, logits: Tensor) -> None:
        """Add logits `[N, classes, ...]`."""
        log_probabilities = logits.log_softmax(1)
        probabilities = log_probabilities.exp()
        # 0 ln 0 counts as 0, even if the logarithm is minus infinity.
        entropy = -(probabilities * log_probabilities.clamp_min(-100)).sum()
        sums = torch.stack([entropy, probabilities.amax(1).sum()])
        self._sums = sums if self._sums is None else self._sums + sums
        self._predictions += logits.numel() // logits.shape[1]

    def values(self) -> dict[str, Tensor]:
        """Return both means over all processes; empty if there were no logits."""
        if self._sums is None:
            return {}
        entropy, confidence = reduce_mean(self._sums / self._predictions, self._predictions)
        return {"entropy": entropy, "confidence": confidence}


class Tally:
    """Accumulator of the divergences: soft counts of features, logits and verification slices."""

    def __init__(self, profile: Profile, taps: Iterable[str] = VERIFIED) -> None:
        self.profile = profile
        self.slices = profile.slices["verification"].histogram.new_tracker()
        self.taps = {name: profile.taps[name].new_tracker() for name in taps}
        self.inputs = 0
        self._earlier: int | Tensor = 0  # Number of inputs in earlier batches, over all processes.

    def update(self, activations: Mapping[str, Tensor], inputs: int) -> None:
        """Add activations `[samples, units]` by tap; each input of a feature map has many samples."""
        maps = any(len(activations[name]) > POSITIONS * inputs for name in self.taps)
        before, batch = _place(inputs, self.slices.counts.device) if maps else (0, inputs)
        counted = {name: sample_positions(activations[name], inputs, self._earlier + before) for name in self.taps}
        self.inputs += inputs
        self._earlier = self._earlier + batch
        # Batches may differ in their number of positions; the profile has counted all positions.
        times = {name: len(activations[name]) / len(rows) for name, rows in counted.items()}
        for part in self.profile.slices["verification"].projector.project_in_parts(counted["features"]):
            self.slices.update(part, times["features"])
        for name, counter in self.taps.items():
            counter.update(counted[name], times[name])

    def add(self, other: Tally) -> None:
        """Add the counts of another accumulator with the same profile."""
        pairs = [(self.slices, other.slices), *((self.taps[name], other.taps[name]) for name in self.taps)]
        for own, theirs in pairs:
            own.counts += theirs.counts
            own.samples += theirs.samples
        self.inputs += other.inputs

    def joined(self) -> tuple[Tensor, Tensor, int]:
        """Return the divergences of slices and marginals, and the number of inputs, over all processes."""
        slices = self.slices.reduce_over_processes()
        inputs = self.inputs
        if is_distributed():
            inputs = int(all_sum(torch.tensor(inputs, device=slices.counts.device)))
        taps = {name: self.taps[name].reduce_over_processes() for name in VERIFIED}
        features, logits = (tap.divergence(self.profile.taps[name]) for name, tap in taps.items())
        return slices.divergence(self.profile.slices["verification"].histogram), features + logits, inputs

    def verification(self) -> Verification:
        """Return the verdict for the counted samples."""
        *divergences, inputs = self.joined()
        slices, marginals = torch.stack(divergences).tolist()
        return judge(slices, marginals, inputs, self.profile)


def _place(inputs: int, device: torch.device) -> tuple[int | Tensor, int | Tensor]:
    """Return the number of a shared batch's inputs in lower ranks, and the batch's total number of inputs."""
    if not is_distributed():
        return 0, inputs
    every = all_gather(torch.tensor(inputs, device=device))
    return every[: rank()].sum(), every.sum()


def sample_positions(values: Tensor, inputs: int, before: int | Tensor) -> Tensor:
    """Select at most `POSITIONS` rows per input from rows `[samples, units]`.

    Each input is divided into equal stretches, and one position is taken from each. The offset within a stretch follows
    a low-discrepancy sequence over stretches and inputs: no column of a map is favoured, and over many inputs every
    position is selected equally often. No value is read back from the device, so the function works inside a CUDA
    graph.

    Args:
        values: Rows of all inputs, in the order of the inputs.
        inputs: Number of inputs.
        before: Number of earlier inputs, so that the selection does not depend on batch size or number of processes.
    """
    each, rest = divmod(len(values), inputs)
    if rest or each <= POSITIONS:
        return values
    stretch = torch.arange(POSITIONS, device=values.device)
    one = torch.arange(inputs, device=values.device).unsqueeze(1)
    within = (stretch * _STEPS[0] + (one + before) * _STEPS[1]) % _WHOLE
    chosen = (stretch * _WHOLE + within) * each // (POSITIONS * _WHOLE)
    return values.index_select(0, (one * each + chosen).flatten())


def class_logits(returned: Any, output: Entry, axis: int, classes: int | None = None) -> Tensor | None:
    """Return the class logits in a model's output, with classes on axis 1; None if there are none.

    Args:
        returned: Output of the model.
        output: Entry of a tuple or dict that is the output.
        axis: Axis of the classes at the tap `logits`; the last axis for a model of tokens.
        classes: Number of classes at the tap. The model may return its logits transposed, or with fewer axes.
    """
    try:
        result = pick(returned, output, "the model")
    except TapError:
        return None
    if result.ndim < 2 or not result.is_floating_point():
        return None
    there = -result.ndim < axis < result.ndim and (result.shape[axis] == classes or result.shape[1] != classes)
    logits = result.movedim(axis, 1) if there else result
    return logits.float() if logits.shape[1] > 1 else None
