"""Figures of stored results: accuracy, calibration and restoration by method, shift, and number of examples."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shiftmend.errors import DataError
from shiftmend.methods import METHODS
from shiftmend.methods.shot import SHOT
from shiftmend.methods.source_only import SourceOnly
from shiftmend.research.analysis.comparisons import index_by_place
from shiftmend.research.analysis.correlations import restoration_and_calibration
from shiftmend.research.bench import footnotes
from shiftmend.research.bench.benchmark import CLEAN, Result, Which, is_clean, sees_labels
from shiftmend.research.bench.grids import METRICS, Beside, Grid
from shiftmend.research.bench.rendering import Entry
from shiftmend.research.figures import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOMENTS = {
    "last": "after the last epoch",
    "best": "at the best epoch, an oracle",
    "selected": "at the epoch selected without labels",
}


# ---- which results are drawn, and what the foot of a figure says about them


def select(
    results: Iterable[Result],
    methods: Sequence[str] | None = None,
    shifts: Sequence[str] | None = None,
    *,
    metric: str = "accuracy",
    which: Which = "last",
    beside: Beside | None = None,
) -> Grid:
    """Select the results of these methods and shifts, by default of all but clean images.

    Methods and shifts without a finished result are left out; `list_notes` names them.

    Raises:
        DataError: if no result is left, or if the results are of several benchmarks or protocols.
    """
    wanted = [
        result
        for result in results
        if (methods is None or result.cell.method in methods)
        and (not is_clean(result.cell.shift) if shifts is None else result.cell.shift in shifts)
    ]
    finished = index_by_place(wanted)
    if not finished:
        chosen = [f"of {', '.join(methods)}"] if methods is not None else []
        chosen += [f"on {', '.join(shifts)}"] if shifts is not None else []
        failed = f", {len(wanted)} failed" if wanted else ""
        what = " ".join(["results", *chosen])
        raise DataError(f"Expected {what}, got no finished result{failed}. Try shiftmend bench run, or other methods.")
    tables = sorted({(cell.benchmark, cell.protocol) for cell in finished})
    if len(tables) > 1:
        names = ", ".join(f"{benchmark} ({protocol})" for benchmark, protocol in tables)
        raise DataError(f"Expected results of one benchmark and protocol, got several tables: {names}.")
    done = {name for cell in finished for name in (cell.method, cell.shift)}
    return Grid(
        results=wanted,
        benchmark=tables[0][0],
        protocol=tables[0][1],
        methods=[name for name in order_methods(wanted, methods) if name in done],
        shifts=[name for name in dict.fromkeys(shifts or (result.cell.shift for result in wanted)) if name in done],
        metric=metric,
        which=which,
        beside=beside,
    )


def order_methods(results: Iterable[Result], asked: Sequence[str] | None) -> list[str]:
    """Return the methods asked for, or all: first in the library's order, then the variants named by benchmarks."""
    if asked is not None:
        return list(dict.fromkeys(asked))
    found = dict.fromkeys(result.cell.method for result in results)
    return [name for name in METHODS if name in found] + [name for name in found if name not in METHODS]


def list_notes(
    grid: Grid, methods: Sequence[str] | None, shifts: Sequence[str] | None, *, marked: bool = False
) -> list[str]:
    """List the origins of data, the failed cells, and the missing methods and shifts of `select`.

    `marked` is for figures that show `footnotes.origin_marks` beside the names of shifts.
    """
    asked = [*order_methods(grid.results, methods), *(shifts or (result.cell.shift for result in grid.results))]
    lacking = [name for name in dict.fromkeys(asked) if name not in (*grid.methods, *grid.shifts)]
    origins = [style.to_words(note if marked else note.partition(" ")[2]) for note in footnotes.about_origins(grid)]
    whole = replace(
        grid,
        methods=list({result.cell.method: None for result in grid.results}),
        shifts=list({result.cell.shift: None for result in grid.results}),
    )
    missing = [f"no finished result: {', '.join(lacking)}"] if lacking else []
    remarks = footnotes.source_remarks(grid.cells.values())
    mixtures = footnotes.about_mixtures(grid.cells.values())
    return [*remarks, *origins, *mixtures, *footnotes.about_failures(whole), *missing]


