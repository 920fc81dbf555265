"""What can be wrong with the numbers of a profile, wherever it comes from."""

from __future__ import annotations

import io
import json
import re
import reprlib
import struct
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from shiftmend.errors import ProfileError, ShiftmendError
from shiftmend.introspection.taps import Tap
from shiftmend.profiles.fingerprints import InputSummary
from shiftmend.profiles.presets import PRESETS
from shiftmend.profiles.profile import Profile
from shiftmend.stats.gaussians import FullGaussian, MarginalGaussian
from shiftmend.stats.histograms import Bins
from shiftmend.stats.slices import MOST_WEIGHTS, Projector, Slices, bins_of_slices
from shiftmend.stats.statistics import Histogram
from shiftmend.utils.sealing import UNSEALED, is_whole, seal

SCHEMA = 3


MOST_BYTES = 64 << 20


_MOST_HEADER = 4 << 20


_MOST = (1 << 53) - 1
"""Samples: JSON has no larger whole numbers that every reader takes for the same."""


_SUM = "[0-9a-f]{64}"


_SPREADS = {MarginalGaussian.kind: "variance", FullGaussian.kind: "covariance"}


def encode(profile: Profile) -> bytes:
    """The content of the file."""
    profile = profile.to("cpu")
    tensors: dict[str, Tensor] = {"features.mean": profile.mean, "features.deviation": profile.deviation}
    tensors |= _gaussian_tensors(profile.gaussian)
    for group, histograms in (
        ("tap", profile.taps),
        ("slices", {name: part.histogram for name, part in profile.slices.items()}),
    ):
        for name, histogram in histograms.items():
            for part in ("counts", "low", "high"):
                tensors[f"{group}.{name}.{part}"] = getattr(histogram, part).contiguous()
    bins = profile.bins
    facts = {
        "library": profile.library,
        "preset": profile.preset,
        "bins": {"count": bins.count, "layout": bins.layout, "temperature": bins.temperature},
        "taps": {
            name: {
                "kind": profile.taps[name].kind,
                "spec": str(tap),
                "entry": tap.entry,
                "samples": profile.taps[name].samples,
            }
            for name, tap in profile.specs.items()
        },
        "gaussian": {"kind": profile.gaussian.kind, "samples": profile.gaussian.samples},
        "slices": {
            name: {"kind": part.kind, "seed": part.seed, "samples": part.samples}
            for name, part in profile.slices.items()
        },
        "architecture": profile.architecture,
        "weights": profile.weights,
        "inputs": profile.inputs.to_json(),
        "inputs_seen": profile.inputs_seen,
        **({"shares": list(profile.shares)} if profile.shares else {}),
    }
    metadata = {"format": "shiftmend profile", "schema": str(SCHEMA), **UNSEALED}
    content = _ordered(safetensors.torch.save(tensors, metadata | {"profile": json.dumps(facts)}))
    wrong = problems(profile)
    if len(content) > MOST_BYTES:
        wrong.append(f"it would have {len(content):,} bytes, more than {MOST_BYTES:,}; tap fewer units")
    if wrong:
        raise ProfileError(f"this profile could not be loaded again: {wrong[0]}")
    file = io.BytesIO(content)
    seal(file)
    return file.getvalue()


