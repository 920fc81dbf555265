"""`Adaptation`: the result of `adapt`, with the adapted model, its history, verification and manifest."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from shiftmend.__about__ import __version__
from shiftmend.engine.history import Epoch
from shiftmend.errors import AdaptationError
from shiftmend.introspection.model_state import full_state_dict, save_tensors
from shiftmend.profiles.rehearsal import UNTOUCHED, name_candidate
from shiftmend.utils import sealing, signing
from shiftmend.utils.checks import counted
from shiftmend.utils.files import as_path, check_folder, hash_file, writing_folder
from shiftmend.utils.json import dumps, to_strict_json
from shiftmend.verification.class_shares import Shares
from shiftmend.verification.estimate import Estimate
from shiftmend.verification.verdict import Verification

FILES = ("model.safetensors", "history.json", "manifest.json")
"""The files of a saved adaptation. The manifest comes last, because it seals the others."""

Change = Literal["device", "patients", "both", "neither"]
CHANGES: dict[Change, str] = {
    "device": "the device changed, the class shares did not",
    "patients": "the class shares changed, the device did not",
    "both": "the device and the class shares changed",
    "neither": "neither the device nor the class shares changed",
}
"""Descriptions of what changed since home."""


@dataclass(frozen=True)
class Estimates:
    """Estimated scores of the untouched and of the returned model on the target, made without labels.

    Attributes:
        before: Estimate of the untouched model.
        after: Estimate of the returned model.
    """

    before: Estimate | None
    after: Estimate | None

    def to_json(self) -> dict[str, Any]:
        """Return both estimates as JSON for a manifest."""
        both = (("before", self.before), ("after", self.after))
        return {name: one.to_json() for name, one in both if one is not None}


@dataclass(frozen=True)
class Candidate:
    """A candidate that `auto` tried.

    Attributes:
        name: Name of the method; `source-only` is the untouched model.
        estimate: Estimated score; None if the profile was not rehearsed or the candidate failed.
        signals: Label-free signals of the candidate on the target, by name.
        seconds: Duration of the candidate's run, in seconds.
        failure: Reason of the failure; None if the candidate did not fail.
    """

    name: str
    estimate: Estimate | None
    signals: dict[str, float] = field(default_factory=dict, repr=False)
    seconds: float = 0.0
    failure: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the candidate as JSON for a manifest."""
        return {
            "name": self.name,
            "estimate": None if self.estimate is None else self.estimate.to_json(),
            "signals": {name: float(f"{value:.6g}") for name, value in self.signals.items()},
            "seconds": round(self.seconds, 3),
            **({"failure": self.failure} if self.failure else {}),
        }


