"""The benchmarks, by name. Adding one: its file here, its name below, its figures in `bench/paper`, its test."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from pathlib import Path

from shiftmend.bench.base import Benchmark
from shiftmend.errors import DataError

BENCHMARKS = ("digits", "mnist-c", "mnist-m", "emnist-da", "cifar-10-c", "cifar-100-c", "camelyon17", "visda-c")


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
        raise DataError(f"{file} could not be run: {type(error).__name__}: {error}") from error
    found = getattr(module, attribute, None)
    if not isinstance(found, Benchmark):
        raise DataError(f"{file} defines no benchmark called {attribute}; expected a shiftmend.bench.Benchmark")
    return found
