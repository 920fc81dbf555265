"""Questions that a page of results puts to the cells: what an option is worth, what restoring goes together with.

`shiftmend.bench.label_free` asks what can be told without labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from shiftmend.bench import comparisons, correlations, footnotes, published, thresholds
from shiftmend.bench.grids import METRICS, SUPERVISED, Entry, Grid
from shiftmend.bench.planning import variants_of, with_another_source
from shiftmend.bench.sections import Block, Part
from shiftmend.bench.tabular import Column, Row, Table

FAR = 0.1
"""A source model whose accuracy is off by more than this was trained on, or sees, something else."""


def restoration(part: Part) -> list[Block]:
    """Restoration distance and ECE of each method, and how they go together; nothing if no image has a clean twin."""
    if all(result.restoration_distance is None for result in part.unsupervised):
        return []
    others = with_another_source(part.benchmark, part.protocol)
    variants = variants_of(part.benchmark, part.protocol)
    found = correlations.restoration_and_calibration(part.unsupervised, exclude=others, variants=variants)
    if not found.means:
        return [f"Nothing can be said yet: {found.correlation.remark}."]
    name = part.benchmark.name
    theirs = {
        method: tuple(
            published.figure(name, part.protocol, metric, method, "all") for metric in ("restoration_distance", "ece")
        )
        for method in found.means
    }
    digits = 2 if max(distance for distance, _ in found.means.values()) >= 1 else 3
    columns = [Column("restoration distance", digits=digits), Column("ECE, percent")]
    known = {method: (distance.mean, ece.mean) for method, (distance, ece) in theirs.items() if distance and ece}
    if known:
        columns += [
            Column("distance in the paper", kind="published", digits=2),
            Column("ECE in the paper", kind="published"),
        ]
    rows = []
    for method, (distance, ece) in sorted(found.means.items(), key=lambda item: item[1]):
        entries = [Entry(distance), Entry(100 * ece)]
        if known:
            entries += (
                [Entry(known[method][0]), Entry(100 * known[method][1])] if method in known else [Entry(), Entry()]
            )
        rows.append(Row(method, tuple(entries)))
    said = f"Spearman's rank correlation of the two over methods: {_coefficient(found.correlation)}"
    if known:
        paper = correlations.correlate([d for d, _ in known.values()], [e for _, e in known.values()])
        said += f"; of the paper's figures for the same methods: {_coefficient(paper)}"
    left_out = [f"{method} (whose source model is another)" for method in part.methods if method in others]
    left_out += [SUPERVISED] if len(part.unsupervised) < len(part.results) else []
    note = f"means over the {found.places} pairs of shift and seed that every method has done"
    note += f"; {' and '.join(left_out)} {'are' if len(left_out) > 1 else 'is'} left out" if left_out else ""
    note += f"; without {', '.join(found.without)}, for lack of common seeds" if found.without else ""
    note += "; the paper's are means over all shifts" if known else ""
    return [
        f"{said}.",
        Table(f"{name}, {part.protocol}: restoration and calibration", "method", tuple(columns), tuple(rows), (note,)),
    ]


def variants(part: Part) -> list[Block]:
    """Rows that are a method with other options, each against the method as it is: what the option is worth."""
    bases = variants_of(part.benchmark, part.protocol)
    found = {name: compared for name, base in bases.items() if (compared := _compared(part, name, base))}
    rows = [_variant(part, name, bases[name], compared) for name, compared in found.items()]
    if not rows:
        return []
    columns = (
        Column("against"),
        Column("seeds", digits=0),
        Column("accuracy", kind="difference"),
        Column("in the paper", kind="difference"),
        Column("p", digits=3),
        Column("verdict"),
        Column("shifts better / worse / undecided"),
    )
    note = (
        "accuracy is the difference in points, mean over shifts; two-sided paired t-test over seeds; with Holm's "
        "correction for the number of shifts where they are counted"
    )
    remarks = [f"{name}: {compared[-1].remark}" for name, compared in found.items() if compared[-1].remark]
    if not part.whole:
        remarks.append(f"the mean is over {len(part.shifts)} of {len(part.benchmark.shifts)} shifts")
    title = f"{part.benchmark.name}, {part.protocol}: variants"
    return [Table(title, "variant", columns, tuple(rows), (note, *remarks))]


def _variant(part: Part, name: str, base: str, compared: Sequence[comparisons.Comparison]) -> Row:
    *each, overall = compared
    verdicts = Counter(one.verdict for one in each)
    decided = [verdicts[f"{name} better"], verdicts[f"{base} better"]]
    there = [published.figure(part.benchmark.name, part.protocol, "accuracy", one, "all") for one in (name, base)]
    return Row(
        name,
        (
            Entry(text=base),
            Entry(overall.pairs),
            _points(overall),
            Entry() if there[0] is None or there[1] is None else Entry(100 * (there[0].mean - there[1].mean)),
            _chance(overall.p),
            Entry(text=overall.verdict),
            Entry(text=f"{decided[0]} / {decided[1]} / {sum(one.pairs > 0 for one in each) - sum(decided)}"),
        ),
    )


def slices(part: Part) -> list[Block]:
    """Does it help to align slices too? Shift by shift, for the methods that have been run both ways."""
    blocks: list[Block] = []
    for base in ("fr", "bufr"):
        compared = _compared(part, f"{base}-sliced", base)
        if not compared:
            continue
        rows = [
            Row(
                one.over(len(part.benchmark.shifts)),
                (Entry(one.pairs), _points(one), _chance(one.p), _chance(one.corrected), Entry(text=one.verdict)),
                one.shift is None,
            )
            for one in compared
        ]
        columns = (
            Column("seeds", digits=0),
            Column(f"{base}-sliced - {base}", kind="difference"),
            Column("p", digits=3),
            Column("corrected p", digits=3),
            Column("verdict"),
        )
        said = footnotes.about_comparisons(compared, len(part.benchmark.shifts))
        title = f"{part.benchmark.name}, {part.protocol}: {base} with slices and without"
        notes = (
            "difference in points of accuracy (last); two-sided paired t-test over seeds, Holm's correction for the "
            "number of shifts",
        )
        blocks.append(Table(title, "shift", columns, tuple(rows), (*notes, *said)))
    return blocks


def _compared(part: Part, first: str, second: str) -> list[comparisons.Comparison]:
    """Shift by shift, and last over all of them, where as in a table a seed counts only if it has every shift."""
    own = [result for result in part.results if result.cell.method in (first, second) and not result.failed]
    if len({result.cell.method for result in own}) < 2:
        return []
    compared = comparisons.compare(own, first, second)
    places = Counter((result.cell.shift, result.cell.seed) for result in own)
    shifts = Counter(seed for (_, seed), methods in places.items() if methods == 2)
    lacking = sorted(seed for seed, count in shifts.items() if count < len(part.shifts))
    if not lacking:
        return compared
    whole = [result for result in own if result.cell.seed in set(shifts) - set(lacking)]
    if whole:
        overall = comparisons.compare(whole, first, second)[-1]
        remark = f"without seeds that lack shifts ({', '.join(map(str, lacking))})"
        overall = replace(overall, remark="; ".join(filter(None, (overall.remark, remark))))
    else:
        none = replace(compared[-1], pairs=0, difference=None, deviation=None, p=None, corrected=None, shifts=0)
        overall = replace(none, verdict="too few seeds", remark="no seed has every shift by both")
    return [*compared[:-1], overall]


def _points(one: comparisons.Comparison) -> Entry:
    scale = METRICS["accuracy"].scale
    return Entry(
        None if one.difference is None else scale * one.difference,
        None if one.deviation is None else scale * one.deviation,
    )


def _chance(p: float | None) -> Entry:
    """No p is 0: one that would be printed so is called less than the smallest that would not."""
    return Entry(p) if p is None or p >= 0.001 else Entry(text="< 0.001")


def sanity(part: Part) -> list[Block]:
    """Shifts on which the unadapted model does otherwise than the published one: there the data or the model differ."""
    method = thresholds.NOTHING_DONE
    for side, name in (("re-run", "the authors' re-run"), ("paper", "the paper")):
        if method not in part.methods:
            break
        asked = part.asked(methods=[method], beside=side)
        grid = Grid(results=part.results, **asked)
        compared = grid.comparisons({shift: (shift,) for shift in part.shifts})
        known = {shift: entries for (_, shift), entries in compared.items() if entries[2].value is not None}
        if not known:
            continue
        far = [shift for shift, (_, _, gap) in known.items() if abs(gap.value or 0.0) > 100 * FAR]
        near = f"{len(known) - len(far)} of {len(known)} shifts"
        said = f"Source-only accuracy lies within {100 * FAR:g} points of {name} on {near}."
        if not far:
            return [said]
        titles = (Column("ours"), Column(side, kind="published"), Column("difference", kind="difference"))
        rows = tuple(Row(shift + footnotes.origin_marks(grid, [shift]), known[shift]) for shift in far)
        title = f"{part.benchmark.name}, {part.protocol}: shifts where source-only is far from {name}"
        return [said, Table(title, "shift", titles, rows, tuple(footnotes.about_data(grid)))]
    return []


def _coefficient(correlation: correlations.Correlation) -> str:
    if correlation.value is None:
        return f"none ({correlation.remark})"
    return f"{correlation.value:+.2f} ({correlation.points} methods)"