def _count(number: int, what: str) -> str:
    return f"one {what}" if number == 1 else f"{number} {what}s"


# ---- accuracy and calibration error by shift and method

_METRIC_NAMES = {"accuracy": "accuracy, %", "ece": "expected calibration error, %"}

_BAND = 0.76
"""Share of a row's height that the lanes of its methods take up."""


def draw_dots(
    results: Sequence[Result],
    methods: Sequence[str] | None = None,
    shifts: Sequence[str] | None = None,
    *,
    which: Which = "last",
    beside: Beside | None = None,
) -> Figure:
    """Draw accuracy and calibration error of every method on every shift.

    A row is a shift and has a lane for each method: the mean over seeds, and a thin line of one standard deviation.

    Args:
        results: results of one benchmark and protocol.
        methods: the methods to draw, all by default.
        shifts: the shifts in their order; by default all, sorted by the accuracy of the first method.
        which: the epoch whose scores count: last, best or selected.
        beside: whose published figures to add as hollow markers.
    """
    grids = [select(results, methods, shifts, metric=metric, which=which, beside=beside) for metric in _METRIC_NAMES]
    rows = list(grids[0].shifts) if shifts is not None else _sort_by_accuracy(grids[0])
    lanes = len(grids[0].methods)
    height = 1.1 + 0.17 * math.ceil(lanes / 6) + max(0.8, len(rows) * (0.14 + 0.06 * lanes))
    figure, axes = style.make_canvas(1, 2, width=3.6, height=height, sharey=True)
    entries: list[tuple[str, str, Entry]] = []
    found = False
    for axis, grid in zip(axes[0], grids, strict=True):
        compared = grid.comparisons({shift: (shift,) for shift in rows})
        for lane, method in enumerate(grid.methods):
            places = [row + _BAND * ((lane + 0.5) / lanes - 0.5) for row in range(len(rows))]
            _draw_lane(axis, method, [compared[method, shift][0] for shift in rows], places)
            found |= _draw_published(axis, method, [compared[method, shift][1] for shift in rows], places)
        if grid.metric == "accuracy":
            entries = [(method, shift, entry) for (method, shift), (entry, _, _) in compared.items()]
        for row in range(0, len(rows), 2):
            axis.axhspan(row - 0.5, row + 0.5, color="#f2f2f2", zorder=0, linewidth=0)
        axis.set_xlabel(_METRIC_NAMES[grid.metric], fontsize=style.LABEL)
        axis.grid(visible=False, axis="y")
        axis.tick_params(axis="y", length=0)
    axes[0, 0].set_xlim(0, 100)
    axes[0, 1].set_xlim(0, min(100, axes[0, 1].get_xlim()[1]))
    axes[0, 0].set_ylim(len(rows) - 0.5, -0.5)
    names = [f"{style.to_words(shift)} {footnotes.origin_marks(grids[0], [shift])}".strip() for shift in rows]
    axes[0, 0].set_yticks(range(len(rows)), names)
    handles = dict(zip(*reversed(axes[0, 0].get_legend_handles_labels()), strict=True))
    shown = [method for method in handles if method in grids[0].methods]
    title = f"{grids[0].benchmark} ({grids[0].protocol}), {MOMENTS[which]}"
    style.add_legend(figure, title, ([handles[method] for method in shown], shown), 6)
    notes = [note for note in footnotes.about_numbers(grids[0], entries)[1:] if note != footnotes.PARTIAL]
    if shifts is None:
        notes.append(f"shifts sorted by the accuracy of {grids[0].methods[0]}")
    notes += footnotes.about_published(grids[0], found)[: 0 if found else 1]
    notes += [f"hollow: {'the paper' if beside == 'paper' else 'the re-run of the released code'}"] if found else []
    notes += [footnotes.STREAM.partition(":")[0]] if found and any(grid.unlike for grid in grids) else []
    style.add_footer(figure, [*notes, *list_notes(grids[0], methods, shifts, marked=True)])
    return figure


