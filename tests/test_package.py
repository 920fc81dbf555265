"""What importing the package costs and exports."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import shiftmend


def test_importing_is_light() -> None:
    code = (
        "import shiftmend, sys; "
        "heavy = ('matplotlib', 'sklearn', 'PIL', 'torchvision', 'rich', 'typer', 'scipy'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_help_does_not_wait_for_torch() -> None:
    code = "import shiftmend.cli, sys; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_changelog_and_citation_are_of_this_version() -> None:
    root = Path(__file__).parents[1]
    assert f"\nversion: {shiftmend.__version__}\n" in (root / "CITATION.cff").read_text()
    assert f"\n## {shiftmend.__version__}\n" in (root / "CHANGELOG.md").read_text()
    assert (root / "src/shiftmend/py.typed").exists()


def test_everything_exported_exists() -> None:
    assert list(shiftmend.__all__) == sorted({*shiftmend._HOMES, *shiftmend._PACKAGES, "__version__"})
    for name, module in shiftmend._HOMES.items():
        exported = getattr(shiftmend, name)
        assert (exported.__module__, exported.__name__) == (f"shiftmend.{module}", name)
    assert dir(shiftmend) == sorted(shiftmend.__all__)
    with pytest.raises(AttributeError, match="no attribute 'mend'"):
        shiftmend.mend  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.slow
def test_three_packages_are_there_without_an_import_of_their_own() -> None:
    code = "import shiftmend as s; print(s.methods.method('bufr').name, s.shifts.__name__, hasattr(s, 'profiles'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[:2] == ["bufr", "shiftmend.shifts"]


def test_importing_prints_and_logs_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", "import shiftmend"], capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""


@pytest.mark.slow
def test_the_package_can_be_run_as_a_module() -> None:
    command = [sys.executable, "-m", "shiftmend"]
    told = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == shiftmend.__version__
    wrong = subprocess.run([*command, "mended"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: ")
    importlib.import_module("shiftmend.__main__")  # as a spawned worker does: nothing may be run
