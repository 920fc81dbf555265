"""The plan of a benchmark: its cells, and the hash of everything that determines each of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, get_args

from shiftmend.engine.checkpoint import identify
from shiftmend.errors import DataError
from shiftmend.inputs.feed import Preprocess
from shiftmend.methods import METHODS
from shiftmend.research.bench.benchmark import (
    AUTO,
    CLEAN,
    UNADAPTED,
    USUAL_PRESET,
    Benchmark,
    Cell,
    Online,
    Origin,
    Protocol,
    Root,
    Setting,
    is_clean,
)
from shiftmend.research.bench.resources import probe_preprocess

UNUSED_ONLINE = ("epochs", "epochs_per_block", "passes")
"""Options that have no effect on a stream."""

OUTDATED_KL = (
    "run when a single KL divergence was in nats, with a step ln 10 = 2.3 times that of the reference implementation; "
    "to be run again"
)
"""The remark on results of `hash_recipe(former=True)`."""


def plan(
    benchmark: Benchmark,
    protocol: str = "offline",
    *,
    methods: Sequence[str] | None = None,
    shifts: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    rates: Sequence[float] | None = None,
    root: Path | None = None,
    former: bool = False,
) -> list[Cell]:
    """List the cells to run, ordered so that neighbours share their source model and data.

    The source model on clean images is a cell as well: `source-only` on the shift `clean`.

    Args:
        benchmark: The benchmark.
        protocol: One of its protocols.
        methods: Rows of its table; all by default.
        shifts: Shifts, or `clean`; all by default.
        seeds: Any seeds; the benchmark's own by default.
        rates: Learning rates to run each method with that has one.
        root: The folder of the data sets.
        former: As for `hash_recipe`.
    """
    settings = settings_of(benchmark, protocol)
    methods = choose(methods, settings, "method", f"{benchmark.name}, {protocol}")
    shifts = choose(shifts, (*benchmark.shifts, *benchmark.clean_sets), "shift", benchmark.name)
    seeds = list(dict.fromkeys(benchmark.seeds if seeds is None else seeds))
    if not seeds:
        raise DataError("Expected at least one seed, got none. Leave the choice out for the benchmark's own.")
    recipes = {
        (method, shift): hash_recipe(benchmark, protocol, settings[method], shift, rates, root, former)
        for shift in shifts
        for method in methods
        if not is_clean(shift) or (method == UNADAPTED and protocol == "offline")
    }
    if not recipes:
        raise DataError(
            f"Expected something to run, got nothing: {CLEAN} is a shift for {UNADAPTED} and offline alone."
        )
    return [
        Cell(benchmark.name, protocol, method, shift, seed, recipe)
        for seed in seeds
        for (method, shift), recipe in recipes.items()
    ]


def hash_recipe(
    benchmark: Benchmark,
    protocol: str,
    setting: Setting,
    shift: str,
    rates: Sequence[float] | None = None,
    root: Path | None = None,
    former: bool = False,
) -> str:
    """Hash everything that determines a cell's result beside its own name; see `Cell`.

    With `former`, return the hash from before single KL divergences were divided by ln B, as PSI is.
    """
    source = benchmark.source_for(setting, shift)
    candidates = rates_for(setting, rates)
    # 1 and 1.0 are the same rate, and must give the same hash.
    numbers = {name: float(value) for name, value in setting.options.items() if type(value) is int}
    options = dict(setting.options) | numbers
    if candidates:
        # They replace the setting's own rate.
        options = {name: value for name, value in options.items() if name != "learning_rate"}
    facts = {
        "source": {"name": source, **benchmark.sources[source].facts()},
        "inputs": _probe_inputs(benchmark.preprocess),
        "method": setting.method,
        "options": options,
        "protocol": benchmark.protocols[protocol].facts(),
        "origin": origin_of(benchmark, shift, root),
        "rates": list(candidates),
        **({} if setting.preset == USUAL_PRESET else {"preset": setting.preset}),
        **({"kl": "divided by ln B"} if str(options.get("divergence")).startswith("kl-") and not former else {}),
    }
    return identify(facts)


def _probe_inputs(preprocess: Preprocess) -> Any:
    """Preprocess a black and a white image `[3, 32, 32]`, and summarise the result for the hash of a recipe.

    Benchmarks that normalise images differently thus get different hashes. For a preprocess that fails on this shape,
    return None; the source models in the hash then distinguish the benchmarks.
    """
    try:
        return probe_preprocess(preprocess, (3, 32, 32))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None


def rates_for(setting: Setting, rates: Sequence[float] | None) -> tuple[float, ...]:
    """Sort the learning rates to try with a setting. The result is empty if its method has no learning rate."""
    has_one = setting.method != AUTO and any(
        option.name == "learning_rate" for option in fields(METHODS[setting.method])
    )
    return tuple(sorted({float(rate) for rate in rates or ()})) if has_one else ()


def origin_of(benchmark: Benchmark, shift: str, root: Path | None = None) -> Origin:
    """Return the origin of the images of a shift, and check it before anything runs.

    Raises:
        DataError: If the benchmark names an unknown origin.
    """
    origin = benchmark.origin(shift, root)
    if origin not in get_args(Origin):
        known = ", ".join(get_args(Origin))
        raise DataError(f"Expected benchmark {benchmark.name} to give {shift} one origin of {known}, got {origin!r}.")
    return origin


def settings_of(benchmark: Benchmark, protocol: str) -> dict[str, Setting]:
    """List the settings of a protocol by their rows in the table."""
    if protocol not in benchmark.protocols:
        known = ", ".join(benchmark.protocols)
        raise DataError(f"Expected a protocol of {benchmark.name} ({known}), got {protocol!r}.")
    return dict(benchmark.settings[protocol])


def variants_of(benchmark: Benchmark, protocol: str) -> dict[str, str]:
    """Map rows that are a method with other options or another profile to the row of the method itself."""
    settings = settings_of(benchmark, protocol)
    return {name: setting.method for name, setting in settings.items() if setting.method != name}


def with_another_source(benchmark: Benchmark, protocol: str) -> list[str]:
    """List the rows that start from another model than source-only, or than the first row without source-only.

    The features of another model differ from the beginning, so their restoration is not comparable.
    """
    settings, source = settings_of(benchmark, protocol), benchmark.source_for
    usual = settings.get(UNADAPTED) or next(iter(settings.values()))
    return [
        name
        for name, setting in settings.items()
        if any(source(setting, shift) != source(usual, shift) for shift in benchmark.shifts)
    ]


def choose(wanted: Sequence[str] | None, known: Iterable[str], what: str, where: str) -> list[str]:
    """Sort the wanted names in the order of the known ones; take all if `wanted` is None."""
    names = list(known)
    if wanted is None:
        return names
    if not wanted:
        raise DataError(
            f"Expected at least one {what}, got none. Name some of {', '.join(names)}, or leave the choice out."
        )
    for name in wanted:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            hint = f". Try {near[0]}" if near else ""
            raise DataError(f"Expected the {what} of {where} to be one of {', '.join(names)}, got {name!r}{hint}.")
    return [name for name in names if name in wanted]


def describe(benchmark: Benchmark, root: Root = None) -> dict[str, Any]:
    """Describe a benchmark in plain values for JSON. The origins of data depend on `root`."""
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
                row: asdict(setting) | {"defaults": _list_defaults(setting, benchmark.protocols[name])}
                for row, setting in rows.items()
            }
            for name, rows in benchmark.settings.items()
        },
    }


def _list_defaults(setting: Setting, protocol: Protocol) -> Mapping[str, Any]:
    """List the method's options that the setting does not change, if they have a fixed value."""
    if setting.method == AUTO:
        return {}
    unused = UNUSED_ONLINE if isinstance(protocol, Online) else ()
    return {
        field.name: field.default
        for field in fields(METHODS[setting.method])
        if field.name not in (*setting.options, *unused) and field.default not in (MISSING, None)
    }
