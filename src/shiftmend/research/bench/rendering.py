"""A table as data, and its text for the terminal, in Markdown, HTML and LaTeX."""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from shiftmend.errors import DataError
from shiftmend.utils.terminal import neutralise

if TYPE_CHECKING:
    from rich.text import Text

Format = Literal["terminal", "markdown", "html", "latex"]

NOTHING = "–"
GAP = "  "
"""Separator of columns in the terminal."""

LATEX_COLUMNS = 6
"""Number of columns that fit on a page; further ones go into further parts of the table."""


@dataclass(frozen=True)
class Entry:
    """A number in the unit of its table, not rounded; or a text instead of it; or nothing."""

    value: float | None = None
    deviation: float | None = None
    text: str = ""
    best: bool = False
    seeds: tuple[int, ...] = ()
    """Seeds of a mean; empty for published figures."""
    unfinished: tuple[int, ...] = ()
    """Seeds that were started but lack some of the shifts, and are therefore not part of the mean."""


@dataclass(frozen=True)
class Column:
    """A column of entries. `heading` spans neighbours that belong together: a group of shifts, or a method."""

    title: str
    heading: str = ""
    kind: Literal["ours", "published", "difference", "seeds"] = "ours"
    digits: int = 1


@dataclass(frozen=True)
class Row:
    """A row with an entry for each column."""

    label: str
    entries: tuple[Entry, ...]
    summary: bool = False
    """Whether the row summarises the rows above it."""
    counts: bool = False
    """Whether the row counts the seeds of its columns; such a row is a summary as well."""


@dataclass(frozen=True)
class Table:
    """A table with its title and the notes at its foot."""

    title: str
    corner: str
    """Description of the row labels."""
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    marked: str = ""
    """Meaning of the mark for the best; empty if nothing is marked."""


def render(tables: Table | Sequence[Table], format: Format, *, width: int = 100) -> str:
    """Render one table or several as text.

    Args:
        tables: The tables.
        format: `terminal`, `markdown`, `html` (a whole page) or `latex` (which needs the package booktabs).
        width: Characters in a line of the terminal; wider tables continue below.
    """
    tables = [tables] if isinstance(tables, Table) else list(tables)
    if format == "terminal":
        return "\n\n".join(render_terminal(table, width).plain for table in tables) + "\n"
    if format == "html":
        return _render_html(tables)
    if format == "markdown":
        return "\n".join(map(_render_markdown, tables))
    if format == "latex":
        return "\n".join(map(_render_latex, tables))
    raise DataError(f"Expected the format terminal, markdown, html or latex, got {format!r}.")


def format_number(entry: Entry, column: Column) -> str:
    """Format `74.4 ± 0.8`, a difference as `+1.2`, text as it is, and `–` for nothing."""
    if entry.value is None:
        return entry.text or NOTHING
    # Adding 0.0 turns -0.0 into 0.0.
    value = round(entry.value, column.digits) + 0.0
    sign = "+" if column.kind == "difference" and value > 0 else ""
    deviation = "" if entry.deviation is None else f" ± {entry.deviation:.{column.digits}f}"
    return f"{sign}{value:.{column.digits}f}{deviation}"


# ---- what the formats share


def _span_headings(table: Table, part: Iterable[int]) -> list[tuple[str, list[int]]]:
    """List the headings of some columns, each with the columns that it spans."""
    return [(heading, list(run)) for heading, run in groupby(part, key=lambda index: table.columns[index].heading)]


def _divide(table: Table, fits: Callable[[Sequence[int]], bool]) -> list[list[int]]:
    """Divide columns into as few parts as fit. A group of columns is split only if it does not fit alone."""
    parts: list[list[int]] = []
    for heading, columns in _span_headings(table, range(len(table.columns))):
        pieces = [columns] if heading and fits(columns) else [[column] for column in columns]
        for piece in pieces:
            if parts and fits(parts[-1] + piece):
                parts[-1] += piece
            else:
                parts.append(list(piece))
    return parts


def _bodies(table: Table) -> list[list[Row]]:
    """Separate ordinary rows from summary rows, such as means."""
    return [list(rows) for _, rows in groupby(table.rows, key=lambda row: row.summary)]


