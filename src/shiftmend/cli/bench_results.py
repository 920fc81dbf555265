"""`bench status | table | compare | correlate`: what has come of a benchmark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shiftmend.cli.bench_options import (
    HOME,
    Methods,
    Name,
    Out,
    Protocol,
    Rates,
    Results,
    Seeds,
    give,
    names,
    print_json,
    rates_of,
    root_of,
    seeds_of,
)
from shiftmend.cli.options import Json, Root, columns, say, screen, show
from shiftmend.errors import DataError

if TYPE_CHECKING:
    from shiftmend.bench.cells import Result
    from shiftmend.bench.reading import Reading
    from shiftmend.bench.tabular import Table

Which = Annotated[str, typer.Option(help="Which epoch: last, selected (without labels) or best (an oracle).")]
PER_SHIFT = "A row for each shift, a column for each method."
BESIDE = "Whose figures to set beside: paper, re-run (the authors') or none."
OTHERS = "of other settings, data or learning rates, and not counted here"


def status(
    benchmark: Name,
    folder: Results = HOME,
    protocol: Protocol = "offline",
    learning_rates: Rates = None,
    data_root: Root = None,
    as_json: Json = False,
) -> None:
    """What is done, what failed and what is missing."""
    found = _read(benchmark, folder, protocol, None, None, learning_rates, data_root)
    by_cell = {result.cell: result for result in found.results}
    rows: list[dict[str, Any]] = []
    for method in found.methods:
        own = [cell for cell in found.cells if cell.method == method]
        results = [by_cell[cell] for cell in own if cell in by_cell]
        errors = Counter(str(result.error) for result in results if result.failed)
        rows.append(
            {
                "method": method,
                "done": len(results) - errors.total(),
                "failed": errors.total(),
                "missing": len(own) - len(results),
                "seconds": round(sum(result.seconds for result in results), 1),
                "errors": dict(errors.most_common()),
            }
        )
    if as_json:
        print_json({"cells": len(found.cells), "rows": rows, "others": found.others})
        return
    titles = ("done", "failed", "missing", "seconds")
    shown = columns("method", *titles, numbers=titles)
    for row in rows:
        shown.add_row(row["method"], *(str(row[title]) for title in titles[:-1]), f"{row['seconds']:,.0f}")
    show(shown)
    done = sum(not result.failed for result in found.results)
    say(f"{done} of {len(found.cells)} cells done")
    for row in rows:
        for error, count in row["errors"].items():
            say(f"{row['method']} failed {count} times: {error}" if count > 1 else f"{row['method']} failed: {error}")
    if found.others:
        say(f"{found.others} more results are {OTHERS}")


def table(
    benchmark: Name,
    folder: Results = HOME,
    protocol: Protocol = "offline",
    methods: Methods = None,
    shifts: Annotated[str | None, typer.Option(help="Rows for these shifts only, with commas.")] = None,
    seeds: Seeds = None,
    learning_rates: Rates = None,
    metric: Annotated[str, typer.Option(help="accuracy, ece, nll, restoration_distance, seconds, ...")] = "accuracy",
    which: Which = "last",
    per_shift: Annotated[bool, typer.Option("--per-shift", help=PER_SHIFT)] = False,
    beside: Annotated[str, typer.Option(help=BESIDE)] = "paper",
    format: Annotated[str, typer.Option(help="terminal, markdown, html or latex.")] = "terminal",
    data_root: Root = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Mean and deviation over seeds beside the paper's figures, and what choosing without labels costs."""
    from shiftmend.bench import rendering

    if beside not in ("paper", "re-run", "none"):
        raise DataError(f"there are no published figures called {beside!r}; expected paper, re-run or none")
    if as_json and format != "terminal":
        raise DataError(f"--json and --format {format} contradict each other; leave one of them out")
    found = _read(benchmark, folder, protocol, names(methods), seeds, learning_rates, data_root, needed=True)
    made = _tables(found, protocol, names(shifts), metric, which, per_shift, beside)
    if as_json:
        print_json([asdict(one) for one in made], out)
    elif format == "terminal" and out is None:
        terminal = screen()
        for number, one in enumerate(made):
            terminal.print(*([""] if number else []), rendering.terminal(one, terminal.width), sep="\n")
    else:
        give(rendering.render(made, format), out)  # type: ignore[arg-type]


