from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_layouts import python2_pickle, random_images

from shiftmend.errors import DataError
from shiftmend.research.datasets.cifar import CIFAR100_CLASSES, cifar10, cifar10_c, cifar100, cifar100_c

PIXELS = random_images(30, 3072)
LABELS = np.arange(30, dtype=np.uint8) % 10


def lay_out_binary(root: Path) -> Path:
    folder = root / "cifar-10-batches-bin"
    folder.mkdir()
    rows = np.concatenate([LABELS[:, None], PIXELS], axis=1)
    for number in range(5):
        (folder / f"data_batch_{number + 1}.bin").write_bytes(rows[number * 5 : number * 5 + 5].tobytes())
    (folder / "test_batch.bin").write_bytes(rows[25:].tobytes())
    return folder


def lay_out_pickled(root: Path) -> Path:
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    for number, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        part = slice(number * 5, number * 5 + 5)
        batch = {
            "batch_label": f"batch {number}",
            "labels": LABELS[part].tolist(),
            "data": PIXELS[part],
            "filenames": [f"{i}.png" for i in range(5)],
        }
        (folder / name).write_bytes(python2_pickle(batch))
    return folder


@pytest.mark.parametrize("lay_out", [lay_out_binary, lay_out_pickled])
def test_both_releases_give_the_same(tmp_path: Path, lay_out: object) -> None:
    assert callable(lay_out)
    lay_out(tmp_path)
    train, test = cifar10("train", tmp_path), cifar10("test", tmp_path)
    np.testing.assert_array_equal(train.images.numpy(), PIXELS[:25].reshape(25, 3, 32, 32))
    np.testing.assert_array_equal(test.images.numpy(), PIXELS[25:].reshape(5, 3, 32, 32))
    assert train.labels is not None
    np.testing.assert_array_equal(train.labels.numpy(), LABELS[:25])
    assert train.classes[3] == "cat"
    assert (train.name, test.name) == ("cifar-10-train", "cifar-10-test")
    assert cifar10(root=tmp_path).name == "cifar-10-train"


def test_cifar100_has_its_fine_labels(tmp_path: Path) -> None:
    coarse, fine = np.full(30, 7, np.uint8), np.arange(70, 100, dtype=np.uint8)
    binary = tmp_path / "binary" / "cifar-100-binary"
    binary.mkdir(parents=True)
    rows = np.concatenate([coarse[:, None], fine[:, None], PIXELS], axis=1)
    (binary / "test.bin").write_bytes(rows.tobytes())
    (binary / "train.bin").write_bytes(rows[:4].tobytes())
    pickled = tmp_path / "pickled" / "cifar-100-python"
    pickled.mkdir(parents=True)
    batch = {"filenames": [], "fine_labels": fine.tolist(), "coarse_labels": coarse.tolist(), "data": PIXELS}
    (pickled / "test").write_bytes(python2_pickle(batch))
    for root in (tmp_path / "binary", tmp_path / "pickled"):
        split = cifar100("test", root)
        np.testing.assert_array_equal(split.images.numpy(), PIXELS.reshape(30, 3, 32, 32))
        assert split.labels is not None
        np.testing.assert_array_equal(split.labels.numpy(), fine)
        assert split.name == "cifar-100-test"
    train = cifar100(root=tmp_path / "binary")
    assert (train.name, len(train)) == ("cifar-100-train", 4)
    assert len(CIFAR100_CLASSES) == 100
    assert CIFAR100_CLASSES[0] == "apple"
    assert list(CIFAR100_CLASSES) == sorted(CIFAR100_CLASSES)


def test_truncation_missing_files_and_wrong_labels(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"cifar-10-batches-py.*cifar-10-batches-bin, which is missing.*fetch\(\"cifar-10\"\)"
    ):
        cifar10("train", tmp_path)
    folder = lay_out_binary(tmp_path)
    third = folder / "data_batch_3.bin"
    whole = third.read_bytes()
    third.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=r"3,073.*data_batch_3\.bin"):
        cifar10("train", tmp_path)
    third.write_bytes(whole[: 4 * 3073])  # cut between two records
    with pytest.raises(DataError, match=r"5 images.*data_batch_3.*got 4"):
        cifar10("train", tmp_path)
    third.write_bytes(bytes([99]) + whole[1:])
    with pytest.raises(DataError, match=r"cifar-10-batches-bin.*0 to 99"):
        cifar10("train", tmp_path)
    third.unlink()
    with pytest.raises(DataError, match=r"_3\.bin, .*missing.*fetch .*\"cifar-10\""):
        cifar10("train", tmp_path)
    third.write_bytes(b"")
    with pytest.raises(DataError, match="got 0 bytes"):
        cifar10("train", tmp_path)


