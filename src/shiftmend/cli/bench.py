"""`bench list | run | status | table | compare | correlate | export | merge`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from shiftmend.errors import DataError

if TYPE_CHECKING:
    from shiftmend.bench.base import Benchmark
    from shiftmend.bench.cells import Cell, Result

console = Console(highlight=False, soft_wrap=True)

Name = Annotated[str, typer.Argument(metavar="BENCHMARK", help="A name from `shiftmend bench list`, or file.py:NAME.")]
Folder = Annotated[Path, typer.Option("--folder", "-f", help="Results, source models and profiles lie here.")]
Protocol = Annotated[str, typer.Option(help="offline, online, few-shot-5, ...; see `shiftmend bench list`.")]
Methods = Annotated[str | None, typer.Option(help="Only these, with commas.")]
Shifts = Annotated[str | None, typer.Option(help="Only these, with commas.")]
Seeds = Annotated[str | None, typer.Option(help="These instead of the benchmark's own, with commas.")]
Rates = Annotated[str | None, typer.Option("--learning-rates", help="Choose among these without labels; with commas.")]
Root = Annotated[Path | None, typer.Option("--data-root", help="Where the data sets lie; default SHIFTMEND_DATA.")]
Json = Annotated[bool, typer.Option("--json", help="Print machine-readable results.")]
Which = Annotated[str, typer.Option(help="Which epoch: last, selected (label-free) or best (an oracle).")]
Metric = Annotated[str, typer.Option(help="accuracy, ece, mce, nll, brier, restoration_distance, seconds, ...")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Write to this file instead of printing.")]
HOME = Path("bench")

bench = typer.Typer(help="Benchmarks: run them, stop, go on, and compare with the paper.", rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    app.add_typer(bench, name="bench")


@bench.callback(invoke_without_command=True)
def show_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@bench.command("list")
def list_benchmarks(as_json: Json = False) -> None:
    """Every benchmark: its shifts, methods, protocols and seeds."""
    from shiftmend.bench.suite import BENCHMARKS, find

    found = [find(name) for name in BENCHMARKS]
    if as_json:
        print(json.dumps([_described(benchmark) for benchmark in found]))
        return
    table = Table("benchmark", "what it is", "shifts", "seeds", "protocol: methods", box=None)
    for benchmark in found:
        methods = "\n".join(f"{protocol}: {len(rows)}" for protocol, rows in benchmark.settings.items())
        shifts, seeds = str(len(benchmark.shifts)), str(len(benchmark.seeds))
        table.add_row(benchmark.name, benchmark.title, shifts, seeds, methods)
    console.print(table)


@bench.command()
def run(
    benchmark: Name,
    folder: Folder = HOME,
    protocol: Protocol = "offline",
    methods: Methods = None,
    shifts: Shifts = None,
    seeds: Seeds = None,
    learning_rates: Rates = None,
    data_root: Root = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    workers: Annotated[int | None, typer.Option(help="Processes; default one a GPU, or one a core if small.")] = None,
    executor: Annotated[str, typer.Option(help="local, or ray for a cluster.")] = "local",
    as_json: Json = False,
) -> None:
    """Run the cells that are not done yet. Stop it at any time: what is done stays done."""
    from shiftmend.bench.runner import run as run_benchmark

    quiet = as_json or sys.stderr.isatty()
    report = run_benchmark(
        benchmark,
        folder,
        protocol=protocol,
        methods=_names(methods),
        shifts=_names(shifts),
        seeds=_numbers(seeds, int, "--seeds"),
        rates=_numbers(learning_rates, float, "--learning-rates"),
        root=data_root,
        device=device,
        workers=workers,
        executor=executor,  # type: ignore[arg-type]
        progress=False if as_json else None,
        say=None if quiet else lambda line: console.print(line, markup=False),
    )
    if as_json:
        failed = [{"cell": asdict(result.cell), "error": result.error} for result in report.failed]
        print(json.dumps(asdict(report) | {"failed": failed}))
        return
    done = f"{report.done} cells done in {report.seconds:.0f} s"
    console.print(f"{done}, {report.already} were done before, {len(report.failed)} failed", markup=False)
    for result in report.failed:
        console.print(f"failed: {result.cell}: {result.error}", markup=False)
    console.print(f"see `shiftmend bench table {benchmark} --folder {folder}`", markup=False)


@bench.command()
def status(
    benchmark: Name,
    folder: Folder = HOME,
    protocol: Protocol = "offline",
    data_root: Root = None,
    as_json: Json = False,
) -> None:
    """What is done, what failed and what is missing."""
    chosen, cells, results = _results(benchmark, folder, protocol, data_root=data_root)
    by_cell = {result.cell: result for result in results}
    rows = []
    for method in dict.fromkeys(cell.method for cell in cells):
        own = [cell for cell in cells if cell.method == method]
        found = [by_cell[cell] for cell in own if cell in by_cell]
        failed = [result for result in found if result.failed]
        rows.append(
            {
                "method": method,
                "cells": len(own),
                "done": len(found) - len(failed),
                "failed": len(failed),
                "seconds": round(sum(result.seconds for result in found), 1),
                "errors": sorted({str(result.error) for result in failed}),
            }
        )
    old = len(_stored(folder, chosen.name, protocol)) - len(results)
    if as_json:
        print(json.dumps({"rows": rows, "of_other_recipes": old}))
        return
    table = Table("method", "done", "failed", "missing", "seconds", box=None)
    for row in rows:
        missing = row["cells"] - row["done"] - row["failed"]  # type: ignore[operator]
        table.add_row(str(row["method"]), str(row["done"]), str(row["failed"]), str(missing), f"{row['seconds']:.0f}")
    console.print(table)
    for row in rows:
        for error in row["errors"]:  # type: ignore[attr-defined]
            console.print(f"{row['method']} failed: {error}", markup=False)
    if old:
        console.print(f"{old} more results are of other settings, data or learning rates and take no part")


@bench.command()
def table(
    benchmark: Name,
    folder: Folder = HOME,
    protocol: Protocol = "offline",
    methods: Methods = None,
    seeds: Seeds = None,
    learning_rates: Rates = None,
    metric: Metric = "accuracy",
    which: Which = "last",
    per_shift: Annotated[
        bool, typer.Option("--per-shift", help="A row for each shift, a column for each method.")
    ] = False,
    beside: Annotated[
        str, typer.Option(help="Whose figures to set beside: paper, re-run (the authors') or none.")
    ] = "paper",
    format: Annotated[str, typer.Option(help="terminal, markdown, html or latex.")] = "terminal",
    data_root: Root = None,
    out: Out = None,
) -> None:
    """Mean and deviation over seeds beside the paper's figures, and what choosing without labels costs."""
    from shiftmend.bench import tables
    from shiftmend.bench.rendering import render

    rates, numbers = _numbers(learning_rates, float, "--learning-rates"), _numbers(seeds, int, "--seeds")
    chosen, cells, results = _results(benchmark, folder, protocol, methods, numbers, rates, data_root)
    shared: dict[str, Any] = {
        "benchmark": chosen.name,
        "protocol": protocol,
        "methods": list(dict.fromkeys(cell.method for cell in cells)),
        "shifts": chosen.shifts,
    }
    grouped = shared | {
        "groups": chosen.groups,
        "metric": metric,
        "which": which,
        "beside": None if beside == "none" else beside,
    }
    made = [tables.per_shift(results, **grouped) if per_shift else tables.summary(results, **grouped)]
    if metric == "accuracy" and not per_shift and protocol != "online":
        made.append(tables.selection(results, **shared))
    width = Console().width if sys.stdout.isatty() else 100
    _give(render(made, format, width=width), out)  # type: ignore[arg-type]


