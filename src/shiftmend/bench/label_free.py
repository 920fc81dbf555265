"""What can be told of an adaptation without labels: which signals go with accuracy, and which tell good from bad."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import get_args

from shiftmend.bench import comparisons, correlations, footnotes, thresholds
from shiftmend.bench.base import CLEAN
from shiftmend.bench.cells import Cell, Result
from shiftmend.bench.grids import Entry
from shiftmend.bench.sections import Block, Part
from shiftmend.bench.tabular import Column, Row, Table
from shiftmend.bench.thresholds import MARGIN, Judge
from shiftmend.verification import Verdict, Verification

RESTORING = ("fr", "bufr")
FEW = 10
"""With fewer cells than this of one kind, shares of them are no more than a hint."""


def signals(part: Part) -> list[Block]:
    """How the label-free signals go with accuracy, and whether one of them tells good adaptations from bad ones."""
    found = correlations.signals_and_accuracy(part.unsupervised)
    rows = [
        Row(
            name,
            (Entry(value.within_shifts), Entry(value.shifts), Entry(value.overall.value), Entry(value.overall.points)),
        )
        for name, value in found.items()
    ]
    columns = (
        Column("within shifts", digits=2, kind="difference"),
        Column("shifts", digits=0),
        Column("over all cells", digits=2, kind="difference"),
        Column("cells", digits=0),
    )
    note = (
        "Spearman's rank correlation with accuracy (last), over all methods but target-supervised; within shifts is "
        "the mean of each shift's"
    )
    remarks = [f"{name}: {value.overall.remark}" for name, value in found.items() if value.overall.remark]
    title = f"{part.benchmark.name}, {part.protocol}: signals and accuracy"
    blocks: list[Block] = [Table(title, "signal", columns, tuple(rows), (note, *remarks))]
    at_home = _with_the_clean_source(part)
    near = thresholds.near_clean(at_home, part.reading.clean)
    meaning = _near_clean(part, len(part.unsupervised) - len(at_home))
    blocks += _judges(part, at_home, near, "near clean", meaning)
    better = thresholds.helped(part.unsupervised)
    blocks += _judges(
        part, part.unsupervised, better, "has helped", "more accurate than source-only on the same shift and seed"
    )
    return blocks + _verdicts(part, near, meaning)


def _near_clean(part: Part, left_out: int) -> str:
    """What a good cell is, and how many cells cannot be judged by it."""
    meaning = f"accuracy at most {100 * MARGIN:g} points below that of {footnotes.clean_source(part.benchmark)}"
    others = f" (left out: {left_out} cells that start from another model)" if left_out else ""
    return f"{meaning} on clean images{others}"


def _with_the_clean_source(part: Part) -> list[Result]:
    """A shift or a method may have a source model of its own: accuracy on clean images is known of one model only."""
    nothing_done = part.benchmark.settings.get("offline", {}).get(thresholds.NOTHING_DONE)
    if nothing_done is None:
        return []
    settings, source = part.benchmark.settings[part.protocol], part.benchmark.source_for
    clean = source(nothing_done, CLEAN)
    return [result for result in part.unsupervised if source(settings[result.cell.method], result.cell.shift) == clean]


def _judges(part: Part, results: Sequence[Result], good: Mapping[Cell, bool], name: str, meaning: str) -> list[Block]:
    found = thresholds.judges(results, good)
    counts = Counter(good.values())
    if not (counts[True] and counts[False]):
        said = f"{counts[True]} cells are good and {counts[False]} bad"
        return [f"Good meaning *{meaning}*: {said}, which leaves nothing to tell apart."]
    columns = (
        Column("AUC", digits=2),
        Column("accept if"),
        Column("balanced accuracy"),
        Column("balanced accuracy", "held-out shifts"),
        Column("bad ones accepted", "held-out shifts"),
        Column("good ones rejected", "held-out shifts"),
    )
    rows = tuple(Row(name, _judged(value)) for name, value in found.items())
    notes = (
        f"good: {meaning}; cells that are: {counts[True]}, that are not: {counts[False]}",
        "AUC: how often a good cell has the better signal than a bad one; 0.5 is chance, below it the signal misleads",
        "the threshold was found with labels on these cells; held-out: found on all other shifts each time; percent",
        *([f"cells of the rarer kind: {rare}; read with care"] if (rare := min(counts.values())) < FEW else []),
    )
    return [
        Table(
            f"{part.benchmark.name}, {part.protocol}: good ({name}) or bad, told by signals",
            "signal",
            columns,
            rows,
            notes,
        )
    ]


def _judged(judge: Judge) -> tuple[Entry, ...]:
    held = judge.held_out
    if judge.threshold is None or judge.balanced is None:
        return (Entry(),) * 6
    sign = "≥" if judge.signal in thresholds.HIGH_IS_GOOD else "≤"
    accept = f"{sign} {judge.threshold:.3g}"
    if judge.second is not None:
        accept = f"{judge.signal} {accept} and {judge.second[0]} ≤ {judge.second[1]:.3g}"
    return (
        Entry(judge.area),
        Entry(text="never" if math.isnan(judge.threshold) else accept),
        Entry(100 * judge.balanced),
        *(
            (Entry(),) * 3
            if held is None
            else map(Entry, (100 * held.balanced, 100 * held.bad_accepted, 100 * held.good_rejected))
        ),
    )


def verification(result: Result) -> Verification | None:
    """What the library says of a cell now, whatever it said when the cell was run."""
    after, slices = result.manifest.get("verification", {}).get("after", {}), result.signals.get("slices")
    if slices is None or "floor" not in after:
        return None
    adapted = after.get("adapted", _method(result) != thresholds.NOTHING_DONE)
    source, marginals = after.get("source_samples"), result.signals.get("marginals")
    return Verification(slices, after["floor"], after["samples"], source, adapted, marginals, after.get("units"))


def _method(result: Result) -> str | None:
    """The method of a cell, whatever its row is called."""
    name: str | None = result.manifest.get("method", {}).get("name")
    return name


def _verdicts(part: Part, good: Mapping[Cell, bool], meaning: str) -> list[Block]:
    """What the library itself says of an adaptation, by limits that are the same everywhere."""
    counts = _counted(part.unsupervised, good)
    if not counts:
        return []
    columns = (Column("good", digits=0), Column("bad", digits=0))
    title = f"{part.benchmark.name}, {part.protocol}: the library's own verdict, in cells"
    return [Table(title, "verdict", columns, _rows([counts]), (f"good: {meaning}",))]


def few_verdicts(parts: Mapping[str, Part]) -> list[Block]:
    """The same for methods that restore features, from few samples: what they were adapted to is what is judged."""
    few = {protocol: part for protocol, part in parts.items() if protocol.startswith("few-shot-") and part.results}
    clean = parts["offline"].reading.clean if "offline" in parts else []  # no other protocol has clean images
    counts, left_out = [], 0
    for part in few.values():
        restoring = [result for result in _with_the_clean_source(part) if _method(result) in RESTORING]
        left_out += sum(_method(result) in RESTORING for result in part.unsupervised) - len(restoring)
        counts.append(_counted(restoring, thresholds.near_clean(restoring, clean)))
    if not any(counts):
        return []
    names = [f"{protocol.removeprefix('few-shot-')} a class" for protocol in few]
    columns = tuple(Column(kind, name, digits=0) for name in names for kind in ("good", "bad"))
    first = next(iter(few.values()))
    title = f"{first.benchmark.name}, few-shot: the library's own verdict on {' and '.join(RESTORING)}, in cells"
    return [Table(title, "verdict", columns, _rows(counts), (f"good: {_near_clean(first, left_out)}",))]


def _counted(results: Sequence[Result], good: Mapping[Cell, bool]) -> dict[str, Counter[bool]]:
    counts: dict[str, Counter[bool]] = {}
    for cell, result in comparisons.by_place(results).items():
        judged = verification(result)
        if judged is not None and cell in good:
            counts.setdefault(judged.verdict, Counter())[good[cell]] += 1
    return counts


def _rows(counts: Sequence[Mapping[str, Counter[bool]]]) -> tuple[Row, ...]:
    nothing = Counter[bool]()
    return tuple(
        Row(name, tuple(Entry(count.get(name, nothing)[kind]) for count in counts for kind in (True, False)))
        for name in get_args(Verdict)
        if any(name in count for count in counts)
    )
