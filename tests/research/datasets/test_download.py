"""Fetching from a server on this machine: nothing here leaves the loopback interface."""

from __future__ import annotations

import errno
import hashlib
import io
import socket
import stat
import tarfile
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from shiftmend.errors import DataError
from shiftmend.research.datasets import download
from shiftmend.research.datasets.catalogue import Content, Download, Entry, Progress, Unpack, VerifyRow
from shiftmend.research.datasets.download import fetch, unpack

BODY = bytes(range(256)) * 3000
MD5 = hashlib.md5(BODY).hexdigest()


@dataclass
class Site:
    """A file server that can misbehave."""

    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True  # whether it can continue a download
    cut: list[int] = field(default_factory=list)  # the next answers break off after so many bytes
    failures: list[int] = field(default_factory=list)  # the next answers are these errors
    wrong_place: bool = False
    chunked: bool = False
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    agents: set[str] = field(default_factory=set)
    address: str = ""

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        asked = request.headers.get("Range")
        self.requests.append((request.path, asked))
        self.agents.add(request.headers.get("User-Agent", ""))
        content = self.files.get(request.path)
        if self.failures:
            request.send_error(self.failures.pop(0))
            return
        if content is None:
            request.send_error(404)
            return
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and self.ranges else 0
        if start and start >= len(content):
            request.send_response(416)
            request.send_header("Content-Range", f"bytes */{len(content)}")
            request.end_headers()
            return
        request.send_response(206 if start else 200)
        if start:
            place = start - 1 if self.wrong_place else start
            request.send_header("Content-Range", f"bytes {place}-{len(content) - 1}/{len(content)}")
        body = content[start:]
        if self.chunked:
            request.send_header("Transfer-Encoding", "chunked")
            request.end_headers()
            request.wfile.write(b"%x\r\n%s\r\n" % (len(body), body[: self.cut[0]] if self.cut else body))
            if not self.cut:
                request.wfile.write(b"0\r\n\r\n")
        else:
            request.send_header("Content-Length", str(len(body)))
            request.end_headers()
            request.wfile.write(body[: self.cut[0]] if self.cut else body)
        if self.cut:
            self.cut.pop(0)
            request.close_connection = True


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("no_proxy", "*")
    content = Site()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            content.answer(self)
            self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    content.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield content
    server.shutdown()
    server.server_close()
    thread.join()


