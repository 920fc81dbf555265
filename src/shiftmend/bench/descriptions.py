"""A benchmark in plain values: everything that decides its numbers, for people and for other programs."""

from __future__ import annotations

from dataclasses import MISSING, asdict, fields
from typing import Any

from shiftmend.bench.base import Benchmark, Root, Setting
from shiftmend.bench.planning import origin_of
from shiftmend.bench.protocols import Online, Protocol
from shiftmend.methods import METHODS

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
