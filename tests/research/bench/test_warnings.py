"""What is warned of while a cell runs is kept and not said."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from shiftmend.research.bench.cell import collected


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What a handler of the caller's hears; afterwards the library's logger is as it was."""
    heard: list[str] = []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    logger, handler = logging.getLogger("shiftmend"), Heard()
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    yield heard
    logger.removeHandler(handler)
    logger.setLevel(before[0])
    logger.propagate = before[1]


def warn(number: int) -> None:
    logging.getLogger("shiftmend.adaptation.stream").warning("batch %d went wrong", number)


def test_warnings_are_kept_each_kind_once_and_said_again_when_the_last_has_left(
    said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("shiftmend").setLevel(logging.ERROR)  # what a caller does not want to hear is kept all the same
    for _ in range(2):
        with collected() as outer:
            with collected() as inner:
                warn(1)
            warn(2)
            logging.getLogger("shiftmend").warning("another kind")
        assert (outer, inner) == (["batch 1 went wrong", "another kind"], ["batch 1 went wrong"])
    assert (said, caplog.text) == ([], "")
    assert logging.getLogger("shiftmend").level == logging.ERROR
    logging.getLogger("shiftmend").setLevel(logging.WARNING)
    warn(3)
    assert said == ["batch 3 went wrong"]
    assert "batch 3 went wrong" in caplog.text


def test_another_thread_s_warnings_are_not_this_cell_s() -> None:
    with collected() as own:
        thread = threading.Thread(target=warn, args=(1,))
        thread.start()
        thread.join()
    assert own == []