@dataclass(frozen=True)
class _Markup:
    """Markup of a number in a format: escaped, with a minus sign, and bold if it is the best."""

    escape: Callable[[str], str]
    minus: str
    bold: str

    def cell(self, table: Table, row: Row, index: int) -> str:
        entry = row.entries[index]
        text = self.escape(format_number(entry, table.columns[index]))
        if entry.value is not None:
            text = text.replace("-", self.minus)
        return self.bold % text if entry.best else text

    def cells(self, table: Table, row: Row) -> list[str]:
        return [self.cell(table, row, index) for index in range(len(table.columns))]


def _list_notes(table: Table) -> list[str]:
    return [f"bold: {table.marked}", *table.notes] if table.marked else list(table.notes)


def _put_on_one_line(text: str) -> str:
    return neutralise(" ".join(text.split()))


# ---- terminal


def render_terminal(table: Table, width: int = 100) -> Text:
    """Render for `rich.console.Console.print`; the best is bold with a star, visible without colours.

    Columns that do not fit continue below, with the labels repeated. Columns of one heading stay together.
    """
    from rich.text import Text

    text = Text(no_wrap=True, overflow="ignore")
    text.append(_wrap(table.title, width), "bold")
    left = max(len(label) for label in [table.corner, *(row.label for row in table.rows)])

    def fits(part: Sequence[int]) -> bool:
        return left + sum(len(GAP) + span.width for span in _measure_spans(table, part)) <= width

    for part in _divide(table, fits):
        _append_part(text, table, left, part)
    for note in [f"* {table.marked}", *table.notes] if table.marked else table.notes:
        text.append("\n" + _wrap(note, width), "dim")
    return text


@dataclass(frozen=True)
class _Span:
    """Neighbouring columns under one heading, with their widths in characters."""

    heading: str
    columns: list[int]
    widths: list[int]

    @property
    def width(self) -> int:
        return sum(self.widths) + len(GAP) * (len(self.widths) - 1)


def _measure_spans(table: Table, part: Sequence[int]) -> list[_Span]:
    spans = []
    for heading, columns in _span_headings(table, part):
        widths = [
            max(len(cell) for cell in [_star_title(table, index), *(_star(table, row, index) for row in table.rows)])
            for index in columns
        ]
        span = _Span(heading, columns, widths)
        widths[0] += max(0, len(heading) - span.width)
        spans.append(span)
    return spans


def _star_title(table: Table, index: int) -> str:
    """Pad the title of a column with stars, so that its numbers stay aligned."""
    return table.columns[index].title + (" " if any(row.entries[index].best for row in table.rows) else "")


def _star(table: Table, row: Row, index: int) -> str:
    entry, column = row.entries[index], table.columns[index]
    room = " " if any(other.entries[index].best for other in table.rows) else ""
    return format_number(entry, column) + ("*" if entry.best else room)


def _append_part(text: Text, table: Table, left: int, part: Sequence[int]) -> None:
    spans = _measure_spans(table, part)
    widths = [pair for span in spans for pair in zip(span.columns, span.widths, strict=True)]
    text.append("\n\n")
    if any(span.heading for span in spans):
        text.append(" " * left + "".join(GAP + span.heading.center(span.width) for span in spans).rstrip() + "\n")
        rules = ("─" * span.width if span.heading else " " * span.width for span in spans)
        text.append(" " * left + "".join(GAP + rule for rule in rules).rstrip() + "\n", "dim")
    text.append(table.corner.ljust(left))
    for index, width in widths:
        text.append(GAP + _star_title(table, index).rjust(width))
    rule = "\n" + "─" * (left + sum(len(GAP) + span.width for span in spans))
    for rows in _bodies(table) or [[]]:
        text.append(rule, "dim")
        for row in rows:
            text.append("\n" + row.label.ljust(left))
            for index, width in widths:
                quiet = "dim" if table.columns[index].kind == "published" else ""
                text.append(GAP + _star(table, row, index).rjust(width), "bold" if row.entries[index].best else quiet)
    text.append(rule, "dim")


def _wrap(text: str, width: int) -> str:
    return textwrap.fill(text, width, subsequent_indent="  ", break_on_hyphens=False)


# ---- Markdown

# A text in a cell may name a method.
_MARKDOWN = _Markup(lambda text: text.replace("|", r"\|"), "-", "**%s**")


def escape_markdown(text: str) -> str:
    """Escape everything that Markdown would format, and put the text on one line."""
    return re.sub(r"([\\`*_{}\[\]<>|#~$&])", r"\\\1", _put_on_one_line(text))


