"""A short run of `benchmarks/fuzz.py` with a fixed seed: every reader meets a few damaged files."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuzz import Target, attack, make_targets

FILES_EACH = 25


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Target]]:
    yield make_targets(tmp_path_factory.mktemp("good"))
    logging.disable(logging.NOTSET)


@pytest.mark.slow
def test_damaged_files_are_refused_in_one_sentence_or_read(targets: list[Target]) -> None:
    assert len(targets) >= 20
    for target in targets:
        counts = attack(target, 60.0, 1, FILES_EACH)
        assert counts["tried"] == FILES_EACH
        assert counts["refused"] + counts["read"] == FILES_EACH, (target.name, counts)


def test_a_raw_error_and_a_silent_change_are_counted() -> None:
    def read_anything(path: Path) -> bytes:
        content = path.read_bytes()
        if content.startswith(b"g"):
            return content
        raise RuntimeError("nobody catches this")

    counts = attack(Target("anything", b"good " * 20, read_anything, sealed=True), 60.0, 1, 100)
    assert counts["silent change"] > 0
    assert sum(number for what, number in counts.items() if what.startswith("raw error: RuntimeError")) > 0
