"""`bench list | show | run | export | merge`; what looks at results is in `bench_results.py` and `bench_pages.py`."""

from __future__ import annotations

import os
import shlex
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shiftmend.checks import counted
from shiftmend.cli import bench_pages, bench_results, bench_speed
from shiftmend.cli.bench_options import (
    HOME,
    Folder,
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
from shiftmend.files import check_folder, said_where

if TYPE_CHECKING:
    from shiftmend.bench.base import Benchmark

EXPORTS = "csv, json (with histories and manifests), or compact: small, and read back by --folder."

bench = typer.Typer(help="Benchmarks: run them, stop, go on, and compare with the paper.", rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    looking = (bench_results.status, bench_results.table, bench_results.compare, bench_results.correlate)
    for command in (*looking, export, bench_pages.page, bench_pages.storage, merge, bench_speed.speed):
        bench.command()(command)
    app.add_typer(bench, name="bench")


@bench.callback(invoke_without_command=True)
def show_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@bench.command("list")
def list_benchmarks(as_json: Json = False) -> None:
    """Every benchmark in a line."""
    from shiftmend.bench.suite import BENCHMARKS, find

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
    """One benchmark in full: source training, protocols, methods with their hyper-parameters, origin of the data."""
    from shiftmend.bench.descriptions import describe
    from shiftmend.bench.footnotes import ORIGINS
    from shiftmend.bench.suite import find

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
    _show_rows("source model", "how it is trained", {name: _listed(facts["sources"][name]) for name in chosen.sources})
    _show_rows(
        "protocol", "how methods are run", {name: _listed(facts["protocols"][name]) for name in chosen.protocols}
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


@bench.command()
def run(
    benchmark: Name,
    folder: Folder = HOME,
    protocol: Protocol = "offline",
    methods: Methods = None,
    shifts: Annotated[str | None, typer.Option(help="Only these, with commas; `clean` is none at all.")] = None,
    seeds: Seeds = None,
    learning_rates: Rates = None,
    data_root: Root = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    workers: Annotated[int | None, typer.Option(help="Processes; default one a GPU, or one a core if small.")] = None,
    compile: Annotated[bool, typer.Option(help="On a GPU, compile steps: pays for many cells of a ResNet.")] = False,
    minutes: Annotated[float | None, typer.Option(help="Begin nothing that would likely not be over by then.")] = None,
    executor: Annotated[str, typer.Option(help="local, or ray for a cluster.")] = "local",
    as_json: Json = False,
) -> None:
    """Run the cells that are not done yet. Stop it at any time: what is done stays done. Exit code 1 if any failed."""
    from shiftmend.bench.runner import run as run_benchmark

    check_folder(folder)
    report = run_benchmark(
        benchmark,
        folder,
        protocol=protocol,
        methods=names(methods),
        shifts=names(shifts),
        seeds=seeds_of(seeds),
        rates=rates_of(learning_rates),
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


def export(
    benchmark: Annotated[str | None, typer.Argument(metavar="BENCHMARK", help="Only this one; default all.")] = None,
    folder: Results = HOME,
    format: Annotated[str, typer.Option(help=EXPORTS)] = "csv",
    out: Out = None,
) -> None:
    """Everything in the store, for other programs, or as a small file that `--folder` takes in place of a store."""
    from shiftmend.bench import compact, exports
    from shiftmend.bench.reading import stored
    from shiftmend.bench.suite import find

    writers = {"csv": exports.to_csv, "json": exports.to_json, "compact": compact.to_compact}
    if format not in writers:
        raise DataError(f"unknown format {format!r}, expected csv, json or compact")
    results = stored(folder, None if benchmark is None else find(benchmark).name)
    if benchmark is not None and not results:
        raise DataError(f"{folder} has no results of {benchmark}; run the benchmark first")
    give(writers[format](results), out)


def merge(
    others: Annotated[
        list[Path],
        typer.Argument(metavar="OTHERS", help="Stores of other machines, their folders, or compact exports."),
    ],
    folder: Folder = HOME,
    as_json: Json = False,
) -> None:
    """Take over the results of other machines. What is done here stays as it is."""
    from shiftmend.bench.reading import stored
    from shiftmend.bench.runner import STORE
    from shiftmend.bench.store import Store

    places = {other / STORE if other.is_dir() else other: other for other in others}
    for file in places:
        if not file.exists():
            raise DataError(f"there is no store of benchmark results at {file}; name one, its folder or an export")
        if (folder / STORE).exists() and file.samefile(folder / STORE):
            raise DataError(f"{file} cannot be merged with itself; name the store of another machine")
    # all of them are read before anything is changed
    found = {str(file): stored(place) for file, place in places.items()}
    with said_where(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with Store(folder / STORE) as store:
        taken = {name: store.merge(results) for name, results in found.items()}
    if as_json:
        print_json(taken)
        return
    for name, count in taken.items():
        say(f"{counted(count, 'result')} from {name}")


def _show_methods(benchmark: Benchmark, facts: Mapping[str, Any]) -> None:
    """A row for each method and choice of its options; protocols that share one share the row."""
    from shiftmend.bench.base import USUAL_PRESET

    rows: dict[tuple[str, str, str], list[str]] = {}
    for protocol, settings in facts["settings"].items():
        for name, setting in settings.items():
            given, left = _listed(setting["options"]), _listed(setting["defaults"])
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


def _listed(values: Mapping[str, Any]) -> str:
    """`epochs 12, learning_rate 0.1`; what is not set, or off, goes without saying."""
    return ", ".join(f"{name} {_value(value)}" for name, value in values.items() if value not in (None, {}, False))


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"({_listed(value)})"
    if isinstance(value, list | tuple):
        return " + ".join(map(_value, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
