"""The file of a profile: safetensors with JSON metadata, and a SHA-256 over the whole file.

Tensors are named `STATISTIC.PART` (`tap.features.counts`, `gaussian.mean`), beside `features.mean` and
`features.deviation`. The metadata describes each statistic: histograms under `taps`, slices under `slices`, the
Gaussian under `gaussian`, and any other kind under `statistics`, whose tensors begin with `statistics.`.

A file may come from anywhere, so `decode` checks everything before it builds anything, and reports one error.
"""

from __future__ import annotations

import io
import json
import re
import reprlib
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from shiftmend.errors import ProfileError, ShiftmendError
from shiftmend.introspection.taps import Tap

# Importing `collect` imports the module of every statistic, which registers its kind.
from shiftmend.profiles import collect  # noqa: F401
from shiftmend.profiles.fingerprints import read_summary
from shiftmend.profiles.presets import PRESETS
from shiftmend.profiles.privacy import Guarantee
from shiftmend.profiles.profile import Profile
from shiftmend.profiles.rehearsal import Rehearsal
from shiftmend.stats.answers import Answers
from shiftmend.stats.gaussians import FullGaussian, MarginalGaussian
from shiftmend.stats.histograms import Bins, Histogram, usable_units
from shiftmend.stats.moments import Moments
from shiftmend.stats.quantiles import Quantiles
from shiftmend.stats.slices import Slices
from shiftmend.stats.statistics import KINDS, Frame, Statistic, read_whole_number
from shiftmend.utils import sealing
from shiftmend.utils.checks import one_line
from shiftmend.utils.json import loads
from shiftmend.utils.signing import Key

SCHEMA = 3


MAX_BYTES = 64 << 20


MAX_HEADER_BYTES = 4 << 20


_SHA256 = "[0-9a-f]{64}"


_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, SafetensorError)
"""Exceptions that entries of a wrong type can raise while a forged file is read."""


_GROUPS = {"tap": "taps", "gaussian": "gaussian", "slices": "slices"}
"""Metadata entries by the first word of a statistic's name; all other statistics are under `statistics`."""


_REHEARSAL = "rehearsal."
"""Prefix of the names of a rehearsal's tensors."""


def encode(profile: Profile, key: Key | None = None) -> bytes:
    """Encode a profile as the content of its file, signed if a key is given."""
    profile = profile.to("cpu")
    tensors = {"features.mean": profile.mean, "features.deviation": profile.deviation}
    entries = {name: {"kind": one.kind, **one.facts()} for name, one in profile.statistics.items()}
    for name, statistic in profile.statistics.items():
        tensors |= {f"{_tensor_prefix(name)}.{part}": tensor for part, tensor in statistic.tensors().items()}
    others = {name: entry for name, entry in entries.items() if _group(name) == "statistics"}
    rehearsed: dict[str, Any] = {}
    if profile.rehearsal is not None:
        rehearsed["rehearsal"], own = profile.rehearsal.to_file()
        tensors |= {f"{_REHEARSAL}{name}": tensor for name, tensor in own.items()}
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
        "gaussian": entries["gaussian"],
        "slices": {name: entries[f"slices.{name}"] for name in profile.slices},
        **({"statistics": others} if others else {}),
        "architecture": profile.architecture,
        "weights": profile.weights,
        "inputs": profile.inputs.to_json(),
        "inputs_seen": profile.inputs_seen,
        **({"shares": list(profile.shares)} if profile.shares else {}),
        **({} if profile.privacy is None else {"privacy": profile.privacy.to_json()}),
        **rehearsed,
    }
    # Tensors of a profile may share memory, which safetensors does not allow.
    tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    metadata = {"format": "shiftmend profile", "schema": str(SCHEMA), **sealing.blank_entries(key)}
    content = _sort_header(safetensors.torch.save(tensors, metadata | {"profile": json.dumps(facts)}))
    found = problems(profile)
    if len(content) > MAX_BYTES:
        found.append(f"it would have {len(content):,} bytes, more than {MAX_BYTES:,}; tap fewer units")
    if found:
        raise ProfileError(f"this profile could not be loaded again: {found[0]}")
    file = io.BytesIO(content)
    sealing.seal(file, key)
    return file.getvalue()