def _sort_by_accuracy(grid: Grid) -> list[str]:
    def accuracy(shift: str) -> float:
        value = grid.mean(grid.methods[0], [shift]).value
        return -math.inf if value is None or math.isnan(value) else value

    return sorted(grid.shifts, key=accuracy, reverse=True)


def _draw_lane(axis: Any, method: str, entries: Sequence[Entry], places: Sequence[float]) -> None:
    shown = _keep_finite(entries, places)
    for value, y, deviation in shown:
        if deviation is not None:
            axis.plot([value - deviation, value + deviation], [y, y], color=style.colour_of(method), linewidth=0.9)
    if shown:
        xs, ys, _ = zip(*shown, strict=True)
        axis.plot(xs, ys, clip_on=False, **style.point_style(method, 4.5))


def _draw_published(axis: Any, method: str, entries: Sequence[Entry], places: Sequence[float]) -> bool:
    """Draw published figures as hollow markers; return False if there are none."""
    shown = _keep_finite(entries, places)
    if shown:
        xs, ys, _ = zip(*shown, strict=True)
        shade = style.colour_of(method)
        hollow = {"markerfacecolor": "none", "markeredgecolor": shade, "markeredgewidth": 0.7, "zorder": 2}
        hollow["label"] = f"published {method}"
        axis.plot(xs, ys, clip_on=False, **style.point_style(method, 4.5) | hollow)
    return bool(shown)


def _keep_finite(entries: Sequence[Entry], places: Sequence[float]) -> list[tuple[float, float, float | None]]:
    """Return value, place and deviation of the entries that can be drawn."""
    pairs = zip(entries, places, strict=True)
    return [(e.value, y, e.deviation) for e, y in pairs if e.value is not None and math.isfinite(e.value)]


# ---- accuracy by number of examples

_FEW_SHOT = re.compile(r"few-shot-(\d+)")

ALL = math.inf
"""Number of examples per class of the protocol that uses all of them."""


def draw_shots(
    results: Sequence[Result],
    methods: Sequence[str] | None = None,
    shifts: Sequence[str] | None = None,
    *,
    metric: str = "accuracy",
    which: Which = "last",
) -> Figure:
    """Draw the accuracy against the number of examples per class (the paper's appendix).

    A line is a method over the protocols `few-shot-N` and `offline`: the mean over shifts, the spread over seeds. A
    point needs a seed that has all of the shifts, so that all points are over the same shifts. By default these are
    the shifts of any result, and the methods with at least two points.
    """
    wanted = [
        result
        for result in results
        if examples_per_class(result.cell.protocol) is not None
        and (shifts is not None or not is_clean(result.cell.shift))
    ]
    over = list(dict.fromkeys(shifts if shifts is not None else (result.cell.shift for result in wanted)))
    grids = {}
    for count in sorted({examples_per_class(result.cell.protocol) or ALL for result in wanted}):
        of_protocol = [result for result in wanted if examples_per_class(result.cell.protocol) == count]
        if any(
            not r.failed and r.cell.shift in over and (methods is None or r.cell.method in methods) for r in of_protocol
        ):
            grids[count] = select(of_protocol, methods, over, metric=metric, which=which)
    lines = _average_by_count(grids, methods, over)
    if not any(lines.values()):
        raise DataError(
            f"Expected a seed with all shifts ({', '.join(over) or 'none'}) in few-shot-N or offline, got no seed. "
            "Try fewer shifts."
        )
    return _draw_shot_lines(lines, grids, over, which)


