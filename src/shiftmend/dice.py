"""Random numbers of one run, for dropout: the global generators and runs in other threads have no part in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Dice:
    """A generator for what draws on a device, and a way to have dropout draw from it, which takes none.

    On CUDA it is one of its own, and a step that is captured while it is `thrown` draws from it ever after, whatever
    the global generator does and whichever thread replays it. Elsewhere it is the global one, put back at the end.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator(device) if device.type == "cuda" else torch.default_generator

    def seed(self, seed: int) -> None:
        self.generator.manual_seed(seed % (1 << 63))

    @contextmanager
    def thrown(self) -> Iterator[None]:
        """Inside, dropout on the device draws from the generator. Seed it inside, or on CUDA at any time."""
        if self.device.type != "cuda":
            with torch.random.fork_rng(devices=[]):
                yield
            return
        usual = torch.cuda.default_generators[self.device.index]
        before = usual.graphsafe_get_state()
        usual.graphsafe_set_state(self.generator)
        try:
            yield
        finally:
            usual.graphsafe_set_state(before)
