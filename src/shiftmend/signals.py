"""What can be seen of a model on the target without labels, in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shiftmend.distributed import joined_mean, synchronised, together
from shiftmend.errors import TapError
from shiftmend.feeds import Feed
from shiftmend.profiles import Profile
from shiftmend.statistics import CountTracker, Histogram
from shiftmend.taps import Entry, modes, pick, tapped
from shiftmend.verification import Verification, judge

ON_GPU = 1024
"""Samples looked at together there at least: a smaller batch would be over before the next is launched."""


@dataclass(frozen=True)
class Signals:
    """Label-free signals; None where there is no profile, or where the model gives no class logits."""

    verification: Verification | None
    """Divergence of the slices that no method aligns: the judge."""
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
    at_once = ON_GPU if feed.device.type == "cuda" else 0
    batches = feed.batches(at_once) if most is None else feed.subset(most, seed=0, at_once=at_once)
    counters: dict[str, CountTracker] = {}
    slices = profile.slices["verification"].to(feed.device) if profile is not None else None
    homes: dict[str, Histogram] = {}
    if profile is not None and slices is not None:
        homes = {name: profile.taps[name].to(feed.device) for name in ("features", "logits")}
        homes["slices"] = slices.histogram
        counters = {name: CountTracker(home.low, home.high, home.bins, home.scale) for name, home in homes.items()}
    specs = {name: profile.specs[name] for name in ("features", "logits")} if profile is not None else {}
    axis = specs["logits"].channel_axis if specs else 1
    certainty: Tensor | None = None
    predictions = 0
    with together(), synchronised(model), modes(model), torch.no_grad(), tapped(model, specs) as recorder:
        model.eval()
        for batch in batches:
            logits = class_logits(model(batch), output, axis)
            values = recorder.read()
            if slices is not None:
                values["slices"] = slices.projector(values["features"])
            for name, counter in counters.items():
                counter.update(values[name])
            if logits is not None:
                sums = _certainty(logits)
                certainty = sums if certainty is None else certainty + sums
                predictions += logits.numel() // logits.shape[1]
        counters = {name: counter.joined() for name, counter in counters.items()}
        certainty = joined_mean(certainty / predictions, predictions) if certainty is not None else None
    entropy, confidence = certainty.tolist() if certainty is not None else (None, None)
    if profile is None or slices is None:
        return Signals(None, None, entropy, confidence)
    seen = counters["slices"]
    marginals = sum(
        (homes[name].mean_divergence((counters[name].counts / counters[name].samples).float()) for name in specs),
        torch.zeros((), device=feed.device),
    )
    return Signals(judge(slices, seen.counts, seen.samples, profile), float(marginals), entropy, confidence)


def class_logits(returned: Any, output: Entry, axis: int) -> Tensor | None:
    """What the model says about classes, brought to axis 1; None for a single number, or for what is no tensor.

    A model of tokens has them on its last axis, as its tap says; what it returns may have fewer axes than that.
    """
    try:
        result = pick(returned, output, "the model")
    except TapError:
        return None
    if result.ndim < 2 or not result.is_floating_point():
        return None
    logits = result.movedim(axis, 1) if -result.ndim <= axis < result.ndim else result
    return logits.float() if logits.shape[1] > 1 else None


def _certainty(logits: Tensor) -> Tensor:
    """Sums over all predictions of their entropy and of their confidence."""
    log_probabilities = logits.log_softmax(1)
    probabilities = log_probabilities.exp()
    # 0 ln 0 is 0, also where the logarithm has become minus infinity
    entropy = -(probabilities * log_probabilities.clamp_min(-100)).sum()
    return torch.stack([entropy, probabilities.amax(1).sum()])
