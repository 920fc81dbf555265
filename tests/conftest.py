"""What every test shares: few threads, the same seed and log at its start, and a GPU only if it asks for one."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in the background of a shell; some tests press Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
OVERRULING = "NO_COLOR FORCE_COLOR PY_COLORS GITHUB_ACTIONS TTY_COMPATIBLE TTY_INTERACTIVE COLUMNS LINES"
for name in OVERRULING.split():
    os.environ.pop(name, None)  # it would be believed, whatever a terminal or a pipe says of itself
settings.register_profile("shiftmend", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("shiftmend")

IS_AVAILABLE, DEVICE_COUNT = torch.cuda.is_available, torch.cuda.device_count
VISIBLE = "CUDA_VISIBLE_DEVICES"
SHOWN = {VISIBLE: os.environ[VISIBLE]} if VISIBLE in os.environ else {}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests without the mark `gpu` expect what a CPU gives, also where `auto` would be a GPU, and in new processes."""
    shown = item.get_closest_marker("gpu") is not None
    torch.cuda.is_available = IS_AVAILABLE if shown else lambda: False
    torch.cuda.device_count = DEVICE_COUNT if shown else lambda: 0
    os.environ.pop(VISIBLE, None)
    os.environ.update(SHOWN if shown else {VISIBLE: ""})


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _heard() -> None:
    """The command line takes the package's log for itself; give it back."""
    logger = logging.getLogger("shiftmend")
    logger.handlers, logger.propagate = [], True


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=str)
def other_default_dtype(request: pytest.FixtureRequest) -> Iterator[None]:
    """Somebody has told torch to make tensors of another precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)
