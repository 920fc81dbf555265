"""`Profile`: what leaves the source site. How features and logits were distributed there, in a few kilobytes."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from shiftmend.__about__ import __version__
from shiftmend.errors import ProfileError
from shiftmend.introspection.taps import Tap
from shiftmend.introspection.validate import unwrap
from shiftmend.profiles import fingerprints
from shiftmend.profiles.fingerprints import InputSummary
from shiftmend.stats.gaussians import FullGaussian, MarginalGaussian
from shiftmend.stats.histograms import Bins
from shiftmend.stats.slices import Slices
from shiftmend.stats.statistics import Histogram
from shiftmend.utils.checks import brief, counted, kind
from shiftmend.utils.devices import resolve_device
from shiftmend.utils.files import as_path, write_atomically
from shiftmend.utils.processes import of_first_process

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
    shares: tuple[float, ...] = ()
    """Those of the parts of a mixture, in their order; none for a sample as it was."""
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
        return _mixed([self, as_profile(other, "what is to be merged")], [1.0, 1.0])

    @staticmethod
    def mixture(parts: Sequence[Profile | str | os.PathLike[str]], shares: Sequence[float]) -> Profile:
        """The profile of a source whose parts had other shares: for a site where some classes are known to be rarer.

        The parts, or files of them, are profiles of one class each, collected with `like=` the profile of all. Shares
        are relative: 9 and 1 are 90 and 10 %; a part with share 0 is left out. The mixture counts as a sample of the
        size that tells as much as these parts do, 1 / sum(share^2 / samples) (Kish's effective sample size).
        """
        given = _parts(parts)
        taken = _shares(len(given), shares)
        used = [(part, share) for part, share in zip(given, taken, strict=True) if share > 0]
        size = max(1, round(1 / sum(share**2 / part.inputs_seen for part, share in used)))
        times = [size * share / part.inputs_seen for part, share in used]
        return replace(_mixed([part for part, _ in used], times), shares=tuple(taken))

    @torch.inference_mode(False)
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
        from shiftmend.profiles import serialize as profile_files

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
        from shiftmend.profiles import serialize as profile_files

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
            f"Profile of {counted(self.samples, 'source sample')}, preset {self.preset!r}, shiftmend {self.library}",
            f"  bins        {self.bins.inner} inner + 2 outer, temperature {self.bins.temperature:g}",
            f"  inputs      [{', '.join(self.inputs.sizes)}] {self.inputs.dtype} in "
            f"[{self.inputs.low:.3g}, {self.inputs.high:.3g}]",
        ]
        if self.shares:
            lines.insert(1, f"  mixture     {', '.join(f'{100 * share:.3g} %' for share in self.shares)}")
        for name, tap in self.taps.items():
            dead = f", {self.unusable[name]} constant and left out" if self.unusable[name] else ""
            lines.append(f"  {name:<11} {counted(tap.units, 'unit')} at {str(self.specs[name])!r}{dead}")
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


def _parts(given: Sequence[Profile | str | os.PathLike[str]]) -> list[Profile]:
    if isinstance(given, str | os.PathLike | Profile) or not isinstance(given, Iterable):
        raise ProfileError(f"the parts of a mixture are given as {kind(given)}, expected a list of profiles or files")
    return [as_profile(part, f"part {number} of the mixture") for number, part in enumerate(given, 1)]


def _shares(parts: int, given: Sequence[float]) -> list[float]:
    """Shares that add up to 1."""
    expected = f"expected one number for each of the {parts} parts, none negative and one at least above 0"
    try:  # going through text or a dictionary would give digits or names, and a set has no order
        shares = [] if isinstance(given, str | Mapping | Set) else [float(share) for share in given]
    except (TypeError, ValueError):
        shares = []
    total = sum(shares)
    if len(shares) != parts or not all(0 <= share < math.inf for share in shares) or not 0 < total < math.inf:
        raise ProfileError(f"the shares of a mixture are {brief(shares or given)}, {expected}")
    return [share / total for share in shares]


@torch.inference_mode(False)
def _mixed(parts: Sequence[Profile], times: Sequence[float]) -> Profile:
    """The profile of all their samples, those of a part counted so many times; on the CPU."""
    parts = [part.to("cpu") for part in parts]
    first = parts[0]
    kinds = [
        (part.preset, part.specs, part.architecture, part.weights, sorted(part.slices), part.gaussian.kind)
        for part in parts
    ]
    if any(kind != kinds[0] for kind in kinds):
        raise ProfileError(
            "these profiles are of different models, taps, presets or kinds of Gaussian and cannot be put together"
        )
    sizes = [part.inputs_seen * number for part, number in zip(parts, times, strict=True)]
    return replace(
        first,
        inputs=InputSummary.mixed([part.inputs for part in parts], sizes),
        inputs_seen=round(sum(sizes)),
        shares=(),
        taps={name: Histogram.mixed([part.taps[name] for part in parts], times) for name in first.taps},
        gaussian=_mixed_gaussians([part.gaussian for part in parts], times),
        slices={name: Slices.mixed([part.slices[name] for part in parts], times) for name in first.slices},
    )


def _mixed_gaussians(
    parts: Sequence[MarginalGaussian | FullGaussian], times: Sequence[float]
) -> MarginalGaussian | FullGaussian:
    """They are of one kind."""
    full = [part for part in parts if isinstance(part, FullGaussian)]
    if full:
        return FullGaussian.mixed(full, times)
    return MarginalGaussian.mixed([part for part in parts if isinstance(part, MarginalGaussian)], times)
