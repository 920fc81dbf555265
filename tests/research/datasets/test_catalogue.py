from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

import pytest

from shiftmend.errors import DataError
from shiftmend.research.datasets.catalogue import CATALOGUE, find_entry
from shiftmend.research.datasets.integrity import listing


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
    with pytest.raises(DataError, match="no dataset called 'imagenet'; expected one of mnist, emnist"):
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
