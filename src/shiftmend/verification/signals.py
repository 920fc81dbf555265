"""Label-free signals: what can be measured of a model on the target in one pass, without labels.

`SIGNALS` is the one list of them. Histories, benchmarks, reports and correlations iterate it. To add a signal, add an
entry to the list and an accumulator that measures it.
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
"""Signals by name, with what they are. The first two need a profile, the others class logits."""

VERIFIED = ("features", "logits")
"""Taps whose marginals count."""

POSITIONS = 256
"""Positions counted of each input at most, where its features or logits are maps. All positions of 96 x 96 pixels take
a CPU several times as long as a small network and tell little more: 256, drawn anew for each input, add about a 256th
to the chance of the inputs themselves."""

_WHOLE = 1 << 24
_STEPS = (12664746, 9560334)
"""The sequence R2 of Roberts, in parts of the whole: 1 / g and 1 / g^2 with g^3 = g + 1."""


@dataclass(frozen=True)
class Signals:
    """Signals of one pass.

    Attributes:
        values: Signals by name, those that could be measured, in the order of `SIGNALS`.
        verification: The verdict that follows from slices and marginals; None without a profile.
    """

    values: dict[str, float] = field(default_factory=dict)
    verification: Verification | None = None

    def get(self, name: str) -> float | None:
        """Return a signal by name; None if it could not be measured."""
        return self.values.get(name)


def observe(
    model: nn.Module, feed: Feed, profile: Profile | None, output: Entry = None, limit: int | None = None
) -> Signals:
    """Measure all signals over a feed, or over a fixed random part of it; wait for the device once, at the end.

    In a process group every process must call this; each looks at its share of the batches, and all get the same.
    """
    return SignalReader(model, feed, profile, output, limit=limit)()


class SignalReader:
    """A repeated measurement of the signals of one model; see `RepeatedPass`.

    Args:
        model: The model to look at.
        feed: The target data.
        profile: The source's profile, if there is one.
        output: Entry of a tuple or dict that is the model's output.
        limit: At most so many samples.
        capture: Whether the pass may be captured as a CUDA graph.
        precision: A context manager for the forward pass. Histograms are counted in full precision.
        logits: Where the model's head is, if there is no profile: decides which axis of the output counts classes.
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
        own = self.profile  # The graph's observers must not hold this object, which holds the graph.
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
        """Return the signals of the model as it is now; the next call returns the same and measures nothing."""
        self._ahead = self()
        return self._ahead

    def __call__(self) -> Signals:
        """Return the signals of the model as it is now."""
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
        """Drop a captured pass: the model has changed otherwise than in the values of its tensors."""
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
    """Accumulator of the entropy and the confidence of predictions."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None
        self._predictions = 0

    def update(self, logits: Tensor) -> None:
        """Add logits `[N, classes, ...]`."""
        log_probabilities = logits.log_softmax(1)
        probabilities = log_probabilities.exp()
        # 0 ln 0 is 0, also where the logarithm has become minus infinity.
        entropy = -(probabilities * log_probabilities.clamp_min(-100)).sum()
        sums = torch.stack([entropy, probabilities.amax(1).sum()])
        self._sums = sums if self._sums is None else self._sums + sums
        self._predictions += logits.numel() // logits.shape[1]

    def values(self) -> dict[str, Tensor]:
        """Return both means over all processes; empty if no logits were seen."""
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
        self._earlier: int | Tensor = 0  # Inputs of the batches before, in all processes.

    def update(self, activations: Mapping[str, Tensor], inputs: int) -> None:
        """Add activations `[samples, units]` by tap; a feature map has many samples of one input."""
        maps = any(len(activations[name]) > POSITIONS * inputs for name in self.taps)
        before, batch = _place(inputs, self.slices.counts.device) if maps else (0, inputs)
        counted = {name: sample_positions(activations[name], inputs, self._earlier + before) for name in self.taps}
        self.inputs += inputs
        self._earlier = self._earlier + batch
        # Batches may differ in their number of positions, all of which the profile has counted.
        times = {name: len(activations[name]) / len(rows) for name, rows in counted.items()}
        for part in self.profile.slices["verification"].projector.project_in_parts(counted["features"]):
            self.slices.update(part, times["features"])
        for name, counter in self.taps.items():
            counter.update(counted[name], times[name])

    def add(self, other: Tally) -> None:
        """Add what another accumulator with the same profile has counted."""
        pairs = [(self.slices, other.slices), *((self.taps[name], other.taps[name]) for name in self.taps)]
        for own, theirs in pairs:
            own.counts += theirs.counts
            own.samples += theirs.samples
        self.inputs += other.inputs

    def joined(self) -> tuple[Tensor, Tensor, int]:
        """Return the divergence of the slices, that of the marginals, and the inputs, over all processes."""
        slices = self.slices.reduce_over_processes()
        inputs = self.inputs
        if is_distributed():
            inputs = int(all_sum(torch.tensor(inputs, device=slices.counts.device)))
        taps = {name: self.taps[name].reduce_over_processes() for name in VERIFIED}
        features, logits = (tap.divergence(self.profile.taps[name]) for name, tap in taps.items())
        return slices.divergence(self.profile.slices["verification"].histogram), features + logits, inputs

    def verification(self) -> Verification:
        """Return the verdict that follows from the divergences."""
        *divergences, inputs = self.joined()
        slices, marginals = torch.stack(divergences).tolist()
        return judge(slices, marginals, inputs, self.profile)


def _place(inputs: int, device: torch.device) -> tuple[int | Tensor, int | Tensor]:
    """Return how many inputs of a shared batch belong to earlier processes, and how many the batch has in all."""
    if not is_distributed():
        return 0, inputs
    every = all_gather(torch.tensor(inputs, device=device))
    return every[: rank()].sum(), every.sum()


def sample_positions(values: Tensor, inputs: int, before: int | Tensor) -> Tensor:
    """Take at most `POSITIONS` rows of each input from rows `[samples, units]`.

    Each input is cut into as many equal stretches, and one position is taken from each. The place within a stretch
    follows a sequence of low discrepancy over stretches and inputs: no column of a map is favoured, and many inputs
    together have every position equally often. Nothing is read back from the device, so a CUDA graph can hold this.

    Args:
        values: Rows of all inputs, one input after the other.
        inputs: Number of inputs.
        before: Inputs that came earlier, so that batches of any size and any number of processes give the same.
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
    """Return the class logits in a model's output, with classes on axis 1; None if it has none.

    Args:
        returned: Whatever the model returned.
        output: Entry of a tuple or dict that is the output.
        axis: Axis of the classes at the tap `logits`. A model of tokens has them on its last axis.
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
