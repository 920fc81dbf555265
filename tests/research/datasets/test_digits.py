from __future__ import annotations

import bz2
import gzip
from pathlib import Path

import numpy as np
import pytest
from data_layouts import idx_bytes, python2_pickle, random_images, write_idx, write_png

from shiftmend.errors import DataError
from shiftmend.research.datasets.digits import (
    EMNIST_SHIFTS,
    emnist,
    emnist_da,
    emnist_edition,
    fashion_mnist,
    kmnist,
    mnist,
    mnist_c,
    mnist_m,
    read_idx,
    usps,
)

LABELS = np.array([3, 1, 4, 1, 5], np.uint8)
IMAGES = random_images(5, 28, 28)


def lay_out_mnist(root: Path, folder: str = "MNIST/raw", suffix: str = ".gz", prefix: str = "t10k") -> None:
    write_idx(root / folder / f"{prefix}-images-idx3-ubyte{suffix}", IMAGES)
    write_idx(root / folder / f"{prefix}-labels-idx1-ubyte{suffix}", LABELS)


@pytest.mark.parametrize("folder", ["MNIST/raw", "MNIST"])
@pytest.mark.parametrize("suffix", [".gz", ""])
def test_mnist_compressed_or_not_in_raw_or_beside_it(tmp_path: Path, folder: str, suffix: str) -> None:
    lay_out_mnist(tmp_path, folder, suffix)
    split = mnist("test", tmp_path)
    np.testing.assert_array_equal(split.images.numpy(), IMAGES[:, None])
    assert split.labels is not None
    np.testing.assert_array_equal(split.labels.numpy(), LABELS)
    assert split.name == "mnist-test"
    assert split.classes == tuple("0123456789")


def test_the_relatives_have_folders_and_classes_of_their_own(tmp_path: Path) -> None:
    for folder in ("FashionMNIST/raw", "KMNIST/raw"):
        lay_out_mnist(tmp_path, folder, prefix="train")
        lay_out_mnist(tmp_path, folder, prefix="t10k")
    for split, name, sign in (
        (fashion_mnist(root=tmp_path), "fashion-mnist-train", "Dress"),
        (fashion_mnist("test", tmp_path), "fashion-mnist-test", "Dress"),
        (kmnist(root=tmp_path), "kmnist-train", "tsu"),
        (kmnist("test", tmp_path), "kmnist-test", "tsu"),
    ):
        assert split.labels is not None
        np.testing.assert_array_equal(split.labels.numpy(), LABELS)
        assert (split.name, split.classes[3]) == (name, sign)


@pytest.mark.parametrize("part", ["train", "test"])
def test_emnist_is_turned_upright(tmp_path: Path, part: str) -> None:
    write_idx(tmp_path / f"EMNIST/raw/emnist-balanced-{part}-images-idx3-ubyte.gz", IMAGES.transpose(0, 2, 1))
    write_idx(tmp_path / f"EMNIST/raw/emnist-balanced-{part}-labels-idx1-ubyte.gz", LABELS + 41)
    split = emnist(part, tmp_path)
    assert split.name == f"emnist-{part}"
    np.testing.assert_array_equal(split.images.numpy(), IMAGES[:, None])
    assert split.images.is_contiguous()
    assert split.labels is not None
    assert [split.classes[label] for label in split.labels] == ["q", "h", "r", "h", "t"]


@pytest.mark.parametrize(
    ("train", "test", "said"),
    [
        (112_800, 18_800, ""),
        (
            94_000,
            18_800,
            "EMNIST, rebuilt: not the official Balanced split (its train file has 94,000 images, officially 112,800)",
        ),
        (47, 94, " 47 images, officially 112,800; its test file has 94 images, officially 18,800)"),
    ],
)
def test_an_emnist_of_other_numbers_says_so(tmp_path: Path, train: int, test: int, said: str) -> None:
    for split, count in (("train", train), ("test", test)):
        path = tmp_path / f"EMNIST/raw/emnist-balanced-{split}-labels-idx1-ubyte.gz"
        write_idx(path, np.zeros(count, np.uint8))
    found = emnist_edition(tmp_path)
    assert found.endswith(said)
    assert bool(found) == bool(said)


