"""Running a user's Python code: import the file of a model, method or benchmark, and explain its errors."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType


@contextmanager
def first_on_path(folder: Path) -> Iterator[None]:
    """Put a folder first on the import path, as Python does for a script in it.

    The folder stays on the path, because a model may import more modules when it is called. After an error it is
    removed.
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
    """Import a file as a module of its name, or a longer one if that is taken; drop the module after an error."""
    held = sys.modules.get(path.stem)
    # The same file may have been imported before, and edited since.
    ours = held is None or getattr(held, "__file__", None) == str(path.absolute())
    name = path.stem if ours else f"another_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    # A .py file always has a loader.
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their module in sys.modules.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


@contextmanager
def user_code(refuse: Callable[[BaseException], Exception]) -> Iterator[None]:
    """Run a user's code inside the block; `refuse` converts any exception, including SystemExit."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise refuse(error) from error


def describe_error(error: BaseException) -> str:
    """Describe an error of a user's code in one line, with its location."""
    text, places = str(error), [(frame.filename, frame.lineno) for frame in frames(error)]
    if isinstance(error, SyntaxError):
        text, places = error.msg or "", [(error.filename or "", error.lineno)]
    folder = f"{Path(places[0][0]).parent}{os.sep}" if places else ""
    own = [one for one in places if one[0].startswith(folder) and "site-packages" not in one[0].removeprefix(folder)]
    where = ", line ".join(str(part) for part in own[-1] if part) if own else ""
    said = f"{type(error).__name__}: {' '.join(text.split())[:300]}" if text.strip() else type(error).__name__
    return f"{said} ({where})" if where else said


def frames(error: BaseException) -> list[traceback.FrameSummary]:
    """List the traceback frames of an error, without those of this package and the import system."""
    passed = traceback.extract_tb(error.__traceback__)
    ours = (f"{Path(__file__).parents[1]}{os.sep}", importlib.__file__, "<frozen")
    return [frame for frame in passed if not frame.filename.startswith(ours)]
