"""Tables from files and data frames: columns by name, and one sentence for each kind of nonsense."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shiftmend
from shiftmend.errors import DataError, ShiftmendError
from shiftmend.inputs.feed import Feed
from shiftmend.inputs.tables import Table, match_columns, read_table

GASES = "board,gas,s1,s2,ppm\n1,CO,0.5,2,10\n1,air,0.25,3,20\n2,CO,-1.5,4,30.5\n"


def stored(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_columns_have_one_use_each(tmp_path: Path) -> None:
    path = stored(tmp_path / "gas.csv", GASES)
    table = read_table(path, label="gas", classes=["air", "CO"], drop=["ppm"], where={"board": "1"})
    assert table.columns == ("s1", "s2")
    assert table.inputs.tolist() == [[0.5, 2], [0.25, 3]]
    assert table.inputs.dtype == torch.float32
    assert table.labels is not None
    assert (table.labels.tolist(), table.labels.dtype, table.classes) == ([1, 0], torch.int64, ("air", "CO"))
    both = read_table(path, quantities=["ppm", "s2"], drop=["gas", "board"]).labels
    assert both is not None
    assert both.tolist() == [[10, 2], [20, 3], [30.5, 4]]
    numbered = read_table(path, label="board", drop=["gas"]).labels
    assert numbered is not None
    assert numbered.tolist() == [1, 1, 2]


def test_a_column_names_the_group_of_each_row(tmp_path: Path) -> None:
    path = stored(tmp_path / "gas.csv", GASES)
    table = read_table(path, label="gas", classes=["air", "CO"], group="board")
    assert table.groups == ("1", "1", "2")
    assert table.columns == ("s1", "s2", "ppm")
    assert table.ordered(["ppm", "s1"], "it").groups == table.groups
    with pytest.raises(DataError, match="patient"):
        read_table(path, group="patient")
    pytest.importorskip("scipy.io").savemat(
        tmp_path / "gas.mat", {"x": np.ones((3, 2)), "patient": np.array([7, 7, 9])}
    )
    assert read_table(tmp_path / "gas.mat", group="patient").groups == ("7", "7", "9")


def test_the_columns_of_home_are_found_by_name(tmp_path: Path) -> None:
    path = stored(tmp_path / "site.csv", "operator,1102.0,note,1100\nAnna,2,,1\nBen,4,new lamp,3\n")
    table = read_table(path, columns=["1100", "1102"], drop=["gone at the site"])
    assert table.columns == ("1100", "1102")
    assert table.inputs.tolist() == [[1, 2], [3, 4]]
    assert match_columns(["1102,5", "1100"], ["1100.0", "1102.5"], "it") == [1, 0]


@pytest.mark.parametrize(
    "content",
    [
        b"a;b\r\n0,5;1\r\n-2;3,25\r\n",
        b"a\tb\n0.5\t1\n\n-2\t3.25\n\n",
        b'\xef\xbb\xbf"a", b\n"0.5",1 \n-2,3.25\n',
        "a,b\n5e-1,1\n-2,3.25\n".encode("utf-16"),
        b"a,b,\n0.5,1,\n-2,3.25,\n",
        b",a,b\n0,0.5,1\n1,-2,3.25\n",
    ],
    ids=["decimal commas", "tabs", "quotes and a byte order mark", "utf-16", "separator at the end", "unnamed index"],
)
def test_programs_write_csv_in_their_own_ways(tmp_path: Path, content: bytes) -> None:
    table = read_table(stored(tmp_path / "a.csv", content))
    assert table.columns == ("a", "b")
    assert table.inputs.tolist() == [[0.5, 1], [-2, 3.25]]


def test_names_may_have_signs_of_western_windows(tmp_path: Path) -> None:
    assert read_table(stored(tmp_path / "a.csv", "T/°C,µ\n1,2\n".encode("latin-1"))).columns == ("T/°C", "µ")


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("", {}, "empty"),
        ("a,b\n", {}, "rows"),
        (GASES, {"where": {"board": "7"}}, "board=7"),
        (GASES, {"where": {"bord": "1"}}, "'bord'"),
        (GASES, {"label": "smell"}, "'smell'"),
        (GASES, {"label": "gas", "quantities": ["ppm"]}, "both"),
        (GASES, {}, "'gas'.* line 2.*'CO'"),
        (GASES, {"label": "gas"}, "--classes CO,air"),
        (GASES, {"label": "gas", "classes": ["CO"]}, "'air'"),
        (GASES, {"label": "ppm", "drop": ["gas"]}, "quantity"),
        (GASES, {"drop": ["board", "gas", "s1", "s2", "ppm"]}, "none"),
        ("a,b\n1,2\n3,\n", {}, "'b'.* missing .*line 3"),
        ("a,b\n1,NA\n", {}, "missing"),
        ("a,b\n1,inf\n", {}, "infinite"),
        ("a,b\n1,2,3\n", {}, "line 2"),
        ("a,b,a\n1,2,3\n", {}, "'a' twice"),
        ("0.3,0.1,0.2\n0.5,0.4,0.1\n", {}, "got values"),
        ("0.3,0.1,0.2\n0.5,0.4,0.1\n", {"columns": ["1", "2"]}, "got values"),
        (b"PK\x03\x04 a workbook", {}, "workbook"),
        (b"a,b\n\x00\x01,2\n", {}, "binary"),
        ("1100,1102,1104\n1,2,3\n", {"columns": ["1101", "1103", "1105"]}, "1101 to 1105 .*1100 to 1104.*resampling"),
        ("s1,s3,s4\n1,2,3\n", {"columns": ["s1", "s2"]}, "lacks s2; got s3, s4"),
        ("s1\n1\n", {"columns": ["s1", "s2"]}, "lacks s2; got only"),
    ],
)
def test_nonsense_gets_one_sentence(tmp_path: Path, content: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as refusal:
        read_table(stored(tmp_path / "a.csv", content), **options)
    assert "\n" not in str(refusal.value)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file"):
        read_table(tmp_path / "gone.csv")
    with pytest.raises(DataError, match="as CSV"):
        read_table(stored(tmp_path / "a.xlsx", b"PK"))


@pytest.mark.parametrize(("suffix", "package"), [(".parquet", "pyarrow"), (".mat", "scipy")])
def test_damaged_files(tmp_path: Path, suffix: str, package: str) -> None:
    pytest.importorskip(package)
    with pytest.raises(DataError, match="damaged"):
        read_table(stored(tmp_path / f"a{suffix}", b"nothing of the kind"))


def test_a_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ShiftmendError, match=r"shiftmend\[tables\]"):
        read_table(stored(tmp_path / "a.parquet", b""))


def test_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {"board": [1, 1, 2], "gas": ["CO", "air", "CO"], "s1": [0.5, None, -1.5], "s2": [2, 3, 4]}
    parquet.write_table(arrow.table(columns | {"__index_level_0__": [0, 1, 2]}), tmp_path / "gas.parquet")
    table = read_table(tmp_path / "gas.parquet", label="gas", classes=["air", "CO"], where={"board": "2"})
    assert (table.columns, table.inputs.tolist()) == (("s1", "s2"), [[-1.5, 4]])
    assert table.labels is not None
    assert table.labels.tolist() == [1]
    with pytest.raises(DataError, match=r"'s1'.* missing .*row 1"):
        read_table(tmp_path / "gas.parquet", label="gas", classes=["air", "CO"])
    with pytest.raises(DataError, match=r"'gas'.* string"):
        read_table(tmp_path / "gas.parquet")


def test_matlab(tmp_path: Path) -> None:
    io = pytest.importorskip("scipy.io")
    spectra, names = np.arange(12.0).reshape(4, 3), np.array(["A", "B", "A", "A"], dtype=object)
    variables = {"X": spectra, "y": np.arange(4.0), "site": names.reshape(4, 1), "wavelengths": np.arange(3.0)}
    io.savemat(tmp_path / "nir.mat", variables)
    table = read_table(tmp_path / "nir.mat", quantities=["y"], where={"site": "A"})
    assert torch.equal(table.inputs, torch.from_numpy(spectra[[0, 2, 3]]).float())
    assert table.labels is not None
    assert table.labels.tolist() == [0, 2, 3]
    labels = read_table(tmp_path / "nir.mat", label="site", classes=["B", "A"]).labels
    assert labels is not None
    assert labels.tolist() == [1, 0, 1, 1]
    io.savemat(tmp_path / "two.mat", variables | {"X": spectra.T, "other": spectra})
    for options, message in (
        ({}, "one matrix .*X, other"),
        ({"drop": ["other"], "quantities": ["y"]}, "transposing"),
        ({"drop": ["other"], "quantities": ["z"]}, "'z'"),
        ({"drop": ["X"], "quantities": ["site"]}, "numbers in site"),
        ({"drop": ["X"], "where": {"site": "C"}}, "site=C"),
    ):
        with pytest.raises(DataError, match=message):
            read_table(tmp_path / "two.mat", **options)  # type: ignore[arg-type]
    newer = b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM" + bytes(400)
    with pytest.raises(DataError, match="version 7"):
        read_table(stored(tmp_path / "newer.mat", newer))


def test_a_profile_remembers_columns_and_brings_tables_into_their_order() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
    inputs = torch.randn(120, 2)
    made = shiftmend.profile(model, Table(inputs, ("a", "b")))
    assert made.inputs.columns == ("a", "b")
    turned = Table(inputs.flip(1), ("b", "a"))
    found = shiftmend.verify(model, turned, made)
    assert found.to_json() == shiftmend.verify(model, inputs, made).to_json()
    result = shiftmend.adapt(model, turned, made, "match-mean", progress=False)
    assert torch.allclose(result.model.shiftmend_input_offset, torch.zeros(2), atol=1e-6)  # type: ignore[arg-type]
    assert shiftmend.profile(model, turned, like=made).inputs.columns == ("a", "b")
    with pytest.raises(DataError, match="lacks b; got c"):
        shiftmend.adapt(model, Table(inputs, ("a", "c")), made, "match-mean")


def test_labels_come_along() -> None:
    table = Table(torch.zeros(3, 2), ("a", "b"), torch.tensor([0, 1, 1]))
    labels = Feed(table).labels
    assert labels is not None
    assert labels.tolist() == [0, 1, 1]
    assert len(table) == 3
    assert Feed(torch.zeros(3, 2)).columns == ()


def test_data_frames() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({1100: [1, 2], 1102: [0.5, 1.5], "operator": ["Anna", "Ben"]})
    feed = Feed((frame[[1102, 1100]], pandas.Series([0, 1])), columns=["1100", "1102"])
    assert feed.inputs is not None
    assert feed.labels is not None
    assert (feed.columns, feed.labels.tolist()) == (("1100", "1102"), [0, 1])
    assert feed.inputs.tolist() == [[1, 0.5], [2, 1.5]]
    assert Feed(frame, columns=["1100"]).columns == ("1100",)
    whole = pandas.DataFrame({"a": pandas.array([1, 2], "Int64"), "b": [True, False]})
    assert torch.equal(Feed(whole).first(2), torch.tensor([[1.0, 1.0], [2.0, 0.0]]))
    for wrong, message in (
        (frame, "'operator'.* 'Anna'"),
        (frame.assign(operator=pandas.Timestamp(0)), "'operator'"),
        (pandas.DataFrame({"a": [1.0, np.nan]}), "'a'.* missing .*row 1"),
        (pandas.DataFrame({"a": pandas.array([1, None], "Int64"), "b": ["1", "2"]}), "'b'"),
        (pandas.DataFrame({"a": pandas.array([1, None], "Int64"), "b": [1, 2]}), "'a'.* missing"),
        (pandas.DataFrame([[1, 2]], columns=["a", "a"]), "'a' twice"),
    ):
        with pytest.raises(ShiftmendError, match=message):
            Feed(wrong)
