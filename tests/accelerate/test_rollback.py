"""What a capture leaves of a model: everything as it was, in the same memory."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from shiftmend.accelerate.cuda_graphs import keep_buffers_in_place, undo_steps


class Moving(nn.Module):
    """Puts a new tensor in the place of its mean in each step."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        result: Tensor = self.inner(x - self.mean)
        return result


def state(model: nn.Module) -> list[Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def test_buffers_that_change_places_keep_what_they_hold() -> None:
    layer = nn.Module()
    layer.register_buffer("one", torch.zeros(2))
    layer.register_buffer("other", torch.ones(2))
    first, bring_back = layer.one, keep_buffers_in_place(layer)
    layer.one, layer.other = layer.other, layer.one
    bring_back()
    assert layer.one is first
    assert (layer.one.tolist(), layer.other.tolist()) == ([1.0, 1.0], [0.0, 0.0])


def test_only_buffers_that_fit_are_brought_back_and_without_a_graph() -> None:
    layer = nn.Module()
    for name, value in (("none", None), ("spread", torch.zeros(1).expand(2))):
        layer.register_buffer(name, value)
    for name in ("grown", "gone", "same", "learnt"):
        layer.register_buffer(name, torch.zeros(2))
    same, learnt, bring_back = layer.same, layer.learnt, keep_buffers_in_place(layer)
    others = {"none": torch.ones(2), "spread": torch.ones(2), "grown": torch.ones(3), "gone": None}
    for name, other in others.items():
        setattr(layer, name, other)
    layer.learnt = 2 * torch.ones(2, requires_grad=True)
    bring_back()
    assert all(layer._buffers[name] is other for name, other in others.items())
    assert layer.same is same
    assert same._version == 0
    assert layer.learnt is learnt
    assert learnt.tolist() == [2.0, 2.0]
    assert not learnt.requires_grad


def test_steps_that_leave_another_buffer_are_undone_and_not_taken_for_captured() -> None:
    model = Moving()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mean, before = model.mean, state(model)

    def warm_up() -> None:
        with undo_steps(model, optimiser):
            model(torch.ones(4, 3)).sum().backward()
            optimiser.step()
            assert not torch.equal(model.inner.weight, before[1])

    with pytest.raises(RuntimeError, match="'mean' of a Moving"):
        warm_up()
    assert model.mean is mean
    assert all(torch.equal(one, other) for one, other in zip(before, state(model), strict=True))
    assert not optimiser.state


@pytest.mark.parametrize("fails", [False, True])
def test_behind_a_warm_up_momentum_is_what_it_was_and_zero_where_it_had_not_begun(fails: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model.register_buffer("spread", torch.ones(1).expand(2))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model[0](torch.ones(4, 3)).sum().backward()
    optimiser.step()
    places = {parameter: held["momentum_buffer"] for parameter, held in optimiser.state.items()}
    begun = {parameter: value.clone() for parameter, value in places.items()}
    before = state(model)
    with pytest.raises(KeyError) if fails else nullcontext(), undo_steps(model, optimiser):
        model(torch.randn(4, 3)).square().sum().backward()
        optimiser.step()
        if fails:
            raise KeyError
    assert all(torch.equal(one, other) for one, other in zip(before, state(model), strict=True))
    found = {parameter: held["momentum_buffer"] for parameter, held in optimiser.state.items()}
    assert found.keys() == (begun.keys() if fails else set(model.parameters()))
    assert all(torch.equal(value, begun.get(parameter, torch.zeros(2))) for parameter, value in found.items())
    assert fails or all(found[parameter] is value for parameter, value in places.items())  # where a graph reads it
