"""Safetensors files in which no damaged byte goes unnoticed: the metadata hold the SHA-256 of the whole file.

It is taken with 64 zeros in its own place.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

_NO_SUM = "0" * 64
UNSEALED = {"sha256": _NO_SUM}
"""What the metadata need before `sealed` can fill it in."""


def sealed(content: bytes) -> bytes:
    """The file with its sum."""
    return content.replace(_entry(_NO_SUM), _entry(hashlib.sha256(content).hexdigest()), 1)


def is_whole(content: bytes, metadata: Mapping[str, str]) -> bool:
    """Whether a file is as it was sealed; `metadata` are those read from it."""
    digest = metadata.get("sha256", "")
    if not re.fullmatch("[0-9a-f]{64}", digest):
        return False
    return hashlib.sha256(content.replace(_entry(digest), _entry(_NO_SUM), 1)).hexdigest() == digest


def _entry(digest: str) -> bytes:
    return f'"sha256":"{digest}"'.encode()
