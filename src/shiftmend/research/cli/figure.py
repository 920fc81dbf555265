"""The command `figure`: draw the paper's figures from a benchmark's run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shiftmend.cli.options import Root, columns, say, show
from shiftmend.research.cli.bench import HOME, Methods, Name, Protocol, Results, names, root_of
from shiftmend.utils.files import said_where

NAME = typer.Argument(metavar="NAME", help="Name of a figure; `list` shows all.")


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(figure)


def figure(
    name: Annotated[str, NAME],
    benchmark: Name = "digits",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A .png or .svg; default NAME.png.")] = None,
    folder: Results = HOME,
    protocol: Protocol = "offline",
    methods: Methods = None,
    shifts: Annotated[str | None, typer.Option(help="Only these, with commas; some figures show the first.")] = None,
    seed: Annotated[int | None, typer.Option(help="Only this one.")] = None,
    layer: Annotated[str | None, typer.Option(help="For `patches`: a convolution; default: the first.")] = None,
    unit: Annotated[int, typer.Option(help="For `patches`: a filter of the convolution.")] = 0,
    data_root: Root = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
) -> None:
    """Draw a figure from the folder of a run; `shiftmend figure list` lists the figures.

    Figures of results alone (dots, shots, restoration) can be drawn from a compact export as well.
    """
    from shiftmend.research.figures.gallery import FIGURES, Request, draw
    from shiftmend.research.figures.style import save

    if name == "list":
        table = columns("figure", "what it shows")
        for known, (_, text) in FIGURES.items():
            table.add_row(known, text)
        show(table)
        return
    target = out or Path(f"{name}.png")
    request = Request(
        benchmark,
        folder,
        protocol,
        names(methods),
        names(shifts),
        seed,
        root_of(data_root),
        device,
        layer,
        unit,
    )
    drawn = draw(name, request)
    with said_where(target):
        save(drawn, target)
    say(f"written to {target}")
