"""Files that a user names: where their imports look, and which module they become."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

import pytest

from shiftmend.utils.python_files import describe_error, first_on_path, import_file

FIELDS = """
from __future__ import annotations
from dataclasses import dataclass
from typing import ClassVar

@dataclass
class Own:
    name: ClassVar[str] = "own"
    rate: float = 0.1
"""


def test_a_folder_comes_first_and_once_and_goes_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["other", str(tmp_path), "third"])
    (tmp_path / "stopped.py").write_text("import sys\nsys.path.append('its own')\nraise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt), first_on_path(tmp_path):
        import_file(tmp_path / "stopped.py")
    assert sys.path == ["other", str(tmp_path), "third"]
    for _ in range(2):
        with first_on_path(tmp_path):
            pass
        assert sys.path == [str(tmp_path), "other", "third"]


def test_a_file_is_run_again_but_takes_no_name_of_another_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "twice_run", None)  # type: ignore[arg-type] # so that it goes with this test
    file = tmp_path / "twice_run.py"
    for count in (1, 22):
        file.write_text(f"count = {count}\n")
        assert import_file(file).count == count
        assert sys.modules["twice_run"].count == count
    for text in ("1 / 0\n", "import sys\ndel sys.modules[__name__]\n1 / 0\n"):
        file.write_text(text)
        with pytest.raises(ZeroDivisionError):
            import_file(file)
        assert "twice_run" not in sys.modules
    for name in ("json", "time"):  # `time` has no file
        held, other = sys.modules[name], tmp_path / f"{name}.py"
        monkeypatch.setitem(sys.modules, f"another_{name}", None)  # type: ignore[arg-type]
        other.write_text(FIELDS)
        assert [field.name for field in fields(import_file(other).Own)] == ["rate"]
        assert sys.modules[name] is held


def test_an_error_without_words_is_told_by_its_kind(tmp_path: Path) -> None:
    (tmp_path / "bare.py").write_text("raise SyntaxError\n")
    with pytest.raises(SyntaxError) as raised:
        import_file(tmp_path / "bare.py")
    assert describe_error(raised.value) == "SyntaxError"
    assert describe_error(ValueError(" ")) == "ValueError"
    assert describe_error(ValueError("no weights")) == "ValueError: no weights"  # raised nowhere
    (tmp_path / "odd.py").write_text("# coding: none-such\n")
    with pytest.raises(SyntaxError) as raised:
        import_file(tmp_path / "odd.py")
    assert describe_error(raised.value).endswith(f"({tmp_path / 'odd.py'})")  # which has no line
