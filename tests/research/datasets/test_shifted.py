from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from data_layouts import python2_pickle, random_images, write_idx, write_png

from shiftmend.errors import DataError
from shiftmend.research.datasets.shifted import EMNIST_SHIFTS, cifar10_c, cifar100_c, emnist_da, mnist_c, mnist_m


def lay_out_cifar_c(root: Path, folder: str = "CIFAR-10-C", per_severity: int = 4) -> np.ndarray:
    base = root / folder
    base.mkdir(parents=True)
    images = random_images(5 * per_severity, 32, 32, 3)
    np.save(base / "fog.npy", images)
    np.save(base / "labels.npy", np.tile(np.arange(per_severity, dtype=np.uint8), 5))
    return images


@pytest.mark.parametrize("severity", [1, 3, 5])
def test_cifar_c_reads_one_severity(tmp_path: Path, severity: int) -> None:
    for folder, read in (("CIFAR-10-C", cifar10_c), ("CIFAR-100-C", cifar100_c)):
        images = lay_out_cifar_c(tmp_path, folder)
        split = read("fog", severity, tmp_path, per_severity=4)
        expected = images[4 * (severity - 1) : 4 * severity].transpose(0, 3, 1, 2)
        np.testing.assert_array_equal(split.images.numpy(), expected)
        assert split.images.is_contiguous()
        assert split.labels is not None
        assert split.labels.tolist() == [0, 1, 2, 3]
        assert split.name == f"{folder.lower()}-fog-{severity}"
        assert read("fog", root=tmp_path, per_severity=4).name == f"{folder.lower()}-fog-5"


def test_cifar_c_asserts_its_shape(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"CIFAR-10-C/fog\.npy is missing.*50000, 32, 32, 3.*fetch\(\"cifar-10-c\"\)"):
        cifar10_c("fog", 5, tmp_path)
    images = lay_out_cifar_c(tmp_path)
    path = tmp_path / "CIFAR-10-C/fog.npy"
    with pytest.raises(DataError, match=r"fog\.npy holds uint8 \[20, 32, 32, 3\]; expected uint8 \[50000, 32, 32, 3\]"):
        cifar10_c("fog", 5, tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=r"fog\.npy is truncated"):
        cifar10_c("fog", 5, tmp_path, per_severity=4)
    np.save(path, images.astype(np.float32))
    with pytest.raises(DataError, match=r"fog\.npy holds float32"):
        cifar10_c("fog", 5, tmp_path, per_severity=4)
    path.write_bytes(whole)
    for labels, found in ((np.zeros(19, np.uint8), r"uint8 \[19\]"), (np.full(20, 0.5), r"float64 \[20\]")):
        np.save(tmp_path / "CIFAR-10-C/labels.npy", labels)
        with pytest.raises(DataError, match=rf"labels\.npy holds {found}; expected 20 integer labels"):
            cifar10_c("fog", 5, tmp_path, per_severity=4)
    with pytest.raises(DataError, match="severities 1 to 5, got 0"):
        cifar10_c("fog", 0, tmp_path)
    with pytest.raises(DataError, match="no shift called 'rain'; expected one of brightness"):
        cifar10_c("rain", 5, tmp_path)


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
    with pytest.raises(DataError, match=r"zigzag/test_images\.npy is missing.*fetch\(\"mnist-c\"\)"):
        mnist_c("zigzag", "test", tmp_path)
    for labels, found in ((np.arange(5), r"int64 \[5\]"), (np.full(6, 0.5), r"float64 \[6\]")):
        np.save(folder / "train_labels.npy", labels)
        with pytest.raises(DataError, match=rf"train_labels\.npy holds {found}; expected 6 integer labels"):
            mnist_c("zigzag", "train", tmp_path)
    for wrong in (random_images(6, 32, 32), random_images(6, 28, 28, 3), images / np.float32(255)):
        np.save(folder / "train_images.npy", wrong)
        with pytest.raises(DataError, match=r"train_images\.npy holds .*; expected uint8 \[N, 28, 28, 1\]"):
            mnist_c("zigzag", "train", tmp_path)
    with pytest.raises(DataError, match="MNIST-C has no split called 'valid'"):
        mnist_c("zigzag", "valid", tmp_path)
    with pytest.raises(DataError, match="no shift called 'sky'"):
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
    with pytest.raises(DataError, match="MNIST-M has no split called 'valid'"):
        mnist_m("valid", tmp_path)
    lay_out_mnist_labels(tmp_path, [7, 2, 1])
    with pytest.raises(DataError, match=r"keras_mnistm\.pkl\.gz holds 4 images.*3 labels"):
        mnist_m("test", tmp_path)
    for wrong in ({"train": images[:4]}, {"test": images.astype("<f4")}, {"test": images[:, :20].copy()}):
        path.write_bytes(gzip.compress(python2_pickle(wrong)))
        with pytest.raises(DataError, match=r"lacks uint8 images \[N, 28, 28, 3\] under 'test'"):
            mnist_m("test", tmp_path)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match=r"keras_mnistm\.pkl\.gz cannot be read whole"):
        mnist_m("test", tmp_path)


def test_mnist_m_from_image_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"keras_mnistm\.pkl\.gz is missing"):
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
    with pytest.raises(DataError, match=r"9 class folders .*expected 10 class folders .*labels would be wrong"):
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
    with pytest.raises(DataError, match=r"12 class folders .*expected 47 class folders \(0, 1, 2, \.\.\. 46\)"):
        emnist_da("sky", "test", tmp_path)
    for split in ("train", "valid"):
        with pytest.raises(DataError, match=f"EMNIST/sky/{split} is missing: expected the folders 0 to 46"):
            emnist_da("sky", split, tmp_path)
    with pytest.raises(DataError, match="EMNIST-DA has no split called 'all'"):
        emnist_da("sky", "all", tmp_path)
    with pytest.raises(DataError, match="no shift called 'rain'"):
        emnist_da("rain", "test", tmp_path)
    assert len(EMNIST_SHIFTS) == 13
