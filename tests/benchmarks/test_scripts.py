"""Every script in `benchmarks/` can be imported, so that what one takes from another is there."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import bench_models

SCRIPTS = sorted(path.stem for path in Path(bench_models.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_can_be_imported(name: str) -> None:
    assert importlib.import_module(name).__doc__
