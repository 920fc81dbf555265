"""From the command line to a model and its data: what a user's own file may look like, and how it is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from shiftmend.cli import main
from shiftmend.cli.loading import load_data, load_model, parse_normalisation, pick_telling_rows
from shiftmend.cli.options import choose_columns
from shiftmend.errors import DataError, ShiftmendError
from shiftmend.inputs.folders import image_folder
from shiftmend.inputs.tables import Table
from shiftmend.introspection.input_map import attach_input_map

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "reason", "line"),
    [
        ("x = 1\ndef make(:\n    pass\n", "got SyntaxError: invalid syntax", 2),
        ("\nraise ValueError('no\\nweights')\n", "got ValueError: no weights", 2),
        ("import json\njson.loads('{')\n", "got JSONDecodeError: ", 2),
        ("import sys\nsys.exit(3)\n", "got SystemExit: 3", 2),
        ("def make():\n    return {}['a']\n", "to return a model with no options, got KeyError: 'a'", 2),
        ("def make():\n    raise ValueError\n", "to return a model with no options, got ValueError (", 2),
        ("def make():\n    return 1 + 'a'\n", "to return a model with no options, got TypeError: unsupported", 2),
        ("import torch\ndef make():\n    torch.nn.Linear(-2, 1)\n", "to return a model", 3),
    ],
)
def test_a_file_that_fails_is_named_with_line_and_reason(tmp_path: Path, text: str, reason: str, line: int) -> None:
    file = written(tmp_path / "broken_net.py", text)
    said = refusal(f"{file}:make")
    assert reason in said
    assert f"({file}, line {line})." in said
    assert ("broken_net" in sys.modules) == ("to return a model" in reason)  # no half of a module is kept


def test_a_wrong_option_is_told_from_an_error_inside(tmp_path: Path) -> None:
    file = written(tmp_path / "linear_net.py", LINEAR)
    assert "got {'depth': 3}: " in refusal(f"{file}:make", "depth=3")
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
    assert "'made' in own_package.net" in refusal("own_package.net:made")
    assert "could not be found: No module named 'own_package.gone'" in refusal("own_package.gone:make")


def test_a_failed_import_inside_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    neighbour = written(tmp_path / "neighbour_bad.py", "A = 1\nimport no_such_library\n")
    file = written(tmp_path / "importing_net.py", "import neighbour_bad\n")
    monkeypatch.chdir(tmp_path)
    for name in (f"{file}:make", "importing_net:make"):
        said = refusal(name)
        assert "could not be found" not in said
        assert f"No module named 'no_such_library' ({neighbour}, line 2). Install it" in said
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
    with pytest.raises(DataError, match=r"'weight' \(1.*'loss\.scale' \(2"):
        load_model(f"{file}:make", wrapped, [])
    save_file(torch.nn.Linear(5, 2).state_dict(), wrapped)
    with pytest.raises(DataError, match="size mismatch for weight"):
        load_model(f"{file}:make", wrapped, [])
    torch.save(torch.nn.Linear(4, 2), whole)
    with pytest.raises(DataError, match=r"state_dict.*more than tensors"):
        load_model(f"{file}:make", whole, [], allow_pickle=True)
    for kind, held in (("list", [torch.ones(2, 4)]), ("dict", {0: torch.ones(2, 4)})):
        torch.save(held, whole)
        with pytest.raises(DataError, match=rf"torch\.save.*{kind}"):
            load_model(f"{file}:make", whole, [], allow_pickle=True)
    torch.save({"model": {0: torch.ones(2, 4)}}, whole)
    with pytest.raises(DataError, match=r"'weight' \(1.*'model'"):
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


def stored(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize("labels", [["cat", "dog", "cat"], np.array([{}, None, "x"], dtype=object)])
@pytest.mark.parametrize("key", ["inputs", "images"])
def test_labels_that_are_no_numbers_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, key: str, labels: Any
) -> None:
    values = np.zeros((3, 4, 4), np.uint8 if key == "images" else np.float32)
    path = stored(tmp_path / "a.npz", **{key: values, "labels": np.array(labels)})
    inputs, found, *_ = load_data(path, None)
    assert found is None
    assert len(inputs) == 3
    assert len(caplog.messages) == 1
    assert f"the labels in {path} are {np.array(labels).dtype} and are not used" in caplog.messages[0]


def test_labels_of_every_position_are_taken_as_they_are(tmp_path: Path) -> None:
    inputs, marks = np.zeros((3, 1, 4, 4), np.float32), np.arange(48).reshape(3, 4, 4) % 5 - 1
    whole = marks, marks.astype(np.uint8), marks[:, 0, 0]
    for labels, kind in (*((one, torch.int64) for one in whole), (marks / 2, torch.float32)):
        found = load_data(stored(tmp_path / "a.npz", inputs=inputs, labels=labels), None).labels
        assert found is not None
        assert found.dtype == kind
        assert np.array_equal(found.numpy(), labels)


@pytest.mark.parametrize("ignore", [None, 255])
def test_what_labels_are_like_shows_in_three_inputs(ignore: int | None) -> None:
    labels = torch.tensor([[255, 255], [1, 255], [0, 0], [7, 1], [2, 3]])
    lowest, highest, other = pick_telling_rows(labels, ignore)
    assert (lowest, highest) == (2, 0 if ignore is None else 3)
    assert other in (0, 4)
    assert pick_telling_rows(torch.tensor([0.0, 1.0, 0.5]), None) == [0, 1, 2]
    with pytest.raises(DataError, match=r"ignore_label.*9223372036854775808"):
        pick_telling_rows(labels, 2**63)


@pytest.mark.parametrize("key", ["inputs", "images"])
def test_fractions_are_quantities_to_predict(tmp_path: Path, caplog: pytest.LogCaptureFixture, key: str) -> None:
    values = np.zeros((3, 4, 4), np.uint8 if key == "images" else np.float32)
    labels = load_data(stored(tmp_path / "a.npz", **{key: values, "labels": np.array([0.5, -1.5, 2.5])}), None)[1]
    assert labels is not None
    assert labels.dtype == torch.float32
    assert labels.tolist() == [0.5, -1.5, 2.5]
    assert caplog.messages == []


@pytest.mark.parametrize("key", ["inputs", "images"])
def test_labels_that_are_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture, key: str) -> None:
    values = np.zeros((3, 4, 4), np.uint8 if key == "images" else np.float32)
    path = tmp_path / "a.npz"
    labels = load_data(stored(path, **{key: values, "labels": np.array([2, 0, 1], np.uint8)}), None)[1]
    assert labels is not None
    assert labels.dtype == torch.int64
    assert labels.tolist() == [2, 0, 1]
    for wrong, said in (
        ([0, 1], r"3 inputs.*\[2\]"),
        ([[0, 1, 2]], r"3 inputs.*\[1, 3\]"),
    ):
        with pytest.raises(DataError, match=said):
            load_data(stored(path, **{key: values, "labels": np.array(wrong)}), None)
    assert caplog.messages == []


def test_size_scales_an_npz_as_it_scales_a_folder(tmp_path: Path) -> None:
    pictures = np.random.default_rng(0).integers(0, 256, (3, 12, 12, 3), dtype=np.uint8)
    path = stored(tmp_path / "a.npz", images=pictures)
    (tmp_path / "folder").mkdir()
    for number, picture in enumerate(pictures):
        Image.fromarray(picture).save(tmp_path / f"folder/{number}.png")
    for size in (5, 12, 20):
        here, there = load_data(path, size)[0], load_data(tmp_path / "folder", size)[0]
        assert here.dtype == torch.uint8
        assert here.shape == (3, 3, size, size)
        assert int((here.int() - there.int()).abs().max()) <= 1  # the two libraries may round differently
    with pytest.raises(DataError, match=r"--size.*got 0"):
        load_data(path, 0)
    with pytest.raises(DataError, match=r"images for --size 5"):
        load_data(stored(tmp_path / "table.npz", inputs=np.zeros((2, 3))), 5)


def test_a_mean_or_a_deviation_fits_the_channels() -> None:
    images = torch.full((2, 3, 4, 4), 255, dtype=torch.uint8)
    made = parse_normalisation("0.5,0.25,0", "0.5", None)(images)
    assert made[0, :, 0, 0].tolist() == [1.0, 1.5, 2.0]
    for mean, deviation, given in (("0.5,0.5", "1", images), ("0", "1,1", images), ("0,0,0", "1,1", images[:, :1])):
        with pytest.raises(DataError, match=rf"{given.shape[1]} channel.*--mean.*--std"):
            parse_normalisation(mean, deviation, None)(given)
    for mean, deviation in (("nan", "1"), ("0", "inf")):
        with pytest.raises(ShiftmendError, match="to be finite"):
            parse_normalisation(mean, deviation, None)


def test_channels_are_made_or_refused(tmp_path: Path) -> None:
    colour = np.random.default_rng(1).integers(0, 256, (9, 11, 3), dtype=np.uint8)
    Image.fromarray(colour).save(tmp_path / "0.png")
    images, grey = load_data(tmp_path, None)[0], image_folder(tmp_path, channels=1).images
    to_grey, to_colour = parse_normalisation("0", "1", 1), parse_normalisation("0", "1", 3)
    assert torch.equal(to_grey(images), grey.float() / 255)
    assert torch.equal(to_colour(images), images.float() / 255)
    assert torch.equal(to_colour(grey), grey.float().expand(-1, 3, -1, -1) / 255)
    with pytest.raises(DataError, match=r"--channels 2.*3 channels"):
        parse_normalisation("0", "1", 2)(images)
    with pytest.raises(DataError, match=r"--channels 1.*float32 \[5\]"):
        to_grey(torch.zeros(2, 5))
    with pytest.raises(ShiftmendError, match=r"at least 1.*0"):
        parse_normalisation("0", "1", 0)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (np.float64, torch.float32),
        (np.float16, torch.float32),
        (np.int16, torch.int64),
        (np.uint32, torch.int64),
        (np.int64, torch.int64),
    ],
)
def test_other_inputs_keep_whole_numbers_whole(tmp_path: Path, kind: Any, expected: torch.dtype) -> None:
    values = np.arange(6).reshape(2, 3)
    inputs, labels, *_ = load_data(stored(tmp_path / "a.npz", inputs=values.astype(kind)), None)
    assert labels is None
    assert inputs.dtype == expected
    assert inputs.tolist() == values.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": np.zeros((2, 4, 4))}, r"uint8 images.*'inputs'"),
        ({"images": np.zeros((4, 4), np.uint8)}, r"uint8 images.*Convert"),
        ({"pictures": np.zeros((2, 4, 4))}, r"'images'.*pictures"),
        ({"inputs": np.zeros((2, 4), np.uint8)}, "tokens as int64"),
        ({"inputs": np.zeros((2, 4), complex)}, r"numbers.*complex128"),
        ({"inputs": np.zeros((0, 4))}, "Expected numbers"),
        ({"inputs": np.array([["a"], ["b"]])}, "Expected numbers"),
    ],
)
def test_an_npz_without_usable_inputs(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_data(stored(tmp_path / "a.npz", **arrays), None)


def called(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[str]]:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    return int(stop.value.code or 0), capsys.readouterr().err.splitlines()


@pytest.mark.slow
def test_tokens_with_named_classes_can_be_profiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that looks tokens up, and labels that only scoring needs."""
    model = tmp_path / "token_net.py"
    model.write_text(
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 2))\n"
    )
    tokens = np.random.default_rng(0).integers(0, 9, (64, 3), dtype=np.int32)
    data = stored(tmp_path / "tokens.npz", inputs=tokens, labels=np.array(["yes", "no"] * 32))
    arguments = (f"{model}:make", "-d", data, "--device", "cpu")
    code, said = called(capsys, "profile", *arguments, "-o", tmp_path / "p")
    assert code == 0
    assert (tmp_path / "p").is_file()
    assert any(line.startswith("warning: the labels in ") for line in said)
    code, said = called(capsys, "evaluate", *arguments)
    assert code == 2
    assert said[0].startswith("warning: the labels in ")
    assert said[1].startswith("error: ")
    code, said = called(capsys, "profile", *arguments, "-o", tmp_path / "q", "--channels", 3)
    assert code == 2
    assert said[-1].startswith("error: Expected 8-bit images")


