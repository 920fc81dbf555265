from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from shiftmend.errors import ShiftmendError
from shiftmend.introspection.model_state import on_device
from shiftmend.utils import devices
from shiftmend.utils.devices import device_of, max_resident_bytes, resolve_device

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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_is_found_and_left_again() -> None:
    model = nn.Linear(2, 2)
    place = resolve_device("auto", model)
    assert place.type == "cuda"
    assert place.index is not None
    with on_device(model, place):
        assert device_of(model) == place
    assert device_of(model) == CPU


@pytest.mark.parametrize("wrong", [["cpu"], 0.5, {}, np.zeros(2), object, 10**30, "meta", torch.device("meta")])
def test_what_is_no_device_is_refused(wrong: object) -> None:
    with pytest.raises(ShiftmendError, match=r"^device .* is not available here; .*use 'auto' or 'cpu'$"):
        resolve_device(wrong)  # type: ignore[arg-type]


def test_none_is_auto() -> None:
    assert resolve_device(None) == resolve_device("auto")


def test_data_may_take_part_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    monkeypatch.setattr(devices, "free_host_bytes", lambda: 2000)
    assert max_resident_bytes(torch.device("cuda", 0)) == 400
    assert max_resident_bytes(CPU) == max_resident_bytes(torch.device("mps")) == 800
    monkeypatch.setattr(devices, "world_size", lambda: 8)
    assert max_resident_bytes(CPU) == 100
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")  # on each of two machines
    assert max_resident_bytes(CPU) == 200
    monkeypatch.setattr(devices, "free_host_bytes", lambda: None)
    assert max_resident_bytes(CPU) == 4 * 1024**3
