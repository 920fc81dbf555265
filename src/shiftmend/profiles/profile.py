"""`Profile`: the distributions of features and logits at the source, in a few kilobytes. Nothing else leaves home."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from shiftmend.__about__ import __version__
from shiftmend.errors import ProfileError
from shiftmend.introspection.call import call_model
from shiftmend.introspection.modes import enter_eval, preserve_modes
from shiftmend.introspection.taps import Tap, attach_taps
from shiftmend.introspection.validate import unwrap
from shiftmend.profiles import fingerprints
from shiftmend.profiles.fingerprints import Summary, mix_summaries
from shiftmend.profiles.privacy import Guarantee, effective_samples, mix_guarantees
from shiftmend.profiles.rehearsal import Rehearsal
from shiftmend.stats.gaussians import FullGaussian, MarginalGaussian
from shiftmend.stats.histograms import Bins, Histogram
from shiftmend.stats.slices import Slices
from shiftmend.stats.statistics import S, Statistic
from shiftmend.utils import signing
from shiftmend.utils.checks import brief, counted, kind
from shiftmend.utils.devices import resolve_device
from shiftmend.utils.files import as_path, write_atomically
from shiftmend.utils.processes import of_first_process
from shiftmend.utils.tensor_tree import Inputs

logger = logging.getLogger(__name__)


logger.addFilter(of_first_process)


@dataclass(frozen=True, eq=False)
class Profile:
    """Statistics of a source by name, and fingerprints of its model and inputs. Create one with `shiftmend.profile`.

    The dictionary `statistics` contains `tap.NAME`, the histograms of each tap, `gaussian`, the Gaussian of the
    features, and `slices.NAME`, sets of slices of the features. For most models it also contains `inputs`, the mean and
    variance of the inputs, `inputs.quantiles`, and `answers`, the shares of the predicted classes and the mean
    confidence. The properties `taps`, `gaussian` and `slices` give typed access.

    Methods never align `slices["verification"]`, so verification can test with these slices whether features are
    restored. The slices `slices["alignment"]` exist only with the preset `sliced`, which aligns them.

    Example:
        >>> import shiftmend
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> profile = shiftmend.profile(model, torch.randn(100, 4))
        >>> sorted(profile.statistics)
        ['answers', 'gaussian', 'inputs', 'inputs.quantiles', 'slices.verification', 'tap.features', 'tap.logits']
        >>> profile.taps["features"].counts.shape
        torch.Size([8, 10])
    """

    statistics: Mapping[str, Statistic]
    mean: Tensor
    """Mean `[D]` that standardises the features before they are sliced. A merged profile keeps the mean of the first,
    and the mean of all samples is in `gaussian`."""
    deviation: Tensor
    """Standard deviation `[D]` that standardises the features, kept like `mean`."""
    specs: dict[str, Tap]
    """The module and side of each tap."""
    preset: str
    """Name of the preset of bins and loss: `"reference"`, `"paper"` or `"sliced"`."""
    architecture: str
    """Fingerprint of the model's layers."""
    weights: str
    """Fingerprint of the model's weights."""
    inputs: Summary
    """Shape, dtype, range and moments of the inputs, to notice other preprocessing."""
    inputs_seen: int
    """Number of source inputs."""
    shares: tuple[float, ...] = ()
    """Shares of the parts of a mixture, in their order; empty for other profiles."""
    library: str = __version__
    """Version of shiftmend that made the profile."""
    rehearsal: Rehearsal | None = None
    """The record of shifts simulated at home; None before `shiftmend.rehearse`."""
    privacy: Guarantee | None = None
    """The promise of a private profile; None for exact numbers."""

    @cached_property
    def taps(self) -> dict[str, Histogram]:
        """The histograms of the taps, by name."""
        return self._of_group("tap.", Histogram)

    @cached_property
    def slices(self) -> dict[str, Slices]:
        """The sets of slices of the features, by name."""
        return self._of_group("slices.", Slices)

    @cached_property
    def gaussian(self) -> MarginalGaussian | FullGaussian:
        """The Gaussian of the features."""
        found = self.statistics["gaussian"]
        assert isinstance(found, MarginalGaussian | FullGaussian)
        return found

    def _of_group(self, prefix: str, kind: type[S]) -> dict[str, S]:
        return {
            name.removeprefix(prefix): statistic
            for name, statistic in self.statistics.items()
            if name.startswith(prefix) and isinstance(statistic, kind)
        }

    @property
    def bins(self) -> Bins:
        """The bins of the taps' histograms."""
        return self.taps["features"].bins

    @property
    def samples(self) -> int:
        """Number of source inputs; at a tap on feature maps, each position counts as a sample."""
        return self.inputs_seen

    @property
    def effective_samples(self) -> float:
        """The number of source inputs whose chance is as large as that of these with the noise of a private profile."""
        if self.privacy is None:
            return self.inputs_seen
        return effective_samples(self.inputs_seen, self.privacy.noise, self.bins.total)

    @property
    def unusable(self) -> dict[str, int]:
        """Number of units of each tap that were constant on the source and are therefore ignored."""
        return {name: tap.units - tap.usable_count for name, tap in self.taps.items()}

    def merge(self, other: Profile | str | os.PathLike[str]) -> Profile:
        """Merge with another profile, into the profile of both samples together.

        Args:
            other: A profile that was collected with `like=` this one, or the path of its file.

        Returns:
            A new profile.

        Raises:
            ProfileError: If the two are of different models, or were collected over different ranges.

        Example:
            >>> import shiftmend
            >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
            >>> first = shiftmend.profile(model, torch.randn(100, 4))
            >>> second = shiftmend.profile(model, torch.randn(50, 4), like=first)
            >>> first.merge(second).samples
            150
        """
        return _mix([self, as_profile(other, "what is to be merged")], [1.0, 1.0])

    @staticmethod
    def mixture(parts: Sequence[Profile | str | os.PathLike[str]], shares: Sequence[float]) -> Profile:
        """Combine profiles of single classes, for a site where the classes have other shares than at the source.

        The mixture counts as a sample of Kish's effective size, 1 / sum(share^2 / samples).

        Args:
            parts: Profiles of one class each, or paths of their files, collected with `like=` the profile of all
                classes.
            shares: One number for each part. Shares are relative: 9 and 1 mean 90 and 10 %. A share of 0 leaves a part
                out.

        Returns:
            A new profile.

        Raises:
            ProfileError: If the parts do not fit together, or a share is negative or not a number.

        Example:
            >>> import shiftmend
            >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
            >>> whole = shiftmend.profile(model, torch.randn(200, 4))
            >>> parts = [shiftmend.profile(model, torch.randn(100, 4), like=whole) for _ in range(2)]
            >>> shiftmend.Profile.mixture(parts, [9, 1]).shares
            (0.9, 0.1)
        """
        given = _check_parts(parts)
        taken = _check_shares(len(given), shares)
        used = [(part, share) for part, share in zip(given, taken, strict=True) if share > 0]
        size = max(1, round(1 / sum(share**2 / part.inputs_seen for part, share in used)))
        times = [size * share / part.inputs_seen for part, share in used]
        return replace(_mix([part for part, _ in used], times), shares=tuple(taken))

    @torch.inference_mode(False)
    def to(self, device: str | torch.device) -> Profile:
        """Return the profile with its statistics on a device.

        Args:
            device: A device, or its name.

        Returns:
            A new profile.

        Raises:
            ShiftmendError: If the device is not available.

        Example:
            >>> import shiftmend
            >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
            >>> shiftmend.profile(model, torch.randn(100, 4)).to("cpu").taps["logits"].counts.device
            device(type='cpu')
        """
        device = resolve_device(device)
        return replace(self, statistics={name: one.to(device) for name, one in self.statistics.items()})

    def to_bytes(self) -> bytes:
        """Return the content of the profile's file: safetensors with a SHA-256 of the whole content.

        Returns:
            The bytes; equal profiles give equal bytes.

        Raises:
            ProfileError: If the file could not be loaded again, for instance because it would be too large.

        Example:
            >>> import shiftmend
            >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
            >>> profile = shiftmend.profile(model, torch.randn(100, 4))
            >>> len(profile.to_bytes()) < 11_000
            True
        """
        from shiftmend.profiles import serialize

        return serialize.encode(self)

    def save(self, path: str | os.PathLike[str], *, sign: str | os.PathLike[str] | None = None) -> None:
        """Write the profile to one small safetensors file, atomically.

        Args:
            path: The file to write; an existing one is replaced.
            sign: File of a private key to sign the profile with; see `shiftmend key new`.

        Raises:
            ProfileError: If the file cannot be written, or could not be loaded again.

        Example:
            >>> import shiftmend, tempfile
            >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
            >>> profile = shiftmend.profile(model, torch.randn(100, 4))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     profile.save(f"{folder}/home.profile")
            ...     Profile.load(f"{folder}/home.profile").samples
            100
        """
        from shiftmend.profiles import serialize

        target = as_path(path, "the file to write", ProfileError)
        content = serialize.encode(self, None if sign is None else signing.load_key(sign))
        try:
            write_atomically(target, content)
        except OSError as error:
            # The error of the operating system may name a temporary file.
            raise ProfileError(
                f"File {target} cannot be written ({error.strerror or error}). Name another file."
            ) from error

    @staticmethod
    @torch.inference_mode(False)
    def load(path: str | os.PathLike[str], *, trust: str | os.PathLike[str] | None = None) -> Profile:
        """Read and validate the file of a profile; see `save` for an example.

        Args:
            path: The file to read.
            trust: Public key, or its file, that the profile must be signed with. By default any profile is read.

        Returns:
            The profile, on the CPU.

        Raises:
            ProfileError: If anything is wrong with the file, in one sentence.
        """
        from shiftmend.profiles import serialize

        key = None if trust is None else signing.read_public(trust)
        return serialize.read(as_path(path, "the profile", ProfileError), key)

    def check_architecture(self, model: nn.Module) -> None:
        """Refuse a model whose layers differ from those of the profiled model.

        Args:
            model: The model, which may be wrapped, e.g. in `DataParallel`.

        Raises:
            ProfileError: If names or shapes of parameters differ.

        Example:
            >>> import shiftmend
            >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
            >>> profile = shiftmend.profile(model, torch.randn(100, 4))
            >>> profile.check_architecture(nn.DataParallel(model))
        """
        if fingerprints.architecture(unwrap(model)) != self.architecture:
            raise ProfileError(
                "Expected the model that was profiled, got one with other layers. Profile this model, or load the one "
                "that was profiled."
            )

    @torch.no_grad()
    def check_taps(self, model: nn.Module, sample: Inputs) -> None:
        """Refuse a model whose taps have other numbers of units than the profile.

        Args:
            model: The model, which has passed `check_architecture`.
            sample: A small batch of inputs `[N, ...]`, on the device of the model.

        Raises:
            ProfileError: If the number of units at a tap differs.
            TapError: If a tap is not in the model, or does not run once in a forward pass.

        Example:
            >>> import shiftmend
            >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
            >>> profile = shiftmend.profile(model, torch.randn(100, 4))
            >>> profile.check_taps(model, torch.randn(2, 4))
        """
        with preserve_modes(model), attach_taps(model, self.specs) as recorder:
            enter_eval(model)
            call_model(model, sample)
            found = recorder.read()
        self.check_units({name: values.shape[1] for name, values in found.items()})

    def check_units(self, found: Mapping[str, int]) -> None:
        """Refuse numbers of units at taps that differ from the profile's, as `check_taps` does."""
        for name, tap in self.taps.items():
            if name in found and found[name] != tap.units:
                raise ProfileError(
                    f"Expected {tap.units} units at tap {name!r} ({str(self.specs[name])!r}), as in the profile, got "
                    f"{found[name]}. Profile this model at its source."
                )

    def check_weights(self, model: nn.Module) -> None:
        """Log a warning if the weights of a model differ from those of the profiled model."""
        if fingerprints.weights(unwrap(model)) != self.weights:
            logger.warning(
                "The weights of the model are not those that the profile was made with; results may mislead."
            )

    def check_inputs(self, target: Summary) -> None:
        """Log a warning if the target seems to be preprocessed differently from the source."""
        for difference in self.inputs.differences(target):
            logger.warning("look at the preprocessing of the target inputs: %s", difference)

    def __repr__(self) -> str:
        lines = [
            f"Profile of {counted(self.samples, 'source sample')}, preset {self.preset!r}, shiftmend {self.library}",
            f"  bins        {self.bins.inner} inner + 2 outer, temperature {self.bins.temperature:g}",
            f"  inputs      {self.inputs.describe()}",
        ]
        if columns := self.inputs.columns:
            lines.append(f"  columns     {len(columns)}, from {columns[0]!r} to {columns[-1]!r}")
        if self.shares:
            lines.insert(1, f"  mixture     {', '.join(f'{100 * share:.3g} %' for share in self.shares)}")
        for name, tap in self.taps.items():
            dead = f", {self.unusable[name]} constant and left out" if self.unusable[name] else ""
            lines.append(f"  {name:<11} {counted(tap.units, 'unit')} at {str(self.specs[name])!r}{dead}")
        lines.append(f"  moments     {self.gaussian.kind} of the features")
        lines += [f"  slices      {s.histogram.units} for {name}" for name, s in self.slices.items()]
        lines.append(f"  model       architecture {self.architecture[:12]}, weights {self.weights[:12]}")
        rehearsed = "none; try shiftmend.rehearse(model, held_out, profile)"
        if self.rehearsal is not None:
            record = self.rehearsal
            rehearsed = f"{counted(len(record.shifts), 'simulated shift')}, candidates {', '.join(record.candidates)}"
        if self.privacy is not None:
            lines.append(f"  privacy     {self.privacy}")
            rehearsed = "none: a rehearsal is not private"
        lines.append(f"  rehearsal   {rehearsed}")
        return "\n".join(lines)


