"""Measure how the code is built, and print each figure beside its aim.

    python benchmarks/house.py            # a table
    python benchmarks/house.py --where    # with the places that each figure counts
    python benchmarks/house.py --json     # the same for programs

Measure the `shiftmend` that Python would import: set `PYTHONPATH` to compare another tree. Everything is read from the
syntax trees of the source files, except the trace of one `adapt`, `dir(shiftmend)`, the imported packages and the
public docstrings. Those are observed in a fresh process each. Files touched by a change are counted by hand: see
`TOUCHED`.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TOP_LEVEL = {"__init__", "__main__", "__about__", "errors"}
"""The only modules that may lie beside the packages."""

LIGHT = {"torch", "numpy", "safetensors", "typer", "rich", "pillow", "jinja2"}
"""What `pip install .` may bring."""

NOT_FOR_ADAPT = ("matplotlib", "sklearn", "scipy", "ray", "pandas", "torchvision", "timm", "typer", "jinja2")
"""What must not be imported by who only calls `adapt`."""

FEED_METHODS = {"batches", "labelled_batches", "subset", "subset_indices"}
"""Methods of a feed that give batches for evaluation; `epoch` gives them for training."""

QUESTION_WORDS = "What|Whether|Of|Those|That|Between|Where|Which|How|Who|When|Why|If"
"""First words that open no docstring."""

NOT_VERBS = (
    f"{QUESTION_WORDS}|The|A|An|One|All|Every|Each|Everything|Nothing|Nobody|None|Both|Several|Half|Only|This|These|It|"
    "There|So|As|In|For|With|Without|By|On|Over|At|From|To|Inside|After|Before"
)
"""First words that open no docstring of a function. Classes and properties are nouns, and may open with an article."""

LONGEST_MATCH_WORDS = 4
"""A `match=` of more words than that pins a sentence."""

MAX_ERROR_WORDS = 25
"""An error of more words is not read to its end. Each `{...}` of an f-string counts as one word."""

ADVICE_VERBS = (
    "Add|Allow|Ask|Bring|Call|Check|Choose|Close|Complete|Convert|Copy|Delete|Download|Fetch|Free|Get|Give|Go|Install|"
    "Keep|Leave|Let|List|Load|Lower|Make|Move|Name|Open|Pad|Pass|Permit|Profile|Put|Raise|Read|Register|Rehearse|"
    "Remove|Rename|Repair|Repeat|Replace|Run|Save|See|Set|Start|Store|Tap|Track|Train|Try|Unpack|Use|Wait|Write"
)
"""First words of a sentence or clause that says what to do about an error."""

TOUCHED: dict[str, tuple[int, list[str]]] = {
    "a verdict signal": (2, ["verification/signals.py", "research/bench/pages.py"]),
    "a statistic in the profile": (2, ["stats/gaussians.py", "profiles/collect.py"]),
    "an optimiser": (1, ["methods/fr.py"]),
    "a report section": (2, ["report/sections.py", "report/templates/verdict.html.j2"]),
}
"""Files of src/shiftmend to touch, with the aim for their number. Counted by hand: bring it up to date by reading."""


@dataclass
class Figure:
    """One line of the table."""

    name: str
    today: float | int | str
    aim: float | int | str
    met: bool
    where: list[str] = field(default_factory=list)
    """The places that were counted."""


@dataclass
class Source:
    """One parsed Python file."""

    path: Path
    name: str
    """Relative to the folder that was searched."""
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        return self.text.count("\n")


def parse(folder: Path) -> list[Source]:
    """Parse every Python file under a folder."""
    files = [path for path in sorted(folder.rglob("*.py")) if "__pycache__" not in path.parts]
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    return [Source(path, path.relative_to(folder).as_posix(), text, ast.parse(text)) for path, text in texts.items()]


def at_most(name: str, aim: int, where: list[str]) -> Figure:
    """Count places, of which there may be so many."""
    return Figure(name, len(where), aim, len(where) <= aim, where)


def place(source: Source, node: ast.AST, note: str = "") -> str:
    """Name the line of a node."""
    return f"{source.name}:{getattr(node, 'lineno', 0)}" + (f" {note}" if note else "")


def run_fresh(code: str, *arguments: str) -> Any:
    """Run code in a fresh process, and return the JSON that its last line holds."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"a measurement failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


