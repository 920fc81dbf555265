"""`write`: one HTML file that needs nothing else, from facts."""

from __future__ import annotations

import base64
import hashlib
import os
from importlib import resources

from shiftmend.__about__ import __version__
from shiftmend.errors import DataError
from shiftmend.report import answers, distances, protocol, sections
from shiftmend.report.facts import Facts
from shiftmend.report.markup import Markup, element, join
from shiftmend.report.verdicts import state
from shiftmend.utils.checks import kind
from shiftmend.utils.files import as_path, said_where, write_atomically


def write(facts: Facts, path: str | os.PathLike[str]) -> None:
    """Write the report to one file, in one step."""
    target = as_path(path, "the file to write")
    if not isinstance(facts, Facts):
        raise DataError(f"a report is written of {kind(facts)}; expected what report.facts gives")
    page = render(facts).encode()
    with said_where(target):
        write_atomically(target, page)


def render(facts: Facts) -> str:
    """The whole page as text."""
    style, script = _part("page.css"), _part("page.js")
    # the page may load nothing, and run nothing but this very script, whatever its texts hold
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="referrer", content="no-referrer"),
        element("title", f"{facts.title}: {state(facts).headline.lower()}"),
        element("style", Markup(style)),
    )
    body = element(
        "body",
        sections.opening(facts),
        element(
            "main",
            sections.verdict(facts),
            sections.inputs(facts),
            distances.section(facts),
            sections.training(facts),
            answers.predictions(facts),
            answers.scores(facts),
            protocol.stored(facts),
            protocol.run(facts),
            protocol.undo(facts),
        ),
        element(
            "footer",
            f"Made by shiftmend {__version__} from this site’s data and the profile alone. The page loads nothing "
            "from elsewhere and sends nothing.",
        ),
        element("script", Markup(script)),
    )
    return join(Markup("<!DOCTYPE html>\n"), element("html", head, body, lang="en"), "\n")


def _part(name: str) -> str:
    return resources.files("shiftmend.report").joinpath(name).read_text(encoding="utf-8")