def as_profile(given: Profile | str | os.PathLike[str], what: str = "the profile", trust: str | None = None) -> Profile:
    """Return a given profile, or load the profile of a given path.

    Args:
        given: A profile, which is returned as it is, or the path of its file.
        what: Name of the argument in the error message.
        trust: Public key that a file must be signed with. By default any file is read.

    Returns:
        The profile.

    Raises:
        ProfileError: If `given` is neither a profile nor a path, or the file cannot be used.
    """
    if isinstance(given, str | os.PathLike):
        return Profile.load(given, trust=trust)
    if not isinstance(given, Profile):
        raise ProfileError(f"Expected {what} to be a Profile or the path of its file, got {kind(given)}.")
    return given


def _check_parts(given: Sequence[Profile | str | os.PathLike[str]]) -> list[Profile]:
    if isinstance(given, str | os.PathLike | Profile) or not isinstance(given, Iterable):
        raise ProfileError(f"Expected the parts of a mixture to be a list of profiles or files, got {kind(given)}.")
    return [as_profile(part, f"part {number} of the mixture") for number, part in enumerate(given, 1)]


def _check_shares(parts: int, given: Sequence[float]) -> list[float]:
    """Normalise the shares, so that they add up to 1."""
    try:
        # Strings and dicts would give digits and names, and a set has no order.
        shares = [] if isinstance(given, str | Mapping | Set) else [float(share) for share in given]
    except (TypeError, ValueError):
        shares = []
    total = sum(shares)
    if len(shares) != parts or not all(0 <= share < math.inf for share in shares) or not 0 < total < math.inf:
        raise ProfileError(
            f"Expected shares of a mixture as {parts} numbers, one for each part, none negative and one above 0, got "
            f"{brief(shares or given)}."
        )
    return [share / total for share in shares]