def test_an_emnist_file_without_a_single_label_is_another_edition(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_idx(tmp_path / f"EMNIST/raw/emnist-balanced-{split}-labels-idx1-ubyte.gz", np.zeros((), np.uint8))
    assert "its train file has 1 images, officially 112,800" in emnist_edition(tmp_path)


def test_of_an_emnist_that_is_not_there_nothing_is_said(tmp_path: Path) -> None:
    assert emnist_edition(tmp_path) == ""


def test_usps_from_libsvm_text(tmp_path: Path) -> None:
    values = np.linspace(-1, 1, 512).reshape(2, 256)
    lines = [
        f"{label} " + " ".join(f"{i + 1}:{v:.7f}" for i, v in enumerate(row))
        for label, row in zip((10, 1), values, strict=True)
    ]
    lines.append("4 1:-1 256:0.5")  # sparse: what is left out is 0
    (tmp_path / "USPS").mkdir()
    (tmp_path / "USPS/usps.t.bz2").write_bytes(bz2.compress("\n".join(lines).encode() + b"\n"))
    split = usps("test", tmp_path)
    assert split.labels is not None
    assert split.labels.tolist() == [9, 0, 3]
    reference = np.round((values + 1) / 2 * 255).reshape(2, 1, 16, 16)
    assert np.abs(split.images[:2].numpy() - reference).max() <= 1  # a printed half may round either way
    assert split.images[2].flatten()[[0, 1, 255]].tolist() == [0, 128, 191]


def test_usps_from_npz(tmp_path: Path) -> None:
    (tmp_path / "USPS").mkdir()
    images = random_images(5, 16, 16)
    np.savez(tmp_path / "USPS/usps.npz", x_train=images, y_train=LABELS, x_test=images[:2], y_test=LABELS[:2])
    np.testing.assert_array_equal(usps("train", tmp_path).images.numpy(), images[:, None])
    test = usps("test", tmp_path)
    assert test.labels is not None
    assert (test.name, test.labels.tolist()) == ("usps-test", [3, 1])
    with pytest.raises(DataError, match=r"USPS.*'valid'"):
        usps("valid", tmp_path)
    for wrong, labels in ((images[:, :8], LABELS), (images, LABELS[:, None])):
        np.savez(tmp_path / "USPS/usps.npz", x_train=wrong, y_train=labels)
        with pytest.raises(DataError, match=r"uint8 \[N, 16, 16\]"):
            usps("train", tmp_path)
    np.savez(tmp_path / "USPS/usps.npz", x_train=images, y_train=LABELS + 0.5)
    with pytest.raises(DataError, match=r"usps\.npz.*float64"):
        usps("train", tmp_path)
    np.savez(tmp_path / "USPS/usps.npz", x_train=images.astype(float), y_train=LABELS)
    with pytest.raises(DataError, match=r"usps\.npz.*float64.*uint8"):
        usps("train", tmp_path)
    with pytest.raises(DataError, match="an array 'x_test'"):
        usps("test", tmp_path)


def test_a_missing_file_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"MNIST/raw/train-images-idx3-ubyte\.gz, which is missing.*fetch\(\"mnist\"\)"):
        mnist("train", tmp_path)
    with pytest.raises(DataError, match=r"usps\.npz.*usps\.bz2, which is missing"):
        usps("train", tmp_path)
    with pytest.raises(DataError, match=r"train, test.*'valid'"):
        mnist("valid", tmp_path)