def _ordered(content: bytes) -> bytes:
    """The same file with its header sorted: the library orders metadata by chance, equal profiles are equal files."""
    (length,) = struct.unpack("<Q", content[:8])
    header = json.dumps(json.loads(content[8 : 8 + length]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


def read(path: Path) -> Profile:
    """Load a profile from a file."""
    try:
        with path.open("rb") as handle:
            content = handle.read(MOST_BYTES + 1)
    except OSError as error:
        raise ProfileError(f"{path} could not be read ({error.strerror}); expected a shiftmend profile") from error
    if len(content) > MOST_BYTES:
        raise ProfileError(f"{path} has more than {MOST_BYTES:,} bytes; a profile has fewer, so it is none")
    try:
        return decode(content)
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from error


def decode(content: bytes) -> Profile:
    """Turn the bytes of a file into a profile; anything wrong is a `ProfileError`."""
    metadata = _metadata(content)
    if metadata.get("format") != "shiftmend profile":
        raise ProfileError("this is a safetensors file but no shiftmend profile; make one with `shiftmend profile`")
    if metadata.get("schema") != str(SCHEMA):
        schema = reprlib.repr(metadata.get("schema"))
        raise ProfileError(f"it has schema {schema}, this version reads {SCHEMA}; profile again")
    if not is_whole(io.BytesIO(content)):
        raise ProfileError("it is damaged: its content does not match its SHA-256; copy it again from the source site")
    try:
        tensors = safetensors.torch.load(content)
        profile = _assemble(json.loads(metadata["profile"]), tensors)
    except ShiftmendError as error:
        raise ProfileError(f"it is not valid: {_one_line(error)}") from error
    except Exception as error:  # whatever a hostile file can provoke, it must end as one clear error
        what = f"{type(error).__name__} while reading it ({_one_line(error)})"
        raise ProfileError(f"it is not valid: {what}") from error
    found = problems(profile)
    if found:
        raise ProfileError(f"it is not valid: {_one_line(found[0])}")
    return profile


def _one_line(message: object) -> str:
    """Names in a damaged file can be of any length and hold line breaks."""
    line = " ".join(str(message).split())
    return line if len(line) <= 300 else f"{line[:300]} ..."


def _metadata(content: bytes) -> dict[str, str]:
    """The header's metadata, read with bounds before anything else looks at the file."""
    damaged = ProfileError("it is damaged or no safetensors file; copy it again from the source site")
    if len(content) < 10:
        raise damaged
    (length,) = struct.unpack("<Q", content[:8])
    if length > min(_MOST_HEADER, len(content) - 8):
        raise damaged
    try:
        metadata = dict(json.loads(content[8 : 8 + length]).get("__metadata__", {}))
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise damaged from error
    if not all(isinstance(value, str) for value in metadata.values()):
        raise damaged
    return metadata


def _assemble(facts: dict[str, Any], tensors: dict[str, Tensor]) -> Profile:
    bins = _bins(facts["bins"])
    _check_tensors(facts, tensors)
    taps = {name: _histogram(f"tap.{name}", entry, tensors, bins) for name, entry in facts["taps"].items()}
    slices = {
        name: _histogram(f"slices.{name}", entry, tensors, bins_of_slices(name, bins))
        for name, entry in facts["slices"].items()
    }
    specs = {name: _spec(name, entry) for name, entry in facts["taps"].items()}
    if not {"features", "logits"} <= set(taps):
        raise ProfileError("it lacks the taps 'features' and 'logits'")
    mean, deviation = tensors["features.mean"], tensors["features.deviation"]
    if not mean.shape == deviation.shape == taps["features"].low.shape == taps["features"].high.shape:
        raise ProfileError("mean and deviation are not of as many units as the features")
    units = mean.shape[0]
    if sum(part.units for part in slices.values()) * units > MOST_WEIGHTS:
        raise ProfileError(f"its slices need more than {MOST_WEIGHTS:,} weights")
    return Profile(
        taps=taps,
        gaussian=_gaussian(facts["gaussian"], tensors, units),
        mean=mean,
        deviation=deviation,
        slices={
            name: Slices(part, seed, Projector.build(mean, deviation, taps["features"].usable, part.units, seed))
            for name, part in slices.items()
            for seed in [_whole(facts["slices"][name]["seed"], f"the seed of slices {name!r}", 0, (1 << 64) - 1)]
        },
        specs=specs,
        preset=_text(facts["preset"], "preset", ".*"),
        architecture=_text(facts["architecture"], "architecture", _SUM),
        weights=_text(facts["weights"], "weights", _SUM),
        inputs=InputSummary.from_json(facts["inputs"]),
        inputs_seen=_whole(facts["inputs_seen"], "the number of inputs", 1, _MOST),
        shares=_shares(facts.get("shares", [])),
        library=_text(facts["library"], "library", "[ -~]{1,64}"),
    )


def _check_tensors(facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Refuse statistics of unknown kinds, and tensors other than those that hold the known ones."""
    for group, kind in (("taps", Histogram.kind), ("slices", Slices.kind)):
        for name, entry in facts[group].items():
            if entry["kind"] != kind:
                raise ProfileError(f"{name!r} is of the kind {reprlib.repr(entry['kind'])}, expected {kind!r}")
    spread = _SPREADS.get(facts["gaussian"]["kind"])
    if spread is None:
        kind = reprlib.repr(facts["gaussian"]["kind"])
        raise ProfileError(f"its Gaussian is of the kind {kind}, expected one of {', '.join(_SPREADS)}")
    expected = {"features.mean", "features.deviation", "gaussian.mean", f"gaussian.{spread}"} | {
        f"{group}.{name}.{part}"
        for group, names in (("tap", facts["taps"]), ("slices", facts["slices"]))
        for name in names
        for part in ("counts", "low", "high")
    }
    if expected != set(tensors):
        wrong = sorted(expected ^ set(tensors))[0]
        raise ProfileError(f"tensor {wrong!r} is missing or unexpected")
    for name, tensor in tensors.items():
        dimensions = 2 if name.endswith(".counts") else 1
        if tensor.dtype != torch.float32 or tensor.ndim != dimensions:
            raise ProfileError(f"tensor {name!r} should be float32 with {dimensions} dimensions")


def _spec(name: str, facts: dict[str, Any]) -> Tap:
    if type(facts["spec"]) is not str or type(facts["entry"]) not in (int, str, type(None)):
        raise ProfileError(f"tap {name!r} is not described by a module name")
    parsed = Tap.parse(name, facts["spec"])
    return Tap(name, parsed.module, parsed.side, parsed.channel_axis, facts["entry"])


def _gaussian_tensors(gaussian: MarginalGaussian | FullGaussian) -> dict[str, Tensor]:
    """A covariance is symmetric: only its upper triangle is stored, row by row."""
    if isinstance(gaussian, MarginalGaussian):
        return {"gaussian.mean": gaussian.mean.clone(), "gaussian.variance": gaussian.variance.clone()}
    rows, columns = torch.triu_indices(*gaussian.covariance.shape, device="cpu")
    return {"gaussian.mean": gaussian.mean.clone(), "gaussian.covariance": gaussian.covariance[rows, columns]}


def _gaussian(facts: dict[str, Any], tensors: dict[str, Tensor], units: int) -> MarginalGaussian | FullGaussian:
    samples = _whole(facts["samples"], "the number of samples of the Gaussian", 1, _MOST)
    mean, spread = tensors["gaussian.mean"], tensors[f"gaussian.{_SPREADS[facts['kind']]}"]
    full = facts["kind"] == FullGaussian.kind
    if mean.shape != (units,) or spread.shape != ((units * (units + 1)) // 2 if full else units,):
        raise ProfileError("its Gaussian is not of as many units as the features")
    if not full:
        return MarginalGaussian(mean, spread, samples)
    rows, columns = torch.triu_indices(units, units, device="cpu")
    covariance = spread.new_empty(units, units)
    covariance[rows, columns] = spread
    covariance[columns, rows] = spread
    return FullGaussian(mean, covariance, samples)


def _bins(cut: dict[str, Any]) -> Bins:
    kinds = {name: type(value) for name, value in cut.items()}
    if kinds not in ({"count": int, "layout": str, "temperature": kind} for kind in (int, float)):
        raise ProfileError("its bins are not described by a count, a layout and a temperature")
    return Bins(**cut)


def _histogram(name: str, facts: dict[str, Any], tensors: dict[str, Tensor], bins: Bins) -> Histogram:
    counts, low, high = (tensors[f"{name}.{part}"] for part in ("counts", "low", "high"))
    return Histogram(counts, low, high, _whole(facts["samples"], f"the number of samples of {name}", 1, _MOST), bins)


def _shares(given: Any) -> tuple[float, ...]:
    right = isinstance(given, list) and all(type(share) is float and 0 <= share <= 1 for share in given)
    if not right or (given and abs(sum(given) - 1) > 1e-6):
        raise ProfileError(f"the shares of its parts are {reprlib.repr(given)}, expected numbers that add up to 1")
    return tuple(given)


def _whole(value: Any, what: str, least: int, most: int) -> int:
    """JSON has numbers only; Python would take true and 3.0 for whole ones too."""
    if type(value) is not int or not least <= value <= most:
        raise ProfileError(f"{what} is {reprlib.repr(value)}, expected a whole number from {least} to {most}")
    return value


def _text(value: Any, what: str, pattern: str) -> str:
    if not isinstance(value, str) or not re.fullmatch(pattern, value):
        raise ProfileError(f"its entry {what!r} is {reprlib.repr(value)}, which is not of the expected form")
    return value


_ROW_TOLERANCE = 1e-3  # float32 counts of millions of samples


def problems(profile: Profile) -> list[str]:
    """Everything that is wrong with a profile, in words; empty if nothing is."""
    found = []
    if profile.preset not in PRESETS:
        found.append(f"its preset {profile.preset!r} is unknown (known: {', '.join(PRESETS)})")
    elif sorted(profile.slices) != sorted(_slices_of(profile.preset)):
        expected = " and ".join(_slices_of(profile.preset))
        found.append(f"its slices are {sorted(profile.slices)}, expected those for {expected}")
    if not bool(torch.isfinite(profile.mean).all() & torch.isfinite(profile.deviation).all()):
        found.append("the features' mean or deviation is not finite")
    elif bool((profile.deviation < 0).any()):
        found.append("the features' deviation is negative")
    elif bool((profile.deviation == 0)[profile.taps["features"].usable].any()):
        found.append("the features' deviation is zero in a unit that varied")
    found += _gaussian_problems(profile)
    samples = profile.taps["features"].samples
    if any(part.histogram.samples != samples for part in profile.slices.values()):
        found.append(f"its slices are not of the {samples} samples of the features")
    if any(tap.samples < profile.inputs_seen for tap in profile.taps.values()):
        found.append(f"a tap has fewer samples than the {profile.inputs_seen} inputs")
    if profile.taps["features"].usable_count == 0:
        found.append("every one of its features was constant")
    parts = dict(profile.taps) | {f"{name} slices": part.histogram for name, part in profile.slices.items()}
    for name, histogram in parts.items():
        found += [f"{name}: {problem}" for problem in _histogram_problems(histogram)]
    return found


def _gaussian_problems(profile: Profile) -> list[str]:
    gaussian, features = profile.gaussian, profile.taps["features"]
    spread = gaussian.covariance if isinstance(gaussian, FullGaussian) else gaussian.variance
    if not bool(torch.isfinite(gaussian.mean).all() & torch.isfinite(spread).all()):
        return ["the Gaussian's mean or variance is not finite"]
    if bool((gaussian.variance < 0).any()):  # zero is in order: a unit can be silent for one class, and vary for others
        return ["the Gaussian's variance is negative"]
    if isinstance(gaussian, FullGaussian):
        variance = gaussian.variance.double()
        if bool((gaussian.covariance.double().square() > 1.001 * torch.outer(variance, variance)).any()):
            return ["the Gaussian's covariance of two units is larger than their variances allow"]
    if gaussian.samples != features.samples:
        return [f"its Gaussian is not of the {features.samples} samples of the features"]
    return []


def _slices_of(preset: str) -> tuple[str, ...]:
    return ("verification", "alignment") if PRESETS[preset].aligned_slices else ("verification",)


def _histogram_problems(histogram: Histogram) -> list[str]:
    counts, low, high = histogram.counts, histogram.low, histogram.high
    if counts.shape != (low.shape[0], histogram.bins.total) or low.shape != high.shape or low.shape[0] == 0:
        return [f"counts {list(counts.shape)} and ranges {list(low.shape)} do not fit {histogram.bins.total} bins"]
    if not all(bool(torch.isfinite(part).all()) for part in (counts, low, high)):
        return ["counts or ranges are not finite"]
    if bool((counts < 0).any()):
        return ["counts are negative"]
    if bool((low > high).any()):
        return ["the lowest value of a unit lies above its highest"]
    off = (counts.double().sum(1) - histogram.samples).abs().max().item()
    if off > _ROW_TOLERANCE * histogram.samples:
        return [f"the counts of a unit do not add up to the {histogram.samples} samples"]
    return []
