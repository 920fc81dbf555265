"""`Profile`: what leaves the source site. How features and logits were distributed there, in a few kilobytes."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from shiftmend import fingerprints
from shiftmend.__about__ import __version__
from shiftmend.checks import kind
from shiftmend.devices import resolve_device
from shiftmend.distributed import of_first_process
from shiftmend.errors import ProfileError
from shiftmend.files import as_path, write_atomically
from shiftmend.fingerprints import InputSummary
from shiftmend.gaussians import FullGaussian, MarginalGaussian
from shiftmend.histograms import Bins
from shiftmend.statistics import Histogram, Slices
from shiftmend.taps import Tap, unwrap

logger = logging.getLogger(__name__)
logger.addFilter(of_first_process)


@dataclass(frozen=True, eq=False)
class Profile:
    """Soft histograms of every tap, a Gaussian and slices of the features, and what they belong to.

    `slices["verification"]` is for judging and is never aligned; `slices["alignment"]` is there for the preset
    `sliced` alone. `mean` and `deviation` standardise the features before they are sliced, and stay what they were when
    profiles are merged; the moments of all samples are those of `gaussian`.
    """

    taps: dict[str, Histogram]
    gaussian: MarginalGaussian | FullGaussian
    mean: Tensor
    deviation: Tensor
    slices: dict[str, Slices]
    specs: dict[str, Tap]
    preset: str
    architecture: str
    weights: str
    inputs: InputSummary
    inputs_seen: int
    library: str = __version__

    @property
    def bins(self) -> Bins:
        return self.taps["features"].bins

    @property
    def samples(self) -> int:
        """Source inputs; a tap on feature maps counts each of their positions as a sample of its own."""
        return self.inputs_seen

    @property
    def unusable(self) -> dict[str, int]:
        """Units per tap that were constant on the source and take no part in anything."""
        return {name: tap.units - tap.usable_count for name, tap in self.taps.items()}

    def merge(self, other: Profile | str | os.PathLike[str]) -> Profile:
        """The profile of both samples, if the second, or the one in that file, was collected with `like=` the first."""
        other = as_profile(other, "what is to be merged")
        mine, theirs = (
            (one.preset, one.specs, one.architecture, one.weights, sorted(one.slices), one.gaussian.kind)
            for one in (self, other)
        )
        if mine != theirs:
            raise ProfileError(
                "these profiles are of different models, taps, presets or kinds of Gaussian and cannot be merged"
            )
        return replace(
            self,
            inputs_seen=self.inputs_seen + other.inputs_seen,
            taps={name: tap.merge(other.taps[name]) for name, tap in self.taps.items()},
            gaussian=_merged(self.gaussian, other.gaussian),
            slices={name: own.merge(other.slices[name]) for name, own in self.slices.items()},
        )

    def to(self, device: str | torch.device) -> Profile:
        """The same with everything it stores on a device."""
        device = resolve_device(device)
        return replace(
            self,
            taps={name: tap.to(device) for name, tap in self.taps.items()},
            gaussian=self.gaussian.to(device),
            slices={name: part.to(device) for name, part in self.slices.items()},
        )

    def to_bytes(self) -> bytes:
        """The file's content: safetensors with a SHA-256 over all of it."""
        from shiftmend import profile_files

        return profile_files.encode(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one small safetensors file, atomically."""
        target = as_path(path, "the file to write", ProfileError)
        content = self.to_bytes()
        try:
            write_atomically(target, content)
        except OSError as error:  # the system names a temporary file at best
            raise ProfileError(f"{target} cannot be written ({error.strerror or error}); name another file") from error

    @staticmethod
    @torch.inference_mode(False)
    def load(path: str | os.PathLike[str]) -> Profile:
        """Read and validate a file; anything wrong with it is one `ProfileError`."""
        from shiftmend import profile_files

        return profile_files.read(as_path(path, "the profile", ProfileError))

    def check_architecture(self, model: nn.Module) -> None:
        """Refuse a model of another architecture."""
        if fingerprints.architecture(unwrap(model)) != self.architecture:
            raise ProfileError(
                "the profile was made for a model with other layers (names or shapes of parameters differ); profile "
                "this model at its source, or load the model that the profile belongs to"
            )

    def check_weights(self, model: nn.Module) -> None:
        """Say so if the weights are others than those profiled."""
        if fingerprints.weights(unwrap(model)) != self.weights:
            logger.warning("the model's weights are not those the profile was made with; alignment may mislead")

    def check_inputs(self, target: InputSummary) -> None:
        """Warn if the target seems to be preprocessed otherwise than the source was."""
        for difference in self.inputs.differences(target):
            logger.warning("look at the preprocessing of the target inputs: %s", difference)

    def __repr__(self) -> str:
        lines = [
            f"Profile of {self.samples:,} source samples, preset {self.preset!r}, shiftmend {self.library}",
            f"  bins        {self.bins.inner} inner + 2 outer, temperature {self.bins.temperature:g}",
            f"  inputs      {list(self.inputs.shape)} {self.inputs.dtype} in "
            f"[{self.inputs.low:.3g}, {self.inputs.high:.3g}]",
        ]
        for name, tap in self.taps.items():
            dead = f", {self.unusable[name]} constant and left out" if self.unusable[name] else ""
            lines.append(f"  {name:<11} {tap.units} units at {str(self.specs[name])!r}{dead}")
        lines.append(f"  moments     {self.gaussian.kind} of the features")
        lines += [f"  slices      {s.histogram.units} for {name}" for name, s in self.slices.items()]
        lines.append(f"  model       architecture {self.architecture[:12]}, weights {self.weights[:12]}")
        return "\n".join(lines)


def as_profile(given: Profile | str | os.PathLike[str], what: str = "the profile") -> Profile:
    """The profile itself, or the one in the file that is named; anything else is refused."""
    if isinstance(given, str | os.PathLike):
        return Profile.load(given)
    if not isinstance(given, Profile):
        raise ProfileError(f"{what} is {kind(given)}, expected a Profile or the name of its file")
    return given


def _merged(
    one: MarginalGaussian | FullGaussian, other: MarginalGaussian | FullGaussian
) -> MarginalGaussian | FullGaussian:
    if isinstance(one, FullGaussian) and isinstance(other, FullGaussian):
        return one.merge(other)
    assert isinstance(one, MarginalGaussian) and isinstance(other, MarginalGaussian)  # noqa: PT018
    return one.merge(other)
