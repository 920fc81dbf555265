"""`data list`, `data fetch`, `data make` and `data verify`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from shiftmend.cli.options import Json, Root, columns, say, show
from shiftmend.utils.json import dumps

data = typer.Typer(help="List, fetch, make and check data sets.", rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.add_typer(data, name="data")


@data.callback(invoke_without_command=True)
def show_help(context: typer.Context) -> None:
    """Print the help if no command is named."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@data.command("list")
def list_sets(as_json: Json = False) -> None:
    """List all data sets that shiftmend reads, with their sizes and whether they can be fetched."""
    from shiftmend.research.datasets.catalogue import listing

    rows = listing()
    if as_json:
        print(dumps([asdict(row) for row in rows]))
        return
    table = columns("data set", "what it is", "download")
    for row in rows:
        size = "size unknown" if row.download_bytes is None else f"{row.download_bytes / 1e6:,.0f} MB"
        table.add_row(row.dataset, row.summary, size if row.fetchable else "by hand")
    show(table)


@data.command()
def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name from `shiftmend data list`.")],
    data_root: Root = None,
    as_json: Json = False,
) -> None:
    """Download a data set, check it and put it where the loaders look."""
    from shiftmend.research.datasets.download import fetch as fetch_set
    from shiftmend.utils.progress import progress_bar

    with progress_bar(False if as_json else None, f"fetching {name}", None) as bar:
        row = fetch_set(name, data_root, report=lambda p: bar.advance(0, f"{p.file} {_amount(p)} {p.message}"))
    _show([row], as_json)


@data.command()
def make(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="emnist-da, mnist-c, mnist-m, cifar-10-c or cifar-100-c.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="A folder, laid out like the data root; may be the same.")],
    shifts: Annotated[str | None, typer.Option(help="Only these, with commas.")] = None,
    splits: Annotated[str | None, typer.Option(help="Only these of train, valid and test, with commas.")] = None,
    data_root: Root = None,
    as_json: Json = False,
) -> None:
    """Make a shifted set from its clean images, as files in the published layout; a second call resumes."""
    from shiftmend.research.datasets.made_sets import describe_made
    from shiftmend.research.datasets.made_sets import make as make_set
    from shiftmend.utils.progress import progress_bar

    with progress_bar(False if as_json else None, f"making {name}", None) as bar:
        made = make_set(
            name,
            out,
            root=data_root,
            only=_split_names(shifts),
            splits=_split_names(splits),
            report=lambda part, done, total: bar.advance(0, f"{part}  {done} of {total} parts"),
        )
    if as_json:
        print(dumps(asdict(made) | {"folder": str(made.folder)}))
    else:
        say(describe_made(made))


def _split_names(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


@data.command()
def verify(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAMES", help="Only these sets.")] = None,
    data_root: Root = None,
    checksums: Annotated[bool, typer.Option(help="Also compare published checksums.")] = True,
    as_json: Json = False,
) -> None:
    """Check the files in the data root against the published ones; exit code 1 if any is damaged."""
    from shiftmend.research.datasets.catalogue import verify as verify_sets

    rows = verify_sets(data_root, names or None, checksums=checksums)
    _show(rows, as_json)
    if any(row.state == "damaged" for row in rows):
        raise typer.Exit(1)


def _amount(progress: Any) -> str:
    done = f"{progress.done / 1e6:,.1f}"
    return f"{done} of {progress.total / 1e6:,.1f} MB" if progress.total else f"{done} MB"


def _show(rows: list[Any], as_json: bool) -> None:
    if as_json:
        print(dumps([asdict(row) for row in rows]))
        return
    table = columns("data set", "state", "detail")
    colours = {"complete": "green", "damaged": "red"}
    for row in rows:
        table.add_row(row.dataset, Text(row.state, colours.get(row.state, "")), row.detail)
    show(table)
