"""The label-free judge: is the target distributed like the source where no method had a hand in it?

The loss that was optimised never judges. Marginals can be matched by scrambling the features: FR can reach a lower
alignment loss at 4 % accuracy than BUFR at 80 %. The profile's verification slices are aligned by no method and
see the joint distribution. Slices in turn can come home while the marginals do not, as with a method that aligns
covariances: what is restored has both at home. The thresholds are empirical; docs/methods.md says what was measured
with them. A sample tells the divergence of what it was drawn from within bounds only, and a verdict is what holds for
all between them; if nothing does, it is undecided.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shiftmend.devices import placed, resolve_device
from shiftmend.dice import rolled
from shiftmend.distributed import active, all_sum, gathered, rank
from shiftmend.feeds import Feed, Preprocess
from shiftmend.fingerprints import InputSummary
from shiftmend.histograms import sampling_floor
from shiftmend.profiles import Profile, as_profile
from shiftmend.progress import Progress, progress_bar
from shiftmend.taps import modes, tapped, unwrap
from shiftmend.tracing import check_takes_each

RESTORED = 0.005
FAILED = 0.01
VERIFIED = ("features", "logits")
"""The taps whose marginals count."""

POSITIONS = 256
"""Counted of each input at most, where its features or logits are maps. All of them, of 96 x 96 pixels, take a CPU
several times as long as a small network, and tell little more: drawn anew for each input, so many add to chance about
a 256th of what the inputs themselves do."""

_WHOLE = 1 << 24
_STEPS = (12664746, 9560334)
"""The sequence R2 of Roberts, in parts of the whole: 1 / g and 1 / g^2 with g^3 = g + 1."""

_FEW = {1: (0.2, 2.25), 2: (0.3, 1.9)}


def chance_of(units: int | None) -> tuple[float, float]:
    """How many floors chance adds to the divergence of new samples, at least and at most, for so many features.

    A floor is a mean. The slices of one feature are all the same, and chance varies as in a single histogram, like a
    chi-square of few degrees of freedom; those of two are much the same. The mean over those of more varies less,
    unless they hang together so closely that they are as good as one, which a profile does not tell.
    """
    return _FEW.get(units or 0, (0.5, 1.5))


Verdict = Literal["restored", "partly restored", "not restored", "undecided"]


@dataclass(frozen=True)
class Verification:
    """Mean divergence of the verification slices, and what chance alone would give for so many samples."""

    divergence: float
    floor: float
    samples: int
    """Inputs that were looked at."""
    source_samples: int | None = None
    """Inputs that the profile was made from, where that is known."""
    adapted: bool = False
    """Whether the model was adapted to these very inputs."""
    marginals: float | None = None
    """Mean divergence of the features plus that of the logits, each unit by itself; None where it is not known."""
    units: int | None = None
    """Features that vary at the source, where that is known: of one or two, chance varies more."""

    @property
    def excess(self) -> float:
        """The divergence that sampling noise does not explain; infinite where features are NaN or infinite."""
        if not math.isfinite(self.divergence):
            return math.inf
        return max(0.0, self.divergence - self.floor)

    @property
    def bounds(self) -> tuple[float, float]:
        """Between which the divergence lies, about, that ever more samples would show.

        Chance adds half of the floor to one and a half, of one or two features less or more (`chance_of`): so much was
        seen as long as the divergence is small, and of features of many units less. A model fits what it is adapted to
        together with its chance, of which none or most may be left.
        """
        if not math.isfinite(self.divergence):
            return math.inf, math.inf
        least, most = self._chance
        return max(0.0, self.divergence - most), max(0.0, self.divergence - least)

    @property
    def limits(self) -> tuple[float, float]:
        """The divergence below which these samples count as restored, and from which on they count as not restored.

        So few that their floor alone would count as not restored never count as restored.
        """
        least, most = self._chance
        return RESTORED + least if self.floor <= FAILED else 0.0, FAILED + most

    @property
    def _chance(self) -> tuple[float, float]:
        """Of the divergence at least and at most."""
        least, most = chance_of(self.units)
        return (0.0, (most - least) * self.floor) if self.adapted else (least * self.floor, most * self.floor)

    @property
    def verdict(self) -> Verdict:
        low, high = self.bounds
        restored, failed = self.limits
        if not self.divergence < failed or self._no_numbers:
            return "not restored"
        if self.divergence < restored:
            return "partly restored" if self.strayed else "restored"
        return "partly restored" if low >= RESTORED or (low > 0 and high < FAILED) else "undecided"

    @property
    def _no_numbers(self) -> bool:
        """Whether the head makes NaN of features that may be at home: its weights are damaged, or too large."""
        return self.marginals is not None and math.isnan(self.marginals)

    @property
    def strayed(self) -> bool:
        """Whether the slices are at home and the marginals, of two taps, certainly not."""
        _, most = self._chance
        away = self.marginals is not None and not self.marginals < 2 * (RESTORED + most)
        return away and self.divergence < self.limits[0]

    def __str__(self) -> str:
        if not math.isfinite(self.divergence):
            return f"{self.verdict} (the features are NaN or infinite)"
        few = f", too few samples ({self._sizes}) to tell" if self.verdict == "undecided" else ""
        but = f", but marginals {self.marginals:.4f}" if self.strayed else ""
        but = ", but outputs are NaN" if self._no_numbers else but
        about = "at most" if self.adapted else "about"
        return f"{self.verdict} (slices {self.divergence:.4f}, by chance {about} {self.floor:.4f}{few}{but})"

    @property
    def _sizes(self) -> str:
        """Of both samples: chance comes from either."""
        own = f"{self.samples} {'adapted to' if self.adapted else 'of the target'}"
        return own if self.source_samples is None else f"{self.source_samples} in the profile, {own}"


class Tally:
    """What a verification rests on, gathered over batches: soft counts of features, logits and verification slices."""

    def __init__(self, profile: Profile, taps: Iterable[str] = VERIFIED) -> None:
        self.profile = profile
        self.slices = profile.slices["verification"].histogram.counter()
        self.taps = {name: profile.taps[name].counter() for name in taps}
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
        for part in self.profile.slices["verification"].projector.by_parts(counted["features"]):
            self.slices.update(part, times["features"])
        for name, counter in self.taps.items():
            counter.update(counted[name], times[name])

    def joined(self) -> tuple[Tensor, Tensor, int]:
        """Over all processes: divergence of the slices, that of the marginals, and how many inputs they are of."""
        slices = self.slices.joined()
        inputs = int(all_sum(torch.tensor(self.inputs, device=slices.counts.device))) if active() else self.inputs
        features, logits = (self.taps[name].joined().divergence(self.profile.taps[name]) for name in VERIFIED)
        return slices.divergence(self.profile.slices["verification"].histogram), features + logits, inputs

    def verification(self) -> Verification:
        *divergences, inputs = self.joined()
        slices, marginals = torch.stack(divergences).tolist()
        return judged(slices, marginals, inputs, self.profile)


def _place(inputs: int, device: torch.device) -> tuple[int | Tensor, int | Tensor]:
    """Of a batch that several processes share: how many inputs come before those of this one, and how many it has."""
    if not active():
        return 0, inputs
    every = gathered(torch.tensor(inputs, device=device))
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


def judged(slices: float, marginals: float | None, inputs: int, profile: Profile) -> Verification:
    """What divergences mean that were measured on so many inputs.

    Positions of one feature map are not independent: what counts against chance is the number of inputs.
    """
    floor = sampling_floor(profile.bins, profile.inputs_seen, inputs)
    units = profile.taps["features"].usable_count
    return Verification(slices, floor, inputs, profile.inputs_seen, marginals=marginals, units=units)


def verify(
    model: nn.Module,
    target: Any,
    profile: Profile | str | os.PathLike[str],
    *,
    batch_size: int | None = None,
    preprocess: Preprocess | None = None,
    device: str | torch.device = "auto",
    progress: Progress = None,
) -> Verification:
    """Ask of any model, adapted or not, whether its features on the target are distributed as at home.

    `profile` may be the name of its file. Inputs that seem to be preprocessed otherwise than at the source are warned
    of, as in `adapt`; other weights are not, because a mended model rightly has them. `progress` is that of `adapt`.
    """
    model = unwrap(model)
    profile = as_profile(profile)
    profile.check_architecture(model)
    place = resolve_device(device, model)
    feed = Feed(target, batch_size=batch_size, device=place, preprocess=preprocess, what="target data")
    with (
        placed(model, place),
        rolled(place, lambda: check_takes_each(model, feed.kinds(2))),
        progress_bar(progress, "verify", feed.known) as bar,
    ):
        profile.check_inputs(InputSummary.of(feed.batches()))
        feed.heard = bar.advance
        taps = {name: profile.specs[name] for name in VERIFIED}
        with modes(model), torch.no_grad(), tapped(model, taps) as recorder:
            model.eval()
            tally = Tally(profile.to(place))
            for batch in feed.batches():
                model(batch)
                tally.update(recorder.read(), len(batch))
            return tally.verification()
