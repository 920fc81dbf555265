from __future__ import annotations

import os
from pathlib import Path

import pytest

from shiftmend.utils.devices import free_host_bytes

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