def examples_per_class(protocol: str) -> float | None:
    """Return the examples per class of a protocol, `ALL` for offline; None for any other protocol."""
    found = _FEW_SHOT.fullmatch(protocol)
    return float(found[1]) if found else ALL if protocol == "offline" else None


def _average_by_count(
    grids: Mapping[float, Grid], methods: Sequence[str] | None, over: Sequence[str]
) -> dict[str, dict[float, Entry]]:
    lines: dict[str, dict[float, Entry]] = {}
    for name in order_methods((result for grid in grids.values() for result in grid.results), methods):
        entries = {count: grid.mean(name, over) for count, grid in grids.items()}
        lines[name] = {
            count: entry for count, entry in entries.items() if entry.value is not None and math.isfinite(entry.value)
        }
    if methods is None and any(len(line) > 1 for line in lines.values()):
        return {name: line for name, line in lines.items() if len(line) > 1}
    return lines


def _draw_shot_lines(
    lines: Mapping[str, dict[float, Entry]], grids: Mapping[float, Grid], over: Sequence[str], which: Which
) -> Figure:
    first = next(iter(grids.values()))
    counts = sorted({count for line in lines.values() for count in line})
    finite = [count for count in counts if count < ALL]
    # Each doubling takes up the same room, and so does the step from the most examples to all.
    places = {count: math.log2(count) for count in finite}
    if ALL in counts:
        steps = [math.log2(after / before) for before, after in itertools.pairwise(finite)]
        typical = sum(steps) / len(steps) if steps else 1.0
        places[ALL] = max(places.values(), default=0) + max(1.0, typical)
    figure, axes = style.make_canvas(1, 1, width=5.0, height=3.2)
    axis = axes[0, 0]
    room = 0.006 * (max(places.values()) - min(places.values()))
    # Lines are offset horizontally, so that all error bars are visible.
    lanes = {method: room * (lane - (len(lines) - 1) / 2) for lane, method in enumerate(lines)}
    for method, line in lines.items():
        _draw_shot_line(axis, method, line, {count: place + lanes[method] for count, place in places.items()})
    axis.set_xticks([places[count] for count in counts], ["all" if count == ALL else f"{count:g}" for count in counts])
    axis.margins(x=0.06)
    axis.grid(visible=False, axis="x")
    shown = METRICS[first.metric]
    unit = {"percent": ", %"}.get(shown.unit, f", {shown.unit}" if shown.unit else "")
    axis.set_xlabel("target examples per class", fontsize=style.LABEL)
    axis.set_ylabel(f"{shown.title}{unit}", fontsize=style.LABEL)
    named = style.to_words(over[0]) if len(over) == 1 else f"mean over {len(over)} shifts"
    style.add_title(figure, f"{first.benchmark}, {named}, {MOMENTS[which]}")

    def name(count: float) -> str:
        return "all" if count == ALL else f"{count:g} per class"

    entries = [(method, name(count), entry) for method, line in lines.items() for count, entry in line.items()]
    notes = [note for note in footnotes.about_numbers(first, entries) if not note.endswith("percent")]
    missing = {method: [name(count) for count in counts if count not in line] for method, line in lines.items()}
    lacking = [f"{method} ({', '.join(names)})" for method, names in missing.items() if names]
    if lacking:
        notes.append(f"no seed has all shifts: {', '.join(lacking)}")
    for grid in grids.values():
        of_lines = [result for result in grid.results if result.cell.method in lines]
        grid = replace(grid, results=of_lines, methods=list(lines))
        notes += [note for note in list_notes(grid, None, None) if note not in notes]
    style.add_footer(figure, notes)
    ends = [
        (method, places[max(line)] + lanes[method], line[max(line)].value or 0.0, style.colour_of(method))
        for method, line in lines.items()
        if line
    ]
    style.label_ends(axis, ends)
    return figure


