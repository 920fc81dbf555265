"""The command line: parses, calls the library, prints. Errors are one sentence and exit code 2."""

from __future__ import annotations

import ast
import io
import logging
import re
import shlex
import sys

import typer
from rich.console import Console

from shiftmend.__about__ import __version__
from shiftmend.cli import adapt as core
from shiftmend.cli import profile as profiling
from shiftmend.cli import report as reporting
from shiftmend.cli import shift as shifting
from shiftmend.cli import verify as judging
from shiftmend.errors import ShiftmendError, TapError
from shiftmend.research.cli import bench, datasets
from shiftmend.research.cli import figure as drawing

app = typer.Typer(
    name="shiftmend",
    help="Mend a model whose measuring device has changed: no labels, no source data.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


for command in (core.demo, profiling.profile, profiling.inspect, profiling.mix, core.blocks, core.adapt):
    app.command()(command)


judging.register(app)


datasets.register(app)


shifting.register(app)


reporting.register(app)


bench.register(app)


drawing.register(app)


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; every mistake of the user's ends in one sentence and exit code 2."""
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)
    _show_warnings(console)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="surrogateescape")  # names of files may hold bytes that are no text
    try:
        code = app(args=arguments, prog_name="shiftmend", standalone_mode=False)
    except ShiftmendError as error:
        said = _in_options(str(error)) if isinstance(error, TapError) else str(error)  # others may name files
        console.print(f"error: {said}")
        code = 2
    except OSError as error:
        named = f"{error.filename} cannot be used ({error.strerror}); see to its name and permissions, or name another"
        console.print(f"error: {named if error.filename and error.strerror else error}")
        code = 2
    except KeyboardInterrupt:
        code = 130
    except UnicodeEncodeError as error:
        encoding = str(sys.stdout.encoding)
        if encoding.lower() in ("utf-8", "utf8"):
            raise
        missing = ascii(error.object[error.start])
        console.print(f"error: output in {encoding} cannot hold {missing}; set PYTHONIOENCODING=utf-8 and call again")
        code = 2
    except Exception as error:
        message = getattr(error, "format_message", None)  # a wrong option, argument or command name
        if message is None:
            if type(error).__name__ != "Abort":
                raise
            code = 130
        else:
            command = getattr(getattr(error, "ctx", None), "command_path", "shiftmend")
            console.print(f"error: {message()} (see `{command} --help`)")
            code = 2
    if code == 130:  # Ctrl-C, which typer may have made an exit code of
        console.print("interrupted")
    sys.exit(code if isinstance(code, int) else 0)


def _in_options(sentence: str) -> str:
    """What to write in Python, e.g. output='logits', as it is written here."""
    names = {"output": "--output-entry", "head": "--head"}

    def option(found: re.Match[str]) -> str:
        return shlex.join([names[found[1]], str(ast.literal_eval(found[2]))])

    return re.sub(r"""\b(output|head)=(-?\d+|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""", option, sentence)


def _show_warnings(console: Console) -> None:
    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            console.print(f"{record.levelname.lower()}: {record.getMessage()}")

    logger = logging.getLogger("shiftmend")
    logger.handlers = [Handler(level=logging.WARNING)]
    logger.propagate = False
