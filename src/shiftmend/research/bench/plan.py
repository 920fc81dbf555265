"""A benchmark in plain values: everything that decides its numbers, for people and for other programs."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, get_args

import torch

from shiftmend.engine import checkpoint as checkpoints
from shiftmend.errors import DataError
from shiftmend.inputs.feed import Preprocess
from shiftmend.inputs.images import Split
from shiftmend.methods import METHODS
from shiftmend.research.bench.benchmark import (
    CLEAN,
    USUAL_PRESET,
    Benchmark,
    Cell,
    Online,
    Origin,
    Protocol,
    Root,
    Setting,
)
from shiftmend.research.bench.resources import identity


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
    recipes = {
        (method, shift): recipe(benchmark, protocol, settings[method], shift, rates, root)
        for shift in shifts
        for method in methods
        if shift != CLEAN or (method == "source-only" and protocol == "offline")
    }
    if not recipes:
        raise DataError(f"there is nothing to run: {CLEAN} is a shift for source-only and offline alone")
    return [
        Cell(benchmark.name, protocol, method, shift, seed, made_by)
        for seed in seeds
        for (method, shift), made_by in recipes.items()
    ]


def settings_of(benchmark: Benchmark, protocol: str) -> dict[str, Setting]:
    """The methods of a protocol, by their names in the table."""
    if protocol not in benchmark.protocols:
        known = ", ".join(benchmark.protocols)
        raise DataError(f"benchmark {benchmark.name} has no protocol {protocol!r}; it has {known}")
    return dict(benchmark.settings[protocol])


def variants_of(benchmark: Benchmark, protocol: str) -> dict[str, str]:
    """Rows that are a method with other options or another profile, and which method each is one of."""
    settings = settings_of(benchmark, protocol)
    return {name: setting.method for name, setting in settings.items() if setting.method != name}


def with_another_source(benchmark: Benchmark, protocol: str) -> list[str]:
    """Methods that start from another model than source-only does, or than the first where there is no source-only.

    Its features are others to begin with: how far they are restored does not compare.
    """
    settings, source = settings_of(benchmark, protocol), benchmark.source_for
    usual = settings.get("source-only") or next(iter(settings.values()))
    return [
        name
        for name, setting in settings.items()
        if any(source(setting, shift) != source(usual, shift) for shift in benchmark.shifts)
    ]


def recipe(
    benchmark: Benchmark,
    protocol: str,
    setting: Setting,
    shift: str,
    rates: Sequence[float] | None = None,
    root: Path | None = None,
) -> str:
    """A hash of everything that decides a cell's result beside its own name; see `Cell`."""
    source = benchmark.source_for(setting, shift)
    candidates = rates_for(setting, benchmark.protocols[protocol], rates)
    options = _one_form(setting.options)
    if candidates:  # they take the place of the setting's own rate
        options = {name: value for name, value in options.items() if name != "learning_rate"}
    facts = {
        "source": {"name": source, **benchmark.sources[source].facts()},
        "inputs": _inputs(benchmark.preprocess),
        "method": setting.method,
        "options": options,
        "protocol": benchmark.protocols[protocol].facts(),
        "origin": origin_of(benchmark, shift, root),
        "rates": list(candidates),
        **({} if setting.preset == USUAL_PRESET else {"preset": setting.preset}),
    }
    return checkpoints.identify(facts)


def origin_of(benchmark: Benchmark, shift: str, root: Path | None = None) -> Origin:
    """Where the images of a shift come from; a word that no table could explain is refused before anything is run."""
    origin = benchmark.origin(shift, root)
    if origin not in get_args(Origin):
        known = ", ".join(get_args(Origin))
        raise DataError(f"benchmark {benchmark.name} gives {shift} the origin {origin!r}; expected one of {known}")
    return origin


def rates_for(setting: Setting, protocol: Protocol, rates: Sequence[float] | None) -> tuple[float, ...]:
    """The learning rates to try: those asked for, where the method has one at all, in one order for one recipe."""
    if rates and isinstance(protocol, Online):
        raise DataError("learning rates cannot be compared online, where there is one pass only; leave them out")
    has_one = any(option.name == "learning_rate" for option in fields(METHODS[setting.method]))
    return tuple(sorted({float(rate) for rate in rates or ()})) if has_one else ()


def _one_form(options: Mapping[str, Any]) -> dict[str, Any]:
    """1 and 1.0 are one rate, and must not give two hashes."""
    numbers = {name: float(value) for name, value in options.items() if type(value) is int}
    return dict(options) | numbers


def _inputs(preprocess: Preprocess) -> Any:
    """What becomes of black and white images, so that another normalisation is another recipe.

    None where that cannot be asked without real images; source models tell preprocessings apart in any case.
    """
    try:
        return identity(Split(torch.zeros(1, 3, 32, 32, dtype=torch.uint8), None, "probe"), preprocess)["preprocess"]
    except Exception:  # it is the user's own, and may want another shape
        return None


def chosen(wanted: Sequence[str] | None, known: Iterable[str], what: str, where: str) -> list[str]:
    """What is asked for, in the benchmark's order; everything if nothing is."""
    names = list(known)
    if wanted is None:
        return names
    if not wanted:
        raise DataError(f"no {what} is named; expected some of {', '.join(names)}, or leave the choice out")
    for name in wanted:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise DataError(f"{where} has no {what} {name!r}; expected one of {', '.join(names)}{hint}")
    return [name for name in names if name in wanted]


ONE_PASS = ("epochs", "epochs_per_block", "passes")
"""Options that mean nothing on a stream."""


def describe(benchmark: Benchmark, root: Root = None) -> dict[str, Any]:
    """Ready for JSON. `root` decides where the data of each shift would come from."""
    return {
        "name": benchmark.name,
        "title": benchmark.title,
        "source_remark": benchmark.source_remark(root),
        "shifts": {shift: origin_of(benchmark, shift, root) for shift in benchmark.shifts},
        "groups": {name: list(members) for name, members in benchmark.groups.items()},
        "seeds": list(benchmark.seeds),
        "sources": {name: recipe.facts() for name, recipe in benchmark.sources.items()},
        "protocols": {name: protocol.facts() for name, protocol in benchmark.protocols.items()},
        "settings": {
            name: {
                row: asdict(setting) | {"defaults": defaults(setting, benchmark.protocols[name])}
                for row, setting in rows.items()
            }
            for name, rows in benchmark.settings.items()
        },
    }


def defaults(setting: Setting, protocol: Protocol) -> dict[str, Any]:
    """Hyper-parameters of the method that the setting leaves as they are; those without a fixed value are absent."""
    unused = ONE_PASS if isinstance(protocol, Online) else ()
    return {
        field.name: field.default
        for field in fields(METHODS[setting.method])
        if field.name not in (*setting.options, *unused) and field.default not in (MISSING, None)
    }