def _group(name: str) -> str:
    """Return the metadata entry that describes a statistic."""
    return _GROUPS.get(name.partition(".")[0], "statistics")


def _tensor_prefix(name: str) -> str:
    return f"statistics.{name}" if _group(name) == "statistics" else name


def _sort_header(content: bytes) -> bytes:
    """Sort the header of a safetensors file, so that equal profiles become equal files."""
    (length,) = struct.unpack("<Q", content[:8])
    header = json.dumps(json.loads(content[8 : 8 + length]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


def read(path: Path, trust: str | None = None) -> Profile:
    """Load a profile from a file; with `trust`, require a signature by that public key."""
    try:
        with path.open("rb") as handle:
            content = handle.read(MAX_BYTES + 1)
    except OSError as error:
        raise ProfileError(
            f"Expected a shiftmend profile, got {path}, which cannot be read ({error.strerror}). Name another file."
        ) from error
    if len(content) > MAX_BYTES:
        raise ProfileError(
            f"Expected a profile of at most {MAX_BYTES:,} bytes, got {path}, which is larger and therefore none."
        )
    try:
        return decode(content, trust)
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from error


def decode(content: bytes, trust: str | None = None) -> Profile:
    """Decode the content of a file; raise a `ProfileError` for any defect, including a wrong signature."""
    metadata = _read_metadata(content)
    if metadata.get("format") != "shiftmend profile":
        raise ProfileError("this is a safetensors file but no shiftmend profile; make one with `shiftmend profile`")
    if metadata.get("schema") != str(SCHEMA):
        schema = reprlib.repr(metadata.get("schema"))
        raise ProfileError(f"it has schema {schema}, this version reads {SCHEMA}; profile again")
    try:
        sealing.check(io.BytesIO(content), trust)
    except ValueError as error:
        raise ProfileError(f"it is damaged or not to be trusted: {error}; get it again from the source site") from error
    try:
        tensors = safetensors.torch.load(content)
        profile = _assemble(loads(metadata["profile"]), tensors)
    except ShiftmendError as error:
        raise ProfileError(f"it is not valid: {one_line(error)}") from error
    except _MALFORMED as error:
        what = f"{type(error).__name__} while reading it ({one_line(error)})"
        raise ProfileError(f"it is not valid: {what}") from error
    found = problems(profile)
    if found:
        raise ProfileError(f"it is not valid: {one_line(found[0])}")
    return profile


def _read_metadata(content: bytes) -> dict[str, str]:
    """Read the metadata in the header, within size limits, before any other parser reads the file."""
    damaged = ProfileError("it is damaged or no safetensors file; copy it again from the source site")
    if len(content) < 10:
        raise damaged
    (length,) = struct.unpack("<Q", content[:8])
    if length > min(MAX_HEADER_BYTES, len(content) - 8):
        raise damaged
    try:
        metadata = dict(loads(content[8 : 8 + length]).get("__metadata__", {}))
    except (ValueError, AttributeError, TypeError) as error:
        raise damaged from error
    if not all(isinstance(value, str) for value in metadata.values()):
        raise damaged
    return metadata


def _assemble(facts: dict[str, Any], tensors: dict[str, Tensor]) -> Profile:
    entries = {f"tap.{name}": entry for name, entry in facts["taps"].items()}
    entries["gaussian"] = facts["gaussian"]
    entries |= {f"slices.{name}": entry for name, entry in facts["slices"].items()}
    for name, entry in facts.get("statistics", {}).items():
        if _group(name) != "statistics":
            raise ProfileError(f"the statistic {name!r} has a name that belongs to another entry")
        entries[name] = entry
    classes = {name: _find_class(name, entry["kind"]) for name, entry in entries.items()}
    preset = _read_text(facts["preset"], "preset", ".*")
    # Slice directions are rebuilt from a seed, in any number that a file asks for, so slice names are checked first.
    _refuse(_slice_problems(preset, facts["slices"]))
    rehearsed = {name: tensor for name, tensor in tensors.items() if name.startswith(_REHEARSAL)}
    _check_tensors(classes, {name: tensor for name, tensor in tensors.items() if name not in rehearsed})
    rehearsal = _read_rehearsal(facts.get("rehearsal"), rehearsed)
    if not {"tap.features", "tap.logits"} <= set(entries):
        raise ProfileError("it lacks the taps 'features' and 'logits'")
    mean, deviation = tensors["features.mean"], tensors["features.deviation"]
    low, high = tensors["tap.features.low"], tensors["tap.features.high"]
    if not mean.shape == deviation.shape == low.shape == high.shape:
        raise ProfileError("mean and deviation are not of as many units as the features")
    frame = Frame(_read_bins(facts["bins"]), mean, deviation, usable_units(low, high))
    statistics: dict[str, Statistic] = {}
    for name, kind in classes.items():
        own = {part: tensors[f"{_tensor_prefix(name)}.{part}"] for part in kind.tensor_dims}
        statistics[name] = kind.from_file(name, entries[name], own, frame)
    return Profile(
        statistics=statistics,
        mean=mean,
        deviation=deviation,
        specs={name: _read_tap(name, entry) for name, entry in facts["taps"].items()},
        preset=preset,
        architecture=_read_text(facts["architecture"], "architecture", _SHA256),
        weights=_read_text(facts["weights"], "weights", _SHA256),
        inputs=read_summary(facts["inputs"]),
        inputs_seen=read_whole_number(facts["inputs_seen"], "the number of inputs"),
        shares=_read_shares(facts.get("shares", [])),
        library=_read_text(facts["library"], "library", "[ -~]{1,64}"),
        rehearsal=rehearsal,
        privacy=Guarantee.from_json(facts["privacy"]) if "privacy" in facts else None,
    )


def _read_rehearsal(facts: Any, tensors: Mapping[str, Tensor]) -> Rehearsal | None:
    """Read the rehearsal of a file, if it has one."""
    if facts is None and not tensors:
        return None
    if any(tensor.dtype not in (torch.uint8, torch.float16, torch.float32) for tensor in tensors.values()):
        raise ProfileError("the tensors of its rehearsal should be uint8, float16 or float32")
    return Rehearsal.from_file(facts, {name.removeprefix(_REHEARSAL): tensor for name, tensor in tensors.items()})


def _find_class(name: str, kind: Any) -> type[Statistic]:
    """Look up the class of a statistic by its kind."""
    allowed: dict[str, tuple[type[Statistic], ...]] = {
        "taps": (Histogram,),
        "gaussian": (MarginalGaussian, FullGaussian),
        "slices": (Slices,),
        "statistics": tuple(KINDS.values()),
    }
    for statistic in allowed[_group(name)]:
        if kind == statistic.kind:
            return statistic
    expected = ", ".join(statistic.kind for statistic in allowed[_group(name)])
    raise ProfileError(f"the statistic {name!r} is of the kind {reprlib.repr(kind)}, expected {expected}")


def _check_tensors(classes: Mapping[str, type[Statistic]], tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that do not belong to the statistics, or have another type or number of dimensions."""
    dims = {"features.mean": 1, "features.deviation": 1} | {
        f"{_tensor_prefix(name)}.{part}": number
        for name, kind in classes.items()
        for part, number in kind.tensor_dims.items()
    }
    if dims.keys() != tensors.keys():
        wrong = sorted(dims.keys() ^ tensors.keys())[0]
        raise ProfileError(f"tensor {wrong!r} is missing or unexpected")
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32 or tensor.ndim != dims[name]:
            raise ProfileError(f"tensor {name!r} should be float32 with {dims[name]} dimensions")


def _read_tap(name: str, facts: dict[str, Any]) -> Tap:
    if type(facts["spec"]) is not str or type(facts["entry"]) not in (int, str, type(None)):
        raise ProfileError(f"tap {name!r} is not described by a module name")
    parsed = Tap.parse(name, facts["spec"])
    return Tap(name, parsed.module, parsed.side, parsed.channel_axis, facts["entry"])


def _read_bins(facts: dict[str, Any]) -> Bins:
    types = {name: type(value) for name, value in facts.items()}
    if types not in ({"count": int, "layout": str, "temperature": number} for number in (int, float)):
        raise ProfileError("its bins are not described by a count, a layout and a temperature")
    return Bins(**facts)


def _read_shares(given: Any) -> tuple[float, ...]:
    valid = isinstance(given, list) and all(type(share) is float and 0 <= share <= 1 for share in given)
    if not valid or (given and abs(sum(given) - 1) > 1e-6):
        raise ProfileError(f"the shares of its parts are {reprlib.repr(given)}, expected numbers that add up to 1")
    return tuple(given)


def _read_text(value: Any, what: str, pattern: str) -> str:
    if not isinstance(value, str) or not re.fullmatch(pattern, value):
        raise ProfileError(f"its entry {what!r} is {reprlib.repr(value)}, which is not of the expected form")
    return value


def _refuse(found: list[str]) -> None:
    if found:
        raise ProfileError(found[0])


def problems(profile: Profile) -> list[str]:
    """List all defects in the numbers of a profile, one sentence each."""
    features = profile.taps["features"]
    found = _slice_problems(profile.preset, profile.slices)
    if not bool(torch.isfinite(profile.mean).all() & torch.isfinite(profile.deviation).all()):
        found.append("the features' mean or deviation is not finite")
    elif bool((profile.deviation < 0).any()):
        found.append("the features' deviation is negative")
    elif bool((profile.deviation == 0)[features.usable].any()):
        found.append("the features' deviation is zero in a unit that varied")
    found += [f"{name}: {problem}" for name, one in profile.statistics.items() for problem in one.problems()]
    for name, part in {"gaussian": profile.gaussian, **profile.slices}.items():
        if part.samples != features.samples:
            found.append(f"{name} is not of the {features.samples} samples of the features")
    answers = profile.statistics.get("answers")
    if isinstance(answers, Answers) and len(answers.shares) != profile.taps["logits"].units:
        found.append("the answers are not of as many classes as the logits")
    moments, quantiles = (profile.statistics.get(name) for name in ("inputs", "inputs.quantiles"))
    if isinstance(moments, Moments) and isinstance(quantiles, Quantiles) and len(moments.mean) != len(quantiles.values):
        found.append("moments and quantiles of the inputs are not of the same units")
    found += _rehearsal_problems(profile)
    if any(tap.samples < profile.inputs_seen for tap in profile.taps.values()):
        found.append(f"a tap has fewer samples than the {profile.inputs_seen} inputs")
    if profile.privacy is not None and (profile.rehearsal is not None or isinstance(profile.gaussian, FullGaussian)):
        found.append("it promises privacy, and holds a rehearsal or a covariance, which are not private")
    if features.usable_count == 0:
        found.append("every one of its features was constant")
    return found


def _rehearsal_problems(profile: Profile) -> list[str]:
    """List how histograms of classes, or clusters, in a rehearsal do not fit the profile."""
    record, found = profile.rehearsal, list[str]()
    if record is None:
        return found
    slices = profile.slices["verification"].histogram
    for name, counts in record.by_class.items():
        whole = slices if name == "slices" else profile.taps[name]
        if counts.shape[1:] != whole.counts.shape:
            found.append(f"the {name} by class are not counted in the bins of the profile")
    if record.cluster_centres.numel() and record.cluster_centres.shape[1] != slices.units + 1:
        found.append(f"its clusters are not in the space of its {slices.units} slices")
    return found


def _slice_problems(preset: str, names: Mapping[str, Any]) -> list[str]:
    """List the defects of a preset, or of the names of its slices."""
    if preset not in PRESETS:
        return [f"its preset {preset!r} is unknown (known: {', '.join(PRESETS)})"]
    expected = ("verification", "alignment") if PRESETS[preset].aligned_slices else ("verification",)
    if sorted(names) != sorted(expected):
        return [f"its slices are {sorted(names)}, expected those for {' and '.join(expected)}"]
    return []
