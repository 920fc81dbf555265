"""The tables of a benchmark, for comparison with the paper's.

Four rules keep them honest. A mean is taken only over a complete set of shifts, never over those that happen to be
done. If methods have different numbers of seeds, the numbers are shown. `best` is always called an oracle. Differences
from the paper's conditions, and methods that were not run, are listed below the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from shiftmend.research.bench import footnotes
from shiftmend.research.bench.benchmark import Result, sees_labels
from shiftmend.research.bench.grids import Comparison, Grid
from shiftmend.research.bench.published import find_quoted
from shiftmend.research.bench.rendering import Column, Entry, Row, Table

TITLES = {"last": "ours", "best": "best (oracle)", "selected": "selected"}

CAPTIONS = {"last": "last", "best": "best epoch, an oracle", "selected": "selected without labels"}


def summary(results: Sequence[Result], *, groups: Mapping[str, Sequence[str]] | None = None, **about: Any) -> Table:
    """Make a row for each method: the mean over all shifts and over each group, beside the published figure.

    The mean over shifts is taken for each seed that has them all; mean and sample standard deviation are over seeds.

    Args:
        results: Results of any benchmarks.
        groups: Groups of shifts by name.
        about: The other arguments of `Grid`. `shifts` must be all of the benchmark's, or the published mean over all
            is no match.
    """
    grid = _make_grid(results, about)
    sets = grid.sets(groups)
    compared = grid.comparisons(sets)
    shown = _choose_rows(grid)
    columns, rows = _put_side_by_side(
        [
            (grid, _name_set(name, members) + footnotes.origin_marks(grid, members), [compared[m, name] for m in shown])
            for name, members in sets.items()
        ],
    )
    lines = [Row(method, row) for method, row in zip(shown, rows, strict=True)]
    return _make_table(grid, shown, "method", columns, lines, compared)


def per_shift(results: Sequence[Result], *, groups: Mapping[str, Sequence[str]] | None = None, **about: Any) -> Table:
    """Make a row for each shift, and under them the means of `summary`; each method beside its published figure.

    The arguments are those of `summary`.
    """
    grid = _make_grid(results, about)
    shifts = grid.shifts
    means = {name: members for name, members in grid.sets(groups).items() if len(members) > 1 and name not in shifts}
    sets = {shift: (shift,) for shift in shifts} | means
    compared = grid.comparisons(sets)
    shown = _choose_rows(grid)
    columns, rows = _put_side_by_side([(grid, method, [compared[method, name] for name in sets]) for method in shown])
    labels = [_name_set(name, members) + footnotes.origin_marks(grid, members) for name, members in sets.items()]
    lines = [Row(label, row, name in means) for name, label, row in zip(sets, labels, rows, strict=True)]
    return _make_table(grid, shown, "shift", columns, lines, compared)


def across(results: Sequence[Result], *, protocols: Mapping[str, str], **about: Any) -> Table:
    """Make a row for each method, and the mean over all shifts under each of several protocols.

    Args:
        results: Results of any benchmarks.
        protocols: Protocols by their headings.
        about: The other arguments of `Grid`.
    """
    grids = [_make_grid(results, about | {"protocol": protocol}) for protocol in protocols.values()]
    shown, shifts = _choose_rows(*grids), grids[0].shifts
    blocks = []
    entries: dict[tuple[str, str], Comparison] = {}
    for heading, grid in zip(protocols, grids, strict=True):
        compared = grid.comparisons(grid.sets(None))
        blocks.append((grid, heading, [compared[method, "all"] for method in shown]))
        entries |= {(method, heading): compared[method, "all"] for method in shown}
    columns, rows = _put_side_by_side(blocks)
    lines = [Row(method, row) for method, row in zip(shown, rows, strict=True)]
    made = _make_table(grids[0], shown, "method", columns, lines, entries)
    title = f"{grids[0].benchmark}, {', '.join(protocols.values())}: {grids[0].shown.title}, {_name_set('all', shifts)}"
    marks = {mark for grid in grids for mark in footnotes.origin_marks(grid, shifts)}
    notes = [note for grid in grids for note in _note_cells(grid, columns)]
    return replace(made, title=title + "".join(sorted(marks)), notes=tuple(dict.fromkeys((*made.notes, *notes))))


def selection(results: Sequence[Result], **about: Any) -> Table:
    """Show the effect of choosing the epoch without labels: the accuracy of `last`, `selected` and `best`.

    Deviations of the differences are over seeds, each difference being within one run.
    """
    grid = Grid(results=results, **about)
    shifts = grid.shifts
    columns = (
        Column("last", "accuracy"),
        Column("selected", "accuracy"),
        Column("best (oracle)", "accuracy"),
        Column("best - selected", "cost of selection", "difference"),
        Column("selected - last", "gain of selection", "difference"),
    )
    contrasts = ((1, 0, 0), (0, 1, 0), (0, 0, 1), (0, -1, 1), (-1, 1, 0))
    shown = _choose_rows(grid)
    entries = {method: [grid.mean(method, shifts, _contrast(*weights)) for weights in contrasts] for method in shown}
    # There is no best among figures that an oracle chose.
    for part in (0, 1):
        for method in grid.best({method: parts[part] for method, parts in entries.items()}):
            entries[method][part] = replace(entries[method][part], best=True)
    ours = [
        (method, name, parts[part])
        for method, parts in entries.items()
        for part, name in enumerate(("last", "selected"))
    ]
    title = f"{grid.benchmark}, {grid.protocol}: accuracy by choice of epoch, {_name_set('all', shifts)}"
    table = Table(
        title + footnotes.origin_marks(grid, shifts),
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
        _explain_marks(grid, shown, any(entry.best for parts in entries.values() for entry in parts), "column"),
    )
    return count_seeds(table)


def _contrast(last: int, selected: int, best: int) -> Callable[[Result], float | None]:
    """Sum a run's accuracies; unknown unless all three are known, so that all columns are of the same runs."""

    def read(result: Result) -> float | None:
        if result.last is None or result.selected is None or result.best is None:
            return None
        return last * result.last.accuracy + selected * result.selected.accuracy + best * result.best.accuracy

    return read


