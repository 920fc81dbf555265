"""Python files that a user names, of a model, a method or a benchmark: import them, and say what went wrong there."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType


@contextmanager
def first_on_path(folder: Path) -> Iterator[None]:
    """Import from a folder before all others, as Python does for a script that lies there.

    The folder stays, because a model may import more when it is called; an error takes it away again.
    """
    before, first = list(sys.path), str(folder)
    sys.path[:] = [first, *(entry for entry in before if entry != first)]
    importlib.invalidate_caches()
    try:
        yield
    except BaseException:
        sys.path[:] = before
        raise


def import_file(path: Path) -> ModuleType:
    """Run a file as the module of its name, or of a longer one if another has that; a failed one is not kept."""
    held = sys.modules.get(path.stem)
    ours = held is None or getattr(held, "__file__", None) == str(path.absolute())  # run before, and perhaps edited
    name = path.stem if ours else f"another_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # noqa: PT018 (true of every .py file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where its dataclasses look themselves up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def reason(error: BaseException) -> str:
    """What went wrong in somebody's code, and in which line of it, as one line."""
    text, places = str(error), [(frame.filename, frame.lineno) for frame in frames(error)]
    if isinstance(error, SyntaxError):
        text, places = error.msg or "", [(error.filename or "", error.lineno)]
    folder = f"{Path(places[0][0]).parent}{os.sep}" if places else ""
    own = [one for one in places if one[0].startswith(folder) and "site-packages" not in one[0].removeprefix(folder)]
    where = ", line ".join(str(part) for part in own[-1] if part) if own else ""
    said = f"{type(error).__name__}: {' '.join(text.split())[:300]}" if text.strip() else type(error).__name__
    return f"{said} ({where})" if where else said


def frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Where an error passed through, without this package and the import system."""
    passed = traceback.extract_tb(error.__traceback__)
    ours = (f"{Path(__file__).parents[1]}{os.sep}", importlib.__file__, "<frozen")
    return [frame for frame in passed if not frame.filename.startswith(ours)]
