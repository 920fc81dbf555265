"""The documentation's examples run as written, and its links lead somewhere."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import inspect
import re
import runpy
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from worlds import sensors

import shiftmend
from shiftmend.cli import main
from shiftmend.methods import METHODS
from shiftmend.profiles import privacy
from shiftmend.research.analysis.toys import offset_toy
from shiftmend.research.bench.run import run
from shiftmend.research.networks import MODELS

ROOT = Path(__file__).parent.parent
WRITTEN = [page for page in sorted((ROOT / "docs").rglob("*.md")) if "generated" not in page.parts]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *WRITTEN]


def in_the_repository(page: Path) -> str:
    return str(page.relative_to(ROOT))


def code_blocks(page: Path, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", text)]


@pytest.mark.slow
def test_the_readme_runs_as_written_and_prints_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    readme = ROOT / "README.md"
    names: dict[str, Any] = {}
    exec(code_blocks(ROOT / "docs/guide.md")[0], names)  # the model and the data that the README speaks of
    for block in code_blocks(readme):
        exec(block, names)
    printed = capsys.readouterr().out.splitlines()
    (shown,) = code_blocks(readme, "text")
    by_words = {re.sub(r"[\d.]+", "#", line): line for line in printed}
    for expected in shown.splitlines():
        line = by_words[re.sub(r"[\d.]+", "#", expected)]
        # Other processors round otherwise.
        assert numbers(line) == pytest.approx(numbers(expected), abs=2)
    assert (tmp_path / "mended/manifest.json").exists()
    away, labels = names["away"], names["site_labels"]
    true = [shiftmend.evaluate(model, (away, labels)).accuracy for model in (names["model"], names["mended"])]
    (told,) = re.findall(r"^The true accuracy is (.*?)\.$", readme.read_text(), re.MULTILINE | re.DOTALL)
    assert [100 * value for value in true] == pytest.approx(numbers(told), abs=2)


def test_the_readme_is_read_in_a_minute() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = attention_mask.unsqueeze(-1)
        return self.head((self.embed(input_ids) * mask).sum(1) / mask.sum(1))


class ImageAndAge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.stem = nn.Linear(5, 2), nn.Conv2d(3, 4, 3)

    def forward(self, image: Tensor, age: Tensor) -> Tensor:
        return self.head(torch.cat([self.stem(image).mean((2, 3)), age], dim=1))


def test_the_profile_page_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refreshing, several, merging, mixing, private, by_hand = code_blocks(ROOT / "docs/profiles.md")[-6:]
    given = {"shiftmend": shiftmend, "model": Words(), "ids": torch.randint(0, 50, (20, 7)), "mask": torch.ones(20, 7)}
    given |= {"fusion": ImageAndAge(), "images": torch.randn(20, 3, 32, 32), "ages": torch.rand(20, 1)}
    exec(several, found := given | {"labels": torch.arange(20) % 2})
    assert found["profile"].inputs.sizes == ("0 [3, 32, 32]", "1 [1]")
    world = sensors()
    names: dict[str, Any] = {"shiftmend": shiftmend, "model": world.model}
    names |= {"hospital_a": world.source, "hospital_b": world.target}
    exec(refreshing, names | {"loader": world.source})
    exec(merging, names)
    for part, name in (("first", "benign"), ("second", "tumour")):
        names[part].save(f"{name}.profile")
    exec(mixing, names)
    # The page is read without OpenDP as well.
    monkeypatch.setattr(privacy, "add_noise", lambda values, sensitivity, scale: (values, 0.0))
    monkeypatch.setattr(privacy, "find_rho", lambda epsilon, delta: 100.0)
    exec(private, names | {"home": world.source})
    assert 0 < names["site"].samples < names["both"].samples
    loader = [torch.randn(64, 8) for _ in range(3)]
    names = {"nn": nn, "torch": torch, "shiftmend": shiftmend, "loader": loader, "x": loader[0] + 1}
    exec(by_hand, names | {"backbone": nn.Linear(8, 512), "head": nn.Linear(512, 2)})


@pytest.mark.slow
def test_the_page_of_when_it_works_runs_as_written(capsys: pytest.CaptureFixture[str]) -> None:
    (offset,), (mixing,) = (code_blocks(ROOT / "docs" / page) for page in ("when-it-works.md", "label-shift.md"))
    exec(offset, {})
    assert capsys.readouterr().out.rstrip().endswith("1.0")
    toy = offset_toy(positives=0.9)
    names: dict[str, Any] = {"shiftmend": shiftmend, "model": toy.model, "target": toy.target_inputs}
    names |= {"images": toy.source_inputs, "labels": toy.source_labels}
    exec(mixing, names)
    assert names["result"].before.excess < shiftmend.verify(toy.model, toy.target_inputs, names["whole"]).excess


@pytest.mark.slow
def test_the_methods_page_runs_as_written() -> None:
    calls, auto, selection, online, own, history = code_blocks(ROOT / "docs/methods.md")
    world = sensors()
    made = world.profile()
    assert calls.count("shiftmend.adapt(") == 5
    quick = re.sub(r"epochs=\d+", "epochs=1", re.sub(r"epochs_per_block=\d+", "epochs_per_block=1", calls))
    quick = quick.replace('method="fr", align', 'method="fr", epochs=1, align')
    quick = quick.replace('method="fr", divergence', 'method="fr", epochs=1, divergence')
    names = {"shiftmend": shiftmend, "model": world.model, "target": world.target, "profile": made}
    exec(quick, names)
    first, quick = auto.split("\n", 1)
    assert "candidates" not in first  # it tries all of them, which takes long
    exec(quick, names)
    exec(selection, names)
    exec(online, names | {"batches": world.target.split(100)})
    exec(own, found := names | {"__name__": __name__})
    assert len(found["result"].manifest["learning_rates_tried"]) == 2
    assert found["online"].method.learning_rate == 0.02
    exec(history, {"result": shiftmend.adapt(world.model, world.target, made, "fr", epochs=1, progress=False)})


def run_commands(page: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Run the commands of a page one after the other; return what each prints."""
    printed = []
    for line in "\n".join(code_blocks(page, "bash")).splitlines():
        with pytest.raises(SystemExit) as stop:
            main(line.split()[1:])
        shown = capsys.readouterr()
        assert stop.value.code in (0, None), f"{line}: {shown.err}"
        printed.append(shown.out)
    return printed


