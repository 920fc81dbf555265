"""Loading an adaptation from the folder that `Adaptation.save` wrote."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any, get_args

import safetensors
import safetensors.torch
from torch import nn

from shiftmend.adaptation.result import CHANGES, FILES, Adaptation, Candidate, Change, Estimates
from shiftmend.engine.history import Epoch, read_history
from shiftmend.engine.trainer import Keep
from shiftmend.errors import AdaptationError, DataError
from shiftmend.introspection.input_map import load_adapted_state
from shiftmend.profiles import fingerprints
from shiftmend.utils import sealing
from shiftmend.utils.checks import one_line
from shiftmend.utils.files import hash_file
from shiftmend.utils.json import from_strict_json, loads
from shiftmend.verification.class_shares import Shares, Source
from shiftmend.verification.estimate import Estimate

REMEDY = "Try the folder that `shiftmend adapt --out` wrote, or adapt again."


def load_adaptation(folder: Path, model: nn.Module, trust: str | None = None) -> Adaptation:
    """Load the adaptation in a folder, with its weights in a copy of `model`.

    The manifest of a result of earlier versions, which has no seal, gets the entry `unsealed`.

    Args:
        folder: The folder that `Adaptation.save` wrote.
        model: The model that was adapted.
        trust: Public key that the result must be signed with.

    Raises:
        DataError: If a file is missing, damaged, or does not belong to the others.
        AdaptationError: If the weights do not fit the model.
    """
    if not folder.is_dir():
        raise DataError(f"Expected a folder of an adaptation, got {folder}, which does not exist. {REMEDY}")
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise DataError(f"Expected {missing[0]} in {folder}, got none. {REMEDY}")
    manifest, files = _read_sealed_manifest(folder / "manifest.json", trust)
    for name, digest in files.items():
        if hash_file(folder / name) != digest:
            raise DataError(f"{folder / name} is damaged: it is not the file that manifest.json seals. {REMEDY}")
    history = _read_history(folder / "history.json")
    if manifest["epochs"] != max(0, len(history) - 1):
        raise DataError(f"Expected in {folder / 'history.json'} the epochs of manifest.json, got others. {REMEDY}")
    adapted = copy.deepcopy(model)
    path = folder / "model.safetensors"
    try:
        state = safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise DataError(f"{path} is damaged ({error}). {REMEDY}") from error
    try:
        load_adapted_state(adapted, state)
    except RuntimeError as error:
        first = next((line.strip() for line in str(error).splitlines()[1:] if line.strip()), str(error))
        raise AdaptationError(
            f"Expected weights of this model, got another architecture in {path} ({first[:200]}). Try the model that "
            "was adapted."
        ) from error
    if fingerprints.weights(adapted) != manifest["adapted_weights"]:
        raise DataError(f"Expected the weights that manifest.json describes, got others in {path}. {REMEDY}")
    try:
        estimate, candidates, reason = _read_estimates(manifest)
        shares, changed = _read_change(manifest)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{folder / 'manifest.json'} is damaged: expected valid estimates. {REMEDY}") from error
    return Adaptation(
        adapted.eval(),
        history,
        manifest,
        selected=manifest["selected_epoch"],
        estimate=estimate,
        candidates=candidates,
        reason=reason,
        shares=shares,
        changed=changed,
    )


def _read_change(manifest: dict[str, Any]) -> tuple[Shares | None, Change | None]:
    """Read what changed since home and the class shares at the site, if they were estimated."""
    changed, told = manifest.get("changed"), manifest.get("shares")
    if changed is not None and changed not in CHANGES:
        raise ValueError("what changed is not known")
    if told is None:
        return None, changed
    values, low, high, home = (tuple(float(one) for one in told[name]) for name in ("values", "low", "high", "home"))
    same = len(values) == len(low) == len(high) == len(home)
    if not same or not all(0 <= one <= 1 for one in (*values, *low, *high, *home)):
        raise ValueError("class shares do not lie between 0 and 1")
    source: Source = "confusion" if told["source"] == "confusion" else "likelihood"
    return Shares(values, low, high, home, int(told["samples"]), source, tuple(map(str, told["reasons"]))), changed


def _read_estimates(manifest: dict[str, Any]) -> tuple[Estimates | None, tuple[Candidate, ...], str]:
    """Read the estimates, the candidates and the reason for the choice; results of older versions have none."""
    told = manifest.get("estimate")
    estimates = None if told is None else Estimates(_read_estimate(told.get("before")), _read_estimate(told["after"]))
    candidates = tuple(
        Candidate(
            str(row["name"]),
            _read_estimate(row["estimate"]),
            {str(name): float(value) for name, value in row["signals"].items()},
            float(row["seconds"]),
            None if row.get("failure") is None else str(row["failure"]),
        )
        for row in manifest.get("candidates", ())
    )
    read_temperature(manifest)
    return estimates, candidates, str(manifest.get("chosen", {}).get("reason", ""))


def _read_estimate(data: Any) -> Estimate | None:
    if data is None:
        return None
    value, low, high = (None if data[name] is None else float(data[name]) for name in ("value", "low", "high"))
    if not all(number is None or math.isfinite(number) for number in (value, low, high)):
        raise ValueError("an estimate is no finite number")
    return Estimate(value, low, high, str(data["metric"]), tuple(map(str, data["reasons"])))


def read_temperature(manifest: dict[str, Any]) -> float:
    """Return the temperature in the head of the mended model; 1 if there is none."""
    temperature = float(manifest.get("calibration", {}).get("temperature", 1.0))
    if not 0 < temperature < math.inf:
        raise ValueError("a temperature is not positive")
    return temperature


def _read_json(path: Path) -> Any:
    try:
        return from_strict_json(loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is damaged: expected JSON. {REMEDY}") from error


def read_manifest(path: Path, trust: str | None = None) -> dict[str, Any]:
    """Read the manifest of an adaptation; with `trust`, require a signature by that public key.

    Raises:
        DataError: If the file is damaged or something else.
    """
    return _read_sealed_manifest(path, trust)[0]


def _read_sealed_manifest(path: Path, trust: str | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a manifest, and the SHA-256 of the files that it seals, by name."""
    try:
        data, seal = sealing.check_json(path.read_text(encoding="utf-8"), trust)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is damaged or not to be trusted ({one_line(error)}). {REMEDY}") from error
    data = from_strict_json(data)
    files = data.pop("files", {})
    if files and not seal.sealed:
        raise DataError(f"{path} is damaged: it seals other files and has no seal of its own. {REMEDY}")
    needed = {"method": dict, "kept": str, "status": str, "adapted_weights": str, "selected_epoch": int, "epochs": int}
    fits = (
        all(type(data.get(name)) is kind for name, kind in needed.items())
        and isinstance(data["method"].get("name"), str)
        and data["kept"] in get_args(Keep)
        and 0 <= data["selected_epoch"] <= data["epochs"]
        and isinstance(files, dict)
        and (set(files) == set(FILES[:-1]) or not seal.sealed)
    )
    if not fits:
        raise DataError(f"{path} is damaged: expected the manifest of an adaptation. {REMEDY}")
    return (data, files) if seal.sealed else (data | {"unsealed": True}, {})


def _read_history(path: Path) -> list[Epoch]:
    try:
        return read_history(_read_json(path))
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error}): expected the history of an adaptation. {REMEDY}") from error
