"""Shared options of commands, parsing of their text, and printing of results."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from shiftmend.errors import DataError
from shiftmend.utils.terminal import open_console

if TYPE_CHECKING:
    from torch import nn

    from shiftmend.cli import loading
    from shiftmend.profiles.profile import Profile

WIDTH = 100
"""Width in columns if there is no terminal."""

Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A built-in network, package.module:factory, or file.py:factory."),
]
Data = Annotated[
    Path,
    typer.Option(
        "--data", "-d", help="A folder of images (flat, or one per class), an .npz or .npy, a .csv, .parquet or .mat."
    ),
]
Weights = Annotated[Path | None, typer.Option("--weights", "-w", help="A safetensors file with the model's weights.")]
Options = Annotated[list[str] | None, typer.Option("--model-option", help="name=value for the factory; repeatable.")]
Pickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Read a .pt file. A pickle can run code: trust its origin.")
]
ProfileFile = Annotated[Path, typer.Option("--profile", "-p", help="The source's profile.")]
Sign = Annotated[Path | None, typer.Option("--sign", metavar="KEY", help="Sign with this private key.")]
Trust = Annotated[
    str | None,
    typer.Option(
        "--trust", metavar="PUBKEY", help="Public key, or its file; refuse files that are not signed with it."
    ),
]
Size = Annotated[int | None, typer.Option(help="Scale images to this side.")]
Channels = Annotated[
    int | None, typer.Option(help="Repeat grey images to this number of channels; 1 turns colour grey.")
]
Mean = Annotated[str, typer.Option(help="Mean to subtract from images in 0..1; one number, or one per channel.")]
Deviation = Annotated[
    str, typer.Option("--std", help="Standard deviation to divide by; one number, or one per channel.")
]
Batch = Annotated[int, typer.Option("--batch-size", help="Number of samples per batch.")]
MaybeBatch = Annotated[
    int | None, typer.Option("--batch-size", help="Number of samples per batch; default: 256, or all if there are few.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, ...")]
Head = Annotated[str | None, typer.Option(help="Name of the model's last layer, if it is not found automatically.")]
Output = Annotated[str | None, typer.Option("--output-entry", help="Entry of a tuple or dict that is the output.")]
Blocks = Annotated[
    list[str] | None,
    typer.Option("--block", help="Modules of one block, with commas; repeat for each block, bottom first."),
]
Taps = Annotated[
    list[str] | None,
    typer.Option("--tap", help="name=module, e.g. early=layer1 or tokens=blocks.2@-1; repeatable."),
]
Root = Annotated[Path | None, typer.Option("--data-root", help="Folder of the data sets; default: SHIFTMEND_DATA.")]
Ignore = Annotated[int | None, typer.Option("--ignore-label", help="A class number to ignore in all scores, e.g. 255.")]
Candidates = Annotated[
    str | None, typer.Option(help="Methods to try, with commas: names, or file.py:Class of your own.")
]
Label = Annotated[str | None, typer.Option("--label", help="Of a table: the column with class numbers or names.")]
Classes = Annotated[str | None, typer.Option(help="Names of the classes in the order of their numbers, with commas.")]
Quantities = Annotated[
    list[str] | None, typer.Option("--quantity", help="Of a table: a column that the model predicts; repeatable.")
]
Group = Annotated[
    str | None,
    typer.Option("--group", help="Of a table: the column that names the patient, recording or object of each row."),
]
Drop = Annotated[list[str] | None, typer.Option("--drop", help="Of a table: a column to leave out; repeatable.")]
Where = Annotated[
    list[str] | None, typer.Option("--where", help="Of a table: take only rows with column=value; repeatable.")
]
Json = Annotated[bool, typer.Option("--json", help="Print machine-readable results.")]


def screen() -> Console:
    """Open standard output, anew for each use, because its kind and width may have changed.

    File and class names may contain brackets and colons, which are printed literally, and control characters, which are
    escaped.
    """
    console = open_console(soft_wrap=True)
    if not console.is_terminal:
        console.width = WIDTH
    return console


def say(text: str) -> None:
    """Print a line."""
    screen().print(text)


def columns(*titles: str, numbers: tuple[str, ...] = ()) -> Table:
    """Make an empty table that never truncates text and right-aligns numbers."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        made.add_column(title, justify="right" if title in numbers else "left", overflow="fold")
    return made


