"""Results as tables that stand beside the paper's, as plain data, which `rendering` writes out.

Four rules keep them honest. A mean is only taken over the whole of a set of shifts, never over those that happen to be
done. Where methods have different numbers of seeds, these are counted. `best` is called an oracle wherever it stands.
What differs from the paper's conditions is said at the foot, and so is which methods have no row as they were not run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shiftmend.errors import DataError
from shiftmend.research.bench import footnotes
from shiftmend.research.bench.benchmark import Result, Which
from shiftmend.research.bench.grids import SUPERVISED, Beside, Comparison, Entry, Grid, Published


@dataclass(frozen=True)
class Column:
    """`heading` spans neighbours that belong together: those of a group of shifts, or of a method."""

    title: str
    heading: str = ""
    kind: Literal["ours", "published", "difference", "seeds"] = "ours"
    digits: int = 1


@dataclass(frozen=True)
class Row:
    label: str
    entries: tuple[Entry, ...]
    summary: bool = False
    """Sums up the rows above it."""
    counts: bool = False
    """Has the numbers of seeds of its columns; it is a summary too."""


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
                if column.heading == heading and (table is paper or column.kind in ("published", "difference"))
            ]
    rows = [
        replace(row, entries=tuple((row if table is paper else other).entries[index] for table, index, _ in order))
        for row, other in zip(paper.rows, rerun.rows, strict=True)
    ]
    notes = tuple(dict.fromkeys((*paper.notes, *rerun.notes)))
    return replace(paper, columns=tuple(column for _, _, column in order), rows=tuple(rows), notes=notes)


def _with_side(column: Column, side: str) -> Column:
    return replace(column, title=f"ours - {side}") if column.kind == "difference" else column


def only(table: Table, keep: Callable[[Column], bool]) -> Table:
    """A table with some of its columns; seeds stay counted, of those that are left."""
    kept = [index for index, column in enumerate(table.columns) if column.kind != "seeds" and keep(column)]
    cut = replace(
        table,
        columns=tuple(table.columns[index] for index in kept),
        rows=tuple(
            replace(row, entries=tuple(row.entries[index] for index in kept)) for row in table.rows if not row.counts
        ),
    )
    had = len(cut.rows) < len(table.rows) or any(column.kind == "seeds" for column in table.columns)
    return _with_counts(cut) if had else cut


def without_means(table: Table) -> Table:
    """For a part of the shifts: a mean over them is not what is published as the mean over all."""
    return replace(table, rows=tuple(row for row in table.rows if row.counts or not row.summary))


def counted(table: Table) -> Table:
    """With a column, or where columns are methods a row, of the number of seeds, if that is not the same everywhere."""
    numbers = {
        len(entry.seeds)
        for row in table.rows
        for entry, column in zip(row.entries, table.columns, strict=True)
        if column.kind == "ours" and entry.value is not None
    }
    return _with_counts(table) if len(numbers) > 1 else table


def _with_counts(table: Table) -> Table:
    ours = [index for index, column in enumerate(table.columns) if column.kind == "ours"]
    if not ours:
        return table
    if table.corner == "method":
        rows = [
            replace(row, entries=(_count([row.entries[index] for index in ours]), *row.entries)) for row in table.rows
        ]
        return replace(table, columns=(Column("seeds", kind="seeds"), *table.columns), rows=tuple(rows))
    counts = [
        _count([row.entries[index] for row in table.rows]) if index in ours else Entry()
        for index in range(len(table.columns))
    ]
    return replace(table, rows=(*table.rows, Row("seeds", tuple(counts), summary=True, counts=True)))


def _count(entries: Sequence[Entry]) -> Entry:
    numbers = [len(entry.seeds) for entry in entries if entry.value is not None]
    if not numbers:
        return Entry()
    return Entry(text=f"{min(numbers)}" if min(numbers) == max(numbers) else f"{min(numbers)} to {max(numbers)}")


TITLES = {"last": "ours", "best": "best (oracle)", "selected": "selected"}


CAPTIONS = {"last": "last", "best": "best epoch, an oracle", "selected": "selected without labels"}


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
    published figures in place of those of `shiftmend.research.bench.published`.
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
    shown = _with_a_row(grid)
    columns, rows = _side_by_side(
        [
            (
                grid,
                _named(name, members) + footnotes.origin_marks(grid, members),
                [compared[method, name] for method in shown],
            )
            for name, members in sets.items()
        ],
    )
    lines = [Row(method, row) for method, row in zip(shown, rows, strict=True)]
    return _table(grid, shown, "method", columns, lines, compared)


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
    shown = _with_a_row(grid)
    columns, rows = _side_by_side([(grid, method, [compared[method, name] for name in sets]) for method in shown])
    labels = [_named(name, members) + footnotes.origin_marks(grid, members) for name, members in sets.items()]
    lines = [Row(label, row, name in means) for name, label, row in zip(sets, labels, rows, strict=True)]
    return _table(grid, shown, "shift", columns, lines, compared)


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
    if not protocols:
        raise DataError("a table across protocols needs at least one of them")
    grids = [
        Grid(
            results=results,
            benchmark=benchmark,
            protocol=protocol,
            methods=methods,
            shifts=shifts,
            metric=metric,
            beside=beside,
            published=published,
        )
        for protocol in protocols.values()
    ]
    shown = _with_a_row(*grids)
    blocks = []
    entries: dict[tuple[str, str], Comparison] = {}
    for heading, grid in zip(protocols, grids, strict=True):
        compared = grid.comparisons(grid.sets(None))
        blocks.append((grid, heading, [compared[method, "all"] for method in shown]))
        entries |= {(method, heading): compared[method, "all"] for method in shown}
    columns, rows = _side_by_side(blocks)
    lines = [Row(method, row) for method, row in zip(shown, rows, strict=True)]
    made = _table(grids[0], shown, "method", columns, lines, entries)
    title = f"{benchmark}, {', '.join(protocols.values())}: {grids[0].shown.title}, {_named('all', shifts)}"
    marks = {mark for grid in grids for mark in footnotes.origin_marks(grid, shifts)}
    notes = [note for grid in grids for note in _notes_of_cells(grid, columns)]
    return replace(made, title=title + "".join(sorted(marks)), notes=tuple(dict.fromkeys((*made.notes, *notes))))


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
    shown = _with_a_row(grid)
    entries = {method: [grid.mean(method, shifts, _contrast(*weights)) for weights in contrasts] for method in shown}
    for part in (0, 1):  # nobody is first in what an oracle chose
        for method in grid.first({method: parts[part] for method, parts in entries.items()}):
            entries[method][part] = replace(entries[method][part], best=True)
    ours = [
        (method, name, parts[part])
        for method, parts in entries.items()
        for part, name in enumerate(("last", "selected"))
    ]
    table = Table(
        f"{benchmark}, {protocol}: accuracy by choice of epoch, {_named('all', shifts)}"
        + footnotes.origin_marks(grid, shifts),
        "method",
        columns,
        tuple(Row(method, tuple(parts)) for method, parts in entries.items()),
        (
            footnotes.ORACLE,
            *footnotes.about_numbers(grid, ours, "column"),
            *footnotes.about_rows(grid, shown, ours),
            *footnotes.about_data(grid),
            *footnotes.about_failures(grid),
        ),
        _meaning(grid, shown, any(entry.best for parts in entries.values() for entry in parts), "column"),
    )
    return counted(table)


def _contrast(last: int, selected: int, best: int) -> Callable[[Result], float | None]:
    """A sum of a run's accuracies; unknown unless all three are known, so that all columns are of the same runs."""

    def read(result: Result) -> float | None:
        if result.last is None or result.selected is None or result.best is None:
            return None
        return last * result.last.accuracy + selected * result.selected.accuracy + best * result.best.accuracy

    return read