def compare(
    benchmark: Name,
    first: Annotated[str, typer.Argument(metavar="FIRST", help="A method.")],
    second: Annotated[str, typer.Argument(metavar="SECOND", help="Another.")],
    folder: Results = HOME,
    protocol: Protocol = "offline",
    seeds: Seeds = None,
    learning_rates: Rates = None,
    metric: Annotated[str, typer.Option(help="accuracy, ece, mce, nll or brier.")] = "accuracy",
    which: Which = "last",
    data_root: Root = None,
    as_json: Json = False,
) -> None:
    """Which of two methods is better on each shift: a paired test over seeds."""
    from shiftmend.bench.comparisons import compare as compare_methods
    from shiftmend.bench.footnotes import about_comparisons
    from shiftmend.bench.grids import METRICS

    found = _read(benchmark, folder, protocol, [first, second], seeds, learning_rates, data_root, needed=True)
    compared = [result for result in found.results if result.cell.shift in found.benchmark.shifts]
    rows = compare_methods(compared, first, second, which, metric)  # type: ignore[arg-type]
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    unit = METRICS[metric]
    numbers = ("seeds", f"{first} - {second}", "p", "corrected p")
    shown = columns("shift", *numbers, "verdict", numbers=numbers)
    for row in rows:
        spread = "" if row.deviation is None else f" ± {unit.scale * row.deviation:.{unit.digits}f}"
        shown.add_row(
            row.over(len(found.benchmark.shifts)),
            str(row.pairs),
            "–" if row.difference is None else f"{unit.scale * row.difference:+.{unit.digits}f}{spread}",
            "–" if row.p is None else f"{row.p:.2g}",
            "–" if row.corrected is None else f"{row.corrected:.2g}",
            row.verdict,
        )
    show(shown)
    for remark in about_comparisons(rows, len(found.benchmark.shifts), metric):
        say(remark)
    measure = f"{unit.title} in {unit.unit}" if unit.unit else unit.title
    say(f"{measure}, {which}; two-sided paired t-test over seeds, Holm's correction for the number of shifts")
    _say_remarks(compared)


def correlate(
    benchmark: Name,
    folder: Results = HOME,
    protocol: Protocol = "offline",
    learning_rates: Rates = None,
    data_root: Root = None,
    as_json: Json = False,
) -> None:
    """Rank correlations: restoration distance with calibration, and each label-free signal with accuracy."""
    from shiftmend.bench.correlations import restoration_and_calibration, signals_and_accuracy
    from shiftmend.bench.grids import SUPERVISED
    from shiftmend.bench.planning import variants_of, with_another_source

    found = _read(benchmark, folder, protocol, None, None, learning_rates, data_root, needed=True)
    # clean images are no shift, and who saw labels, or is scored on a part, is not compared with who did not
    shifted = [result for result in found.results if result.cell.shift in found.benchmark.shifts]
    compared = [result for result in shifted if not result.cell.method.startswith(SUPERVISED)]
    others = with_another_source(found.benchmark, protocol)
    variants = variants_of(found.benchmark, protocol)
    restoration = restoration_and_calibration(compared, exclude=others, variants=variants)
    signals = signals_and_accuracy(compared)
    if as_json:
        by_name = {name: asdict(value) for name, value in signals.items()}
        print_json({"restoration": asdict(restoration), "signals": by_name})
        return
    shown = columns("method", "restoration distance", "ECE, percent", numbers=("restoration distance", "ECE, percent"))
    for method, (distance, ece) in sorted(restoration.means.items(), key=lambda item: item[1]):
        shown.add_row(method, f"{distance:#.3g}", f"{100 * ece:.1f}")
    if restoration.means:
        show(shown)
    say(f"Spearman's correlation over methods: {_coefficient(restoration.correlation)}")
    if restoration.means:
        say(f"means over {restoration.places} shifts x seeds; the paper has 0.6 on EMNIST-DA")
    there = {result.cell.method for result in shifted}
    left_out = [f"{method}, whose source model is another" for method in others if method in there]
    left_out += [f"{', '.join(restoration.without)}, for lack of common seeds"] if restoration.without else []
    left_out += ["target-supervised"] if any(method.startswith(SUPERVISED) for method in there) else []
    say(f"without {', and '.join(left_out)}\n" if left_out else "")
    titles = ("within shifts", "over all cells")
    shown = columns("signal and accuracy", *titles, numbers=titles)
    for name, value in signals.items():
        within = "–" if value.within_shifts is None else f"{value.within_shifts:+.2f} (mean of {value.shifts})"
        shown.add_row(name, within, _coefficient(value.overall))
    show(shown)
    _say_remarks(compared)


