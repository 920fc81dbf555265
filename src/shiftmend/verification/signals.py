"""What can be seen of a model on the target without labels, in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shiftmend.accelerate.bf16 import Precision
from shiftmend.accelerate.cuda_graphs import captured_call, worth_capturing
from shiftmend.distributed.batch_norm import synchronised
from shiftmend.distributed.collectives import all_gather, all_processes, all_sum, is_distributed, reduce_mean
from shiftmend.errors import TapError
from shiftmend.inputs.feed import Feed
from shiftmend.introspection.modes import modes
from shiftmend.introspection.outputs import Entry, pick
from shiftmend.introspection.taps import Tap, tapped
from shiftmend.profiles.profile import Profile
from shiftmend.utils.processes import rank
from shiftmend.utils.rng import roll
from shiftmend.verification.verdict import Verification, judged

VERIFIED = ("features", "logits")
"""The taps whose marginals count."""


POSITIONS = 256
"""Counted of each input at most, where its features or logits are maps. All of them, of 96 x 96 pixels, take a CPU
several times as long as a small network, and tell little more: drawn anew for each input, so many add to chance about
a 256th of what the inputs themselves do."""


_WHOLE = 1 << 24


_STEPS = (12664746, 9560334)
"""The sequence R2 of Roberts, in parts of the whole: 1 / g and 1 / g^2 with g^3 = g + 1."""


class Tally:
    """What a verification rests on, gathered over batches: soft counts of features, logits and verification slices."""

    def __init__(self, profile: Profile, taps: Iterable[str] = VERIFIED) -> None:
        self.profile = profile
        self.slices = profile.slices["verification"].histogram.new_tracker()
        self.taps = {name: profile.taps[name].new_tracker() for name in taps}
        self.inputs = 0
        self._earlier: int | Tensor = 0  # inputs of the batches before, in all processes

    def update(self, activations: Mapping[str, Tensor], inputs: int) -> None:
        """Activations `[samples, units]` by tap, of so many inputs: a feature map has many samples of one."""
        maps = any(len(activations[name]) > POSITIONS * inputs for name in self.taps)
        before, batch = _place(inputs, self.slices.counts.device) if maps else (0, inputs)
        counted = {name: some_positions(activations[name], inputs, self._earlier + before) for name in self.taps}
        self.inputs += inputs
        self._earlier = self._earlier + batch
        # batches may differ in their number of positions, of which the profile counted all
        times = {name: len(activations[name]) / len(rows) for name, rows in counted.items()}
        for part in self.profile.slices["verification"].projector.project_in_parts(counted["features"]):
            self.slices.update(part, times["features"])
        for name, counter in self.taps.items():
            counter.update(counted[name], times[name])

    def joined(self) -> tuple[Tensor, Tensor, int]:
        """Over all processes: divergence of the slices, that of the marginals, and how many inputs they are of."""
        slices = self.slices.reduce_over_processes()
        inputs = self.inputs
        if is_distributed():
            inputs = int(all_sum(torch.tensor(inputs, device=slices.counts.device)))
        taps = {name: self.taps[name].reduce_over_processes() for name in VERIFIED}
        features, logits = (tap.divergence(self.profile.taps[name]) for name, tap in taps.items())
        return slices.divergence(self.profile.slices["verification"].histogram), features + logits, inputs

    def verification(self) -> Verification:
        *divergences, inputs = self.joined()
        slices, marginals = torch.stack(divergences).tolist()
        return judged(slices, marginals, inputs, self.profile)


def _place(inputs: int, device: torch.device) -> tuple[int | Tensor, int | Tensor]:
    """Of a batch that several processes share: how many inputs come before those of this one, and how many it has."""
    if not is_distributed():
        return 0, inputs
    every = all_gather(torch.tensor(inputs, device=device))
    return every[: rank()].sum(), every.sum()


def some_positions(values: Tensor, inputs: int, before: int | Tensor) -> Tensor:
    """Rows `[samples, units]` of so many inputs, at most `POSITIONS` of each.

    One from each of as many equal stretches of an input, at a place in it that follows a sequence of low discrepancy
    over stretches and inputs: no column of a map is favoured, and many inputs together have every position equally
    often, which matters where each has values of its own. `before` is how many inputs came earlier, so that batches of
    any size, and any number of processes, give the same. Computed on the device without a look at it: a CUDA graph can
    hold it.
    """
    each, rest = divmod(len(values), inputs)
    if rest or each <= POSITIONS:
        return values
    stretch = torch.arange(POSITIONS, device=values.device)
    one = torch.arange(inputs, device=values.device).unsqueeze(1)
    within = (stretch * _STEPS[0] + (one + before) * _STEPS[1]) % _WHOLE
    chosen = (stretch * _WHOLE + within) * each // (POSITIONS * _WHOLE)
    return values.index_select(0, (one * each + chosen).flatten())


@dataclass(frozen=True)
class Signals:
    """Label-free signals; None where there is no profile, or where the model gives no class logits."""

    verification: Verification | None
    """Divergence of the slices that no method aligns, and whether the marginals agree: the judge."""
    marginals: float | None
    """Divergence of features plus that of logits, each unit by itself: what FR and BUFR minimise, in eval mode."""
    entropy: float | None
    """Mean entropy of the predictions, in nats."""
    confidence: float | None
    """Mean probability of the predicted class."""


def observe(
    model: nn.Module, feed: Feed, profile: Profile | None, output: Entry = None, most: int | None = None
) -> Signals:
    """All signals over a feed, or over a fixed random part of it; waits for the device once, at the end.

    Of several processes, all must ask; each looks at its share of the batches, and all get the same answer.
    """
    return Watch(model, feed, profile, output, most=most)()


class Watch:
    """The same look at one model again and again; on CUDA, where the samples are small, captured as a graph.

    A captured look follows weights that change in their place, as training changes them. `precision` is that of the
    network; histograms are counted in full. Without a profile, `logits` says where the model's head is, and so which
    axis of its output counts classes.
    """

    def __init__(
        self,
        model: nn.Module,
        feed: Feed,
        profile: Profile | None,
        output: Entry = None,
        *,
        most: int | None = None,
        capture: bool = False,
        precision: Precision = nullcontext,
        logits: Tap | None = None,
    ) -> None:
        self.model, self.feed, self.output = model, feed, output
        self.precision, self.logits = precision, logits
        self.profile = profile.to(feed.device) if profile is not None else None
        self.most, self.capture = most, capture
        self._again: Callable[[], _Seen] | None = None
        self._parts: list[Tensor] = []  # kept, since the graph reads them

    def __call__(self) -> Signals:
        roll(0)
        with all_processes(), synchronised(self.model):
            seen = self._again() if self._again is not None else self._look()
        found: dict[str, float] = dict(zip(seen.names, seen.values.tolist(), strict=True))
        verification = None
        if self.profile is not None:
            verification = judged(found["slices"], found["marginals"], seen.inputs, self.profile)
        return Signals(verification, found.get("marginals"), found.get("entropy"), found.get("confidence"))

    def forget(self) -> None:
        """Look anew: the model has been changed otherwise than in the values of its tensors."""
        self._again = None

    def _look(self) -> _Seen:
        inputs, feed = self.feed.inputs, self.feed
        if self.capture and not is_distributed() and inputs is not None and worth_capturing(inputs):
            parts = self._parts = feed.some(self.most or len(inputs), 0, feed.at_once)
            self._again = captured_call(
                lambda: self._pass(feed.ready(inputs.index_select(0, part)) for part in parts), self.model, feed.device
            )
            if self._again is not None:
                return self._again()
        self.capture = False
        if self.most is None:
            return self._pass(feed.batches(feed.at_once))
        return self._pass(feed.subset(self.most, 0, feed.at_once))

    def _pass(self, batches: Iterable[Tensor]) -> _Seen:
        model, profile = self.model, self.profile
        tally = Tally(profile) if profile is not None else None
        specs = {"logits": self.logits} if self.logits is not None else {}
        if profile is not None:
            specs = {name: profile.specs[name] for name in VERIFIED}
        axis = specs["logits"].channel_axis if specs else 1
        certainty: Tensor | None = None
        predictions = 0
        with modes(model), torch.no_grad(), tapped(model, specs) as recorder:
            model.eval()
            for batch in batches:
                with self.precision():
                    returned = model(batch)
                values = recorder.read()
                logits = class_logits(returned, self.output, axis, values["logits"].shape[1] if specs else None)
                if tally is not None:
                    tally.update(values, len(batch))
                if logits is not None:
                    sums = _certainty(logits)
                    certainty = sums if certainty is None else certainty + sums
                    predictions += logits.numel() // logits.shape[1]
            found: dict[str, Tensor] = {}
            if certainty is not None:
                found["entropy"], found["confidence"] = reduce_mean(certainty / predictions, predictions)
            inputs = 0
            if tally is not None:
                found["slices"], found["marginals"], inputs = tally.joined()
            return _Seen(
                tuple(found), torch.stack([*found.values()]) if found else torch.empty(0, device="cpu"), inputs
            )


@dataclass(frozen=True)
class _Seen:
    """What a pass has found, still on the device."""

    names: tuple[str, ...]
    values: Tensor
    inputs: int


def class_logits(returned: Any, output: Entry, axis: int, classes: int | None = None) -> Tensor | None:
    """What the model says about classes, brought to axis 1; None for a single number, or for what is no tensor.

    A model of tokens has them on its last axis, as its tap says; what it returns may have fewer axes than that, or
    have them on axis 1 behind a transposition, as the number of classes tells.
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


def _certainty(logits: Tensor) -> Tensor:
    """Sums over all predictions of their entropy and of their confidence."""
    log_probabilities = logits.log_softmax(1)
    probabilities = log_probabilities.exp()
    # 0 ln 0 is 0, also where the logarithm has become minus infinity
    entropy = -(probabilities * log_probabilities.clamp_min(-100)).sum()
    return torch.stack([entropy, probabilities.amax(1).sum()])
