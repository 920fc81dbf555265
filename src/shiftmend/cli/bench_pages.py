"""`bench page | storage`: results as pages for people."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from shiftmend.cli.bench_options import HOME, Name, Out, Results, give, names, print_json, root_of
from shiftmend.cli.options import Json, Root, screen
from shiftmend.errors import DataError

NOTES = "Markdown to include; default notes/BENCHMARK.md beside the file of --out, if there is one."


def page(
    benchmark: Name,
    folder: Results = HOME,
    notes: Annotated[Path | None, typer.Option(help=NOTES)] = None,
    data_root: Root = None,
    out: Out = None,
) -> None:
    """Everything that has come of a benchmark as a page in Markdown, with how it was made and what is missing."""
    from shiftmend.bench.pages import page as write_page
    from shiftmend.bench.suite import find

    if notes is None and out is not None:
        usual = out.parent / "notes" / f"{find(benchmark).name}.md"
        notes = usual if usual.is_file() else None
    if notes is not None and not notes.is_file():
        raise DataError(f"there are no notes at {notes}; name a Markdown file, or leave them out")
    try:
        own = "" if notes is None else notes.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise DataError(f"the notes {notes} are no text in UTF-8; name a Markdown file, or leave them out") from None
    give(write_page(benchmark, folder, own, root_of(data_root)), out)


def storage(
    benchmarks: Annotated[str | None, typer.Option(help="Only these, with commas.")] = None,
    folder: Results = HOME,
    data_root: Root = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """What a profile costs beside the model and the data, measured from files; with --out as a page in Markdown."""
    from shiftmend.bench import rendering
    from shiftmend.bench import storage as measuring

    chosen = names(benchmarks) or measuring.MEASURED
    sizes = [measuring.measure(benchmark, folder, root_of(data_root)) for benchmark in chosen]
    if as_json:
        print_json([asdict(one) for one in sizes], out)
    elif out is not None:
        give(measuring.page(sizes), out)
    else:
        terminal = screen()
        terminal.print(rendering.terminal(measuring.table(sizes), terminal.width))
