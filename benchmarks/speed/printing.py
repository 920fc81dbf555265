"""Tables on a terminal, with rich alone: the script in `benchmarks` has no need of the command line."""

from __future__ import annotations

from speed.timing import Table

WIDTH = 150
"""Columns where there is no terminal that says how many it has."""


def show(table: Table) -> None:
    """Nothing is cut off: what is too wide goes on in the next line."""
    from rich.console import Console
    from rich.table import Table as Grid

    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = WIDTH
    if table.titles:
        grid = Grid(box=None, pad_edge=False, header_style="bold")
        for title in table.titles:
            grid.add_column(title, overflow="fold")
        for row in table.rows:
            grid.add_row(*row)
        console.print(grid, soft_wrap=False)
    for note in table.notes:
        console.print(note, markup=False)
    console.print()
