"""Safetensors files in which no damaged byte goes unnoticed: the metadata hold the SHA-256 of the whole file.

It is taken with 64 zeros in its own place. Files may be too large to be in memory at once.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from typing import BinaryIO

_NO_SUM = "0" * 64


UNSEALED = {"sha256": _NO_SUM}
"""What the metadata need before `seal` can fill it in."""


_MOST_HEADER = 100_000_000
"""Bytes, the limit of the format: a damaged file may promise any number."""


_AT_ONCE = 1 << 22


def seal(file: BinaryIO) -> None:
    """Fill in the sum of a file that is open for reading and writing."""
    header = _header(file)
    digest = _sum(header, file)
    file.seek(header.index(_entry(_NO_SUM)))
    file.write(_entry(digest))


def is_whole(file: BinaryIO) -> bool:
    """Whether a file is as it was sealed; what is no safetensors file is a `ValueError`."""
    header = _header(file)
    facts = json.loads(header[8:])
    metadata = facts.get("__metadata__") if isinstance(facts, dict) else None
    digest = str(metadata.get("sha256")) if isinstance(metadata, dict) else ""
    if not re.fullmatch("[0-9a-f]{64}", digest):
        return False
    return _sum(header.replace(_entry(digest), _entry(_NO_SUM), 1), file) == digest


def _header(file: BinaryIO) -> bytes:
    """Length and text, with which the file begins."""
    start = file.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else _MOST_HEADER + 1
    if length > _MOST_HEADER:
        raise ValueError("no safetensors file")
    return start + file.read(length)


def _sum(header: bytes, rest: BinaryIO) -> str:
    digest = hashlib.sha256(header)
    while part := rest.read(_AT_ONCE):
        digest.update(part)
    return digest.hexdigest()


def _entry(digest: str) -> bytes:
    return f'"sha256":"{digest}"'.encode()
