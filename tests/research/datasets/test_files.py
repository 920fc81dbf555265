"""Where files are looked for, and pickles that must run nothing."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_layouts import python2_pickle, random_images
from hypothesis import given
from hypothesis import strategies as st

from shiftmend.errors import DataError
from shiftmend.research.datasets.files import data_root, read_pickled_arrays

PATH = Path("data_batch_1")


def test_root_is_the_argument_then_the_environment_then_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SHIFTMEND_DATA", str(tmp_path))
    assert data_root() == tmp_path
    assert data_root("/elsewhere") == Path("/elsewhere")
    assert data_root("~/sets") == Path.home() / "sets"
    for empty in ("", None):
        if empty is None:
            monkeypatch.delenv("SHIFTMEND_DATA")
        else:
            monkeypatch.setenv("SHIFTMEND_DATA", empty)
        with pytest.raises(DataError, match="export SHIFTMEND_DATA="):
            data_root()


@pytest.mark.slow
def test_pillow_is_not_imported_with_the_package() -> None:
    code = "import sys, shiftmend.research.datasets; sys.exit('PIL' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("kind", ["u1", "<i2", ">i4", "<f4", "<f8", "<u8"])
def test_arrays_as_python_2_wrote_them(kind: str) -> None:
    array = (np.arange(24).reshape(4, 6) * 3).astype(kind)
    content = python2_pickle({"data": array, "columns": np.asfortranarray(array), "labels": [0, 255, 70_000]})
    # the stream is what it claims to be: Python's own reader understands it
    theirs = pickle.loads(content, encoding="latin1")
    ours = read_pickled_arrays(content, PATH)
    assert ours.keys() == theirs.keys()
    for key in ("data", "columns"):
        np.testing.assert_array_equal(ours[key], theirs[key])
        np.testing.assert_array_equal(ours[key], array)
        assert ours[key].dtype == array.dtype
    assert ours["labels"] == theirs["labels"]


@pytest.mark.parametrize("protocol", [3, 4])
def test_arrays_as_python_3_writes_them(protocol: int) -> None:
    array = random_images(3, 5)
    content = pickle.dumps({"data": array, "labels": list(range(3000)), "name": "näme"}, protocol)
    read = read_pickled_arrays(content, PATH)
    np.testing.assert_array_equal(read["data"], array)
    assert read["labels"] == list(range(3000))
    assert read["name"] == "näme"


@pytest.mark.parametrize("protocol", range(6))
def test_every_protocol_builds_what_python_builds(protocol: int) -> None:
    names = [f"{number}.png" for number in range(300)]  # more than one byte can number
    tuples = [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)]
    value = {"names": names, "again": [*names[::-1]], "tuples": tuples, "one": [{"key": -0.5}], "flags": [True, None]}
    content = pickle.dumps(value, protocol)
    assert pickle.loads(content) == value
    assert read_pickled_arrays(content, PATH) == value


def test_a_dictionary_written_all_at_once() -> None:
    content = b"(S'a'\nI1\nS'b'\n(I2\nI3\nld."
    assert read_pickled_arrays(content, PATH) == pickle.loads(content) == {"a": 1, "b": [2, 3]}
    with pytest.raises(DataError, match="was not read"):
        read_pickled_arrays(b"(S'a'\nI1\nS'b'\nd.", PATH)


def test_one_array_named_twice_is_read_once() -> None:
    array = random_images(2, 2)
    read = read_pickled_arrays(pickle.dumps({"a": array, "b": array}, 3), PATH)
    assert read["a"] is read["b"]


class Malicious:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path: Path, protocol: int) -> None:
    mark = tmp_path / "was-run"
    for payload in (
        Malicious(os.mkdir, str(mark)),
        {"data": Malicious(eval, f"__import__('os').mkdir({str(mark)!r})")},
    ):
        content = pickle.dumps(payload, protocol)
        with pytest.raises(DataError, match=r"data_batch_1.*(asks to run|instruction)"):
            read_pickled_arrays(content, PATH)
        assert not mark.exists()
        pickle.loads(content)  # the payload works where pickles are trusted
        assert mark.exists()
        mark.rmdir()


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02cposix\nsystem\nU\x02ls\x85R.",  # a call of a name that is not allowed
        b"\x80\x02cnumpy\nload\n.",  # another function of NumPy
        b"\x80\x02cnumpy\nndarray\nK\x03K\x03\x86R.",  # calling the array type itself
        b"\x80\x02}(U\x01aK\x01u}b.",  # altering a dictionary
        b"\x80\x02cnumpy\nndarray\n}(U\x01aK\x01ub.",  # altering a type
        b"(S'ls'\nios\nsystem\n.",  # INST
        b"\x80\x02cnumpy\nndarray\n)\x81.",  # NEWOBJ
        b"\x80\x02\x82\x01.",  # EXT1
        b"P1\n.",  # a persistent object
        b"\x80\x04\x96\xff\xff\xff\xff\xff\x00\x00\x00.",  # BYTEARRAY8, of a terabyte
        b"\x80\x02}r\xff\xff\xff\x7f.",  # the two thousand millionth object: its table would take 32 GB
        b"p999999999999\n.",
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n}(U\x01aK\x01ub.",  # altering the function
        b"\x80\x02cnumpy\ndtype\nU\x01O\x85RU\x01O\x85b.",  # a type of objects, with a short state
    ],
)
def test_instructions_beyond_arrays_are_refused(content: bytes) -> None:
    with pytest.raises(DataError, match="was not read"):
        read_pickled_arrays(content, PATH)


def test_keys_may_be_bytes() -> None:
    assert read_pickled_arrays(pickle.dumps({b"data": 1}, 3), PATH) == {"data": 1}


def test_arrays_of_objects_or_text_are_refused() -> None:
    with pytest.raises(DataError, match=r"not read.*\|S3"):
        read_pickled_arrays(python2_pickle({"data": np.array([b"abc"])}), PATH)
    with pytest.raises(DataError, match="was not read"):
        read_pickled_arrays(pickle.dumps({"data": np.array([{}, []], dtype=object)}, 2), PATH)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x02}",
        b"nonsense",
        pickle.dumps([1, 2], 2),
        pickle.dumps({1: 2}, 2),
        python2_pickle({"a": 1})[:-2],
        b"\x80\x02}(U\x01aK\x01U\x01bu.",  # a key without a value
    ],
)
def test_damage_is_a_data_error(content: bytes) -> None:
    with pytest.raises(DataError, match="data_batch_1"):
        read_pickled_arrays(content, PATH)


def test_an_array_with_too_few_bytes_is_damage() -> None:
    content = python2_pickle({"data": random_images(4, 100)})
    assert content.count(b"K\x04Kd") == 1
    with pytest.raises(DataError, match="400 bytes"):
        read_pickled_arrays(content.replace(b"K\x04Kd", b"K\x05Kd"), PATH)


@given(st.binary(max_size=200))
def test_any_bytes_give_a_dictionary_or_a_data_error(content: bytes) -> None:
    with contextlib.suppress(DataError):
        assert isinstance(read_pickled_arrays(content, PATH), dict)


_PLAIN = st.recursive(
    st.integers(-(2**40), 2**40) | st.text(max_size=5) | st.booleans() | st.none() | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)


@pytest.mark.slow
@given(st.dictionaries(st.text(max_size=4), _PLAIN, max_size=4), st.sampled_from([3, 4]))
def test_plain_data_reads_as_python_reads_it(value: dict[str, Any], protocol: int) -> None:
    stream = io.BytesIO()
    pickle.Pickler(stream, protocol).dump(value)
    assert read_pickled_arrays(stream.getvalue(), PATH) == value
