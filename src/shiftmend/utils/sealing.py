"""Sealed safetensors files: the metadata hold the SHA-256 of the whole file, so that no damaged byte goes unnoticed.

The hash is taken with 64 zeros in its own place. Files are hashed in parts, since they may not fit into memory.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from typing import BinaryIO

_ZEROS = "0" * 64


UNSEALED = {"sha256": _ZEROS}
"""Metadata that a file needs before `seal` can fill in its hash."""


_MAX_HEADER_BYTES = 100_000_000
"""The limit of the format; a damaged file may promise any number."""


_BYTES_AT_ONCE = 1 << 22


def seal(file: BinaryIO) -> None:
    """Fill in the hash of a file that is open for reading and writing."""
    header = _read_header(file)
    digest = _hash(header, file)
    file.seek(header.index(_entry(_ZEROS)))
    file.write(_entry(digest))


def is_intact(file: BinaryIO) -> bool:
    """Say if a file is as it was sealed; raise `ValueError` if it is no safetensors file."""
    header = _read_header(file)
    facts = json.loads(header[8:])
    metadata = facts.get("__metadata__") if isinstance(facts, dict) else None
    digest = str(metadata.get("sha256")) if isinstance(metadata, dict) else ""
    if not re.fullmatch("[0-9a-f]{64}", digest):
        return False
    return _hash(header.replace(_entry(digest), _entry(_ZEROS), 1), file) == digest


def _read_header(file: BinaryIO) -> bytes:
    """Read the length and the text that a safetensors file begins with."""
    start = file.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else _MAX_HEADER_BYTES + 1
    if length > _MAX_HEADER_BYTES:
        raise ValueError("no safetensors file")
    return start + file.read(length)


def _hash(header: bytes, rest: BinaryIO) -> str:
    digest = hashlib.sha256(header)
    while part := rest.read(_BYTES_AT_ONCE):
        digest.update(part)
    return digest.hexdigest()


def _entry(digest: str) -> bytes:
    return f'"sha256":"{digest}"'.encode()
