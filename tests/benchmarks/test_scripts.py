"""Every script in `benchmarks/` can be imported, so that what one takes from another is there."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from unittest import mock

import pytest

import bench_models

SCRIPTS = sorted(path.stem for path in Path(bench_models.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_can_be_imported(name: str) -> None:
    # `golden` asks for instructions of older CPUs: processes that later tests start would round otherwise.
    with mock.patch.dict(os.environ):
        assert importlib.import_module(name).__doc__
