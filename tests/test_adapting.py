"""Copies of a model's state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shiftmend.adapting import tensors_of
from shiftmend.models import build

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


@pytest.mark.parametrize("device", DEVICES)
def test_copies_have_the_values_and_types_of_what_they_are_copies_of(device: str) -> None:
    model = nn.Sequential(build("digit-cnn", classes=3, width=4), nn.Linear(3, 2).half()).to(device)
    with torch.no_grad():
        for number, value in enumerate(model.state_dict().values()):
            value.copy_(torch.arange(value.numel(), device=device).view_as(value) % 50 + number)
    copies = tensors_of(model)
    state = model.state_dict()
    assert list(copies) == list(state)
    assert len({value.dtype for value in state.values()}) == 3
    for name, value in state.items():
        assert copies[name].dtype == value.dtype
        assert torch.equal(copies[name], value)
        assert copies[name].data_ptr() != value.data_ptr()
