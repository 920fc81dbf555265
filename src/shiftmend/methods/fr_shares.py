"""FR-shares: Feature Restoration with free class shares at the target.

Aligning features with home assumes that classes are as frequent as at home. Otherwise, alignment moves samples into
wrong classes. Here the target is aligned with a mixture of the classes of home, whose shares are trained together with
the network. Only scale and offset of the normalisation layers are trained, so that the network cannot compensate for
wrong shares.

The result depends on the initial statistics. Those of the target's batches are biased if few classes are frequent, and
those of home are far off behind a new device. So training starts from each of them, and from inputs with matched
moments. The start whose slices end closest to home is kept, because no start is trained on the slices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from shiftmend.engine.method import Method, Network, Stage, check_epochs, check_positive
from shiftmend.errors import AdaptationError, ProfileError
from shiftmend.introspection.call import call_model
from shiftmend.introspection.input_map import SCALE, has_input_map
from shiftmend.introspection.model_state import restore, snapshot
from shiftmend.introspection.modes import find_batch_norms, preserve_modes
from shiftmend.introspection.taps import attach_taps
from shiftmend.methods.match import MatchMoments
from shiftmend.profiles.profile import Profile
from shiftmend.profiles.rehearsal import BY_CLASS
from shiftmend.profiles.shares import bin_weights, find_classes
from shiftmend.stats.divergences import divergence
from shiftmend.stats.histograms import Histogram
from shiftmend.utils.tensor_tree import Inputs, concatenate

NORMS = (_BatchNorm, _InstanceNorm, nn.LayerNorm, nn.GroupNorm)
"""Layers whose scale and offset are trained."""
ALIGNED = ("features", "logits")
Start = Literal["home", "batches", "inputs"]
SMALLEST_SHARE = 1e-6
BATCH = 256
MAX_KEPT_VALUES = 1 << 28
"""Largest number of input values kept in memory. With more, every second input is dropped, repeatedly."""


@dataclass(frozen=True, kw_only=True)
class FRShares(Method):
    """Alignment of features and logits with home under free class shares.

    Scale and offset of all normalisation layers and the class shares are trained together by Adam, for `steps` batches
    from each start: with statistics of home, with those of the target, and behind inputs whose moments are matched to
    home (`MatchMoments`). The start is kept whose slices end closest to home. The profile must hold histograms of its
    classes: rehearse it with labels. Networks without normalisation layers stay as they are.
    """

    name: ClassVar[str] = "fr-shares"
    needs_profile: ClassVar[bool] = True
    online: ClassVar[bool] = False
    reads_inputs: ClassVar[bool] = True
    layers: ClassVar[tuple[type[nn.Module], ...]] = NORMS
    frees_shares: ClassVar[bool] = True
    steps: int = 500
    learning_rate: float = 0.01
    share_rate: float = 0.05
    shares: tuple[float, ...] | None = None
    """Class shares at the target, where they are known. They are then not learnt."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_epochs(self.steps, "steps")
        check_positive(self.learning_rate, "the learning rate")
        check_positive(self.share_rate, "the rate of the shares")
        if self.shares is not None:
            object.__setattr__(self, "shares", tuple(float(share) for share in self.shares))
            if not self.shares or not all(0 <= share < math.inf for share in self.shares) or not any(self.shares):
                raise AdaptationError("Expected shares that are not negative, and one above 0. Try one for each class.")

    def stages(self, network: Network, profile: Profile | None) -> list[Stage]:
        return [Stage("normalisation", 1)] if _find_parameters(network.model) else []

    def smallest_batch(self, profile: Profile | None) -> int:
        return 2

    def begin(self, model: nn.Module, sample: Inputs, profile: Profile | None) -> None:
        """Check that the profile holds histograms of its classes, and attach an identity map where inputs have one."""
        assert profile is not None
        try:
            classes = len(find_classes(profile).label_shares)
        except ProfileError as error:
            raise AdaptationError(f"{self.name}: {error}") from error
        if self.shares is not None and len(self.shares) != classes:
            raise AdaptationError(f"Expected {classes} shares, got {len(self.shares)}. Try one for each class.")
        if not has_input_map(model):
            # Integers and several tensors cannot be matched, and start as they are.
            with suppress(AdaptationError):
                MatchMoments().begin(model, sample, profile)

    def adapt_to_inputs(self, model: nn.Module, batches: Iterable[Inputs], profile: Profile | None) -> None:
        """Train normalisation layers and class shares from several initial states; keep the result closest to home.

        Training starts from the statistics of home, from those of the target's batches, and behind inputs with matched
        moments. The kept result has the smallest divergence of slices from home, because no training minimises the
        divergence of slices. Class shares are not trained if `shares` is given. The model is changed in place.
        """
        assert profile is not None
        inputs = _collect(batches)
        before, found = snapshot(model), list[tuple[float, dict[str, Tensor]]]()
        for start in _list_starts(model):
            restore(model, before)
            if start == "inputs":
                MatchMoments().adapt_to_inputs(model, _split(inputs), profile)
            for layer in find_batch_norms(model):
                layer.train(start == "batches")
            apart = self._train(model, inputs, profile)
            found.append((apart if math.isfinite(apart) else math.inf, snapshot(model)))
        restore(model, min(found, key=lambda one: one[0])[1])

    def _train(self, model: nn.Module, inputs: Inputs, profile: Profile) -> float:
        """Train a model in place; return the divergence of its slices from home for the shares that were found."""
        taps = {name: profile.specs[name] for name in ALIGNED}
        mixture = _Mixture(profile, inputs.device, self.shares)
        with torch.enable_grad(), _trainable(_find_parameters(model)) as parameters, attach_taps(model, taps) as tapped:
            optimiser = torch.optim.Adam(parameters, lr=self.learning_rate)
            if self.shares is None:
                optimiser.add_param_group({"params": [mixture.scores], "lr": self.share_rate})
            rng = torch.Generator().manual_seed(0)
            for rows in _draw_batches(len(inputs), self.steps, rng):
                call_model(model, inputs[rows.to(inputs.device)])
                loss = mixture.divergence(tapped.read())
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            with torch.no_grad(), preserve_modes(model):
                model.eval()
                for batch in _split(inputs):
                    call_model(model, batch)
                    mixture.watch(tapped.read()["features"])
        return mixture.verify()


