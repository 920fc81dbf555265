"""The section on where in the network the shift is: each tap, its units worst first, and how the worst are spread."""

from __future__ import annotations

import math

from shiftmend.report import charts
from shiftmend.report.facts import Facts, Seen, TapShift, Unit
from shiftmend.report.markup import Markup, Part, element, join
from shiftmend.report.verdicts import number, percent
from shiftmend.utils.checks import counted

DRAWN = 6
"""Units of a tap whose distributions are drawn; so many of the worst before, and of the worst after."""


LISTED = 30


MOST_TAPS = 12
"""Taps that are shown in detail: the page stays small however many there are."""


EXPLAINED = {
    "features": "what the last layer reads: the network’s summary of an input",
    "logits": "what the last layer writes: one score for each answer",
}


def section(facts: Facts) -> Markup:
    mended = facts.after is not None
    detailed = _detailed(facts)
    left_out = len(facts.taps) - len(detailed)
    return element(
        "section",
        element("h2", "Where in the network the shift is"),
        element(
            "p",
            "The profile was taken at a few places inside the network, called taps. At each of them the network gives "
            "many numbers, called units, for every input. Each unit is compared with its own distribution at home. A "
            "distance of 0 means the same distribution; the larger, the less of it overlaps.",
        ),
        _overview(facts),
        legend(mended),
        *(_tap(tap, place, mended) for place, tap in enumerate(detailed)),
        element("p", f"{left_out} more taps, nearer to home, are in the table alone.", class_="note")
        if left_out
        else None,
        id="shift",
    )


def _detailed(facts: Facts) -> list[TapShift]:
    """All taps, or where there are many the model's own two and the farthest from home of the others."""
    own = [tap for tap in facts.taps if tap.name in EXPLAINED]
    others = [tap for tap in facts.taps if tap.name not in EXPLAINED]

    def distance(tap: TapShift) -> float:
        return -_sortable(tap.mean_before if tap.mean_after is None else tap.mean_after)

    chosen = own + sorted(others, key=distance)[: MOST_TAPS - len(own)]
    return [tap for tap in facts.taps if tap in chosen]


def legend(mended: bool, home: bool = True) -> Markup:
    """What the colours mean; with scripts, boxes that hide and show either model."""
    kinds = (["home"] if home else []) + ["before"] + (["after"] if mended else [])
    words = {
        "home": "at home (source)",
        "before": "here, before mending" if mended else "here",
        "after": "here, after mending",
    }
    return element(
        "div",
        *(
            element(
                "label",
                None
                if kind == "home" or not mended
                else element("input", type="checkbox", checked=True, data_toggle=kind, data_controls=True, hidden=True),
                element("i", class_=f"key {kind}"),
                words[kind],
            )
            for kind in kinds
        ),
        class_="legend",
    )


def _overview(facts: Facts) -> Markup:
    mended = facts.after is not None
    heads = ["tap", "units", "mean distance here", "clearly shifted"]
    if mended:
        heads = ["tap", "units", "mean distance before", "after", "clearly shifted before", "after"]
    rows = []
    for tap in facts.taps:
        cells: list[Part] = [f"{tap.units:,}", number(tap.mean_before)]
        cells += [number(tap.mean_after)] if tap.mean_after is not None else []
        cells += [str(tap.clear_before)] + ([str(tap.clear_after)] if tap.clear_after is not None else [])
        rows.append(element("tr", element("td", tap.name, class_="name"), *(element("td", cell) for cell in cells)))
    table = element(
        "table",
        element("thead", element("tr", *(element("th", head) for head in heads))),
        element("tbody", *rows),
        class_="numbers",
    )
    return element(
        "figure",
        element("div", table, class_="scroll", tabindex="0", role="region", aria_label="Taps"),
        element(
            "figcaption",
            f"What to look for: {'whether' if mended else 'how large is'} the number of clearly shifted "
            f"units{' falls' if mended else ''}, those as far from home as would make the verdict “not restored”. "
            f"Chance alone would give a distance of about {number(facts.taps[0].floor)}.",
        ),
    )


def _tap(tap: TapShift, place: int, mended: bool) -> Markup:
    explained = f", {EXPLAINED[tap.name]}" if tap.name in EXPLAINED else ""
    constant = f" {tap.constant:,} more never varied at home and are left out." if tap.constant else ""
    group, drawn = f"units-{place}", f"drawn-{place}"
    return join(
        element("h3", f"Tap “{tap.name}”"),
        element(
            "p",
            "Taken at the layer ",
            element("code", tap.where),
            f"{explained}. {counted(tap.units, 'unit is', 'units are')} compared.{constant}",
            class_="note",
        ),
        element(
            "div",
            element(
                "figure",
                charts.ranks(tap.before, tap.after, tap.floor, f"Distance of all units of {tap.name} from home"),
                element(
                    "figcaption",
                    element("strong", "All units, worst first. "),
                    "What to look for: the solid blue line (after) well below the dashed orange one (before), and near "
                    "the dotted line, which is what chance gives."
                    if mended
                    else "What to look for: how many units lie well above the dotted line, which is what chance gives.",
                ),
            ),
            class_="beside",
        ),
        element("h4", "The worst units"),
        _sorting(drawn, mended),
        _drawn(tap, drawn, mended),
        element(
            "p",
            "What to look for: grey columns are how often each value occurred at home. Where the outline follows them, "
            "the unit is as at home; mass at either end is values that were never seen there.",
            class_="note",
        ),
        element(
            "details",
            element("summary", f"Numbers for the worst {counted(min(LISTED, tap.units), 'unit')}"),
            _sorting(group, mended, outside=True),
            _table(tap, group, mended),
        ),
    )


