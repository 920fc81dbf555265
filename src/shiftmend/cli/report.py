"""The command `report`: write one page on what happened to a model at a new site."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shiftmend.cli.config import add_command
from shiftmend.cli.options import (
    Batch,
    Channels,
    Classes,
    Data,
    Deviation,
    Device,
    Drop,
    Ignore,
    Json,
    Label,
    Mean,
    Model,
    Options,
    Output,
    Pickle,
    ProfileFile,
    Quantities,
    Size,
    Trust,
    Weights,
    Where,
    choose_columns,
    entry,
    gather,
    say,
)
from shiftmend.errors import DataError
from shiftmend.utils.files import check_folder
from shiftmend.utils.json import dumps


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    add_command(app, report)


def report(
    model: Model,
    data: Data,
    profile: ProfileFile,
    out: Annotated[Path, typer.Option("--out", "-o", help="The HTML file to write.")],
    adapted: Annotated[
        Path | None, typer.Option(help="Folder that `adapt --out` wrote; without it: has the data shifted?")
    ] = None,
    samples: Annotated[int, typer.Option(help="Number of inputs on the page; 0 if none may leave the site.")] = 12,
    title: Annotated[str, typer.Option(help="Name of the model on the page.")] = "",
    weights: Weights = None,
    model_option: Options = None,
    output_entry: Output = None,
    label: Label = None,
    classes: Classes = None,
    quantity: Quantities = None,
    drop: Drop = None,
    where: Where = None,
    size: Size = None,
    channels: Channels = None,
    mean: Mean = "0.5",
    std: Deviation = "0.5",
    batch_size: Batch = 256,
    device: Device = "auto",
    allow_pickle: Pickle = False,
    ignore_label: Ignore = None,
    trust: Trust = None,
    as_json: Json = False,
) -> None:
    """Write one HTML page: how accurate the model is here, what to do, and what mending changed.

    Labels, if there are any, are used for scores only.
    """
    from shiftmend.profiles.profile import Profile
    from shiftmend.report.answer import give_answer
    from shiftmend.report.facts import gather as gather_facts
    from shiftmend.report.page import write
    from shiftmend.report.verdicts import state_verdict

    _check_target(out)
    home = Profile.load(profile)
    choice = choose_columns(label, classes, quantity, drop, where, home)
    net, given, preprocess = gather(model, weights, model_option, allow_pickle, data, size, channels, mean, std, choice)
    found = gather_facts(
        net,
        given.inputs,
        home,
        adapted,
        labels=given.labels,
        classes=given.classes,
        ignore_label=ignore_label,
        batch_size=batch_size,
        preprocess=preprocess,
        output=entry(output_entry),
        device=device,
        samples=samples,
        original=None if weights is None else str(weights),
        title=title,
        trust=trust,
    )
    write(found, out)
    answer = give_answer(found)
    if as_json:
        checks = {"before": found.before, "after": found.after}
        values = {name: one.to_json() for name, one in checks.items() if one is not None}
        told = {} if found.estimates is None else {"estimate": found.estimates.to_json()}
        facts = {"report": str(out), "recommendation": answer.choice, **told}
        facts |= {"verdict": state_verdict(found).headline.lower(), "cautions": found.cautions}
        print(dumps(facts | values))
    else:
        # Every terminal can display these characters.
        lines = (answer.headline, answer.truth, answer.advice)
        words = "\n".join(filter(None, lines)).translate({ord("’"): "'", ord("\u00a0"): " "})
        say(f"{words}\nwritten to {out}")


def _check_target(out: Path) -> None:
    """Check that the page replaces nothing but another page."""
    check_folder(out.parent)
    if out.is_dir():
        raise DataError(f"Expected --out to name an HTML file, got the folder {out}.")
    if out.is_file():
        with out.open("rb") as file:
            if not file.read(64).lstrip().lower().startswith((b"<!doctype html", b"<html")):
                raise DataError(f"Expected an HTML page to replace, got {out}. Try another name.")
