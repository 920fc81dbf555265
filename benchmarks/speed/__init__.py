"""The speed of adaptation here: tables of things measured in one run, warm, with their spread.

Each table is a module with `measure(device, repeats)`, which gives one row after the other, and `table(rows)`, which
puts them into words.
"""

from __future__ import annotations

import difflib
import json
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from shiftmend.adaptation.result import environment
from shiftmend.errors import DataError
from shiftmend.utils.devices import resolve_device
from shiftmend.utils.files import said_where, write_atomically
from speed import compilation, growth, histogram, large_network, packing, precision, setting_up, steps
from speed.timing import Table

__all__ = ["TABLES", "Table", "choose", "manifest", "report"]


class _Row(Protocol):
    def facts(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class _Measured:
    measure: Callable[[torch.device, int], Iterator[Any]]
    table: Callable[[Sequence[Any]], Table]


TABLES: Mapping[str, _Measured] = {
    "steps": _Measured(steps.measure, steps.table),
    "precision": _Measured(precision.measure, precision.table),
    "compiled": _Measured(compilation.measure, compilation.table),
    "histogram": _Measured(histogram.measure, histogram.table),
    "packed": _Measured(packing.measure, packing.table),
    "growth": _Measured(growth.measure, growth.table),
    "set_up": _Measured(setting_up.measure, setting_up.table),
    "large": _Measured(large_network.measure, large_network.table),
}


def report(
    device: str | torch.device = "auto",
    only: Iterable[str] | None = None,
    *,
    repeats: int | None = None,
    show: Callable[[Table], None] | None = None,
    out: Path | None = None,
) -> dict[str, Any]:
    """Measure tables and give all of their rows, ready for JSON, with the manifest of the machine.

    `show` gets each table as soon as it is measured, the machine first; the file `out` is written anew after each row,
    so that a run that was cut off leaves what it had. `repeats` is 5 on a GPU and 3 on a CPU.
    """
    names, place = choose(only), resolve_device(device)
    if repeats is None:
        repeats = 5 if place.type == "cuda" else 3
    if repeats < 1:
        raise DataError(f"repeats must be at least 1, got {repeats}")
    facts: dict[str, Any] = {"environment": manifest(place), "repeats": repeats}

    def note() -> None:
        if out is None:
            return
        with said_where(out):
            write_atomically(out, (json.dumps(facts, indent=1, allow_nan=False) + "\n").encode())

    # A place that nothing can be written to is better known now than in two minutes.
    note()
    show = show or (lambda table: None)
    show(Table(notes=(_introduction(facts),)))
    for name in names:
        rows: list[_Row] = []
        facts[name] = []
        for row in TABLES[name].measure(place, repeats):
            rows.append(row)
            facts[name].append(row.facts())
            note()
        show(TABLES[name].table(rows))
    note()
    return facts


def choose(only: Iterable[str] | None) -> list[str]:
    """List the tables asked for, in their own order; all by default."""
    wanted = list(TABLES) if only is None else list(only)
    for name in wanted:
        if name not in TABLES:
            near = difflib.get_close_matches(name, TABLES, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise DataError(f"there is no table {name!r}, expected some of {', '.join(TABLES)}{hint}")
    if not wanted:
        raise DataError(f"no table is named; expected some of {', '.join(TABLES)}, or leave the choice out")
    return [name for name in TABLES if name in wanted]


def manifest(device: torch.device) -> dict[str, Any]:
    """List what a figure depends on beside the code."""
    facts: dict[str, Any] = {**environment(device), "processor": _processor(), "threads": torch.get_num_threads()}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        facts |= {"cuda": torch.version.cuda, "memory": total, "memory_free": free, **precision.tensor_float()}
    return facts


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _introduction(facts: Mapping[str, Any]) -> str:
    machine = facts["environment"]
    named = machine["device"] if "cuda" in machine else f"{machine['processor']}, threads: {machine['threads']}"
    versions = f"torch {machine['torch']}, shiftmend {machine['shiftmend']}"
    return f"{named}; {versions}; medians of {facts['repeats']} (lowest to highest)"