def _sorting(group: str, mended: bool, outside: bool = False) -> Part:
    """Buttons, shown by the script; without it the order is that of the distances before."""
    if not mended:
        return None
    keys = [("before", "before mending"), ("after", "after mending"), ("gain", "what improved most")]
    keys += [("outside", "beyond the range of home")] if outside else []
    return element(
        "div",
        "Worst first by: " if not outside else "Sort by: ",
        *(
            element(
                "button",
                words,
                type="button",
                data_sort=key,
                data_group=group,
                aria_pressed="true" if key == "before" else "false",
            )
            for key, words in keys
        ),
        class_="controls",
        data_controls=True,
        hidden=True,
    )


def _keys(unit: Unit) -> dict[str, str]:
    """What the script sorts by."""

    def plain(value: float) -> str:
        return f"{value:.6g}" if math.isfinite(value) else "1e308"

    last = unit.after if unit.after is not None else unit.before
    gain = unit.before.divergence - last.divergence
    return {
        "data_row": str(unit.number),
        "data_before": plain(unit.before.divergence),
        "data_after": plain(last.divergence),
        "data_gain": plain(gain) if math.isfinite(gain) else "-1e308",
        "data_outside": plain(last.outside),
    }


def _drawn(tap: TapShift, group: str, mended: bool) -> Markup:
    """Distributions of the units that are worst by any of the orders; only the first of them are shown at once."""
    orders = [sorted(tap.worst, key=lambda unit: -_sortable(unit.before.divergence))]
    if mended:
        after = [unit for unit in tap.worst if unit.after is not None]
        orders.append(sorted(after, key=lambda unit: -_sortable(unit.after.divergence if unit.after else 0)))
        orders.append(sorted(after, key=lambda unit: -float(_keys(unit)["data_gain"])))
    chosen = {unit.number: unit for order in orders for unit in order[:DRAWN]}
    units = sorted(chosen.values(), key=lambda unit: (-_sortable(unit.before.divergence), unit.number))
    figures = []
    for place, unit in enumerate(units):
        name = f"unit {unit.number} of {tap.name}"
        figures.append(
            element(
                "figure",
                charts.distribution(unit, name),
                element("figcaption", element("strong", f"Unit {unit.number}. "), _told(unit)),
                hidden=place >= DRAWN,
                **_keys(unit),
            )
        )
    return element("div", *figures, class_="charts", id=group, data_limit=str(DRAWN))


def _sortable(value: float) -> float:
    return value if math.isfinite(value) else 1e308


def _told(unit: Unit) -> str:
    """In words: how far, and which way."""
    words = f"Distance {number(unit.before.divergence)}"
    if unit.after is not None:
        words += f" before, {number(unit.after.divergence)} after"
    return f"{words}. Before: {_way(unit.before)}." if unit.after is not None else f"{words}: {_way(unit.before)}."


def _way(seen: Seen) -> str:
    if not math.isfinite(seen.divergence):
        return "some values are no finite numbers"
    ways = []
    if abs(seen.moved) > 0.05:
        ways.append("higher" if seen.moved > 0 else "lower")
    if not 0.8 < seen.spread < 1.25:
        ways.append("spread wider" if seen.spread > 1 else "bunched together")
    way = f"values are {' and '.join(ways)}" if ways else "values are about where they were, in another shape"
    return way + (f", {percent(seen.outside)} beyond the range at home" if seen.outside >= 0.01 else "")


def _table(tap: TapShift, group: str, mended: bool) -> Markup:
    heads = ["unit", "distance", "beyond the range of home", "moved by"]
    if mended:
        heads = ["unit", "before", "after", "beyond home’s range before", "after", "moved before", "after"]
    rows = []
    for place, unit in enumerate(tap.worst):
        both = [unit.before] + ([unit.after] if unit.after is not None else [])
        cells = [
            *(number(seen.divergence) for seen in both),
            *(percent(seen.outside, 1) for seen in both),
            *(f"{100 * seen.moved:+.0f}\u00a0% of range" if math.isfinite(seen.moved) else "–" for seen in both),
        ]
        rows.append(
            element(
                "tr",
                element("td", str(unit.number)),
                *(element("td", cell) for cell in cells),
                hidden=place >= LISTED,
                **_keys(unit),
            )
        )
    table = element(
        "table",
        element("thead", element("tr", *(element("th", head) for head in heads))),
        element("tbody", *rows, id=group, data_limit=str(LISTED)),
        class_="numbers",
    )
    return element(
        "div", table, class_="scroll tall", tabindex="0", role="region", aria_label=f"Worst units of {tap.name}"
    )
