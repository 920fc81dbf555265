"""The sections of a report, in order: the variables of each template.

A section is a function here and a template of the same name in `templates/`. The function returns the variables of the
template, or None to leave the section out. The sections in `SPECIALIST` are in a folded part at the end of the page.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from shiftmend.adaptation.result import CHANGES, Candidate
from shiftmend.evaluation.classification import Scores
from shiftmend.evaluation.regression import RegressionScores
from shiftmend.profiles.rehearsal import Rehearsal, name_candidate
from shiftmend.report import charts
from shiftmend.report.answer import (
    MIN_LABELS,
    find_truths,
    give_answer,
    has_one_model,
    is_told,
    write_estimate,
    write_score,
)
from shiftmend.report.charts import ScoreRow
from shiftmend.report.facts import Distribution, Facts, ModelPredictions, TapShift, Unit
from shiftmend.report.formatting import format_number, format_percent
from shiftmend.report.verdicts import state_verdict
from shiftmend.utils.checks import counted, is_whole

Context = dict[str, Any]

MAX_COLUMNS = 12
"""Largest size of an input that is shown as a row of a table; longer ones are drawn as a line."""

MAX_CHANNELS = 6
"""Largest number of channels of a signal that are drawn."""

DRAWN_UNITS = 6
"""Number of units of a tap whose distributions are drawn at once."""

LISTED_UNITS = 30
"""Number of units of a tap whose numbers are listed at once."""

DETAILED_TAPS = 12
"""Largest number of taps that are shown in detail, so that the page stays small."""

EXPLAINED_TAPS = {
    "features": "what the last layer reads: the network’s summary of an input",
    "logits": "what the last layer writes: one score for each answer",
}

SHOWN_CLASSES = 20


EXPLAINED_CANDIDATES = {
    "source-only": "the model as it came",
    "match-mean": "shifts the inputs to the mean at home",
    "match-moments": "shifts and scales the inputs to the mean and the spread at home",
    "match-histogram": "maps the values of the inputs so that each is as frequent as at home",
    "neo": "shifts the inner values that the last layer reads to the mean at home",
    "coral": "shifts, scales and mixes what the last layer reads, to the mean and the correlations at home",
    "adabn": "measures mean and spread inside the network again, on these inputs",
    "fr-shares": "trains scales inside the network until features are as at home, for any class shares",
    "fr": "trains the network until its features are as at home, all layers at once",
    "match-fr": "shifts and scales the inputs, then trains like fr",
    "bufr": "trains the network until its features are as at home, lowest layers first",
    "bufr-im": "trains like bufr, and then for clear answers",
}


def answer(facts: Facts) -> Context:
    """Say how accurate the model is here, and what to do."""
    return {"answer": give_answer(facts), "chart": _draw_answer(facts), "tiles": _list_tiles(facts)}


def _draw_answer(facts: Facts) -> Any:
    """Draw the estimates before and after with their intervals; return None if there are none."""
    estimates = facts.estimates
    if estimates is None:
        return None
    truths = find_truths(facts) or (None, None)
    if estimates.before is not None and estimates.before.metric not in ("accuracy", "rmse"):
        truths = (None, None)
    both = [ScoreRow("before", estimates.before, truths[0]), ScoreRow("after", estimates.after, truths[1])]
    if has_one_model(facts):
        last = estimates.after if facts.mending is not None else estimates.before
        both = [ScoreRow("here", last, truths[0])]
    if not any(is_told(row.estimate) for row in both):
        return None
    return charts.draw_scores(both, None if facts.rehearsal is None else facts.rehearsal.score, "Estimated score")


def _list_tiles(facts: Facts) -> list[tuple[str, str]]:
    """List a few self-explanatory numbers: a name, and the value before and after."""
    made = facts.predictions
    if made is None:
        return []
    tiles = []
    if made.changed is not None:
        tiles.append(("answers that changed", format_percent(made.changed / made.total)))
    tiles.append(
        (
            "mean confidence",
            _write_both(
                format_percent(made.before.confidence),
                None if made.after is None else format_percent(made.after.confidence),
            ),
        )
    )
    return tiles


def _write_both(before: str, after: str | None) -> str:
    return before if after is None else f"{before} → {after}"


def tried(facts: Facts) -> Context | None:
    """List the candidates of `auto` with their estimates, and the reason for the choice."""
    mending = facts.mending
    if mending is None or not mending.candidates:
        return None
    rows = [
        {
            "name": name_candidate(one.name),
            "explained": EXPLAINED_CANDIDATES.get(one.name, ""),
            "estimate": _describe_candidate(one),
            "seconds": _write_seconds(one.seconds),
            "chosen": one.name == mending.method,
        }
        for one in mending.candidates
    ]
    told = [one.estimate for one in mending.candidates if is_told(one.estimate)]
    home = None if facts.rehearsal is None else facts.rehearsal.score
    drawn = [
        ScoreRow(name_candidate(one.name), one.estimate, None, chosen=one.name == mending.method)
        for one in mending.candidates
    ]
    return {
        "rows": rows,
        "reason": mending.reason,
        "chosen": name_candidate(mending.method),
        "chart": charts.draw_scores(drawn, home, "Estimates of all candidates") if len(told) > 1 else None,
        "rehearsed": any(one.estimate is not None for one in mending.candidates),
    }


def _write_seconds(seconds: float) -> str:
    # A saved result has three digits; rounding first gives the same text for a result in memory.
    seconds = round(seconds, 3)
    return f"{seconds:,.{0 if seconds >= 100 else 1 if seconds >= 1 else 2}f}\u00a0s"


def _describe_candidate(one: Candidate) -> str:
    if one.failure is not None:
        return "failed here"
    return "unknown" if one.estimate is None else write_estimate(one.estimate, 1)


def changed(facts: Facts) -> Context | None:
    """Say whether the device or the class shares changed, and show the shares beside those of home."""
    mending = facts.mending
    if mending is None or mending.changed is None:
        return None
    shares, rows = mending.shares, list[dict[str, Any]]()
    if shares is not None and shares.reliable:
        names = facts.classes if len(facts.classes) == len(shares.values) else range(len(shares.values))
        every = zip(names, shares.values, shares.low, shares.high, shares.home, strict=True)
        rows = [
            {"name": str(name), "share": share, "low": low, "high": high, "home": home}
            for name, share, low, high, home in every
        ]
        if len(rows) > SHOWN_CLASSES:
            # If not all classes are shown, those that differ most are.
            rows = sorted(rows, key=lambda row: -abs(row["share"] - row["home"]))[:SHOWN_CLASSES]
    largest = max((max(row["share"], row["home"]) for row in rows), default=1.0)
    left_out = 0 if shares is None or not rows else len(shares.values) - len(rows)
    return {
        "answer": mending.changed,
        "words": CHANGES[mending.changed],
        "frees_shares": mending.method_class.frees_shares,
        "rows": rows,
        "largest": largest,
        "left_out": left_out,
    }


def rehearsed(facts: Facts) -> Context | None:
    """Show how good the estimates were at home, where the truth is known."""
    record = facts.rehearsal
    if record is None:
        return None
    rows = _list_rehearsed(record)
    points = [(truth, guess) for *_, guess, truth in rows if math.isfinite(guess)]
    if not points:
        return None
    return {
        "rows": [
            (name, strength, candidate, *(write_score(value, record.task) for value in (guess, truth)))
            for name, strength, candidate, guess, truth in rows
        ],
        "chart": charts.draw_rehearsal(points, percent=record.task == "classes"),
        "error": f"{100 * record.mean_error:.1f} points" if record.task == "classes" else f"{record.mean_error:.3g}",
        "families": len(record.families),
        "record": record,
    }


def _list_rehearsed(record: Rehearsal) -> list[tuple[str, str, str, float, float]]:
    """Return name, strength, candidate, estimate and truth of each shift, at the largest size."""
    rows = []
    for place, shift in enumerate(record.shifts):
        number = int(record.chosen[place, -1])
        strength = f"{shift.strength:.2f}" if shift.strength else ""
        guess, truth = float(record.estimates[place, -1, -1]), float(record.scores[place, -1, number])
        rows.append((shift.name, strength, name_candidate(record.candidates[number]), guess, truth))
    return rows


def inputs(facts: Facts) -> Context:
    """Show sample inputs in the way that suits their shape: as images, lines or numbers."""
    if not facts.inputs:
        return {"kind": "none"}
    values = [sample.values for sample in facts.inputs]
    shape = values[0].shape
    if len(shape) == 1 and shape[0] <= MAX_COLUMNS:
        return {"kind": "table", "remark": "", "columns": shape[0]}
    remarks = []
    if np.iscomplexobj(values[0]):
        remarks.append("The picture shows the magnitude of complex numbers.")
        values = [np.abs(each) for each in values]
    if len(shape) == 3:
        if facts.inputs[0].values.dtype != np.uint8:
            remarks.append("All values were scaled alike to the range of the screen.")
        if shape[0] not in (1, 3):
            remarks.append(f"Only the first of {shape[0]} channels is shown.")
        return {"kind": "images", "remark": " ".join(remarks), "pictures": charts.encode_images(values)}
    if len(shape) not in (1, 2):
        return {"kind": "others", "remark": " ".join(remarks), "sizes": " × ".join(map(str, shape)) or "one number"}
    many = len(shape) == 2 and shape[0] > MAX_CHANNELS
    remarks.append(
        f"All share one scale. Only the first {MAX_CHANNELS} of {shape[0]} channels are shown."
        if many
        else "All share one scale."
    )
    channels = [np.atleast_2d(each).astype(np.float64)[:MAX_CHANNELS] for each in values]
    low, high = charts.find_range(channels)
    pictures = [
        charts.draw_signal(each.tolist(), low, high, f"Input {sample.number}")
        for sample, each in zip(facts.inputs, channels, strict=True)
    ]
    return {"kind": "signals", "remark": " ".join(remarks), "pictures": pictures}


def features(facts: Facts) -> Context:
    """Say how far the features are from home, and why there is no estimate, for the specialist."""
    tap = facts.taps[0]
    after = None if facts.after is None else format_number(facts.after.divergence)
    clear = None if tap.clear_after is None else str(tap.clear_after)
    return {
        "statement": state_verdict(facts),
        "tiles": [
            ("distance from home", _write_both(format_number(facts.before.divergence), after)),
            (f"clearly shifted features, of {tap.units:,}", _write_both(str(tap.clear_before), clear)),
        ],
        "reasons": _list_reasons(facts),
    }


def _list_reasons(facts: Facts) -> list[tuple[str, str]]:
    """List in full why estimates are invalid and why candidates failed."""
    estimates = facts.estimates
    told = [] if estimates is None else [("before", estimates.before)]
    if estimates is not None and not has_one_model(facts):
        told.append(("after", estimates.after))
    mending = facts.mending
    candidates = () if mending is None else mending.candidates
    told += [(name_candidate(one.name), one.estimate) for one in candidates]
    reasons = [(name, reason) for name, estimate in told if estimate is not None for reason in estimate.reasons]
    reasons += [(name_candidate(one.name), one.failure) for one in candidates if one.failure is not None]
    return list(dict.fromkeys(reasons))


def shift(facts: Facts) -> Context:
    """Show where in the network the shift is: each tap, and its worst units."""
    mended = facts.after is not None
    detailed = _pick_taps(facts.taps)
    return {
        "detailed": [(tap, _pick_units(tap, mended)) for tap in detailed],
        "left_out": len(facts.taps) - len(detailed),
        "explained": EXPLAINED_TAPS,
        "drawn_units": DRAWN_UNITS,
        "listed_units": LISTED_UNITS,
        "describe_unit": _describe_unit,
        "sort_keys": _sort_keys,
    }


def _pick_taps(taps: Sequence[TapShift]) -> list[TapShift]:
    """Pick all taps, or, if there are many, `features`, `logits` and the others that are farthest from home."""
    own = [tap for tap in taps if tap.name in EXPLAINED_TAPS]
    others = [tap for tap in taps if tap.name not in EXPLAINED_TAPS]

    def distance(tap: TapShift) -> float:
        return _sortable(tap.mean_before if tap.mean_after is None else tap.mean_after)

    chosen = own + sorted(others, key=distance, reverse=True)[: DETAILED_TAPS - len(own)]
    return [tap for tap in taps if tap in chosen]


def _pick_units(tap: TapShift, mended: bool) -> list[Unit]:
    """Pick the units that come first in any sort order of the page, sorted by distance before mending."""
    orders = ["before", "after", "gain"] if mended else ["before"]
    keys = {unit.number: _sort_keys(unit) for unit in tap.worst}
    chosen = {
        unit.number: unit
        for order in orders
        for unit in sorted(tap.worst, key=lambda unit: -keys[unit.number][order])[:DRAWN_UNITS]
    }
    return sorted(chosen.values(), key=lambda unit: (-keys[unit.number]["before"], unit.number))


def _sort_keys(unit: Unit) -> dict[str, float]:
    """Return the values by which the script of the page sorts a unit."""
    last = unit.after if unit.after is not None else unit.before
    gain = unit.before.divergence - last.divergence
    return {
        "before": _sortable(unit.before.divergence),
        "after": _sortable(last.divergence),
        "gain": gain if math.isfinite(gain) else -1e308,
        "outside": last.outside,
    }


def _sortable(value: float) -> float:
    return value if math.isfinite(value) else 1e308


def _describe_unit(unit: Unit) -> str:
    """Describe in words how far a unit is from home, and in which direction it moved."""
    words = f"Distance {format_number(unit.before.divergence)}"
    if unit.after is None:
        return f"{words}: {_describe_change(unit.before)}."
    return f"{words} before, {format_number(unit.after.divergence)} after. Before: {_describe_change(unit.before)}."


def _describe_change(values: Distribution) -> str:
    if not math.isfinite(values.divergence):
        return "some values are not finite"
    ways = []
    if abs(values.moved) > 0.05:
        ways.append("higher" if values.moved > 0 else "lower")
    if not 0.8 < values.spread < 1.25:
        ways.append("spread wider" if values.spread > 1 else "bunched together")
    way = f"values are {' and '.join(ways)}" if ways else "mean and spread are as at home, the shape is not"
    return way + (f", {format_percent(values.outside)} beyond the range at home" if values.outside >= 0.01 else "")


def training(facts: Facts) -> Context | None:
    """Show the progress of mending, epoch by epoch."""
    mending = facts.mending
    if mending is None or len(mending.history) < 2:
        return None
    rows = mending.history
    releases = [
        (before.epoch, row.block) for before, row in pairwise(rows) if row.block != before.block and before.epoch > 0
    ]
    distances = [(float(row.epoch), row.verification) for row in rows if row.verification is not None]
    losses = [(float(row.epoch), row.loss) for row in rows if row.loss is not None]
    if not distances and not losses:
        return None
    return {
        "epochs": rows[-1].epoch,
        "releases": [epoch for epoch, _ in releases],
        "blocks": list(dict.fromkeys([rows[1].block, *(name for _, name in releases)])) if releases else [],
        "distances": distances,
        "losses": losses,
    }


def predictions(facts: Facts) -> Context:
    """Show the predictions before and after: classes, confidence, changes."""
    made = facts.predictions
    if made is None:
        return {"shown": []}
    last = made.after or made.before
    by_count = sorted(range(len(last.counts)), key=lambda k: (-max(made.before.counts[k], last.counts[k]), k))
    states: dict[str, ModelPredictions] = {"before": made.before} | ({"after": made.after} if made.after else {})
    home = () if facts.rehearsal is None else tuple(facts.rehearsal.shares.tolist())
    home = home if len(home) == len(last.counts) else ()
    most = max(max(each.counts) for each in states.values()) or 1
    total = max(1, sum(made.before.counts))
    return {
        "shown": sorted(by_count[:SHOWN_CLASSES]),
        "left_out": len(by_count[SHOWN_CLASSES:]),
        "states": states,
        "total": total,
        "most": max(most, *(total * share for share in home)) if home else most,
        "home": home,
        "calibrated_by": _find_calibration(facts),
    }


def _find_calibration(facts: Facts) -> Literal["estimate", "home"] | None:
    """Return what the probabilities of the mended model were calibrated to; None if they were not."""
    calibration = None if facts.mending is None else facts.mending.manifest.get("calibration")
    if not isinstance(calibration, dict) or "temperature" not in calibration:
        return None
    return "home" if calibration.get("by") == "home" else "estimate"


def scores(facts: Facts) -> Context | None:
    """Show scores from labels, if there are any."""
    before, after = facts.scores_before, facts.scores_after
    if before is None:
        return None
    columns = [_list_scores(found) for found in (before, after) if found is not None]
    heads = ["before", "after"] if after is not None else ["here"]
    estimates = _list_estimates(facts, len(columns))
    reliability = None
    if isinstance(before, Scores):
        reliability = charts.draw_reliability(
            before.reliability, after.reliability if isinstance(after, Scores) else None
        )
    return {
        "heads": heads,
        "rows": [*estimates, *((name, [column[name] for column in columns]) for name in columns[0])],
        "few": before.samples < MIN_LABELS,
        "labelled": before.samples,
        "reliability": reliability,
        "used_labels": facts.mending is not None and facts.mending.method_class.takes_labels,
    }


def _list_estimates(facts: Facts, columns: int) -> list[tuple[str, list[str]]]:
    """Return the row of estimates beside the scores."""
    estimates = facts.estimates
    if estimates is None or estimates.before is None:
        return []
    told = [estimates.before, estimates.after][:columns]
    words = ["–" if each is None else write_estimate(each, 1) for each in told]
    return [(f"{estimates.before.metric}, estimated without labels", words)]


def _list_scores(found: Scores | RegressionScores) -> dict[str, str]:
    """Return each score under a description of what it measures."""
    if isinstance(found, Scores):
        areas = {} if found.mean_iou is None else {"mean IoU: overlap of true and predicted areas": found.mean_iou}
        shares = {
            "accuracy: right answers": found.accuracy,
            "calibration error: mean gap between confidence and accuracy": found.ece,
            "largest such gap": found.mce,
            **areas,
        }
        return {name: format_percent(value, 1) for name, value in shares.items()}
    several = f", of {len(found.quantities)} quantities" if found.quantities else ""
    explained = {} if found.r2 is None else {f"R²: 1 is perfect, 0 no better than the mean{several}": f"{found.r2:.3f}"}
    return {
        f"mean absolute error{several}": f"{found.mean_absolute_error:.4g}",
        f"root mean square error{several}": f"{found.root_mean_square_error:.4g}",
        **explained,
    }


def stored(facts: Facts) -> Context:
    """List the contents of the profile."""
    home = facts.home
    taps = {
        f"tap “{name}”": f"{counted(units, 'unit')} at {where}"
        + (f", {constant:,} of them constant" if constant else "")
        for name, (where, units, constant) in home.taps.items()
    }
    slices = ", ".join(f"{count} for {name}" for name, count in home.slices.items())
    return {
        "rows": {
            "samples at home": f"{home.samples:,}",
            **taps,
            "each unit": f"lowest and highest value, and the number of values in each bin ({home.bins})",
            "features": f"{home.moments}, and the same counts for random mixtures of them: {slices}",
            "inputs": f"{home.inputs}, and mean and spread of each channel",
            "preset": home.preset,
            "made with": f"shiftmend {home.library}",
            "belongs to weights": home.weights,
            "size": f"{home.size:,} bytes",
        }
    }


def run(facts: Facts) -> Context:
    """List what was run, from the manifest."""
    mending = facts.mending
    if mending is None:
        return {"rows": {}}
    manifest = mending.manifest
    target, environment = (
        entry if isinstance(entry := manifest.get(name), dict) else {} for name in ("target", "environment")
    )
    options = {name: value for name, value in manifest["method"].items() if name != "name" and value is not None}
    rows = {
        "method": mending.method,
        "its options": ", ".join(f"{name} {_format_option(value)}" for name, value in options.items()),
        "learning rate chosen": manifest.get("learning_rate_chosen"),
        f"{mending.unit}s": manifest.get("epochs"),
        "training steps": manifest.get("steps"),
        "kept": f"{mending.unit} {mending.kept}, "
        + ("chosen without labels" if manifest["kept"] == "selected" else "the last one"),
        "ended": manifest["status"],
        "adapted to": counted(target["samples"], "input") if is_whole(target.get("samples")) else None,
        "judged on": {
            True: "the same inputs that were adapted to, which the verdict takes into account",
            False: "other inputs than those that were adapted to",
            None: "inputs that may or may not have been adapted to",
        }[mending.same_data],
        "batch size": manifest.get("batch_size"),
        "seed": manifest.get("seed"),
        "probabilities": _describe_calibration(manifest.get("calibration")),
        "seconds": manifest.get("seconds"),
        "versions": ", ".join(f"{name} {value}" for name, value in environment.items() if name != "platform"),
    }
    return {
        "rows": {name: str(value) for name, value in rows.items() if value not in (None, "")},
        "manifest": json.dumps(manifest, indent=1, ensure_ascii=False, default=str),
    }


def _describe_calibration(calibration: Any) -> str | None:
    if not isinstance(calibration, dict):
        return None
    if "refused" in calibration:
        return f"not adjusted: {calibration['refused']}"
    to = "the labels at home" if calibration.get("by") == "home" else "the estimate"
    return f"calibrated to {to} by a temperature of {_format_option(calibration.get('temperature'))}"


def _format_option(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}" if math.isfinite(value) else str(value)
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def undo(facts: Facts) -> Context:
    """Say how to go back to the original model."""
    return {}


Section = Callable[[Facts], Context | None]

SECTIONS: tuple[Section, ...] = (answer, changed, tried, rehearsed, scores, inputs, predictions, undo)
"""Sections for all readers."""

SPECIALIST: tuple[Section, ...] = (features, shift, training, stored, run)
"""Sections for specialists, folded."""
