"""Random numbers of one run, of dropout and of the model: the global generators have no part in them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shiftmend.utils.gpu_sharing import has_turns

_rolled = threading.local()


class Dice:
    """A generator of random numbers on a device, which dropout draws from inside `for_dropout`.

    Functions such as `torch.rand` can be given the generator; dropout cannot, it draws from the global one of its
    device. On CUDA that one is made to stand for ours for a while, and a step that is captured meanwhile draws from
    ours ever after, whatever becomes of the global one and whichever thread replays the step. Elsewhere ours is the
    global one of the CPU, whose state is put back at the end.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, on_gpu = device, device.type == "cuda"
        if on_gpu:
            torch.cuda.init()  # which makes the global generators
        self.generator = torch.Generator(device) if on_gpu else torch.default_generator
        self._through = self.generator

    def seed(self, seed: int) -> None:
        number = seed % (1 << 63)
        if self.device.type in ("cpu", "cuda"):
            self._through.manual_seed(number)
        else:
            torch.manual_seed(number)  # dropout draws from a generator of its own there, which this seeds as well

    @contextmanager
    def for_dropout(self) -> Iterator[None]:
        """Inside, dropout draws from the generator. Threads must not be inside at the same time."""
        if self.device.type != "cuda":
            with torch.random.fork_rng(devices=[]), _kept(self.device):
                yield
            return
        usual = torch.cuda.default_generators[self.generator.device.index]
        before = usual.graphsafe_get_state()
        usual.graphsafe_set_state(self.generator)
        self._through = usual  # the same numbers; but recurrent layers only notice a new seed of the global one
        try:
            yield
        finally:
            self._through = self.generator
            usual.graphsafe_set_state(before)


@contextmanager
def _kept(device: torch.device) -> Iterator[None]:
    """The global generator of `mps`, which `fork_rng` cannot put back, is afterwards as it was."""
    if device.type != "mps":
        yield
        return
    before = torch.mps.get_rng_state()
    try:
        yield
    finally:
        torch.mps.set_rng_state(before)


@contextmanager
def rolled(device: torch.device, look: Callable[[], object]) -> Iterator[None]:
    """Inside, what a model draws in eval mode (Monte Carlo dropout, a layer of noise), or `preprocess`, follows `roll`.

    `look` runs them a first time. If nothing is drawn, the global generators are left alone, since other threads
    may use them; else they are afterwards as they were. Threads that take turns on a GPU share its generator, which
    cannot stand for several runs at once: there they are left alone, too.
    """
    if not _moved(device, look) or has_turns():
        yield
        return
    around, dice = getattr(_rolled, "dice", None), Dice(device)  # `on_epoch` of a run may verify
    try:
        with torch.random.fork_rng(devices=[]), dice.for_dropout():
            _rolled.dice = dice
            roll(0)
            yield
    finally:
        _rolled.dice = around


def roll(seed: int) -> None:
    """What they draw begins anew, as before each pass over the data; outside of `rolled` nothing is done."""
    dice: Dice | None = getattr(_rolled, "dice", None)
    if dice is not None:
        torch.default_generator.manual_seed(seed % (1 << 63))  # a model on another device may draw on the host as well
        dice.seed(seed)


def _moved(device: torch.device, look: Callable[[], object]) -> bool:
    """Whether the look draws from global generators, which are put back; what other threads draw is left alone."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    before = [generator.get_state() for generator in generators]
    look()
    moved = [not torch.equal(now.get_state(), then) for now, then in zip(generators, before, strict=True)]
    if not any(moved) or not _draws(look):
        return False
    for generator, state, drew in zip(generators, before, moved, strict=True):
        if drew:
            generator.set_state(state)
    return True


class _Drawing(TorchDispatchMode):
    """Notices operators of this thread that draw from a generator."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _draws(look: Callable[[], object]) -> bool:
    drawing = _Drawing()
    try:
        with drawing:
            look()
    except Exception:  # some operators cannot be watched
        return True
    return drawing.seen
