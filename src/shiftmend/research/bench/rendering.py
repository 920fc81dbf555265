"""Tables as text: for the terminal, as Markdown, HTML and LaTeX. What a number says is decided in one place for all."""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from shiftmend.errors import DataError
from shiftmend.research.bench.grids import Entry
from shiftmend.research.bench.tables import Column, Row, Table

if TYPE_CHECKING:
    from rich.text import Text

Format = Literal["terminal", "markdown", "html", "latex"]


NOTHING = "–"


GAP = 2


LATEX_COLUMNS = 6
"""Numbers that fit beside each other on a page; more of them go into further parts of the table."""


STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.4 system-ui, sans-serif; margin: 2rem }
section { margin-bottom: 3rem; overflow-x: auto }
h2 { font-size: 1.1rem }
table { border-collapse: collapse; border-block: 2px solid; font-variant-numeric: tabular-nums }
th, td { padding: .15rem .6rem; text-align: right; white-space: nowrap }
th[scope=row], th.corner { text-align: left; font-weight: normal }
th[scope=colgroup] { text-align: center; border-bottom: 1px solid }
tbody { border-top: 1px solid }
td.published { opacity: .7 }
ul { font-size: .85rem; padding-left: 1.2rem }
"""


def render(tables: Table | Sequence[Table], format: Format, *, width: int = 100) -> str:
    """One table or several as text. `width` is that of the terminal; wider tables go on below, none is cut off.

    HTML is a whole page. LaTeX needs the package booktabs.
    """
    tables = [tables] if isinstance(tables, Table) else list(tables)
    if format == "html":
        return _page(tables)
    if format not in ("terminal", "markdown", "latex"):
        raise DataError(f"unknown format {format!r}, expected terminal, markdown, html or latex")
    if format == "terminal":
        return "\n\n".join(terminal(table, width).plain for table in tables) + "\n"
    return "\n".join(map(_markdown if format == "markdown" else _latex, tables))


def number(entry: Entry, column: Column) -> str:
    """`74.4 ± 0.8`, a difference as `+1.2`, a text as it is, `–` for nothing."""
    if entry.value is None:
        return entry.text or NOTHING
    value = round(entry.value, column.digits) + 0.0  # which turns -0.0 into 0.0
    sign = "+" if column.kind == "difference" and value > 0 else ""
    deviation = "" if entry.deviation is None else f" ± {entry.deviation:.{column.digits}f}"
    return f"{sign}{value:.{column.digits}f}{deviation}"


def terminal(table: Table, width: int = 100) -> Text:
    """For `rich.console.Console.print`: the best in bold and with a star, so that it is seen without colours too.

    What does not fit beside each other goes on below, with the labels again. Columns of one heading stay together.
    """
    from rich.text import Text

    text = Text(no_wrap=True, overflow="ignore")
    text.append(_wrapped(table.title, width), "bold")
    left = max(len(label) for label in [table.corner, *(row.label for row in table.rows)])
    for part in _parts(table, lambda part: left + _width(table, part) <= width):
        _append(text, table, left, part)
    notes = [f"* {table.marked}", *table.notes] if table.marked else table.notes
    for note in notes:
        text.append("\n" + _wrapped(note, width), "dim")
    return text


@dataclass(frozen=True)
class _Span:
    """Neighbouring columns under one heading: which, and how wide each is in characters."""

    heading: str
    columns: list[int]
    widths: list[int]

    @property
    def width(self) -> int:
        return sum(self.widths) + GAP * (len(self.widths) - 1)


def _append(text: Text, table: Table, left: int, part: Sequence[int]) -> None:
    spans = _spans(table, part)
    gap = " " * GAP
    text.append("\n\n")
    if any(span.heading for span in spans):
        text.append(" " * left + "".join(gap + span.heading.center(span.width) for span in spans).rstrip() + "\n")
        rules = ("─" * span.width if span.heading else " " * span.width for span in spans)
        text.append(" " * left + "".join(gap + rule for rule in rules).rstrip() + "\n", "dim")
    text.append(table.corner.ljust(left))
    for span in spans:
        for index, width in zip(span.columns, span.widths, strict=True):
            text.append(gap + (table.columns[index].title + _star(table, index)).rjust(width))
    rule = "\n" + "─" * (left + sum(GAP + span.width for span in spans))
    text.append(rule, "dim")
    for above, row in zip([None, *table.rows], table.rows, strict=False):
        if row.summary and above is not None and not above.summary:
            text.append(rule, "dim")
        text.append("\n" + row.label.ljust(left))
        for span in spans:
            for index, width in zip(span.columns, span.widths, strict=True):
                quiet = "dim" if table.columns[index].kind == "published" else ""
                cell = gap + _starred(table, row, index).rjust(width)
                text.append(cell, "bold" if row.entries[index].best else quiet)
    text.append(rule, "dim")


def _star(table: Table, index: int) -> str:
    """Room for a star in columns that have one, so that numbers stay one below the other."""
    return " " if any(row.entries[index].best for row in table.rows) else ""


def _starred(table: Table, row: Row, index: int) -> str:
    entry = row.entries[index]
    return number(entry, table.columns[index]) + ("*" if entry.best else _star(table, index))


def _spans(table: Table, part: Sequence[int]) -> list[_Span]:
    spans = []
    for heading, columns in _headings(table, part):
        widths = [
            max(len(cell) for cell in [title, *(_starred(table, row, index) for row in table.rows)])
            for index in columns
            for title in [table.columns[index].title + _star(table, index)]
        ]
        span = _Span(heading, columns, widths)
        widths[0] += max(0, len(heading) - span.width)
        spans.append(span)
    return spans


def _width(table: Table, part: Sequence[int]) -> int:
    return sum(GAP + span.width for span in _spans(table, part))


def _headings(table: Table, part: Iterable[int]) -> list[tuple[str, list[int]]]:
    """The headings of some columns, each with the columns that it spans."""
    return [(heading, list(run)) for heading, run in groupby(part, key=lambda index: table.columns[index].heading)]


def _parts(table: Table, fits: Callable[[Sequence[int]], bool]) -> list[list[int]]:
    """Columns in as many parts as it takes; a heading is only torn apart where it does not fit by itself."""
    parts: list[list[int]] = []
    for heading, columns in _headings(table, range(len(table.columns))):
        pieces = [columns] if heading and fits(columns) else [[column] for column in columns]
        for piece in pieces:
            if parts and fits(parts[-1] + piece):
                parts[-1] += piece
            else:
                parts.append(list(piece))
    return parts


def _markdown(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    def cell(entry: Entry, column: Column) -> str:
        written = number(entry, column).replace("|", r"\|")  # a text may name a method
        return f"**{written}**" if entry.best else written

    titles = [f"{column.heading}: {column.title}" if column.heading else column.title for column in table.columns]
    lines = [
        f"### {for_markdown(table.title)}",
        "",
        line([for_markdown(title) for title in [table.corner, *titles]]),
        line([":--", *("--:" for _ in titles)]),
    ]
    for row in table.rows:
        numbers = [cell(entry, column) for entry, column in zip(row.entries, table.columns, strict=True)]
        lines.append(line([for_markdown(row.label), *numbers]))
    notes = _with_bold(table)
    return "\n".join([*lines, "", *(f"- {for_markdown(note)}" for note in notes), *([""] if notes else [])])


def for_markdown(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>|#~$&])", r"\\\1", _one_line(text))


def _page(tables: Sequence[Table]) -> str:
    title = html.escape(tables[0].title if tables else "")
    sections = "".join(map(_section, tables))
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n{sections}</body>\n</html>\n"
    )


def _section(table: Table) -> str:
    def cell(entry: Entry, column: Column) -> str:
        written = html.escape(number(entry, column))
        if entry.value is not None:
            written = written.replace("-", "−")
        return f'<td class="{column.kind}">{f"<b>{written}</b>" if entry.best else written}</td>'

    headings = _headings(table, range(len(table.columns)))
    tall = any(heading for heading, _ in headings)
    head = f'<tr><th class="corner" rowspan="{2 if tall else 1}">{html.escape(table.corner)}</th>'
    if tall:
        for heading, columns in headings:
            head += f'<th scope="colgroup" colspan="{len(columns)}">{html.escape(heading)}</th>'
        head += "</tr>\n<tr>"
    head += "".join(f'<th scope="col">{html.escape(column.title)}</th>' for column in table.columns) + "</tr>"
    bodies = []
    for _, rows in groupby(table.rows, key=lambda row: row.summary):
        lines = ""
        for row in rows:
            cells = "".join(cell(entry, column) for entry, column in zip(row.entries, table.columns, strict=True))
            lines += f'<tr><th scope="row">{html.escape(row.label)}</th>{cells}</tr>\n'
        bodies.append(f"<tbody>\n{lines}</tbody>\n")
    notes = "".join(f"<li>{html.escape(_one_line(note))}</li>\n" for note in _with_bold(table))
    return (
        f"<section>\n<h2>{html.escape(_one_line(table.title))}</h2>\n<table>\n<thead>\n{head}\n</thead>\n{''.join(bodies)}</table>\n"
        f"{f'<ul>{notes}</ul>' if notes else ''}\n</section>\n"
    )


def _latex(table: Table) -> str:
    def cell(entry: Entry, column: Column) -> str:
        written = _for_latex(number(entry, column))
        if entry.value is not None:
            written = written.replace("-", "$-$")  # a hyphen is too short
        return rf"\textbf{{{written}}}" if entry.best else written

    lines = [r"\begin{table}", r"\centering", r"\footnotesize", rf"\caption{{{_for_latex(table.title)}}}"]
    for part in _parts(table, lambda part: len(part) <= LATEX_COLUMNS):
        headings = _headings(table, part)
        lines += [rf"\begin{{tabular}}{{l{'r' * len(part)}}}", r"\toprule"]
        if any(heading for heading, _ in headings):
            heads, rules, start = [""], [], 2
            for heading, columns in headings:
                heads.append(rf"\multicolumn{{{len(columns)}}}{{c}}{{{_for_latex(heading)}}}")
                rules.append(rf"\cmidrule(lr){{{start}-{start + len(columns) - 1}}}")
                start += len(columns)
            lines += [" & ".join(heads) + r" \\", " ".join(rules)]
        titles = [table.corner, *(table.columns[index].title for index in part)]
        lines += [" & ".join(map(_for_latex, titles)) + r" \\", r"\midrule"]
        for above, row in zip([None, *table.rows], table.rows, strict=False):
            if row.summary and above is not None and not above.summary:
                lines.append(r"\midrule")
            numbers = [cell(row.entries[index], table.columns[index]) for index in part]
            lines.append(" & ".join([_for_latex(row.label), *numbers]) + r" \\")
        lines += [r"\bottomrule", r"\end{tabular}", r"\par\medskip"]
    lines += [r"\raggedright", *(rf"{_for_latex(note.rstrip('.'))}.\par" for note in _with_bold(table)), r"\end{table}"]
    return "\n".join(lines) + "\n"


_LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "–": "--",
    "†": r"\textdagger{}",
    "‡": r"\textdaggerdbl{}",
    "§": r"\S{}",
}


def _for_latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in _one_line(text))


def _with_bold(table: Table) -> list[str]:
    return [f"bold: {table.marked}", *table.notes] if table.marked else list(table.notes)


def _wrapped(text: str, width: int) -> str:
    return textwrap.fill(text, width, subsequent_indent="  ", break_on_hyphens=False)


def _one_line(text: str) -> str:
    return " ".join(text.split())
