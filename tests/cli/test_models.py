"""Models from the command line: what a user's own file may look like, and how it is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from shiftmend.cli.models import load_model
from shiftmend.errors import DataError, ShiftmendError

LINEAR = "import torch\ndef make(width=4): return torch.nn.Linear(width, 2)\n"


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def refusal(name: str, *options: str) -> str:
    """The sentence, once nothing of the failed import is left."""
    path = list(sys.path)
    with pytest.raises(ShiftmendError) as refused:
        load_model(name, None, list(options))
    assert sys.path == path
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("text", "reason", "line"),
    [
        ("x = 1\ndef make(:\n    pass\n", "could not be imported: SyntaxError: invalid syntax", 2),
        ("\nraise ValueError('no\\nweights')\n", "could not be imported: ValueError: no weights", 2),
        ("import json\njson.loads('{')\n", "could not be imported: JSONDecodeError: ", 2),
        ("import sys\nsys.exit(3)\n", "could not be imported: SystemExit: 3", 2),
        ("def make():\n    return {}['a']\n", "could not make the model with no options: KeyError: 'a'", 2),
        ("def make():\n    raise ValueError\n", "could not make the model with no options: ValueError (", 2),
        ("def make():\n    return 1 + 'a'\n", "could not make the model with no options: TypeError: unsupported", 2),
        ("import torch\ndef make():\n    torch.nn.Linear(-2, 1)\n", "could not make the model", 3),
    ],
)
def test_a_file_that_fails_is_named_with_line_and_reason(tmp_path: Path, text: str, reason: str, line: int) -> None:
    file = written(tmp_path / "broken_net.py", text)
    said = refusal(f"{file}:make")
    assert reason in said
    assert f"({file}, line {line});" in said
    assert ("broken_net" in sys.modules) == ("could not make" in reason)  # no half of a module is kept


def test_a_wrong_option_is_told_from_an_error_inside(tmp_path: Path) -> None:
    file = written(tmp_path / "linear_net.py", LINEAR)
    assert "could not be called with {'depth': 3}: " in refusal(f"{file}:make", "depth=3")
    assert load_model(f"{file}:make", None, ["width=7"]).in_features == 7


def test_a_file_may_import_its_neighbours_also_later(tmp_path: Path) -> None:
    written(tmp_path / "project/neighbour_now.py", "import torch\nclass B(torch.nn.Linear): pass\n")
    written(tmp_path / "project/neighbour_later.py", "FACTOR = 3\n")
    file = written(
        tmp_path / "project/table_net.py",
        "from neighbour_now import B\n"
        "class Late(B):\n"
        "    def forward(self, x):\n"
        "        from neighbour_later import FACTOR\n"
        "        return FACTOR * super().forward(x)\n"
        "def make(): return Late(4, 2)\n",
    )
    model = load_model(f"{file}:make", None, [])
    x = torch.ones(1, 4)
    torch.testing.assert_close(model(x), 3 * torch.nn.functional.linear(x, model.weight, model.bias))


def test_a_module_may_lie_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "own_package/net.py", LINEAR)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert load_model("own_package.net:make", None, []).in_features == 4
    assert "own_package.net has no 'made'" in refusal("own_package.net:made")
    assert "could not be found: No module named 'own_package.gone'" in refusal("own_package.gone:make")


def test_a_failed_import_inside_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    neighbour = written(tmp_path / "neighbour_bad.py", "A = 1\nimport no_such_library\n")
    file = written(tmp_path / "importing_net.py", "import neighbour_bad\n")
    monkeypatch.chdir(tmp_path)
    for name in (f"{file}:make", "importing_net:make"):
        said = refusal(name)
        assert "could not be found" not in said
        assert f"No module named 'no_such_library' ({neighbour}, line 2); install it" in said
    file.write_text("from json import nothing_of_that_name\n")
    said = refusal(f"{file}:make")
    assert "cannot import name 'nothing_of_that_name' from 'json'" in said
    assert f"({file}, line 1)" in said


def test_the_line_to_blame_is_not_one_of_a_library_in_the_same_folder(tmp_path: Path) -> None:
    written(tmp_path / "site-packages/some_library.py", "def make(): raise ValueError('no')\n")
    file = written(
        tmp_path / "beside_its_libraries.py",
        f"import sys\nsys.path.append('{tmp_path}/site-packages')\nfrom some_library import make as made\n"
        "def make(): made()\n",
    )
    assert f"ValueError: no ({file}, line 4)" in refusal(f"{file}:make")
    installed = written(tmp_path / "site-packages/installed_net.py", "def make(): raise ValueError('no')\n")
    assert f"ValueError: no ({installed}, line 1)" in refusal(f"{installed}:make")


def test_weights_that_do_not_fit_are_told_by_name(tmp_path: Path) -> None:
    file = written(tmp_path / "linear_net.py", LINEAR)
    wrapped, whole = tmp_path / "wrapped.safetensors", tmp_path / "whole.pt"
    save_file({"net.weight": torch.ones(2, 4), "net.bias": torch.ones(2), "loss.scale": torch.ones(1)}, wrapped)
    with pytest.raises(DataError, match=r"file lacks 'weight' \(1 more\) and the model lacks 'loss.scale' \(2 more"):
        load_model(f"{file}:make", wrapped, [])
    save_file(torch.nn.Linear(5, 2).state_dict(), wrapped)
    with pytest.raises(DataError, match="size mismatch for weight"):
        load_model(f"{file}:make", wrapped, [])
    torch.save(torch.nn.Linear(4, 2), whole)
    with pytest.raises(
        DataError, match=r"such as a whole model; expected what torch.save\(model.state_dict\(\), file\)"
    ):
        load_model(f"{file}:make", whole, [], allow_pickle=True)
    for kind, held in (("list", [torch.ones(2, 4)]), ("dict", {0: torch.ones(2, 4)})):
        torch.save(held, whole)
        with pytest.raises(
            DataError, match=rf"{kind} without names of weights, expected what torch.save\(model.state_"
        ):
            load_model(f"{file}:make", whole, [], allow_pickle=True)
    torch.save({"model": {0: torch.ones(2, 4)}}, whole)
    with pytest.raises(DataError, match=r"the file lacks 'weight' \(1 more\) and the model lacks 'model'"):
        load_model(f"{file}:make", whole, [], allow_pickle=True)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "net.inner."])
@pytest.mark.parametrize("key", [None, "state_dict", "model_state_dict", "model"])
def test_weights_out_of_a_training_loop_are_found(tmp_path: Path, prefix: str, key: str | None) -> None:
    file, trained = written(tmp_path / "linear_net.py", LINEAR), torch.nn.Linear(4, 2)
    state: dict[str, Any] = {f"{prefix}{name}": value for name, value in trained.state_dict().items()}
    torch.save(state if key is None else {key: state, "epoch": 3}, tmp_path / "last.ckpt")
    loaded = load_model(f"{file}:make", tmp_path / "last.ckpt", [], allow_pickle=True)
    assert torch.equal(loaded.weight, trained.weight)
    assert torch.equal(loaded.bias, trained.bias)