def test_damage_is_told_in_one_sentence(tmp_path: Path) -> None:
    lay_out_mnist(tmp_path)
    images = tmp_path / "MNIST/raw/t10k-images-idx3-ubyte.gz"
    labels = tmp_path / "MNIST/raw/t10k-labels-idx1-ubyte.gz"
    whole = images.read_bytes()

    def complaint() -> str:
        with pytest.raises(DataError) as caught:
            mnist("test", tmp_path)
        message = str(caught.value)
        assert "\n" not in message
        return message

    images.write_bytes(whole[:-100])  # an interrupted download
    assert "t10k-images" in complaint()
    images.write_bytes(whole[:10] + bytes([whole[10] | 7]) + whole[11:])  # a kind of block that does not exist
    assert "t10k-images-idx3-ubyte.gz, which cannot be read whole" in complaint()
    images.write_bytes(b"<html>not found</html>")
    assert "t10k-images" in complaint()
    images.write_bytes(gzip.compress(idx_bytes(IMAGES)[:-1]))  # whole gzip, too little in it
    assert "Expected 5 x 28 x 28" in complaint()
    images.write_bytes(gzip.compress(idx_bytes(IMAGES)[:9]))
    assert "inside its header" in complaint()
    for place in range(3):  # no idx file, or one of larger numbers
        other = bytearray(idx_bytes(IMAGES))
        other[place] ^= 1
        images.write_bytes(gzip.compress(other))
        assert "begins with 00 00 08" in complaint()
    images.write_bytes(labels.read_bytes())  # the wrong file under the right name
    assert "N x 28 x 28" in complaint()
    for wrong in (random_images(5, 28, 30), IMAGES[:0]):
        write_idx(images, wrong)
        assert "N x 28 x 28" in complaint()
    images.write_bytes(gzip.compress(b"\0\0"))
    assert "begins with 00 00 08" in complaint()
    images.write_bytes(whole)
    write_idx(labels, LABELS[:-1])
    assert "one label for each of 5 images" in complaint()
    write_idx(labels, LABELS + 5)
    assert "Expected labels from 0 to 9" in complaint()


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("3 1:1\n3 257:0.1", r"LIBSVM.*line 2.*257"),
        ("3 0:0.1", r"line 1.*pixel 0"),
        ("3 1;0.1", "a LIBSVM file"),
        ("eleven 1:0.1", "a LIBSVM file"),
        ("99999999999999999999 1:0.1", "a LIBSVM file"),
        ("0 1:0.1", "a USPS file"),
        ("11 1:0.1", "a USPS file"),
        ("3 1:1.01", "a USPS file"),
        ("3 1:-1.01", "a USPS file"),
        ("3 1:nan", "a USPS file"),
        ("", "a USPS file"),
    ],
)
def test_text_that_is_not_usps_is_refused(tmp_path: Path, line: str, sentence: str) -> None:
    (tmp_path / "USPS").mkdir()
    path = tmp_path / "USPS/usps.bz2"
    path.write_bytes(bz2.compress(line.encode()))
    with pytest.raises(DataError, match=sentence):
        usps("train", tmp_path)
    path.write_bytes(bz2.compress(b"3 1:0.5\n" * 1000)[:-10])
    with pytest.raises(DataError, match=r"usps\.bz2.*read whole"):
        usps("train", tmp_path)


def test_read_idx_of_any_rank(tmp_path: Path) -> None:
    for shape in ((7,), (2, 3), (2, 3, 4, 5)):
        array = random_images(*shape)
        write_idx(tmp_path / "a-idx", array)
        np.testing.assert_array_equal(read_idx(tmp_path / "a-idx"), array)


@pytest.mark.parametrize("channel", [True, False])
def test_mnist_c(tmp_path: Path, channel: bool) -> None:
    folder = tmp_path / "mnist_c/zigzag"
    folder.mkdir(parents=True)
    images = random_images(6, 28, 28)
    np.save(folder / "train_images.npy", images[..., None] if channel else images)
    np.save(folder / "train_labels.npy", np.arange(6))
    split = mnist_c("zigzag", "train", tmp_path)
    np.testing.assert_array_equal(split.images.numpy(), images[:, None])
    assert split.labels is not None
    assert split.labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert (split.name, split.classes) == ("mnist-c-zigzag-train", tuple("0123456789"))
    with pytest.raises(DataError, match=r"zigzag/test_images\.npy, which is missing.*fetch\(\"mnist-c\"\)"):
        mnist_c("zigzag", "test", tmp_path)
    for labels, found in ((np.arange(5), r"int64 \[5\]"), (np.full(6, 0.5), r"float64 \[6\]")):
        np.save(folder / "train_labels.npy", labels)
        with pytest.raises(DataError, match=rf"6 integer.*train_labels\.npy.*{found}"):
            mnist_c("zigzag", "train", tmp_path)
    for wrong in (random_images(6, 32, 32), random_images(6, 28, 28, 3), images / np.float32(255)):
        np.save(folder / "train_images.npy", wrong)
        with pytest.raises(DataError, match=r"\[N, 28, 28, 1\].*train_images\.npy"):
            mnist_c("zigzag", "train", tmp_path)
    with pytest.raises(DataError, match=r"MNIST-C.*'valid'"):
        mnist_c("zigzag", "valid", tmp_path)
    with pytest.raises(DataError, match=r"MNIST-C.*'sky'"):
        mnist_c("sky", "train", tmp_path)


def lay_out_mnist_labels(root: Path, labels: list[int]) -> None:
    for prefix in ("train", "t10k"):
        write_idx(root / f"MNIST/raw/{prefix}-images-idx3-ubyte.gz", random_images(len(labels), 28, 28))
        write_idx(root / f"MNIST/raw/{prefix}-labels-idx1-ubyte.gz", np.array(labels))