def _side_by_side(
    blocks: Sequence[tuple[Grid, str, Sequence[Comparison]]],
) -> tuple[list[Column], list[tuple[Entry, ...]]]:
    """Columns and rows from blocks of a heading and the comparisons under it; nothing published, no columns for it."""
    columns: list[Column] = []
    rows: list[tuple[Entry, ...]] = [() for _ in blocks[0][2]]
    for grid, heading, compared in blocks:
        title, digits = TITLES[grid.which], grid.shown.digits
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


def _with_a_row(*grids: Grid) -> list[str]:
    """The methods that were run; if none was, all of them, for the sake of the published figures."""
    run = {method for grid in grids for method in grid.run}
    return [method for method in grids[0].methods if method in run] or list(grids[0].methods)


def _table(
    grid: Grid,
    shown: Sequence[str],
    corner: Literal["method", "shift"],
    columns: Sequence[Column],
    rows: Sequence[Row],
    compared: Mapping[tuple[str, str], Comparison],
) -> Table:
    caption = "" if grid.shown.of_the_run else f" ({CAPTIONS[grid.which]})"
    ours = [(method, name, entry) for (method, name), (entry, _, _) in compared.items()]
    line = "column" if corner == "method" else "row"
    notes = (
        *([footnotes.ORACLE] if grid.which == "best" else []),
        *footnotes.about_numbers(grid, ours, line),
        *footnotes.about_rows(grid, shown, ours),
        *_notes_of_cells(grid, columns),
    )
    marked = _meaning(grid, shown, any(entry.best for _, _, entry in ours), line)
    title = f"{grid.benchmark}, {grid.protocol}: {grid.shown.title}{caption}"
    return counted(Table(title, corner, tuple(columns), tuple(rows), notes, marked))


def _notes_of_cells(grid: Grid, columns: Sequence[Column]) -> list[str]:
    return [
        *footnotes.about_published(grid, any(column.kind == "published" for column in columns)),
        *footnotes.about_rates(grid),
        *footnotes.about_data(grid),
        *footnotes.about_failures(grid),
    ]


def _meaning(grid: Grid, shown: Sequence[str], marked: bool, line: str) -> str:
    rivals = " among methods that saw no labels" if any(method.startswith(SUPERVISED) for method in shown) else ""
    return f"{grid.shown.better} of its {line}{rivals}" if marked else ""


def _named(name: str, members: Sequence[str]) -> str:
    if len(members) == 1:
        return members[0] if name in ("all", members[0]) else f"{name} ({members[0]})"
    if name != "all":
        return f"{name} ({len(members)})"
    return "both shifts" if len(members) == 2 else f"all {len(members)} shifts"