def _draw_shot_line(axis: Any, method: str, line: Mapping[float, Entry], places: Mapping[float, float]) -> None:
    shade, look = style.colour_of(method), {"linewidth": 1.4, "zorder": 2.5}
    known = sorted(line)
    few = [count for count in known if count < ALL]
    if few:
        axis.plot([places[count] for count in few], [line[count].value for count in few], color=shade, **look)
    if few and ALL in known:
        # Dashed, because there is no number of examples between the largest and all.
        ends = [few[-1], ALL]
        dashes = (0, (2, 1.5))
        axis.plot([places[c] for c in ends], [line[c].value for c in ends], color=shade, linestyle=dashes, **look)
    for count in known:
        value, deviation = line[count].value or 0.0, line[count].deviation
        if deviation is not None:
            axis.plot([places[count]] * 2, [value - deviation, value + deviation], color=shade, linewidth=0.8)
    points = style.point_style(method, 5)
    axis.plot([places[count] for count in known], [line[count].value for count in known], **points)


# ---- restoration and calibration


def draw_restoration(
    results: Sequence[Result],
    methods: Sequence[str] | None = None,
    shifts: Sequence[str] | None = None,
    *,
    which: Which = "last",
    exclude: Collection[str] = (SHOT.name,),
    variants: Collection[str] = (),
) -> Figure:
    """Draw restoration distance against calibration error, a point for each method (the paper's section 5.5).

    Means are over the shifts and seeds that all methods have. The title has Spearman's rank correlation.

    Args:
        results: results of one benchmark and protocol.
        methods: the methods to draw, all by default. Methods named here are drawn in any case.
        shifts: the shifts to average over, all by default.
        which: the epoch whose scores count: last, best or selected.
        exclude: methods with a source model of their own, whose features differ to begin with.
        variants: methods that are left out where they share no shift and seed with the others.
    """
    grid = select(results, methods, shifts, which=which)
    labelled = [method for method in grid.methods if sees_labels(method)]
    left_out = {method for method in (*exclude, *labelled) if methods is None or method not in methods}
    dispensable = [method for method in variants if methods is None or method not in methods]
    found = restoration_and_calibration(grid.cells.values(), which, left_out, dispensable)
    points = {method: point for method, point in found.means.items() if all(map(math.isfinite, point))}
    if not points:
        raise DataError(
            f"Expected finite restoration distances, got none: {found.correlation.remark or 'all are infinite'}. "
            "Try fewer methods, or a benchmark with clean images."
        )
    figure, axes = style.make_canvas(1, 1, width=4.6, height=3.2)
    axis = axes[0, 0]
    for method, (distance, ece) in points.items():
        axis.plot([distance], [100 * ece], **style.point_style(method, 7))
    axis.margins(0.15)
    axis.set_xlim(left=max(0, axis.get_xlim()[0]))
    axis.set_ylim(bottom=max(0, axis.get_ylim()[0]))
    axis.set_xlabel("restoration distance (mean absolute difference of features)", fontsize=style.LABEL)
    axis.set_ylabel("expected calibration error, %", fontsize=style.LABEL)
    value, remark = found.correlation.value, found.correlation.remark
    told = f"no rank correlation: {remark}" if value is None else f"Spearman's rank correlation {value:.2f}"
    style.add_title(figure, f"{grid.benchmark} ({grid.protocol}), {MOMENTS[which]}: {told}")
    seeds = len({seed for _, _, seed in grid.cells})
    size = f"{_count(len(grid.shifts), 'shift')}, {_count(seeds, 'seed')}"
    pairs = _count(found.places, "pair")
    notes = [f"means over {pairs} of shift and seed, those that all of these methods have done, of {size}"]
    not_drawn = {
        "with a source model of its own": [m for m in grid.methods if m in left_out and m not in labelled],
        "trained with labels": [m for m in labelled if m in left_out],
        "for lack of common seeds": list(found.without),
        "without a finite restoration distance": [
            m for m in grid.methods if m not in (*points, *left_out, *found.without)
        ],
    }
    notes += [f"not drawn, {reason}: {', '.join(names)}" for reason, names in not_drawn.items() if names]
    style.add_footer(figure, [*notes, *list_notes(grid, methods, shifts)])
    named = [(method, distance, 100 * ece, style.colour_of(method)) for method, (distance, ece) in points.items()]
    style.label_points(axis, named)
    return figure


