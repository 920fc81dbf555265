"""What the runs of one call share, and what is said of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset
from worlds import sensors

import shiftmend
from shiftmend.errors import DataError


class Counting(Dataset[Tensor]):
    """Counts how often its first sample is read."""

    def __init__(self, inputs: Tensor) -> None:
        self.inputs, self.reads = inputs, 0

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Tensor:
        self.reads += index == 0
        return self.inputs[index]


@pytest.mark.slow
def test_for_several_learning_rates_data_are_read_once_and_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    world = sensors()
    given, model = Counting(100 * world.target), copy.deepcopy(world.model)
    with torch.no_grad():
        model[0].weight *= 1.01
    result = shiftmend.adapt(
        model, given, world.profile(), "fr", learning_rate=[1e-6, 1e-5, 1e-4], epochs=1, progress=False
    )
    assert len(result.manifest["learning_rates_tried"]) == 3
    assert given.reads == 1
    assert caplog.text.count("look at the preprocessing of the target inputs") == 1
    assert caplog.text.count("not those that the profile was made with") == 1


@pytest.mark.slow
def test_for_several_learning_rates_it_is_said_once_that_there_is_nothing_to_mend(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also where the first of them diverges; and what is returned knows how the model was before, whichever it is."""
    world = sensors()
    source = world.source.repeat(4, 1)  # of fewer it would be undecided
    profile = shiftmend.profile(world.model, source)
    result = shiftmend.adapt(
        world.model, source, profile, "fr", learning_rate=[1e38, 1e-6, 1e-5], epochs=1, progress=False
    )
    assert ["failed" in run for run in result.manifest["learning_rates_tried"]] == [True, False, False]
    assert caplog.text.count("before adapting: training may do harm") == 1
    assert result.before == shiftmend.verify(world.model, source, profile, progress=False)


@pytest.mark.parametrize("call", [shiftmend.adapt, shiftmend.verify])
def test_of_inputs_that_the_model_refuses_nothing_more_is_said(
    call: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    world = sensors()
    with pytest.raises(DataError, match=r"got shape \[5\]"):
        call(world.model, 100 * world.target[:, :5], world.profile(), progress=False)
    assert caplog.text == ""
