"""Random numbers that follow the seed of a run and leave the global generators as they were."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from shiftmend.utils.gpu_sharing import is_sharing_gpu

_isolated = threading.local()


class DeviceGenerator:
    """A generator of random numbers on a device, which dropout draws from inside `as_default`.

    Functions such as `torch.rand` take a generator; dropout always draws from the global one of its device. On CUDA,
    `as_default` makes the global generator share the state of this one. A step that is captured meanwhile goes on
    drawing from this state, whichever thread replays the step. On other devices this is the global generator of the
    CPU, whose state `as_default` restores.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, on_gpu = device, device.type == "cuda"
        if on_gpu:
            # The global generators do not exist before.
            torch.cuda.init()
        self.generator = torch.Generator(device) if on_gpu else torch.default_generator
        self._seeded = self.generator

    def seed(self, seed: int) -> None:
        """Restart from a seed, which may be any integer."""
        number = seed % (1 << 63)
        if self.device.type in ("cpu", "cuda"):
            self._seeded.manual_seed(number)
        else:
            # Dropout on such a device draws from a generator of its own, which torch.manual_seed reaches.
            torch.manual_seed(number)

    @contextmanager
    def as_default(self) -> Iterator[None]:
        """Let dropout draw from this generator; no two threads may be inside at the same time."""
        if self.device.type != "cuda":
            with torch.random.fork_rng(devices=[]), _restore_mps() if self.device.type == "mps" else nullcontext():
                yield
            return
        default = torch.cuda.default_generators[self.generator.device.index]
        before = default.graphsafe_get_state()
        default.graphsafe_set_state(self.generator)
        # Recurrent layers notice a new seed of the global generator only.
        self._seeded = default
        try:
            yield
        finally:
            self._seeded = self.generator
            default.graphsafe_set_state(before)


@contextmanager
def _restore_mps() -> Iterator[None]:
    """Restore the generator of `mps`, which `fork_rng` leaves out."""
    before = torch.mps.get_rng_state()
    try:
        yield
    finally:
        torch.mps.set_rng_state(before)


@contextmanager
def isolate_rng(device: torch.device, first_pass: Callable[[], object]) -> Iterator[bool]:
    """Let a model that draws random numbers in eval mode, as Monte Carlo dropout does, follow `reseed`.

    `first_pass` runs the model and `preprocess` once, to find out whether they draw random numbers. The block gets the
    answer. If nothing is drawn, the global generators stay untouched, because other threads may use them. Otherwise
    their states are restored at the end. Threads that share a GPU share its generator, and nothing is isolated there.
    """
    draws = _draws(device, first_pass)
    if not draws or is_sharing_gpu():
        yield draws
        return
    # A callback of a run may verify, so blocks may be nested.
    outer, generator = getattr(_isolated, "generator", None), DeviceGenerator(device)
    try:
        with torch.random.fork_rng(devices=[]), generator.as_default():
            _isolated.generator = generator
            reseed(0)
            yield True
    finally:
        _isolated.generator = outer


def reseed(seed: int) -> None:
    """Restart the generators of `isolate_rng`, as before each pass over the data; do nothing outside of it."""
    generator: DeviceGenerator | None = getattr(_isolated, "generator", None)
    if generator is not None:
        # A model on another device may draw on the host as well.
        torch.default_generator.manual_seed(seed % (1 << 63))
        generator.seed(seed)


@contextmanager
def preserve_rng(device: torch.device) -> Iterator[list[torch.Generator]]:
    """Restore the global generators of the host and the device at the end of the block.

    The yielded list is empty inside the block and holds the generators that had moved afterwards. The others are not
    written to, since other threads may use them.
    """
    generators = [torch.default_generator]
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    before = [generator.get_state() for generator in generators]
    moved: list[torch.Generator] = []
    try:
        yield moved
    finally:
        for generator, state in zip(generators, before, strict=True):
            if not torch.equal(generator.get_state(), state):
                generator.set_state(state)
                moved.append(generator)


def _draws(device: torch.device, run: Callable[[], object]) -> bool:
    """Call a function, tell whether it drew from a global generator, and restore that generator."""
    with preserve_rng(device) as moved:
        run()
    return bool(moved)
