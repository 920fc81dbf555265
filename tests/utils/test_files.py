from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shiftmend.errors import DataError, ShiftmendError
from shiftmend.utils.files import (
    alone_with,
    as_path,
    check_folder,
    replacing,
    said_where,
    write_atomically,
    writing_folder,
)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.mark.parametrize("content", [b"", b"x", bytes(range(256)) * 5000], ids=len)
def test_writes_exactly_the_content(content: bytes, tmp_path: Path) -> None:
    write_atomically(tmp_path / "file", content)
    assert (tmp_path / "file").read_bytes() == content
    write_atomically(str(tmp_path / "file"), content + b"!")
    assert (tmp_path / "file").read_bytes() == content + b"!"
    assert names(tmp_path) == ["file"]


def test_makes_missing_folders(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a" / "b" / "file", b"content")
    assert (tmp_path / "a" / "b" / "file").read_bytes() == b"content"


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_a_new_file_gets_what_the_umask_gives(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "file", b"content")
        assert os.umask(umask) == umask  # looked at, not changed
    finally:
        os.umask(before)
    assert mode(tmp_path / "file") == 0o666 & ~umask


@pytest.mark.parametrize("permissions", [0o600, 0o640, 0o755])
def test_an_existing_file_keeps_its_permissions(permissions: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(permissions)
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert mode(path) == permissions


def test_a_link_stays_one(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere" / "file")
    for content in (b"first", b"second"):
        write_atomically(link, content)
        assert link.is_symlink()
        assert (tmp_path / "elsewhere" / "file").read_bytes() == content
    assert names(tmp_path / "elsewhere") == ["file"]


def test_what_is_no_file_is_written_into_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomically(pipe, b"content")
        assert os.read(reader, 100) == b"content"
    finally:
        os.close(reader)
    with pytest.raises(FileExistsError, match="device or a pipe"), replacing(pipe):
        pytest.fail("a file would take its place")
    assert pipe.is_fifo()
    assert names(tmp_path) == ["pipe"]


@pytest.mark.parametrize("step", ["replace", "fsync", "chmod"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "ctrl-c"])
@pytest.mark.parametrize("existing", [True, False])
def test_a_failure_leaves_everything_as_it_was(
    step: str, error: BaseException, existing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    if existing:
        path.write_bytes(b"old")

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(type(error)):
        write_atomically(path, b"new")
    monkeypatch.undo()
    assert names(tmp_path) == (["file"] if existing else [])
    assert not existing or path.read_bytes() == b"old"


def leave_behind(folder: Path, name: str, seconds: float = 60) -> Path:
    """Make what a killed process leaves: a folder with half a file."""
    left = folder / name
    left.mkdir()
    (left / "file").write_bytes(b"half")
    os.utime(left, (left.stat().st_mtime - seconds,) * 2)
    return left


def test_what_a_killed_process_has_left_goes_and_nothing_else(tmp_path: Path) -> None:
    path, others = tmp_path / "run[1]", [".run[1].rate-0.1.a1b2c3_4.partial", ".run1.a1b2c3_4.partial"]
    leave_behind(tmp_path, ".run[1].t4iscpfp.partial")
    for name in others:
        leave_behind(tmp_path, name)
    write_atomically(path, b"whole")
    assert names(tmp_path) == sorted([*others, "run[1]"])


@pytest.mark.slow
def test_what_a_living_process_writes_stays(tmp_path: Path) -> None:
    with replacing(tmp_path / "file") as (place,):
        os.utime(place.parent, (0, 0))
        script = "import sys; from shiftmend.utils.files import write_atomically as w; w(sys.argv[1], b'b')"
        subprocess.run([sys.executable, "-c", script, str(tmp_path / "file")], check=True)
        assert (tmp_path / "file").read_bytes() == b"b"
        place.write_bytes(b"a")
    assert (tmp_path / "file").read_bytes() == b"a"
    assert names(tmp_path) == ["file"]


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_bytes(b"old")
    (tmp_path / ".file.a1b2c3d4.partial").symlink_to(tmp_path / "precious")
    os.utime(tmp_path / "precious", (0, 0))
    write_atomically(tmp_path / "file", b"new")
    assert (tmp_path / "precious" / "file").read_bytes() == b"old"


def test_a_new_folder_appears_in_one_step(tmp_path: Path) -> None:
    home = tmp_path / "new" / "folder"
    leave_behind(tmp_path, "new")
    leave_behind(tmp_path / "new", ".folder.a1b2c3d4.partial")
    with writing_folder(home, ("a", "b")) as places:
        for place in places:
            place.write_bytes(b"1")
        assert not home.exists()
    assert names(home) == ["a", "b"]
    assert names(home.parent) == ["file", "folder"]
    assert mode(home / "a") == mode(tmp_path / "new" / "file")
    with contextlib.suppress(KeyboardInterrupt), writing_folder(home, ("a", "b")) as (first, _):
        first.write_bytes(b"2")
        raise KeyboardInterrupt
    assert (home / "a").read_bytes() == b"1"
    leave_behind(tmp_path / "new", ".folder.a1b2c3d4.partial")
    with writing_folder(home, ("a", "c")) as places:
        for place in places:
            place.write_bytes(b"3")
    assert {name: (home / name).read_bytes() for name in names(home)} == {"a": b"3", "b": b"1", "c": b"3"}
    assert names(home.parent) == ["file", "folder"]


def test_is_whole_on_the_disk_it_is_for_before_it_is_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[str, Any]] = []
    synchronise, replace = os.fsync, os.replace

    def fsync(handle: int) -> None:
        steps.append(("fsync", os.fstat(handle).st_size))
        synchronise(handle)

    def put(temporary: str, target: Path) -> None:
        steps.append(("replace", Path(temporary).parents[1]))
        replace(temporary, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", put)
    write_atomically(tmp_path / "file", b"content")
    assert steps == [("fsync", len(b"content")), ("replace", tmp_path)]


def test_a_reader_of_the_old_file_is_not_disturbed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old content")
    with path.open("rb") as reader:
        assert reader.read(4) == b"old "
        write_atomically(path, b"new")
        assert reader.read() == b"content"


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="is a folder"):
        write_atomically(tmp_path, b"content")
    assert names(tmp_path) == []


def test_a_failed_write_names_the_result_and_not_a_temporary_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    sentence = r"file/below.*(Not a directory|File exists)"
    with pytest.raises(DataError, match=sentence), said_where(file / "below"):
        write_atomically(file / "below", b"content")


def test_a_folder_that_cannot_be_written_to_is_refused_beforehand(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    check_folder(tmp_path)
    check_folder(tmp_path / "new" / "newer")
    assert names(tmp_path) == ["file"]
    with pytest.raises(ShiftmendError, match="Expected a folder"):
        check_folder(file)
    with pytest.raises(ShiftmendError, match="made below the file"):
        check_folder(file / "below")
    with pytest.raises(ShiftmendError, match="File name too long"):
        check_folder(tmp_path / ("x" * 300))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused_beforehand(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(ShiftmendError, match="no permission"):
            check_folder(tmp_path / "new")
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize("wrong", [None, 3, "", [], b"folder"])
def test_what_is_no_name_is_refused(wrong: Any) -> None:
    with pytest.raises(ShiftmendError, match=r"Expected a name.*folder"):
        check_folder(wrong)
    assert as_path("a/b", "the file") == as_path(Path("a/b"), "the file") == Path("a/b")


def test_a_lock_that_cannot_be_opened_is_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def others(path: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", others)  # root may open anything
    with pytest.raises(DataError, match=r"\.run\.lock.*Permission denied"), alone_with(tmp_path / "run"):
        pytest.fail("nobody knows whether it is alone")
    assert names(tmp_path) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_worker_that_outlives_its_process_does_not_hold_its_lock(tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from shiftmend.utils.files import alone_with
begun, tell = os.pipe()
with alone_with(Path(sys.argv[1])) as alone:
    if not os.fork():
        os.write(tell, b".")
        sys.stdin.read()  # until the test is over
        os._exit(0)
    os.read(begun, 1)
    print(alone, flush=True)
    os._exit(0)  # as if killed
"""
    command = [sys.executable, "-c", script, str(tmp_path / "file")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"True\n"
        assert process.wait() == 0
        with alone_with(tmp_path / "file") as alone:
            assert alone


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_that_leaves_the_block_does_not_delete_the_lock(tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from shiftmend.utils.files import alone_with
with alone_with(Path(sys.argv[1])):
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        with alone_with(Path(sys.argv[1])) as second:
            print(second)
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "file")], capture_output=True, check=True)
    assert done.stdout == b"False\n"
