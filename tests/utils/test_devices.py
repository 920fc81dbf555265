from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from shiftmend.errors import ShiftmendError
from shiftmend.introspection.model_state import on_device
from shiftmend.utils import devices
from shiftmend.utils.devices import device_of, free_host_bytes, max_resident_bytes, resolve_device
from shiftmend.utils.gpu_sharing import share_gpu

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
    with pytest.raises(ShiftmendError, match="is available here"):
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
    with pytest.raises(ShiftmendError, match="Expected a device that"):
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


MACHINE = {"proc/meminfo": "MemTotal:       9000 kB\nMemFree:        10 kB\nMemAvailable:   8000 kB\n"}
FREE = 8000 * 1024
V1, V2 = "sys/fs/cgroup/memory/", "sys/fs/cgroup/"


def group(folder: str, limit: str, usage: int, cache: int = 0) -> dict[str, str]:
    if folder.startswith(V1):
        names, stat = ("limit_in_bytes", "usage_in_bytes"), f"inactive_file 7\ntotal_inactive_file {cache}\n"
    else:
        names, stat = ("max", "current"), f"anon 7\ninactive_file {cache}\n"
    texts = {"stat": stat, names[0]: f"{limit}\n", names[1]: f"{usage}\n"}
    return {f"{folder}memory.{name}": text for name, text in texts.items()}


@pytest.mark.parametrize(
    ("own", "files", "free"),
    [
        ("", {}, FREE),
        ("0::/\n", group(V2, "max", 500), FREE),
        ("0::/\n", group(V2, "1000", 500, cache=200), 700),
        ("0::/a/b\n", group(f"{V2}a/", "1000", 600) | group(f"{V2}a/b/", "max", 100), 400),  # the outer one counts, too
        ("0::/not/seen/from/here\n", group(V2, "1000", 600), 400),
        ("0::/\n", group(V2, "1000", 1300), 0),
        ("5:cpu:/\n4:memory:/a\n0::/\n", group(f"{V1}a/", "1000", 500, cache=200), 700),
        ("4:cpu,memory:/\n", group(V1, "9223372036854771712", 500), FREE),
        ("5:cpu:/a\n", group(f"{V1}a/", "1000", 500), FREE),  # a group of something else
    ],
)
def test_what_is_available_is_what_the_machine_and_every_group_leave(
    tmp_path: Path, own: str, files: dict[str, str], free: int
) -> None:
    for name, text in (MACHINE | {"proc/self/cgroup": own} | files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_host_bytes(tmp_path) == free


def test_odd_groups_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(MACHINE["proc/meminfo"])
    (tmp_path / "proc/self/cgroup").write_bytes(b"\n0\n0::\n4:memory\n0::/\xff\xfe/../..\n")
    assert free_host_bytes(tmp_path) == FREE


def test_elsewhere_half_of_the_memory_is_taken_to_be_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert free_host_bytes(tmp_path) == 500 * 4096
    monkeypatch.delattr(os, "sysconf")
    assert free_host_bytes(tmp_path) is None


def test_cached_memory_of_a_gpu_is_released_unless_other_threads_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: released.append("cuda"))
    devices.release_cached_memory(torch.device("cpu"))
    with share_gpu(threading.Lock()):
        devices.release_cached_memory(torch.device("cuda"))
    assert released == []
    devices.release_cached_memory(torch.device("cuda"))
    assert released == ["cuda"]
