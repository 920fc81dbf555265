"""`key`: make the keys for signing profiles and results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shiftmend.cli import options as opt
from shiftmend.cli.options import say
from shiftmend.utils.json import dumps

key = typer.Typer(
    help="Keys to sign profiles and results with (--sign), and to trust (--trust).", rich_markup_mode=None
)


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.add_typer(key, name="key")


@key.callback(invoke_without_command=True)
def show_help(context: typer.Context) -> None:
    """Show the help if no command is named."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@key.command()
def new(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File of the private key to write; it must not exist.")],
    as_json: opt.Json = False,
) -> None:
    """Make a key pair: FILE is private, for --sign; FILE.pub is public, for --trust at every site."""
    from shiftmend.utils.signing import new_key

    made = new_key(file)
    if as_json:
        print(dumps({"private": str(file), "public_file": f"{file}.pub", "public": made.public}))
    else:
        say(f"private key {file}: keep it to yourself\npublic key {file}.pub: {made.public}")
