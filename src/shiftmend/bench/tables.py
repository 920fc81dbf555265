"""Results as tables that stand beside the paper's: pure data, which `shiftmend.bench.rendering` writes out.

Three rules keep them honest. A mean is only taken over the whole of a set of shifts, never over those that happen to be
done. `best` is called an oracle wherever it stands. What differs from the paper's conditions is said at the foot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shiftmend.bench import footnotes
from shiftmend.bench.cells import Result, Which
from shiftmend.bench.grids import SUPERVISED, Beside, Comparison, Entry, Grid, Published
from shiftmend.errors import DataError

TITLES = {"last": "ours", "best": "best (oracle)", "selected": "selected"}
CAPTIONS = {"last": "last", "best": "best epoch, an oracle", "selected": "selected without labels"}


@dataclass(frozen=True)
class Column:
    """`heading` spans neighbours that belong together: those of a group of shifts, or of a method."""

    title: str
    heading: str = ""
    kind: Literal["ours", "published", "difference"] = "ours"
    digits: int = 1


@dataclass(frozen=True)
class Row:
    label: str
    entries: tuple[Entry, ...]
    summary: bool = False
    """Sums up the rows above it."""


@dataclass(frozen=True)
class Table:
    title: str
    corner: str
    """What the labels of the rows name."""
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    marked: str = ""
    """What it means to be marked as best; empty where nothing is."""


def summary(
    results: Sequence[Result],
    *,
    benchmark: str,
    protocol: str,
    methods: Sequence[str],
    shifts: Sequence[str],
    groups: Mapping[str, Sequence[str]] | None = None,
    metric: str = "accuracy",
    which: Which = "last",
    beside: Beside | None = "paper",
    published: Published | None = None,
) -> Table:
    """A row a method: the mean over all shifts and over each group of them, beside the published figure.

    The mean over shifts is taken for each seed that has them all; mean and sample standard deviation are those over
    seeds. `shifts` must be all of the benchmark's, or the published mean over all is no match. `published` gives the
    published figures in place of those of `shiftmend.bench.published`.
    """
    grid = Grid(
        results=results,
        benchmark=benchmark,
        protocol=protocol,
        methods=methods,
        shifts=shifts,
        metric=metric,
        which=which,
        beside=beside,
        published=published,
    )
    sets = grid.sets(groups)
    compared = grid.comparisons(sets)
    columns, rows = _side_by_side(
        grid,
        [
            (
                _named(name, members) + footnotes.origin_marks(grid, members),
                [compared[method, name] for method in methods],
            )
            for name, members in sets.items()
        ],
    )
    return _table(
        grid, "method", columns, [Row(method, row) for method, row in zip(methods, rows, strict=True)], compared
    )


def per_shift(
    results: Sequence[Result],
    *,
    benchmark: str,
    protocol: str,
    methods: Sequence[str],
    shifts: Sequence[str],
    groups: Mapping[str, Sequence[str]] | None = None,
    metric: str = "accuracy",
    which: Which = "last",
    beside: Beside | None = "paper",
    published: Published | None = None,
) -> Table:
    """A row a shift, and under them the means that `summary` shows; each method beside its published figure."""
    grid = Grid(
        results=results,
        benchmark=benchmark,
        protocol=protocol,
        methods=methods,
        shifts=shifts,
        metric=metric,
        which=which,
        beside=beside,
        published=published,
    )
    means = {name: members for name, members in grid.sets(groups).items() if len(members) > 1 and name not in shifts}
    sets = {shift: (shift,) for shift in shifts} | means
    compared = grid.comparisons(sets)
    columns, rows = _side_by_side(grid, [(method, [compared[method, name] for name in sets]) for method in methods])
    labels = [_named(name, members) + footnotes.origin_marks(grid, members) for name, members in sets.items()]
    return _table(
        grid,
        "shift",
        columns,
        [Row(label, row, name in means) for name, label, row in zip(sets, labels, rows, strict=True)],
        compared,
    )


def across(
    results: Sequence[Result],
    *,
    benchmark: str,
    protocols: Mapping[str, str],
    methods: Sequence[str],
    shifts: Sequence[str],
    metric: str = "accuracy",
    beside: Beside | None = "paper",
    published: Published | None = None,
) -> Table:
    """A row a method, and the mean over all shifts under each of several protocols; `protocols` has their headings."""
    blocks = []
    entries: dict[tuple[str, str], Comparison] = {}
    grids = []
    for heading, protocol in protocols.items():
        grid = Grid(
            results=results,
            benchmark=benchmark,
            protocol=protocol,
            methods=methods,
            shifts=shifts,
            metric=metric,
            beside=beside,
            published=published,
        )
        compared = grid.comparisons(grid.sets(None))
        blocks.append((heading, [compared[method, "all"] for method in methods]))
        entries |= {(method, heading): compared[method, "all"] for method in methods}
        grids.append(grid)
    if not grids:
        raise DataError("a table across protocols needs at least one of them")
    columns, rows = _side_by_side(grids[0], blocks)
    made = _table(
        grids[0], "method", columns, [Row(method, row) for method, row in zip(methods, rows, strict=True)], entries
    )
    title = f"{benchmark}, {', '.join(protocols.values())}: {grids[0].shown.title}, {_named('all', shifts)}"
    notes = [note for grid in grids for note in (*footnotes.about_origins(grid), *footnotes.about_failures(grid))]
    return replace(made, title=title, notes=tuple(dict.fromkeys((*made.notes, *notes))))


def beside_both(paper: Table, rerun: Table) -> Table:
    """One table from two that differ in whose figures stand beside ours, each difference named after its side."""
    kinds = [{column.kind for column in table.columns} for table in (paper, rerun)]
    if "published" not in kinds[0] or "published" not in kinds[1]:
        chosen = rerun if "published" in kinds[1] else paper
        columns = tuple(_with_side(column, "paper" if chosen is paper else "re-run") for column in chosen.columns)
        return replace(chosen, columns=columns)
    order: list[tuple[Table, int, Column]] = []
    for heading in dict.fromkeys(column.heading for column in paper.columns):
        for table, side in ((paper, "paper"), (rerun, "re-run")):
            order += [
                (table, index, _with_side(column, side))
                for index, column in enumerate(table.columns)
                if column.heading == heading and (table is paper or column.kind != "ours")
            ]
    rows = [
        replace(row, entries=tuple((row if table is paper else other).entries[index] for table, index, _ in order))
        for row, other in zip(paper.rows, rerun.rows, strict=True)
    ]
    notes = tuple(dict.fromkeys((*paper.notes, *rerun.notes)))
    return replace(paper, columns=tuple(column for _, _, column in order), rows=tuple(rows), notes=notes)


def only(table: Table, keep: Callable[[Column], bool]) -> Table:
    """A table with some of its columns."""
    kept = [index for index, column in enumerate(table.columns) if keep(column)]
    return replace(
        table,
        columns=tuple(table.columns[index] for index in kept),
        rows=tuple(replace(row, entries=tuple(row.entries[index] for index in kept)) for row in table.rows),
    )


def _with_side(column: Column, side: str) -> Column:
    return replace(column, title=f"ours - {side}") if column.kind == "difference" else column


def selection(
    results: Sequence[Result], *, benchmark: str, protocol: str, methods: Sequence[str], shifts: Sequence[str]
) -> Table:
    """What it is worth to choose the epoch without labels: accuracy of `last`, `selected` and `best` over all shifts.

    The deviations of the differences are over seeds too, of pairs from the same run.
    """
    grid = Grid(results=results, benchmark=benchmark, protocol=protocol, methods=methods, shifts=shifts)
    columns = (
        Column("last", "accuracy"),
        Column("selected", "accuracy"),
        Column("best (oracle)", "accuracy"),
        Column("best - selected", "cost of selection", "difference"),
        Column("selected - last", "gain of selection", "difference"),
    )
    contrasts = ((1, 0, 0), (0, 1, 0), (0, 0, 1), (0, -1, 1), (-1, 1, 0))
    entries = {method: [grid.mean(method, shifts, _contrast(*weights)) for weights in contrasts] for method in methods}
    for part in (0, 1):  # nobody is first in what an oracle chose
        for method in grid.first({method: parts[part] for method, parts in entries.items()}):
            entries[method][part] = replace(entries[method][part], best=True)
    return Table(
        f"{benchmark}, {protocol}: accuracy by choice of epoch, {_named('all', shifts)}"
        + footnotes.origin_marks(grid, shifts),
        "method",
        columns,
        tuple(Row(method, tuple(parts)) for method, parts in entries.items()),
        (
            footnotes.ORACLE,
            *footnotes.about_numbers(grid, [(method, "all", parts[0]) for method, parts in entries.items()]),
            *footnotes.about_origins(grid),
            *footnotes.about_failures(grid),
        ),
        _meaning(grid, any(entry.best for parts in entries.values() for entry in parts), "column"),
    )


def _contrast(last: int, selected: int, best: int) -> Callable[[Result], float | None]:
    """A sum of a run's accuracies; unknown unless all three are known, so that all columns are of the same runs."""

    def read(result: Result) -> float | None:
        if result.last is None or result.selected is None or result.best is None:
            return None
        return last * result.last.accuracy + selected * result.selected.accuracy + best * result.best.accuracy

    return read


