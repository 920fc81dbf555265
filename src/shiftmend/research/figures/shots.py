"""How much target data a method needs: accuracy against examples per class (the paper's appendix on efficacy)."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shiftmend.errors import DataError
from shiftmend.research.bench import footnotes
from shiftmend.research.bench.benchmark import CLEAN, Result, Which
from shiftmend.research.bench.grids import METRICS, Grid
from shiftmend.research.bench.rendering import Entry
from shiftmend.research.figures import picking, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FEW = re.compile(r"few-shot-(\d+)")


ALL = math.inf
"""Examples per class of the protocol that uses all there are."""


def draw(
    results: Sequence[Result],
    methods: Sequence[str] | None = None,
    shifts: Sequence[str] | None = None,
    *,
    metric: str = "accuracy",
    which: Which = "last",
) -> Figure:
    """One line a method over the protocols `few-shot-N` and `offline`: mean over shifts, spread over seeds.

    A point needs a seed that has all of the shifts, so that all points are over the same ones. By default those of any
    of the results, and the methods that have at least two points.
    """
    wanted = [
        result
        for result in results
        if examples(result.cell.protocol) is not None and (shifts is not None or result.cell.shift != CLEAN)
    ]
    over = list(dict.fromkeys(shifts if shifts is not None else (result.cell.shift for result in wanted)))
    grids = {}
    for count in sorted({examples(result.cell.protocol) or ALL for result in wanted}):
        of_protocol = [result for result in wanted if examples(result.cell.protocol) == count]
        if any(
            not r.failed and r.cell.shift in over and (methods is None or r.cell.method in methods) for r in of_protocol
        ):
            grids[count] = picking.pick(of_protocol, methods, over, metric=metric, which=which)
    lines = _lines(grids, methods, over)
    if not any(lines.values()):
        raise DataError(
            "no seed of any method has all of these shifts in a protocol few-shot-N or offline; "
            f"run them, or name the shifts that are done (now {', '.join(over) or 'none'})"
        )
    return _figure(lines, grids, over, which)


def examples(protocol: str) -> float | None:
    """Examples per class, `ALL` for offline; None for protocols that have nothing of the kind."""
    found = _FEW.fullmatch(protocol)
    return float(found[1]) if found else ALL if protocol == "offline" else None


def _lines(
    grids: dict[float, Grid], methods: Sequence[str] | None, over: Sequence[str]
) -> dict[str, dict[float, Entry]]:
    lines: dict[str, dict[float, Entry]] = {}
    for name in picking.methods_in((result for grid in grids.values() for result in grid.results), methods):
        entries = {count: grid.mean(name, over) for count, grid in grids.items()}
        lines[name] = {
            count: entry for count, entry in entries.items() if entry.value is not None and math.isfinite(entry.value)
        }
    if methods is None and any(len(line) > 1 for line in lines.values()):
        return {name: line for name, line in lines.items() if len(line) > 1}
    return lines


def _figure(
    lines: dict[str, dict[float, Entry]],
    grids: dict[float, Grid],
    over: Sequence[str],
    which: Which,
) -> Figure:
    first = next(iter(grids.values()))
    counts = sorted({count for line in lines.values() for count in line})
    finite = [count for count in counts if count < ALL]
    # each doubling takes up the same room, and so does the step from the most examples to all
    places = {count: math.log2(count) for count in finite}
    if ALL in counts:
        places[ALL] = max(places.values(), default=0) + max(1.0, _typical_step(finite))
    figure, axes = style.canvas(1, 1, width=5.0, height=3.2)
    axis = axes[0, 0]
    room = 0.006 * (max(places.values()) - min(places.values()))
    lanes = {method: room * (lane - (len(lines) - 1) / 2) for lane, method in enumerate(lines)}  # so that spreads show
    for method, line in lines.items():
        _line(axis, method, line, {count: place + lanes[method] for count, place in places.items()})
    axis.set_xticks([places[count] for count in counts], ["all" if count == ALL else f"{count:g}" for count in counts])
    axis.margins(x=0.06)
    axis.grid(visible=False, axis="x")
    shown = METRICS[first.metric]
    unit = {"percent": ", %"}.get(shown.unit, f", {shown.unit}" if shown.unit else "")
    axis.set_xlabel("target examples per class", fontsize=style.LABEL)
    axis.set_ylabel(f"{shown.title}{unit}", fontsize=style.LABEL)
    named = style.words(over[0]) if len(over) == 1 else f"mean over {len(over)} shifts"
    style.title(figure, f"{first.benchmark}, {named}, {picking.MOMENTS[which]}")
    entries = [(method, _name(count), entry) for method, line in lines.items() for count, entry in line.items()]
    said = [note for note in footnotes.about_numbers(first, entries) if not note.endswith("percent")]
    lacking = [f"{method} ({_listed(line, counts)})" for method, line in lines.items() if set(line) != set(counts)]
    if lacking:
        said.append(f"no seed has all shifts: {', '.join(lacking)}")
    for grid in grids.values():
        of_lines = [result for result in grid.results if result.cell.method in lines]
        grid = replace(grid, results=of_lines, methods=list(lines))
        said += [note for note in picking.notes(grid, None, None) if note not in said]
    style.footer(figure, said)
    drawn = [(method, line) for method, line in lines.items() if line]
    ends = [
        (method, places[max(line)] + lanes[method], line[max(line)].value or 0.0, style.colour(method))
        for method, line in drawn
    ]
    style.label_ends(axis, ends)
    return figure


def _line(axis: Any, method: str, line: dict[float, Entry], places: dict[float, float]) -> None:
    shade, look = style.colour(method), {"linewidth": 1.4, "zorder": 2.5}
    known = sorted(line)
    few = [count for count in known if count < ALL]
    if few:
        axis.plot([places[count] for count in few], [line[count].value for count in few], color=shade, **look)
    if few and ALL in known:  # no number belongs to the way from here to all
        ends = [few[-1], ALL]
        axis.plot(
            [places[c] for c in ends], [line[c].value for c in ends], color=shade, linestyle=(0, (2, 1.5)), **look
        )
    for count in known:
        value, deviation = line[count].value or 0.0, line[count].deviation
        if deviation is not None:
            axis.plot([places[count]] * 2, [value - deviation, value + deviation], color=shade, linewidth=0.8)
    axis.plot(
        [places[count] for count in known],
        [line[count].value for count in known],
        **style.points(method, 5),
    )


def _typical_step(finite: Sequence[float]) -> float:
    steps = [math.log2(after / before) for before, after in itertools.pairwise(finite)]
    return sum(steps) / len(steps) if steps else 1.0


def _name(count: float) -> str:
    return "all" if count == ALL else f"{count:g} per class"


def _listed(line: dict[float, Entry], counts: Sequence[float]) -> str:
    return ", ".join(_name(count) for count in counts if count not in line)
