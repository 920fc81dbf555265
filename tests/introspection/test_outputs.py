from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from shiftmend.errors import TapError
from shiftmend.introspection.outputs import find_tensors, pick

ONE = torch.ones(2, 3)


@dataclass
class Outputs:
    loss: None
    logits: torch.Tensor


class Pair(NamedTuple):
    logits: torch.Tensor
    hidden: torch.Tensor


class Keyed(OrderedDict[str, Any]):
    """A dict whose entries are attributes as well, as many libraries return it."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"loss": ONE, "scores": ONE}, r"output='loss'\.$"),
        ((None, ONE, ONE), r"output=1\.$"),
        ([ONE, ONE], r"output=0\.$"),
        ({"loss": 1.5}, "entries 'loss'"),
        ({}, "an empty dict"),
        (None, "None"),
        (1.5, "a float"),
    ],
)
def test_what_is_no_tensor_gets_advice_that_works(value: Any, words: str) -> None:
    with pytest.raises(TapError, match=words):
        pick(value, None, "the model")


def test_the_only_tensor_or_the_logits_need_no_entry() -> None:
    named = [{"logits": ONE}, {"anything": ONE}, {"hidden": -ONE, "logits": ONE}, Keyed(loss=-ONE, logits=ONE)]
    for value in (*named, (None, ONE), Outputs(None, ONE), Pair(ONE, -ONE)):
        assert pick(value, None, "the model") is ONE


@pytest.mark.parametrize("entry", [0, -1, 7, "logits"])
def test_a_tensor_has_no_entries(entry: int | str) -> None:
    assert pick(ONE, None, "the model") is ONE
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TapError, match=f"under {entry!r}"):
            pick(ONE, entry, "the model")


def test_entries_are_picked_and_refused_by_name() -> None:
    assert pick({"logits": ONE}, "logits", "the model") is ONE
    assert pick((None, ONE), -1, "the model") is ONE
    for value, entry in (({"logits": ONE}, 0), ((ONE,), 3), ((ONE,), "logits"), (None, 0)):
        with pytest.raises(TapError, match=f"under {entry!r}"):
            pick(value, entry, "the model")
    with pytest.raises(TapError, match="tuple of 2"):
        pick(((ONE, ONE),), 0, "the model")


@pytest.mark.parametrize("make", [
    lambda logits: Outputs(None, logits), lambda logits: Pair(logits, logits + 1), lambda logits: Keyed(logits=logits),
])  # fmt: skip
def test_parts_with_names_are_picked_by_name(make: Callable[[torch.Tensor], Any]) -> None:
    logits = torch.randn(2, 3)
    value = make(logits)
    assert pick(value, "logits", "the model") is logits
    with pytest.raises(TapError, match="under 'scores'"):
        pick(value, "scores", "the model")


def test_what_cannot_be_picked_from_a_dataclass() -> None:
    value = Outputs(None, torch.zeros(2, 3))
    with pytest.raises(TapError, match=r"'loss'.*None"):
        pick(value, "loss", "the model")
    with pytest.raises(TapError, match=r"under 1.*Outputs"):
        pick(value, 1, "the model")


def test_all_tensors_of_a_value_are_found_also_where_it_holds_itself() -> None:
    tensors = [torch.tensor(float(index)) for index in range(5)]
    value: dict[str, Any] = {"a": [tensors[0], (tensors[1], None)], "b": Outputs(None, tensors[2]), "kind": Outputs}
    value |= {"c": Pair(tensors[3], tensors[4]), "self": value}
    assert sorted(float(tensor) for tensor in find_tensors(value)) == [0, 1, 2, 3, 4]
    with pytest.raises(TapError, match="the class Outputs"):
        pick(Outputs, None, "the model")
