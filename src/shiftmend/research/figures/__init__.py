"""Figures of the paper. Importing this package does not import matplotlib; drawing does."""

from __future__ import annotations
