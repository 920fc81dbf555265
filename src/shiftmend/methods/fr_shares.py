"""FR-shares: Feature Restoration with free class shares at the target.

Aligning features with home assumes that classes are as frequent as at home. Otherwise, alignment moves samples into
wrong classes. Here the target is aligned with a mixture of the classes of home, whose shares are trained together with
the network. Only scale and offset of the normalisation layers are trained, so that the network cannot compensate for
wrong shares.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from shiftmend.engine.method import Method, Network, Stage, check_epochs, check_positive
from shiftmend.errors import AdaptationError, ProfileError
from shiftmend.introspection.call import call_model
from shiftmend.introspection.taps import attach_taps
from shiftmend.profiles.profile import Profile
from shiftmend.profiles.shares import bin_weights, find_classes
from shiftmend.stats.divergences import divergence
from shiftmend.stats.histograms import Histogram
from shiftmend.utils.tensor_tree import Inputs, concatenate

NORMS = (_BatchNorm, _InstanceNorm, nn.LayerNorm, nn.GroupNorm)
"""Layers whose scale and offset are trained."""
ALIGNED = ("features", "logits")
BATCH = 256
MAX_KEPT_VALUES = 1 << 28
"""Largest number of input values kept in memory. With more, every second input is dropped, repeatedly."""


@dataclass(frozen=True, kw_only=True)
class FRShares(Method):
    """Alignment of features and logits with home under free class shares.

    Scale and offset of all normalisation layers and the class shares are trained together by Adam, for `steps` batches.
    The profile must hold histograms of its classes: rehearse it with labels. Networks without normalisation layers are
    not changed.
    """

    name: ClassVar[str] = "fr-shares"
    needs_profile: ClassVar[bool] = True
    online: ClassVar[bool] = False
    reads_inputs: ClassVar[bool] = True
    frees_shares: ClassVar[bool] = True
    steps: int = 500
    learning_rate: float = 0.01
    share_rate: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        check_epochs(self.steps, "steps")
        check_positive(self.learning_rate, "the learning rate")
        check_positive(self.share_rate, "the rate of the shares")

    def stages(self, network: Network, profile: Profile | None) -> list[Stage]:
        return [Stage("normalisation", 1)] if _find_parameters(network.model) else []

    def smallest_batch(self, profile: Profile | None) -> int:
        return 2

    def begin(self, model: nn.Module, sample: Inputs, profile: Profile | None) -> None:
        """Check that the profile holds histograms of its classes."""
        assert profile is not None
        try:
            find_classes(profile)
        except ProfileError as error:
            raise AdaptationError(f"{self.name}: {error}") from error

    def adapt_to_inputs(self, model: nn.Module, batches: Iterable[Inputs], profile: Profile | None) -> None:
        """Train the normalisation layers and the class shares together."""
        assert profile is not None
        inputs = _collect(batches)
        taps = {name: profile.specs[name] for name in ALIGNED}
        mixture = _Mixture(profile, inputs.device)
        with torch.enable_grad(), _trainable(_find_parameters(model)) as parameters, attach_taps(model, taps) as tapped:
            optimiser = torch.optim.Adam(parameters, lr=self.learning_rate)
            optimiser.add_param_group({"params": [mixture.scores], "lr": self.share_rate})
            rng = torch.Generator().manual_seed(0)
            for rows in _draw_batches(len(inputs), self.steps, rng):
                call_model(model, inputs[rows.to(inputs.device)])
                loss = mixture.divergence(tapped.read())
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()


class _Mixture:
    """Histograms of home under trainable class shares; `scores` are log-shares relative to home."""

    def __init__(self, profile: Profile, device: torch.device) -> None:
        record = find_classes(profile)
        self.home = record.label_shares.float().to(device)
        self.scores = torch.zeros_like(self.home, requires_grad=True)
        self.histograms: dict[str, Histogram] = {name: profile.taps[name].to(device) for name in ALIGNED}
        self.classes = {name: record.class_histograms(name).float().to(device) for name in ALIGNED}

    def divergence(self, activations: dict[str, Tensor]) -> Tensor:
        """Return the mean divergence of a batch from the mixture over units, summed over features and logits."""
        shares = (self.home.clamp_min(1e-6).log() + self.scores).softmax(0)
        terms = []
        for name, histogram in self.histograms.items():
            mixed = histogram.probabilities * bin_weights(self.classes[name], self.home, shares)
            mixed = mixed / mixed.sum(1, keepdim=True).clamp_min(1e-12)
            per_unit = divergence(mixed, histogram.count(activations[name]).to(mixed.dtype))
            usable = torch.where(histogram.usable, per_unit, torch.zeros_like(per_unit))
            terms.append(usable.sum() / max(1, histogram.usable_count))
        return torch.stack(terms).sum()


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


def _draw_batches(samples: int, number: int, rng: torch.Generator) -> Iterator[Tensor]:
    """Yield sample indices of batches; each sample is used once before any is used again."""
    size, rows = min(BATCH, samples), torch.empty(0, dtype=torch.long)
    for _ in range(number):
        if len(rows) < size:
            rows = torch.cat([rows, torch.randperm(samples, generator=rng)])
        yield rows[:size]
        rows = rows[size:]