@pytest.mark.slow
def test_the_page_of_tables_runs_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    page, names = ROOT / "docs/tables.md", dict[str, Any]()
    making, fitting, model, *others = code_blocks(page)
    for block in (making, fitting, model):
        exec(block, names)
    (tmp_path / "pls.py").write_text(model)
    *_, before, after = run_commands(page, capsys)
    errors = [float(re.findall(r"root_mean_square_error (\S+),", shown)[0]) for shown in (before, after)]
    assert errors[0] > 30
    assert errors[1] < 3
    for block in others:
        exec(block, names)
    assert shiftmend.evaluate(names["result"].model, names["site"]).r2 > 0.98
    mender = names["mender"]
    assert mender.score(names["site"], names["site"].labels) > 0.98 > 0 > names["before"]
    assert mender.adaptation_.manifest["method"]["name"] == "match-moments"
    assert mender.estimate_ is not None
    lamp = names["site"].inputs.mean(0) - names["home"].inputs.mean(0)
    corrected = torch.from_numpy(names["corrected"]).mean(0) - names["home"].inputs.mean(0)
    assert corrected.abs().max() < 0.2 * lamp.abs().max()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute with one thread, so that figures on a page come out the same everywhere."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_the_guide_runs_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in code_blocks(ROOT / "docs/guide.md"):
        exec(block, names)
    out = capsys.readouterr().out
    assert "the data are as at home, so nothing was changed" in out
    mended = shiftmend.evaluate(names["model"], (names["away"], names["site_labels"]))  # its weights were loaded
    assert mended.accuracy > 0.96
    estimate = names["result"].estimate.after
    assert estimate.low <= mended.accuracy <= estimate.high