# ---------------------------------------------------------------------------------------------------- size and layout


def flat_modules(package: Path, sources: list[Source]) -> Figure:
    """Count modules beside the packages, other than the four that belong there."""
    flat = [source.name for source in sources if "/" not in source.name and source.path.stem not in TOP_LEVEL]
    return at_most("modules flat at the top of the package", 0, flat)


_DIR = """
import json, shiftmend
for name in shiftmend.__all__:
    getattr(shiftmend, name)
print(json.dumps(sorted(set(dir(shiftmend)) - set(shiftmend.__all__))))
"""


def undeclared_names(package: Path, sources: list[Source]) -> Figure:
    """List what `dir(shiftmend)` shows beyond `__all__`, after every public name was used."""
    return at_most("names in dir(shiftmend) beyond __all__", 0, run_fresh(_DIR))


def line_count(package: Path, sources: list[Source]) -> Figure:
    """Count lines of Python under src."""
    lines = sum(source.lines for source in sources)
    largest = sorted(sources, key=lambda source: -source.lines)[:10]
    return Figure("source lines", lines, 25_000, lines <= 25_000, [f"{one.name} {one.lines}" for one in largest])


def file_count(package: Path, sources: list[Source]) -> Figure:
    """Count Python files under src."""
    folders: dict[str, int] = {}
    for source in sources:
        folder = source.name.rsplit("/", 1)[0] if "/" in source.name else "."
        folders[folder] = folders.get(folder, 0) + 1
    return Figure("source files", len(sources), 140, len(sources) <= 140, [f"{k} {v}" for k, v in folders.items()])


# ------------------------------------------------------------------------------------------------- a trace of `adapt`

_TRACE = """
import json, os, sys, threading
os.environ["CUDA_VISIBLE_DEVICES"] = ""
import torch
from torch import nn
import shiftmend

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
    nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
    nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 3),
).eval()
inputs = torch.rand(96, 1, 8, 8)
profile = shiftmend.profile(model, inputs, batch_size=32)
home = os.path.dirname(shiftmend.__file__) + os.sep
options = dict(batch_size=32, epochs_per_block=2)
shiftmend.adapt(model, inputs, profile, "bufr", **options)  # import what is imported late

modules, functions, deepest = {}, set(), []


def watch(frame, event, argument):
    code = frame.f_code
    if event != "call" or not code.co_filename.startswith(home) or code.co_name == "<module>":
        return
    module = code.co_filename[len(home):]
    modules[module] = modules.get(module, 0) + 1
    if not code.co_name.startswith("<"):  # comprehensions and lambdas belong to their function
        functions.add((module, code.co_qualname))
    stack = []
    while frame is not None:
        inner = frame.f_code
        if inner.co_filename.startswith(home) and not inner.co_name.startswith("<"):
            stack.append(inner.co_filename[len(home):] + " " + inner.co_qualname)
        frame = frame.f_back
    if len(stack) > len(deepest):
        deepest[:] = stack[::-1]


threading.setprofile(watch)
sys.setprofile(watch)
shiftmend.adapt(model, inputs * 0.5, profile, "bufr", **options)
sys.setprofile(None)
threading.setprofile(None)
print(json.dumps({"modules": sorted(modules), "functions": sorted(map(" ".join, functions)), "deepest": deepest}))
"""


def trace_adapt(package: Path, sources: list[Source]) -> list[Figure]:
    """Run a small `adapt` on the CPU (bufr, two epochs a block) and count what of the library runs.

    A module counts if any of its code runs, a function if it is called, by whatever thread. Code that runs while a
    module is imported does not count. The depth is the number of library functions on the stack at the same time;
    frames of torch between them do not count, nor do comprehensions and lambdas.
    """
    seen = run_fresh(_TRACE)
    depth = len(seen["deepest"])
    return [
        at_most("modules that one adapt passes through", 25, seen["modules"]),
        Figure("functions that one adapt calls", len(seen["functions"]), "-", True, seen["functions"]),
        Figure("deepest stack of library functions in adapt", depth, 12, depth <= 12, seen["deepest"]),
    ]


# ------------------------------------------------------------------------------------------ loops and graph wrappers