# ---- parts of a table


def add_quoted(table: Table, grid: Grid) -> Table:
    """Add the rows that the paper quotes from other work to a table of means over all shifts.

    Their figures go into the paper's column of the first heading, which is that of all shifts.
    """
    found = find_quoted(grid.benchmark, grid.protocol, grid.metric) if len(grid.shifts) > 1 else {}
    places = [
        index for index, column in enumerate(table.columns) if (column.kind, column.title) == ("published", "paper")
    ]
    if not found or not places:
        return table
    scale = grid.shown.scale
    rows = []
    for name, figure in found.items():
        entries = [Entry() for _ in table.columns]
        entries[places[0]] = Entry(scale * figure.mean, None if figure.deviation is None else scale * figure.deviation)
        rows.append(Row(f"{name}*", tuple(entries)))
    return replace(table, rows=(*table.rows, *rows), notes=(*table.notes, footnotes.QUOTED))


def put_beside(paper: Table, rerun: Table) -> Table:
    """Join two tables with different published figures; each difference is named after its source."""
    kinds = [{column.kind for column in table.columns} for table in (paper, rerun)]
    if "published" not in kinds[0] or "published" not in kinds[1]:
        chosen = rerun if "published" in kinds[1] else paper
        columns = tuple(_name_side(column, "paper" if chosen is paper else "re-run") for column in chosen.columns)
        return replace(chosen, columns=columns)
    order: list[tuple[Table, int, Column]] = []
    for heading in dict.fromkeys(column.heading for column in paper.columns):
        for table, side in ((paper, "paper"), (rerun, "re-run")):
            order += [
                (table, index, _name_side(column, side))
                for index, column in enumerate(table.columns)
                if column.heading == heading and (table is paper or column.kind in ("published", "difference"))
            ]
    rows = [
        replace(row, entries=tuple((row if table is paper else other).entries[index] for table, index, _ in order))
        for row, other in zip(paper.rows, rerun.rows, strict=True)
    ]
    notes = tuple(dict.fromkeys((*paper.notes, *rerun.notes)))
    return replace(paper, columns=tuple(column for _, _, column in order), rows=tuple(rows), notes=notes)


