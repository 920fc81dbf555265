"""The benchmarks, by name. Adding one: its file here, its name below, its figures in `bench/paper` if any, its test."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from shiftmend.bench.base import CLEAN, Benchmark
from shiftmend.errors import AdaptationError, DataError
from shiftmend.methods import method
from shiftmend.presets import PRESETS

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
    module = importlib.import_module(f"shiftmend.bench.suite.{name.replace('-', '_')}")
    found: Benchmark = module.BENCHMARK
    return found


def _from_file(file: Path, attribute: str) -> Benchmark:
    if not file.is_file():
        raise DataError(f"{file} is missing: expected a Python file that defines the benchmark {attribute}")
    title = f"shiftmend_benchmark_{file.stem}"
    spec = importlib.util.spec_from_file_location(title, file)
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    sys.modules[title] = module  # dataclasses defined there look themselves up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[title]
        text = " ".join(str(error).split())
        raise DataError(f"{file} could not be run: {type(error).__name__}: {text}") from error
    found = getattr(module, attribute, None)
    if not isinstance(found, Benchmark):
        raise DataError(
            f"{file} defines no benchmark called {attribute or '(nothing)'}; expected a shiftmend.bench.base.Benchmark "
            "of the name behind the colon"
        )
    for fault in faults(found):
        raise DataError(f"the benchmark {attribute} in {file} does not add up: {fault}")
    return found


def faults(benchmark: Benchmark) -> Iterator[str]:
    """What in a definition refers to something that is not there."""
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
            labels = {"labels": torch.zeros(1, dtype=torch.long)} if setting.method == "target-supervised" else {}
            try:
                method(setting.method, **setting.options, **labels)
            except AdaptationError as error:
                yield f"{where}: {error}"
            if setting.preset not in PRESETS:
                yield f"{where} has the preset {setting.preset!r}, expected one of {', '.join(PRESETS)}"
            for source in {benchmark.source_for(setting, shift) for shift in shifts} - set(benchmark.sources):
                yield f"{where} starts from {source!r}, expected one of {', '.join(benchmark.sources)}"
