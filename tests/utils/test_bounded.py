from __future__ import annotations

import bz2
import gzip
import io
import zipfile
from pathlib import Path

import numpy as np
import pytest

from shiftmend.errors import DataError
from shiftmend.inputs.arrays import npz_file
from shiftmend.research.datasets.files import read_whole
from shiftmend.utils import bounded
from shiftmend.utils.bounded import read_array, read_array_header, read_stream

TERABYTE = 1 << 40


def header(shape: tuple[int, ...], descr: str = "|u1") -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue()


@pytest.mark.parametrize("dtype", ["u1", ">i2", "<f8", "?", "c8", "U3", [("x", "i4"), ("y", "f4")]])
@pytest.mark.parametrize("order", ["C", "F"])
def test_reads_what_numpy_writes(dtype: object, order: str) -> None:
    array = np.zeros((3, 4, 5), dtype=dtype, order=order)  # type: ignore[call-overload]
    array.reshape(-1)[:2] = 1
    file = io.BytesIO()
    np.save(file, array)
    file.seek(0)
    found = read_array(file, len(file.getvalue()))
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)
    assert found.flags.writeable


def test_no_elements() -> None:
    file = io.BytesIO()
    np.save(file, np.zeros((0, 3), "f4"))
    file.seek(0)
    assert read_array(file, len(file.getvalue())).shape == (0, 3)


def test_a_header_that_promises_more_than_there_is(tmp_path: Path) -> None:
    path = tmp_path / "small.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("images.npy", header((TERABYTE, 8, 8)) + bytes(64))
    assert path.stat().st_size < 500
    with pytest.raises(DataError, match="promises"):
        npz_file(path)


def test_an_archive_that_unpacks_to_more_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bomb.npz"
    np.savez_compressed(path, images=np.zeros((1000, 32, 32), np.uint8))
    monkeypatch.setattr(bounded, "free_host_bytes", lambda: 1 << 19)
    with pytest.raises(DataError, match="are free"):
        npz_file(path)


def test_a_long_header_is_not_read() -> None:
    endless = b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + b" " * 100
    with pytest.raises(ValueError, match="header"):
        read_array_header(io.BytesIO(endless))


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".bz2", bz2.compress)])
def test_a_compressed_file_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, pack: object
) -> None:
    path = tmp_path / f"images{suffix}"
    path.write_bytes(pack(bytes(4 << 20)))  # type: ignore[operator]
    assert len(read_whole(path, "images", "fetch them")) == 4 << 20
    monkeypatch.setattr(bounded, "MAX_UNPACKED_BYTES", 3 << 20)
    with pytest.raises(DataError, match="unpacks to more"):
        read_whole(path, "images", "fetch them")


def test_a_stream_within_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "free_host_bytes", lambda: 1 << 20)
    assert read_stream(io.BytesIO(bytes(1000))) == bytes(1000)
    with pytest.raises(ValueError, match="more than"):
        read_stream(io.BytesIO(bytes(1 << 20)))
