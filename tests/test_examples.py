"""Scripts of the gallery. `make docs` runs all of them; those that take a second or two are checked here."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import matplotlib
import pytest
import torch

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["class_shares", "stream"])
def test_a_script_mends(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib.use("Agg")
    monkeypatch.setenv("SHIFTMEND_SHORT", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = runpy.run_path(str(EXAMPLES[0].with_name(f"{name}.py")))
    finally:
        torch.set_num_threads(threads)
        matplotlib.pyplot.close("all")
    assert found["after"] > found["before"] + 0.05


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_script_begins_with_a_title_and_has_a_short_mode(path: Path) -> None:
    text = path.read_text()
    title, line, *_ = (ast.get_docstring(ast.parse(text)) or "").splitlines()
    assert re.fullmatch("=+", line)
    assert len(line) >= len(title)
    assert "SHIFTMEND_SHORT" in text
    assert text.count("SHORT") > 1
