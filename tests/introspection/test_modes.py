from __future__ import annotations

import pytest
import torch
from torch import nn

from shiftmend.introspection.modes import preserve_modes


class Merging(nn.Module):
    """Adds its adapter to its weight for inference, and takes it out again to train."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.adapter = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3, 3))

    def train(self, mode: bool = True) -> Merging:
        if mode != self.training:
            self.weight.data += -self.adapter.data if mode else self.adapter.data
        return super().train(mode)


@pytest.mark.parametrize("training", [True, False])
def test_what_a_module_does_to_change_its_mode_is_undone(training: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), Merging(), nn.BatchNorm1d(3)).train(training)
    model[2].train(not training)
    weight = model[1].weight.clone()
    with preserve_modes(model):
        model.train(not training)
        assert not torch.equal(model[1].weight, weight)
    assert torch.equal(model[1].weight, weight)
    assert [module.training for module in model.modules()] == [training, training, training, not training]
