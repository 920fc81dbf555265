from __future__ import annotations

import pytest
import torch
from torch import nn

from shiftmend.devices import device_of, placed, resolve_device
from shiftmend.errors import ShiftmendError

CPU = torch.device("cpu")


def test_names_and_devices_are_resolved() -> None:
    assert resolve_device("cpu") == CPU
    assert resolve_device(CPU, nn.Linear(1, 1)) == CPU
    assert device_of(nn.ReLU()) == CPU
    if not torch.cuda.is_available():
        assert resolve_device("auto") == resolve_device("auto", nn.Linear(1, 1)) == CPU


def test_auto_follows_a_model_that_lies_on_an_accelerator() -> None:
    assert resolve_device("auto", nn.Linear(1, 1, device="meta")) == torch.device("meta")


@pytest.mark.parametrize("name", ["cuda:99", "quantum", "", "cpu:x"])
def test_what_is_not_there_is_one_clear_error(name: str) -> None:
    with pytest.raises(ShiftmendError, match=r"is not available here; use 'auto' or 'cpu'"):
        resolve_device(name)


def test_a_model_is_moved_for_the_length_of_a_block_also_if_it_fails() -> None:
    model = nn.Linear(2, 2)
    moves: list[torch.device] = []
    model.to = lambda place: moves.append(place)  # type: ignore[method-assign, assignment]
    with placed(model, CPU):
        pass
    assert moves == []
    with pytest.raises(KeyError), placed(model, torch.device("meta")):
        raise KeyError
    assert moves == [torch.device("meta"), CPU]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_is_found_and_left_again() -> None:
    model = nn.Linear(2, 2)
    place = resolve_device("auto", model)
    assert place.type == "cuda"
    assert place.index is not None
    with placed(model, place):
        assert device_of(model) == place
    assert device_of(model) == CPU


@pytest.mark.parametrize("wrong", [["cpu"], 0.5, {}, object, 10**30, "meta", torch.device("meta")])
def test_what_is_no_device_is_refused(wrong: object) -> None:
    with pytest.raises(ShiftmendError, match=r"^device .* is not available here; .*use 'auto' or 'cpu'$"):
        resolve_device(wrong)  # type: ignore[arg-type]


def test_none_is_auto() -> None:
    assert resolve_device(None) == resolve_device("auto")
