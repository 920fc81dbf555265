"""For all tests of the command line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def imports_undone(tmp_path: Path) -> Iterator[None]:
    """What a model's file leaves behind (its folder, its modules) is not for the next test."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name, module in list(sys.modules.items()):
        where = getattr(module, "__file__", None) or list(getattr(module, "__path__", []))
        if str(tmp_path) in str(where):
            del sys.modules[name]
