"""Rendered tables, read back by a parser for each format and compared with the numbers formatted here."""

import functools
import io
import itertools
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from shiftmend.errors import DataError
from shiftmend.research.bench.benchmark import Cell, Outcome, Result
from shiftmend.research.bench.rendering import LATEX_COLUMNS, Column, Entry, Row, Table, render, render_terminal
from shiftmend.research.bench.tables import per_shift, selection, summary

SHIFTS = (
    *("bricks", "crystals", "dotted_line", "fog", "gaussian_blur", "grass", "impulse_noise"),
    *("inverse", "oranges", "shot_noise", "sky", "stripe", "zigzag"),
)
METHODS = (
    *("source-only", "adabn", "marg-gauss", "full-gauss", "pl", "bnm-im"),
    *("shot-im", "shot", "tent", "fr", "bufr", "target-supervised"),
)


class Page(HTMLParser):
    """Rows of the first table as they are laid out, the notes, and which elements were left open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.widths: list[int] = []
        self.bold: list[str] = []
        self.notes: list[str] = []
        self.open: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if tag != "meta":
            self.open.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href")]
        if tag == "tr":
            self.rows.append([])
            self.widths.append(0)
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.widths[-1] += int(found.get("colspan", 1))
            if found.get("rowspan") == "2":
                self.below = len(self.widths)
        if tag == "li":
            self.notes.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "li" in self.open:
            self.notes[-1] += data
        elif self.open and ("td" in self.open or "th" in self.open):
            self.rows[-1][-1] += data
        if self.open and self.open[-1] == "b":
            self.bold.append(data)


def written(entry: Entry, column: Column) -> str:
    """What a number must read like, written out on its own."""
    if entry.value is None:
        return entry.text or "–"
    text = f"{abs(entry.value):.{column.digits}f}"
    if entry.value < 0 and float(text) != 0:
        text = "-" + text
    elif column.kind == "difference" and float(text) != 0:
        text = "+" + text
    return text if entry.deviation is None else f"{text} ± {entry.deviation:.{column.digits}f}"


def numbers(table: Table) -> list[list[str]]:
    return [
        [written(entry, column) for entry, column in zip(row.entries, table.columns, strict=True)] for row in table.rows
    ]


def from_markdown(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def from_latex(text: str) -> list[list[list[str]]]:
    """The body of each tabular, cell by cell."""
    tabulars = re.findall(r"\\begin\{tabular\}\{(l+r*)\}(.*?)\\end\{tabular\}", text, re.DOTALL)
    parsed = []
    for specification, body in tabulars:
        rows = []
        for line in body.splitlines():
            if line.endswith(r"\\"):
                cells = [cell.strip() for cell in re.split(r"(?<!\\)&", line.removesuffix(r"\\"))]
                spans = [int(n) for cell in cells for n in re.findall(r"\\multicolumn\{(\d+)\}", cell)]
                assert len(cells) - len(spans) + sum(spans) == len(specification)
                if not spans:
                    rows.append(cells)
        parsed.append(rows)
    return parsed


def plain(latex: str) -> str:
    text = re.sub(r"^\\textbf\{(.*)\}$", r"\1", latex)
    return text.replace(r"$\pm$", "±").replace("$-$", "-").replace("--", "–")


def from_terminal(text: str) -> list[list[str]]:
    """Lines of numbers, label first; parts of a wide table are put side by side again."""
    rows: dict[str, list[str]] = {}
    parts = re.split(r"\n\n", text)[1:]
    for part in parts:
        for line in part.splitlines():
            cells = re.split(r"\s{2,}", line.strip())
            if len(cells) > 1 and not set(line) & {"─"}:
                rows.setdefault(cells[0], []).extend(cells[1:])
    return [[label, *cells] for label, cells in rows.items()]


def small(**changes) -> Table:
    columns = (
        Column("ours", "all_13 & more", "ours", 1),
        Column("paper", "all_13 & more", "published", 1),
        Column("difference", "all_13 & more", "difference", 1),
        Column("ours", "50 % <sky>", "ours", 1),
    )
    rows = (
        Row("full_gauss", (Entry(74.44, 0.81), Entry(73.2), Entry(1.24), Entry(text="3/13"))),
        Row("bufr|x*", (Entry(86.06, 0.1, best=True), Entry(), Entry(), Entry(9.0, 12.0))),
        Row("all", (Entry(80.0, 0.0), Entry(90.0, 0.3), Entry(-10.04), Entry(-0.04)), summary=True),
    )
    table = {"title": "emnist_da: 100 %", "corner": "method", "columns": columns, "rows": rows}
    return Table(**(table | {"notes": ("a & b_c 5 % ± <i>",), "marked": "highest of its column"} | changes))


@functools.cache
def realistic() -> dict[str, Table]:
    """Twelve methods, thirteen shifts, five seeds."""
    generator = np.random.default_rng(0)
    results = []
    for method in METHODS:
        for shift in SHIFTS:
            for seed in (123, 234, 345, 456, 567):
                last, more = generator.uniform(0, 0.9), generator.uniform(0, 0.1)
                outcomes = [Outcome(1, accuracy, 0.1, 0.2, 1.0, 0.3) for accuracy in (last, last + more, last)]
                results.append(Result(Cell("emnist-da", "offline", method, shift, seed, "r"), "rebuilt", *outcomes))
    options = {"benchmark": "emnist-da", "protocol": "offline", "methods": METHODS, "shifts": SHIFTS}
    groups = {"without backgrounds": SHIFTS[2:5], "severe": ("sky",), "mild": ("shot_noise",)}
    return {
        "summary": summary(results, groups=groups, **options),
        "per shift": per_shift(results, groups=groups, **options),
        "alone": per_shift(results, beside=None, **options),
        "selection": selection(results, **options),
    }


TERMINAL = """\
emnist_da: 100 %

                       all_13 & more             50 % <sky>
            ───────────────────────────────────  ──────────