def _say_remarks(results: Sequence[Result]) -> None:
    """What is unlike the published source images, and what does not belong together."""
    from shiftmend.bench.footnotes import about_mixtures, source_remarks

    for remark in (*source_remarks(results), *about_mixtures(results)):
        say(remark)


def _tables(
    found: Reading, protocol: str, shifts: list[str] | None, metric: str, which: str, per_shift: bool, beside: str
) -> list[Table]:
    from shiftmend.bench import footnotes, published, tables, tabular
    from shiftmend.bench.planning import chosen

    benchmark = found.benchmark
    some = chosen(shifts, benchmark.shifts, "shift", benchmark.name)
    part = len(some) < len(benchmark.shifts)
    shared: dict[str, Any] = {
        "benchmark": benchmark.name,
        "protocol": protocol,
        "methods": found.methods,
        "shifts": some,
    }
    asked = shared | {
        "groups": {} if part else benchmark.groups,
        "metric": metric,
        "which": which,
        "beside": None if beside == "none" else beside,
    }
    by_shift = per_shift or shifts is not None
    main = tables.per_shift(found.results, **asked) if by_shift else tables.summary(found.results, **asked)
    if part:
        main = tabular.without_means(main)
    sides = [] if beside == "none" else [beside]
    notes = footnotes.about_clean(found.clean, benchmark=benchmark, metric=metric, which=which, beside=sides)  # type: ignore[arg-type]
    after = [f"{found.others} more results are {OTHERS}"] if found.others else []
    if any(column.kind == "published" for column in main.columns):
        after += published.notes(benchmark.name)
    made = [replace(main, notes=(*notes, *main.notes, *after))]
    if metric == "accuracy" and not by_shift and protocol != "online":
        made.append(tables.selection(found.results, **shared))
    return made


def _read(
    benchmark: str,
    folder: Path,
    protocol: str,
    methods: list[str] | None,
    seeds: str | None,
    rates: str | None,
    data_root: Path | None,
    needed: bool = False,
) -> Reading:
    from shiftmend.bench.reading import read

    found = read(
        benchmark,
        folder,
        protocol,
        methods=methods,
        seeds=seeds_of(seeds),
        rates=rates_of(rates),
        root=root_of(data_root),
    )
    if needed and not found.results:
        others = f"; {found.others} are {OTHERS}" if found.others else ""
        raise DataError(f"{folder} has no such results of {benchmark}, {protocol}{others}; run the benchmark first")
    return found


def _coefficient(correlation: Any) -> str:
    if correlation.value is None:
        return f"– ({correlation.remark})"
    remark = f"; {correlation.remark}" if correlation.remark else ""
    return f"{correlation.value:+.2f} ({correlation.points} points{remark})"
