"""Write the page of the command line from the options that typer knows."""

from __future__ import annotations

import inspect
from typing import Any

import typer

from shiftmend.cli import app

INTRODUCTION = """\
# Command line

Every command takes `--help`. Commands that print results take `--json`. Mistakes in a call are one sentence and exit
code 2; Ctrl-C is exit code 130.

`MODEL` is `file.py:factory`, `package.module:factory` or the name of a built-in network. Images reach the model in -1
to 1. If your model was trained on another range, give every command the same `--mean` and `--std`; see
[data](../data.md#on-the-command-line).
"""


def write_command_line() -> str:
    """Return the page: a section for each command, with a table of its options."""
    sections = [INTRODUCTION]
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        commands = getattr(command, "commands", None)
        if commands is None:
            sections.append(write_command(f"shiftmend {name}", command))
            continue
        sections.append(f"## `shiftmend {name}`\n\n{clean(command.help)}\n")
        sections += [write_command(f"shiftmend {name} {inner}", one, "###") for inner, one in commands.items()]
    return "\n".join(sections)


def write_command(path: str, command: Any, level: str = "##") -> str:
    """Return the section of one command."""
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    usage = " ".join([path, *(one.name.upper() for one in arguments), "[OPTIONS]"])
    lines = [f"{level} `{path}`", "", clean(command.help), "", "```text", usage, "```", ""]
    rows = [describe(one) for one in command.params if not getattr(one, "hidden", False) and one.name != "help"]
    if rows:
        lines += ["| option | default | meaning |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def describe(option: Any) -> str:
    """Return the row of an option or argument."""
    if option.param_type_name == "argument":
        names = f"`{option.name.upper()}`"
    else:
        names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    default = option.default
    # A seed of 0 is a default to show, unlike a switch that is off.
    unset = default is None or default is False or default in ((), [])
    shown = "required" if option.required else "" if unset else f"`{default}`"
    return f"| {names} | {shown} | {clean(option.help).replace('|', chr(92) + '|')} |"


def clean(text: str | None) -> str:
    """Return a help text without indentation; what would be Markdown or HTML is escaped."""
    return inspect.cleandoc(text or "").replace("\b\n", "").replace("<", "&lt;").replace("*", r"\*")
