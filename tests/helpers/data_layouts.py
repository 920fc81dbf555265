"""Small files in the official layouts, written independently of the readers under test."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def random_images(count: int, *shape: int, seed: int = 0) -> np.ndarray:
    return rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def idx_bytes(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(struct.pack(">I", size) for size in array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_idx(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = idx_bytes(array)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_png(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def python2_pickle(value: Any) -> bytes:
    """Protocol 2 as Python 2 wrote it: byte strings without an encoding, arrays by numpy.core.multiarray."""
    return b"\x80\x02" + _python2(value) + b"."


def _python2(value: Any) -> bytes:
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        return b"K" + bytes([value]) if 0 <= value < 256 else b"J" + struct.pack("<i", value)
    if isinstance(value, bytes):
        return b"T" + struct.pack("<i", len(value)) + value if len(value) > 255 else b"U" + bytes([len(value)]) + value
    if isinstance(value, str):
        return _python2(value.encode("latin-1"))
    if value is None:
        return b"N"
    if isinstance(value, tuple):
        return b"(" + b"".join(map(_python2, value)) + b"t"
    if isinstance(value, list):
        return b"](" + b"".join(map(_python2, value)) + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(_python2(key) + _python2(item) for key, item in value.items()) + b"u"
    if isinstance(value, np.ndarray):
        empty = b"cnumpy.core.multiarray\n_reconstruct\nq\x01(cnumpy\nndarray\nq\x02K\x00\x85U\x01btRq\x03"
        kind = b"cnumpy\ndtype\n(" + _python2(value.dtype.str[1:]) + b"K\x00K\x01tR"
        order = value.dtype.str[0]
        kind += _python2((3, order, None, None, None, -1, -1, 0)) + b"b"
        fortran = value.flags.f_contiguous and not value.flags.c_contiguous
        data = value.tobytes(order="F" if fortran else "C")
        state = b"(K\x01" + _python2(tuple(value.shape)) + kind + _python2(bool(fortran)) + _python2(data) + b"t"
        return empty + state + b"b"
    raise TypeError(type(value))
