from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from shiftmend.errors import ShiftmendError
from shiftmend.utils import devices
from shiftmend.utils.devices import device_of, placed, resolve_device, room_on

CPU = torch.device("cpu")


def test_names_and_devices_are_resolved() -> None:
    assert resolve_device("cpu") == CPU
    assert resolve_device(CPU, nn.Linear(1, 1)) == CPU
    assert device_of(nn.ReLU()) == CPU


def test_auto_is_cuda_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_device("auto") == resolve_device("auto", nn.Linear(1, 1)) == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert resolve_device("auto") == resolve_device(None, nn.Linear(1, 1)) == torch.device("cuda", 3)


@pytest.mark.slow
def test_a_gpu_is_hidden_from_tests_that_are_not_marked() -> None:
    hidden = "import os, torch; print(os.environ['CUDA_VISIBLE_DEVICES'] == '', torch.cuda.is_available())"
    told = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, check=True).stdout
    assert told.split() == ["True", "False"]


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


@pytest.mark.parametrize("wrong", [["cpu"], 0.5, {}, np.zeros(2), object, 10**30, "meta", torch.device("meta")])
def test_what_is_no_device_is_refused(wrong: object) -> None:
    with pytest.raises(ShiftmendError, match=r"^device .* is not available here; .*use 'auto' or 'cpu'$"):
        resolve_device(wrong)  # type: ignore[arg-type]


def test_none_is_auto() -> None:
    assert resolve_device(None) == resolve_device("auto")


class Counts(nn.Module):
    """Writes into one buffer and replaces another whenever it runs; others can be neither written nor compared."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("more", torch.zeros(()).expand(1))
        self.register_buffer("learnt", torch.zeros(1, requires_grad=True))
        self.register_buffer("last", torch.zeros(3))
        self.register_buffer("nothing", None)
        self.register_buffer("unknown", torch.full((1,), torch.nan).expand(4))
        self.register_buffer("graph", torch.eye(3).to_sparse())
        self.register_buffer("empty", torch.empty(3, device="meta"), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.more += 1
        self.learnt.data += 1
        self.last = x.mean(0)
        return x


def test_buffers_that_change_in_forward_are_as_before() -> None:
    model = Counts()
    before = dict(model._buffers)
    with placed(model, CPU):
        model(torch.ones(2, 3))
        assert model.calls == 1
    assert all(model._buffers[name] is value for name, value in before.items())
    assert model.calls == model.more == model.learnt == 0
    assert torch.equal(model.last, torch.zeros(3))
    assert model.last._version == 0  # not written to: a graph that holds it can still be run backward


def test_data_may_take_part_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    monkeypatch.setattr(devices, "available", lambda: 2000)
    assert room_on(torch.device("cuda", 0)) == 400
    assert room_on(CPU) == room_on(torch.device("mps")) == 800
    monkeypatch.setattr(devices, "world_size", lambda: 8)
    assert room_on(CPU) == 100
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")  # on each of two machines
    assert room_on(CPU) == 200
    monkeypatch.setattr(devices, "available", lambda: None)
    assert room_on(CPU) == 4 * 1024**3
