"""The benchmarks, by name. Adding one: its file here, its name below, its figures in `bench/paper` if any, its test."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from shiftmend.errors import AdaptationError, DataError
from shiftmend.methods import method
from shiftmend.profiles.presets import PRESETS
from shiftmend.research.bench.benchmark import CLEAN, Benchmark, Protocol, Setting
from shiftmend.research.bench.grids import SUPERVISED
from shiftmend.research.bench.recipes import Recipe
from shiftmend.utils.checks import brief, is_whole
from shiftmend.utils.python_files import describe_error, first_on_path, import_file, user_code

BENCHMARKS = ("digits", "mnist-c", "mnist-m", "usps", "emnist-da", "cifar-10-c", "cifar-100-c", "camelyon17", "visda-c")


def find(name: str) -> Benchmark:
    """A benchmark by name, or `file.py:NAME` for one of your own: workers find it again by the same text."""
    file, colon, attribute = name.rpartition(":")
    if colon and file.endswith(".py"):
        return _from_file(Path(file), attribute)
    if name not in BENCHMARKS:
        near = difflib.get_close_matches(name, BENCHMARKS, n=2, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise DataError(f"unknown benchmark {name!r}, expected one of {', '.join(BENCHMARKS)}, or file.py:NAME{hint}")
    module = importlib.import_module(f"shiftmend.research.bench.suite.{name.replace('-', '_')}")
    found: Benchmark = module.BENCHMARK
    return found


def _from_file(file: Path, attribute: str) -> Benchmark:
    if not file.is_file():
        raise DataError(f"{file} is missing: expected a Python file that defines the benchmark {attribute}")
    with first_on_path(file.resolve().parent):
        with user_code(lambda error: DataError(f"{file} could not be run: {describe_error(error)}")):
            found = getattr(import_file(file), attribute, None)
        if not isinstance(found, Benchmark):
            raise DataError(
                f"{file} defines no benchmark called {attribute or '(nothing)'}; expected a "
                "shiftmend.research.bench.benchmark.Benchmark of the name behind the colon"
            )
        for fault in faults(found):
            raise DataError(f"the benchmark {attribute} in {file} does not add up: {fault}")
    return found


def _of_the_wrong_kind(benchmark: Benchmark) -> Iterator[str]:
    given: Any = benchmark  # nobody has checked the types of a file of somebody's own
    names = given.shifts
    if not isinstance(names, tuple | list) or not names or not all(isinstance(name, str) for name in names):
        yield f'shifts is {brief(names)}, expected a tuple of names: ("dim", "bright")'
    elif len(set(names)) < len(names) or CLEAN in names:
        yield f"shifts is {brief(names)}, expected each name once, and {CLEAN!r}, which is always there, not among them"
    if not isinstance(given.seeds, tuple | list) or not given.seeds or not all(map(is_whole, given.seeds)):
        yield f"seeds is {brief(given.seeds)}, expected a tuple of whole numbers: (1, 2)"
    for name in ("load_source", "load_target", "origin", "preprocess", "source_remark", "source_for"):
        if not callable(getattr(given, name)):
            yield f"{name} is {brief(getattr(given, name))}, expected a function"
    parts: list[tuple[str, Any, Any]] = [("source", given.sources, Recipe), ("protocol", given.protocols, Protocol)]
    parts += [(f"row of protocol {name!r}", rows, Setting) for name, rows in given.settings.items()]
    for what, entries, form in parts:
        for name, entry in entries.items():
            if not isinstance(entry, form):
                yield f"{what}, {name!r} is {brief(entry)}, expected a {form.__name__}"
            elif form is Setting and not isinstance(entry.method, str):
                yield (
                    f"{what}, {name!r} has the method {brief(entry.method)}, expected a name: put one of your own into "
                    "shiftmend.methods.METHODS"
                )


def faults(benchmark: Benchmark) -> Iterator[str]:
    """What in a definition is of the wrong kind, or refers to something that is not there."""
    yield from _of_the_wrong_kind(benchmark)
    shifts = (*benchmark.shifts, CLEAN)
    for group, members in benchmark.groups.items():
        for shift in members:
            if shift not in benchmark.shifts:
                yield f"group {group!r} has the shift {shift!r}, expected some of {', '.join(benchmark.shifts)}"
    if set(benchmark.protocols) != set(benchmark.settings):
        yield (
            f"there are protocols {', '.join(benchmark.protocols)}, but settings for {', '.join(benchmark.settings)}; "
            "expected settings for each protocol"
        )
    for protocol, settings in benchmark.settings.items():
        for name, setting in settings.items():
            where = f"{name!r} of protocol {protocol!r}"
            labels = {"labels": torch.zeros(1, dtype=torch.long)} if setting.method == SUPERVISED else {}
            try:
                method(setting.method, **setting.options, **labels)
            except AdaptationError as error:
                yield f"{where}: {error}"
            if setting.method == SUPERVISED and not name.startswith(SUPERVISED):
                yield f"{where} sees labels: expected a name that begins with {SUPERVISED!r}, by which tables know it"
            if setting.preset not in PRESETS:
                yield f"{where} has the preset {setting.preset!r}, expected one of {', '.join(PRESETS)}"
            for source in {benchmark.source_for(setting, shift) for shift in shifts} - set(benchmark.sources):
                yield f"{where} starts from {source!r}, expected one of {', '.join(benchmark.sources)}"
