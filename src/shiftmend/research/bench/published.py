"""The figures of the paper, and of its authors' re-run, for comparison with ours.

The files in `paper/` contain every result table in percent, as printed. Nothing is corrected; the notes of a file list
the contradictions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from shiftmend.errors import DataError

BENCHMARKS = ("mnist-c", "mnist-m", "emnist-da", "cifar-10-c", "cifar-100-c", "camelyon17", "visda-c")

SOURCES = ("paper", "paper-elsewhere", "re-run")
"""The paper, where its summary tables win over the per-shift tables; the other value where the paper prints two; what
the authors measured with their released code."""

QUOTED = ("dann", "uda-ss")
"""Methods of other authors that the paper quotes; they adapt with the source data at hand."""

_PERCENTAGES = ("accuracy", "ece")


@dataclass(frozen=True)
class Figure:
    """A mean and a standard deviation over the runs: fractions for accuracy and ECE, as everywhere in the library."""

    mean: float
    deviation: float | None
    """Standard deviation; None if only a mean was published."""


def figure(benchmark: str, protocol: str, metric: str, method: str, shift: str, source: str = "paper") -> Figure | None:
    """Find the published figure of one cell; None if nothing was published for it.

    `protocol` is `offline`, `online` or `few-shot-` with the number of images per class; `metric` is `accuracy`, `ece`
    or `restoration_distance`. Besides the shifts, `shift` may be a summary: `all`, `severe`, `mild`, `without
    backgrounds`, `without translate`, or `clean` for the unadapted model on source data, which stands under the
    method `source-only` and the protocol `offline`.
    """
    if source not in SOURCES:
        raise DataError(f"Expected published figures of {', '.join(SOURCES)}, got {source!r}.")
    if not is_published(benchmark):
        return None
    tables = _read(benchmark).get(source, {})
    entry = tables.get(protocol, {}).get(metric, {}).get(method, {}).get(shift)
    if entry is None:
        return None
    mean, deviation = entry
    if metric in _PERCENTAGES:
        mean, deviation = _fraction(mean), None if deviation is None else _fraction(deviation)
    return Figure(mean, deviation)


def find_quoted(benchmark: str, protocol: str, metric: str) -> dict[str, Figure]:
    """Find the rows that the paper quotes from other work: methods that need the source data, mean over all shifts."""
    found = {name: figure(benchmark, protocol, metric, name, "all") for name in QUOTED}
    return {name: value for name, value in found.items() if value is not None}


def notes(benchmark: str) -> tuple[str, ...]:
    """List what a reader who compares should know, such as where the published figures contradict each other."""
    return tuple(_read(benchmark)["notes"]) if is_published(benchmark) else ()


def is_published(benchmark: str) -> bool:
    """Tell if anything was published about the benchmark."""
    return benchmark in BENCHMARKS


@cache
def _read(benchmark: str) -> Mapping[str, Any]:
    text = (resources.files("shiftmend.research.bench") / "paper" / f"{benchmark}.json").read_text(encoding="utf-8")
    tables: Mapping[str, Any] = json.loads(text)
    return tables


def _fraction(percent: float) -> float:
    # 0.7 / 100 is 0.006999999999999999.
    return round(percent / 100, 6)