def show(table: Table) -> None:
    """Print a table."""
    screen().print(table, soft_wrap=False)


def by_all_processes(command: Callable[..., None]) -> Callable[..., None]:
    """Share the work of a command among the processes of `torchrun`; only the first one writes and prints."""

    @functools.wraps(command)
    def shared(**arguments: Any) -> None:
        from shiftmend.distributed.collectives import torchrun_process_group

        with torchrun_process_group():
            command(**arguments)

    return shared


def gather(
    model: str,
    weights: Path | None,
    model_option: list[str] | None,
    allow_pickle: bool,
    data: Path,
    size: int | None,
    channels: int | None,
    mean: str,
    std: str,
    choice: dict[str, Any],
) -> tuple[nn.Module, loading.Data, loading.Normalisation]:
    """Load the model and the data that the options name, and make the preprocessing function."""
    from shiftmend.cli.loading import load_data, load_model, parse_normalisation

    preprocess = parse_normalisation(mean, std, channels)
    net = load_model(model, weights, model_option or [], allow_pickle)
    return net, load_data(data, size, choice), preprocess


def choose_columns(
    label: str | None,
    classes: str | None,
    quantity: list[str] | None,
    drop: list[str] | None,
    where: list[str] | None,
    profile: Profile | None = None,
    group: str | None = None,
) -> dict[str, Any]:
    """Return the roles of a table's columns as arguments of `read_table`; inputs are the columns of a profile."""
    if classes is not None and label is None:
        raise DataError(
            "Expected --label beside --classes, which names its classes, got none. Name the column with --label."
        )
    given = {
        "label": label,
        "classes": tuple(name.strip() for name in classes.split(",")) if classes else (),
        "quantities": tuple(quantity or ()),
        "group": group,
        "drop": tuple(drop or ()),
        "where": dict(_condition(text) for text in where or ()),
    }
    used = {name: value for name, value in given.items() if value}
    return used | ({} if profile is None else {"columns": profile.inputs.columns})


def _condition(text: str) -> tuple[str, str]:
    """Parse `--where column=value`."""
    name, equals, value = text.partition("=")
    if not (equals and name):
        raise DataError(f"Expected --where to read column=value, e.g. board=3, got {text!r}.")
    return name, value


def block_names(blocks: list[str] | None) -> list[list[str]] | None:
    """Parse `--block conv1,bn1`, one option per block."""
    return [text.split(",") for text in blocks] if blocks else None


def named_tap(text: str) -> tuple[str, str]:
    """Parse `--tap name=module`."""
    name, equals, spec = text.partition("=")
    if not (equals and name and spec):
        raise DataError(f"Expected --tap to read name=module, e.g. early=layer1, got {text!r}.")
    return name, spec


def entry(text: str | None) -> int | str | None:
    """Parse `--output-entry`: an index or a key."""
    return text if text is None else whole_or_text(text)


def whole_or_text(text: str) -> int | str:
    """Convert text to an integer if possible."""
    return int(text) if re.fullmatch("-?[0-9]+", text) else text


def method_option(text: str) -> tuple[str, Any]:
    """Parse `--option name=value`; values with commas become a tuple."""
    key, equals, value = text.partition("=")
    if not equals:
        raise DataError(f"Expected --option to read name=value, e.g. learning_rate=0.1, got {text!r}.")
    if "," in value:
        parts = tuple(_number(part) for part in value.split(",") if part)
        if key == "learning_rate" and any(isinstance(part, str) for part in parts):
            raise DataError(f"Expected numbers in --option, e.g. learning_rate=0.01,0.1, got {text!r}.")
        return key, parts
    return key, _number(value)


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
