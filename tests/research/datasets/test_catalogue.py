"""The catalogue of datasets, and what it says about files that are missing, damaged or of another edition."""

from __future__ import annotations

import gzip
import hashlib
import re
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
from data_layouts import idx_bytes, random_images, write_idx, write_png

from shiftmend.errors import DataError
from shiftmend.research.datasets import catalogue
from shiftmend.research.datasets.catalogue import (
    CATALOGUE,
    Content,
    Entry,
    Progress,
    VerifyRow,
    find_entry,
    listing,
    verify,
)


def test_every_entry_is_complete_in_itself() -> None:
    assert {"mnist", "emnist", "usps", "cifar-10", "cifar-100", "cifar-10-c", "mnist-c", "mnist-m"} <= set(CATALOGUE)
    assert {"emnist-da", "camelyon17", "visda-c", "fashion-mnist", "kmnist", "cifar-100-c"} <= set(CATALOGUE)
    for name, entry in CATALOGUE.items():
        assert entry.name == name
        assert entry.summary
        assert entry.page.startswith("http")
        assert entry.arrangement
        assert entry.layouts
        assert all(entry.layouts)


def test_paths_stay_under_the_root_and_addresses_are_addresses() -> None:
    for entry in CATALOGUE.values():
        paths = [content.path for contents in entry.layouts for content in contents]
        paths += [download.path for download in entry.downloads]
        for path in paths:
            assert not PurePosixPath(path).is_absolute()
            assert ".." not in path
        for download in entry.downloads:
            assert download.urls
            assert all(re.fullmatch(r"https?://\S+", url) for url in download.urls)


def test_checksums_are_checksums_and_each_stands_for_one_file() -> None:
    by_sum: dict[str, set[str]] = {}
    for entry in CATALOGUE.values():
        pairs = [(download.md5, download.path) for download in entry.downloads]
        pairs += [(content.md5, content.path) for contents in entry.layouts for content in contents]
        for md5, path in pairs:
            if md5 is not None:
                assert re.fullmatch(r"[0-9a-f]{32}", md5)
                by_sum.setdefault(md5, set()).add(path)
    assert all(len(paths) == 1 for paths in by_sum.values())
    assert len(by_sum) > 60


def test_what_is_downloaded_alone_is_what_is_looked_for() -> None:
    """A file that is not unpacked has to be one of the contents, with the same checksum."""
    for entry in CATALOGUE.values():
        contents = {content.path: content for layout in entry.layouts for content in layout}
        for download in entry.downloads:
            if download.unpack is None:
                assert contents[download.path].md5 == download.md5


def test_good_files_have_the_shapes_they_are_held_against() -> None:
    contents = {content.path: content for entry in CATALOGUE.values() for part in entry.layouts for content in part}
    for path, shape in {
        "MNIST/raw/train-images-idx3-ubyte.gz": (60_000, 28, 28),
        "MNIST/raw/t10k-labels-idx1-ubyte.gz": (10_000,),
        "EMNIST/raw/emnist-balanced-train-labels-idx1-ubyte.gz": (112_800,),
        "EMNIST/raw/emnist-balanced-test-images-idx3-ubyte.gz": (18_800, 28, 28),
        "CIFAR-10-C/fog.npy": (50_000, 32, 32, 3),
        "CIFAR-100-C/labels.npy": (50_000,),
        "mnist_c/fog/train_images.npy": (60_000, 28, 28, 1),
        "mnist_c/fog/test_labels.npy": (10_000,),
    }.items():
        assert contents[path].shape == shape
        assert contents[path].exact_count != path.startswith("EMNIST")  # which is in use in other sizes
    for path in ("MNIST/raw/train-images-idx3-ubyte.gz", "FashionMNIST/raw/t10k-labels-idx1-ubyte.gz"):
        assert contents[path].md5_unpacked is not None


def test_an_archive_is_unpacked_to_where_its_contents_are_looked_for() -> None:
    for name in ("cifar-10", "cifar-100", "cifar-10-c", "cifar-100-c", "mnist-c"):
        (archive,) = CATALOGUE[name].downloads
        assert archive.md5 is not None
        assert archive.unpack is not None
        assert (archive.unpack.into, archive.unpack.drop) == (".", 0)
        assert all(content.path.startswith(archive.unpack.only) for content in CATALOGUE[name].layouts[0])
        assert archive.unpack.only.endswith("/")


def test_names_are_found_however_they_are_written() -> None:
    for name in ("cifar-10-c", "CIFAR-10-C", "cifar10c", "cifar10_c"):
        assert find_entry(name).name == "cifar-10-c"
    with pytest.raises(DataError, match=r"mnist, emnist.*'imagenet'"):
        find_entry("imagenet")