method            ours        paper  difference        ours
───────────────────────────────────────────────────────────
full_gauss  74.4 ± 0.8         73.2        +1.2        3/13
bufr|x*     86.1 ± 0.1*           –           –  9.0 ± 12.0
───────────────────────────────────────────────────────────
all         80.0 ± 0.0   90.0 ± 0.3       -10.0         0.0
───────────────────────────────────────────────────────────
* highest of its column
a & b_c 5 % ± <i>
"""


def test_numbers_as_they_are_read():
    assert numbers(small()) == [
        ["74.4 ± 0.8", "73.2", "+1.2", "3/13"],
        ["86.1 ± 0.1", "–", "–", "9.0 ± 12.0"],
        ["80.0 ± 0.0", "90.0 ± 0.3", "-10.0", "0.0"],
    ]


def test_terminal():
    assert render(small(), "terminal") == TERMINAL


def test_numbers_stand_below_each_other():
    lines = render(small(), "terminal").splitlines()
    rows = [next(line for line in lines if line.startswith(label)) for label in ("full_gauss", "bufr|x*", "all ")]
    for pattern in ("± 0.8", "± 0.1", "± 0.0"):
        [row] = [row for row in rows if pattern in row]
        assert row.index(pattern) == rows[0].index("± 0.8")
    assert len({len(row) for row in rows}) == 1


def test_a_rule_parts_the_summary():
    lines = render(small(), "terminal").splitlines()
    [above] = [lines[index - 1] for index, line in enumerate(lines) if line.startswith("all ")]
    assert set(above) == {"─"}
    latex = render(small(), "latex").splitlines()
    [above] = [latex[index - 1] for index, line in enumerate(latex) if line.startswith("all &")]
    assert above == r"\midrule"
    assert render(small(), "html").count("<tbody>") == 2


def test_bold_on_a_terminal_that_has_it():
    stream = io.StringIO()
    Console(file=stream, force_terminal=True, width=60, color_system="standard", highlight=False).print(
        render_terminal(small())
    )
    shown = stream.getvalue()
    assert re.findall(r"\x1b\[1m\s*([^\x1b]*)\x1b", shown) == ["emnist_da: 100 %", "86.1 ± 0.1*"]
    assert re.sub(r"\x1b\[\d+m", "", shown) == render(small(), "terminal")


@pytest.mark.parametrize("name", ["summary", "per shift", "alone", "selection"])
@pytest.mark.parametrize("width", [80, 100, 140])
def test_wide_tables_go_on_below_and_lose_nothing(name, width):
    table = realistic()[name]
    text = render(table, "terminal", width=width)
    assert max(map(len, text.splitlines())) <= width
    found = {row[0]: [cell.rstrip("*") for cell in row[1:]] for row in from_terminal(text)}
    for row, expected in zip(table.rows, numbers(table), strict=True):
        assert found[row.label] == expected


def test_columns_of_a_heading_stay_together():
    table = realistic()["per shift"]
    text = render(table, "terminal")
    parts = [part for part in text.split("\n\n") if "─" in part]
    assert len(parts) > 3
    for part in parts:
        titles = next(line for line in part.splitlines() if line.startswith("shift")).split()[1:]
        assert titles.count("paper") == titles.count("difference")
        for before, after in itertools.pairwise(titles):
            assert before != "paper" or after == "difference"
    heads = [method for method in METHODS if f" {method} " in text or f" {method}\n" in text]
    assert heads == list(METHODS)


def test_one_heading_that_does_not_fit_is_torn_apart():
    columns = tuple(Column(f"column {n}", "one heading") for n in range(12))
    table = small(columns=columns, rows=(Row("bufr", tuple(Entry(float(n)) for n in range(12))),))
    text = render(table, "terminal", width=50)
    assert max(map(len, text.splitlines())) <= 50
    assert text.count("one heading") > 1
    assert {row[0]: row[1:] for row in from_terminal(text)}["bufr"] == [f"{n}.0" for n in range(12)]


def test_a_heading_may_be_wider_than_its_columns():
    columns = (Column("ours", "a method with a long name"), Column("ours", "fr"))
    table = small(columns=columns, rows=(Row("fog", (Entry(1.0), Entry(2.0))),))
    heading, rule, titles, _, numbers, _ = render(table, "terminal").splitlines()[2:8]
    assert rule.split() == ["─" * len("a method with a long name"), "─" * len("ours")]
    for left, right in (m.span() for m in re.finditer("─+", rule)):
        assert titles[:right].endswith("ours")
        assert numbers[:right].endswith(".0")
        assert heading[left:right].strip() in ("a method with a long name", "fr")


def test_six_columns_fit_into_a_terminal():
    table = realistic()["summary"]
    rows = tuple(replace(row, entries=row.entries[:6]) for row in table.rows)
    text = render(replace(table, columns=table.columns[:6], rows=rows), "terminal", width=100)
    assert text.count("method  ") == 1
    assert max(map(len, text.splitlines())) <= 100


def test_markdown():
    text = render(small(), "markdown")
    head, rule, *body = from_markdown(text)
    assert head == [
        "method",
        *[rf"all\_13 \& more: {t}" for t in ("ours", "paper", "difference")],
        r"50 % \<sky\>: ours",
    ]
    assert rule == [":--", "--:", "--:", "--:", "--:"]
    assert body[1] == [r"bufr\|x\*", "**86.1 ± 0.1**", "–", "–", "9.0 ± 12.0"]
    assert [row[1:] for row in body[::2]] == [numbers(small())[0], numbers(small())[2]]
    assert text.startswith("### emnist\\_da: 100 %\n\n|")
    assert text.endswith("\n\n- bold: highest of its column\n- a \\& b\\_c 5 % ± \\<i\\>\n")


def test_a_name_in_a_cell_of_markdown_does_not_end_it():
    table = Table("t", "variant", (Column("verdict"),), (Row("a|b", (Entry(text="a|b better"),)),), ())
    assert "\n| a\\|b | a\\|b better |\n" in render(table, "markdown")


def test_html():
    page = Page(render(small(), "html"))
    assert page.open == []
    assert page.links == []  # nothing is fetched
    assert page.rows[0] == ["method", "all_13 & more", "50 % <sky>"]
    assert page.rows[1] == ["ours", "paper", "difference", "ours"]
    assert page.widths == [5, 4, 5, 5, 5]
    assert page.below == 1  # the corner reaches down into the second row
    expected = [[row.label, *line] for row, line in zip(small().rows, numbers(small()), strict=True)]
    assert [[cell.replace("−", "-") for cell in row] for row in page.rows[2:]] == expected
    assert page.bold == ["86.1 ± 0.1"]
    assert page.notes == ["bold: highest of its column", "a & b_c 5 % ± <i>"]


def test_html_escapes_what_is_hostile():
    attack = "<script>alert(1)</script>"
    table = Table(
        attack,
        attack,
        tuple(Column(attack, attack + str(n)) for n in range(4)),
        tuple(Row(attack, tuple(Entry(text=attack) for _ in range(4))) for _ in range(3)),
        (attack,),
        attack,
    )
    text = render(table, "html")
    assert "<script" not in text
    assert Page(text).rows[-1] == [attack] * 5


def test_latex():
    text = render(small(), "latex")
    [[head, *body]] = from_latex(text)
    assert head == ["method", "ours", "paper", "difference", "ours"]
    assert body[0] == [r"full\_gauss", r"74.4 $\pm$ 0.8", "73.2", "+1.2", "3/13"]
    assert body[1] == [r"bufr\textbar{}x*", r"\textbf{86.1 $\pm$ 0.1}", "--", "--", r"9.0 $\pm$ 12.0"]
    assert body[2] == ["all", r"80.0 $\pm$ 0.0", r"90.0 $\pm$ 0.3", "$-$10.0", "0.0"]
    assert r"& \multicolumn{3}{c}{all\_13 \& more} & \multicolumn{1}{c}{50 \% \textless{}sky\textgreater{}} \\" in text
    assert r"\cmidrule(lr){2-4} \cmidrule(lr){5-5}" in text
    assert r"\caption{emnist\_da: 100 \%}" in text
    assert r"a \& b\_c 5 \% $\pm$ \textless{}i\textgreater{}.\par" in text
    for rule in (r"\toprule", r"\bottomrule"):
        assert text.count(rule) == 1


def test_latex_is_balanced_and_bare_of_special_characters():
    for table in realistic().values():
        text = render(table, "latex")
        assert text.isascii()
        assert re.findall(r"\\begin\{(\w+)\}", text).count("tabular") == text.count(r"\end{tabular}")
        assert text.count("{") == text.count("}")
        assert not re.search(r"(?<!\\)[%#_]", text)
        parts = from_latex(text)
        assert all(len(row) <= LATEX_COLUMNS + 1 for rows in parts for row in rows)
        for index, expected in enumerate(numbers(table), 1):
            assert [plain(cell) for rows in parts for cell in rows[index][1:]] == expected


def test_several_tables_make_one_document():
    tables = [small(title="first"), small(title="second")]
    page = render(tables, "html")
    assert page.count("<!doctype") == page.count("</html>") == 1
    assert page.count("<table>") == 2
    assert render(tables, "terminal") == "\n".join(render(table, "terminal") for table in tables)
    assert render(tables, "markdown") == "\n".join(render(table, "markdown") for table in tables)


def test_a_table_without_headings_has_one_row_of_titles():
    columns = tuple(Column(f"shift {n}") for n in range(4))
    table = small(columns=columns, notes=(), marked="")
    page = Page(render(table, "html"))
    assert page.rows[0] == ["method", "shift 0", "shift 1", "shift 2", "shift 3"]
    assert r"\multicolumn" not in render(table, "latex")
    assert from_markdown(render(table, "markdown"))[0] == page.rows[0]
    assert render(table, "terminal").splitlines()[2].split()[:2] == ["method", "shift"]
    assert "<ul>" not in render(table, "html")


def test_unknown_format():
    with pytest.raises(DataError, match="pdf"):
        render(small(), "pdf")


VALUES = st.floats(-1e4, 1e4)
ENTRIES = st.one_of(
    st.builds(Entry, VALUES, st.none() | st.floats(0, 99), best=st.booleans()),
    st.builds(Entry, text=st.sampled_from(["", "3/13", "0/65"])),
)
COLUMNS = st.builds(
    Column,
    st.sampled_from(["ours", "paper", "best (oracle)"]),
    st.sampled_from(["", "all 13 shifts", "shot_noise", "a & b"]),
    st.sampled_from(["ours", "published", "difference"]),
    st.integers(0, 4),
)


@st.composite
def tables(draw) -> Table:
    columns = tuple(draw(st.lists(COLUMNS, min_size=1, max_size=15)))
    labels = draw(st.lists(st.sampled_from([f"{m}_{n}" for n in range(3) for m in METHODS]), min_size=1, unique=True))
    rows = tuple(Row(label, tuple(draw(ENTRIES) for _ in columns), draw(st.booleans())) for label in labels[:4])
    return Table("a title", "method", columns, rows, ("a note",), draw(st.sampled_from(["", "highest"])))


@pytest.mark.slow
@settings(deadline=None, max_examples=80)
@given(tables())
def test_every_number_is_in_its_place_in_every_format(table):
    expected = numbers(table)
    shown = [row[1:] for row in from_markdown(render(table, "markdown"))[2:]]
    assert [[cell.strip("*") for cell in row] for row in shown] == expected
    body = Page(render(table, "html")).rows[-len(table.rows) :]
    assert [[cell.replace("−", "-") for cell in row[1:]] for row in body] == expected
    parts = from_latex(render(table, "latex"))
    for index, row in enumerate(expected, 1):
        assert [plain(cell) for rows in parts for cell in rows[index][1:]] == row
    found = {row[0]: [cell.rstrip("*") for cell in row[1:]] for row in from_terminal(render(table, "terminal"))}
    assert [found[row.label] for row in table.rows] == expected
    for row, line in zip(table.rows, shown, strict=True):
        assert [cell.startswith("**") for cell in line] == [entry.best for entry in row.entries]
