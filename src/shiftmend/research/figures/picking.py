"""What the figures of results have in common: which results are drawn, and what is said of them at the foot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from shiftmend.errors import DataError
from shiftmend.methods import METHODS
from shiftmend.research.analysis.comparisons import by_place
from shiftmend.research.bench import footnotes
from shiftmend.research.bench.benchmark import CLEAN, Result, Which
from shiftmend.research.bench.grids import Beside, Grid
from shiftmend.research.figures import style

MOMENTS = {
    "last": "after the last epoch",
    "best": "at the best epoch, an oracle",
    "selected": "at the epoch selected without labels",
}


def pick(
    results: Iterable[Result],
    methods: Sequence[str] | None = None,
    shifts: Sequence[str] | None = None,
    *,
    metric: str = "accuracy",
    which: Which = "last",
    beside: Beside | None = None,
) -> Grid:
    """The results of these methods and shifts, by default of all; they must be of one benchmark and protocol.

    Methods and shifts of which no result is finished are left out, for `notes` to name. Clean images are no shift
    unless asked for.
    """
    wanted = [
        result
        for result in results
        if (methods is None or result.cell.method in methods)
        and (result.cell.shift != CLEAN if shifts is None else result.cell.shift in shifts)
    ]
    finished = by_place(wanted)
    if not finished:
        chosen = [f"of {', '.join(methods)}"] if methods is not None else []
        chosen += [f"on {', '.join(shifts)}"] if shifts is not None else []
        failed = f", {len(wanted)} failed" if wanted else ""
        said = " ".join(["finished result", *chosen])
        raise DataError(f"there is no {said}{failed}; run the benchmark first, or choose other methods or shifts")
    tables = sorted({(cell.benchmark, cell.protocol) for cell in finished})
    if len(tables) > 1:
        names = ", ".join(f"{benchmark} ({protocol})" for benchmark, protocol in tables)
        raise DataError(f"the results are of several tables: {names}; choose those of one")
    done = {name for cell in finished for name in (cell.method, cell.shift)}
    return Grid(
        results=wanted,
        benchmark=tables[0][0],
        protocol=tables[0][1],
        methods=[name for name in methods_in(wanted, methods) if name in done],
        shifts=[name for name in dict.fromkeys(shifts or (result.cell.shift for result in wanted)) if name in done],
        metric=metric,
        which=which,
        beside=beside,
    )


def notes(
    grid: Grid, methods: Sequence[str] | None, shifts: Sequence[str] | None, *, marked: bool = False
) -> list[str]:
    """Where the data are from, which cells failed, and what was asked for (as in `pick`) but is not there.

    `marked` is for figures that show `footnotes.origin_marks` beside the names of shifts.
    """
    asked = [*methods_in(grid.results, methods), *(shifts or (result.cell.shift for result in grid.results))]
    lacking = [name for name in dict.fromkeys(asked) if name not in (*grid.methods, *grid.shifts)]
    origins = [style.words(note if marked else note.partition(" ")[2]) for note in footnotes.about_origins(grid)]
    whole = replace(
        grid,
        methods=list({result.cell.method: None for result in grid.results}),
        shifts=list({result.cell.shift: None for result in grid.results}),
    )
    said = [f"no finished result: {', '.join(lacking)}"] if lacking else []
    remarks = footnotes.source_remarks(grid.cells.values())
    mixtures = footnotes.about_mixtures(grid.cells.values())
    return [*remarks, *origins, *mixtures, *footnotes.about_failures(whole), *said]


def counted(count: int, what: str) -> str:
    return f"one {what}" if count == 1 else f"{count} {what}s"


def methods_in(results: Iterable[Result], asked: Sequence[str] | None) -> list[str]:
    """Those asked for, or all: in the library's order, after them variants that benchmarks have given names."""
    if asked is not None:
        return list(dict.fromkeys(asked))
    found = dict.fromkeys(result.cell.method for result in results)
    return [name for name in METHODS if name in found] + [name for name in found if name not in METHODS]