def test_listing_has_a_row_for_each() -> None:
    rows = {row.dataset: row for row in listing()}
    assert list(rows) == list(CATALOGUE)
    assert rows["mnist"].download_bytes == 9_912_422 + 28_881 + 1_648_877 + 4_542
    assert rows["usps"].download_bytes is None  # not 0: its sizes are not known
    assert rows["mnist"].fetchable
    assert not rows["emnist-da"].fetchable
    assert rows["emnist-da"].download_bytes is None
    assert rows["kmnist"].licence == "CC BY-SA 4.0"


def test_by_hand_says_which_file_goes_where(tmp_path: Path) -> None:
    assert str(tmp_path / "CIFAR-10-C.tar") in CATALOGUE["cifar-10-c"].by_hand(tmp_path)
    text = CATALOGUE["emnist-da"].by_hand(tmp_path)
    assert "zenodo.org/records/6602351" in text
    assert "EMNIST/<shift>/test" in text


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


IMAGES = random_images(4, 28, 28)
RAW = idx_bytes(IMAGES)
PUBLISHED = gzip.compress(RAW, 9, mtime=1)
IDX = "SET/raw/train-images-idx3-ubyte.gz"


def entry(*layouts: tuple[Content, ...]) -> dict[str, Entry]:
    return {"set": Entry("set", "a set", "https://example.org", layouts, arrangement="SET/...")}


def state(root: Path, *layouts: tuple[Content, ...], **options: bool) -> VerifyRow:
    (row,) = verify(root, catalogue=entry(*layouts), **options)
    return row


def test_nothing_there_is_missing_everywhere(tmp_path: Path) -> None:
    rows = verify(tmp_path)
    assert [row.dataset for row in rows] == list(CATALOGUE)
    assert {row.state for row in rows} == {"missing"}
    assert "MNIST/raw/train-images-idx3-ubyte.gz and 3 more" in rows[0].detail
    with pytest.raises(DataError, match=r"folder.*absent, which"):
        verify(tmp_path / "absent")


def test_only_those_named_and_progress(tmp_path: Path) -> None:
    seen: list[Progress] = []
    rows = verify(tmp_path, ["KMNIST", "usps"], report=seen.append)
    assert [row.dataset for row in rows] == ["usps", "kmnist"]
    assert {progress.dataset for progress in seen} == {"usps", "kmnist"}
    assert "USPS/usps.npz" in {progress.file for progress in seen}
    with pytest.raises(DataError, match="Expected the dataset"):
        verify(tmp_path, ["nothing"])


@pytest.mark.parametrize("form", ["published", "compressed anew", "uncompressed", "beside raw"])
def test_idx_files_are_judged_by_their_contents(tmp_path: Path, form: str) -> None:
    content = Content(IDX, md5=md5(PUBLISHED), md5_unpacked=md5(RAW), shape=(4, 28, 28))
    folder = tmp_path / "SET/raw"
    folder.mkdir(parents=True)
    if form == "published":
        (tmp_path / IDX).write_bytes(PUBLISHED)
    elif form == "compressed anew":
        (tmp_path / IDX).write_bytes(gzip.compress(RAW, 1))
    elif form == "uncompressed":
        (folder / "train-images-idx3-ubyte").write_bytes(RAW)
    else:
        (tmp_path / "SET/train-images-idx3-ubyte").write_bytes(RAW)
    assert state(tmp_path, (content,)).state == "complete"


def test_idx_damage(tmp_path: Path) -> None:
    content = Content(IDX, md5=md5(PUBLISHED), md5_unpacked=md5(RAW), shape=(4, 28, 28))
    path = tmp_path / IDX
    write_idx(path, 255 - IMAGES)  # another set of the same form
    row = state(tmp_path, (content,))
    assert row.state == "damaged"
    assert "the published content" in row.detail
    assert state(tmp_path, (content,), checksums=False).state == "complete"
    write_idx(path, IMAGES[:3])
    assert "an array [4, 28, 28]" in state(tmp_path, (content,), checksums=False).detail
    path.write_bytes(PUBLISHED[:-20])
    assert state(tmp_path, (content,)).state == "damaged"
    path.write_bytes(b"")
    assert "is empty" in state(tmp_path, (content,)).detail


def test_without_a_checksum_of_the_contents_it_is_said(tmp_path: Path) -> None:
    write_idx(tmp_path / IDX, IMAGES)
    row = state(tmp_path, (Content(IDX, md5=md5(PUBLISHED), shape=(4, 28, 28)),))
    assert row.state == "complete"
    assert "not byte for byte the published file" in row.detail