# ---- confidence and accuracy


@dataclass(frozen=True)
class ReliabilityBins:
    """Bins of confidence over several results: edges, images, and sums of confidence and of hits."""

    edges: NDArray[np.float64]
    counts: NDArray[np.float64]
    confidences: NDArray[np.float64]
    hits: NDArray[np.float64]

    @property
    def gaps(self) -> NDArray[np.float64]:
        """Return mean confidence minus accuracy of each bin; 0 for empty bins."""
        return (self.confidences - self.hits) / np.maximum(self.counts, 1)

    @property
    def ece(self) -> float:
        return float(np.abs(self.gaps) @ self.counts / self.counts.sum())

    @property
    def mce(self) -> float:
        return float(np.abs(self.gaps).max())


def draw_reliability(results: Sequence[Result], methods: Sequence[str], shifts: Sequence[str] | None = None) -> Figure:
    """Draw reliability diagrams and histograms of confidence, a column for each method (the paper's appendix H).

    Only shifts and seeds that all methods have are pooled, so that no method gains by what it lacks. `clean` among
    the methods is the source model on clean images.
    """
    adapted = [method for method in methods if method != CLEAN]
    columns: dict[str, list[Result]] = {}
    notes: list[str] = []
    over = ""
    if adapted:
        grid = select([r for r in results if not is_clean(r.cell.shift)], adapted, shifts)
        places = [
            {(shift, seed) for (of, shift, seed), result in grid.cells.items() if of == method and not result.failed}
            for method in grid.methods
        ]
        shared = sorted(set.intersection(*places))
        if not shared:
            raise DataError(
                f"Expected a shift and seed that all of {', '.join(grid.methods)} have, got none. Try fewer methods."
            )
        columns = {method: [grid.cells[method, *place] for place in shared] for method in grid.methods}
        there = [shift for shift in grid.shifts if any(shift == other for other, _ in shared)]
        named = ", ".join(map(style.to_words, there)) if len(there) <= 3 else f"{len(there)} shifts"
        over = f"{grid.benchmark} ({grid.protocol}), {named}"
        seeds = len({seed for _, seed in shared})
        notes.append(f"{_count(len(there), 'shift')}, {_count(seeds, 'seed')}")
        if len(shared) < len(set.union(*places)):
            pairs = _count(len(shared), "pair")
            notes[0] += f": {pairs} of shift and seed, those that all of these methods have done"
        notes += list_notes(grid, adapted, shifts)
    if CLEAN in methods:
        home = select(results, [SourceOnly.name], [CLEAN])
        columns[CLEAN] = [result for result in home.cells.values() if not result.failed]
        over = over or f"{home.benchmark}, clean images"
        notes.append(f"{CLEAN} is the source model on clean images, {_count(len(columns[CLEAN]), 'seed')}")
    pooled = {method: pool_bins(columns[method]) for method in dict.fromkeys(methods) if method in columns}
    if any(len(column) > 1 for column in columns.values()):
        notes.append(
            "ECE and MCE are those of the pooled bins, in which too much and too little confidence may cancel out"
        )
    return _draw_reliability_columns(pooled, f"Confidence and accuracy: {over}", notes)


def pool_bins(results: Sequence[Result]) -> ReliabilityBins:
    """Pool the bins of all results, as if all their images had been scored at once."""
    without = [result for result in results if not result.manifest.get("reliability")]
    if without:
        raise DataError(
            f"Expected reliability bins, got {len(without)} of {len(results)} results without them, such as "
            f"{without[0].cell}. Try results that were run here, not compact exports."
        )
    tables = [result.manifest["reliability"] for result in results]
    edges = {(*(part["lower"] for part in table), table[-1]["upper"]) for table in tables}
    if len(edges) > 1:
        counts = sorted({len(edge) - 1 for edge in edges})
        raise DataError(f"Expected results with the same bins, got {counts} bins.")

    def sums(part: Mapping[str, Any]) -> tuple[float, float, float]:
        count = part["count"]
        return (count, count * part["confidence"], count * part["accuracy"]) if count else (0, 0, 0)

    rows = np.array([[sums(part) for part in table] for table in tables]).sum(axis=0)
    return ReliabilityBins(np.array(edges.pop()), *rows.T)