def _side_by_side(
    grid: Grid, blocks: Sequence[tuple[str, Sequence[Comparison]]]
) -> tuple[list[Column], list[tuple[Entry, ...]]]:
    """Columns and rows from blocks of a heading and the comparisons under it; nothing published, no columns for it."""
    title, digits = TITLES[grid.which], grid.shown.digits
    columns: list[Column] = []
    rows: list[tuple[Entry, ...]] = [() for _ in blocks[0][1]]
    for heading, compared in blocks:
        added = [Column(title, heading, "ours", digits)]
        if grid.beside is not None and any(there.value is not None for _, there, _ in compared):
            added.append(Column(grid.beside, heading, "published", digits))
            if not grid.unlike:
                added.append(Column("difference", heading, "difference", digits))
        columns += added
        rows = [row + entries[: len(added)] for row, entries in zip(rows, compared, strict=True)]
    if all(column.kind == "ours" for column in columns):  # then "ours" under every heading says nothing
        suffix = " (oracle)" if grid.which == "best" else ""
        columns = [replace(column, title=column.heading + suffix, heading="") for column in columns]
    return columns, rows


def _table(
    grid: Grid,
    corner: Literal["method", "shift"],
    columns: Sequence[Column],
    rows: Sequence[Row],
    compared: Mapping[tuple[str, str], Comparison],
) -> Table:
    caption = "" if grid.shown.of_the_run else f" ({CAPTIONS[grid.which]})"
    ours = [(method, name, entry) for (method, name), (entry, _, _) in compared.items()]
    notes = (
        *([footnotes.ORACLE] if grid.which == "best" else []),
        *footnotes.about_numbers(grid, ours),
        *footnotes.about_published(grid, any(column.kind == "published" for column in columns)),
        *footnotes.about_rates(grid),
        *footnotes.about_origins(grid),
        *footnotes.about_failures(grid),
    )
    marked = _meaning(grid, any(entry.best for _, _, entry in ours), "column" if corner == "method" else "row")
    title = f"{grid.benchmark}, {grid.protocol}: {grid.shown.title}{caption}"
    return Table(title, corner, tuple(columns), tuple(rows), notes, marked)


def _meaning(grid: Grid, marked: bool, line: str) -> str:
    rivals = " among methods that saw no labels" if any(m.startswith(SUPERVISED) for m in grid.methods) else ""
    return f"{grid.shown.better} of its {line}{rivals}" if marked else ""


def _named(name: str, members: Sequence[str]) -> str:
    if len(members) == 1:
        return members[0] if name in ("all", members[0]) else f"{name} ({members[0]})"
    return f"all {len(members)} shifts" if name == "all" else f"{name} ({len(members)})"