def dead_address() -> str:
    """A port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/file.bin"


def one_file(*urls: str, md5: str | None = MD5, sha256: str | None = None) -> dict[str, Entry]:
    content = Content("SET/file.bin", md5=md5, size=None)
    download = Download("SET/file.bin", urls, md5=md5, sha256=sha256)
    return {
        "set": Entry("set", "a set", "https://example.org/set", ((content,),), (download,), arrangement="SET/file.bin")
    }


def get(root: Path, catalogue: dict[str, Entry], told: list[Progress] | None = None, attempts: int = 3) -> VerifyRow:
    report = (lambda _: None) if told is None else told.append
    return fetch("set", root, catalogue=catalogue, pause=0, timeout=5, attempts=attempts, report=report)


def test_a_file_is_fetched_once(site: Site, tmp_path: Path) -> None:
    site.files["/file.bin"] = BODY
    told: list[Progress] = []
    catalogue, root = one_file(f"{site.address}/file.bin"), tmp_path / "not yet there"
    row = get(root, catalogue, told)
    assert row.state == "complete"
    assert (root / "SET/file.bin").read_bytes() == BODY
    assert [p.name for p in (root / "SET").iterdir()] == ["file.bin"]
    assert {(p.dataset, p.file, p.total) for p in told} == {("set", "SET/file.bin", len(BODY))}
    assert told[-1].done == len(BODY)
    assert [p.done for p in told] == sorted(p.done for p in told)
    assert get(root, catalogue).state == "complete"
    assert len(site.requests) == 1
    assert all(agent.startswith("shiftmend/") for agent in site.agents)


def test_a_truncated_download_is_resumed(site: Site, tmp_path: Path) -> None:
    site.files["/file.bin"] = BODY
    site.cut = [1000, 500_000]
    told: list[Progress] = []
    get(tmp_path, one_file(f"{site.address}/file.bin"), told)
    assert (tmp_path / "SET/file.bin").read_bytes() == BODY
    assert [asked for _, asked in site.requests] == [None, "bytes=1000-", "bytes=501000-"]
    assert any("broke off after 1,000 of 768,000 bytes" in progress.message for progress in told)


def test_progress_does_not_use_attempts_up(site: Site, tmp_path: Path) -> None:
    site.files["/file.bin"] = BODY
    site.cut = [50_000] * 12
    get(tmp_path, one_file(f"{site.address}/file.bin"), attempts=1)
    assert (tmp_path / "SET/file.bin").read_bytes() == BODY


def test_resuming_over_several_calls(site: Site, tmp_path: Path) -> None:
    site.files["/file.bin"] = BODY
    catalogue = one_file(f"{site.address}/file.bin")
    partial = tmp_path / "SET/file.bin.partial"
    partial.parent.mkdir()
    partial.write_bytes(BODY[:123_456])  # from a call that was killed
    get(tmp_path, catalogue)
    assert site.requests == [("/file.bin", "bytes=123456-")]
    assert (tmp_path / "SET/file.bin").read_bytes() == BODY
    assert not partial.exists()


def test_a_whole_partial_file_needs_no_more_than_its_checksum(site: Site, tmp_path: Path) -> None:
    site.files["/file.bin"] = BODY
    partial = tmp_path / "SET/file.bin.partial"
    partial.parent.mkdir()
    partial.write_bytes(BODY)
    get(tmp_path, one_file(f"{site.address}/file.bin"))
    assert (tmp_path / "SET/file.bin").read_bytes() == BODY
    assert len(site.requests) == 1


def test_a_partial_file_outlives_a_busy_server_also_without_a_checksum(site: Site, tmp_path: Path) -> None:
    site.files["/file.bin"] = BODY
    site.failures = [503]
    partial = tmp_path / "SET/file.bin.partial"
    partial.parent.mkdir()
    partial.write_bytes(BODY[:1000])
    get(tmp_path, one_file(f"{site.address}/file.bin", md5=None))
    assert [asked for _, asked in site.requests] == ["bytes=1000-", "bytes=1000-"]
    assert (tmp_path / "SET/file.bin").read_bytes() == BODY


@pytest.mark.parametrize(
    ("left", "md5"), [(b"of another file", MD5), (BODY + b"too long", MD5), (BODY + b"too long", None)]
)
def test_a_partial_file_that_does_not_fit_is_dropped(site: Site, tmp_path: Path, left: bytes, md5: str | None) -> None:
    site.files["/file.bin"] = BODY
    partial = tmp_path / "SET/file.bin.partial"
    partial.parent.mkdir()
    partial.write_bytes(left)
    get(tmp_path, one_file(f"{site.address}/file.bin", md5=md5))
    assert (tmp_path / "SET/file.bin").read_bytes() == BODY
    assert [asked for _, asked in site.requests] == [f"bytes={len(left)}-", None]


def test_a_server_that_cannot_resume_starts_over(site: Site, tmp_path: Path) -> None:
    site.files["/file.bin"] = BODY
    site.ranges = False
    site.cut = [300_000]
    told: list[Progress] = []
    get(tmp_path, one_file(f"{site.address}/file.bin"), told)
    assert (tmp_path / "SET/file.bin").read_bytes() == BODY
    assert [asked for _, asked in site.requests] == [None, "bytes=300000-"]
    assert any("cannot continue a download; starting over" in progress.message for progress in told)


def test_a_server_that_resumes_at_the_wrong_place_is_not_believed(site: Site, tmp_path: Path) -> None:
    site.files["/file.bin"] = BODY
    site.wrong_place = True
    site.cut = [1000]
    told: list[Progress] = []
    get(tmp_path, one_file(f"{site.address}/file.bin"), told)
    assert any("at another place than asked" in progress.message for progress in told)
    assert [asked for _, asked in site.requests] == [None, "bytes=1000-", None]
    assert (tmp_path / "SET/file.bin").read_bytes() == BODY


def test_a_chunked_download_without_length_that_breaks_off(site: Site, tmp_path: Path) -> None:
    site.files["/file.bin"] = BODY
    site.chunked = True
    site.cut = [400_000]
    get(tmp_path, one_file(f"{site.address}/file.bin", md5=None))
    assert (tmp_path / "SET/file.bin").read_bytes() == BODY
    assert len(site.requests) == 2


def test_a_wrong_checksum_is_not_put_in_place(site: Site, tmp_path: Path) -> None:
    site.files["/file.bin"] = b"<html>please log in</html>"
    with pytest.raises(DataError, match=rf"MD5 [0-9a-f]+ .*{MD5}.*SET/file\.bin"):
        get(tmp_path, one_file(f"{site.address}/file.bin"))
    assert list((tmp_path / "SET").iterdir()) == []
    assert len(site.requests) == 1  # the same again would not help
    site.files["/file.bin"] = b""
    with pytest.raises(DataError, match="no content"):
        get(tmp_path, one_file(f"{site.address}/file.bin", md5=None))
    assert list((tmp_path / "SET").iterdir()) == []


def test_sha256_is_checked_too(site: Site, tmp_path: Path) -> None:
    site.files["/file.bin"] = BODY
    url = f"{site.address}/file.bin"
    with pytest.raises(DataError, match="SHA256"):
        get(tmp_path, one_file(url, md5=None, sha256="0" * 64))
    get(tmp_path, one_file(url, md5=None, sha256=hashlib.sha256(BODY).hexdigest()))
    assert (tmp_path / "SET/file.bin").read_bytes() == BODY


def test_a_dead_mirror_then_a_bad_one_then_a_good_one(site: Site, tmp_path: Path) -> None:
    site.files["/good.bin"] = BODY
    site.files["/bad.bin"] = BODY[:-1] + b"!"
    told: list[Progress] = []
    urls = (dead_address(), f"{site.address}/absent.bin", f"{site.address}/bad.bin", f"{site.address}/good.bin")
    get(tmp_path, one_file(*urls), told)
    assert (tmp_path / "SET/file.bin").read_bytes() == BODY
    assert [path for path, _ in site.requests] == ["/absent.bin", "/bad.bin", "/good.bin"]
    messages = [progress.message for progress in told if progress.message]
    assert len(messages) == 3
    assert "404" in messages[1]
    assert "MD5" in messages[2]


def test_a_second_mirror_continues_what_the_first_began(site: Site, tmp_path: Path) -> None:
    site.files["/a.bin"] = site.files["/b.bin"] = BODY
    site.cut = [200_000]
    get(tmp_path, one_file(f"{site.address}/a.bin", f"{site.address}/b.bin"))
    assert site.requests == [("/a.bin", None), ("/b.bin", "bytes=200000-")]
    assert (tmp_path / "SET/file.bin").read_bytes() == BODY


def test_without_a_checksum_mirrors_are_not_mixed(site: Site, tmp_path: Path) -> None:
    site.files["/a.bin"] = BODY
    site.files["/b.bin"] = BODY[::-1]
    site.cut = [200_000]
    get(tmp_path, one_file(f"{site.address}/a.bin", f"{site.address}/b.bin", md5=None))
    assert site.requests == [("/a.bin", None), ("/b.bin", None)]
    assert (tmp_path / "SET/file.bin").read_bytes() == BODY[::-1]


def test_a_busy_server_is_asked_again(site: Site, tmp_path: Path) -> None:
    site.files["/file.bin"] = BODY
    site.failures = [503, 429]
    told: list[Progress] = []
    get(tmp_path, one_file(f"{site.address}/file.bin"), told)
    assert (tmp_path / "SET/file.bin").read_bytes() == BODY
    assert sum("trying again in" in progress.message for progress in told) == 2
    site.failures = [503, 503, 503]
    (tmp_path / "SET/file.bin").unlink()
    with pytest.raises(DataError, match="answered 503"):
        get(tmp_path, one_file(f"{site.address}/file.bin"))


def test_it_waits_twice_as_long_each_time(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    # A stand-in for the module: other threads of this process go on sleeping as they did.
    monkeypatch.setattr(download, "time", SimpleNamespace(**vars(time) | {"sleep": waited.append}))
    site.failures = [503] * 4
    with pytest.raises(DataError, match="answered 503"):
        fetch("set", tmp_path, catalogue=one_file(f"{site.address}/file.bin"), attempts=4, pause=3)
    assert waited == [3, 6, 12]


def test_a_refusal_is_not_repeated(site: Site, tmp_path: Path) -> None:
    site.failures = [403]
    with pytest.raises(DataError, match="answered 403"):
        get(tmp_path, one_file(f"{site.address}/file.bin"))
    assert len(site.requests) == 1


def test_offline_it_says_which_file_goes_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with pytest.raises(DataError) as caught:
        get(tmp_path, one_file(dead_address()))
    message = str(caught.value)
    assert "example.org/set in a browser" in message
    assert f"put them at {tmp_path / 'SET/file.bin'} and run this again" in message
    assert "\n" not in message
    with pytest.raises(DataError, match="is no http address"):
        get(tmp_path, one_file("file:///etc/passwd"))
    with pytest.raises(DataError, match="no address is known"):
        get(tmp_path, one_file())


def test_two_processes_do_not_write_into_one_file(site: Site, tmp_path: Path) -> None:
    site.files["/file.bin"] = BODY
    catalogue = one_file(f"{site.address}/file.bin", md5=None)  # nothing would tell one whole file from two mixed
    refusals: list[str] = []

    def another(progress: Progress) -> None:
        with pytest.raises(DataError) as caught:
            get(tmp_path, catalogue)
        refusals.append(str(caught.value))

    fetch("set", tmp_path, catalogue=catalogue, pause=0, timeout=5, report=another)
    assert "Another process is fetching" in refusals[0]
    assert (tmp_path / "SET/file.bin").read_bytes() == BODY
    assert [p.name for p in (tmp_path / "SET").iterdir()] == ["file.bin"]
    (tmp_path / "SET/file.bin").rename(tmp_path / "SET/.file.bin.lock")  # as if its process had been killed
    assert get(tmp_path, catalogue).state == "complete"


def test_a_drive_without_locks_is_written_to_all_the_same(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    site.files["/file.bin"] = BODY
    assert get(tmp_path, one_file(f"{site.address}/file.bin")).state == "complete"


def test_what_cannot_be_fetched_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"emnist-da.*https://zenodo"):
        fetch("EMNIST-DA", tmp_path)


def test_a_folder_that_cannot_be_written(site: Site, tmp_path: Path) -> None:
    site.files["/file.bin"] = BODY
    (tmp_path / "SET").write_text("a file where a folder is needed")
    with pytest.raises(DataError, match=r"SET/file\.bin cannot be written"):
        get(tmp_path, one_file(f"{site.address}/file.bin"))


def archive_bytes(kind: str, files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(buffer, "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
    else:
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            for name, content in files.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def archive_entry(content: bytes, url: str, name: str) -> dict[str, Entry]:
    download = Download(name, (url,), md5=hashlib.md5(content).hexdigest(), unpack=Unpack("SET", only="inner/", drop=1))
    contents = (Content("SET/a.bin", size=3), Content("SET/b.bin", size=3))
    return {"set": Entry("set", "a set", "https://example.org", (contents,), (download,), arrangement="SET/{a,b}.bin")}


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_an_archive_is_unpacked_and_removed(site: Site, tmp_path: Path, kind: str) -> None:
    content = archive_bytes(kind, {"inner/a.bin": b"aaa", "inner/b.bin": b"bbb", "other/c.bin": b"unwanted"})
    site.files["/set"] = content
    catalogue = archive_entry(content, f"{site.address}/set", f"set.{kind}")
    told: list[Progress] = []
    assert get(tmp_path, catalogue, told).state == "complete"
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*")) == ["SET", "SET/a.bin", "SET/b.bin"]
    assert told[-1].message == "unpacking"
    assert get(tmp_path, catalogue).state == "complete"
    assert len(site.requests) == 1  # the archive is gone, and not needed
    (tmp_path / "SET/b.bin").unlink()
    fetch("set", tmp_path, catalogue=catalogue, keep_archives=True)
    assert (tmp_path / f"set.{kind}").exists()
    assert (tmp_path / "SET/b.bin").read_bytes() == b"bbb"


def test_an_archive_put_there_by_hand_is_used_and_kept(tmp_path: Path) -> None:
    content = archive_bytes("zip", {"inner/a.bin": b"aaa", "inner/b.bin": b"bbb"})
    (tmp_path / "set.zip").write_bytes(content)
    row = get(tmp_path, archive_entry(content, dead_address(), "set.zip"))
    assert row.state == "complete"
    assert (tmp_path / "set.zip").exists()


def test_an_archive_that_lacks_a_file_is_reported(site: Site, tmp_path: Path) -> None:
    content = archive_bytes("zip", {"inner/a.bin": b"aaa"})
    site.files["/set"] = content
    with pytest.raises(DataError, match=r"fetched.*missing.*SET/b\.bin"):
        get(tmp_path, archive_entry(content, f"{site.address}/set", "set.zip"))


def test_a_damaged_file_is_replaced_and_good_ones_are_left(site: Site, tmp_path: Path) -> None:
    names = ("a", "b")
    contents = tuple(Content(f"SET/{n}.bin", md5=hashlib.md5(n.encode()).hexdigest()) for n in names)
    downloads = tuple(Download(c.path, (f"{site.address}/{Path(c.path).name}",), md5=c.md5) for c in contents)
    catalogue = {"set": Entry("set", "a set", "https://example.org", (contents,), downloads, arrangement="SET/*.bin")}
    site.files = {f"/{n}.bin": n.encode() for n in names}
    (tmp_path / "SET").mkdir()
    (tmp_path / "SET/a.bin").write_bytes(b"a")
    (tmp_path / "SET/b.bin").write_bytes(b"x")
    assert get(tmp_path, catalogue).state == "complete"
    assert [path for path, _ in site.requests] == ["/b.bin"]
    assert (tmp_path / "SET/b.bin").read_bytes() == b"b"


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
    with pytest.raises(DataError, match=r"files absent/\*"):
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
    with pytest.raises(DataError, match="out of the folder"):
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
    with pytest.raises(DataError, match="link or a device"):
        unpack(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_links_and_encryption_in_zip_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.zip"
    with zipfile.ZipFile(path, "w") as archive:
        info = zipfile.ZipInfo("link")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(info, "/etc/passwd")
    with pytest.raises(DataError, match=r"'link'.*device"):
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
    with pytest.raises(DataError, match=r"files\..*unpacked"):
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
    with pytest.raises(DataError, match=r"bad\.zip.*unpacked"):
        unpack(path, tmp_path / "out")
    assert list((tmp_path / "out/set").iterdir()) == []


def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "set.zip"
    make_zip(path, {"größe": b"content"})
    path.write_bytes(path.read_bytes().replace("größe".encode(), b"gr\xff\xff\xff\xffe"))
    with pytest.raises(DataError, match="could not be unpacked"):
        unpack(path, tmp_path / "out")


def test_a_planted_link_is_not_written_through(tmp_path: Path) -> None:
    make_zip(tmp_path / "set.zip", {"a": b"content"})
    (tmp_path / "precious").write_bytes(b"old")
    (tmp_path / "out").mkdir()
    for name in (".a.partial", "a"):
        (tmp_path / "out" / name).symlink_to(tmp_path / "precious")
    unpack(tmp_path / "set.zip", tmp_path / "out")
    assert (tmp_path / "precious").read_bytes() == b"old"
    assert (tmp_path / "out" / "a").read_bytes() == b"content"
    assert sorted(found.name for found in (tmp_path / "out").iterdir()) == ["a"]