def test_weights_with_matched_inputs_are_loaded(tmp_path: Path) -> None:
    model = load_model("digit-cnn", None, ["classes=4", "width=4", "channels=1", "image_size=16"])
    attach_input_map(model, torch.full((1, 1, 1), 0.5), torch.zeros(1, 1, 1))
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    options = ["classes=4", "width=4", "channels=1", "image_size=16"]
    again = load_model("digit-cnn", tmp_path / "w.safetensors", options)
    inputs = torch.randn(2, 1, 16, 16)
    assert torch.equal(again(inputs), model(inputs))


def test_tables_and_single_arrays(tmp_path: Path) -> None:
    path = tmp_path / "gas.csv"
    path.write_text("board,s1,s2,gas\n1,0.5,2,CO\n2,1.5,3,air\n")
    data = load_data(path, None, {"label": "gas", "classes": ("air", "CO"), "where": {"board": "1"}})
    assert data.labels is not None
    assert (data.labels.tolist(), data.classes, data.columns) == ([1], ("air", "CO"), ("s1", "s2"))
    named = data.as_table()
    assert isinstance(named, Table)
    assert named.columns == ("s1", "s2")
    np.save(tmp_path / "a.npy", np.arange(6.0).reshape(3, 2))
    array = load_data(tmp_path / "a.npy", None, {"columns": ("s1", "s2")})
    assert isinstance(array.as_table(), torch.Tensor)
    assert (array.inputs.tolist(), array.labels) == ([[0, 1], [2, 3], [4, 5]], None)
    with pytest.raises(DataError, match="--quantity"):
        load_data(tmp_path / "a.npy", None, {"quantities": ("gas",)})
    with pytest.raises(DataError, match=r"--size 8.* table"):
        load_data(path, 8)
    np.save(tmp_path / "a.npy", np.arange(6.0))
    with pytest.raises(DataError, match=r"Expected numbers \[N"):
        load_data(tmp_path / "a.npy", None)
    (tmp_path / "a.xlsx").write_bytes(b"PK")
    with pytest.raises(DataError, match=r"\.csv"):
        load_data(tmp_path / "a.xlsx", None)


def test_options_for_the_columns_of_a_table() -> None:
    assert choose_columns(None, None, None, None, None) == {}
    assert choose_columns("gas", "air, CO", None, ["note"], ["board=3", "day=a=b"]) == {
        "label": "gas",
        "classes": ("air", "CO"),
        "drop": ("note",),
        "where": {"board": "3", "day": "a=b"},
    }
    with pytest.raises(DataError, match="column=value"):
        choose_columns(None, None, None, None, ["board"])
    with pytest.raises(DataError, match="--label"):
        choose_columns(None, "air,CO", None, None, None)


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("labels", np.array([0, 2**63], np.uint64)),
        ("labels", np.array([0.0, 1e39])),
        ("inputs", np.array([[0], [2**63]], np.uint64)),
        ("inputs", np.array([[0.0], [1e39]])),
    ],
)
def test_numbers_beyond_what_models_take(tmp_path: Path, name: str, array: Any) -> None:
    np.savez(tmp_path / "data.npz", **({"inputs": np.zeros((2, 1), np.float32)} | {name: array}))
    with pytest.raises(DataError, match="every"):
        load_data(tmp_path / "data.npz", None)