@pytest.mark.slow
def test_the_rehearsal_page_runs_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in code_blocks(ROOT / "docs/rehearsal.md"):
        exec(block, names)
    assert "Rehearsal of 12 simulated shifts" in capsys.readouterr().out
    model, truth = names["model"], names["labels"][1200:]
    same, result = names["same"], names["result"]
    # New digits from the old device are left alone, and told their accuracy.
    assert same.manifest["method"]["name"] == "source-only"
    at_site = shiftmend.evaluate(model, (names["site"], truth)).accuracy
    assert same.estimate.after.low <= at_site <= same.estimate.after.high
    before, after = (shiftmend.evaluate(one, (names["hazy"], truth)).accuracy for one in (model, result.model))
    assert after > before - 0.02
    found = names["found"].estimate
    assert found.labelled[-1] == 50
    assert found.low - 0.02 <= after <= found.high + 0.02


def test_the_rehearsal_page_knows_every_reason() -> None:
    page = (ROOT / "docs/rehearsal.md").read_text()
    for reason in (
        "the profile was not rehearsed",
        "there are too few samples",
        "there are far more samples",
        "was not rehearsed",
        "was rehearsed with another",
        "the model gives values that are NaN or infinite",
        "lies outside of what was rehearsed",
        "answers fall into other classes than ever at home",
        "answers are as certain as at home but fall into other classes",
        "the signals contradict each other more than they ever did at home",
        "the signals leave too much open",
        "it is not known how the model was adapted",
    ):
        assert reason in page
        assert any(reason in path.read_text() for path in (ROOT / "src").rglob("*.py")), reason


