"""Writing the report as one self-contained HTML file."""

from __future__ import annotations

import base64
import functools
import hashlib
import os
from importlib import resources
from typing import TYPE_CHECKING

from markupsafe import Markup

from shiftmend.__about__ import __version__
from shiftmend.errors import DataError
from shiftmend.report import charts
from shiftmend.report.answer import give_answer
from shiftmend.report.facts import Facts
from shiftmend.report.formatting import format_number, format_percent, make_printable
from shiftmend.report.sections import SECTIONS, SPECIALIST, Section
from shiftmend.utils.checks import counted, kind
from shiftmend.utils.files import as_path, said_where, write_atomically

if TYPE_CHECKING:
    from jinja2 import Environment


def write(facts: Facts, path: str | os.PathLike[str]) -> None:
    """Write a report to one HTML file, atomically.

    Args:
        facts: The result of `shiftmend.report.gather`.
        path: The file to write. An existing file is replaced.

    Raises:
        ShiftmendError: If `facts` is not the result of `gather`, or the file cannot be written.

    Example:
        >>> import tempfile, torch, shiftmend
        >>> layers = torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
        >>> model, source = torch.nn.Sequential(*layers).eval(), torch.randn(500, 4)
        >>> facts = shiftmend.report.gather(model, source + 2, shiftmend.profile(model, source))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     shiftmend.report.write(facts, f"{folder}/report.html")
    """
    target = as_path(path, "the file to write")
    if not isinstance(facts, Facts):
        raise DataError(f"Expected the facts that report.gather returns, got {kind(facts)}.")
    page = render(facts).encode()
    with said_where(target):
        write_atomically(target, page)


def render(facts: Facts) -> str:
    """Return the whole page as text."""
    templates = environment()
    mended = facts.after is not None

    def fill(sections: tuple[Section, ...]) -> list[Markup]:
        parts = {section.__name__: section(facts) for section in sections}
        return [
            Markup(templates.get_template(f"{name}.html.j2").render(context, facts=facts, mended=mended))
            for name, context in parts.items()
            if context is not None
        ]

    style, script = _read("page.css"), _read("page.js")
    # The page may load nothing and run only this script, whatever its texts contain.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return templates.get_template("page.html.j2").render(
        facts=facts,
        mended=mended,
        advice=give_answer(facts).advice,
        sections=fill(SECTIONS),
        specialist=fill(SPECIALIST),
        policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        style=Markup(style),
        script=Markup(script),
        version=__version__,
    )


@functools.cache
def environment() -> Environment:
    """Return the template environment: it escapes text, replaces control characters, and raises for undefined names."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    templates = Environment(
        loader=PackageLoader("shiftmend.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=make_printable,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters |= {"number": format_number, "percent": format_percent, "counted": counted}
    templates.globals["charts"] = charts
    return templates


def _read(name: str) -> str:
    return resources.files("shiftmend.report").joinpath("templates", name).read_text(encoding="utf-8")
