"""Options from a file: `--config site.toml`, `--print-config` and `--quiet`, which the main commands share."""

from __future__ import annotations

import functools
import inspect
import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from shiftmend.errors import DataError
from shiftmend.utils.logs import hide_warnings

SHARED = {
    "config": (
        Path | None,
        None,
        typer.Option("--config", help="A TOML file with options by name; the command line takes precedence."),
    ),
    "print_config": (bool, False, typer.Option("--print-config", help="Print all options as such a file, and exit.")),
    "quiet": (bool, False, typer.Option("--quiet", help="Show only results and errors: no progress, no warnings.")),
}
"""Type, default and description of the options that this module adds to a command."""


def add_command(app: typer.Typer, command: Callable[..., None]) -> None:
    """Add a command whose options may come from a file."""
    app.command(cls=ConfiguredCommand)(_with_shared_options(command))


def _with_shared_options(command: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(command)
    def run(config: Path | None, print_config: bool, quiet: bool, **arguments: Any) -> None:
        # The import is late, because it imports torch, and the help should not wait for that.
        from shiftmend.utils.progress import piped_progress

        # `ConfiguredCommand` has already handled the file.
        with piped_progress("off" if quiet else "lines"):
            if quiet:
                with hide_warnings():
                    command(**arguments)
            else:
                command(**arguments)

    # String annotations are evaluated here, where the names of the command's module are known.
    signature = inspect.signature(command, eval_str=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    annotations = {name: Annotated[kind, option] for name, (kind, _, option) in SHARED.items()}
    added = [
        inspect.Parameter(name, keyword, default=default, annotation=annotations[name])
        for name, (_, default, _) in SHARED.items()
    ]
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *added])  # type: ignore[attr-defined]
    run.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()} | annotations
    return run


class ConfiguredCommand(TyperCommand):
    """A command that reads options that are missing on the command line from a TOML file."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # The parser itself checks nothing, so that required options may come from the file.
        given, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        if isinstance(path := given.get("config"), str):
            ctx.default_map = read_config(Path(path), self, _list_commands(ctx))
        if given.get("print_config"):
            print(self._describe(ctx, given), end="")
            raise typer.Exit
        return super().parse_args(ctx, args)

    def _describe(self, ctx: Any, given: Mapping[str, Any]) -> str:
        """Write all options with their values as TOML; options without a value become comments."""
        lines = []
        for name, parameter in list_options(self).items():
            value, _ = parameter.consume_value(ctx, given)
            text = _as_toml(value)
            lines.append(f"# {name} =" if text is None else f"{name} = {text}")
        return "\n".join([*lines, ""])


def list_options(command: TyperCommand) -> dict[str, Any]:
    """Return the options and arguments that a file may contain, by their names on the command line."""
    found = {}
    for parameter in command.params:
        if parameter.name in SHARED or parameter.name == "help":
            continue
        long = [text[2:] for text in parameter.opts if text.startswith("--")]
        found[long[0] if long else str(parameter.name)] = parameter
    return found


def read_config(path: Path, command: TyperCommand, others: Iterable[TyperCommand]) -> dict[str, Any]:
    """Read the options of a command from a TOML file.

    Top-level entries apply to every command that has such an option; entries of a table, e.g. `[adapt]`, to one
    command.

    Args:
        path: The file.
        command: The command that is called.
        others: All commands that the file may contain options for.

    Returns:
        Values by the names of the command's parameters, as text.

    Raises:
        DataError: If the file is not TOML, or names an unknown option or command.
    """
    try:
        content = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"Expected a TOML file, got {path}, which is none: {error}.") from error
    known = {str(one.name): list_options(one) for one in others}
    own, anywhere = list_options(command), {name for options in known.values() for name in options}
    values = {}
    for key, value in content.items():
        if isinstance(value, dict) and key in known:
            continue
        name = _find_name(key, anywhere | set(known), path)
        if name in own:
            values[str(own[name].name)] = _as_text(value, own[name])
    for key, value in content.items():
        for inner, part in value.items() if isinstance(value, dict) and key in known else ():
            name = _find_name(inner, set(known[key]), path)
            if key == command.name:
                values[str(own[name].name)] = _as_text(part, own[name])
    return values


def _find_name(key: str, known: set[str], path: Path) -> str:
    name = key.replace("_", "-")
    if name in known:
        return name
    close = get_close_matches(name, known, 1)
    hint = f"Try {close[0]!r}" if close else "See --print-config"
    raise DataError(f"Expected options of the command in {path}, got {key!r}. {hint}.")


def _as_text(value: Any, parameter: Any) -> Any:
    """Convert a TOML value to text as on the command line, so that the command line checks the value.

    Args:
        value: The value in the TOML file. A table becomes pairs `name=value`.
        parameter: The option that takes the value; None for a part of a list or table.

    Returns:
        Text; a list of texts for an option that may be repeated; the bool itself for a flag.
    """
    if isinstance(value, dict):
        # Options such as `option` and `tap` are pairs of name and value.
        value = [f"{name}={_as_text(part, None)}" for name, part in value.items()]
    if isinstance(value, list):
        parts = [_as_text(part, None) for part in value]
        return parts if parameter is not None and parameter.multiple else ",".join(parts)
    if parameter is not None and getattr(parameter, "multiple", False):
        return [_as_text(value, None)]
    if isinstance(value, bool):
        return value if getattr(parameter, "is_flag", False) else str(value).lower()
    return str(value)


def _as_toml(value: Any) -> str | None:
    """Format a value as TOML; None if there is no value."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(str(_as_toml(part)) for part in value) + "]" if value else None
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, int | float | str | Path):
        return None
    text = str(value)
    for kind in (int, float):
        try:
            if str(kind(text)) == text:
                return text
        except ValueError:
            continue
    return json.dumps(text, ensure_ascii=False)


def _list_commands(ctx: Any) -> list[TyperCommand]:
    commands = getattr(ctx.find_root().command, "commands", {})
    return [command for command in commands.values() if isinstance(command, ConfiguredCommand)]