@pytest.mark.parametrize("name", [name for name in shiftmend.__all__ if name != "__version__"])
def test_the_api_page_names_everything_public(name: str) -> None:
    assert re.search(rf"auto\w+:: shiftmend\.(?:errors$|{name}\b)", (ROOT / "docs/api.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", ["profile", "adapt", "verify", "evaluate", "stream", "rehearse", "refresh_batchnorm"])
def test_docstrings_name_every_argument(name: str) -> None:
    function = getattr(shiftmend, name)
    arguments = inspect.getdoc(function).partition("Args:\n")[2].partition("\nReturns:")[0]
    for argument, parameter in inspect.signature(function).parameters.items():
        shown = f"**{argument}" if parameter.kind is parameter.VAR_KEYWORD else argument
        assert re.search(rf"^ +(?:\w+, )*{re.escape(shown)}\b[^:]*:", arguments, re.MULTILINE), (name, argument)


@pytest.mark.slow
def test_the_benchmarks_page_runs_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs/benchmarks.md"
    benchmark, use, own = code_blocks(page)
    quick = re.sub(r"epochs=\d+", "epochs=2", re.sub(r'"epochs": \d+', '"epochs": 1', benchmark))
    for many, few in (
        ("order[:900]", "order[:200]"),
        ("order[900:]", "order[900:1100]"),
        ("seeds=(1, 2)", "seeds=(1,)"),
    ):
        assert many in quick
        quick = quick.replace(many, few)
    (tmp_path / "scanner.py").write_text(quick)
    exec(use, {})
    out = capsys.readouterr().out
    assert "| shift | source-only | fr | fr-features |" in out
    assert re.search(r"^\| stripe§ \| \**\d", out, re.MULTILINE)
    query = re.search(r'sqlite3 bench/results.sqlite "(.*?)"', page.read_text(), re.DOTALL)
    assert query is not None
    with closing(sqlite3.connect("results/results.sqlite")) as connection:
        rows = connection.execute(query[1].replace("'digits'", "'scanner'").replace("'oranges'", "'stripe'")).fetchall()
    assert [row[0] for row in rows] == ["fr", "fr-features", "source-only"]
    assert all(0 <= accuracy <= 100 and seconds >= 0 for _, accuracy, seconds in rows)
    monkeypatch.setattr("sys.path", [*sys.path])
    for names, name in ((METHODS, "centred"), (MODELS, "perceptron")):
        monkeypatch.setitem(names, name, None)  # type: ignore[arg-type] # the file puts its own there for this test
    method = code_blocks(ROOT / "docs/methods.md")[4].partition("\n\n\nresult =")[0]
    (tmp_path / "centred.py").write_text(method)
    (tmp_path / "perceptron.py").write_text(own.replace("epochs=20", "epochs=2").replace('"epochs": 8', '"epochs": 1'))
    report = run("perceptron.py:PLAIN", "results", workers=1, progress=False)
    assert (report.done, report.failed) == (5, ())


def calls_of(tree: ast.AST) -> Iterator[tuple[Any, ast.Call]]:
    """Give the functions of shiftmend that a block calls, with the calls; what it imports has to be there."""
    names: dict[str, Any] = {"shiftmend": shiftmend}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "shiftmend":
            module = importlib.import_module(node.module or "")
            names |= {one.asname or one.name: getattr(module, one.name) for one in node.names}
    for node in ast.walk(tree):
        path = ast.unparse(node.func).split(".") if isinstance(node, ast.Call) else [""]
        if isinstance(node, ast.Call) and path[0] in names:
            yield functools.reduce(getattr, path[1:], names[path[0]]), node


@pytest.mark.parametrize("page", PAGES, ids=in_the_repository)
def test_python_on_pages_calls_what_exists_with_options_that_exist(page: Path) -> None:
    """Blocks that need an optional package, or would take long, are not run elsewhere."""
    for block in code_blocks(page):
        for function, call in calls_of(ast.parse(block)):
            known = inspect.signature(function).parameters
            free = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
            for keyword in call.keywords:
                assert free or keyword.arg in known, f"{function.__name__} has no {keyword.arg}"


@pytest.mark.slow
def test_the_page_about_deploying_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxscript")
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()), nn.Linear(64, 2)
    )
    inputs = torch.randn(40, 1, 6, 6)
    names = {"result": shiftmend.adapt(model.eval(), inputs, method="adabn", progress=False), "inputs": inputs}
    for block in code_blocks(ROOT / "docs/deploy.md"):
        exec(block, names)
    expected = names["result"].model(inputs)
    for again in (names["folded"], torch.jit.load("mended.pt"), torch.export.load("mended.pt2").module()):
        torch.testing.assert_close(again(inputs), expected)
    assert (tmp_path / "mended.onnx").exists()


@pytest.mark.slow
def test_the_page_about_other_libraries_logs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    block = code_blocks(ROOT / "docs/integrations.md")[0].partition("with mlflow")[0]
    world = sensors()
    exec(block, {"result": shiftmend.adapt(world.model, world.target, world.profile(), "adabn", progress=False)})
    assert [*(tmp_path / "runs/site-a").rglob("events.out.*")]


