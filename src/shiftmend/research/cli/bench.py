"""The commands `bench list | show | run | status | table | compare | correlate | export | page | storage | merge`."""

from __future__ import annotations

import os
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shiftmend.cli.options import Json, Root, Sign, Trust, columns, say, screen, show
from shiftmend.errors import DataError
from shiftmend.utils.checks import counted
from shiftmend.utils.files import check_folder, said_where, write_atomically
from shiftmend.utils.json import dumps
from shiftmend.utils.signing import load_key, read_public
from shiftmend.utils.terminal import neutralise

if TYPE_CHECKING:
    from shiftmend.research.bench.benchmark import Benchmark, Result
    from shiftmend.research.bench.rendering import Table
    from shiftmend.research.bench.results import Reading

Name = Annotated[str, typer.Argument(metavar="BENCHMARK", help="A name from `shiftmend bench list`, or file.py:NAME.")]
Folder = Annotated[Path, typer.Option("--folder", "-f", help="Folder of results, source models and profiles.")]
Results = Annotated[Path, typer.Option("--folder", "-f", help="Folder of results, or a compact export.")]
Protocol = Annotated[str, typer.Option(help="offline, online, few-shot-5, ...; see `shiftmend bench show`.")]
Methods = Annotated[str | None, typer.Option(help="Only these, with commas.")]
Seeds = Annotated[str | None, typer.Option(help="These instead of the benchmark's own, with commas.")]
Rates = Annotated[
    str | None, typer.Option("--learning-rates", help="Choose among these rates without labels; with commas.")
]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Write to this file instead of printing.")]
Which = Annotated[str, typer.Option(help="Which epoch: last, selected (without labels) or best (an oracle).")]
NOTES = "Markdown to include; default notes/BENCHMARK.md beside the file of --out, if there is one."
EXPORTS = "csv, json (with histories and manifests), or compact: small, and read back by --folder."
PER_SHIFT = "A row for each shift, a column for each method."
BESIDE = "Published figures to compare with: paper, re-run (by the authors) or none."
OTHERS = "of other settings, data or learning rates, and not counted here"
HOME = Path("bench")
LARGEST_SEED = 2**32 - 1
bench = typer.Typer(
    help="Run benchmarks, interrupt and resume them, and compare with the paper.", rich_markup_mode=None
)


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    for command in (status, table, compare, correlate, export, page, storage, merge):
        bench.command()(command)
    app.add_typer(bench, name="bench")


@bench.callback(invoke_without_command=True)
def show_help(context: typer.Context) -> None:
    """Print the help if no command is named."""
    if context.invoked_subcommand is None:
        print(context.get_help())


# ---- what there is


@bench.command("list")
def list_benchmarks(as_json: Json = False) -> None:
    """List all benchmarks, one per line."""
    from shiftmend.research.bench.suite import BENCHMARKS, find

    found = [find(name) for name in BENCHMARKS]
    if as_json:
        print_json(
            [
                {
                    "name": benchmark.name,
                    "title": benchmark.title,
                    "shifts": list(benchmark.shifts),
                    "seeds": list(benchmark.seeds),
                    "protocols": {name: list(rows) for name, rows in benchmark.settings.items()},
                }
                for benchmark in found
            ]
        )
        return
    table = columns("benchmark", "what it is", "shifts", "seeds", "protocols", numbers=("shifts", "seeds"))
    for benchmark in found:
        shifts, seeds = str(len(benchmark.shifts)), str(len(benchmark.seeds))
        table.add_row(benchmark.name, benchmark.title, shifts, seeds, ", ".join(benchmark.protocols))
    show(table)
    say("\nsee `shiftmend bench show NAME` for methods, hyper-parameters and data")


