"""Random numbers that follow the seed of a run and leave the global generators unchanged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from shiftmend.utils.gpu_sharing import is_sharing_gpu

_isolated = threading.local()


class DeviceGenerator:
    """A random number generator on a device, from which dropout draws inside `as_default`.

    Functions such as `torch.rand` take a generator, but dropout always draws from the global generator of its device.
    On CUDA, `as_default` makes the global generator share the state of this one. A step that is captured inside keeps
    drawing from this state, whichever thread replays it. On other devices, this is the global generator of the CPU,
    whose state `as_default` restores.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, on_gpu = device, device.type == "cuda"
        if on_gpu:
            # The global generators do not exist before this call.
            torch.cuda.init()
        self.generator = torch.Generator(device) if on_gpu else torch.default_generator
        self._seeded = self.generator

    def seed(self, seed: int) -> None:
        """Reseed the generator with any integer."""
        number = seed % (1 << 63)
        if self.device.type in ("cpu", "cuda"):
            self._seeded.manual_seed(number)
        else:
            # Dropout on such a device uses its own generator, which torch.manual_seed seeds.
            torch.manual_seed(number)

    @contextmanager
    def as_default(self) -> Iterator[None]:
        """Make dropout draw from this generator; only one thread may be inside at a time."""
        if self.device.type != "cuda":
            with torch.random.fork_rng(devices=[]), _restore_mps() if self.device.type == "mps" else nullcontext():
                yield
            return
        default = torch.cuda.default_generators[self.generator.device.index]
        before = default.graphsafe_get_state()
        default.graphsafe_set_state(self.generator)
        # Recurrent layers only notice a new seed of the global generator.
        self._seeded = default
        try:
            yield
        finally:
            self._seeded = self.generator
            default.graphsafe_set_state(before)


@contextmanager
def _restore_mps() -> Iterator[None]:
    """Restore the generator of `mps`, which `fork_rng` does not cover."""
    before = torch.mps.get_rng_state()
    try:
        yield
    finally:
        torch.mps.set_rng_state(before)


@contextmanager
def isolate_rng(device: torch.device, first_pass: Callable[[], object]) -> Iterator[bool]:
    """Make a model that draws random numbers in eval mode, such as Monte Carlo dropout, follow `reseed`.

    `first_pass` runs the model and `preprocess` once, to test whether they draw random numbers; the block receives the
    result. If they do not, the global generators are left alone, because other threads may use them. Otherwise, their
    states are restored at the end. Threads that share a GPU share its generator, so nothing is isolated there.
    """
    draws = _draws(device, first_pass)
    if not draws or is_sharing_gpu():
        yield draws
        return
    # Blocks may be nested, because a callback of a run may verify.
    outer, generator = getattr(_isolated, "generator", None), DeviceGenerator(device)
    try:
        with torch.random.fork_rng(devices=[]), generator.as_default():
            _isolated.generator = generator
            reseed(0)
            yield True
    finally:
        _isolated.generator = outer


def reseed(seed: int) -> None:
    """Reseed the generators of `isolate_rng` before each pass over the data; do nothing outside of it."""
    generator: DeviceGenerator | None = getattr(_isolated, "generator", None)
    if generator is not None:
        # A model on another device may also draw on the host.
        torch.default_generator.manual_seed(seed % (1 << 63))
        generator.seed(seed)


@contextmanager
def preserve_rng(device: torch.device) -> Iterator[list[torch.Generator]]:
    """Restore the global generators of the host and the device at the end of the block.

    The yielded list is empty inside the block, and contains the generators that had changed afterwards. The others are
    not written to, because other threads may use them.
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
    """Call a function, return whether it drew from a global generator, and restore that generator."""
    with preserve_rng(device) as moved:
        run()
    return bool(moved)
