"""The version, in one place."""

from __future__ import annotations

__version__ = "0.2.0"
