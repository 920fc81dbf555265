"""Benchmarks: what to run, a runner that can be stopped, tables that stand beside the paper's."""

from __future__ import annotations
