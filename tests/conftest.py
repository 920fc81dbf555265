"""What every test shares: few threads, and the same seed at the start of each."""

from __future__ import annotations

import signal

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in the background of a shell; some tests press Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("shiftmend", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("shiftmend")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
