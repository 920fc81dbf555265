"""Keys and signatures by Ed25519, from the package `cryptography`, which the extra `sign` brings."""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shiftmend.errors import ShiftmendError
from shiftmend.utils.checks import brief, require

_EXTRA = "sign"
_PURPOSE = b"shiftmend seal 1\n"
"""Prefix of the signed bytes, so that a signature cannot be used for anything else."""

_MAX_KEY_BYTES = 10_000


@dataclass(frozen=True, repr=False)
class Key:
    """A private key; `public` is its public half in hexadecimal digits, which need not be secret."""

    private: Any
    public: str

    def sign(self, digest: str) -> str:
        """Return the signature of a SHA-256, both in hexadecimal digits."""
        signature: bytes = self.private.sign(_PURPOSE + bytes.fromhex(digest))
        return signature.hex()

    def __repr__(self) -> str:
        return f"Key({self.public})"


def is_available() -> bool:
    """Tell whether signatures can be checked here."""
    return importlib.util.find_spec("cryptography") is not None


def is_valid(public: Any, signature: Any, digest: str) -> bool:
    """Tell whether a signature of a SHA-256 was made with the private key of a public key."""
    ed25519 = require("cryptography.hazmat.primitives.asymmetric.ed25519", _EXTRA)
    invalid = require("cryptography.exceptions", _EXTRA).InvalidSignature
    try:
        known = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
        known.verify(bytes.fromhex(signature), _PURPOSE + bytes.fromhex(digest))
    except (invalid, ValueError, TypeError):
        return False
    return True


def new_key(path: str | os.PathLike[str]) -> Key:
    """Make a key pair: the private key in `path`, readable by its owner only, and the public key in `path`.pub.

    Args:
        path: Path of the private key; neither file may exist.

    Raises:
        ShiftmendError: If the files exist or cannot be written.
    """
    serialization = require("cryptography.hazmat.primitives.serialization", _EXTRA)
    ed25519 = require("cryptography.hazmat.primitives.asymmetric.ed25519", _EXTRA)
    made = _as_key(ed25519.Ed25519PrivateKey.generate())
    private = made.private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    place = Path(path)
    beside = place.with_name(f"{place.name}.pub")
    try:
        if beside.exists():
            raise FileExistsError(17, "File exists", str(beside))
        # A key is never replaced, and never readable by others, not even briefly.
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(private)
        with beside.open("x", encoding="ascii") as text:
            text.write(f"{made.public}\n")
    except OSError as error:
        raise ShiftmendError(
            f"File {error.filename} cannot be written ({error.strerror}). Name another file."
        ) from error
    return made


def load_key(path: str | os.PathLike[str]) -> Key:
    """Read a private key that `new_key` wrote.

    Raises:
        ShiftmendError: If the file cannot be read or holds something else.
    """
    serialization = require("cryptography.hazmat.primitives.serialization", _EXTRA)
    ed25519 = require("cryptography.hazmat.primitives.asymmetric.ed25519", _EXTRA)
    exceptions = require("cryptography.exceptions", _EXTRA)
    try:
        with Path(path).open("rb") as file:
            private = serialization.load_pem_private_key(file.read(_MAX_KEY_BYTES), password=None)
    except (OSError, ValueError, TypeError, exceptions.UnsupportedAlgorithm, exceptions.InternalError) as error:
        said = error.strerror if isinstance(error, OSError) else "something else"
        raise ShiftmendError(f"Expected a private key at {path}, got: {said}. Try `shiftmend key new`.") from error
    if not isinstance(private, ed25519.Ed25519PrivateKey):
        raise ShiftmendError(f"Expected an Ed25519 key at {path}, got another kind. Try `shiftmend key new`.")
    return _as_key(private)


def read_public(given: str | os.PathLike[str]) -> str:
    """Read a public key: its 64 hexadecimal digits, or the file that holds them.

    Raises:
        ShiftmendError: If the argument is neither.
    """
    text = os.fspath(given)
    if not re.fullmatch("[0-9a-fA-F]{64}", text):
        try:
            with Path(given).open("rb") as file:
                text = file.read(_MAX_KEY_BYTES).decode("ascii").strip()
        except (OSError, ValueError):
            text = ""
    if not re.fullmatch("[0-9a-fA-F]{64}", text):
        raise ShiftmendError(f"Expected a public key or its file, got {brief(os.fspath(given))}. Try the .pub file.")
    return text.lower()


def _as_key(private: Any) -> Key:
    public: bytes = private.public_key().public_bytes_raw()
    return Key(private, public.hex())
