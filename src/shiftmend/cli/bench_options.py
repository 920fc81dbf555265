"""What the commands under `bench` share: their options, and how they print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from shiftmend.cli.options import say
from shiftmend.errors import DataError
from shiftmend.files import said_where, write_atomically
from shiftmend.strict_json import dumps

Name = Annotated[str, typer.Argument(metavar="BENCHMARK", help="A name from `shiftmend bench list`, or file.py:NAME.")]
Folder = Annotated[Path, typer.Option("--folder", "-f", help="Results, source models and profiles lie here.")]
Results = Annotated[Path, typer.Option("--folder", "-f", help="Results lie here; also a compact export.")]
Protocol = Annotated[str, typer.Option(help="offline, online, few-shot-5, ...; see `shiftmend bench show`.")]
Methods = Annotated[str | None, typer.Option(help="Only these, with commas.")]
Seeds = Annotated[str | None, typer.Option(help="These instead of the benchmark's own, with commas.")]
Rates = Annotated[
    str | None, typer.Option("--learning-rates", help="Choose among these without labels; with commas; not online.")
]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Write to this file instead of printing.")]
HOME = Path("bench")
LARGEST_SEED = 2**32 - 1


def print_json(value: Any, out: Path | None = None) -> None:
    give(dumps(value) + "\n", out)


def give(text: str, out: Path | None) -> None:
    if out is None:
        print(text, end="" if text.endswith("\n") else "\n")
        return
    with said_where(out):
        write_atomically(out, text.encode())
    say(f"written to {out}")


def names(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def seeds_of(text: str | None) -> list[int] | None:
    try:
        found = None if text is None else [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if found is not None and (not found or not all(0 <= seed <= LARGEST_SEED for seed in found)):
        raise DataError(f"--seeds {text!r} should be whole numbers from 0 to {LARGEST_SEED}, with commas")
    return found


def rates_of(text: str | None) -> list[float] | None:
    try:
        found = None if text is None else [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if found is not None and (not found or not all(0 < rate < float("inf") for rate in found)):
        raise DataError(f"--learning-rates {text!r} should be positive numbers with commas")
    return found


def root_of(data_root: Path | None) -> Path | None:
    if data_root is not None and not data_root.expanduser().is_dir():
        raise DataError(f"the data folder {data_root} does not exist; name the folder that the data sets lie in")
    return None if data_root is None else data_root.expanduser()