def _render_markdown(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    titles = [f"{column.heading}: {column.title}" if column.heading else column.title for column in table.columns]
    notes = _list_notes(table)
    lines = [
        f"### {escape_markdown(table.title)}",
        "",
        line([escape_markdown(title) for title in [table.corner, *titles]]),
        line([":--", *("--:" for _ in titles)]),
        *(line([escape_markdown(row.label), *_MARKDOWN.cells(table, row)]) for row in table.rows),
        "",
        *(f"- {escape_markdown(note)}" for note in notes),
        *([""] if notes else []),
    ]
    return "\n".join(lines)


# ---- HTML

_HTML = _Markup(html.escape, "−", "<b>%s</b>")

_STYLE = """
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


def _render_html(tables: Sequence[Table]) -> str:
    title = html.escape(tables[0].title if tables else "")
    sections = "".join(map(_render_section, tables))
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n{sections}</body>\n</html>\n"
    )


def _render_section(table: Table) -> str:
    headings = _span_headings(table, range(len(table.columns)))
    tall = any(heading for heading, _ in headings)
    head = f'<tr><th class="corner" rowspan="{2 if tall else 1}">{html.escape(table.corner)}</th>'
    if tall:
        for heading, columns in headings:
            head += f'<th scope="colgroup" colspan="{len(columns)}">{html.escape(heading)}</th>'
        head += "</tr>\n<tr>"
    head += "".join(f'<th scope="col">{html.escape(column.title)}</th>' for column in table.columns) + "</tr>"
    bodies = ""
    for rows in _bodies(table):
        bodies += "<tbody>\n"
        for row in rows:
            kinds = [column.kind for column in table.columns]
            cells = zip(kinds, _HTML.cells(table, row), strict=True)
            entries = "".join(f'<td class="{kind}">{cell}</td>' for kind, cell in cells)
            bodies += f'<tr><th scope="row">{html.escape(row.label)}</th>{entries}</tr>\n'
        bodies += "</tbody>\n"
    notes = "".join(f"<li>{html.escape(_put_on_one_line(note))}</li>\n" for note in _list_notes(table))
    return (
        f"<section>\n<h2>{html.escape(_put_on_one_line(table.title))}</h2>\n"
        f"<table>\n<thead>\n{head}\n</thead>\n{bodies}</table>\n"
        f"{f'<ul>{notes}</ul>' if notes else ''}\n</section>\n"
    )


# ---- LaTeX

_LATEX_CHARACTERS = {
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


def _escape_latex(text: str) -> str:
    return "".join(_LATEX_CHARACTERS.get(character, character) for character in _put_on_one_line(text))


# A hyphen is too short for a minus sign.
_LATEX = _Markup(_escape_latex, "$-$", r"\textbf{%s}")


def _render_latex(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return " & ".join(cells) + r" \\"

    lines = [r"\begin{table}", r"\centering", r"\footnotesize", rf"\caption{{{_escape_latex(table.title)}}}"]
    for part in _divide(table, lambda part: len(part) <= LATEX_COLUMNS):
        headings = _span_headings(table, part)
        lines += [rf"\begin{{tabular}}{{l{'r' * len(part)}}}", r"\toprule"]
        if any(heading for heading, _ in headings):
            heads, rules, start = [""], [], 2
            for heading, columns in headings:
                heads.append(rf"\multicolumn{{{len(columns)}}}{{c}}{{{_escape_latex(heading)}}}")
                rules.append(rf"\cmidrule(lr){{{start}-{start + len(columns) - 1}}}")
                start += len(columns)
            lines += [line(heads), " ".join(rules)]
        lines.append(line([_escape_latex(title) for title in (table.corner, *(table.columns[i].title for i in part))]))
        for rows in _bodies(table) or [[]]:
            lines.append(r"\midrule")
            lines += [
                line([_escape_latex(row.label), *(_LATEX.cell(table, row, index) for index in part)]) for row in rows
            ]
        lines += [r"\bottomrule", r"\end{tabular}", r"\par\medskip"]
    notes = [rf"{_escape_latex(note.rstrip('.'))}.\par" for note in _list_notes(table)]
    return "\n".join([*lines, r"\raggedright", *notes, r"\end{table}"]) + "\n"