@dataclass(eq=False)
class Adaptation:
    """The result of `shiftmend.adapt`.

    Attributes:
        model: The adapted model, an ordinary `nn.Module` in eval mode.
        history: One row for the untouched model and one for each epoch.
        manifest: The protocol of the run as JSON: data, method, seed, versions, verification.
        before: Verification of the untouched model; None without a profile.
        after: Verification of the returned model.
        selected: Number of the best epoch, chosen without labels by the verification slices.
        estimate: Estimated scores before and after; None unless the profile was rehearsed, or `auto` chose.
        candidates: The candidates that `auto` tried.
        reason: Why `auto` chose this candidate, in words.
        shares: Class shares at the target, estimated by `auto` with the returned model; None if not estimated.
        changed: What changed since home: `"device"`, `"patients"` (the class shares), `"both"` or `"neither"`; None if
            unknown.
        harm: Warnings that a single method may have lowered the score, one sentence each; empty if there are none.

    Example:
        >>> import torch, shiftmend
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)).eval()
        >>> result = shiftmend.adapt(model, torch.randn(64, 4), method="adabn")
        >>> [row.epoch for row in result.history]
        [0, 1, 2]
    """

    model: nn.Module = field(repr=False)
    history: list[Epoch] = field(repr=False)
    manifest: dict[str, Any] = field(repr=False)
    before: Verification | None = None
    after: Verification | None = None
    selected: int = 0
    estimate: Estimates | None = None
    candidates: tuple[Candidate, ...] = ()
    reason: str = ""
    shares: Shares | None = None
    changed: Change | None = None
    harm: tuple[str, ...] = ()

    @property
    def kept(self) -> Epoch:
        """Row of the history of the epoch whose state `model` has."""
        return self.history[self.selected if self.manifest["kept"] == "selected" else -1]

    @property
    def interrupted(self) -> bool:
        """True if Ctrl-C ended the run early."""
        return bool(self.manifest["status"] == "interrupted")

    def save(self, folder: str | os.PathLike[str], *, sign: str | os.PathLike[str] | None = None) -> None:
        """Write `model.safetensors`, `history.json` and `manifest.json` into a folder.

        All weights and buffers are stored, including buffers that the model's own `state_dict` leaves out. Extra state
        (`get_extra_state`) is stored only if it is a tensor; load such a model with `strict=False`. The manifest holds
        the SHA-256 of all three files, and a signature if a key is given.

        Args:
            folder: Folder to write into. A folder that does not exist is created atomically.
            sign: File of a private key to sign the result with; see `shiftmend key new`.

        Raises:
            AdaptationError: If the folder cannot be written into. Nothing is half written.
        """
        home = as_path(folder, "the folder to write into")
        check_folder(home)
        tensors = full_state_dict(self.model)
        key = None if sign is None else signing.load_key(sign)
        rows = dumps([row.to_json() for row in self.history], "the history", indent=1) + "\n"
        to_strict_json(self.manifest, "the manifest")  # This check raises before anything is written.
        try:
            with writing_folder(home, FILES) as (weights, history, manifest):
                save_tensors(weights, tensors)
                history.write_bytes(rows.encode())
                files = {"model.safetensors": hash_file(weights), "history.json": hash_file(history)}
                sealed = {**sealing.blank_entries(key), "files": files, **self.manifest}
                text = sealing.seal_json(dumps(sealed, "the manifest", indent=1) + "\n", key)
                manifest.write_bytes(text.encode())
        except OSError as error:  # The error of the operating system may name a temporary file.
            reason = error.strerror or error
            raise AdaptationError(f"Folder {home} cannot be written into ({reason}). Name another folder.") from error

    def __repr__(self) -> str:
        epochs = self.history[-1].epoch if self.history else 0
        unit = name_rows(self.manifest)
        steps = self.history[-1].steps if self.history else None
        length = counted(epochs, unit) + (f" ({counted(steps, 'step')})" if unit == "round" and steps else "")
        name = self.manifest["method"]["name"]
        lines = [f"Adaptation by {name}, {length}, {self.manifest['status']}"]
        if name == UNTOUCHED:
            lines = ["No adaptation: the model is as it came"]
        headline = self._describe_estimate()
        if self.manifest["kept"] == "selected":
            untouched = "" if self.selected else " (the model as it came)"
            lines[0] += f"; kept is {unit} {self.selected}{untouched}, chosen without labels"
        tried = [row["learning_rate"] for row in self.manifest.get("learning_rates_tried", ())]
        if tried:
            own, every = self.manifest["method"]["learning_rate"], ", ".join(f"{rate:g}" for rate in tried)
            lines[0] += f"; learning rate {own:g}, chosen without labels of {every}"
        # Before adapting, nothing was restored yet.
        before = str(self.before).replace("restored", "as at home", 1)
        lines += [f"  features before  {before}"] if self.before else []
        lines += [f"  features after   {self.after}"] if self.after and name != UNTOUCHED else []
        lines += [f"  this may have done harm: {'; '.join(self.harm)}"] if self.harm else []
        return "\n".join(headline + lines)

    def _describe_estimate(self) -> list[str]:
        """Describe the estimated scores, the choice among candidates and what changed, one line each."""
        if self.estimate is None:
            return []
        before, after = self.estimate.before, self.estimate.after
        lines = []
        if before is not None and after is not None:
            if any(one.reliable or one.is_range for one in (before, after)):
                lines += [f"before  {before}", f"after   {after}"]
            elif self.manifest["method"]["name"] == UNTOUCHED:
                lines.append(str(after))
            else:
                lines.append(f"before and after: {after}")
        if self.candidates:
            tried = [one.name for one in self.candidates]
            lines.append(f"{describe_choice(self.manifest['method']['name'], tried)}: {self.reason}")
        if self.changed is not None:
            lines.append(f"what changed: {CHANGES[self.changed]}")
        return lines


def describe_choice(name: str, tried: Sequence[str]) -> str:
    """Describe which candidate `auto` took, and which others it tried.

    Example:
        >>> describe_choice("bufr", ["source-only", "adabn", "bufr"])
        'took bufr (also tried: untouched, adabn)'
        >>> describe_choice("source-only", ["source-only"])
        'kept the untouched model'
    """
    others = ", ".join(name_candidate(one) for one in tried if one != name)
    taken = "kept the untouched model" if name == UNTOUCHED else f"took {name}"
    return f"{taken} (also tried: {others})" if others else taken


def name_rows(manifest: Mapping[str, Any]) -> Literal["epoch", "round"]:
    """Return what a row of the history stands for: a round of steps with `epochs="auto"`, else an epoch."""
    stages = manifest.get("stages") or ()
    return "round" if any(isinstance(stage, dict) and stage.get("settles") for stage in stages) else "epoch"


def environment(device: torch.device) -> dict[str, str]:
    """Return the versions of libraries, the device and the platform, for the manifest."""
    return {
        "shiftmend": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "platform": platform.platform(),
    }