def test_a_split_that_does_not_exist_is_not_taken_for_another(tmp_path: Path) -> None:
    lay_out_binary(tmp_path)
    for read, name in ((cifar10, "CIFAR-10"), (cifar100, "CIFAR-100")):
        with pytest.raises(DataError, match=f"{name}.*train, test.*'valid'"):
            read("valid", tmp_path)


class RunMe:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def test_a_pickled_batch_that_would_run_code_is_refused(tmp_path: Path) -> None:
    folder = lay_out_pickled(tmp_path)
    mark = tmp_path / "was-run"
    (folder / "test_batch").write_bytes(pickle.dumps({"data": RunMe(str(mark)), "labels": []}, 2))
    with pytest.raises(DataError, match=r"test_batch.*posix\.mkdir"):
        cifar10("test", tmp_path)
    assert not mark.exists()


LACKS = r"uint8 `data` \[N, 3072\] .*`labels`.*test_batch, got.*fetch\(\"cifar-10\"\)"


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        ({"labels": [0]}, LACKS),
        ({"data": PIXELS[:1]}, LACKS),
        ({"data": PIXELS[:2], "labels": [0]}, LACKS),
        ({"data": PIXELS[0], "labels": [0]}, LACKS),
        ({"data": PIXELS[:2, :100].copy(), "labels": [0, 1]}, LACKS),
        ({"data": PIXELS[:1].astype("<i4"), "labels": [0]}, LACKS),
        ({"data": PIXELS[:2], "labels": [0, "cat"]}, r"`labels`.*test_batch.*whole"),
        ({"data": PIXELS[:1], "labels": [10]}, r"cifar-10-batches-py.*10 to 10"),
        ({"data": PIXELS[:1], "labels": [-1]}, r"cifar-10-batches-py.*-1 to -1"),
        ({"data": PIXELS[:0], "labels": []}, "at least one image"),
    ],
)
def test_a_pickled_batch_of_another_form_is_refused(tmp_path: Path, batch: dict[str, object], sentence: str) -> None:
    folder = lay_out_pickled(tmp_path)
    (folder / "test_batch").write_bytes(python2_pickle(batch))
    with pytest.raises(DataError, match=sentence):
        cifar10("test", tmp_path)


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
    with pytest.raises(DataError, match=r"50000, .*fog\.npy, .*missing.*fetch\(\"cifar-10-c\"\)"):
        cifar10_c("fog", 5, tmp_path)
    images = lay_out_cifar_c(tmp_path)
    path = tmp_path / "CIFAR-10-C/fog.npy"
    with pytest.raises(DataError, match=r"\[50000, .*fog\.npy.*\[20, "):
        cifar10_c("fog", 5, tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=r"fog\.npy, truncated"):
        cifar10_c("fog", 5, tmp_path, per_severity=4)
    np.save(path, images.astype(np.float32))
    with pytest.raises(DataError, match=r"fog\.npy, got float32"):
        cifar10_c("fog", 5, tmp_path, per_severity=4)
    path.write_bytes(whole)
    for labels, found in ((np.zeros(19, np.uint8), r"uint8 \[19\]"), (np.full(20, 0.5), r"float64 \[20\]")):
        np.save(tmp_path / "CIFAR-10-C/labels.npy", labels)
        with pytest.raises(DataError, match=rf"20 integer.*labels\.npy.*{found}"):
            cifar10_c("fog", 5, tmp_path, per_severity=4)
    with pytest.raises(DataError, match=r"severity.*got 0"):
        cifar10_c("fog", 0, tmp_path)
    with pytest.raises(DataError, match=r"CIFAR-10-C.*brightness.*'rain'"):
        cifar10_c("rain", 5, tmp_path)