@torch.inference_mode(False)
def _mix(parts: Sequence[Profile], times: Sequence[float]) -> Profile:
    """Combine profiles into one on the CPU, weighting each sample of `parts[i]` by `times[i]`."""
    parts = [part.to("cpu") for part in parts]
    first = parts[0]
    for part in parts[1:]:
        if _identity(part) != _identity(first):
            raise ProfileError(
                "Expected profiles of one model, with the same taps, preset and statistics, got different ones. "
                "Collect the others with like= the first."
            )
    sizes = [part.inputs_seen * number for part, number in zip(parts, times, strict=True)]
    return replace(
        first,
        inputs=mix_summaries([part.inputs for part in parts], sizes),
        inputs_seen=round(sum(sizes)),
        shares=(),
        rehearsal=None,  # It belongs to the profile that was rehearsed with.
        privacy=mix_guarantees([part.privacy for part in parts], times),
        statistics={
            name: type(statistic).mix([part.statistics[name] for part in parts], times)
            for name, statistic in first.statistics.items()
            if all(name in part.statistics for part in parts)
        },
    )


def _identity(profile: Profile) -> tuple[object, ...]:
    """Collect the settings that profiles must share to be mixed; older files lack some of the statistics."""
    every = profile.statistics.items()
    kinds = {name: statistic.kind for name, statistic in every if name.partition(".")[0] not in ("inputs", "answers")}
    return profile.preset, profile.specs, profile.architecture, profile.weights, kinds
