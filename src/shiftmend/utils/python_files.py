"""Run a user's own Python: import the file of a model, a method or a benchmark, and say what went wrong there."""

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
    """Import from a folder before all others, as Python does for a script that lies there.

    The folder stays on the path, because a model may import more when it is called. After an error it is removed.
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
    """Run a file as a module of its name, or of a longer name if that is taken; after an error, forget the module."""
    held = sys.modules.get(path.stem)
    # A module of the same file was run before, and the file may have been edited since.
    ours = held is None or getattr(held, "__file__", None) == str(path.absolute())
    name = path.stem if ours else f"another_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    # True of every .py file.
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their module here.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


@contextmanager
def user_code(refuse: Callable[[BaseException], Exception]) -> Iterator[None]:
    """Run a user's code inside the block; `refuse` makes the error for any exception, even SystemExit."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise refuse(error) from error


def describe_error(error: BaseException) -> str:
    """Say in one line what went wrong in a user's code, and in which line of it."""
    text, places = str(error), [(frame.filename, frame.lineno) for frame in frames(error)]
    if isinstance(error, SyntaxError):
        text, places = error.msg or "", [(error.filename or "", error.lineno)]
    folder = f"{Path(places[0][0]).parent}{os.sep}" if places else ""
    own = [one for one in places if one[0].startswith(folder) and "site-packages" not in one[0].removeprefix(folder)]
    where = ", line ".join(str(part) for part in own[-1] if part) if own else ""
    said = f"{type(error).__name__}: {' '.join(text.split())[:300]}" if text.strip() else type(error).__name__
    return f"{said} ({where})" if where else said


def frames(error: BaseException) -> list[traceback.FrameSummary]:
    """List the frames that an error passed through, without those of this package and the import system."""
    passed = traceback.extract_tb(error.__traceback__)
    ours = (f"{Path(__file__).parents[1]}{os.sep}", importlib.__file__, "<frozen")
    return [frame for frame in passed if not frame.filename.startswith(ours)]
