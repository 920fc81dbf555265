"""The benchmarks, by name. Adding one: its file here, its name below, its figures in `bench/paper` if any, its test."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterator
from pathlib import Path

import torch

from shiftmend.errors import AdaptationError, DataError
from shiftmend.methods import METHODS, method
from shiftmend.profiles.presets import PRESETS
from shiftmend.research.bench.benchmark import (
    AUTO,
    CLEAN,
    Benchmark,
    Rehearsed,
    Setting,
    is_clean,
    labelled_methods,
    sees_labels,
)
from shiftmend.utils.checks import brief
from shiftmend.utils.python_files import describe_error, first_on_path, import_file, user_code

BENCHMARKS = {
    "digits": "digits",
    "mnist-c": "mnist_c",
    "mnist-m": "mnist_m",
    "usps": "usps",
    "emnist-da": "emnist_da",
    "cifar-10-c": "cifar_c",
    "cifar-100-c": "cifar_c",
    "camelyon17": "camelyon17",
    "visda-c": "visda_c",
}
"""The module of each benchmark."""


def find(name: str) -> Benchmark:
    """Find a benchmark by name, or as `file.py:NAME` in a file of your own: workers find it again by the same text."""
    file, colon, attribute = name.rpartition(":")
    if colon and file.endswith(".py"):
        return _find_in_file(Path(file), attribute)
    if name not in BENCHMARKS:
        near = difflib.get_close_matches(name, BENCHMARKS, n=2, cutoff=0.5)
        hint = f". Try {' or '.join(near)}" if near else ""
        raise DataError(
            f"Expected the benchmark to be one of {', '.join(BENCHMARKS)}, or file.py:NAME, got {name!r}{hint}."
        )
    defined = vars(importlib.import_module(f"{__name__}.{BENCHMARKS[name]}")).values()
    return next(value for value in defined if isinstance(value, Benchmark) and value.name == name)


def _find_in_file(file: Path, attribute: str) -> Benchmark:
    if not file.is_file():
        raise DataError(f"Expected a Python file that defines the benchmark {attribute}, got {file}, which is missing.")
    with first_on_path(file.resolve().parent):
        with user_code(lambda error: DataError(f"{file} could not be run: {describe_error(error)}")):
            found = getattr(import_file(file), attribute, None)
        if not isinstance(found, Benchmark):
            raise DataError(
                f"Expected {file} to define a Benchmark called {attribute or '(nothing)'}, got none. Name it behind "
                "the colon."
            )
        for problem in list_problems(found):
            raise DataError(f"The benchmark {attribute} in {file} does not add up: {problem}")
    return found


def list_problems(benchmark: Benchmark) -> Iterator[str]:
    """Yield a message for each name in `benchmark` that is not defined anywhere, and for each value of a wrong type."""
    for name, example in (("shifts", '("dim",)'), ("seeds", "(1,)")):
        values = getattr(benchmark, name)
        # ("dim") is a text, and (1) a number.
        if not isinstance(values, tuple | list) or not values:
            yield f"{name} is {brief(values)}, expected a tuple: {example}"
            return
    if len(set(benchmark.shifts)) < len(benchmark.shifts) or CLEAN in benchmark.shifts:
        yield f"shifts is {brief(benchmark.shifts)}, expected each name once, without {CLEAN!r}, which is always there"
    for group, members in benchmark.groups.items():
        for shift in members:
            if shift not in benchmark.shifts:
                yield f"group {group!r} has the shift {shift!r}, expected some of {', '.join(benchmark.shifts)}"
    if CLEAN not in benchmark.clean_sets or not all(map(is_clean, benchmark.clean_sets)):
        yield f"clean_sets is {brief(benchmark.clean_sets)}, expected {CLEAN!r}, and others that begin with it"
    if set(benchmark.protocols) != set(benchmark.settings):
        yield (
            f"there are protocols {', '.join(benchmark.protocols)}, but settings for {', '.join(benchmark.settings)}; "
            "expected settings for each protocol"
        )
    for protocol, settings in benchmark.settings.items():
        for row, setting in settings.items():
            for problem in _list_setting_problems(benchmark, row, setting):
                yield f"{row!r} of protocol {protocol!r} {problem}"
            if setting.method == AUTO and not isinstance(benchmark.protocols.get(protocol), Rehearsed):
                yield f"{row!r} of protocol {protocol!r} has the method {AUTO!r}, expected a protocol that rehearses"


def _list_setting_problems(benchmark: Benchmark, row: str, setting: Setting) -> Iterator[str]:
    takes_labels = setting.method in METHODS and METHODS[setting.method].takes_labels
    labels = {"labels": torch.zeros(1, dtype=torch.long)} if takes_labels else {}
    try:
        if setting.method != AUTO:
            method(setting.method, **setting.options, **labels)
    except AdaptationError as error:
        yield f"cannot be made: {error}"
    if takes_labels and not sees_labels(row):
        yield f"sees labels: expected a name that begins with {labelled_methods()[0]!r}, by which tables know it"
    if setting.preset not in PRESETS:
        yield f"has the preset {setting.preset!r}, expected one of {', '.join(PRESETS)}"
    sources = {benchmark.source_for(setting, shift) for shift in (*benchmark.shifts, *benchmark.clean_sets)}
    for source in sources - set(benchmark.sources):
        yield f"starts from {source!r}, expected one of {', '.join(benchmark.sources)}"
