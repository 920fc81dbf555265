"""`bench speed`: how fast this machine adapts, as ratios measured in one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shiftmend.cli.bench_options import names, print_json
from shiftmend.cli.options import Json


def speed(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    only: Annotated[
        str | None, typer.Option(help="Some of steps, precision, compiled, histogram, packed, growth, with commas.")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(help="Measurements of each; medians are shown. Default 5 on a GPU, 3 on a CPU.", min=1)
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write JSON to this file as it is measured.")] = None,
    as_json: Json = False,
) -> None:
    """Steps of adaptation beside a plain loop and supervised training, precisions, the soft histogram, packed cells."""
    from shiftmend.bench.speed import report
    from shiftmend.bench.speed.printing import show

    facts = report(device, names(only), repeats=repeats, show=None if as_json else show, out=out)
    if as_json:
        print_json(facts)
