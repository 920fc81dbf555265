"""Build HTML and SVG so that text can only arrive escaped: strings are text, only `Markup` is markup."""

from __future__ import annotations

import html


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Part = str | int | float | None


VOID = frozenset({"meta", "img", "br", "input"})
"""Elements of HTML that have no end; those of SVG are closed like all others, or the next would lie inside them."""


def escaped(part: Part) -> str:
    """A part as it stands in the page; control characters that no page may hold become visible."""
    if part is None:
        return ""
    if isinstance(part, Markup):
        return part
    text = "".join(c if c in "\n\t" or c.isprintable() or c == "\u00a0" else "\ufffd" for c in str(part))
    return html.escape(text, quote=True)


def join(*parts: Part) -> Markup:
    return Markup("".join(map(escaped, parts)))


def element(name: str, /, *children: Part, **attributes: Part | bool) -> Markup:
    """`element("p", "a < b", class_="note")`; underscores in names become dashes, None and False leave one out."""
    written = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        written.append(f" {key}" if value is True else f' {key}="{escaped(value)}"')
    start = f"<{name}{''.join(written)}>"
    return Markup(start) if name in VOID else Markup(f"{start}{join(*children)}</{name}>")


def figure(chart: Markup, name: str, text: str) -> Markup:
    """A chart with its caption: what it is, and what to look for."""
    return element("figure", chart, element("figcaption", element("strong", name), text))
