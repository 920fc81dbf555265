from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shiftmend.errors import DataError, ProfileError, ShiftmendError
from shiftmend.utils.checks import brief, check_function, check_known, counted, is_whole, kind, require


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, "None"), (3, "an int"), ("x", "a str"), (nn.Linear, "the class Linear"), (torch.zeros(2), "a Tensor")],
)
def test_kinds_are_part_of_a_sentence(value: Any, words: str) -> None:
    assert kind(value) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (3, "3"),
        ("x", "'x'"),
        (["fc"], "['fc']"),
        (torch.zeros(2), "a Tensor"),
        (np.zeros(2), "a ndarray"),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "a Sequential"),
        ("long" * 50, "a str"),
    ],
)
def test_what_is_long_is_named_by_its_kind(value: Any, words: str) -> None:
    assert brief(value) == words


def test_one_of_something_is_not_several() -> None:
    given = [(0, "epoch"), (1, "epoch"), (1200, "class folder"), (1, "entry", "entries"), (2, "entry", "entries")]
    said = [counted(*words) for words in given]
    assert said == ["0 epochs", "1 epoch", "1,200 class folders", "1 entry", "2 entries"]


def test_whole_numbers_are_those_of_python_and_numpy() -> None:
    assert all(map(is_whole, (0, -3, np.int64(4), np.uint8(1))))
    assert not any(map(is_whole, (True, np.True_, 1.0, "1", None, torch.tensor(1))))


@pytest.mark.parametrize("wrong", ["c", "", None, 3, ["a"], {"a"}, np.array(["a", "b"]), torch.zeros(2)])
def test_names_that_are_not_known_are_refused_whatever_they_are(wrong: Any) -> None:
    with pytest.raises(ProfileError, match=r"letter.*a, b"):
        check_known(wrong, ("a", "b"), "letter", ProfileError)
    check_known("a", {"a": 1}, "letter")


def test_what_cannot_be_called_is_no_function() -> None:
    check_function(None, "preprocess", "inputs")
    check_function(nn.Identity(), "preprocess", "inputs")
    with pytest.raises(DataError, match=r"preprocess.*'x'"):
        check_function("x", "preprocess", "inputs")


def test_a_package_of_an_extra_is_imported_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert require("json.decoder", "research").JSONDecoder
    monkeypatch.setitem(sys.modules, "scipy.special", None)  # type: ignore[arg-type]
    with pytest.raises(ShiftmendError, match=r"scipy.*shiftmend\[research\]"):
        require("scipy.special", "research")
    monkeypatch.delitem(sys.modules, "json.tool", raising=False)
    monkeypatch.setitem(sys.modules, "argparse", None)  # type: ignore[arg-type]
    with pytest.raises(ModuleNotFoundError, match="argparse"):
        require("json.tool", "research")
