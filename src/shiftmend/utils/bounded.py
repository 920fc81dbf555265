"""Reading files within limits: a few hundred bytes may claim, or unpack to, terabytes."""

from __future__ import annotations

import io
import math
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shiftmend.utils.devices import free_host_bytes

MAX_HEADER_BYTES = 10_000
"""Longest header of an array that NumPy itself accepts."""

_READABLE_FRACTION = 0.8
"""Largest fraction of the free memory that one array or file may take."""

MAX_UNPACKED_BYTES = 4 << 30
"""Largest size that a compressed file may unpack to."""

_BYTES_AT_ONCE = 1 << 20


def check_room(needed: int) -> None:
    """Raise `ValueError` if this number of bytes does not fit into the free memory."""
    free = free_host_bytes()
    if free is not None and needed > _READABLE_FRACTION * free:
        raise ValueError(f"it needs {needed:,} bytes, and {free:,} are free")


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def read_stream(file: _Readable) -> bytes:
    """Read a stream of unknown length, such as a compressed file, up to `MAX_UNPACKED_BYTES` and the free memory.

    Raises:
        ValueError: If the stream is longer.
    """
    free = free_host_bytes()
    # The parts and the whole are in memory together for a moment.
    limit = MAX_UNPACKED_BYTES if free is None else min(MAX_UNPACKED_BYTES, int(_READABLE_FRACTION * free / 2))
    content = io.BytesIO()
    while part := file.read(_BYTES_AT_ONCE):
        if content.tell() + len(part) > limit:
            raise ValueError(f"it unpacks to more than {limit:,} bytes")
        content.write(part)
    return content.getvalue()


def read_array_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of an `.npy` array: shape, whether it is in Fortran order, and dtype.

    Raises:
        ValueError: If there is no header, or it is longer than NumPy accepts.
    """
    start = file.read(8)
    if len(start) < 8 or start[:6] != b"\x93NUMPY":
        raise ValueError("it has no header of an array")
    newer = start[6] > 1
    length = file.read(4 if newer else 2)
    size = int.from_bytes(length, "little")
    if size > MAX_HEADER_BYTES:
        raise ValueError("the header of its array is damaged")
    header = io.BytesIO(length + file.read(size))
    read = np.lib.format.read_array_header_2_0 if newer else np.lib.format.read_array_header_1_0
    shape, by_columns, dtype = read(header, max_header_size=MAX_HEADER_BYTES)
    if any(side < 0 for side in shape):
        raise ValueError("the shape of its array is negative")
    return shape, by_columns, dtype


def read_array(file: IO[bytes], held: int | None = None) -> NDArray[Any]:
    """Read an `.npy` array of numbers, after checking that its content is complete and fits into memory.

    Args:
        file: The file, at the beginning of the array.
        held: Number of bytes in the file, if known.

    Raises:
        ValueError: If the header claims more than the file holds or memory allows, or names Python objects.
    """
    shape, by_columns, dtype = read_array_header(file)
    if dtype.hasobject:
        raise ValueError("its array holds objects, which only unpickling could read")
    needed = math.prod(shape) * dtype.itemsize
    if held is not None and needed > held:
        raise ValueError(f"its header promises {needed:,} bytes, and {held:,} are there")
    check_room(needed)
    content = bytearray(needed)
    view, done = memoryview(content), 0
    while done < needed:
        part = file.read(min(_BYTES_AT_ONCE, needed - done))
        if not part:
            raise ValueError(f"its header promises {needed:,} bytes, and {done:,} are there")
        view[done : done + len(part)] = part
        done += len(part)
    # Reading past the end makes an archive check the CRC of its member.
    file.read(1)
    flat: NDArray[Any] = np.frombuffer(content, dtype) if dtype.itemsize else np.zeros(math.prod(shape), dtype)
    return flat.reshape(shape, order="F" if by_columns else "C")
