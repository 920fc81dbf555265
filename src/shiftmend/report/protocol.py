"""The sections on how it came about: what is known of the source, what was run, how to undo it."""

from __future__ import annotations

import json
import math
from typing import Any

from shiftmend.report.facts import Facts
from shiftmend.report.markup import Markup, element, join
from shiftmend.utils.checks import counted


def _rows(rows: list[tuple[str, str]]) -> Markup:
    body = element(
        "tbody", *(element("tr", element("th", name, scope="row"), element("td", value)) for name, value in rows)
    )
    return element("div", element("table", body, class_="facts"), class_="scroll")


def stored(facts: Facts) -> Markup:
    home = facts.home
    rows = [
        ("samples at home", f"{home.samples:,}"),
        *(
            (
                f"tap “{name}”",
                f"{counted(units, 'unit')} at {where}" + (f", {constant:,} of them constant" if constant else ""),
            )
            for name, (where, units, constant) in home.taps.items()
        ),
        ("of every unit", f"its lowest and highest value, and how many values fell into each bin ({home.bins})"),
        (
            "of the features",
            f"their {home.moments}, and the same counts for random mixtures of them:"
            f" {', '.join(f'{count} for {name}' for name, count in home.slices.items())}",
        ),
        ("of the inputs", f"{home.inputs}, and their mean and spread by channel"),
        ("preset", home.preset),
        ("made with", f"shiftmend {home.library}"),
        ("belongs to weights", home.weights),
        ("size", f"{home.size:,} bytes"),
    ]
    return element(
        "section",
        element("h2", "What was stored about the source"),
        element(
            "p",
            "All that is known here about home is the profile, a small file of counts. It holds no input and no "
            "label; the lowest and highest value of each unit are all in it that comes from single samples.",
        ),
        _rows(rows),
        id="stored",
    )


def run(facts: Facts) -> Markup:
    mending = facts.mending
    if mending is None:
        return element(
            "section",
            element("h2", "What was run"),
            element("p", "Nothing was changed: the model was run over the data, once, as it is."),
            id="run",
        )
    manifest = mending.manifest
    target, environment = _table_of(manifest, "target"), _table_of(manifest, "environment")
    options = {name: value for name, value in manifest["method"].items() if name != "name" and value is not None}
    judged = {
        True: "the very inputs that were adapted to, which the verdict allows for",
        False: "other inputs than those that were adapted to",
        None: "it is not known whether these inputs were adapted to",
    }[mending.same_data]
    rows: list[tuple[str, Any]] = [
        ("method", mending.method),
        ("its options", ", ".join(f"{name} {_plain(value)}" for name, value in options.items())),
        ("learning rate chosen", manifest.get("learning_rate_chosen")),
        ("epochs", manifest.get("epochs")),
        (
            "kept",
            f"epoch {mending.kept}, {'chosen without labels' if manifest['kept'] == 'selected' else 'the last one'}",
        ),
        ("ended", manifest["status"]),
        ("adapted to", counted(target["samples"], "input") if type(target.get("samples")) is int else None),
        ("judged on", judged),
        ("batch size", manifest.get("batch_size")),
        ("seed", manifest.get("seed")),
        ("seconds", manifest.get("seconds")),
        ("versions", ", ".join(f"{name} {value}" for name, value in environment.items() if name != "platform")),
    ]
    return element(
        "section",
        element("h2", "What was run"),
        _rows([(name, str(value)) for name, value in rows if value not in (None, "")]),
        element(
            "details",
            element("summary", "The whole protocol (manifest)"),
            element("pre", json.dumps(manifest, indent=1, ensure_ascii=False, default=str), tabindex="0"),
        ),
        id="run",
    )


def _table_of(manifest: dict[str, Any], name: str) -> dict[str, Any]:
    """An entry of a manifest, which may be anything."""
    entry = manifest.get(name)
    return entry if isinstance(entry, dict) else {}


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}" if math.isfinite(value) else str(value)
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def undo(facts: Facts) -> Markup:
    if facts.mending is None:
        text = join("There is nothing to undo. The model was only looked at.")
    else:
        original = element("code", facts.original) if facts.original else "the weights that you loaded before"
        mended = (
            join("in ", element("code", facts.mending.file))
            if facts.mending.file
            else join("in memory; ", element("code", "adaptation.save(folder)"), " writes it")
        )
        text = join(
            "Adapting works on a copy: the original model is untouched. The mended model is ",
            mended,
            ". To go back, load ",
            original,
            " again.",
        )
    return element("section", element("h2", "How to undo it"), element("p", text), id="undo")