@bench.command()
def compare(
    benchmark: Name,
    first: Annotated[str, typer.Argument(help="A method.")],
    second: Annotated[str, typer.Argument(help="Another.")],
    folder: Folder = HOME,
    protocol: Protocol = "offline",
    metric: Metric = "accuracy",
    which: Which = "last",
    data_root: Root = None,
    as_json: Json = False,
) -> None:
    """Which of two methods is better on each shift: a paired test over seeds."""
    from shiftmend.bench.comparisons import compare as compare_methods

    chosen, _, results = _results(benchmark, folder, protocol, f"{first},{second}", None, None, data_root)
    compared = [result for result in results if result.cell.shift in chosen.shifts]
    rows = compare_methods(compared, first, second, which, metric)  # type: ignore[arg-type]
    if as_json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    scale = 100 if metric in ("accuracy", "ece", "mce") else 1
    shown = Table("shift", "seeds", f"{first} - {second}", "p", "p, corrected", "verdict", box=None)
    for row in rows:
        spread = "" if row.deviation is None else f" ± {scale * row.deviation:.1f}"
        shown.add_row(
            row.shift or "all shifts",
            str(row.pairs),
            "–" if row.difference is None else f"{scale * row.difference:+.1f}{spread}",
            "–" if row.p is None else f"{row.p:.3g}",
            "–" if row.corrected is None else f"{row.corrected:.3g}",
            f"{row.verdict} ({row.remark})" if row.remark else row.verdict,
        )
    console.print(shown)
    console.print(f"{which} {metric}; paired two-sided t-test over seeds, corrected for the number of shifts by Holm")


