from __future__ import annotations

import io
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest

from shiftmend.errors import DataError
from shiftmend.research.datasets.download import unpack

FILES = {"set/a.txt": b"alpha", "set/sub/b.txt": b"beta" * 1000, "other/c.txt": b"gamma"}


def make_tar(path: Path, files: dict[str, bytes], mode: str = "w:gz") -> None:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        folder = tarfile.TarInfo("set")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def make_zip(path: Path, files: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("set/", b"")
        for name, content in files.items():
            archive.writestr(name, content)


@pytest.fixture(params=["tar", "tar.gz", "zip"])
def archive(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / f"files.{request.param}"
    if request.param == "zip":
        make_zip(path, FILES)
    else:
        make_tar(path, FILES, "w" if request.param == "tar" else "w:gz")
    return path


def test_everything(archive: Path, tmp_path: Path) -> None:
    told: list[int] = []
    assert unpack(archive, tmp_path / "out", report=told.append) == 3
    assert told == [1, 2, 3]
    found = {p.relative_to(tmp_path / "out").as_posix(): p.read_bytes() for p in (tmp_path / "out").rglob("*.*")}
    assert found == FILES


def test_some_of_it_without_its_folder(archive: Path, tmp_path: Path) -> None:
    assert unpack(archive, tmp_path / "out", only="set/", drop=1) == 2
    assert (tmp_path / "out/a.txt").read_bytes() == b"alpha"
    assert (tmp_path / "out/sub/b.txt").read_bytes() == FILES["set/sub/b.txt"]
    assert not (tmp_path / "out/c.txt").exists()
    assert unpack(archive, tmp_path / "deep", only="set/sub/", drop=2) == 1
    assert unpack(archive, tmp_path / "deep", drop=2) == 1  # of the others nothing is left
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["b.txt"]
    with pytest.raises(DataError, match=r"holds no file absent/\*"):
        unpack(archive, tmp_path / "out", only="absent/")


def test_again_over_what_is_there(archive: Path, tmp_path: Path) -> None:
    (tmp_path / "out/set").mkdir(parents=True)
    (tmp_path / "out/set/a.txt").write_bytes(b"half")
    unpack(archive, tmp_path / "out")
    assert (tmp_path / "out/set/a.txt").read_bytes() == b"alpha"


@pytest.mark.parametrize("kind", ["tar", "zip"])
@pytest.mark.parametrize(
    "name", ["../escaped.txt", "set/../../escaped.txt", "/tmp/escaped.txt", "..\\escaped.txt", "C:\\x.txt", "."]
)
def test_names_that_lead_out_are_refused(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / f"bad.{kind}"
    (make_tar if kind == "tar" else make_zip)(path, {name: b"x"})
    inside = tmp_path / "deep" / "out"
    with pytest.raises(DataError, match="leads out of the folder"):
        unpack(path, inside)
    assert sorted(p.name for p in tmp_path.rglob("*.txt")) == []


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_devices_in_tar_are_refused(tmp_path: Path, kind: bytes) -> None:
    path = tmp_path / "bad.tar"
    with tarfile.open(path, "w") as archive:
        info = tarfile.TarInfo("set/link")
        info.type = kind
        info.linkname = "/etc/passwd"
        archive.addfile(info)
        inner = tarfile.TarInfo("set/link/file")
        archive.addfile(inner, io.BytesIO())
    with pytest.raises(DataError, match="is a link or a device"):
        unpack(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_links_and_encryption_in_zip_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.zip"
    with zipfile.ZipFile(path, "w") as archive:
        info = zipfile.ZipInfo("link")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(info, "/etc/passwd")
    with pytest.raises(DataError, match="'link' is a link or a device"):
        unpack(path, tmp_path / "out")
    make_zip(path, {"secret.txt": b"x"})
    content = bytearray(path.read_bytes())
    content[content.rindex(b"PK\1\2") + 8] |= 1  # its flags in the list of members
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"'secret\.txt' is encrypted"):
        unpack(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_archive(archive: Path, tmp_path: Path) -> None:
    whole = archive.read_bytes()
    archive.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"files\..* could not be unpacked"):
        unpack(archive, tmp_path / "out")
    assert not list(tmp_path.rglob("*.partial"))
    archive.write_bytes(b"no archive at all")
    with pytest.raises(DataError, match="could not be unpacked"):
        unpack(archive, tmp_path / "out")


def test_a_damaged_member_is_not_put_in_place(tmp_path: Path) -> None:
    path = tmp_path / "bad.zip"
    make_zip(path, {"set/a.txt": b"alpha"})
    content = bytearray(path.read_bytes())
    content[content.index(b"set/a.txt") + len("set/a.txt")] ^= 255
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"bad\.zip could not be unpacked"):
        unpack(path, tmp_path / "out")
    assert list((tmp_path / "out/set").iterdir()) == []
