"""Any program has to be able to read what is printed and written, also of a run that came to no numbers."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shiftmend.errors import DataError
from shiftmend.utils.json import dumps, from_strict_json, loads, to_strict_json

TEXT = st.text(max_size=5).filter(lambda text: text not in ("NaN", "Infinity", "-Infinity"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


def no_such_number(word: str) -> NoReturn:
    raise AssertionError(f"{word} is no JSON")


@pytest.mark.slow
@given(VALUES)
def test_what_is_written_is_strict_and_comes_back(value: Any) -> None:
    read = json.loads(dumps(value), parse_constant=no_such_number)
    assert repr(from_strict_json(read)) == repr(value)  # NaN is not equal to itself


def test_tuples_become_lists_and_what_is_not_finite_text() -> None:
    given = (math.nan, math.inf, {"low": -math.inf, "sizes": (1, 2)})
    assert to_strict_json(given, "result") == ["NaN", "Infinity", {"low": "-Infinity", "sizes": [1, 2]}]


@pytest.mark.parametrize(("value", "where"), [({"a": [torch.zeros(1)]}, r"facts\.a\[0\].*a Tensor"), ({1: 2}, "facts")])
def test_what_json_does_not_have_is_refused_by_its_place(value: Any, where: str) -> None:
    with pytest.raises(DataError, match=where):
        dumps(value, "facts")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 101 + "1" + "}" * 101, "[" * 101 + "]" * 101])
def test_json_without_bottom_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"deep|Expecting"):
        loads(text)


def test_json_of_an_ordinary_depth_is_read() -> None:
    assert loads("[" * 50 + "]" * 50) is not None
    assert loads('{"a": [1, {"b": null}]}') == {"a": [1, {"b": None}]}
