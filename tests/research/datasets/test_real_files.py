"""The published files themselves, where they are at hand: under SHIFTMEND_DATA."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from shiftmend.errors import DataError
from shiftmend.inputs.images import Split
from shiftmend.research.datasets.catalogue import verify
from shiftmend.research.datasets.cifar import cifar10
from shiftmend.research.datasets.digits import emnist, mnist, usps
from shiftmend.research.datasets.partitions import emnist_source

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(not os.environ.get("SHIFTMEND_DATA"), reason="SHIFTMEND_DATA is not set"),
]


def read(reader: Callable[[str], Split], split: str) -> Split:
    try:
        return reader(split)
    except DataError as error:
        if "is missing" in str(error):
            pytest.skip(str(error))
        raise


def counts(split: Split) -> list[int]:
    assert split.labels is not None
    return torch.bincount(split.labels, minlength=len(split.classes)).tolist()


def test_mnist() -> None:
    train, test = read(mnist, "train"), read(mnist, "test")
    assert train.images.shape == (60_000, 1, 28, 28)
    assert counts(train) == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert counts(test) == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert round(float(train.images.float().mean() / 255), 4) == 0.1307  # the well-known mean
    assert [row.state for row in verify(names=["mnist"])] == ["complete"]


def test_emnist_is_upright() -> None:
    """The mean image of each digit resembles MNIST's more than its transpose does."""
    letters, digits = read(emnist, "train"), read(mnist, "train")
    assert letters.labels is not None
    assert digits.labels is not None
    assert set(counts(letters)) == {2_000} or set(counts(letters)) == {2_400}
    resemblance = []
    for digit in range(10):
        ours = letters.images[letters.labels == digit].float().mean(0).flatten()
        lying = letters.images[letters.labels == digit].float().mean(0).transpose(1, 2).flatten()
        theirs = digits.images[digits.labels == digit].float().mean(0).flatten()
        upright, turned = (torch.corrcoef(torch.stack([image, theirs]))[0, 1] for image in (ours, lying))
        assert upright > turned
        resemblance.append(float(upright))
    assert sum(resemblance) / 10 > 0.7
    bar = letters.images[letters.labels == letters.classes.index("T")].float().mean(0)[0]
    assert bar[:10].sum() > 1.5 * bar[-10:].sum()  # the bar of a T is on top
    train, validation = emnist_source(letters.labels)
    assert len(train) == 94_000
    assert validation is None or len(validation) == 18_800
    assert len(read(emnist, "test")) == 18_800


def test_cifar10() -> None:
    train, test = read(cifar10, "train"), read(cifar10, "test")
    assert train.images.shape == (50_000, 3, 32, 32)
    assert counts(train) == [5_000] * 10
    assert counts(test) == [1_000] * 10
    mean = train.images.float().mean((0, 2, 3)) / 255
    assert [round(float(value), 4) for value in mean] == [0.4914, 0.4822, 0.4465]  # red, green, blue in this order
    assert [train.classes[label] for label in test.labels[:4]] == ["cat", "ship", "ship", "airplane"]  # type: ignore[index]


def test_usps() -> None:
    train, test = read(usps, "train"), read(usps, "test")
    assert (len(train), len(test)) == (7_291, 2_007)
    assert train.images.shape[1:] == (1, 16, 16)
    assert counts(train) == [1194, 1005, 731, 658, 652, 556, 664, 645, 542, 644]
    assert counts(test) == [359, 264, 198, 166, 200, 160, 170, 147, 166, 177]
    # ink is bright on black, as in MNIST
    assert train.images[:, :, 0, 0].float().mean() < train.images[:, :, 8, 8].float().mean()