def test_mnist_m_from_the_released_archive(tmp_path: Path) -> None:
    images = random_images(8, 28, 28, 3)
    (tmp_path / "MNISTM").mkdir()
    path = tmp_path / "MNISTM/keras_mnistm.pkl.gz"
    path.write_bytes(gzip.compress(python2_pickle({"train": images[:4], "test": images[4:]})))
    lay_out_mnist_labels(tmp_path, [7, 2, 1, 0])
    for split, part in (("train", images[:4]), ("test", images[4:])):
        read = mnist_m(split, tmp_path)
        np.testing.assert_array_equal(read.images.numpy(), part.transpose(0, 3, 1, 2))
        assert read.labels is not None
        assert read.labels.tolist() == [7, 2, 1, 0]
        assert (read.name, read.classes) == (f"mnist-m-{split}", tuple("0123456789"))
    with pytest.raises(DataError, match=r"MNIST-M.*'valid'"):
        mnist_m("valid", tmp_path)
    lay_out_mnist_labels(tmp_path, [7, 2, 1])
    with pytest.raises(DataError, match=r"keras_mnistm\.pkl\.gz.*labels, 3, got 4"):
        mnist_m("test", tmp_path)
    for wrong in ({"train": images[:4]}, {"test": images.astype("<f4")}, {"test": images[:, :20].copy()}):
        path.write_bytes(gzip.compress(python2_pickle(wrong)))
        with pytest.raises(DataError, match=r"\[N, 28, 28, 3\].*'test'"):
            mnist_m("test", tmp_path)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match=r"keras_mnistm\.pkl\.gz.*read whole"):
        mnist_m("test", tmp_path)


def test_mnist_m_from_image_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"keras_mnistm\.pkl\.gz, which is missing"):
        mnist_m("test", tmp_path)
    images = random_images(10, 28, 28, 3)
    images[:] = images[..., :1]  # in colour also where no picture has any
    for digit in range(10):
        write_png(tmp_path / f"MNISTM/test/{digit}/0.png", images[digit, ..., 0])
    split = mnist_m(root=tmp_path)
    assert split.name == "mnist-m-test"
    np.testing.assert_array_equal(split.images.numpy(), images.transpose(0, 3, 1, 2))
    assert split.labels is not None
    assert split.labels.tolist() == list(range(10))
    (tmp_path / "MNISTM/test/4/0.png").unlink()
    (tmp_path / "MNISTM/test/4").rmdir()
    with pytest.raises(DataError, match=r"10 class.*9 class folders"):
        mnist_m("test", tmp_path)


def lay_out_emnist_da(root: Path, shift: str = "sky", split: str = "test", classes: int = 12) -> np.ndarray:
    images = random_images(2 * classes, 28, 28, 3)
    for number in range(classes):
        for sample in range(2):
            write_png(root / f"EMNIST/{shift}/{split}/{number}/{sample}.png", images[2 * number + sample])
    return images


def test_emnist_da_keeps_the_numeric_order_of_classes(tmp_path: Path) -> None:
    names = tuple("0123456789AB")
    images = lay_out_emnist_da(tmp_path)
    for _ in range(2):  # decoded, then from the cache
        split = emnist_da("sky", "test", tmp_path, classes=names)
        np.testing.assert_array_equal(split.images.numpy(), images.transpose(0, 3, 1, 2))
        assert split.labels is not None
        assert split.labels.tolist() == [number for number in range(12) for _ in range(2)]
        assert split.classes == names
        assert split.name == "emnist-da-sky-test"
    assert len(list((tmp_path / "EMNIST/sky").glob("emnist-da-sky-test-*.npy"))) == 1
    elsewhere = tmp_path / "cache"
    emnist_da("sky", "test", tmp_path, classes=names, cache=elsewhere)
    assert len(list(elsewhere.glob("*.npy"))) == 1


def test_emnist_da_needs_only_the_split_asked_for_and_all_its_classes(tmp_path: Path) -> None:
    lay_out_emnist_da(tmp_path)
    with pytest.raises(DataError, match=r"\.\.\. 46.*12 class"):
        emnist_da("sky", "test", tmp_path)
    for split in ("train", "valid"):
        with pytest.raises(DataError, match=f"EMNIST/sky/{split}, .*missing"):
            emnist_da("sky", split, tmp_path)
    with pytest.raises(DataError, match=r"EMNIST-DA.*'all'"):
        emnist_da("sky", "all", tmp_path)
    with pytest.raises(DataError, match=r"EMNIST-DA.*'rain'"):
        emnist_da("rain", "test", tmp_path)
    assert len(EMNIST_SHIFTS) == 13