def _name_side(column: Column, side: str) -> Column:
    return replace(column, title=f"ours - {side}") if column.kind == "difference" else column


def keep_columns(table: Table, keep: Callable[[Column], bool]) -> Table:
    """Keep some of a table's columns; seeds stay counted, for the columns that are left."""
    kept = [index for index, column in enumerate(table.columns) if column.kind != "seeds" and keep(column)]
    cut = replace(
        table,
        columns=tuple(table.columns[index] for index in kept),
        rows=tuple(
            replace(row, entries=tuple(row.entries[index] for index in kept)) for row in table.rows if not row.counts
        ),
    )
    had = len(cut.rows) < len(table.rows) or any(column.kind == "seeds" for column in table.columns)
    return _add_counts(cut) if had else cut


def drop_means(table: Table) -> Table:
    """Drop the means of a table over some of the shifts, because the published mean is over all."""
    return replace(table, rows=tuple(row for row in table.rows if row.counts or not row.summary))


def count_seeds(table: Table) -> Table:
    """Add a column (or a row, if columns are methods) with the number of seeds, if they differ."""
    numbers = {
        len(entry.seeds)
        for row in table.rows
        for entry, column in zip(row.entries, table.columns, strict=True)
        if column.kind == "ours" and entry.value is not None
    }
    return _add_counts(table) if len(numbers) > 1 else table


def _add_counts(table: Table) -> Table:
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


# ---- what the tables share


def _make_grid(results: Sequence[Result], about: Mapping[str, Any]) -> Grid:
    options: dict[str, Any] = {"beside": "paper", **about}
    return Grid(results=results, **options)


def _choose_rows(*grids: Grid) -> list[str]:
    """List the methods that were run; if there are none, all methods, to show the published figures."""
    run = {method for grid in grids for method in grid.run}
    return [method for method in grids[0].methods if method in run] or list(grids[0].methods)


def _put_side_by_side(
    blocks: Sequence[tuple[Grid, str, Sequence[Comparison]]],
) -> tuple[list[Column], list[tuple[Entry, ...]]]:
    """Make columns and rows from blocks of a heading and the comparisons under it.

    A block without any published figure has no columns for them.
    """
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
    # "ours" under every heading would say nothing.
    if all(column.kind == "ours" for column in columns):
        suffix = " (oracle)" if grid.which == "best" else ""
        columns = [replace(column, title=column.heading + suffix, heading="") for column in columns]
    return columns, rows


def _make_table(
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
        *_note_cells(grid, columns),
    )
    marked = _explain_marks(grid, shown, any(entry.best for _, _, entry in ours), line)
    title = f"{grid.benchmark}, {grid.protocol}: {grid.shown.title}{caption}"
    return count_seeds(Table(title, corner, tuple(columns), tuple(rows), notes, marked))


def _note_cells(grid: Grid, columns: Sequence[Column]) -> list[str]:
    return [
        *footnotes.about_published(grid, any(column.kind == "published" for column in columns)),
        *footnotes.about_rates(grid),
        *footnotes.about_data(grid),
        *footnotes.about_failures(grid),
    ]


def _explain_marks(grid: Grid, shown: Sequence[str], marked: bool, line: str) -> str:
    rivals = " among methods that saw no labels" if any(map(sees_labels, shown)) else ""
    return f"{grid.shown.better} of its {line}{rivals}" if marked else ""


def _name_set(name: str, members: Sequence[str]) -> str:
    if len(members) == 1:
        return members[0] if name in ("all", members[0]) else f"{name} ({members[0]})"
    if name != "all":
        return f"{name} ({len(members)})"
    return "both shifts" if len(members) == 2 else f"all {len(members)} shifts"
