"""A table as pure data, and what can be made of one or two that are there: a part, a join, a count of seeds.

`shiftmend.bench.tables` makes tables of results, `shiftmend.bench.rendering` writes them out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shiftmend.bench.grids import Entry


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
