"""FR, Feature Restoration: align features and logits with the profile, all layers at once (paper, section 3.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shiftmend.distributed.collectives import is_distributed, reduce_mean
from shiftmend.engine.method import (
    AUTO,
    Activations,
    Epochs,
    Method,
    Network,
    Objective,
    Stage,
    check_epochs,
    check_positive,
    has_one_sample_per_input,
)
from shiftmend.errors import AdaptationError
from shiftmend.profiles.presets import Preset
from shiftmend.profiles.presets import preset as find_preset
from shiftmend.profiles.profile import Profile
from shiftmend.stats.divergences import DIVERGENCES
from shiftmend.stats.histograms import Histogram
from shiftmend.utils.checks import brief, check_known


@dataclass(frozen=True, kw_only=True)
class Alignment(Method):
    """Base class of FR and BUFR with the alignment loss of equation (2).

    `align` names the taps to align. The paper's ablation leaves out the logits; further taps of the profile may be
    added. `divergence` replaces the preset's, e.g. by `"kl-target-source"`, the paper's other ablation. The preset is
    that of the profile. A learning rate of None takes a default that fits the network, see `rate`.
    """

    needs_profile: ClassVar[bool] = True
    several_processes: ClassVar[bool] = True
    staged_rate: ClassVar[float]
    unnormalised_rate: ClassVar[float]
    layerwise_rate: ClassVar[float]
    published_epochs: ClassVar[int]
    """Epochs of a stage in the paper; with `"auto"`, the largest number of epochs."""
    learning_rate: float | None = None
    align: tuple[str, ...] | str = ("features", "logits")
    divergence: str | None = None
    slice_weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self.learning_rate, "the learning rate", optional=True)
        check_positive(self.slice_weight, "the weight of the slices")
        if isinstance(self.align, str):
            object.__setattr__(self, "align", (self.align,))
        named = isinstance(self.align, tuple | list) and all(isinstance(name, str) for name in self.align)
        if not named or not self.align:
            raise AdaptationError(f"Expected align to name taps, e.g. ('features', 'logits'), got {brief(self.align)}.")
        if self.divergence is not None:
            check_known(self.divergence, DIVERGENCES, "divergence", AdaptationError)

    def taps(self, profile: Profile | None) -> tuple[str, ...]:
        needs_features = profile is not None and find_preset(profile.preset).aligned_slices
        return tuple(dict.fromkeys((*self.align, *(("features",) if needs_features else ()))))

    def make_stage(
        self, network: Network, name: str, epochs: Epochs, rate: float, parameters: tuple[str, ...]
    ) -> Stage:
        """Make a stage with a fixed number of epochs, or with `"auto"`, which decides when to stop.

        With `"auto"`, the stage also searches for its learning rate, unless a rate is given, or published for this
        network or for ResNets.
        """
        if epochs != AUTO:
            return Stage(name, epochs, rate, parameters)
        known = network.published(self.name) is not None or (network.batch_normalised and not network.layerwise)
        searches = self.learning_rate is None and not known
        return Stage(name, self.published_epochs, rate, parameters, settles=True, searches=searches)

    def smallest_batch(self, profile: Profile | None) -> int:
        return 2 if has_one_sample_per_input(self.taps(profile), profile) else 1

    def objective(self, profile: Profile | None, device: torch.device) -> Objective:
        assert profile is not None
        chosen = find_preset(profile.preset)
        kind = self.divergence or chosen.divergence
        homes = {name: profile.taps[name].to(device) for name in self.align}
        slices = profile.slices["alignment"].to(device) if chosen.aligned_slices else None

        def losses(activations: Activations) -> dict[str, Tensor]:
            terms = {}
            for name, home in homes.items():
                mean = _divergence(home, activations[name], kind)
                terms[name] = mean if chosen.reduction == "mean" else mean * home.usable_count
            if slices is not None:
                projected = slices.projector(activations["features"])
                terms["slices"] = self.slice_weight * _divergence(slices.histogram, projected, kind)
            return terms

        return losses

    def rate(self, network: Network, profile: Profile | None) -> float:
        """Return the given learning rate, or the default for the network, scaled to the profile's preset.

        The default is the rate published for this network. Other staged networks with BatchNorm get the rate published
        for ResNets. The two remaining defaults were measured on small networks (`benchmarks/default_rates.py`). If a
        block is one layer, the default is the largest rate that restored nearly all networks, because small rates need
        many steps. For stages without BatchNorm, where large steps do lasting harm, it is a rate that harmed no
        network.
        """
        if self.learning_rate is not None:
            return self.learning_rate
        assert profile is not None
        default = network.published(self.name)
        if default is None:
            staged = self.staged_rate if network.batch_normalised else self.unnormalised_rate
            default = self.layerwise_rate if network.layerwise else staged
        return default * _loss_scale(find_preset(profile.preset), profile)


def _divergence(home: Histogram, values: Tensor, kind: str) -> Tensor:
    """Return the mean divergence over units of a batch from the source; processes may share the batch."""
    if not is_distributed():
        return home.divergence(values, kind)
    return home.mean_divergence(reduce_mean(home.count(values), len(values)), kind)


def _loss_scale(chosen: Preset, profile: Profile) -> float:
    """Return the ratio of the preset's loss to the mean PSI, for which the learning rates were published.

    The paper's sum of half-KLs is D ln(10) / 2 times as large.
    """
    if chosen.reduction == "mean":
        return 1.0
    units = max(1, profile.taps["features"].usable_count)
    return 2 / (math.log(10) * units)


@dataclass(frozen=True, kw_only=True)
class FR(Alignment):
    """Feature restoration: training of all blocks at once.

    By default (`epochs="auto"`), the run ends when the loss stops falling or the verification slices get worse, but
    after at most the published 150 epochs. Published rates are 1.0 for the CNN and 0.001 for ResNets.
    """

    name: ClassVar[str] = "fr"
    slow: ClassVar[bool] = True
    staged_rate: ClassVar[float] = 1e-3
    unnormalised_rate: ClassVar[float] = 1e-3
    layerwise_rate: ClassVar[float] = 3e-3
    published_epochs: ClassVar[int] = 150
    epochs: Epochs = AUTO

    def __post_init__(self) -> None:
        super().__post_init__()
        check_epochs(self.epochs, "epochs", may_settle=True)

    def stages(self, network: Network, profile: Profile | None) -> list[Stage]:
        rate = self.rate(network, profile)
        return [self.make_stage(network, "all blocks", self.epochs, rate, network.below_features)]
