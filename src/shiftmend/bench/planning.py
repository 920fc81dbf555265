"""From a benchmark and what is asked of it to the cells of its grid."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path

from shiftmend import checkpoints
from shiftmend.bench.base import CLEAN, Benchmark, Setting
from shiftmend.bench.cells import Cell
from shiftmend.errors import DataError


def plan(
    benchmark: Benchmark,
    protocol: str = "offline",
    *,
    methods: Sequence[str] | None = None,
    shifts: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    rates: Sequence[float] | None = None,
    root: Path | None = None,
) -> list[Cell]:
    """The cells to run, in an order in which neighbours share their source model and their data.

    The source model on clean images is a cell as well: `source-only` on the shift `clean`. Other seeds than the
    benchmark's own may be named. With `rates`, methods that have a learning rate are run with each of them.
    """
    settings = settings_of(benchmark, protocol)
    methods = chosen(methods, settings, "method", f"{benchmark.name}, {protocol}")
    shifts = chosen(shifts, (*benchmark.shifts, CLEAN), "shift", benchmark.name)
    seeds = list(dict.fromkeys(benchmark.seeds if seeds is None else seeds))
    if not seeds:
        raise DataError("no seed is named; expected at least one, or leave the choice out")
    return [
        Cell(
            benchmark.name,
            protocol,
            method,
            shift,
            seed,
            recipe(benchmark, protocol, settings[method], shift, rates, root),
        )
        for seed in seeds
        for shift in shifts
        for method in methods
        if shift != CLEAN or (method == "source-only" and protocol == "offline")
    ]


def settings_of(benchmark: Benchmark, protocol: str) -> dict[str, Setting]:
    """The methods of a protocol, by their names in the table."""
    if protocol not in benchmark.protocols:
        known = ", ".join(benchmark.protocols)
        raise DataError(f"benchmark {benchmark.name} has no protocol {protocol!r}; it has {known}")
    return dict(benchmark.settings[protocol])


def recipe(
    benchmark: Benchmark,
    protocol: str,
    setting: Setting,
    shift: str,
    rates: Sequence[float] | None = None,
    root: Path | None = None,
) -> str:
    """A hash of everything that decides a cell's result beside its own name; see `Cell`."""
    facts = {
        "source": benchmark.sources[benchmark.source_for(setting, shift)].facts(),
        "method": setting.method,
        "options": dict(setting.options),
        "protocol": benchmark.protocols[protocol].facts(),
        "origin": benchmark.origin(shift, root),
        "rates": list(rates_for(setting, rates)),
    }
    return checkpoints.identify(facts)


def rates_for(setting: Setting, rates: Sequence[float] | None) -> Sequence[float]:
    """The learning rates to try: those asked for, where the setting has one at all."""
    return tuple(rates) if rates and "learning_rate" in setting.options else ()


def chosen(wanted: Sequence[str] | None, known: Iterable[str], what: str, where: str) -> list[str]:
    """What is asked for, in the benchmark's order; everything if nothing is."""
    names = list(known)
    if wanted is None:
        return names
    for name in wanted:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise DataError(f"{where} has no {what} {name!r}; expected one of {', '.join(names)}{hint}")
    return [name for name in names if name in wanted]
