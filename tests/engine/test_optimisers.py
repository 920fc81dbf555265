"""Methods may train with any optimiser of torch: checkpoints and rollback keep its whole state."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn, optim
from worlds import sensors

import shiftmend
from shiftmend.accelerate.cuda_graphs import undo_steps
from shiftmend.engine.history import Epoch
from shiftmend.engine.method import Stage
from shiftmend.errors import AdaptationError
from shiftmend.methods.fr import FR

OPTIMISERS = {
    "adamw": lambda parameters, rate: optim.AdamW(parameters, lr=rate),
    "rmsprop": lambda parameters, rate: optim.RMSprop(parameters, lr=rate, momentum=0.5),
}


@dataclass(frozen=True, kw_only=True)
class OwnOptimiser(FR):
    """FR with another optimiser."""

    name: ClassVar[str] = "own-optimiser"
    optimiser: str = "adamw"

    def make_optimiser(self, parameters: list[nn.Parameter], stage: Stage) -> optim.Optimizer:
        return OPTIMISERS[self.optimiser](parameters, stage.learning_rate)


def same(one: nn.Module, other: nn.Module) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in one.state_dict().items())


@pytest.mark.parametrize("name", OPTIMISERS)
def test_a_run_that_is_resumed_ends_as_a_whole_one(name: str, tmp_path: Path) -> None:
    world = sensors()
    profile = world.profile()
    method = OwnOptimiser(optimiser=name, epochs=4, learning_rate=1e-3)
    whole = shiftmend.adapt(world.model, world.target, profile, method, batch_size=150, progress=False)
    assert not same(whole.model, world.model)
    assert not same(whole.model, shiftmend.adapt(world.model, world.target, profile, "fr", epochs=4).model)

    def stop(model: nn.Module, row: Epoch) -> None:
        if row.epoch == 3:
            raise InterruptedError

    file, options = tmp_path / "run", {"batch_size": 150, "progress": False}
    with pytest.raises(InterruptedError):
        shiftmend.adapt(world.model, world.target, profile, method, checkpoint=file, on_epoch=stop, **options)
    resumed = shiftmend.adapt(world.model, world.target, profile, method, checkpoint=file, **options)
    assert same(resumed.model, whole.model)
    assert [row.losses for row in resumed.history] == [row.losses for row in whole.history]


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_steps_that_are_undone_leave_an_optimiser_as_it_was(name: str, begun: bool) -> None:
    def step(model: nn.Module, optimiser: optim.Optimizer) -> None:
        optimiser.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimiser.step()

    model = nn.Linear(3, 2)
    optimiser = OPTIMISERS[name](model.parameters(), 0.1)
    if begun:
        step(model, optimiser)
    untouched = copy.deepcopy(model)
    reference = OPTIMISERS[name](untouched.parameters(), 0.1)
    reference.load_state_dict(copy.deepcopy(optimiser.state_dict()))
    with undo_steps(model, optimiser):
        for _ in range(3):
            step(model, optimiser)
        assert not same(model, untouched)
    assert same(model, untouched)
    for _ in range(2):
        step(model, optimiser)
        step(untouched, reference)
        assert same(model, untouched)


def test_an_optimiser_that_does_not_start_from_zero_is_not_captured() -> None:
    """From zeros, the step size of Rprop would stay zero, and the model would never move."""
    model = nn.Linear(3, 2)
    untouched, optimiser = copy.deepcopy(model), optim.Rprop(model.parameters())

    def warm_up() -> None:
        with undo_steps(model, optimiser):
            model(torch.ones(2, 3)).square().sum().backward()
            optimiser.step()

    with pytest.raises(RuntimeError, match="Rprop"):
        warm_up()
    assert same(model, untouched)
    assert not optimiser.state


def test_autocast_takes_a_type() -> None:
    world = sensors()
    options = {"epochs": 1, "progress": False}
    one, other = (
        shiftmend.adapt(world.model, world.target, world.profile(), "fr", autocast=given, **options)
        for given in (True, torch.bfloat16)
    )
    assert same(one.model, other.model)
    assert (one.manifest["autocast"], other.manifest["autocast"]) == (True, "torch.bfloat16")
    with pytest.raises(AdaptationError, match="bfloat16"):
        shiftmend.adapt(world.model, world.target, world.profile(), "fr", autocast=torch.float32, **options)