class _Mixture:
    """Histograms of home for class shares that are trained; `scores` are their logarithms, less those at home.

    The shares are trained on features and logits. Slices only verify.
    """

    def __init__(self, profile: Profile, device: torch.device, shares: Sequence[float] | None = None) -> None:
        record = find_classes(profile)
        self.home = record.label_shares.float().to(device)
        self.scores = torch.zeros_like(self.home)
        if shares is not None:
            wanted = torch.tensor(shares, device=device) / sum(shares)
            self.scores = wanted.clamp_min(SMALLEST_SHARE).log() - self.home.clamp_min(SMALLEST_SHARE).log()
        self.scores.requires_grad_(shares is None)
        self.slices = profile.slices["verification"].to(device)
        self.histograms: dict[str, Histogram] = {name: profile.taps[name].to(device) for name in ALIGNED}
        self.classes = {name: record.class_histograms(name).float().to(device) for name in BY_CLASS}
        self.watched = self.slices.histogram.new_tracker()

    @property
    def shares(self) -> Tensor:
        return (self.home.clamp_min(SMALLEST_SHARE).log() + self.scores).softmax(0)

    def divergence(self, activations: dict[str, Tensor]) -> Tensor:
        """Return the divergence of a batch from the mixture, unit by unit, of features and of logits."""
        shares = self.shares
        terms = [
            self._compare(name, histogram, histogram.count(activations[name]), shares)
            for name, histogram in self.histograms.items()
        ]
        return torch.stack(terms).sum()

    def watch(self, features: Tensor) -> None:
        """Count the slices of a batch."""
        self.watched.update(self.slices.projector(features))

    def verify(self) -> float:
        """Return the divergence of all watched slices from the mixture."""
        counts = self.watched.counts / self.watched.counts.sum(1, keepdim=True).clamp_min(1)
        return float(self._compare("slices", self.slices.histogram, counts, self.shares.detach()))

    def _compare(self, name: str, histogram: Histogram, counts: Tensor, shares: Tensor) -> Tensor:
        mixed = histogram.probabilities * bin_weights(self.classes[name], self.home, shares)
        mixed = mixed / mixed.sum(1, keepdim=True).clamp_min(1e-12)
        per_unit = divergence(mixed, counts.to(mixed.dtype))
        usable = torch.where(histogram.usable, per_unit, torch.zeros_like(per_unit))
        return usable.sum() / max(1, histogram.usable_count)


def _list_starts(model: nn.Module) -> list[Start]:
    """List where training may begin."""
    starts: list[Start] = ["home"]
    if any(layer.track_running_stats for layer in find_batch_norms(model)):
        starts.append("batches")
    if SCALE in model._buffers:
        starts.append("inputs")
    return starts


def _find_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return scale and offset of all normalisation layers."""
    return [one for module in model.modules() if isinstance(module, NORMS) for one in module.parameters(recurse=False)]


@contextmanager
def _trainable(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Enable gradients of the parameters inside the block."""
    before = [parameter.requires_grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.requires_grad_(True)
        yield parameters
    finally:
        for parameter, flag in zip(parameters, before, strict=True):
            parameter.requires_grad_(flag)
            parameter.grad = None


def _collect(batches: Iterable[Inputs]) -> Inputs:
    """Concatenate the inputs of all batches; thin them out evenly if there are too many to keep."""
    kept: list[Inputs] = []
    step, seen = 1, 0
    for batch in batches:
        kept.append(batch[-seen % step :: step])
        seen += len(batch)
        if sum(part.numel() for part in kept) > MAX_KEPT_VALUES:
            kept, step = [concatenate(kept)[::2]], 2 * step
    return concatenate(kept)


def _split(inputs: Inputs) -> Iterator[Inputs]:
    """Yield the inputs in batches, in order."""
    for first in range(0, len(inputs), BATCH):
        yield inputs[first : first + BATCH]


def _draw_batches(samples: int, number: int, rng: torch.Generator) -> Iterator[Tensor]:
    """Yield sample indices of batches; each sample is used once before any is used again."""
    size, rows = min(BATCH, samples), torch.empty(0, dtype=torch.long)
    for _ in range(number):
        if len(rows) < size:
            rows = torch.cat([rows, torch.randperm(samples, generator=rng)])
        yield rows[:size]
        rows = rows[size:]