def test_the_page_of_the_command_line_is_made_from_the_commands() -> None:
    text = runpy.run_path(str(ROOT / "docs/command_line.py"))["write_command_line"]()
    assert "## `shiftmend adapt`" in text
    assert "### `shiftmend bench run`" in text
    assert "| `--out`, `-o` | required | Folder for the adapted model, history and manifest. |" in text
    assert "shiftmend adapt MODEL [OPTIONS]" in text
    assert "| `--seed` | `0` | Seed of all random numbers. |" in text


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=in_the_repository)
def test_commands_exist(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in re.findall(r"^shiftmend .*?(?=  +#|$)", "\n".join(code_blocks(page, "bash")), re.MULTILINE):
        words = line.split()[1:]
        command = words[:2] if words[0] in ("bench", "data", "key") else words[:1]
        with pytest.raises(SystemExit) as stop:
            main([*command, "--help"])
        assert stop.value.code == 0, line
        known = capsys.readouterr().out
        for option in (word for word in words if word.startswith("--")):
            assert option in known, f"{line}: there is no {option}"


@pytest.mark.parametrize("page", PAGES, ids=in_the_repository)
def test_links_lead_somewhere(page: Path) -> None:
    # notes are included in the page of their benchmark, which lies one folder up
    folder = page.parent.parent if page.parent.name == "notes" else page.parent
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not link.startswith("http"):
            assert (folder / link).exists(), f"{in_the_repository(page)} links to {link}"


def test_pages_of_results_are_checked_too() -> None:
    assert {"docs/benchmarks.md", "docs/results/README.md"} <= {in_the_repository(page) for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=in_the_repository)
def test_no_page_names_a_folder_of_somebodys_machine(page: Path) -> None:
    found = re.findall(r"(?<![\w.:/])/(?:home|root|work|tmp|mnt|data|Users|scratch)/\S*", page.read_text())
    assert not found, f"{in_the_repository(page)} has {found}"


def modules_with_examples() -> list[str]:
    def has_examples(path: Path) -> bool:
        # Examples that need a package which is not installed are skipped.
        lines = path.read_text(encoding="utf-8").splitlines()
        return any(line.lstrip().startswith(">>>") and "+SKIP" not in line for line in lines)

    found = [path for path in (ROOT / "src").rglob("*.py") if has_examples(path)]
    names = (".".join(path.relative_to(ROOT / "src").with_suffix("").parts) for path in found)
    return sorted(name.removesuffix(".__init__") for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("name", modules_with_examples())
def test_docstring_examples(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0
    assert results.failed == 0


def public_functions() -> Iterator[tuple[str, Any]]:
    """Give every public function, and the functions of public packages."""
    for name in shiftmend.__all__:
        value = getattr(shiftmend, name)
        if inspect.ismodule(value):
            yield from ((f"{name}.{each}", getattr(value, each)) for each in value.__all__)
        else:
            yield name, value


@pytest.mark.parametrize(("name", "value"), [pair for pair in public_functions() if inspect.isfunction(pair[1])])
def test_public_functions_document_arguments_and_result(name: str, value: Any) -> None:
    text = inspect.getdoc(value) or ""
    assert ">>>" in text, f"{name} has no example"
    assert "Args:" in text, f"{name} does not document its arguments"
    for argument, parameter in inspect.signature(value).parameters.items():
        assert re.search(rf"^    \*{{0,2}}{argument}:", text, re.MULTILINE), f"{name} does not document {parameter}"
    if inspect.signature(value).return_annotation not in (None, "None"):
        assert "Returns:" in text or "Yields:" in text, f"{name} does not document what it returns"


@pytest.mark.parametrize(("name", "value"), [pair for pair in public_functions() if inspect.isclass(pair[1])])
def test_public_classes_document_their_methods(name: str, value: type) -> None:
    assert value.__doc__
    for each, member in inspect.getmembers(value):
        own = inspect.isfunction(member) or isinstance(member, property)
        # Methods of torch's modules, which some classes are made from, are torch's matter.
        if own and not each.startswith("_") and each in {k for c in value.__mro__ for k in _library_names(c)}:
            assert inspect.getdoc(member), f"{name}.{each} has no docstring"


def _library_names(kind: type) -> set[str]:
    return set(vars(kind)) if kind.__module__.startswith("shiftmend") else set()


def test_the_methods_table_names_every_method() -> None:
    page = (ROOT / "docs/methods.md").read_text()
    for name in shiftmend.methods.METHODS:
        assert f"| `{name}` |" in page