@bench.command("show")
def show_benchmark(benchmark: Name, data_root: Root = None, as_json: Json = False) -> None:
    """Print one benchmark: training of the sources, protocols, methods with hyper-parameters, origin of the data."""
    from shiftmend.research.bench.footnotes import ORIGINS
    from shiftmend.research.bench.plan import describe
    from shiftmend.research.bench.suite import find

    chosen = find(benchmark)
    root = root_of(data_root)
    facts = describe(chosen, root)
    if as_json:
        print_json(facts)
        return
    screen().print(chosen.title, style="bold")
    say(f"seeds {', '.join(map(str, chosen.seeds))}")
    for name, members in chosen.groups.items():
        say(f"group {name}: {', '.join(members)}")
    _show_rows(
        "source model", "how it is trained", {name: _list_values(facts["sources"][name]) for name in chosen.sources}
    )
    _show_rows(
        "protocol", "how methods are run", {name: _list_values(facts["protocols"][name]) for name in chosen.protocols}
    )
    _show_methods(chosen, facts)
    by_origin: dict[str, list[str]] = {}
    for shift, origin in facts["shifts"].items():
        by_origin.setdefault(origin, []).append(shift)
    meanings = {"published": "the published files"} | {origin: meaning for origin, (_, meaning) in ORIGINS.items()}
    rows = {meanings[origin]: ", ".join(shifts) for origin, shifts in by_origin.items()}
    named = root or os.environ.get("SHIFTMEND_DATA")
    _show_rows("origin of the images", "shifts", rows)
    if facts["source_remark"]:
        say(facts["source_remark"])
    say(f"with the data under {named}" if named else "without a data folder; name one with --data-root")


def _show_methods(benchmark: Benchmark, facts: Mapping[str, Any]) -> None:
    """Show one row per method and set of options; protocols with equal options share a row."""
    from shiftmend.research.bench.benchmark import USUAL_PRESET

    rows: dict[tuple[str, str, str], list[str]] = {}
    for protocol, settings in facts["settings"].items():
        for name, setting in settings.items():
            given, left = _list_values(setting["options"]), _list_values(setting["defaults"])
            preset = "" if setting["preset"] == USUAL_PRESET else f"preset {setting['preset']}"
            text = "; ".join(filter(None, [given, preset, f"by default {left}" if left else ""]))
            shown = name if name == setting["method"] else f"{name} ({setting['method']})"
            rows.setdefault((shown, setting["source"], text), []).append(protocol)
    table = columns("method", "from", "hyper-parameters", "protocols")
    for (name, source, text), protocols in rows.items():
        everywhere = len(protocols) == len(benchmark.protocols)
        table.add_row(name, source, text or "–", "all" if everywhere else ", ".join(protocols))
    say("")
    show(table)


def _show_rows(title: str, what: str, rows: Mapping[str, str]) -> None:
    table = columns(title, what)
    for name, text in rows.items():
        table.add_row(name, text)
    say("")
    show(table)


def _list_values(values: Mapping[str, Any]) -> str:
    """Format `epochs 12, learning_rate 0.1`, without options that are unset or off."""
    return ", ".join(
        f"{name} {_format_value(value)}" for name, value in values.items() if value not in (None, {}, False)
    )