def evaluation_loops(package: Path, sources: list[Source]) -> Figure:
    """Count `for` loops over the batches of a feed that run a model on each batch.

    Such a loop goes over `feed.batches(...)`, `.labelled_batches()`, `.subset(...)` or `.subset_indices(...)`, or over
    a variable named `batches`. Its body calls a variable or an attribute of `self` (a model under whatever name) with a
    batch, or with what was made from the batch. Functions and classes of modules, methods of other objects, and loops
    over `feed.epoch(...)`, which train, do not count.
    """
    where = []
    for source in sources:
        loops = [node for node in ast.walk(source.tree) if isinstance(node, ast.For) and _goes_over_batches(node.iter)]
        for loop in loops:
            if _runs_a_model(loop, _module_names(source.tree)):
                where.append(place(source, loop, f"for {ast.unparse(loop.target)} in {ast.unparse(loop.iter)}"))
    return at_most("hand-written evaluation loops over the data", 1, where)


def _module_names(tree: ast.Module) -> set[str]:
    """Collect what a module defines or imports, at any depth: functions, classes and modules, not variables."""
    names = set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return names


def _goes_over_batches(iterated: ast.expr) -> bool:
    for node in ast.walk(iterated):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FEED_METHODS:
            return True
        if isinstance(node, ast.Name) and node.id == "batches":
            return True
    return False


def _runs_a_model(loop: ast.For, known: set[str]) -> bool:
    batches = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
    body = [node for statement in loop.body for node in ast.walk(statement)]
    for _ in range(3):  # x = ready(batch); y = x[rows]; model(y)
        for node in body:
            if isinstance(node, ast.Assign) and _mentions(node.value, batches):
                batches |= {
                    name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)
                }
    for node in body:
        if isinstance(node, ast.Call) and any(_mentions(argument, batches) for argument in node.args):
            called = node.func
            if isinstance(called, ast.Name) and called.id not in known | {"ready"}:
                return True
            own = isinstance(called, ast.Attribute) and ast.unparse(called.value) == "self"
            if own and ast.unparse(called) in ("self.model", "self.network"):
                return True
    return False


def _mentions(expression: ast.expr, names: set[str]) -> bool:
    """Tell if an expression uses one of these variables for more than its length or shape."""
    if isinstance(expression, ast.Call) and ast.unparse(expression.func) == "len":
        return False
    if isinstance(expression, ast.Attribute) and expression.attr in ("shape", "device", "ndim", "dtype"):
        return False
    if isinstance(expression, ast.Name):
        return expression.id in names
    return any(_mentions(part, names) for part in ast.iter_child_nodes(expression) if isinstance(part, ast.expr))


