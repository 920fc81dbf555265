"""Sealed files: each contains the SHA-256 of its own content, so that any damage is detected.

A seal detects accidents; a signature (`utils/signing.py`) detects deliberate changes. The entries `sha256`, `signer`
and `signature` are in the metadata of a safetensors file, or at the beginning of a JSON object. The signature covers
the whole file with zeros in place of hash and signature. The hash is computed afterwards, with zeros in its own place.
Large files are hashed in parts, because they may not fit into memory.
"""

from __future__ import annotations

import hashlib
import io
import re
import struct
from dataclasses import dataclass
from typing import Any, BinaryIO

from shiftmend.utils import signing
from shiftmend.utils.json import loads

_ZEROS = {"sha256": "0" * 64, "signature": "0" * 128}


_MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors format; a damaged file may claim any size."""


_BYTES_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Seal:
    """The verified seal of a file.

    Attributes:
        sealed: Whether the file contains its hash; files of earlier versions do not.
        signer: Public key of the signer in hexadecimal digits; None if the file is not signed.
    """

    sealed: bool
    signer: str | None = None

    def __str__(self) -> str:
        if not self.sealed:
            return "not sealed"
        return "intact, not signed" if self.signer is None else f"intact, signed by {self.signer}"


def blank_entries(key: signing.Key | None = None) -> dict[str, str]:
    """Return the empty entries that `seal` or `seal_json` fill in."""
    signed = {} if key is None else {"signer": key.public, "signature": _ZEROS["signature"]}
    return {"sha256": _ZEROS["sha256"], **signed}


def seal(file: BinaryIO, key: signing.Key | None = None) -> None:
    """Write the hash, and the signature if a key is given, into a safetensors file.

    Args:
        file: A file opened in mode `r+b`, whose metadata has the entries of `blank_entries`. They are overwritten.
        key: The key to sign with.
    """
    header = _read_header(file)
    if key is not None:
        header = _fill(header, "signature", key.sign(_hash(header, file)))
    header = _fill(header, "sha256", _hash(header, file))
    file.seek(0)
    file.write(header)


def seal_json(text: str, key: signing.Key | None = None) -> str:
    """Fill in the hash, and with a key the signature, of a JSON object that begins with `blank_entries`."""
    content = text.encode()
    if key is not None:
        content = _fill(content, "signature", key.sign(hashlib.sha256(content).hexdigest()))
    return _fill(content, "sha256", hashlib.sha256(content).hexdigest()).decode()


def check(file: BinaryIO, trust: str | None = None) -> Seal:
    """Verify that a safetensors file has not changed since it was sealed.

    Args:
        file: The file, open for reading at its beginning.
        trust: Public key that the file must be signed with.

    Raises:
        ValueError: If the file is not a safetensors file, was changed, or lacks the required signature.
    """
    header = _read_header(file)
    facts = loads(header[8:])
    metadata = facts.get("__metadata__") if isinstance(facts, dict) else None
    if not isinstance(metadata, dict) or "sha256" not in metadata:
        raise ValueError("it has no SHA-256")
    return _check(metadata, header, file, trust)


def check_json(text: str, trust: str | None = None) -> tuple[dict[str, Any], Seal]:
    """Parse a JSON object and verify its seal, if it has one; `trust` and errors are those of `check`.

    Returns:
        The object without the entries of the seal, and the seal.
    """
    value = loads(text)
    if not isinstance(value, dict):
        raise ValueError("it holds no object")
    if "sha256" in value:
        found = _check(value, text.encode(), io.BytesIO(), trust)
    else:
        found = Seal(False)
        _check_signer(None, trust)
    return {name: entry for name, entry in value.items() if name not in ("sha256", "signer", "signature")}, found


def _check(entries: dict[str, Any], head: bytes, rest: BinaryIO, trust: str | None) -> Seal:
    digest, signer, signature = (entries.get(name) for name in ("sha256", "signer", "signature"))
    blank = _blank(head, "sha256", digest)
    if _hash(blank, rest) != digest:
        raise ValueError("its content does not match its SHA-256")
    if (signer is None) != (signature is None):
        raise ValueError("its signature is not complete")
    _check_signer(signer, trust)
    # A signature is always verified if possible, because somebody may have changed and resealed the file.
    if signer is not None and (trust is not None or signing.is_available()):
        unsigned = _blank(blank, "signature", signature)
        if not signing.is_valid(signer, signature, _hash(unsigned, rest)):
            raise ValueError(f"its signature is not that of {signer} under this content")
    return Seal(True, signer)


def _check_signer(signer: Any, trust: str | None) -> None:
    if trust is not None and signer != trust:
        by = "not signed" if signer is None else f"signed by {str(signer)[:64]}"
        raise ValueError(f"it is {by}; expected the signature of {trust}")


def _read_header(file: BinaryIO) -> bytes:
    """Read the length and the header at the beginning of a safetensors file."""
    start = file.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else _MAX_HEADER_BYTES + 1
    if length > _MAX_HEADER_BYTES:
        raise ValueError("no safetensors file")
    return start + file.read(length)


def _hash(head: bytes, file: BinaryIO) -> str:
    """Hash `head` and the rest of a file, and restore the file's position."""
    digest, place = hashlib.sha256(head), file.tell()
    while part := file.read(_BYTES_AT_ONCE):
        digest.update(part)
    file.seek(place)
    return digest.hexdigest()


def _fill(head: bytes, name: str, value: str) -> bytes:
    return _replace(head, name, _ZEROS[name], value)


def _blank(head: bytes, name: str, value: Any) -> bytes:
    return _replace(head, name, value, _ZEROS[name])


def _replace(head: bytes, name: str, old: Any, new: str) -> bytes:
    """Replace the first occurrence of an entry's value."""
    if not isinstance(old, str) or not re.fullmatch(f"[0-9a-f]{{{len(new)}}}", old):
        raise ValueError(f"its entry {name!r} is damaged")
    found = re.search(rf'"{name}": ?"{old}"'.encode(), head)
    if found is None:
        raise ValueError(f"its entry {name!r} is damaged")
    return head[: found.start()] + found[0].replace(old.encode(), new.encode()) + head[found.end() :]
