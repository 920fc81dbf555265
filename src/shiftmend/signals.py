"""What can be seen of a model on the target without labels, in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shiftmend.captures import captured_call, worth_capturing
from shiftmend.dice import roll
from shiftmend.distributed import active, joined_mean, together
from shiftmend.errors import TapError
from shiftmend.feeds import Feed
from shiftmend.joined_batch_norm import synchronised
from shiftmend.profiles import Profile
from shiftmend.steps import Precision
from shiftmend.taps import Entry, Tap, modes, pick, tapped
from shiftmend.verification import VERIFIED, Tally, Verification, judged


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
        with together(), synchronised(self.model):
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
        if self.capture and not active() and inputs is not None and worth_capturing(inputs):
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
                found["entropy"], found["confidence"] = joined_mean(certainty / predictions, predictions)
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