def graph_wrappers(package: Path, sources: list[Source]) -> Figure:
    """Count classes and functions that run a pass through a CUDA graph if that can be captured.

    A function captures if it makes a `torch.cuda.CUDAGraph`, or calls a function of its module that does. A wrapper is
    a class or a function of another module that imports a capturing function and calls it. Training steps are captured
    by functions that take an optimiser and do not count: undoing the warm-up is another matter.
    """
    capturing = {name for source in sources for name in _capturing_functions(source)}
    where = []
    for source in sources:
        nodes = [node for node in ast.walk(source.tree) if isinstance(node, ast.ImportFrom)]
        imported = {
            alias.asname or alias.name: alias.name
            for node in nodes
            for alias in node.names
            if (node.module, alias.name) in capturing
        }
        owners = [node for node in source.tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
        for owner in owners if imported else ():
            if used := sorted(_calls_in(owner) & set(imported)):
                where.append(place(source, owner, f"{owner.name} calls {', '.join(used)}"))
    return at_most('"maybe captured as a CUDA graph" wrappers', 1, where)


def _capturing_functions(source: Source) -> set[tuple[str, str]]:
    """Find the functions of a module that capture a pass; give for each the module and its name."""
    owners = {node.name: node for node in source.tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    if "CUDAGraph" not in source.text:
        return set()
    calls = {name: _calls_in(node) for name, node in owners.items()}
    found: set[str] = set()
    while (
        more := {name for name, called in calls.items() if called & {"torch.cuda.CUDAGraph", "CUDAGraph", *found}}
        - found
    ):
        found |= more
    module = "shiftmend." + source.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return {(module, name) for name in found if not _takes_optimiser(owners[name])}


def _calls_in(owner: ast.AST) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(owner) if isinstance(node, ast.Call)}


def _takes_optimiser(owner: ast.AST) -> bool:
    return any(isinstance(node, ast.arg) and node.arg in ("optimiser", "optimizer") for node in ast.walk(owner))


# ------------------------------------------------------------------------------------- names of methods, exceptions


def compared_methods(package: Path, sources: list[Source]) -> Figure:
    """Count comparisons (`==`, `!=`, `in`, `match`) with names of methods, outside of methods/."""
    names = _method_names(sources)
    where = []
    for source in sources:
        if source.name.startswith("methods/"):
            continue
        for node in ast.walk(source.tree):
            strings: list[str] = []
            if isinstance(node, ast.Compare):
                for operator, side in zip(node.ops, node.comparators, strict=True):
                    if isinstance(operator, ast.Eq | ast.NotEq):
                        strings += _strings(node.left, side)
                    elif isinstance(operator, ast.In | ast.NotIn) and isinstance(side, ast.Tuple | ast.List | ast.Set):
                        strings += _strings(*side.elts)
            elif isinstance(node, ast.MatchValue):
                strings += _strings(node.value)
            if set(strings) & names:
                where.append(place(source, node, ast.unparse(node)))
    return at_most("names of methods compared outside methods/", 0, where)


def _strings(*nodes: ast.AST) -> list[str]:
    """Pick the constant strings among some nodes."""
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def _method_names(sources: list[Source]) -> set[str]:
    """Read the names of methods: strings assigned to `name` in the classes of methods/."""
    names = set()
    for source in sources:
        kinds = ast.walk(source.tree) if source.name.startswith("methods/") else ()
        for node in (node for kind in kinds if isinstance(kind, ast.ClassDef) for node in kind.body):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
                if ast.unparse(target) == "name":
                    names |= set(_strings(node.value))
    return names


def broad_excepts(package: Path, sources: list[Source]) -> Figure:
    """Count handlers of every exception: bare, `Exception`, `BaseException`, and `suppress` of these.

    A handler of `BaseException` that ends with a bare `raise` cleans up and does not count.
    """
    where, cleaning = [], 0
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ExceptHandler):
                kinds = _names_in(node.type) if node.type is not None else {"BaseException"}
                last = node.body[-1]
                again = isinstance(last, ast.Raise) and last.exc is None
                if "BaseException" in kinds and again:
                    cleaning += 1
                elif kinds & {"Exception", "BaseException"}:
                    where.append(place(source, node))
            elif isinstance(node, ast.Call) and "suppress" in (
                getattr(node.func, "id", ""),
                getattr(node.func, "attr", ""),
            ):
                kinds = {name for part in node.args for name in _names_in(part)}
                if kinds & {"Exception", "BaseException"}:
                    where.append(place(source, node, "suppress"))
    figure = at_most("broad excepts", 3, where)
    figure.where.append(f"not counted: {cleaning} of BaseException that clean up and raise again")
    return figure


def _names_in(node: ast.expr) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def matched_error_texts(package: Path, sources: list[Source]) -> Figure:
    """Count decisions by the text of an exception.

    Such a decision looks for a string in `str(error)`, by `in`, `==`, a method such as `startswith`, or a function of
    `re`. `error` is any variable that a handler binds, or one named like an exception, or its `__cause__`.
    """
    where = []
    for source in sources:
        bound = {node.name for node in ast.walk(source.tree) if isinstance(node, ast.ExceptHandler) and node.name}
        bound |= {"error", "exception", "problem"}

        def is_text(node: ast.AST, bound: set[str] = bound) -> bool:
            calls = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("str", "repr")
            return calls and bool(node.args) and bool(_names_in(node.args[0]) & bound)  # type: ignore[attr-defined]

        for node in ast.walk(source.tree):
            if isinstance(node, ast.Compare):
                found = any(is_text(side) for side in (node.left, *node.comparators))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                tests = node.func.attr in ("search", "match", "fullmatch")
                asks = node.func.attr in ("startswith", "endswith", "find", "index", "count")
                found = (tests and any(map(is_text, node.args))) or (asks and is_text(node.func.value))
            else:
                continue
            if found:
                where.append(place(source, node, ast.unparse(node)[:80]))
    return at_most("places that match the text of an exception", 0, where)


# ---------------------------------------------------------------------------------------------------- heavy packages