def _draw_reliability_columns(pooled: Mapping[str, ReliabilityBins], title: str, notes: Sequence[str]) -> Figure:
    ratios = {"height_ratios": (2.4, 1)}
    figure, axes = style.make_canvas(
        2, len(pooled), width=2.1, height=2.1, sharex=True, sharey="row", gridspec_kw=ratios
    )
    if len(pooled) == 1:
        # Title and notes need more width than one column.
        figure.set_figwidth(3.9)
    for (method, bins), (diagram, histogram) in zip(pooled.items(), axes.T, strict=True):
        diagram.set_title(method, fontsize=10, loc="left")
        _draw_diagram(diagram, bins)
        _draw_histogram(histogram, bins)
    axes[0, 0].set_ylabel("accuracy, %", fontsize=style.LABEL)
    axes[1, 0].set_ylabel("images, %", fontsize=style.LABEL)
    for axis in axes[1]:
        axis.set_xlabel("confidence, %", fontsize=style.LABEL)
    style.add_legend(figure, title, axes[0, 0].get_legend_handles_labels(), 3)
    style.add_footer(figure, notes)
    return figure


def _draw_diagram(axis: Any, bins: ReliabilityBins) -> None:
    filled = bins.counts > 0
    counts, left, width = bins.counts[filled], 100 * bins.edges[:-1][filled], 100 * np.diff(bins.edges)[filled]
    accuracy, confidence = 100 * bins.hits[filled] / counts, 100 * bins.confidences[filled] / counts
    bars: dict[str, Any] = {"color": style.ADAPTED, "alpha": 0.55, "edgecolor": "white", "linewidth": 0.6}
    axis.bar(left, accuracy, width, align="edge", label="accuracy", **bars)
    gaps, lower = np.abs(confidence - accuracy), np.minimum(accuracy, confidence)
    hatched = {"facecolor": "none", "edgecolor": style.TARGET, "hatch": "////", "linewidth": 0.8}
    axis.bar(left, gaps, width, lower, align="edge", label="gap to the mean confidence", **hatched)
    axis.plot([0, 100], [0, 100], color="#222222", linewidth=0.8, linestyle="--", label="no gap")
    axis.set_xlim(0, 100)
    axis.set_ylim(0, 100)
    words = f"ECE {100 * bins.ece:.1f} %\nMCE {100 * bins.mce:.1f} %"
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5}
    axis.text(0.05, 0.95, words, transform=axis.transAxes, va="top", fontsize=style.LABEL, bbox=box)


def _draw_histogram(axis: Any, bins: ReliabilityBins) -> None:
    total = bins.counts.sum()
    left, width = 100 * bins.edges[:-1], 100 * np.diff(bins.edges)
    bars = {"color": "#bbbbbb", "edgecolor": "white", "linewidth": 0.6}
    axis.bar(left, 100 * bins.counts / total, width, align="edge", **bars)
    means = ("accuracy", bins.hits, style.ADAPTED, "-"), ("confidence", bins.confidences, style.TARGET, "--")
    for (name, sums, shade, dashes), side in zip(means, ("left", "right"), strict=True):
        mean = 100 * sums.sum() / total
        axis.axvline(mean, color=shade, linewidth=1.4, linestyle=dashes)
        axis.set_title(f"{name} {mean:.1f} %", loc=side, fontsize=style.SMALL, color=style.darken(shade), pad=3)
    axis.set_ylim(0, 100)