def test_another_edition_is_complete_with_a_note(tmp_path: Path) -> None:
    write_idx(tmp_path / IDX, IMAGES)
    row = state(tmp_path, (Content(IDX, shape=(6, 28, 28), exact_count=False),))
    assert row.state == "complete"
    assert "4 entries, the release has 6" in row.detail
    assert state(tmp_path, (Content(IDX, shape=(6, 30, 28), exact_count=False),)).state == "damaged"


def test_sizes_shapes_and_checksums_of_other_files(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"12345")
    good = Content("a.bin", size=5, md5=md5(b"12345"))
    assert state(tmp_path, (good,)) == VerifyRow("set", "complete", "1 item in place")
    assert "to have 6 bytes, got 5" in state(tmp_path, (Content("a.bin", size=6),)).detail
    assert "published MD5" in state(tmp_path, (Content("a.bin", md5=md5(b"other")),)).detail
    assert state(tmp_path, (Content("a.bin", md5=md5(b"other")),), checksums=False).state == "complete"
    np.save(tmp_path / "a.npy", np.zeros((2, 3), np.uint8))
    assert state(tmp_path, (Content("a.npy", shape=(2, 3)),)).state == "complete"
    assert state(tmp_path, (Content("a.npy", shape=(2, 3, 1)),)).state == "complete"
    assert state(tmp_path, (Content("a.npy"), Content("a.bin"))).detail == "2 items in place"
    assert state(tmp_path, (Content("a.npy", shape=(3, 3)),)).state == "damaged"
    whole = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "a.npy").write_bytes(whole[:-1])
    assert "truncated" in state(tmp_path, (Content("a.npy", shape=(2, 3)),)).detail
    np.savez(tmp_path / "a.npz", x=np.zeros(100, np.uint8))
    assert state(tmp_path, (Content("a.npz"),)).state == "complete"
    archive = bytearray((tmp_path / "a.npz").read_bytes())
    archive[180] ^= 255
    (tmp_path / "a.npz").write_bytes(archive)
    assert state(tmp_path, (Content("a.npz"),)).state == "damaged"
    (tmp_path / "a.pkl.gz").write_bytes(PUBLISHED[:-3])
    assert state(tmp_path, (Content("a.pkl.gz"),)).state == "damaged"


def test_folders_are_counted(tmp_path: Path) -> None:
    for number in range(3):
        write_png(tmp_path / f"set/{number}/a.png", np.zeros((2, 2), np.uint8))
    (tmp_path / "set/cache.npy").write_bytes(b"not an image")
    (tmp_path / "set/1/._a.png").write_bytes(b"what a Mac puts beside a file")
    write_png(tmp_path / "set/.trash/a.png", np.zeros((2, 2), np.uint8))
    assert state(tmp_path, (Content("set", images=3),)).detail == "1 item in place"
    assert "Expected 4 images" in state(tmp_path, (Content("set", images=4),)).detail
    assert "3 images, the release has 4" in state(tmp_path, (Content("set", images=4, exact_count=False),)).detail
    (tmp_path / "empty").mkdir()
    assert state(tmp_path, (Content("empty"),)).state == "damaged"


def test_one_whole_layout_is_enough_and_the_nearest_is_told(tmp_path: Path) -> None:
    first, second = (Content("a.bin", size=1), Content("b.bin", size=1)), (Content("c.bin", size=1), Content("d.bin"))
    (tmp_path / "c.bin").write_bytes(b"x")
    row = state(tmp_path, first, second)
    assert row.state == "missing"
    assert row.detail.startswith("no d.bin;")
    (tmp_path / "d.bin").write_bytes(b"x")
    (tmp_path / "a.bin").write_bytes(b"too long")
    assert state(tmp_path, first, second).state == "complete"
    (tmp_path / "d.bin").unlink()
    row = state(tmp_path, first, second)
    assert row.state == "damaged"
    assert "a.bin" in row.detail
    assert "more" not in row.detail
    (tmp_path / "b.bin").write_bytes(b"")
    assert state(tmp_path, first).detail.endswith("fetch it again. (and 1 more)")


def test_a_file_that_cannot_be_read_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(catalogue, "file_digest", refuse)
    (tmp_path / "a.bin").write_bytes(b"12345")
    row = state(tmp_path, (Content("a.bin", md5=md5(b"12345")), Content("b.bin")))
    assert row.state == "damaged"
    assert "a.bin cannot be read ([Errno 13] Permission denied); look at its permissions" in row.detail
    # nor does a folder that may not be looked into
    monkeypatch.setattr(Path, "exists", refuse)
    row = state(tmp_path, (Content("locked/a.bin"), Content("b.bin")))
    assert row.state == "damaged"
    assert "locked/a.bin cannot be read ([Errno 13] Permission denied); look at its permissions" in row.detail