@bench.command()
def correlate(
    benchmark: Name,
    folder: Folder = HOME,
    protocol: Protocol = "offline",
    data_root: Root = None,
    as_json: Json = False,
) -> None:
    """Rank correlations: restoration distance with calibration, and each label-free signal with accuracy."""
    from shiftmend.bench.correlations import restoration_and_calibration, signals_and_accuracy

    chosen, _, results = _results(benchmark, folder, protocol, None, None, None, data_root)
    # clean images are no shift, and who saw labels, or is scored on a part, is not compared with who did not
    compared = [r for r in results if r.cell.shift in chosen.shifts and r.cell.method != "target-supervised"]
    restoration = restoration_and_calibration(compared, exclude=("shot",))
    signals = signals_and_accuracy(compared)
    if as_json:
        found = {name: asdict(value) for name, value in signals.items()}
        print(json.dumps({"restoration": asdict(restoration), "signals": found}))
        return
    console.print("Restoration distance and ECE, over methods (the paper: 0.6 on EMNIST-DA; SHOT and")
    console.print("target-supervised left out)")
    shown = Table("method", "distance", "ECE", box=None)
    for method, (distance, ece) in sorted(restoration.means.items(), key=lambda item: item[1]):
        shown.add_row(method, f"{distance:.2f}", f"{100 * ece:.1f}")
    console.print(shown)
    console.print(f"Spearman {_coefficient(restoration.correlation)}, {restoration.places} shifts x seeds\n")
    shown = Table("signal, no labels", "with accuracy, within shifts", "over all cells", box=None)
    for name, value in signals.items():
        within = "–" if value.within_shifts is None else f"{value.within_shifts:+.2f} ({value.shifts} shifts)"
        shown.add_row(name, within, _coefficient(value.overall))
    console.print(shown)


@bench.command()
def export(
    folder: Folder = HOME,
    format: Annotated[str, typer.Option(help="csv or json (with histories and manifests).")] = "csv",
    out: Out = None,
) -> None:
    """Everything in the store, for other programs."""
    from shiftmend.bench import exports

    if format not in ("csv", "json"):
        raise DataError(f"unknown format {format!r}, expected csv or json")
    results = _stored(folder)
    _give(exports.to_csv(results) if format == "csv" else exports.to_json(results), out)


@bench.command()
def merge(
    others: Annotated[list[Path], typer.Argument(help="Stores (results.sqlite) of other machines, or their folders.")],
    folder: Folder = HOME,
) -> None:
    """Take over the results of other machines."""
    from shiftmend.bench.runner import STORE
    from shiftmend.bench.store import Store

    folder.mkdir(parents=True, exist_ok=True)
    with Store(folder / STORE) as store:
        for other in others:
            file = other / STORE if other.is_dir() else other
            console.print(f"{store.merge(file)} results from {file}", markup=False)


def _results(
    benchmark: str,
    folder: Path,
    protocol: str,
    methods: str | None = None,
    seeds: list[int] | None = None,
    rates: list[float] | None = None,
    data_root: Path | None = None,
) -> tuple[Benchmark, list[Cell], list[Result]]:
    """The benchmark's cells, and those of their results that are in the store: of the settings as they are now."""
    from shiftmend.bench.planning import plan
    from shiftmend.bench.suite import find

    chosen = find(benchmark)
    stored = _stored(folder, chosen.name, protocol)
    seeds = seeds or sorted({*chosen.seeds, *(result.cell.seed for result in stored)})
    cells = plan(chosen, protocol, methods=_names(methods), seeds=seeds, rates=rates, root=data_root)
    wanted = set(cells)
    return chosen, cells, [result for result in stored if result.cell in wanted]


def _stored(folder: Path, benchmark: str | None = None, protocol: str | None = None) -> list[Result]:
    from shiftmend.bench.runner import STORE
    from shiftmend.bench.store import Store

    with Store(folder / STORE, read_only=True) as store:
        return store.results(benchmark=benchmark, protocol=protocol)


def _described(benchmark: Benchmark) -> dict[str, Any]:
    return {
        "name": benchmark.name,
        "title": benchmark.title,
        "shifts": list(benchmark.shifts),
        "groups": {name: list(members) for name, members in benchmark.groups.items()},
        "seeds": list(benchmark.seeds),
        "sources": {name: recipe.facts() for name, recipe in benchmark.sources.items()},
        "protocols": {name: protocol.facts() for name, protocol in benchmark.protocols.items()},
        "settings": {
            protocol: {name: asdict(setting) for name, setting in rows.items()}
            for protocol, rows in benchmark.settings.items()
        },
    }


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _numbers(text: str | None, kind: type[Any], option: str) -> list[Any] | None:
    try:
        return None if text is None else [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise DataError(f"{option} {text!r} should be numbers with commas") from None


def _coefficient(correlation: Any) -> str:
    value = "–" if correlation.value is None else f"{correlation.value:+.2f} ({correlation.points} points)"
    return f"{value} {correlation.remark}".strip()


def _give(text: str, out: Path | None) -> None:
    if out is None:
        print(text, end="" if text.endswith("\n") else "\n")
        return
    from shiftmend.files import write_atomically

    write_atomically(out, text.encode())
    console.print(f"written to {out}", markup=False)