_IMPORTED = """
import json, sys
import torch, numpy, safetensors.torch
before = set(sys.modules)
import shiftmend
shiftmend.adapt
print(json.dumps(sorted({name.split(".")[0] for name in set(sys.modules) - before})))
"""


def imported_packages(package: Path, sources: list[Source]) -> Figure:
    """List heavy packages that `import shiftmend; shiftmend.adapt` imports beside torch, numpy and safetensors."""
    return at_most(
        "heavy packages that adapt imports", 0, [one for one in run_fresh(_IMPORTED) if one in NOT_FOR_ADAPT]
    )


def required_packages(package: Path, sources: list[Source]) -> Figure:
    """List what `pip install .` brings beyond the light packages."""
    project = tomllib.loads((package.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [re.match(r"[\w.-]+", line)[0].lower() for line in project["dependencies"]]  # type: ignore[index]
    return at_most("heavy packages in the dependencies", 0, [name for name in needed if name not in LIGHT])


def touched_files(package: Path, sources: list[Source]) -> list[Figure]:
    """Show the counts by hand, and say so where a file in them is gone."""
    figures = []
    for change, (aim, files) in TOUCHED.items():
        where = [file if (package / file).exists() else f"{file} (gone: count again)" for file in files]
        figures.append(Figure(f"files to touch to add {change} (by hand)", len(files), aim, len(files) <= aim, where))
    return figures


# -------------------------------------------------------------------------------------------------------------- prose


def docstrings(source: Source) -> Iterator[tuple[ast.AST, str, str]]:
    """Give every docstring of a file with its owner and the owner's kind."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                kind = {"Module": "module", "ClassDef": "class"}.get(type(node).__name__, "function")
                yield node, kind, text


def docstring_openings(package: Path, sources: list[Source]) -> Figure:
    """Count docstrings that open with a question word, and those of functions that open with no verb.

    A property counts as a noun, like a class. First words are looked up in `NOT_VERBS` and `QUESTION_WORDS`: a
    function that opens with another noun is not found.
    """
    where, functions = [], 0
    for source in sources:
        for node, kind, text in docstrings(source):
            functions += kind == "function"
            forbidden = NOT_VERBS if kind == "function" and not _is_property(node) else QUESTION_WORDS
            if kind != "module" and re.match(rf"({forbidden})\b", text):
                where.append(place(source, node, " ".join(text.split()[:6])))
    figure = at_most("docstrings that open with What, Whether, Of, The ...", 0, where)
    figure.where.append(f"of {functions} docstrings of functions")
    return figure


def _is_property(node: ast.AST) -> bool:
    return any("property" in ast.unparse(one) for one in getattr(node, "decorator_list", ()))


_PUBLIC = """
import inspect, json, shiftmend
found = {}
for name in shiftmend.__all__:
    value = getattr(shiftmend, name)
    text = inspect.getdoc(value) or ""
    missing = []
    if isinstance(value, str):
        continue
    if isinstance(value, type) and issubclass(value, BaseException):
        missing = [] if value.__doc__ else ["a docstring"]
    else:
        if inspect.isfunction(value):
            missing = [part for part in ("Args", "Returns") if part + ":" not in text]
        if ">>>" not in text:
            missing.append("an example")
    if missing:
        found[name] = missing
print(json.dumps(found))
"""


def undocumented_names(package: Path, sources: list[Source]) -> Figure:
    """Count public names without all of the parts of a docstring.

    A function needs Args, Returns and an example (`>>>`); a class and a package need an example; an exception needs a
    docstring.
    """
    found = run_fresh(_PUBLIC)
    return at_most(
        "public names without Args, Returns or an example",
        0,
        [f"{name}: no {', '.join(p)}" for name, p in found.items()],
    )


def pinned_sentences(package: Path, sources: list[Source]) -> Figure:
    """Count `match=` in tests that are sentences: more than four words."""
    where, matches = [], 0
    for source in parse(package.parents[1] / "tests"):
        for node in ast.walk(source.tree):
            if isinstance(node, ast.keyword) and node.arg == "match":
                matches += 1
                if len(" ".join(_strings(*ast.walk(node.value))).split()) > LONGEST_MATCH_WORDS:
                    where.append(place(source, node.value))
    figure = at_most("match= in tests that pin a sentence", 0, where)
    figure.where.append(f"of {matches} match=")
    return figure


def error_messages(source: Source, classes: set[str]) -> Iterator[tuple[ast.AST, str]]:
    """Give the messages of errors that a file makes, with `{}` for each part that is known only when it runs."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and node.args and getattr(node.func, "id", "") in classes:
            parts = node.args[0].values if isinstance(node.args[0], ast.JoinedStr) else [node.args[0]]
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts)
            if text != "{}":
                yield node, text


def list_errors(sources: list[Source]) -> list[tuple[str, str]]:
    """List place and message of the errors that users meet: the classes of errors.py.

    Other exceptions are caught inside the library, and their text becomes part of such a message.
    """
    (errors,) = (source for source in sources if source.name == "errors.py")
    classes = {node.name for node in errors.tree.body if isinstance(node, ast.ClassDef)} | {"error"}
    return [(place(source, node, text), text) for source in sources for node, text in error_messages(source, classes)]


def error_forms(package: Path, sources: list[Source]) -> list[Figure]:
    """Count the errors of the form "Expected X, got Y. Try Z.".

    An error about a damaged file, or one that cannot be written, may open in another way. Whether a message says what
    to do is guessed from `ADVICE_VERBS`; a sentence that is filled in at the end counts as advice.
    """
    found = list_errors(sources)
    advises = re.compile(rf"[.;:,] ((otherwise|or|and|then) )?({ADVICE_VERBS})\b", re.IGNORECASE)
    others = [line for line, text in found if not text.startswith("Expected ")]
    silent = [line for line, text in found if not advises.search(text) and not re.search(r"[.;:] ?{}\.?$", text)]
    return [
        Figure(f"errors (of {len(found)}) that open with Expected", len(found) - len(others), "-", True, others),
        Figure(f"errors (of {len(found)}) that say what to do", len(found) - len(silent), "-", True, silent),
    ]


def lengthy_errors(package: Path, sources: list[Source]) -> Figure:
    """Count errors of more words than anybody reads."""
    where = [line for line, text in list_errors(sources) if len(text.split()) > MAX_ERROR_WORDS]
    return at_most(f"errors of more than {MAX_ERROR_WORDS} words", 0, where)


def docstring_share(package: Path, sources: list[Source]) -> Figure:
    """Measure how many of all lines are docstrings of modules, classes and functions, in percent."""
    owners = [node for source in sources for node, _, _ in docstrings(source)]
    lines = sum((text := node.body[0]).end_lineno - text.lineno + 1 for node in owners)  # type: ignore[attr-defined]
    share = round(100 * lines / sum(source.lines for source in sources), 1)
    return Figure("lines that are docstrings, % (others: 25 to 47)", share, 25, share >= 25)


MEASURES: tuple[Callable[[Path, list[Source]], Figure | list[Figure]], ...] = (
    flat_modules,
    undeclared_names,
    line_count,
    file_count,
    trace_adapt,
    evaluation_loops,
    graph_wrappers,
    touched_files,
    compared_methods,
    broad_excepts,
    matched_error_texts,
    imported_packages,
    required_packages,
    docstring_openings,
    undocumented_names,
    pinned_sentences,
    error_forms,
    lengthy_errors,
    docstring_share,
)


def measure(package: Path) -> list[Figure]:
    """Measure everything about the package in a folder."""
    sources = parse(package)
    figures: list[Figure] = []
    for function in MEASURES:
        found = function(package, sources)
        figures += found if isinstance(found, list) else [found]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON with the places that were counted")
    parser.add_argument("--where", action="store_true", help="print the places that were counted")
    arguments = parser.parse_args()
    spec = importlib.util.find_spec("shiftmend")
    if spec is None or spec.origin is None:
        raise SystemExit("shiftmend cannot be imported. Try `make test` first, or set PYTHONPATH=src.")
    figures = measure(Path(spec.origin).parent)
    if arguments.json:
        print(json.dumps([asdict(figure) for figure in figures], indent=1))
        return
    print(f"{'figure':<60}{'today':>9}{'aim':>9}  met")
    for figure in figures:
        met = "yes" if figure.met else "no"
        print(f"{figure.name:<60}{figure.today:>9}{figure.aim:>9}  {met if figure.aim != '-' else ''}".rstrip())
        if arguments.where:
            for line in figure.where:
                print(f"    {line}")


if __name__ == "__main__":
    main()
