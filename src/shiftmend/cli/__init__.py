"""The command line: parse, call the library, print. An error is one sentence and exit code 2."""

from __future__ import annotations

import ast
import io
import logging
import re
import shlex
import sys
from importlib import import_module
from typing import Any

import typer

from shiftmend.__about__ import __version__
from shiftmend.cli import adapt, key, profile, rehearse, report, shift, verify
from shiftmend.cli.config import add_command
from shiftmend.errors import ShiftmendError, TapError
from shiftmend.utils.terminal import open_console

app = typer.Typer(
    name="shiftmend",
    help="Mend a model whose measuring device has changed: no labels, no source data.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

# typer does not export the base class of its errors about options, arguments and commands.
_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]


def load_research_commands() -> None:
    """Add the researcher's commands `bench`, `data` and `figure`.

    They live in `shiftmend.research`, which may import every other package. So no import statement names it here.
    """
    for name in ("datasets", "bench", "figure"):
        import_module(f"shiftmend.research.cli.{name}").register(app)


app.command()(adapt.demo)
add_command(app, profile.profile)
add_command(app, rehearse.rehearse)
for command in (profile.inspect, profile.mix, adapt.blocks):
    app.command()(command)
add_command(app, adapt.adapt)
for module in (verify, shift, report, key):
    module.register(app)
load_research_commands()


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """Print the help if no command is named."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; a user's mistake ends in one sentence and exit code 2."""
    console = open_console(stderr=True, soft_wrap=True)
    _show_warnings(console)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # File names may contain bytes that are not valid text.
        sys.stdout.reconfigure(errors="surrogateescape")
    try:
        code = app(args=arguments, prog_name="shiftmend", standalone_mode=False)
    except ShiftmendError as error:
        # Other errors may contain file names, which must stay unchanged.
        said = _translate_arguments(str(error)) if isinstance(error, TapError) else str(error)
        console.print(f"error: {said}")
        code = 2
    except OSError as error:
        named = f"{error.filename} cannot be used ({error.strerror}); see to its name and permissions, or name another"
        console.print(f"error: {named if error.filename and error.strerror else error}")
        code = 2
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except UnicodeEncodeError as error:
        encoding = str(sys.stdout.encoding)
        if encoding.lower() in ("utf-8", "utf8"):
            raise
        missing = ascii(error.object[error.start])
        console.print(f"error: output in {encoding} cannot hold {missing}; set PYTHONIOENCODING=utf-8 and call again")
        code = 2
    except _USAGE_ERROR as error:
        message = getattr(error, "format_message", error.__str__)()
        command = getattr(getattr(error, "ctx", None), "command_path", "shiftmend")
        console.print(f"error: {message} (see `{command} --help`)")
        code = 2
    if code == 130:
        # Ctrl-C, which typer may have converted to an exit code.
        console.print("interrupted")
    sys.exit(code if isinstance(code, int) else 0)


def _translate_arguments(sentence: str) -> str:
    """Replace Python arguments in a message, e.g. output='logits', by the options of the command line."""
    names = {"output": "--output-entry", "head": "--head"}

    def option(found: re.Match[str]) -> str:
        return shlex.join([names[found[1]], str(ast.literal_eval(found[2]))])

    return re.sub(r"""\b(output|head)=(-?\d+|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""", option, sentence)


def _show_warnings(console: Any) -> None:
    """Print each warning of the library as one line."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            console.print(f"{record.levelname.lower()}: {record.getMessage()}")

    logger = logging.getLogger("shiftmend")
    logger.handlers = [Handler(level=logging.WARNING)]
    logger.propagate = False