def _format_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"({_list_values(value)})"
    if isinstance(value, list | tuple):
        return " + ".join(map(_format_value, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


# ---- running


@bench.command()
def run(
    benchmark: Name,
    folder: Folder = HOME,
    protocol: Protocol = "offline",
    methods: Methods = None,
    shifts: Annotated[str | None, typer.Option(help="Only these, with commas; `clean` means unshifted.")] = None,
    seeds: Seeds = None,
    learning_rates: Rates = None,
    data_root: Root = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    workers: Annotated[int | None, typer.Option(help="Processes; default: one per GPU, or per core if small.")] = None,
    compile: Annotated[bool, typer.Option(help="Compile steps on a GPU; pays off for many ResNet cells.")] = False,
    minutes: Annotated[
        float | None, typer.Option(help="Time limit; start nothing that would probably exceed it.")
    ] = None,
    executor: Annotated[str, typer.Option(help="local, or ray for a cluster.")] = "local",
    as_json: Json = False,
) -> None:
    """Run the missing cells. It can be stopped at any time: finished cells are kept. Exit code 1 if any failed."""
    from shiftmend.research.bench.run import run as run_benchmark

    check_folder(folder)
    report = run_benchmark(
        benchmark,
        folder,
        protocol=protocol,
        methods=names(methods),
        shifts=names(shifts),
        seeds=parse_seeds(seeds),
        rates=parse_rates(learning_rates),
        root=root_of(data_root),
        device=device,
        workers=workers,
        compile=compile,
        minutes=minutes,
        executor=executor,  # type: ignore[arg-type]
        progress=False if as_json else None,
        say=None if as_json or sys.stderr.isatty() else say,
    )
    if as_json:
        failed = [{"cell": asdict(result.cell), "error": result.error} for result in report.failed]
        print_json(asdict(report) | {"failed": failed})
    else:
        done = f"{counted(report.done, 'cell')} done in {report.seconds:.0f} s"
        left = f", no time for {report.left}" if report.left else ""
        say(f"{done}, {report.already} were done before, {len(report.failed)} failed{left}")
        first = {result.error: result.cell for result in reversed(report.failed)}
        for error, count in Counter(result.error for result in report.failed).most_common():
            others = f" and {count - 1} more" if count > 1 else ""
            say(f"failed: {first[error]}{others}: {error}")
        same = f" --protocol {shlex.quote(protocol)}" if protocol != "offline" else ""
        same += f" --learning-rates {learning_rates}" if learning_rates else ""
        say(f"see `shiftmend bench table {shlex.quote(benchmark)} --folder {shlex.quote(str(folder))}{same}`")
    if report.failed:
        raise typer.Exit(1)


# ---- looking at results


def status(
    benchmark: Name,
    folder: Results = HOME,
    protocol: Protocol = "offline",
    learning_rates: Rates = None,
    data_root: Root = None,
    as_json: Json = False,
) -> None:
    """Show what is done, what failed and what is missing."""
    found = _read(benchmark, folder, protocol, None, None, learning_rates, data_root, brief=True)
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
    """Show mean and deviation over seeds beside the paper's figures, and the cost of choosing without labels."""
    from shiftmend.research.bench.rendering import render, render_terminal

    if beside not in ("paper", "re-run", "none"):
        raise DataError(f"Expected the published figures to be paper, re-run or none, got {beside!r}.")
    if as_json and format != "terminal":
        raise DataError(f"Expected --json or --format {format}, got both. Leave one of them out.")
    found = _read(benchmark, folder, protocol, names(methods), seeds, learning_rates, data_root, needed=True)
    made = _tables(found, protocol, names(shifts), metric, which, per_shift, beside)
    if as_json:
        print_json([asdict(one) for one in made], out)
    elif format == "terminal" and out is None:
        terminal = screen()
        for number, one in enumerate(made):
            terminal.print(*([""] if number else []), render_terminal(one, terminal.width), sep="\n")
    else:
        write_out(render(made, format), out)  # type: ignore[arg-type]


def _tables(
    found: Reading, protocol: str, shifts: list[str] | None, metric: str, which: str, per_shift: bool, beside: str
) -> list[Table]:
    from shiftmend.research.bench import footnotes, published, tables
    from shiftmend.research.bench.grids import Grid
    from shiftmend.research.bench.plan import choose

    benchmark = found.benchmark
    some = choose(shifts, benchmark.shifts, "shift", benchmark.name)
    part = len(some) < len(benchmark.shifts)
    shared: dict[str, Any] = {
        "benchmark": benchmark.name,
        "protocol": protocol,
        "methods": found.methods,
        "shifts": some,
    }
    asked = shared | {
        "groups": {} if part else found.groups,
        "metric": metric,
        "which": which,
        "beside": None if beside == "none" else beside,
    }
    by_shift = per_shift or shifts is not None
    main = tables.per_shift(found.results, **asked) if by_shift else tables.summary(found.results, **asked)
    if not by_shift:
        main = tables.add_quoted(main, Grid(results=[], **shared, metric=metric))
    if part:
        main = tables.drop_means(main)
    sides = [] if beside == "none" else [beside]
    notes = footnotes.about_clean(found.clean, benchmark=benchmark, metric=metric, which=which, beside=sides)  # type: ignore[arg-type]
    after = [footnotes.SEVERITY] if "severe" in asked["groups"] and not by_shift else []
    after += [f"{found.others} more results are {OTHERS}"] if found.others else []
    if any(column.kind == "published" for column in main.columns):
        after += published.notes(benchmark.name)
    made = [replace(main, notes=(*notes, *main.notes, *after))]
    if metric == "accuracy" and not by_shift and protocol != "online":
        made.append(tables.selection(found.results, **shared))
    return made


def compare(
    benchmark: Name,
    first: Annotated[str, typer.Argument(metavar="FIRST", help="A method.")],
    second: Annotated[str, typer.Argument(metavar="SECOND", help="Another method.")],
    folder: Results = HOME,
    protocol: Protocol = "offline",
    seeds: Seeds = None,
    learning_rates: Rates = None,
    metric: Annotated[str, typer.Option(help="accuracy, ece, mce, nll or brier.")] = "accuracy",
    which: Which = "last",
    data_root: Root = None,
    as_json: Json = False,
) -> None:
    """Test which of two methods is better on each shift, paired over seeds."""
    from shiftmend.research.analysis.comparisons import compare as compare_methods
    from shiftmend.research.bench.footnotes import about_comparisons
    from shiftmend.research.bench.grids import METRICS

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
    """Show rank correlations over the stored results of a benchmark.

    The first table has the mean restoration distance and the mean calibration error (ECE) of each method, with their
    correlation over methods below. The restoration distance is small if a method's features are close to the source
    model's features of the clean images. The second table correlates each label-free signal with accuracy, within each
    shift and over all results.
    """
    from shiftmend.research.analysis.correlations import restoration_and_calibration, signals_and_accuracy
    from shiftmend.research.bench.benchmark import labelled_methods, sees_labels
    from shiftmend.research.bench.plan import variants_of, with_another_source

    found = _read(benchmark, folder, protocol, None, None, learning_rates, data_root, needed=True)
    # Clean images are no shift, and methods that saw labels are scored on a part of the images.
    shifted = [result for result in found.results if result.cell.shift in found.benchmark.shifts]
    compared = [result for result in shifted if not sees_labels(result.cell.method)]
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
    left_out += list(labelled_methods()) if any(map(sees_labels, there)) else []
    say(f"without {', and '.join(left_out)}\n" if left_out else "")
    titles = ("within shifts", "over all cells")
    shown = columns("signal and accuracy", *titles, numbers=titles)
    for name, value in signals.items():
        within = "–" if value.within_shifts is None else f"{value.within_shifts:+.2f} (mean of {value.shifts})"
        shown.add_row(name, within, _coefficient(value.overall))
    show(shown)
    _say_remarks(compared)


def _coefficient(correlation: Any) -> str:
    if correlation.value is None:
        return f"– ({correlation.remark})"
    remark = f"; {correlation.remark}" if correlation.remark else ""
    return f"{correlation.value:+.2f} ({correlation.points} points{remark})"


def _say_remarks(results: Sequence[Result]) -> None:
    """Say how the source images differ from the published ones, and which results must not be compared."""
    from shiftmend.research.bench.footnotes import about_mixtures, source_remarks

    for remark in (*source_remarks(results), *about_mixtures(results)):
        say(remark)


def _read(
    benchmark: str,
    folder: Path,
    protocol: str,
    methods: list[str] | None,
    seeds: str | None,
    rates: str | None,
    data_root: Path | None,
    needed: bool = False,
    brief: bool = False,
) -> Reading:
    from shiftmend.research.bench.results import read

    found = read(
        benchmark,
        folder,
        protocol,
        methods=methods,
        seeds=parse_seeds(seeds),
        rates=parse_rates(rates),
        root=root_of(data_root),
        brief=brief,
    )
    if needed and not found.results:
        others = f"; {found.others} are {OTHERS}" if found.others else ""
        raise DataError(
            f"Expected results of {benchmark}, {protocol} in {folder}, got none{others}. Run the benchmark first."
        )
    return found


# ---- results for others


def export(
    benchmark: Annotated[str | None, typer.Argument(metavar="BENCHMARK", help="Only this one; default all.")] = None,
    folder: Results = HOME,
    format: Annotated[str, typer.Option(help=EXPORTS)] = "csv",
    sign: Sign = None,
    out: Out = None,
) -> None:
    """Write all results of the store for other programs, or as a small file that `--folder` accepts."""
    from shiftmend.research.bench.store import load_results, to_compact, to_csv, to_json
    from shiftmend.research.bench.suite import find

    writers = {"csv": to_csv, "json": to_json}
    if format not in (*writers, "compact"):
        raise DataError(f"Expected --format to be csv, json or compact, got {format!r}.")
    if sign is not None and format != "compact":
        raise DataError(f"Expected --format compact for --sign, got {format}, which has no place for a signature.")
    key = None if sign is None else load_key(sign)
    results = load_results(folder, None if benchmark is None else find(benchmark).name)
    if benchmark is not None and not results:
        raise DataError(f"Expected results of {benchmark} in {folder}, got none. Run the benchmark first.")
    write_out(to_compact(results, key) if format == "compact" else writers[format](results), out)


def page(
    benchmark: Name,
    folder: Results = HOME,
    notes: Annotated[Path | None, typer.Option(help=NOTES)] = None,
    data_root: Root = None,
    out: Out = None,
) -> None:
    """Write all results of a benchmark as a Markdown page, with how they were made and what is missing."""
    from shiftmend.research.bench.pages import page as write_page
    from shiftmend.research.bench.suite import find

    if notes is None and out is not None:
        usual = out.parent / "notes" / f"{find(benchmark).name}.md"
        notes = usual if usual.is_file() else None
    if notes is not None and not notes.is_file():
        raise DataError(
            f"Expected notes as a Markdown file, got {notes}, which does not exist. Name another, or leave them out."
        )
    try:
        own = "" if notes is None else notes.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise DataError(
            f"Expected notes in UTF-8, got {notes}, which is no such text. Name a Markdown file, or leave them out."
        ) from None
    write_out(write_page(benchmark, folder, own, root_of(data_root)), out)


def storage(
    benchmarks: Annotated[str | None, typer.Option(help="Only these, with commas.")] = None,
    folder: Results = HOME,
    data_root: Root = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Measure the size of a profile compared with the model and the data; --out writes a Markdown page."""
    from shiftmend.research.bench import profile_sizes
    from shiftmend.research.bench.rendering import render_terminal

    chosen = names(benchmarks) or profile_sizes.MEASURED
    sizes = [profile_sizes.measure(benchmark, folder, root_of(data_root)) for benchmark in chosen]
    if as_json:
        print_json([asdict(one) for one in sizes], out)
    elif out is not None:
        write_out(profile_sizes.write_page(sizes), out)
    else:
        terminal = screen()
        terminal.print(render_terminal(profile_sizes.make_table(sizes), terminal.width))


def merge(
    others: Annotated[
        list[Path],
        typer.Argument(metavar="OTHERS", help="Stores of other machines, their folders, or compact exports."),
    ],
    folder: Folder = HOME,
    trust: Trust = None,
    as_json: Json = False,
) -> None:
    """Add the results of other machines to the store. Existing results are kept."""
    from shiftmend.research.bench.store import STORE, Store, load_results

    places = {other / STORE if other.is_dir() else other: other for other in others}
    for file in places:
        if not file.exists():
            raise DataError(
                f"Expected a store of benchmark results, its folder or an export, got {file}, which does not exist. "
                "Name another."
            )
        if (folder / STORE).exists() and file.samefile(folder / STORE):
            raise DataError(
                f"Expected the store of another machine, got {file}, which cannot be merged with itself. Name another."
            )
    # All of them are read before anything is changed.
    key = None if trust is None else read_public(trust)
    found = {str(file): load_results(place, trust=key) for file, place in places.items()}
    with said_where(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with Store(folder / STORE) as store:
        taken = {name: store.merge(results) for name, results in found.items()}
    if as_json:
        print_json(taken)
        return
    for name, count in taken.items():
        say(f"{counted(count, 'result')} from {name}")


# ---- what the commands share


def print_json(value: Any, out: Path | None = None) -> None:
    """Print a value as JSON, or write it to a file."""
    write_out(dumps(value) + "\n", out)


def write_out(text: str, out: Path | None) -> None:
    """Print a text, or write it to a file."""
    if out is None:
        print(neutralise(text), end="" if text.endswith("\n") else "\n")
        return
    with said_where(out):
        write_atomically(out, text.encode())
    say(f"written to {out}")


def names(text: str | None) -> list[str] | None:
    """Split names at their commas; None stays None."""
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def parse_seeds(text: str | None) -> list[int] | None:
    """Parse seeds with commas; None stays None."""
    try:
        found = None if text is None else [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if found is not None and (not found or not all(0 <= seed <= LARGEST_SEED for seed in found)):
        raise DataError(f"Expected --seeds to be whole numbers from 0 to {LARGEST_SEED}, with commas, got {text!r}.")
    return found


def parse_rates(text: str | None) -> list[float] | None:
    """Parse learning rates with commas; None stays None."""
    try:
        found = None if text is None else [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if found is not None and (not found or not all(0 < rate < float("inf") for rate in found)):
        raise DataError(f"Expected --learning-rates to be positive numbers with commas, got {text!r}.")
    return found


def root_of(data_root: Path | None) -> Path | None:
    """Return the given folder of the data sets with `~` expanded; None if none is given.

    Raises:
        DataError: If the folder does not exist.
    """
    if data_root is not None and not data_root.expanduser().is_dir():
        raise DataError(
            f"Expected the folder that the data sets lie in, got {data_root}, which does not exist. Name another."
        )
    return None if data_root is None else data_root.expanduser()
