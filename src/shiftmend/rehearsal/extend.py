"""Extending a rehearsal: check that settings agree, find the missing candidates, and join the results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from shiftmend.engine.method import Method, describe_method
from shiftmend.errors import DataError
from shiftmend.profiles.rehearsal import UNTOUCHED, Rehearsal, RehearsedShift, empty_estimates, format_score
from shiftmend.rehearsal.battery import PlannedShift, from_functions, list_devices
from shiftmend.utils.json import dumps
from shiftmend.utils.tensor_tree import Inputs

SAME_SCORE = 0.02
"""Tolerated difference between scores of the untouched model on another machine, due to rounding: in accuracy, or
relative to an error.
"""
AGREEMENT = "agreement with "


def check_settings(record: Rehearsal, settings: Mapping[str, Any]) -> None:
    """Refuse data and options that differ from those of the stored rehearsal."""
    words = {"home_sha256": "the home data", "seed": "the seed", "batch_size": "the batch size"}
    for name, value in settings.items():
        if dumps(value) != dumps(record.settings.get(name)):
            what = words.get(name, name)
            raise DataError(f"Expected {what} of the stored rehearsal, got another. Leave extend out to rehearse anew.")


def find_missing(record: Rehearsal, methods: Mapping[str, Method]) -> dict[str, Method]:
    """Return the candidates that the rehearsal lacks; refuse stored candidates with other hyper-parameters."""
    for method in methods.values():
        if different := record.find_differences(describe_method(method)):
            raise DataError(
                f"Expected the candidates of the stored rehearsal, but {different[0]}. Leave extend out to rehearse "
                "anew."
            )
    return {name: method for name, method in methods.items() if name not in record.candidates}


def plan_again(record: Rehearsal, inputs: Inputs, battery: Any) -> list[PlannedShift]:
    """Rebuild the shifts of a stored rehearsal with their stored strengths, to rehearse further methods on them.

    Args:
        record: The stored rehearsal.
        inputs: Home inputs, to whose range the simulated devices are scaled.
        battery: The user's simulated devices, as passed to `rehearse`; None for the built-in devices.

    Returns:
        The shifts in the stored order, without the unshifted data.

    Raises:
        DataError: If the stored rehearsal used other devices.
    """
    if battery is None:
        devices = {(one.name, one.family): one for one in list_devices(inputs)}
        known = [shift for shift in record.shifts[1:] if (shift.name, shift.family) in devices]
        planned = [PlannedShift(devices[shift.name, shift.family], shift.strength) for shift in known]
    else:
        planned = from_functions(battery)
    names = [RehearsedShift(one.name, one.family, float(one.strength)) for one in planned]
    if tuple(names) != record.shifts[1:]:
        first = next((shift.name for shift in record.shifts[1:] if shift not in names), "no more")
        raise DataError(
            f"Expected the battery of the stored rehearsal, which has {first!r}, got another. Pass the same battery=."
        )
    return planned


def start_record(record: Rehearsal, missing: Mapping[str, Method]) -> Rehearsal:
    """Return a copy of the record's facts about home, for the untouched model and the missing candidates only."""
    names = (UNTOUCHED, *missing)
    signals = [name for name in record.signals if not name.startswith(AGREEMENT)]
    return replace(
        record,
        candidates=names,
        methods={UNTOUCHED: record.methods[UNTOUCHED]}
        | {name: describe_method(method) for name, method in missing.items()},
        signals=(*signals, *(f"{AGREEMENT}{name}" for name in names)),
    )


def check_score(record: Rehearsal, shift: int, size: int, score: float) -> None:
    """Refuse a cell in which the score of the untouched model differs from the stored one."""
    known = float(record.scores[shift, size, 0])
    if not abs(score - known) <= SAME_SCORE * (1.0 if record.task == "classes" else max(abs(known), 1e-12)):
        told, stored = (format_score(one, record.task) for one in (score, known))
        name = record.shifts[shift].name
        raise DataError(
            f"Expected {stored} of the untouched model on {name!r}, as stored, got {told}. "
            "Pass the options of the stored rehearsal."
        )


def join(old: Rehearsal, new: Rehearsal) -> Rehearsal:
    """Add new candidates to a rehearsal.

    Predictions of earlier candidates are not stored, so their agreement with new candidates is unknown and no map is
    fitted to it. Only the agreement with the untouched model is known.

    Args:
        old: The stored rehearsal.
        new: A record of the same shifts, for the untouched model and new candidates.

    Returns:
        A record without estimates, which have to be computed anew.
    """
    added = new.candidates[1:]
    signals = (*old.signals, *(name for name in new.signals if name not in old.signals))
    shape = (len(old.shifts), len(old.sizes), len(old.candidates) + len(added), len(signals))
    values = torch.full(shape, torch.nan)
    values[:, :, : len(old.candidates), : len(old.signals)] = old.values
    for place, name in enumerate(new.signals):
        column = signals.index(name)
        values[:, :, len(old.candidates) :, column] = new.values[:, :, 1:, place]
        if name not in old.signals:
            values[:, :, 0, column] = new.values[:, :, 0, place]
    unknown = torch.full((len(old.sizes), len(signals) - len(old.signals)), torch.nan)
    joined = replace(
        old,
        candidates=(*old.candidates, *added),
        methods={**old.methods, **{name: new.methods[name] for name in added}},
        signals=signals,
        scores=torch.cat([old.scores, new.scores[:, :, 1:]], 2),
        values=values,
        home_mean=torch.cat([old.home_mean, unknown], 1),
        home_deviation=torch.cat([old.home_deviation, unknown], 1),
        group_deviation=torch.cat([old.group_deviation, unknown], 1) if old.groups else old.group_deviation,
    )
    return empty_estimates(joined)
